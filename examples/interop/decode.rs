//! Our decode side: receives what a peer has computed. Either it takes commands in the form of the peers' own
//! drivers, or it drives the peer itself.
//!
//! | command | does |
//! |---|---|
//! | `hello` | says who we are |
//! | `recv {"reqs": [{"params", "ntok", "src_blocks"[, "id", "blocks"]}]}` | from vLLM: receives requests by their transfer parameters, and compares every byte |
//! | `recv {"reqs": [{"room", "pages", "src_pages"}]}` | from SGLang: receives rooms, and compares every byte and the aux row |
//! | `state` | says which pages are not back |
//! | `quit` | ends |
//!
//! `recv` also takes `timeout` in seconds, `abort_after` (how many requests end before the others are aborted)
//! and `harm`.

use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use kv_transfer::params::TransferParams;
use kv_transfer::{AuxIndex, Room, SessionOptions, TransferMode};
use serde_json::{Value, json};

use crate::control::{self, Control};
use crate::engine::Engine;
use crate::error::PairError;
use crate::fields;
use crate::harm::Harm;
use crate::options::{CacheOptions, Dialect, Options, Run};
use crate::order::Order;
use crate::receive::{Conditions, Received, Wanted, millis, receive};

/// How long the peer may take to free what we have received. Only a failure takes so long.
const FREED_WITHIN: Duration = Duration::from_secs(60);

/// Serves commands until `quit`.
pub fn serve(options: &Options, engine: &mut Engine, control: &mut Control) -> Result<(), PairError> {
    let mut last = Instant::now();
    loop {
        while let Some(command) = control.next() {
            last = Instant::now();
            let done = match command.name.as_str() {
                "hello" => Ok(hello(options, engine)),
                "recv" => recv(options, engine, &command.body),
                "state" => engine
                    .sweep()
                    .map(|()| json!({"pages_out": engine.pool.num_out(), "quarantine": engine.quarantine()})),
                "quit" => {
                    command.answer(json!({"bye": true}));
                    return Ok(());
                }
                name => Err(PairError::json("command", "name", &json!(name))),
            };
            match done {
                Ok(answer) => command.answer(answer),
                Err(error) => command.refuse(500, error),
            }
        }
        if options.idle_exit > 0.0 && last.elapsed().as_secs_f64() > options.idle_exit {
            return Ok(());
        }
        engine.wait(&[control.as_fd()], Duration::from_millis(100));
    }
}

fn hello(options: &Options, engine: &Engine) -> Value {
    let CacheOptions { layers, blocks, block, tp, .. } = options.cache;
    json!({
        "engine_id": options.engine_id, "role": "decode", "layers": layers, "nblocks": blocks,
        "block_tokens": block, "tp": tp, "pid": std::process::id(), "side_channel": engine.side_channel(),
    })
}

/// Obeys the command `recv`.
fn recv(options: &Options, engine: &mut Engine, body: &Value) -> Result<Value, PairError> {
    let seconds = body.get("timeout").and_then(Value::as_f64).unwrap_or(options.timeout);
    let timeout = Duration::from_secs_f64(seconds.clamp(0.001, 1e6));
    let mut free = Order::new(options.cache.blocks, options.seed);
    let requests = fields::list("recv", body, "reqs")?.iter().enumerate();
    let wanted = requests.map(|(number, request)| wanted(options, request, number, timeout, &mut free));
    let wanted = wanted.collect::<Result<Vec<_>, _>>()?;
    let mut conditions = Conditions {
        timeout,
        settle: Duration::from_secs_f64(body.get("settle").and_then(Value::as_f64).unwrap_or(options.settle)),
        abort_after: body.get("abort_after").and_then(Value::as_u64).map(|after| after as usize),
        harm: Harm::of(body)?,
    };
    let received = receive(engine, wanted, &mut conditions)?;
    Ok(with_rooms(options, engine, &received, received.json(engine)))
}

