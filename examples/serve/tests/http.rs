//! The server as real processes behind real HTTP: answers are those of one process, and pages come back.
//!
//! The program is the one that cargo builds beside the tests of the package: `cargo test --test http` alone builds
//! none, so `cargo build --examples` comes first.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod support;

use std::io::Read;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{Serve, ask, completion, get, monolithic, post, receive, send, tokens};

const COMPLETIONS: &str = "/v1/completions";
const CHATS: &str = "/v1/chat/completions";

/// Some prompt of this length.
fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|i| (i * 7919 + len) % 1024).collect()
}

#[test]
fn answers_are_those_of_one_process_whether_streamed_or_not() {
    for mode in ["pull", "push", "auto"] {
        let serve = Serve::start(&["--mode", mode]);
        let prompt = prompt(53);
        let expected = monolithic(&prompt, 20);
        let whole = ask(&serve.addr, COMPLETIONS, &completion(&prompt, 20));
        assert_eq!(tokens(&whole), expected, "{mode}");
        assert_eq!(whole["usage"]["prompt_tokens"], 53);
        assert_eq!(whole["usage"]["completion_tokens"], 20);
        assert_eq!(whole["choices"][0]["finish_reason"], "length");
        assert_eq!(whole["kv_transfer_params"], Value::Null);

        let mut body = completion(&prompt, 20);
        body["stream"] = true.into();
        body["stream_options"] = json!({ "include_usage": true });
        let reply = post(&serve.addr, COMPLETIONS, &body.to_string());
        assert!(reply.head.contains("text/event-stream"), "{}", reply.head);
        let events = reply.events();
        let with_ids = events.iter().filter(|event| event["choices"][0]["token_ids"].is_array());
        assert_eq!(with_ids.flat_map(tokens).collect::<Vec<_>>(), expected, "{mode}");
        let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
        assert_eq!(text, whole["choices"][0]["text"]);
        // The second time, both sides had all full pages before the last token.
        assert_eq!(events.last().unwrap()["usage"]["prompt_tokens_details"]["cached_tokens"], 48, "{mode}");
        serve.check_pages();
    }
}

