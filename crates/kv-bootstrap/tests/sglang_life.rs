//! SGLang's `/health` and `/route` stand for the engine: a dead rank is seen, and one engine has one address.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kv_bootstrap::{KvBootstrapServer, ServerConfig, SglangRank, WatchConfig};
use kv_core::RankRecord;
use serde_json::json;
use support::{eventually, once, rank, rank_json};

const ALL: &str = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
const FIRST: &str = "/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0";

/// A port that greets every connection, as a ZeroMQ socket does, and keeps the connection open.
struct Port {
    addr: SocketAddr,
    stop: Arc<AtomicBool>,
    greet: Arc<AtomicBool>,
    greeted: Arc<AtomicUsize>,
    open: Arc<Mutex<Vec<TcpStream>>>,
    thread: Option<JoinHandle<()>>,
}

impl Port {
    fn open() -> Port {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let (stop, greet) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
        let (greeted, open) = (Arc::<AtomicUsize>::default(), Arc::<Mutex<Vec<TcpStream>>>::default());
        let shared = (Arc::clone(&stop), Arc::clone(&greet), Arc::clone(&greeted), Arc::clone(&open));
        let thread = std::thread::spawn(move || {
            let (stop, greet, greeted, open) = shared;
            loop {
                let (mut stream, _) = listener.accept().unwrap();
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                if greet.load(Ordering::SeqCst) {
                    stream.write_all(b"\xff\0\0\0\0\0\0\0\x01\x7f").unwrap();
                    greeted.fetch_add(1, Ordering::SeqCst);
                }
                open.lock().unwrap().push(stream);
            }
        });
        Port { addr, stop, greet, greeted, open, thread: Some(thread) }
    }

    /// Ends as a process that is killed ends: the port is closed, and so are all its connections.
    fn kill(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.addr);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        self.open.lock().unwrap().clear();
    }

    fn greeted(&self) -> usize {
        self.greeted.load(Ordering::SeqCst)
    }

    fn claim(&self) -> SglangRank {
        SglangRank::new("127.0.0.1", self.addr.port(), 16)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.kill();
    }
}

fn start(watch: WatchConfig, engine_addrs: usize) -> KvBootstrapServer {
    let config = ServerConfig::default().with(|config| {
        config.watch = Some(watch);
        config.engine_addrs = vec!["127.0.0.1:0".to_owned(); engine_addrs];
    });
    KvBootstrapServer::start_with("127.0.0.1:0", config).unwrap()
}

fn quick() -> WatchConfig {
    WatchConfig::default().with(|config| {
        config.interval = Duration::from_millis(50);
        config.hold = Duration::from_millis(200);
        // On a busy machine a port may be slow to greet.
        config.silence = Duration::from_secs(30);
    })
}

fn put(addr: SocketAddr, rank: &SglangRank) -> (u16, String) {
    let body = String::from_utf8(rank.encode().to_vec()).unwrap();
    let answer = once(addr, "PUT", "/route", Some(&body));
    (answer.status, answer.body)
}

fn health(addr: SocketAddr) -> (u16, String) {
    let answer = once(addr, "GET", "/health", None);
    (answer.status, answer.body)
}

fn ok() -> (u16, String) {
    (200, "OK".to_owned())
}

#[test]
fn a_killed_engine_is_seen_and_its_restart_with_another_policy_serves() {
    let server = start(quick(), 0);
    let addr = server.local_addr();
    let mut port = Port::open();
    assert_eq!((health(addr), put(addr, &port.claim())), (ok(), ok()));
    eventually("the port is connected to", || port.greeted() > 1);
    assert_eq!((health(addr), once(addr, "GET", ALL, None).status), (ok(), 200));
    port.kill();
    eventually("the death is seen", || {
        let (status, text) = health(addr);
        status == 503 && text.ends_with(&format!("at {} is dead: its port refuses connections", port.addr))
    });
    assert_eq!(once(addr, "GET", ALL, None).status, 503);
    assert_eq!(once(addr, "GET", FIRST, None).status, 503);
    assert_eq!(once(addr, "GET", "/v1/health", None).status, 200, "the server itself lives");
    eventually("the port is watched no longer", || server.gauges().watched_ports == 0);

    let again = Port::open();
    let rank = again.claim().with(|rank| rank.decode_allocation_policy = "prefill_complete".to_owned());
    assert_eq!((put(addr, &rank), health(addr)), (ok(), ok()));
    assert_eq!(once(addr, "GET", ALL, None).json()["decode_allocation_policy"], "prefill_complete");
    assert_eq!(once(addr, "GET", FIRST, None).json()["rank_port"], again.addr.port());
}

#[test]
fn a_stopped_engine_is_unwell_until_it_answers_and_stays_registered() {
    let server = start(quick().with(|config| config.silence = Duration::from_millis(300)), 0);
    let addr = server.local_addr();
    let port = Port::open();
    put(addr, &port.claim());
    eventually("the port has greeted", || port.greeted() > 0);
    port.greet.store(false, Ordering::SeqCst);
    eventually("the silence is seen", || {
        health(addr).1.ends_with(&format!("at {} does not answer", port.addr))
    });
    assert_eq!(once(addr, "GET", ALL, None).status, 503);
    port.greet.store(true, Ordering::SeqCst);
    eventually("it is well again", || health(addr) == ok());
    eventually("it is answered", || {
        let answer = once(addr, "GET", FIRST, None);
        answer.status == 200 && answer.json()["rank_port"] == port.addr.port()
    });
}

