//! A client with its clock, and servers for it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kv_bootstrap::{ClientConfig, HttpBootstrapClient, KvBootstrapServer};
use kv_core::{
    BootstrapClient, BootstrapError, BootstrapEvent, LookupId, RankQuery, RankRecord, Replica, Time,
    WorkerRole,
};

use super::LONG;

/// A client with its clock.
pub struct Driver {
    pub client: HttpBootstrapClient,
    pub epoch: Instant,
}

impl Driver {
    pub fn new(config: ClientConfig) -> Driver {
        Driver { client: HttpBootstrapClient::new(config).unwrap(), epoch: Instant::now() }
    }

    pub fn now(&self) -> Time {
        Time::ZERO + self.epoch.elapsed()
    }

    pub fn poll(&mut self) -> Option<BootstrapEvent> {
        let begin = Instant::now();
        let event = self.client.poll(self.now());
        assert!(begin.elapsed() < Duration::from_secs(5), "poll blocked for {:?}", begin.elapsed());
        event
    }

    pub fn next(&mut self) -> BootstrapEvent {
        let begin = Instant::now();
        loop {
            if let Some(event) = self.poll() {
                return event;
            }
            assert!(begin.elapsed() < LONG, "no event");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn idle(&mut self, time: Duration) -> Vec<BootstrapEvent> {
        let begin = Instant::now();
        let mut events = Vec::new();
        while begin.elapsed() < time {
            events.extend(self.poll());
            std::thread::sleep(Duration::from_millis(1));
        }
        events
    }

    pub fn publish(&mut self, addr: &str, record: &RankRecord) {
        let now = self.now();
        self.client.publish(now, addr, record.clone());
    }

    pub fn ask(&mut self, addr: &str, id: u64) {
        let query = kv(Replica::Rank(0));
        let now = self.now();
        self.client.lookup(now, LookupId(id), addr, &query);
    }

    pub fn lookup(&mut self, addr: &str) -> Result<Vec<RankRecord>, BootstrapError> {
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

/// The question for a replica that serves KV.
pub fn kv(replica: Replica) -> RankQuery {
    RankQuery { role: WorkerRole::Prefill, service: "kv".to_owned(), replica }
}

pub fn quick() -> ClientConfig {
    ClientConfig::default().with(|config| {
        config.lease = Duration::from_millis(600);
        config.request_timeout = LONG / 3;
        config.retry_first = Duration::from_millis(20);
        config.retry_max = Duration::from_millis(100);
    })
}

pub fn server() -> (KvBootstrapServer, String) {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let addr = server.local_addr().to_string();
    (server, addr)
}

/// An address where nobody listens.
pub fn nowhere() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// A server that sends `answer` to whatever the first `clients` clients say, and closes.
pub fn fake(answer: Vec<u8>, clients: usize) -> (String, JoinHandle<()>) {
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
