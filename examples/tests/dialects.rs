//! The examples `prefill` and `decode` as processes that speak vLLM's or SGLang's dialect with each other: every
//! token is as in the run in one process, every page comes back, and a decode rank whose prefill rank is killed ends
//! its requests with a cause.
//!
//! The programs are those that cargo builds beside the tests of the package: `cargo test --test dialects` alone builds
//! none, so `cargo build --examples` comes first, with the same features.
#![cfg(feature = "interop")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStderr, Command, Stdio};

use kv_transfer::bootstrap::KvBootstrapServer;
use kv_transfer::nixl::{Nixl, Search};
use serde_json::Value;

/// A port at which nothing listens.
const NOWHERE: &str = "127.0.0.1:9";

fn no_nixl() -> bool {
    let Err(error) = Nixl::load(&Search::default()) else { return false };
    println!("SKIPPED: {error}");
    assert!(std::env::var_os("KV_NIXL_REQUIRED").is_none(), "{error}");
    true
}

/// One of the example programs.
fn program(name: &str) -> Command {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().unwrap().with_file_name("examples").join(name);
    assert!(path.exists(), "{} is missing: build the examples of the package first", path.display());
    Command::new(path)
}

/// The example `prefill`, which is killed at the latest with this value.
struct Prefill {
    child: Child,
    /// The lines that it has printed until it was ready.
    said: Vec<String>,
    /// Where it takes requests.
    requests: SocketAddr,
    _stderr: BufReader<ChildStderr>,
}

impl Prefill {
    fn start(options: &[&str], bootstrap: Option<&str>) -> Prefill {
        let mut command = program("prefill");
        command.args(options).args(["--listen", "127.0.0.1:0"]);
        command.args(bootstrap.iter().flat_map(|addr| ["--bootstrap", addr]));
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = Vec::new();
        let requests = loop {
            let mut line = String::new();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "prefill has ended: {said:?}");
            said.push(line.trim_end().to_owned());
            if let Some((_, addr)) = line.trim_end().split_once("takes requests on ") {
                break addr.parse().unwrap();
            }
        };
        Prefill { child, said, requests, _stderr: stderr }
    }

    /// SIGKILL, and the end of the process.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Prefill {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts the example `prefill`, and the address of the server if the dialect has bootstrap servers: vLLM's has none.
fn prefill_of(server: &KvBootstrapServer, options: &[&str]) -> (Prefill, Option<String>) {
    let bootstrap = options.contains(&"sglang").then(|| server.local_addr().to_string());
    (Prefill::start(options, bootstrap.as_deref()), bootstrap)
}