/// What a request of the command `recv` asks for.
fn wanted(
    options: &Options,
    request: &Value,
    number: usize,
    timeout: Duration,
    free: &mut Order,
) -> Result<Wanted, PairError> {
    let session = SessionOptions::default().with(|session| session.deadline = Some(timeout));
    if options.cache.dialect == Dialect::Sglang {
        let room = fields::number("recv", request, "room")? as u64;
        return Ok(Wanted {
            name: room.to_string(),
            room: Room::Number(room),
            addr: options.bootstrap.clone(),
            options: session,
            blocks: fields::blocks("recv", request, "pages")?,
            aux: Some(AuxIndex((number % options.cache.aux_rows) as u32)),
            source: fields::blocks("recv", request, "src_pages")?,
            prefix: 0,
        });
    }
    let json = request.get("params").ok_or_else(|| PairError::json("recv", "params", request))?;
    let params = TransferParams::from_value(json)?;
    let remote = params.remote().ok_or_else(|| PairError::json("params", "do_remote_prefill", json))?;
    let tokens = fields::number("recv", request, "ntok")?;
    let mut blocks = fields::blocks("recv", request, "blocks")?;
    if blocks.is_empty() {
        blocks = free.take(tokens.div_ceil(options.cache.block));
    }
    let room = remote.room.clone().ok_or_else(|| PairError::json("params", "remote_request_id", json))?;
    let name = request.get("id").and_then(Value::as_str).map_or_else(|| room.to_string(), str::to_owned);
    Ok(Wanted {
        name,
        room,
        addr: remote.bootstrap_addr(),
        options: remote.reader_options(session.with(|session| {
            session.mode = params.mode.or(Some(TransferMode::Pull));
            session.tokens = Some(tokens);
        })),
        blocks,
        aux: None,
        source: fields::blocks("recv", request, "src_blocks")?,
        prefix: 0,
    })
}

/// The report with one entry for each room, as SGLang's driver has it.
fn with_rooms(options: &Options, engine: &Engine, received: &Received, mut report: Value) -> Value {
    if options.cache.dialect == Dialect::Sglang {
        let rooms = received.results().map(|(wanted, result)| {
            let aux = wanted.aux.and_then(|AuxIndex(row)| engine.aux(row).ok()).unwrap_or_default();
            let (status, wrong, why) = match result {
                Ok(wrong) => (4, wrong, None),
                Err(why) => (0, 0, Some(why)),
            };
            let room =
                json!({"status": status, "wrong": wrong, "aux_room": aux.1, "aux_token": aux.0, "why": why});
            (wanted.name.clone(), room)
        });
        let rooms: serde_json::Map<String, Value> = rooms.collect();
        report["rooms"] = rooms.into();
    }
    report
}

/// Makes all runs with the peer behind this control, and prints one line of JSON for each. True if everything
/// was right.
pub fn drive(options: &Options, engine: &mut Engine, peer: &str) -> Result<bool, PairError> {
    let mut right = true;
    for (number, run) in options.runs.iter().enumerate() {
        for rep in 0..options.reps {
            let (line, ok) = match options.cache.dialect {
                Dialect::Vllm => drive_vllm(options, engine, peer, (*run, number * options.reps + rep))?,
                Dialect::Sglang => drive_sglang(options, engine, peer, (*run, number * options.reps + rep))?,
            };
            crate::say(&line);
            right &= ok;
        }
    }
    Ok(right)
}

fn conditions(options: &Options) -> Conditions {
    Conditions {
        timeout: options.timeout(),
        settle: Duration::from_secs_f64(options.settle),
        abort_after: None,
        harm: None,
    }
}

/// The tokens of a run's requests, and where the peer has them.
fn sources(options: &Options, peer_blocks: usize, run: Run) -> Vec<Vec<u32>> {
    let mut order = Order::new(peer_blocks, options.seed);
    (0..run.requests).map(|_| order.take(run.blocks)).collect()
}

