//! The client asks SGLang's questions: of this crate's server, and of one that knows only SGLang's routes.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use kv_bootstrap::{ClientConfig, KvBootstrapServer, SglangQuery, SglangRank};
use kv_core::{BootstrapClient, BootstrapError, BootstrapEvent, LookupId, RankQuery, RankRecord, Replica};
use serde_json::{Value, json};
use support::driver::{Driver, fake, nowhere, quick, server};
use support::{Http, once, rank};

fn ask(driver: &mut Driver, addr: &str, query: SglangQuery) -> Result<Vec<RankRecord>, BootstrapError> {
    let query: RankQuery = query.into();
    let now = driver.now();
    driver.client.lookup(now, LookupId(5), addr, &query);
    match driver.next() {
        BootstrapEvent::Found { lookup: LookupId(5), ranks } => Ok(ranks),
        BootstrapEvent::Failed { lookup: LookupId(5), error } => Err(error),
        other => panic!("{other:?}"),
    }
}

fn put(addr: SocketAddr, rank: &SglangRank) {
    let body = String::from_utf8(rank.encode().to_vec()).unwrap();
    assert_eq!(once(addr, "PUT", "/route", Some(&body)).status, 200);
}

/// A rank of an engine with two replicas of two tensor-parallel ranks and two pipeline stages each.
fn of_eight(number: u32) -> SglangRank {
    SglangRank::new("10.0.0.1", 7000 + number as u16, 64).with(|rank| {
        let groups = &mut rank.parallel;
        (groups.dp_size, groups.pp_size, groups.tp_size) = (2, 2, 2);
        (groups.dp_rank, groups.pp_rank, groups.tp_rank) = (number / 4, number / 2 % 2, number % 2);
        rank.kv_cache_dtype = Some("torch.float16".to_owned());
    })
}

fn ports(ranks: &[RankRecord]) -> Vec<u16> {
    ranks.iter().map(|rank| SglangRank::of(rank).unwrap().unwrap().rank_port).collect()
}

#[test]
fn all_ranks_of_the_replica_that_follows_the_room_are_found() {
    let (server, addr) = server();
    let mut driver = Driver::new(quick());
    let first = SglangQuery::Ranks(Replica::Rank(0));
    let none = BootstrapError::NotReady { registered: 0, expected: 1 };
    assert_eq!(ask(&mut driver, &addr, first), Err(none));
    (0..8).for_each(|number| put(server.local_addr(), &of_eight(number)));
    let ranks = ask(&mut driver, &addr, SglangQuery::Ranks(Replica::Modulo(4711))).unwrap();
    assert_eq!(ports(&ranks), [7004, 7005, 7006, 7007]);
    for (number, rank) in (4..8).zip(&ranks) {
        assert_eq!(SglangRank::of(rank), Some(Ok(of_eight(number))));
        assert_eq!((rank.worker.rank, rank.parallel), (number, of_eight(number).parallel));
        assert_eq!(rank.worker.engine.as_str(), format!("sglang@{addr}"));
    }
    assert_eq!(ports(&ask(&mut driver, &addr, first).unwrap()), [7000, 7001, 7002, 7003]);
    let missing = ask(&mut driver, &addr, SglangQuery::Ranks(Replica::Rank(2)));
    assert_eq!(missing, Err(BootstrapError::UnknownRank));
    // A hundred lookups at once are each answered, with the ranks of their own replica.
    let now = driver.now();
    for room in 0..100 {
        driver.client.lookup(now, LookupId(room), &addr, &SglangQuery::Ranks(Replica::Modulo(room)).into());
    }
    let mut answered = [false; 100];
    for _ in 0..100 {
        let BootstrapEvent::Found { lookup: LookupId(room), ranks } = driver.next() else { panic!() };
        assert_eq!(ports(&ranks)[0], 7000 + 4 * (room % 2) as u16);
        assert!(!std::mem::replace(&mut answered[room as usize], true));
    }
}

