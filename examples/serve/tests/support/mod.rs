//! The server as processes of its own, and a client that says every byte itself.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kv_examples::model::{Model, ModelConfig, Weights};
use kv_examples::monolithic;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

pub const COMPLETIONS: &str = "/v1/completions";
pub const CHATS: &str = "/v1/chat/completions";

/// Some prompt of this length.
pub fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|i| (i * 7919 + len) % 1024).collect()
}

/// The server; it is killed at the latest with this value.
pub struct Serve {
    child: Child,
    /// Where the router takes requests.
    pub addr: String,
}

/// An answer to a request.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Serve {
    /// Starts the server, at some free port, with these options besides.
    pub fn start(options: &[&str]) -> Serve {
        Serve::start_with(options, Stdio::inherit())
    }

    /// The same, with what the server writes to standard error.
    pub fn start_with(options: &[&str], errors: Stdio) -> Serve {
        let mut command = program();
        command.args(["--listen", "127.0.0.1:0"]).args(options);
        if !options.contains(&"--lease-seconds") {
            command.args(["--lease-seconds", "5"]);
        }
        let mut child = command.stdout(Stdio::piped()).stderr(errors).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (_, addr) = line.trim_end().split_once("http://").expect("the server has not started");
        Serve { child, addr: addr.to_owned() }
    }

    /// What the router says of all processes.
    pub fn health(&self) -> Value {
        serde_json::from_slice(&get(&self.addr, "/health").body).unwrap()
    }

    /// What a process says of itself, such as `prefill/0`.
    pub fn rank(&self, name: &str) -> Value {
        let health = self.health();
        let rank = health["ranks"].as_array().unwrap().iter().find(|rank| rank["rank"] == name);
        rank.cloned().unwrap()
    }

    /// Waits until no process has a request, and returns what the processes say.
    pub fn quiet(&self) -> Vec<Value> {
        let patience = Instant::now() + Duration::from_secs(60);
        loop {
            let ranks = self.health()["ranks"].as_array().unwrap().clone();
            if ranks.iter().all(|rank| rank["requests"] == 0 && rank["pages"]["requests"] == 0) {
                return ranks;
            }
            assert!(Instant::now() < patience, "requests never ended: {ranks:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until nothing is under way, and checks that every page is free once the prefixes are given up.
    pub fn check_pages(&self) {
        let patience = Instant::now() + Duration::from_secs(60);
        loop {
            self.quiet();
            assert_eq!(post(&self.addr, "/reset_prefix_cache", "").status, 200);
            let ranks = self.quiet();
            for rank in &ranks {
                assert_eq!(rank["quarantined"], 0, "{rank}");
            }
            if ranks.iter().all(|rank| rank["pages"]["free"] == rank["pages"]["capacity"]) {
                return;
            }
            // The end of a request that was hung up may have left its prefix just now.
            assert!(Instant::now() < patience, "pages are missing: {ranks:?}");
        }
    }

    /// The numbers of all processes, as Prometheus gets them.
    pub fn metrics(&self) -> String {
        String::from_utf8(get(&self.addr, "/metrics").body).unwrap()
    }

    /// The sum of all numbers with this name and all of these labels, such as `process="prefill/0"`.
    pub fn count(&self, name: &str, labels: &[&str]) -> u64 {
        count(&self.addr, name, labels)
    }

    /// Where a process takes requests, such as `prefill/0`.
    pub fn addr_of(&self, name: &str) -> String {
        self.rank(name)["addr"].as_str().unwrap().to_owned()
    }

    /// Kills a process.
    pub fn kill(&self, name: &str) {
        let pid = self.rank(name)["pid"].as_i64().unwrap();
        signal(pid, Signal::KILL);
    }

    /// Asks the server to end, and returns whether it ended well, and the processes that it had.
    pub fn terminate(mut self) -> (bool, Vec<i64>) {
        let health = self.health();
        let pids = health["ranks"].as_array().unwrap().iter().map(|rank| rank["pid"].as_i64().unwrap());
        let pids = pids.collect();
        signal(i64::from(self.child.id()), Signal::TERM);
        (self.child.wait().unwrap().success(), pids)
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn signal(pid: i64, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// The program, as cargo has built it beside the tests.
fn program() -> Command {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().unwrap().with_file_name("examples").join("serve");
    assert!(program.exists(), "{} is missing: build the example first", program.display());
    Command::new(program)
}

/// One engine process without our router; it is killed at the latest with this value.
pub struct Alone {
    child: Child,
    /// Where the process takes requests.
    pub addr: String,
}

impl Alone {
    /// Starts a process of this side, at some free port.
    pub fn start(side: &str, options: &[&str]) -> Alone {
        let mut child = program().arg(side).args(options).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Alone { child, addr: line.trim_end().to_owned() }
    }

    /// Waits until the process has no request, and checks that every page is free once the prefixes are given up.
    pub fn check_pages(&self) {
        let patience = Instant::now() + Duration::from_secs(60);
        let health = || get(&self.addr, "/health").json();
        while health()["pages"]["requests"] != 0 {
            assert!(Instant::now() < patience, "requests never ended: {}", health());
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(post(&self.addr, "/reset_prefix_cache", "").status, 200);
        let health = health();
        assert_eq!(health["pages"]["free"], health["pages"]["capacity"], "{health}");
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The sum of all numbers with this name and all of these labels, as the process at this address tells them.
pub fn count(addr: &str, name: &str, labels: &[&str]) -> u64 {
    let metrics = String::from_utf8(get(addr, "/metrics").body).unwrap();
    let of_name = metrics.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('{'));
    let with_labels = of_name.filter(|rest| labels.iter().all(|label| rest.contains(label)));
    with_labels.map(|rest| rest.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap() as u64).sum()
}

/// A connection with a request that was sent.
pub fn send(addr: &str, method: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    // The server may answer before it has read all of it.
    let _ = stream.write_all(body);
    stream
}

/// Reads an answer to the end.
pub fn receive(mut stream: TcpStream) -> Reply {
    let mut bytes = Vec::new();
    if let Err(error) = stream.read_to_end(&mut bytes) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "no answer");
    }
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap().to_lowercase();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let body = bytes[end + 4..].to_vec();
    let body = if head.contains("transfer-encoding: chunked") { unchunked(&body) } else { body };
    Reply { status, head, body }
}

fn unchunked(mut rest: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = rest.windows(2).position(|window| window == b"\r\n") {
        let length = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
        if length == 0 {
            break;
        }
        body.extend_from_slice(&rest[end + 2..end + 2 + length]);
        rest = &rest[end + 4 + length..];
    }
    body
}

pub fn get(addr: &str, path: &str) -> Reply {
    receive(send(addr, "GET", path, "", b""))
}

pub fn post(addr: &str, path: &str, body: &str) -> Reply {
    receive(send(addr, "POST", path, "", body.as_bytes()))
}

/// The answer to a JSON request that must succeed.
pub fn ask(addr: &str, path: &str, body: &Value) -> Value {
    let reply = post(addr, path, &body.to_string());
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    reply.json()
}

/// A request for `max_tokens` tokens after `prompt`.
pub fn completion(prompt: &[u32], max_tokens: usize) -> Value {
    json!({ "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": true })
}

/// The tokens in an answer.
pub fn tokens(answer: &Value) -> Vec<u32> {
    let ids = answer["choices"][0]["token_ids"].as_array().expect("token ids");
    ids.iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The events of a stream, of which the last must be the end.
    pub fn events(&self) -> Vec<Value> {
        let text = String::from_utf8(self.body.clone()).unwrap();
        let mut events: Vec<&str> =
            text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        assert_eq!(events.pop(), Some("[DONE]"), "{text}");
        events.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    /// The message of an error, which must have OpenAI's form.
    pub fn error(&self) -> String {
        let error = &self.json()["error"];
        assert!(error["type"].is_string() && error["code"].is_string(), "{error}");
        error["message"].as_str().unwrap().to_owned()
    }
}

/// What the model of the server generates in this process.
pub fn monolithic(prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let config = ModelConfig::small();
    let model = Model::new(config.clone(), Weights::random(&config, 1));
    let samples = monolithic::generate(&model, prompt, &[], max_tokens).unwrap();
    samples.iter().map(|sample| sample.token).collect()
}
