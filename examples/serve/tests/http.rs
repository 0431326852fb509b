//! The server as real processes behind real HTTP: answers are those of one process, and pages come back.
//!
//! The program is the one that cargo builds beside the tests of the package: `cargo test --test http` alone builds
//! none, so `cargo build --examples` comes first.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod chats;
mod ends;
mod hang_ups;
mod numbers;
mod routers;
mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};
use support::{COMPLETIONS, Serve, ask, completion, get, monolithic, post, prompt, receive, send, tokens};

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
            let mut stream = TcpStream::connect(&serve.addr).unwrap();
            stream.write_all(half.as_bytes()).unwrap();
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
fn clients_that_send_byte_by_byte_lose_their_connections_and_others_are_served() {
    let serve = Serve::start(&[]);
    let half_head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: ";
    let half_body = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{";
    let endless = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000000\r\n\r\n";
    let slow: Vec<TcpStream> = [half_head, half_body, endless]
        .iter()
        .flat_map(|text| std::iter::repeat_n(text, 20))
        .map(|text| {
            let mut stream = TcpStream::connect(&serve.addr).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
            stream.write_all(text.as_bytes()).unwrap();
            stream
        })
        .collect();
    let prompt = prompt(20);
    let answer = ask(&serve.addr, COMPLETIONS, &completion(&prompt, 3));
    assert_eq!(tokens(&answer), monolithic(&prompt, 3));
    for (number, mut stream) in slow.into_iter().enumerate() {
        let mut told = Vec::new();
        // The server ends the connection; with a body that is late, after it has said so.
        let _ = stream.read_to_end(&mut told);
        let told = String::from_utf8(told).unwrap();
        let status = told.split(' ').nth(1);
        match number {
            0..20 => assert!(status.is_none() || status == Some("408"), "{told}"),
            _ => assert_eq!(status, Some(if number < 40 { "408" } else { "413" }), "{told}"),
        }
    }
    serve.check_pages();
}