#[test]
fn an_engine_that_does_not_follow_the_room_says_which_replica_serves() {
    let (server, addr) = server();
    let mut driver = Driver::new(quick());
    for number in 0..8 {
        put(server.local_addr(), &of_eight(number).with(|rank| rank.follow_bootstrap_room = false));
    }
    let room = u64::MAX;
    let asked = SglangQuery::Ranks(Replica::Modulo(room));
    assert_eq!(ask(&mut driver, &addr, asked), Err(BootstrapError::UnknownRank));
    assert_eq!(ask(&mut driver, &addr, SglangQuery::Serves { room, dp_rank: 0 }), Ok(Vec::new()));
    assert_eq!(ports(&ask(&mut driver, &addr, asked).unwrap()), [7000, 7001, 7002, 7003]);
}

#[test]
fn a_watch_ends_when_the_engine_dies_or_the_time_is_over() {
    let (server, addr) = server();
    let config = quick().with(|config| {
        config.heartbeat = Duration::from_millis(30);
        config.watch = Duration::from_millis(200);
    });
    let mut driver = Driver::new(config);
    assert_eq!(ask(&mut driver, &addr, SglangQuery::Lives), Ok(Vec::new()), "the server lives");
    let record = {
        let mut record = rank("ours", (1, 0), 1);
        record.offers.push(SglangRank::new("10.0.0.1", 7000, 16).offer());
        record
    };
    let body = support::rank_json(&record, 400);
    assert_eq!(once(server.local_addr(), "PUT", "/v1/ranks", Some(&body)).status, 200);
    let died = loop {
        // The engine's lease ends during one of these watches.
        if let Err(error) = ask(&mut driver, &addr, SglangQuery::Lives) {
            break error;
        }
    };
    assert_eq!(died, BootstrapError::UnknownRank);
    let unreachable = ask(&mut driver, &nowhere().to_string(), SglangQuery::Lives);
    assert!(matches!(unreachable, Err(BootstrapError::Unreachable(_))), "{unreachable:?}");
}

/// SGLang's own server, as far as a prefill worker sees it: `/route`, and 404 for the rest. Reports the
/// body of each registration. Ends when the test ends its connection.
fn sglangs_own(listener: TcpListener) -> (Receiver<Value>, std::thread::JoinHandle<()>) {
    let (sender, receiver) = channel();
    let thread = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut stream = BufReader::new(stream);
        let (mut listed, mut heartbeats) = (false, 0);
        loop {
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                if stream.read_line(&mut head).unwrap_or(0) == 0 {
                    return;
                }
            }
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("Content-Length: "))
                .map_or(0, |length| length.parse().unwrap());
            let mut body = vec![0; length];
            stream.read_exact(&mut body).unwrap();
            let status = if head.starts_with("PUT /route ") {
                listed = true;
                sender.send(serde_json::from_slice(&body).unwrap()).unwrap();
                "200 OK"
            } else if head.starts_with("GET /route?") {
                heartbeats += 1;
                if heartbeats == 3 {
                    return;
                }
                if listed { "200 OK" } else { "503 Service Unavailable" }
            } else {
                assert!(head.starts_with("PUT /v1/ranks "), "{head}");
                "404 Not Found"
            };
            let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nOK");
            stream.get_mut().write_all(answer.as_bytes()).unwrap();
        }
    });
    (receiver, thread)
}

