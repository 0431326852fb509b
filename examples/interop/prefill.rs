//! Our prefill side: takes the commands that the peers' own drivers give to a prefill side.
//!
//! | command | to | does |
//! |---|---|---|
//! | `hello` | both | says who we are |
//! | `finish {"reqs": [{"id", "blocks", "ntok"}]}` | vLLM | lends the blocks of finished requests; answers the transfer parameters |
//! | `send {"reqs": [{"room", "pages"[, "chunks"]}]}` | SGLang | sends pages; answers when all requests have ended |
//! | `state` | both | the requests that were sent, those that failed, and which pages are not back |
//! | `abort {"ids": […]}` | both | aborts requests |
//! | `harm {"harm": {…}}` | both | sends a signal once so many more requests have ended |
//! | `quit` | both | ends |

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use kv_transfer::params::{RemoteKv, TransferParams};
use kv_transfer::{AuxIndex, Lease, PageList, RequestId, Room, SessionOptions, TransferMode};
use serde_json::{Map, Value, json};

use crate::control::{Command, Control};
use crate::engine::Engine;
use crate::error::PairError;
use crate::fields;
use crate::harm::Harm;
use crate::options::{Dialect, Options};
use crate::receive::millis;
use crate::sending::{Computed, Sending};

/// How long the loop sleeps if nothing happens.
const IDLE: Duration = Duration::from_millis(100);

/// Serves commands until `quit`.
pub fn serve(options: &Options, engine: &Engine, control: &mut Control) -> Result<(), PairError> {
    let mut prefill = Prefill { options, engine, sending: Sending::default(), batches: Vec::new(), rows: 0 };
    let mut last = Instant::now();
    loop {
        while let Some(command) = control.next() {
            last = Instant::now();
            if command.name == "quit" {
                command.answer(json!({"bye": true}));
                return Ok(());
            }
            prefill.obey(command);
        }
        prefill.sending.step(engine)?;
        prefill.answer();
        if options.idle_exit > 0.0 && last.elapsed().as_secs_f64() > options.idle_exit {
            return Ok(());
        }
        engine.wait(&[engine.as_fd(), control.as_fd()], IDLE);
    }
}

struct Prefill<'a> {
    options: &'a Options,
    engine: &'a Engine,
    sending: Sending,
    /// Commands that are answered when their requests have ended.
    batches: Vec<Batch>,
    /// Aux rows that were used so far.
    rows: usize,
}

struct Batch {
    command: Command,
    rooms: Vec<String>,
    begun: Instant,
    patience: Duration,
}

