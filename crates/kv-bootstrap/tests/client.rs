//! The client against the server, and against servers that are absent, silent or wrong.
#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kv_bootstrap::{ClientConfig, HttpBootstrapClient, KvBootstrapServer, Secret, ServerConfig};
use kv_core::{
    BootstrapClient, BootstrapError, BootstrapEvent, LookupId, RankQuery, RankRecord, Replica, Time,
    WorkerRole,
};
use support::{LONG, eventually, once, rank};

/// A client with its clock.
struct Driver {
    client: HttpBootstrapClient,
    epoch: Instant,
}

impl Driver {
    fn new(config: ClientConfig) -> Driver {
        Driver { client: HttpBootstrapClient::new(config).unwrap(), epoch: Instant::now() }
    }

    fn now(&self) -> Time {
        Time::ZERO + self.epoch.elapsed()
    }

    fn poll(&mut self) -> Option<BootstrapEvent> {
        let begin = Instant::now();
        let event = self.client.poll(self.now());
        assert!(begin.elapsed() < Duration::from_secs(5), "poll blocked for {:?}", begin.elapsed());
        event
    }

    fn next(&mut self) -> BootstrapEvent {
        let begin = Instant::now();
        loop {
            if let Some(event) = self.poll() {
                return event;
            }
            assert!(begin.elapsed() < LONG, "no event");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn idle(&mut self, time: Duration) -> Vec<BootstrapEvent> {
        let begin = Instant::now();
        let mut events = Vec::new();
        while begin.elapsed() < time {
            events.extend(self.poll());
            std::thread::sleep(Duration::from_millis(1));
        }
        events
    }

    fn publish(&mut self, addr: &str, record: &RankRecord) {
        let now = self.now();
        self.client.publish(now, addr, record.clone());
    }

    fn ask(&mut self, addr: &str, id: u64) {
        let query = RankQuery { role: WorkerRole::Prefill, replica: Replica::Rank(0) };
        let now = self.now();
        self.client.lookup(now, LookupId(id), addr, &query);
    }

    fn lookup(&mut self, addr: &str) -> Result<Vec<RankRecord>, BootstrapError> {
        self.ask(addr, 77);
        loop {
            match self.next() {
                BootstrapEvent::Found { lookup: LookupId(77), ranks } => return Ok(ranks),
                BootstrapEvent::Failed { lookup: LookupId(77), error } => return Err(error),
                BootstrapEvent::PublishFailed { .. } | BootstrapEvent::Published { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

fn quick() -> ClientConfig {
    ClientConfig {
        lease: Duration::from_millis(600),
        request_timeout: Duration::from_secs(2),
        retry_first: Duration::from_millis(20),
        retry_max: Duration::from_millis(100),
        ..ClientConfig::default()
    }
}

fn server() -> (KvBootstrapServer, String) {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let addr = server.local_addr().to_string();
    (server, addr)
}

/// An address where nobody listens.
fn nowhere() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

fn with_secret(secret: &str) -> ClientConfig {
    ClientConfig { secret: Some(Secret::new(secret).unwrap()), ..quick() }
}

#[test]
fn a_wrong_secret_ends_lookups_and_registrations_at_once_and_the_right_one_serves() {
    let secret = Some(Secret::new("the right secret of 2026".replace(' ', "-").as_str()).unwrap());
    let server =
        KvBootstrapServer::start_with("127.0.0.1:0", ServerConfig { secret, ..ServerConfig::default() })
            .unwrap();
    let addr = server.local_addr().to_string();
    let record = rank("p", (1, 0), 1);
    for config in [quick(), with_secret("the-right-secret-of-2027")] {
        let mut driver = Driver::new(config);
        assert_eq!(driver.lookup(&addr), Err(BootstrapError::Unauthorized));
        assert!(!BootstrapError::Unauthorized.is_retryable());
        driver.publish(&addr, &record);
        let (error, retry_in) = (BootstrapError::Unauthorized, Duration::MAX);
        assert_eq!(driver.next(), BootstrapEvent::PublishFailed { addr: addr.clone(), error, retry_in });
        assert_eq!(driver.idle(Duration::from_millis(300)), [], "given up");
    }
    assert_eq!(server.gauges().ranks, 0);
    let mut driver = Driver::new(with_secret("the-right-secret-of-2026"));
    driver.publish(&addr, &record);
    assert_eq!(driver.next(), BootstrapEvent::Published { addr: addr.clone() });
    assert_eq!(driver.lookup(&addr), Ok(vec![record]));
    let now = driver.now();
    driver.client.withdraw(now);
    assert!(driver.client.flush(now, LONG));
    eventually("the rank has left", || server.gauges().ranks == 0);
}

/// A server that sends `answer` to whatever the first `clients` clients say, and closes.
fn fake(answer: Vec<u8>, clients: usize) -> (String, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let thread = std::thread::spawn(move || {
        for _ in 0..clients {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(&answer);
        }
    });
    (addr, thread)
}

#[test]
fn what_one_worker_publishes_another_finds() {
    let (_server, addr) = server();
    let ranks = [rank("p", (2, 0), 1), rank("p", (2, 1), 2)];
    let (mut first, mut second) =
        (Driver::new(ClientConfig::default()), Driver::new(ClientConfig::default()));
    let mut decode = Driver::new(ClientConfig::default());
    assert_eq!(decode.lookup(&addr), Err(BootstrapError::UnknownRank));
    first.publish(&addr, &ranks[0]);
    assert_eq!(first.next(), BootstrapEvent::Published { addr: addr.clone() });
    assert_eq!(decode.lookup(&addr), Err(BootstrapError::NotReady { registered: 1, expected: 2 }));
    second.publish(&addr, &ranks[1]);
    assert_eq!(second.next(), BootstrapEvent::Published { addr: addr.clone() });
    assert_eq!(decode.lookup(&addr), Ok(ranks.to_vec()));

    let now = first.now();
    first.client.withdraw(now);
    assert!(first.client.flush(now, LONG));
    assert_eq!(decode.lookup(&addr), Err(BootstrapError::NotReady { registered: 1, expected: 2 }));
}

#[test]
fn a_name_is_resolved_without_blocking() {
    let (server, _) = server();
    let addr = format!("localhost:{}", server.local_addr().port());
    let mut driver = Driver::new(ClientConfig::default());
    assert_eq!(driver.lookup(&addr), Err(BootstrapError::UnknownRank));
    let failed = driver.lookup("no-such-host.invalid:1");
    assert!(matches!(failed, Err(BootstrapError::Unreachable(_) | BootstrapError::TimedOut)), "{failed:?}");
    assert_eq!(driver.lookup("nonsense"), Err(BootstrapError::Address("nonsense".into())));
}

#[test]
fn registrations_outlive_their_lease_by_renewal_and_end_with_their_worker() {
    let (_server, addr) = server();
    let mut worker = Driver::new(quick());
    let mut decode = Driver::new(ClientConfig::default());
    worker.publish(&addr, &rank("p", (1, 0), 1));
    assert_eq!(worker.next(), BootstrapEvent::Published { addr: addr.clone() });
    // On a machine that stalls a renewal may come late; the rank is then registered again.
    worker.idle(Duration::from_millis(1500));
    eventually("the rank is there after two leases", || {
        worker.poll();
        decode.lookup(&addr).is_ok()
    });
    drop(worker);
    eventually("the rank of a dead worker leaves", || {
        decode.lookup(&addr) == Err(BootstrapError::UnknownRank)
    });
}

#[test]
fn withdrawal_gets_out_by_polling_alone() {
    let (_server, addr) = server();
    let mut worker =
        Driver::new(ClientConfig { lease: Duration::from_secs(3600), ..ClientConfig::default() });
    let mut decode = Driver::new(ClientConfig::default());
    worker.publish(&addr, &rank("p", (1, 0), 1));
    assert_eq!(worker.next(), BootstrapEvent::Published { addr: addr.clone() });
    let now = worker.now();
    worker.client.withdraw(now);
    eventually("the rank has left", || {
        worker.poll();
        decode.lookup(&addr) == Err(BootstrapError::UnknownRank)
    });
}

#[test]
fn a_restarted_server_learns_of_the_rank_again() {
    let (server, addr) = server();
    let mut worker = Driver::new(quick());
    let record = rank("p", (1, 0), 1);
    worker.publish(&addr, &record);
    assert_eq!(worker.next(), BootstrapEvent::Published { addr: addr.clone() });
    server.stop();
    let down = worker.next();
    assert!(
        matches!(&down, BootstrapEvent::PublishFailed { addr: at, error: BootstrapError::Unreachable(_), .. } if *at == addr),
        "{down:?}"
    );
    let server = KvBootstrapServer::start(&addr).unwrap();
    let mut decode = Driver::new(ClientConfig::default());
    let mut found = Err(BootstrapError::UnknownRank);
    eventually("the rank is registered again", || {
        worker.poll();
        found = decode.lookup(&addr);
        found.is_ok()
    });
    assert_eq!(found, Ok(vec![record]));
    server.stop();
}

#[test]
fn a_server_that_starts_late_is_found() {
    let addr = nowhere();
    let mut worker = Driver::new(quick());
    worker.publish(&addr.to_string(), &rank("p", (1, 0), 1));
    match worker.next() {
        BootstrapEvent::PublishFailed { error: BootstrapError::Unreachable(_), retry_in, .. } => {
            assert_eq!(retry_in, Duration::from_millis(20));
        }
        other => panic!("{other:?}"),
    }
    let _server = KvBootstrapServer::start(&addr.to_string()).unwrap();
    let published = BootstrapEvent::Published { addr: addr.to_string() };
    eventually("published", || worker.poll() == Some(published.clone()));
}

#[test]
fn refusals_are_reported_and_an_address_that_is_none_is_given_up() {
    let (_server, addr) = server();
    let patient = ClientConfig { lease: Duration::from_secs(3600), ..ClientConfig::default() };
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
            BootstrapEvent::Failed { lookup, error: BootstrapError::Unreachable(_) } => ids.push(lookup.0),
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
    let mut driver = Driver::new(quick());
    let begin = Instant::now();
    assert_eq!(driver.lookup(&addr), Err(BootstrapError::TimedOut));
    assert!(begin.elapsed() >= Duration::from_secs(2));
    let now = driver.now();
    driver.publish(&addr, &rank("p", (1, 0), 1));
    driver.poll();
    driver.client.withdraw(now);
    let begin = Instant::now();
    assert!(!driver.client.flush(now, Duration::from_millis(50)), "nobody was told");
    assert!(begin.elapsed() < LONG / 3);
}

#[test]
fn answers_that_are_not_ours_are_typed_errors() {
    let body = |body: &str| format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let ranks = |ranks: &[RankRecord]| {
        let list: Vec<_> = ranks.iter().map(|rank| kv_bootstrap::RankJson::new(rank, None)).collect();
        body(&serde_json::to_string(&list).unwrap())
    };
    let mut decode = rank("p", (1, 0), 1);
    decode.role = WorkerRole::Decode;
    let mut elsewhere = rank("p", (1, 0), 1);
    (elsewhere.geometry.parallel.dp_size, elsewhere.geometry.parallel.dp_rank) = (2, 1);
    let malformed = BootstrapError::Malformed;
    let cases = [
        ("SSH-2.0-OpenSSH_9.6\r\n\r\n".to_owned(), malformed("not HTTP/1.1")),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n".to_owned(),
            malformed("Content-Length is not one number"),
        ),
        ("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n[".to_owned(), malformed("ended early")),
        ("HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n".to_owned(), malformed("too large")),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n".to_owned(),
            malformed("malformed chunks"),
        ),
        (format!("HTTP/1.1 200 OK\r\nX: {}", "x".repeat(20_000)), malformed("header too large")),
        (body("<html>"), malformed("not a list of ranks")),
        (body("[]"), malformed("no ranks")),
        (body(&"[".repeat(10_000)), malformed("not a list of ranks")),
        (ranks(&[rank("p", (2, 0), 1)]), malformed("not all ranks of the replica")),
        (ranks(&[rank("p", (2, 1), 1), rank("p", (2, 0), 1)]), malformed("ranks out of order")),
        (ranks(&[rank("p", (2, 0), 1), rank("q", (2, 1), 1)]), malformed("ranks of different engines")),
        (ranks(&[decode]), malformed("ranks of different engines")),
        (ranks(&[elsewhere]), malformed("ranks out of order")),
        ("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n".to_owned(), BootstrapError::Status(500)),
        ("HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy".to_owned(), BootstrapError::Status(503)),
        ("HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n".to_owned(), BootstrapError::UnknownRank),
    ];
    let mut driver = Driver::new(ClientConfig { request_timeout: LONG, ..ClientConfig::default() });
    for (answer, error) in cases {
        let (addr, thread) = fake(answer.clone().into_bytes(), 1);
        assert_eq!(driver.lookup(&addr), Err(error), "{:?}", &answer[..answer.len().min(80)]);
        thread.join().unwrap();
    }
    // A server that closes without a word is tried once more.
    let (addr, thread) = fake(Vec::new(), 2);
    let closed = driver.lookup(&addr);
    assert!(matches!(closed, Err(BootstrapError::Unreachable(_))), "{closed:?}");
    thread.join().unwrap();
}

#[test]
fn a_server_that_closes_after_each_answer_serves_all() {
    let record = rank("p", (1, 0), 1);
    let body = serde_json::to_string(&[kv_bootstrap::RankJson::new(&record, None)]).unwrap();
    let answer = format!("HTTP/1.0 200 OK\r\n\r\n{body}");
    let (addr, thread) = fake(answer.into_bytes(), 5);
    let mut driver = Driver::new(ClientConfig { request_timeout: LONG, ..ClientConfig::default() });
    for id in 0..5 {
        let query = RankQuery { role: WorkerRole::Prefill, replica: Replica::Modulo(id) };
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
    let config = kv_bootstrap::ServerConfig { idle_timeout: Duration::from_millis(50), ..Default::default() };
    let server = KvBootstrapServer::start_with("127.0.0.1:0", config).unwrap();
    let addr = server.local_addr().to_string();
    let mut driver = Driver::new(ClientConfig::default());
    for _ in 0..5 {
        assert_eq!(driver.lookup(&addr), Err(BootstrapError::UnknownRank));
        // The client is not polled meanwhile, so it finds out when it sends.
        std::thread::sleep(Duration::from_millis(150));
    }
}

#[test]
fn a_full_queue_fails_the_lookup_and_keeps_the_others() {
    let (_server, addr) = server();
    let mut driver = Driver::new(ClientConfig { max_queue: 3, max_servers: 1, ..ClientConfig::default() });
    for id in 0..5 {
        let query = RankQuery { role: WorkerRole::Prefill, replica: Replica::Modulo(id) };
        let now = driver.now();
        driver.client.lookup(now, LookupId(id), &addr, &query);
    }
    driver.ask("127.0.0.1:9", 5);
    let mut busy = Vec::new();
    for _ in 0..6 {
        match driver.next() {
            BootstrapEvent::Failed { lookup, error: BootstrapError::Unreachable(kind) } => {
                assert_eq!(kind, std::io::ErrorKind::ResourceBusy);
                busy.push(lookup.0);
            }
            BootstrapEvent::Failed { error: BootstrapError::UnknownRank, .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(busy, [3, 4, 5]);
}

#[test]
fn many_ranks_and_questions_share_one_connection() {
    let (_server, addr) = server();
    let mut worker = Driver::new(ClientConfig::default());
    let ranks: Vec<RankRecord> = (0..16).map(|number| rank("p", (16, number), 1)).collect();
    for rank in &ranks {
        worker.publish(&addr, rank);
    }
    let mut published = 0;
    while published < 16 {
        assert_eq!(worker.next(), BootstrapEvent::Published { addr: addr.clone() });
        published += 1;
    }
    let mut asked = 0..1000;
    for id in asked.clone() {
        worker.ask(&addr, id);
    }
    let mut seen = 0;
    while seen < 1000 {
        match worker.next() {
            BootstrapEvent::Found { lookup, ranks: found } => {
                assert_eq!((Some(lookup.0), &found), (asked.next(), &ranks));
                seen += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(once(addr.parse().unwrap(), "GET", "/health", None).status, 200);
}

#[test]
fn an_idle_client_sleeps_until_its_next_renewal() {
    let (_server, addr) = server();
    let mut worker = Driver::new(ClientConfig { lease: Duration::from_secs(300), ..ClientConfig::default() });
    assert_eq!(worker.client.next_timeout(), None);
    worker.publish(&addr, &rank("p", (1, 0), 1));
    assert!(worker.client.next_timeout().unwrap() <= worker.now());
    assert_eq!(worker.next(), BootstrapEvent::Published { addr });
    assert_eq!(worker.poll(), None);
    let next = worker.client.next_timeout().unwrap();
    assert!(next > worker.now() + Duration::from_secs(10), "{next:?}");
    assert!(worker.client.as_raw_fd().is_some());
}
