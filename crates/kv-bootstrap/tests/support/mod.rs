//! A plain HTTP client and a few records for the tests.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod driver;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use kv_bootstrap::RankJson;
use kv_core::{
    EngineId, Incarnation, Parallel, RankRecord, ServiceOffer, TransportOffer, WorkerId, WorkerRole,
};
use serde_json::Value;

/// Far beyond what anything here takes on a loaded machine.
pub const LONG: Duration = Duration::from_secs(30);

pub struct Http {
    pub stream: BufReader<TcpStream>,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

impl Http {
    pub fn connect(addr: SocketAddr) -> Http {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.set_write_timeout(Some(LONG)).unwrap();
        Http { stream: BufReader::new(stream) }
    }

    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_send(bytes).unwrap();
    }

    fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
        self.stream.get_mut().write_all(bytes.as_ref())
    }

    /// Reads one answer with a body.
    pub fn answer(&mut self) -> Answer {
        self.try_answer(false).expect("the connection ended before the answer")
    }

    pub fn try_answer(&mut self, head_only: bool) -> Option<Answer> {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if self.stream.read_line(&mut head).ok()? == 0 {
                return None;
            }
        }
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut answer = Answer { status, head, body: String::new() };
        if !head_only && status != 100 {
            let length: usize = answer.header("content-length").unwrap().parse().unwrap();
            let mut body = vec![0; length];
            self.stream.read_exact(&mut body).ok()?;
            answer.body = String::from_utf8(body).unwrap();
        }
        Some(answer)
    }

    pub fn request(&mut self, method: &str, target: &str, body: Option<&str>) -> Answer {
        let body = body.map(|body| format!("Content-Length: {}\r\n\r\n{body}", body.len()));
        let rest = body.unwrap_or_else(|| "\r\n".to_owned());
        self.send(format!("{method} {target} HTTP/1.1\r\nHost: x\r\n{rest}"));
        self.answer()
    }

    /// True once the server has closed, with a reset or without.
    pub fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

/// One request on a connection of its own.
pub fn once(addr: SocketAddr, method: &str, target: &str, body: Option<&str>) -> Answer {
    Http::connect(addr).request(method, target, body)
}

/// The server still serves.
pub fn assert_alive(addr: SocketAddr) {
    // A client that its machine has kept waiting is ended by an impatient server, and comes again.
    eventually("a good client is served", || {
        let mut http = Http::connect(addr);
        let sent = http.try_send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
        let health = sent.ok().and_then(|()| http.try_answer(false));
        health.is_some_and(|health| (health.status, health.body.as_str()) == (200, "OK"))
    });
}

pub fn rank(engine: &str, tp: (u32, u32), life: u64) -> RankRecord {
    let who =
        (WorkerId { engine: EngineId::new(engine).unwrap(), rank: tp.1 }, Incarnation::from_random(life));
    let metadata = format!("{engine}/{}/{life}\0\u{1}", tp.1).into_bytes().into();
    let transport = TransportOffer { name: "local".to_owned(), version: 1, metadata };
    let (service, compatibility) = ("kv".to_owned(), "a hash".to_owned());
    let offer = ServiceOffer { service, min: 1, max: 3, compatibility, data: vec![0xff; 64].into() };
    let parallel = Parallel::default().with(|parallel| {
        parallel.tp_size = tp.0;
        parallel.tp_rank = tp.1;
    });
    RankRecord::new(who, WorkerRole::Prefill, parallel, vec![transport], vec![offer]).unwrap()
}

pub fn rank_json(record: &RankRecord, lease_ms: u64) -> String {
    serde_json::to_string(&RankJson::new(record, Some(lease_ms))).unwrap()
}

/// Polls `done` until it is true; panics after a generous time.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "not within {LONG:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