fn drive_vllm(
    options: &Options,
    engine: &mut Engine,
    peer: &str,
    (run, number): (Run, usize),
) -> Result<(Value, bool), PairError> {
    let hello = control::call(peer, "hello", None)?;
    let sources = sources(options, fields::number("hello", &hello, "nblocks")?, run);
    let tokens = run.blocks * options.cache.peer_block();
    let name = |at: usize| format!("cmpl-{}.{number}-{at}-0-{at:08x}", std::process::id());
    let request =
        |(at, blocks): (usize, &Vec<u32>)| json!({"id": name(at), "blocks": blocks, "ntok": tokens});
    let requests: Vec<Value> = sources.iter().enumerate().map(request).collect();
    let answer = control::call(peer, "finish", Some(&json!({ "reqs": requests })))?;
    let mut free = Order::new(options.cache.blocks, options.seed);
    let begun = Instant::now();
    let mut wanted_all = Vec::new();
    for (at, (params, source)) in fields::list("finish", &answer, "params")?.iter().zip(&sources).enumerate()
    {
        let request = json!({"params": params, "ntok": tokens, "id": name(at), "src_blocks": source});
        wanted_all.push(wanted(options, &request, at, options.timeout(), &mut free)?);
    }
    let parsed = begun.elapsed();
    let received = receive(engine, wanted_all, &mut conditions(options))?;
    let names: Vec<String> = (0..run.requests).map(name).collect();
    let freed = freed(peer, &names)?;
    let ok = received.is_right() && freed == run.requests;
    let mut line = received.json(engine);
    line["run"] = run.to_string().into();
    line["verify"] = if ok { "OK" } else { "BAD" }.into();
    line["p_freed"] = freed.into();
    line["parse_ms"] = millis(parsed).into();
    Ok((line, ok))
}

/// How many of the requests the peer says it has freed, within some seconds.
fn freed(peer: &str, names: &[String]) -> Result<usize, PairError> {
    let end = Instant::now() + FREED_WITHIN;
    loop {
        let state = control::call(peer, "state", None)?;
        let sent: std::collections::BTreeSet<&str> =
            fields::list("state", &state, "sent")?.iter().filter_map(Value::as_str).collect();
        let freed = names.iter().filter(|name| sent.contains(name.as_str())).count();
        if freed == names.len() || Instant::now() >= end {
            return Ok(freed);
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn drive_sglang(
    options: &Options,
    engine: &mut Engine,
    peer: &str,
    (run, number): (Run, usize),
) -> Result<(Value, bool), PairError> {
    let hello = control::call(peer, "hello", None)?;
    let slots = hello.get("slots").or_else(|| hello.get("nblocks")).and_then(Value::as_u64);
    let slots = slots.ok_or_else(|| PairError::json("hello", "slots", &hello))? as usize;
    let sources = sources(options, slots, run);
    let first = 1000 + u64::from(std::process::id()) * 100_000 + number as u64 * 10_000;
    let mut free = Order::new(options.cache.blocks, options.seed);
    let (mut sends, mut wanted_all) = (Vec::new(), Vec::new());
    for (at, source) in sources.into_iter().enumerate() {
        let room = first + at as u64;
        let chunks = if run.blocks > 2 { options.chunks.max(2) } else { 1 };
        sends.push(json!({"room": room, "pages": source, "chunks": chunks}));
        let ours = (run.blocks * options.cache.peer_block()).div_ceil(options.cache.block);
        let request = json!({"room": room, "pages": free.take(ours), "src_pages": source});
        wanted_all.push(wanted(options, &request, at, options.timeout(), &mut free)?);
    }
    let body = json!({"reqs": sends, "timeout": options.timeout});
    let url = peer.to_owned();
    let sent = thread::spawn(move || control::call(&url, "send", Some(&body)));
    let received = receive(engine, wanted_all, &mut conditions(options))?;
    let sent = sent.join().map_err(|_| PairError::full("send"))??;
    let rooms = sent
        .get("rooms")
        .and_then(Value::as_object)
        .ok_or_else(|| PairError::json("send", "rooms", &sent))?;
    let freed = rooms.values().filter(|room| room["status"] == json!(4)).count();
    let ok = received.is_right() && freed == run.requests;
    let mut line = received.json(engine);
    line["run"] = run.to_string().into();
    line["verify"] = if ok { "OK" } else { "BAD" }.into();
    line["p_freed"] = freed.into();
    line["sender_ms"] = sent["ms"].clone();
    Ok((line, ok))
}