#[test]
fn a_record_is_registered_with_sglangs_own_server_and_again_when_it_restarts() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let (registered, ended) = sglangs_own(listener);
    let config = quick().with(|config| config.heartbeat = Duration::from_millis(20));
    let mut driver = Driver::new(config);
    let mut record = rank("ours", (1, 0), 1);
    record.offers.push(SglangRank::new("10.0.0.1", 7000, 16).offer());
    driver.publish(&addr.to_string(), &record);
    assert_eq!(driver.next(), BootstrapEvent::Published { addr: addr.to_string() });
    let body = registered.recv().unwrap();
    assert_eq!((&body["rank_ip"], &body["rank_port"]), (&json!("10.0.0.1"), &json!(7000)));
    while !ended.is_finished() {
        driver.poll();
    }
    assert!(registered.try_recv().is_err(), "one registration, however long the server lives");
    // The port is free: another server of SGLang's starts there, with an empty table.
    let again = loop {
        match TcpListener::bind(addr) {
            Ok(listener) => break listener,
            Err(_) => drop(driver.poll()),
        }
    };
    let (registered, _) = sglangs_own(again);
    let begin = std::time::Instant::now();
    let body = loop {
        driver.poll();
        if let Ok(body) = registered.try_recv() {
            break body;
        }
        assert!(begin.elapsed() < support::LONG, "the rank has not registered again");
    };
    assert_eq!(body["rank_port"], 7000);
    let now = driver.now();
    driver.client.withdraw(now);
    assert!(driver.client.flush(now, Duration::ZERO), "SGLang's own server cannot be told");
}

#[test]
fn answers_that_describe_no_engine_are_errors_and_never_more() {
    let sizes = |change: fn(&mut Value)| {
        let mut body = json!({
            "attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 16,
            "kv_cache_dtype": null, "follow_bootstrap_room": true,
        });
        change(&mut body);
        body.to_string()
    };
    let cases: [(String, &str); 7] = [
        ("[]".to_owned(), "the body does not describe a prefill engine"),
        (sizes(|body| body["attn_tp_size"] = json!(1.5)), "the body does not describe a prefill engine"),
        (sizes(|body| body["attn_tp_size"] = json!(0)), "a field of the prefill engine is out of range"),
        (sizes(|body| body["dp_size"] = json!(u64::MAX)), "a field of the prefill engine is out of range"),
        (sizes(|body| body["attn_tp_size"] = json!(1025)), "a replica has more than 1024 ranks"),
        (
            sizes(|body| body["kv_cache_dtype"] = json!("x".repeat(129))),
            "a field of the prefill engine is out of range",
        ),
        // The sizes are right, and the rank is answered with them, too.
        (sizes(|_| ()), "the body is not the address of a rank"),
    ];
    for (body, reason) in cases {
        let answer =
            format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let (addr, _thread) = fake(answer.into_bytes(), 2);
        let mut driver = Driver::new(ClientConfig::default());
        let refused = ask(&mut driver, &addr, SglangQuery::Ranks(Replica::Rank(0)));
        assert_eq!(refused, Err(BootstrapError::Malformed(reason)), "{body}");
        let _ = TcpStream::connect(&addr);
    }
}

#[test]
fn rooms_and_ranks_of_hostile_servers_are_errors() {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let addr = server.local_addr();
    for (ip, port) in [("", 1), ("a b", 1), ("x", 0)] {
        put(addr, &SglangRank::new(ip, port, 16));
        let mut driver = Driver::new(quick());
        let refused = ask(&mut driver, &addr.to_string(), SglangQuery::Ranks(Replica::Rank(0)));
        assert_eq!(
            refused,
            Err(BootstrapError::Malformed("the address of a rank is out of range")),
            "{ip:?}"
        );
    }
    // A rank that is noted for a room, and that the engine does not have.
    for number in 0..8 {
        put(addr, &of_eight(number).with(|rank| rank.follow_bootstrap_room = false));
    }
    let body = json!({"bootstrap_room": 7, "dp_rank": 9}).to_string();
    let mut http = Http::connect(addr);
    assert_eq!(http.request("POST", "/register_dp_rank", Some(&body)).status, 200);
    let mut driver = Driver::new(quick());
    let ask =
        |driver: &mut Driver, room| ask(driver, &addr.to_string(), SglangQuery::Ranks(Replica::Modulo(room)));
    assert_eq!(ask(&mut driver, 7), Err(BootstrapError::UnknownRank));
    let body = json!({"bootstrap_room": 8, "dp_rank": -1}).to_string();
    assert_eq!(http.request("POST", "/register_dp_rank", Some(&body)).status, 200);
    assert_eq!(ask(&mut driver, 8), Err(BootstrapError::UnknownRank));
}