impl Prefill<'_> {
    fn obey(&mut self, command: Command) {
        let done = match (command.name.as_str(), self.options.cache.dialect) {
            ("hello", _) => Ok(self.hello()),
            ("state", _) => Ok(self.sending.json(self.engine)),
            ("finish", Dialect::Vllm) => self.finish(&command.body),
            ("send", Dialect::Sglang) => match self.send(&command.body) {
                Ok(rooms) => {
                    let seconds = command.body.get("timeout").and_then(Value::as_f64);
                    let patience = Duration::from_secs_f64(seconds.unwrap_or(self.options.timeout).max(0.0));
                    self.batches.push(Batch { command, rooms, begun: Instant::now(), patience });
                    return;
                }
                Err(error) => Err(error),
            },
            ("abort", _) => self.abort(&command.body),
            ("harm", _) => self.harm(&command.body),
            (name, _) => {
                let why = format!("no command {name}");
                return command.refuse(404, why);
            }
        };
        match done {
            Ok(answer) => command.answer(answer),
            Err(error) => command.refuse(500, error),
        }
    }

    fn hello(&self) -> Value {
        let cache = &self.options.cache;
        let side_channel = self.engine.side_channel().unwrap_or_default();
        let (host, port) = side_channel.rsplit_once(':').unwrap_or_default();
        json!({
            "engine_id": self.options.engine_id, "role": "prefill", "host": host,
            "port": port.parse::<u16>().unwrap_or(0), "layers": cache.layers, "nblocks": cache.blocks,
            "block_tokens": cache.block, "tp": cache.tp, "pid": std::process::id(),
            "bootstrap": self.engine.bootstrap(), "published": self.engine.is_published(),
        })
    }

    fn finish(&mut self, body: &Value) -> Result<Value, PairError> {
        let requests = fields::list("finish", body, "reqs")?;
        let params =
            requests.iter().map(|request| self.finish_one(request)).collect::<Result<Vec<_>, _>>()?;
        Ok(json!({ "params": params }))
    }

    fn finish_one(&mut self, request: &Value) -> Result<Value, PairError> {
        let name = fields::text("finish", request, "id")?;
        let tokens = fields::number("finish", request, "ntok")?;
        let blocks = fields::blocks("finish", request, "blocks")?;
        let lease = Lease::Renewable(Duration::from_secs_f64(self.options.lease));
        let mode = TransferMode::from(self.options.mode);
        let session = SessionOptions::default().with(|session| {
            session.mode = Some(mode);
            session.lease = Some(lease);
            session.tokens = Some(tokens);
            session.deadline = Some(self.options.timeout() + Duration::from_secs_f64(self.options.lease));
        });
        let room = Room::Request(RequestId::new(name)?);
        let pages = PageList::from_pages(blocks.iter().copied())?;
        let computed = Computed {
            name: name.to_owned(),
            room: room.clone(),
            blocks,
            aux: None,
            chunks: self.options.chunks,
            options: session,
        };
        let leases = self.sending.send(self.engine, computed)?;
        let addr = &self.engine.side_channel().unwrap_or_default();
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        let kept = RemoteKv::granted(self.engine.args(), addr, room, tokens, &pages, &leases, lease)?;
        Ok(TransferParams::decode(mode, kept.side_channel(addr)?).to_value())
    }

    fn send(&mut self, body: &Value) -> Result<Vec<String>, PairError> {
        let mut rooms = Vec::new();
        for request in fields::list("send", body, "reqs")? {
            let number = fields::number("send", request, "room")? as u64;
            let blocks = fields::blocks("send", request, "pages")?;
            let row = (self.rows % self.options.cache.aux_rows) as u32;
            self.rows += 1;
            self.engine.write_aux(row, number)?;
            let chunks = request.get("chunks").and_then(Value::as_u64).unwrap_or(1) as usize;
            let session =
                SessionOptions::default().with(|session| session.deadline = Some(self.options.timeout()));
            let computed = Computed {
                name: number.to_string(),
                room: Room::Number(number),
                blocks,
                aux: Some(AuxIndex(row)),
                chunks: chunks.max(self.options.chunks),
                options: session,
            };
            self.sending.send(self.engine, computed)?;
            rooms.push(number.to_string());
        }
        Ok(rooms)
    }

    fn abort(&mut self, body: &Value) -> Result<Value, PairError> {
        let names: Vec<&str> = fields::list("abort", body, "ids")?.iter().filter_map(Value::as_str).collect();
        self.sending.abort(&names);
        Ok(json!({"aborted": names.len()}))
    }

    fn harm(&mut self, body: &Value) -> Result<Value, PairError> {
        if let Some(harm) = Harm::of(body)? {
            self.sending.harm(harm);
        }
        Ok(json!({}))
    }

    /// Answers the commands whose requests have all ended, or took too long.
    fn answer(&mut self) {
        for batch in std::mem::take(&mut self.batches) {
            let ended = batch.rooms.iter().all(|room| self.sending.result(room).is_some());
            if !ended && batch.begun.elapsed() < batch.patience + Duration::from_secs(5) {
                self.batches.push(batch);
                continue;
            }
            let rooms: Map<String, Value> = batch
                .rooms
                .iter()
                .map(|room| {
                    let (status, why) = match self.sending.result(room) {
                        Some(Ok(())) => (4, None),
                        Some(Err(why)) => (0, Some(why)),
                        None => (3, Some("the session has not ended")),
                    };
                    (room.clone(), json!({"status": status, "why": why}))
                })
                .collect();
            let ms = millis(batch.begun.elapsed());
            batch.command.answer(json!({"rooms": rooms, "ms": ms}));
        }
    }
}
