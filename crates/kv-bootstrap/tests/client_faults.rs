//! The client against servers that are absent, silent, wrong, overloaded or in a hurry to close.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kv_bootstrap::ClientConfig;
use kv_core::{
    BootstrapClient, BootstrapError, BootstrapEvent, LookupId, OsError, RankRecord, Replica, WorkerRole,
};
use support::driver::{Driver, fake, kv, nowhere, quick, server};
use support::{LONG, eventually, rank};

/// The error number of a connection that nobody takes, on Linux.
const ECONNREFUSED: i32 = 111;

#[test]
fn refusals_are_reported_and_invalid_addresses_fail_without_retries() {
    let (_server, addr) = server();
    let patient = ClientConfig::default().with(|config| config.lease = Duration::from_secs(3600));
    let (mut first, mut second) = (Driver::new(patient), Driver::new(quick()));
    first.publish(&addr, &rank("p", (2, 0), 1));
    assert!(matches!(first.next(), BootstrapEvent::Published { .. }));
    second.publish(&addr, &rank("p", (4, 1), 1));
    let refused = second.next();
    let BootstrapEvent::PublishFailed { error: BootstrapError::Refused { status: 409, reason }, .. } =
        &refused
    else {
        panic!("{refused:?}")
    };
    assert!(reason.contains("tp_size") && reason.contains('2') && reason.contains('4'), "{reason}");
    // Once the first has gone, the second gets in.
    let now = first.now();
    first.client.withdraw(now);
    assert!(first.client.flush(now, LONG));
    eventually("accepted", || matches!(second.poll(), Some(BootstrapEvent::Published { .. })));

    let mut lost = Driver::new(quick());
    lost.publish("nonsense", &rank("p", (1, 0), 1));
    let error = BootstrapError::Address("nonsense".into());
    let given_up = BootstrapEvent::PublishFailed { addr: "nonsense".into(), error, retry_in: Duration::MAX };
    assert_eq!(lost.next(), given_up);
    assert_eq!(lost.client.next_timeout(), None);
}

#[test]
fn an_absent_server_fails_every_lookup_once() {
    let mut driver = Driver::new(ClientConfig::default());
    let addr = nowhere().to_string();
    for id in 0..100 {
        driver.ask(&addr, id);
    }
    let mut ids = Vec::new();
    for _ in 0..100 {
        match driver.next() {
            BootstrapEvent::Failed { lookup, error: BootstrapError::Unreachable(error) } => {
                assert_eq!((error.call, error.errno), ("connect", Some(ECONNREFUSED)));
                ids.push(lookup.0);
            }
            other => panic!("{other:?}"),
        }
    }
    ids.sort_unstable();
    assert_eq!(ids, (0..100).collect::<Vec<_>>());
    assert_eq!(driver.idle(Duration::from_millis(50)), []);
}

#[test]
fn a_silent_server_times_lookups_out() {
    // Connects, because the kernel accepts, and then nothing.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let request_timeout = Duration::from_secs(2);
    let mut driver = Driver::new(quick().with(|config| config.request_timeout = request_timeout));
    let begin = Instant::now();
    assert_eq!(driver.lookup(&addr), Err(BootstrapError::TimedOut));
    assert!(begin.elapsed() >= request_timeout);
    let now = driver.now();
    driver.publish(&addr, &rank("p", (1, 0), 1));
    driver.poll();
    driver.client.withdraw(now);
    let begin = Instant::now();
    assert!(!driver.client.flush(now, Duration::from_millis(50)), "nobody was told");
    assert!(begin.elapsed() < LONG / 3);
}

