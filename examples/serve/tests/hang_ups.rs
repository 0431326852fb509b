//! Clients that hang up at moments that are certain, because one side is held back until they have. Leases and
//! deadlines are far longer than the patience of these tests: what is free in time was given up.

use std::time::{Duration, Instant};

use kv_transfer::bootstrap::KvBootstrapServer;
use kv_transfer::params::{RemoteKv, TransferParams};
use kv_transfer::{EngineId, Room, TransferMode};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::{
    Alone, COMPLETIONS, Serve, ask, completion, count, get, monolithic, prompt, send, signal, tokens,
};

/// How long it may take until all that a request had is free again.
const PATIENCE: Duration = Duration::from_secs(10);
/// What keeps a test from being rescued.
const LEASE: [&str; 2] = ["--lease-seconds", "60"];

fn until(what: &str, done: impl Fn() -> bool) {
    let patience = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < patience, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How many requests have pages in the process at this address, and how many sessions are open there.
fn under_way(addr: &str) -> (u64, u64) {
    let health = get(addr, "/health").json();
    let sessions = count(addr, "kv_transfer_sessions", &[r#"state="open""#]);
    (health["pages"]["requests"].as_u64().unwrap(), sessions)
}

fn until_under_way(addr: &str, expected: (u64, u64)) {
    until(&format!("{expected:?} requests and sessions at {addr}"), || under_way(addr) == expected);
}

/// A process that is stopped until this value is dropped.
struct Stopped(i64);

impl Stopped {
    fn new(pid: i64) -> Stopped {
        signal(pid, Signal::STOP);
        Stopped(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        signal(self.0, Signal::CONT);
    }
}

/// For each connection to this address with bytes that were not read: whether its client has hung up.
fn unread(addr: &str) -> Vec<bool> {
    const LISTENS: &str = "0A";
    const CLIENT_HUNG_UP: &str = "08";
    let port = format!(":{:04X}", addr.rsplit_once(':').unwrap().1.parse::<u16>().unwrap());
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let sockets = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let waiting = sockets.filter(|socket| {
        socket[1].ends_with(&port) && socket[3] != LISTENS && !socket[4].ends_with(":00000000")
    });
    waiting.map(|socket| socket[3] == CLIENT_HUNG_UP).collect()
}

#[test]
fn the_router_gives_a_computed_prompt_up_whose_client_hangs_up_before_decode_has_it() {
    let serve = Serve::start(&LEASE);
    let [prefill, decode] = ["prefill/0", "decode/0"].map(|name| serve.addr_of(name));
    let stopped = Stopped::new(serve.rank("decode/0")["pid"].as_i64().unwrap());
    // Of so short a prompt the decode process is not asked what it keeps.
    let prompt = prompt(40);
    let body = completion(&prompt, 8);
    let client = send(&serve.addr, "POST", COMPLETIONS, "", body.to_string().as_bytes());
    // The router has the answer to the first step, and the decode process has not read the second.
    until("the second step", || !unread(&decode).is_empty());
    assert_eq!(under_way(&prefill), (1, 1));
    drop(client);
    // The decode process will hear no more of this than that nobody awaits its answer.
    until("the end of the second step", || unread(&decode).contains(&true));
    assert_eq!(under_way(&prefill), (1, 1));
    drop(stopped);
    until_under_way(&prefill, (0, 0));
    until_under_way(&decode, (0, 0));
    assert_eq!(serve.count("serve_hang_ups_total", &[]), 1);
    serve.check_pages();
    assert_eq!(tokens(&ask(&serve.addr, COMPLETIONS, &body)), monolithic(&prompt, 8));
}

/// A prefill and a decode process of 16 pages of 16 tokens, and no router but the test.
struct Pair {
    bootstrap: KvBootstrapServer,
    prefill: Alone,
    decode: Alone,
}

impl Pair {
    fn start() -> Pair {
        let bootstrap = KvBootstrapServer::start("127.0.0.1:0").unwrap();
        let addr = bootstrap.local_addr().to_string();
        let start = |side| Alone::start(side, &["--bootstrap", &addr, LEASE[0], LEASE[1], "--pages", "16"]);
        let (prefill, decode) = (start("prefill"), start("decode"));
        Pair { bootstrap, prefill, decode }
    }

    /// The parameters of a request for the decode process whose KV the prefill process will write.
    fn push(&self, id: &str) -> Value {
        let (engine, room) = (EngineId::new("prefill").unwrap(), Room::request(id).unwrap());
        let addr = self.bootstrap.local_addr();
        let mut remote = RemoteKv::new(engine, room, &addr.ip().to_string(), addr.port());
        remote.dp_rank = Some(0);
        TransferParams::decode(TransferMode::Push, remote).to_value()
    }

    fn check_pages(&self) {
        for process in [&self.prefill, &self.decode] {
            until_under_way(&process.addr, (0, 0));
            process.check_pages();
        }
    }
}

/// A request of so many tokens, prompt and answer together, of which `params` say where the KV is.
fn request(of: u32, total: usize, params: &Value) -> Value {
    let mut body = completion(&prompt(of), total - of as usize);
    body["kv_transfer_params"] = params.clone();
    body
}

fn begin(addr: &str, id: &str, body: &Value) -> std::net::TcpStream {
    send(addr, "POST", COMPLETIONS, &format!("x-request-id: {id}\r\n"), body.to_string().as_bytes())
}

#[test]
fn decode_aborts_a_request_whose_client_hangs_up_while_it_waits_for_kv_or_for_pages() {
    let pair = Pair::start();
    let (prefill, decode) = (&pair.prefill.addr, &pair.decode.addr);
    // Waits for KV that nobody writes, because no prefill process was given the prompt; and has all pages meanwhile.
    let for_kv = begin(decode, "nobody", &request(100, 256, &pair.push("nobody")));
    until_under_way(decode, (1, 1));
    // Waits for pages, and keeps those of the prefill process by its heartbeats.
    let computed = ask(prefill, COMPLETIONS, &request(90, 91, &json!({ "do_remote_decode": true })));
    assert_eq!(under_way(prefill), (1, 1));
    let for_pages = begin(decode, "second", &request(90, 100, &computed["kv_transfer_params"]));
    until_under_way(decode, (1, 2));
    drop(for_pages);
    until_under_way(prefill, (0, 0));
    until_under_way(decode, (1, 1));
    drop(for_kv);
    until_under_way(decode, (0, 0));
    pair.check_pages();
}

#[test]
fn prefill_aborts_a_prompt_whose_client_hangs_up_while_it_waits_for_decode_or_for_pages() {
    let pair = Pair::start();
    let (prefill, decode) = (&pair.prefill.addr, &pair.decode.addr);
    // Waits for a decode process that nobody has given the request.
    let push = json!({ "do_remote_decode": true, "transfer_mode": "push" });
    let for_decode = begin(prefill, "nobody", &request(90, 91, &push));
    until_under_way(prefill, (0, 1));
    drop(for_decode);
    until_under_way(prefill, (0, 0));
    // Waits for pages, which are kept for a decode process that does not come.
    let pull = json!({ "do_remote_decode": true });
    let computed = ask(prefill, COMPLETIONS, &request(250, 251, &pull));
    let for_pages = begin(prefill, "second", &request(90, 91, &pull));
    until_under_way(prefill, (1, 2));
    drop(for_pages);
    until_under_way(prefill, (1, 1));
    let mut unread = request(250, 251, &computed["kv_transfer_params"]);
    unread["max_tokens"] = 0.into();
    ask(decode, COMPLETIONS, &unread);
    pair.check_pages();
}
