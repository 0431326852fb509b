//! How requests end before their end: clients hang up, processes are killed, the server stops.

use std::io::Read;
use std::time::{Duration, Instant};

use crate::support::{COMPLETIONS, Serve, ask, completion, monolithic, post, prompt, receive, send, tokens};

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

/// A process is killed while it serves a request: another one answers the request, or the client is told when to come again.
fn is_answered_or_told(mode: &str, side: &str) {
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

#[test]
fn requests_of_a_killed_prefill_process_are_answered_by_another_or_end_with_an_error_in_pull_mode() {
    is_answered_or_told("pull", "prefill");
}

#[test]
fn requests_of_a_killed_decode_process_are_answered_by_another_or_end_with_an_error_in_pull_mode() {
    is_answered_or_told("pull", "decode");
}

#[test]
fn requests_of_a_killed_prefill_process_are_answered_by_another_or_end_with_an_error_in_push_mode() {
    is_answered_or_told("push", "prefill");
}

#[test]
fn requests_of_a_killed_decode_process_are_answered_by_another_or_end_with_an_error_in_push_mode() {
    is_answered_or_told("push", "decode");
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