#[test]
fn answers_of_a_foreign_server_become_typed_errors() {
    let body = |body: &str| format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let ranks = |ranks: &[RankRecord]| {
        let list: Vec<_> = ranks.iter().map(|rank| kv_bootstrap::RankJson::new(rank, None)).collect();
        body(&serde_json::to_string(&list).unwrap())
    };
    let mut decode = rank("p", (1, 0), 1);
    decode.role = WorkerRole::Decode;
    let mut elsewhere = rank("p", (1, 0), 1);
    (elsewhere.parallel.dp_size, elsewhere.parallel.dp_rank) = (2, 1);
    let mut idle = rank("p", (1, 0), 1);
    idle.offers[0].service = "ec".to_owned();
    let malformed = BootstrapError::Malformed;
    let cases = [
        ("SSH-2.0-OpenSSH_9.6\r\n\r\n".to_owned(), malformed("the head is not HTTP/1.1")),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n".to_owned(),
            malformed("Content-Length is not one number"),
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n[".to_owned(),
            malformed("the connection ended in the middle of the answer"),
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n".to_owned(),
            malformed("the body is too large"),
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n".to_owned(),
            malformed("the chunked body is malformed"),
        ),
        (format!("HTTP/1.1 200 OK\r\nX: {}", "x".repeat(20_000)), malformed("the head is too large")),
        (body("<html>"), malformed("the body is not a list of rank records")),
        (body("[]"), malformed("the list has no ranks")),
        (body(&"[".repeat(10_000)), malformed("the body is not a list of rank records")),
        (ranks(&[rank("p", (2, 0), 1)]), malformed("the list does not have all ranks of the replica")),
        (
            ranks(&[rank("p", (2, 1), 1), rank("p", (2, 0), 1)]),
            malformed("the ranks are out of order, or of another replica"),
        ),
        (
            ranks(&[rank("p", (2, 0), 1), rank("q", (2, 1), 1)]),
            malformed("the ranks are of different engines or roles"),
        ),
        (ranks(&[decode]), malformed("the ranks are of different engines or roles")),
        (ranks(&[idle]), malformed("a rank does not offer the service")),
        (ranks(&[elsewhere]), malformed("the ranks are out of order, or of another replica")),
        ("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n".to_owned(), BootstrapError::Status(500)),
        ("HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy".to_owned(), BootstrapError::Status(503)),
        ("HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n".to_owned(), BootstrapError::UnknownRank),
    ];
    let mut driver = Driver::new(ClientConfig::default().with(|config| config.request_timeout = LONG));
    for (answer, error) in cases {
        let (addr, thread) = fake(answer.clone().into_bytes(), 1);
        assert_eq!(driver.lookup(&addr), Err(error), "{:?}", &answer[..answer.len().min(80)]);
        thread.join().unwrap();
    }
    // A server that closes without a word is tried once more.
    let (addr, thread) = fake(Vec::new(), 2);
    let closed = driver.lookup(&addr);
    let cut = OsError { call: "read", kind: ErrorKind::UnexpectedEof, errno: None };
    assert_eq!(closed.map(drop), Err(BootstrapError::Unreachable(cut)));
    thread.join().unwrap();
}

#[test]
fn a_server_that_closes_after_each_answer_serves_all_requests() {
    let record = rank("p", (1, 0), 1);
    let body = serde_json::to_string(&[kv_bootstrap::RankJson::new(&record, None)]).unwrap();
    let answer = format!("HTTP/1.0 200 OK\r\n\r\n{body}");
    let (addr, thread) = fake(answer.into_bytes(), 5);
    let mut driver = Driver::new(ClientConfig::default().with(|config| config.request_timeout = LONG));
    for id in 0..5 {
        let query = kv(Replica::Modulo(id));
        let now = driver.now();
        driver.client.lookup(now, LookupId(id), &addr, &query);
    }
    for id in 0..5 {
        let found = BootstrapEvent::Found { lookup: LookupId(id), ranks: vec![record.clone()] };
        assert_eq!(driver.next(), found);
    }
    thread.join().unwrap();
}

#[test]
fn a_connection_closed_while_idle_goes_unnoticed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let (close, told) = mpsc::channel();
    let (tell, closed) = mpsc::channel();
    let server = std::thread::spawn(move || {
        for _ in 0..5 {
            let (mut stream, _) = listener.accept().unwrap();
            assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
            stream.write_all(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n").unwrap();
            told.recv().unwrap();
            drop(stream);
            tell.send(()).unwrap();
        }
    });
    let mut driver = Driver::new(ClientConfig::default().with(|config| config.request_timeout = LONG));
    for _ in 0..5 {
        assert_eq!(driver.lookup(&addr), Err(BootstrapError::UnknownRank));
        // The client is not polled meanwhile, so it finds out when it sends.
        close.send(()).unwrap();
        closed.recv().unwrap();
    }
    server.join().unwrap();
}

#[test]
fn a_full_queue_fails_the_new_lookup_and_keeps_the_waiting_lookups() {
    let (_server, addr) = server();
    let mut driver = Driver::new(ClientConfig::default().with(|config| {
        config.max_queue = 3;
        config.max_servers = 1;
    }));
    for id in 0..5 {
        let query = kv(Replica::Modulo(id));
        let now = driver.now();
        driver.client.lookup(now, LookupId(id), &addr, &query);
    }
    driver.ask("127.0.0.1:9", 5);
    let mut busy = Vec::new();
    for _ in 0..6 {
        match driver.next() {
            BootstrapEvent::Failed { lookup, error: BootstrapError::Busy } => busy.push(lookup.0),
            BootstrapEvent::Failed { error: BootstrapError::UnknownRank, .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(busy, [3, 4, 5]);
}
