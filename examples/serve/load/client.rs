//! The service that a load runs on, and its clients.

use std::process::Stdio;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use http_body_util::{BodyStream, Full};
use kv_examples::error::ExampleError;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::work::{HangUp, Request};
use crate::http::{self, HttpClient};

/// The service, and connections to it.
pub struct LoadClient {
    child: tokio::sync::Mutex<Child>,
    addr: String,
    client: HttpClient,
}

/// How a request ended.
pub enum Ended {
    /// With all tokens, after so long, the first after so long.
    Complete {
        /// The number of tokens.
        tokens: usize,
        /// From the request to its first token.
        first: Duration,
    },
    /// With other tokens than it must have.
    Wrong(String),
    /// The client has hung up.
    HungUp,
    /// With an error.
    Failed(String),
}

impl LoadClient {
    /// Starts the service with these arguments.
    pub async fn start(arguments: &[String]) -> Result<LoadClient, ExampleError> {
        let program = std::env::current_exe().map_err(ExampleError::io("find this program"))?;
        let mut command = Command::new(program);
        command.args(arguments.iter().skip(1)).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().map_err(ExampleError::io("start the service"))?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            let mut lines = BufReader::new(stdout);
            lines.read_line(&mut line).await.map_err(ExampleError::io("start the service"))?;
            // Read to the end, so that the service can write.
            tokio::spawn(async move {
                let mut rest = String::new();
                while lines.read_line(&mut rest).await.is_ok_and(|read| read > 0) {
                    rest.clear();
                }
            });
        }
        let Some((_, addr)) = line.trim_end().split_once("http://") else {
            return Err(ExampleError::Rank {
                rank: "the service".to_owned(),
                how: "was never ready".to_owned(),
            });
        };
        Ok(LoadClient { child: child.into(), addr: addr.to_owned(), client: http::client() })
    }

    /// What the service says of itself.
    pub async fn health(&self) -> Value {
        http::get_json(&self.client, &self.addr, "/health").await.unwrap_or_default()
    }

    /// The processes of the service: their names and numbers.
    pub async fn pids(&self) -> Vec<(String, u64)> {
        let health = self.health().await;
        let mut pids = vec![("router".to_owned(), health["pid"].as_u64().unwrap_or_default())];
        for rank in health["ranks"].as_array().into_iter().flatten() {
            let name = rank["rank"].as_str().unwrap_or_default().to_owned();
            pids.push((name, rank["pid"].as_u64().unwrap_or_default()));
        }
        pids
    }

    /// Waits until no engine has a request; then gives up all kept prefixes, and returns what the engines say.
    pub async fn quiet(&self, within: Duration) -> Value {
        let patience = Instant::now() + within;
        loop {
            let health = self.health().await;
            let mut ranks = health["ranks"].as_array().into_iter().flatten();
            let quiet = ranks.all(|rank| rank["pages"]["requests"] == 0 && rank["requests"] == 0);
            if quiet || Instant::now() > patience {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let reset = hyper::Request::post(format!("http://{}/reset_prefix_cache", self.addr));
        if let Ok(reset) = reset.body(Full::default()) {
            let _ = self.client.request(reset).await;
        }
        self.health().await
    }

    /// Streams one answer.
    pub async fn stream(&self, request: &Request<'_>) -> Ended {
        let told = self.told(request);
        match request.hang_up {
            Some(HangUp::After(millis)) => {
                // Dropping the request ends its connection.
                let told = tokio::time::timeout(Duration::from_millis(millis), told).await;
                told.map_or(Ended::HungUp, |told| told.unwrap_or_else(Ended::Failed))
            }
            _ => told.await.unwrap_or_else(Ended::Failed),
        }
    }

    async fn told(&self, request: &Request<'_>) -> Result<Ended, String> {
        let body = json!({
            "prompt": request.prompt, "max_tokens": request.expected.len(), "stream": true, "return_token_ids": true,
        });
        let post = hyper::Request::post(format!("http://{}/v1/completions", self.addr))
            .body(Full::from(Bytes::from(body.to_string())))
            .map_err(|error| error.to_string())?;
        let started = Instant::now();
        let response = self.client.request(post).await.map_err(|error| error.to_string())?;
        let status = response.status();
        if !status.is_success() {
            let body = http::read_answer(response.into_body()).await.unwrap_or_default();
            return Err(format!("{status}: {}", String::from_utf8_lossy(&body)));
        }
        let mut frames = BodyStream::new(response.into_body());
        let (mut text, mut tokens, mut first) = (Vec::new(), Vec::new(), None);
        while let Some(frame) = frames.next().await {
            let frame = frame.map_err(|error| error.to_string())?;
            text.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
            while let Some(end) = text.windows(2).position(|window| window == b"\n\n") {
                let event: Vec<u8> = text.drain(..end + 2).collect();
                let Some(data) = event.strip_prefix(b"data: ") else { continue };
                if data.starts_with(b"[DONE]") {
                    return Ok(match tokens == request.expected {
                        true => Ended::Complete { tokens: tokens.len(), first: first.unwrap_or_default() },
                        false => Ended::Wrong(format!("{tokens:?} instead of {:?}", request.expected)),
                    });
                }
                let event: Value = serde_json::from_slice(data).map_err(|error| error.to_string())?;
                if let Some(message) = event["error"]["message"].as_str() {
                    return Err(message.to_owned());
                }
                let ids = event["choices"][0]["token_ids"].as_array().into_iter().flatten();
                tokens.extend(ids.filter_map(|id| u32::try_from(id.as_u64()?).ok()));
                first.get_or_insert_with(|| started.elapsed());
                if matches!(request.hang_up, Some(HangUp::With(count)) if tokens.len() >= count) {
                    return Ok(Ended::HungUp);
                }
            }
        }
        Err("the stream broke off".to_owned())
    }

    /// Ends the service, and waits for its end.
    pub async fn stop(&self) {
        let mut child = self.child.lock().await;
        if let Some(pid) = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?)) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = child.wait().await;
    }
}