/// Starts the example `decode`.
fn decode(options: &[&str], prefill: SocketAddr, bootstrap: Option<&str>) -> Child {
    let mut command = program("decode");
    command.args(options).args(["--json", "--prefill", &prefill.to_string()]);
    command.args(["--bootstrap", bootstrap.unwrap_or(NOWHERE)]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The report of the example `decode`, and its first line.
fn report(decode: Child) -> (Value, String) {
    let output = decode.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let json = stdout.lines().find(|line| line.starts_with('{'));
    let json = json.unwrap_or_else(|| panic!("no report, but {stdout:?} and {said:?}"));
    (serde_json::from_str(json).unwrap(), said.lines().next().unwrap_or_default().to_owned())
}

/// Pages of a rank, as the rank has counted them at the end: all, and the free ones.
fn pages(report: &Value, rank: &str) -> (Value, Value) {
    let ranks = report["ranks"].as_array().unwrap();
    let accounting = &ranks.iter().find(|other| other["name"] == rank).unwrap()["accounting"];
    (accounting["pages"].clone(), accounting["free_pages"].clone())
}

/// Serves `turns` turns of three chats between two processes with these options.
fn serve(options: &[&str], turns: u64, spoken: &str) {
    if no_nixl() {
        return;
    }
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let (prefill, bootstrap) = prefill_of(&server, options);
    let bootstrap = bootstrap.as_deref();
    let turns_wanted = turns.to_string();
    let work =
        ["--requests", "3", "--prompt-tokens", "70", "--max-new-tokens", "4", "--turns", &turns_wanted];
    let (report, first_line) = report(decode(&[options, &work].concat(), prefill.requests, bootstrap));
    assert_eq!(first_line, format!("decode/0 speaks {spoken} dialect over NIXL"));
    assert_eq!(prefill.said[0], format!("prefill/0 speaks {spoken} dialect over NIXL"));
    assert_eq!(report["problems"], serde_json::json!([]), "{report:#}");
    let totals = &report["totals"];
    let counts = ["ok", "failed", "mismatches", "tokens_compared", "pages_leaked"];
    assert_eq!(counts.map(|count| &totals[count]), [3 * turns, 0, 0, 12 * turns, 0], "{totals:#}");
    for rank in ["prefill/0", "decode/0"] {
        assert_eq!(pages(&report, rank), (512.into(), 512.into()), "{rank}");
    }
    // Pages of 16 tokens of 4 layers, with keys and values of 4 heads of 8 numbers.
    for request in report["requests"].as_array().unwrap() {
        let pages = request["prompt_tokens"].as_u64().unwrap().div_ceil(16);
        let least = pages * 16 * 4 * 2 * 4 * 8 * 4;
        assert!(request["bytes"].as_u64().unwrap() >= least, "{least} bytes: {request:#}");
    }
    if let Some(addr) = bootstrap {
        let route =
            ask(addr, "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1");
        assert_eq!(route["kv_cache_dtype"], "torch.float32", "SGLang's answer: {route:#}");
    }
    server.stop();
}

/// The answer of a server to one question.
fn ask(addr: &str, path: &str) -> Value {
    let mut stream = TcpStream::connect(addr).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {head} {body}"))
}

#[test]
fn every_token_is_right_when_both_programs_speak_vllms_pull_dialect() {
    serve(&["--dialect", "vllm"], 1, "vLLM 0.33's (pull)");
}

#[test]
fn every_token_is_right_when_both_programs_speak_vllms_push_dialect() {
    serve(&["--dialect", "vllm", "--mode", "push"], 1, "vLLM 0.33's (push)");
}

#[test]
fn every_token_is_right_when_both_programs_speak_sglangs_dialect() {
    serve(&["--dialect", "sglang"], 1, "SGLang 0.5.23's");
}

#[test]
fn the_next_turn_takes_what_the_decode_program_keeps_in_vllms_dialect() {
    serve(&["--dialect", "vllm"], 2, "vLLM 0.33's (pull)");
}

/// Passes lines between the router and the prefill rank, and kills the prefill rank at the first of its events that
/// `doomed` names, before the router gets the event.
fn kill_at(mut prefill: Prefill, listener: &TcpListener, doomed: fn(&Value) -> bool) {
    let (router, _) = listener.accept().unwrap();
    let rank = TcpStream::connect(prefill.requests).unwrap();
    let (mut from_router, mut to_rank) = (router.try_clone().unwrap(), rank.try_clone().unwrap());
    let commands = std::thread::spawn(move || {
        // Ends with the prefill rank or the router.
        let _ = std::io::copy(&mut from_router, &mut to_rank);
    });
    for line in BufReader::new(rank).lines() {
        let line = line.unwrap();
        let seen = doomed(&serde_json::from_str(&line).unwrap());
        if seen {
            prefill.kill();
        }
        writeln!(&router, "{line}").unwrap();
        if seen {
            break;
        }
    }
    router.shutdown(Shutdown::Both).unwrap();
    commands.join().unwrap();
}

/// Kills the prefill process in the middle of a request.
fn killed(options: &[&str], doomed: fn(&Value) -> bool) {
    if no_nixl() {
        return;
    }
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let (prefill, bootstrap) = prefill_of(&server, options);
    let bootstrap = bootstrap.as_deref();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let work = ["--requests", "2", "--prompt-tokens", "100", "--max-new-tokens", "2", "--deadline", "100"];
    let decode = decode(&[options, &work].concat(), listener.local_addr().unwrap(), bootstrap);
    kill_at(prefill, &listener, doomed);
    let (report, _) = report(decode);
    server.stop();
    let requests = report["requests"].as_array().unwrap();
    assert_eq!(requests.len(), 2, "{report:#}");
    let (mut by_decode, mut by_router) = (0, 0);
    for request in requests {
        assert_eq!(request["outcome"], "failed", "{request:#}");
        match request["name"].as_str().unwrap() {
            "PeerLost" | "WayLost" | "Connect" => by_decode += 1,
            // The decode rank never heard of a request whose prompt was not computed.
            "RankDied" => by_router += 1,
            other => panic!("{other}: {}", request["text"]),
        }
    }
    assert!(by_decode > 0, "{by_router} requests were given up by the router: {report:#}");
    assert_eq!(report["totals"]["pages_leaked"], 0, "{report:#}");
    assert_eq!(pages(&report, "decode/0"), (512.into(), 512.into()), "{report:#}");
}

/// Some pages of a request were sent, and some are still to come.
fn in_the_middle(event: &Value) -> bool {
    let pages = |key: &str| event[key].as_u64().unwrap_or(0);
    event["event"] == "chunk" && 0 < pages("sent") && pages("sent") < pages("of")
}

#[test]
fn a_killed_writer_ends_requests_with_a_cause_in_vllms_dialect() {
    killed(&["--dialect", "vllm", "--mode", "push"], in_the_middle);
}

#[test]
fn a_killed_writer_ends_requests_with_a_cause_in_sglangs_dialect() {
    killed(&["--dialect", "sglang"], in_the_middle);
}

#[test]
fn a_killed_holder_ends_requests_with_a_cause_in_vllms_dialect() {
    killed(&["--dialect", "vllm"], |event| event["event"] == "answer");
}

#[test]
fn a_program_of_another_dialect_gets_no_kv_and_both_keep_their_pages() {
    if no_nixl() {
        return;
    }
    let prefill = Prefill::start(&["--dialect", "vllm", "--mode", "push", "--timing", "fast"], None);
    let work = ["--transport", "nixl", "--mode", "push", "--timing", "fast", "--requests", "1"];
    let work = [&work[..], &["--prompt-tokens", "40", "--deadline", "8"]].concat();
    let (report, _) = report(decode(&work, prefill.requests, None));
    let totals = &report["totals"];
    let counts = ["ok", "failed", "mismatches", "pages_leaked"];
    assert_eq!(counts.map(|count| &totals[count]), [0, 1, 0, 0], "{report:#}");
}