#[test]
fn each_address_has_an_engine_of_its_own_that_no_other_replaces() {
    let server = start(quick(), 1);
    let (one, two) = (server.local_addr(), server.engine_addrs()[0]);
    let (first, second) = (Port::open(), Port::open());
    assert_eq!(put(one, &first.claim()), ok());
    eventually("the first engine is known to live", || {
        first.greeted() > 0
            && {
                let (status, text) = put(one, &second.claim());
                let refused = format!(
                    "dp_rank 0 pp_rank 0 pcp_rank 0 tp_rank 0 of the engine at this bootstrap address lives at {}: give this \
             engine a bootstrap address of its own, or stop the other one first",
                    first.addr
                );
                if status == 200 {
                    // The first connection is not up yet: the engines take turns until it is.
                    put(one, &first.claim());
                }
                status == 409 && text == refused
            }
    });
    assert_eq!(once(two, "GET", ALL, None).status, 503);
    assert_eq!(put(two, &second.claim()), ok());
    for (addr, port) in [(one, &first), (two, &second)] {
        assert_eq!(once(addr, "GET", FIRST, None).json()["rank_port"], port.addr.port());
    }
    let room = json!({"bootstrap_room": 7, "dp_rank": 3}).to_string();
    assert_eq!(once(two, "POST", "/register_dp_rank", Some(&room)).status, 200);
    let rooms = json!({"bootstrap_rooms": [7]}).to_string();
    let known = |addr| once(addr, "POST", "/query_dp_ranks", Some(&rooms)).json();
    assert_eq!((known(one), known(two)), (json!({}), json!({"7": 3})));
    drop(second);
    eventually("the death of the second is seen", || health(two).0 == 503);
    assert_eq!(health(one), ok());
    // Our own records are the same at all addresses.
    assert_eq!(once(one, "PUT", "/v1/ranks", Some(&rank_json(&rank("e", (1, 0), 1), 5000))).status, 200);
    assert_eq!(once(two, "GET", "/v1/ranks?role=prefill&dp_rank=0", None).json()[0]["worker"]["engine"], "e");
}

#[test]
fn a_rank_record_with_an_sglang_offer_is_served_and_leaves_with_its_lease() {
    let server = start(quick(), 1);
    let (one, two) = (server.local_addr(), server.engine_addrs()[0]);
    let sglang =
        |port| SglangRank::new("10.0.0.9", port, 64).with(|rank| rank.kv_layout = Some("nhd".into()));
    let mut record = rank("ours", (1, 0), 1);
    record.offers.push(sglang(7000).offer());
    let publish = |record: &RankRecord, lease| once(two, "PUT", "/v1/ranks", Some(&rank_json(record, lease)));
    assert_eq!(publish(&record, 60_000).status, 200);
    assert_eq!(
        (once(one, "GET", ALL, None).status, health(one)),
        (503, ok()),
        "published at the other address"
    );
    assert_eq!(once(two, "GET", ALL, None).json()["kv_layout"], "nhd");
    assert_eq!(once(two, "GET", FIRST, None).json(), json!({"rank_ip": "10.0.0.9", "rank_port": 7000}));
    let (status, text) = put(two, &sglang(9));
    assert!(status == 409 && text.contains("lives at 10.0.0.9:7000"), "{text}");
    let stranger = {
        let mut record = rank("theirs", (1, 0), 1);
        record.offers.push(sglang(8000).offer());
        publish(&record, 60_000)
    };
    assert_eq!(stranger.status, 409, "{}", stranger.body);
    // The next life of the worker, with a lease that ends.
    let mut again = rank("ours", (1, 0), 2);
    again.offers.push(sglang(7001).offer());
    assert_eq!(publish(&again, 60_000).status, 200);
    assert_eq!(once(two, "GET", FIRST, None).json()["rank_port"], 7001);
    assert_eq!(publish(&again, 300).status, 200);
    eventually("the lease has ended", || {
        health(two).1.ends_with("at 10.0.0.9:7001 has not renewed its lease")
    });
    assert_eq!(once(two, "GET", ALL, None).status, 503);
    let mut other = rank("ours", (2, 1), 3);
    other.offers.push(sglang(7001).offer());
    let refused = publish(&other, 300);
    assert_eq!(
        (refused.status, refused.json()["error"].as_str().unwrap().to_owned()),
        (400, "the sglang offer has tp_size 1, but the record has 2".to_owned(),)
    );
}

#[test]
fn what_clients_can_have_the_server_dial_is_bounded() {
    let watch = quick().with(|config| {
        config.max_ports_per_client = 2;
        config.max_dials_per_client = 3;
    });
    let server = start(watch, 0);
    let addr = server.local_addr();
    let begin = Instant::now();
    let ports: Vec<Port> = (0..3).map(|_| Port::open()).collect();
    for (tp, port) in (0..3).zip(&ports) {
        let claim = port.claim().with(|rank| (rank.parallel.tp_size, rank.parallel.tp_rank) = (3, tp));
        assert_eq!(put(addr, &claim), ok());
    }
    eventually("seven connections", || ports.iter().map(Port::greeted).sum::<usize>() >= 7);
    assert!(begin.elapsed() >= Duration::from_secs(2), "seven connections within {:?}", begin.elapsed());
    assert_eq!((ports[2].greeted(), server.gauges().watched_ports), (0, 2));
    // Host names, and addresses that are not of one host, are never dialled; nor is anything without a watch.
    for ip in ["localhost", "0.0.0.0", "224.0.0.1", "255.255.255.255"] {
        let server = start(quick(), 0);
        assert_eq!(put(server.local_addr(), &SglangRank::new(ip, ports[2].addr.port(), 16)), ok());
        assert_eq!((health(server.local_addr()), server.gauges().watched_ports), (ok(), 0), "{ip}");
    }
}