#[test]
fn a_second_turn_of_a_chat_computes_and_moves_only_what_is_new() {
    let serve = Serve::start(&[]);
    let question = "tell me of the mill, the river and the long way home";
    let mut messages = vec![json!({ "role": "user", "content": question })];
    let body =
        |messages: &[Value]| json!({ "messages": messages, "max_tokens": 40, "return_token_ids": true });
    let first = ask(&serve.addr, CHATS, &body(&messages));
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let prompt_tokens = first["usage"]["prompt_tokens"].as_u64().unwrap();
    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({ "role": "user", "content": "and then?" }));
    let second = ask(&serve.addr, CHATS, &body(&messages));
    // D has the prompt and the answer of the first turn, but for the last token and the rest of a page.
    let kept = (prompt_tokens + 39) / 16 * 16;
    assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], kept);
    let pages = |name| serve.rank(name)["pages"]["cached"].as_u64().unwrap();
    assert!(pages("prefill/0") >= prompt_tokens / 16);
    // The same turn without anything kept.
    serve.check_pages();
    let cold = ask(&serve.addr, CHATS, &body(&messages));
    assert_eq!(cold["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(tokens(&cold), tokens(&second));
    let addr = serve.rank("prefill/0")["addr"].as_str().unwrap().to_owned();
    let metrics = String::from_utf8(get(&addr, "/metrics").body).unwrap();
    let count = |name: &str| -> u64 {
        let line =
            metrics.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{metrics}"));
        line.trim().parse().unwrap()
    };
    let second_tokens = second["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(count("serve_prompt_tokens_total "), prompt_tokens + 2 * second_tokens);
    let computed = count("serve_prompt_tokens_total ") - count("serve_cached_tokens_total ");
    assert_eq!(count("serve_computed_tokens_total "), computed);
    assert_eq!(count("serve_cached_tokens_total "), prompt_tokens / 16 * 16);
}

#[test]
fn a_client_that_hangs_up_gets_its_pages_back_on_both_sides() {
    for mode in ["pull", "push"] {
        let serve = Serve::start(&["--mode", mode]);
        // While the prompt is computed, while tokens come, and of an answer that is not streamed.
        let mut long = completion(&prompt(3000), 8);
        let early = send(&serve.addr, "POST", COMPLETIONS, "", long.to_string().as_bytes());
        while serve.rank("prefill/0")["pages"]["requests"] == 0 {}
        drop(early);
        let before = serve.quiet();
        // Far from all of it was computed.
        assert_eq!(before[0]["pages"]["cached"], 0, "{mode}");
        long = completion(&prompt(64), 4000);
        long["stream"] = true.into();
        let mut streaming = send(&serve.addr, "POST", COMPLETIONS, "", long.to_string().as_bytes());
        let mut some = [0; 600];
        streaming.read_exact(&mut some).unwrap();
        drop(streaming);
        long["stream"] = false.into();
        let whole = send(&serve.addr, "POST", COMPLETIONS, "", long.to_string().as_bytes());
        while serve.rank("decode/0")["pages"]["requests"] == 0 {}
        drop(whole);
        serve.check_pages();
        // And the server serves.
        let prompt = prompt(40);
        let answer = ask(&serve.addr, COMPLETIONS, &completion(&prompt, 5));
        assert_eq!(tokens(&answer), monolithic(&prompt, 5));
    }
}

#[test]
fn requests_of_a_killed_process_are_answered_by_another_or_end_with_an_error() {
    for (mode, side) in [("pull", "prefill"), ("pull", "decode"), ("push", "prefill"), ("push", "decode")] {
        let serve = Serve::start(&["--mode", mode, "--deadline", "10"]);
        let prompt = prompt(600);
        let expected = monolithic(&prompt, 300);
        let request = completion(&prompt, 300).to_string();
        let stream = send(&serve.addr, "POST", COMPLETIONS, "", request.as_bytes());
        let name = format!("{side}/0");
        while serve.rank(&name)["pages"]["requests"] == 0 {}
        let killed = Instant::now();
        serve.kill(&name);
        let reply = receive(stream);
        // Three tries, each with a deadline and the time to start a process.
        assert!(killed.elapsed() < Duration::from_secs(90), "{mode} {side}");
        match reply.status {
            200 => assert_eq!(tokens(&reply.json()), expected, "{mode} {side}"),
            503 => assert!(reply.head.contains("retry-after"), "{}", reply.head),
            other => panic!("{mode} {side}: {other}"),
        }
        // The process is up again, or will be.
        let patience = Instant::now() + Duration::from_secs(60);
        let again = loop {
            let reply = post(&serve.addr, COMPLETIONS, &completion(&prompt, 10).to_string());
            if reply.status == 200 {
                break reply.json();
            }
            assert!(Instant::now() < patience, "{mode} {side}: {}", reply.error());
        };
        assert_eq!(tokens(&again), expected[..10], "{mode} {side}");
        serve.check_pages();
    }
}

#[test]
fn a_stream_whose_decode_process_is_killed_ends_with_an_error_event() {
    let serve = Serve::start(&[]);
    let mut body = completion(&prompt(30), 4000);
    body["stream"] = true.into();
    let mut stream = send(&serve.addr, "POST", COMPLETIONS, "", body.to_string().as_bytes());
    let mut head = [0; 400];
    stream.read_exact(&mut head).unwrap();
    serve.kill("decode/0");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains(r#""code":"unavailable""#) && rest.contains("data: [DONE]"), "{rest}");
}

#[test]
fn the_router_of_another_project_may_send_the_two_steps_itself() {
    for mode in ["pull", "push"] {
        let serve = Serve::start(&["--mode", mode]);
        let addr = |name| serve.rank(name)["addr"].as_str().unwrap().to_owned();
        let (prefill, decode) = (addr("prefill/0"), addr("decode/0"));
        let prompt = prompt(70);
        // As vLLM's proxy writes it.
        let mut first = completion(&prompt, 1);
        first["stream"] = false.into();
        first["kv_transfer_params"] = json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null,
        });
        let computed = ask(&prefill, COMPLETIONS, &first);
        let params = computed["kv_transfer_params"].clone();
        assert_eq!(params["do_remote_prefill"], true, "{computed}");
        let mut second = completion(&prompt, 12);
        second["kv_transfer_params"] = params;
        let answer = ask(&decode, COMPLETIONS, &second);
        let expected = monolithic(&prompt, 12);
        assert_eq!(tokens(&answer), expected, "{mode}");
        assert_eq!(tokens(&computed), expected[..1]);

        // A prompt that is wanted no more is given up with a request for no token.
        let params = ask(&prefill, COMPLETIONS, &first)["kv_transfer_params"].clone();
        second["kv_transfer_params"] = params;
        second["max_tokens"] = 0.into();
        assert_eq!(ask(&decode, COMPLETIONS, &second)["usage"]["completion_tokens"], 0);
        serve.check_pages();

        // Each engine says what is missing or of the other side.
        let wrong = |addr: &str, params: Value| {
            let mut body = completion(&prompt, 1);
            body["kv_transfer_params"] = params;
            let reply = post(addr, COMPLETIONS, &body.to_string());
            assert_eq!(reply.status, 400);
            assert!(reply.error().contains("kv_transfer_params"), "{}", reply.error());
        };
        wrong(&prefill, Value::Null);
        wrong(&prefill, json!({ "do_remote_decode": "perhaps" }));
        wrong(&decode, json!({ "do_remote_decode": true }));
        wrong(&decode, json!({ "do_remote_prefill": true, "remote_port": 70_000 }));
    }
}

#[test]
fn hostile_requests_get_openais_errors_and_change_nothing() {
    let serve = Serve::start(&["--max-requests", "2"]);
    let errors = |reply: &support::Reply, status: u16, part: &str| {
        assert_eq!(reply.status, status, "{}", String::from_utf8_lossy(&reply.body));
        assert!(reply.error().contains(part), "{:?} lacks {part:?}", reply.error());
    };
    let say = |body: &[u8]| receive(send(&serve.addr, "POST", COMPLETIONS, "", body));
    errors(&say(b"{"), 400, "not a JSON object");
    errors(&say(b"[]"), 400, "not a JSON object");
    errors(&say(b"{\"prompt\": \"\xff\"}"), 400, "not a JSON object");
    errors(&say("[".repeat(100_000).as_bytes()), 400, "not a JSON object");
    errors(&say(&vec![b' '; (1 << 20) + 1]), 413, "longer than 1048576 bytes");
    errors(&say(br#"{"prompt": "a", "max_tokens": 1e99}"#), 400, "max_tokens is 1e+99");
    errors(&say(br#"{"prompt": "a", "max_tokens": 4096}"#), 400, "max_tokens is 4096; expected 1 to 4095");
    errors(&say(br#"{"prompt": [4294967296]}"#), 400, "prompt is an array with 4294967296");
    errors(
        &say(br#"{"prompt": "a", "model": "gpt-5"}"#),
        404,
        "model is \"gpt-5\"; this server has \"demo\"",
    );
    errors(&say(br#"{"prompt": "a", "kv_transfer_params": {}}"#), 400, "kv_transfer_params is given");
    let long = json!({ "prompt": "x".repeat(5000) }).to_string();
    errors(&say(long.as_bytes()), 400, "prompt is 5000 tokens long; expected 1 to 4095 tokens");
    errors(&get(&serve.addr, "/v1/embeddings"), 404, "/v1/embeddings");
    errors(&get(&serve.addr, COMPLETIONS), 405, "GET");
    assert_eq!(get(&serve.addr, "/v1/models").json()["data"][0]["id"], "demo");

    // Two requests that never end their bodies are all that the server takes.
    let half = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{";
    let slow: Vec<_> = (0..2)
        .map(|_| {
            let mut stream = std::net::TcpStream::connect(&serve.addr).unwrap();
            std::io::Write::write_all(&mut stream, half.as_bytes()).unwrap();
            stream
        })
        .collect();
    while serve.health()["requests"] != 2 {}
    let refused = post(&serve.addr, COMPLETIONS, r#"{"prompt": "a"}"#);
    errors(&refused, 429, "2 requests are under way");
    assert!(refused.head.contains("retry-after"), "{}", refused.head);
    drop(slow);
    while serve.health()["requests"] != 0 {}
    let prompt = prompt(20);
    let answer = ask(&serve.addr, COMPLETIONS, &completion(&prompt, 3));
    assert_eq!(tokens(&answer), monolithic(&prompt, 3));
    serve.check_pages();
}

#[test]
fn a_server_that_is_told_to_end_ends_its_streams_and_its_processes() {
    let serve = Serve::start(&[]);
    let mut body = completion(&prompt(30), 60);
    body["stream"] = true.into();
    let mut stream = send(&serve.addr, "POST", COMPLETIONS, "", body.to_string().as_bytes());
    let mut first = vec![0; 200];
    stream.read_exact(&mut first).unwrap();
    let (ended_well, pids) = serve.terminate();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(ended_well && rest.contains("data: [DONE]") && !rest.contains("\"error\""), "{rest}");
    assert_eq!(pids.len(), 2);
    for pid in pids {
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "process {pid} goes on");
    }
}
