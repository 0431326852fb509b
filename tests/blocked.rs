//! Workers over two transports go on serving while the preferred one is blocked, and return to it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kv_transfer::prelude::*;
use support::host::Host;
use support::process::{Kind, Process};
use support::store::{Members, Place, Store};
use support::{ended, reclaimed, server, until};

/// Pages of a request: 3 MiB.
const PAGES: usize = 48;

/// The entry point of the other process. In the test's own process it does nothing.
#[test]
fn child() {
    support::process::child();
}

/// A port of this host behind which the transport of another process listens. While the port is closed, nothing
/// listens on it, and its connections are cut.
struct Proxy {
    address: SocketAddr,
    /// Bytes that have passed on their way to the transport.
    passed: Arc<AtomicU64>,
    listening: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    fn start() -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut proxy = Proxy { address, passed: Arc::default(), listening: None, streams: Arc::default() };
        proxy.listen(listener);
        proxy
    }

    /// Where the transport listens: on the same port of another address of this host.
    fn target(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 3], self.address.port()))
    }

    fn passed(&self) -> u64 {
        self.passed.load(Ordering::Relaxed)
    }

    fn open(&mut self) {
        self.listen(TcpListener::bind(self.address).unwrap());
    }

    fn close(&mut self) {
        let (over, listener) = self.listening.take().unwrap();
        over.store(true, Ordering::Relaxed);
        listener.join().unwrap();
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn listen(&mut self, listener: TcpListener) {
        listener.set_nonblocking(true).unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let target = self.target();
        let (stop, passed, streams) =
            (Arc::clone(&over), Arc::clone(&self.passed), Arc::clone(&self.streams));
        let thread = std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let Ok((near, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                let Ok(far) = TcpStream::connect(target) else { continue };
                near.set_nonblocking(false).unwrap();
                let ends = [(&near, &far), (&far, &near)].map(|(from, to)| (copy_of(from), copy_of(to)));
                streams.lock().unwrap().extend([near, far]);
                let [forth, back] = ends;
                let passed = Arc::clone(&passed);
                std::thread::spawn(move || forward(forth, &passed));
                std::thread::spawn(move || forward(back, &AtomicU64::new(0)));
            }
        });
        self.listening = Some((over, thread));
    }
}

fn copy_of(stream: &TcpStream) -> TcpStream {
    stream.try_clone().unwrap()
}

fn forward((mut from, mut to): (TcpStream, TcpStream), passed: &AtomicU64) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
        passed.fetch_add(count as u64, Ordering::Relaxed);
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

/// A decode host here, and a prefill process behind a proxy.
struct Pair {
    proxy: Proxy,
    decode: Host,
    prefill: Process,
    rooms: u64,
    failed: usize,
}

impl Pair {
    /// One request, whose attempts may fail until both sides have noticed what `spoil` did: P may notice, and
    /// tell D, before D notices itself, and an attempt that D begins in between is under way when D does.
    fn request(&mut self, spoil: impl FnOnce(&mut Proxy)) {
        if !self.attempt(spoil) {
            self.failed += 1;
            if !self.attempt(|_| {}) {
                self.failed += 1;
                assert!(self.attempt(|_| {}), "a third attempt has failed, too");
            }
        }
    }

    /// One attempt, during which `spoil` is done to the proxy. True if it has succeeded, with the right bytes.
    fn attempt(&mut self, spoil: impl FnOnce(&mut Proxy)) -> bool {
        self.rooms += 1;
        let (room, content) = (self.rooms, self.rooms * 7);
        self.prefill.tell(&format!("send {room} {PAGES} 1 {content}"));
        let mut receiver = self.decode.receiver(&self.decode.addr.clone(), room, SessionOptions::default());
        receiver.init(self.decode.room_for(PAGES), None).unwrap();
        spoil(&mut self.proxy);
        self.prefill.tell(&format!("rest {room}"));
        let ended = ended(&receiver);
        if ended != KvPoll::Success {
            println!("room {room}: {:?}", receiver.failure());
        }
        let pages = reclaimed(receiver);
        match ended {
            KvPoll::Success => {
                self.decode.arrived(pages.list(), content, &format!("room {room}"));
                assert_eq!(self.prefill.end_of(room), "Success");
            }
            _ => {
                self.decode.missed(pages.list(), content, &format!("room {room}"));
                self.decode.rewrite(pages.list());
                assert_ne!(self.prefill.end_of(room), "Success");
            }
        }
        self.decode.free(pages);
        ended == KvPoll::Success
    }

    /// By which transports ways were opened since the last call.
    fn opened(&self) -> Vec<String> {
        let Store::Placed(_, _, log) = &self.decode.memory.store else { panic!("another transport") };
        let mut told = std::mem::take(&mut *log.lock().unwrap());
        told.retain(|line| line.starts_with("connect "));
        told
    }
}

#[test]
fn a_blocked_transport_costs_the_request_under_way_and_is_regained_when_it_works() {
    let (_server, addr) = server();
    let proxy = Proxy::start();
    let here = SocketAddr::from(([127, 0, 0, 1], 0));
    let behind = Place { bind: proxy.target(), advertised: proxy.address, members: Members::TcpLocal };
    let mut prefill = Process::start_as(Kind::Placed(behind), WorkerRole::Prefill, &addr);
    prefill.tell("deadline 5000");
    let place = Place::at(here, Members::TcpLocal);
    let decode = Kind::Placed(place).setup(WorkerRole::Decode, &addr).start();
    let mut pair = Pair { proxy, decode, prefill, rooms: 0, failed: 0 };
    for _ in 0..3 {
        pair.request(|_| {});
    }
    assert_eq!((pair.failed, pair.opened()), (0, vec!["connect tcp".to_owned()]));

    // In the middle of a request.
    let began = Instant::now();
    pair.request(|proxy| {
        std::thread::sleep(Duration::from_millis(20));
        proxy.close();
    });
    assert!(pair.failed <= 2, "{} attempts of a request were under way", pair.failed);
    let (before, passed) = (pair.failed, pair.proxy.passed());
    let mut served = 0;
    while served < 20 || began.elapsed() < Duration::from_secs(5) {
        pair.request(|_| {});
        served += 1;
    }
    assert_eq!(pair.failed, before, "later requests take the other transport");
    assert_eq!(pair.proxy.passed(), passed);
    let opened = pair.opened();
    println!("{:?} while TCP was blocked: {opened:?}", began.elapsed());
    assert!(opened.contains(&"connect local".to_owned()));
    let tries = opened.iter().filter(|line| *line == "connect tcp").count();
    // This worker's own tries, and its answers while P greets it over TCP: after 200 ms, 400 ms, and so on up to 2 s. Five
    // seconds without longer pauses would have 25.
    let seconds = began.elapsed().as_secs() as usize;
    let most = 2 + seconds.max(1).ilog2() as usize + 4 + seconds / 2;
    assert!(tries <= most, "TCP was tried {tries} times in {:?}", began.elapsed());

    pair.proxy.open();
    until("TCP is taken again", || {
        let passed = pair.proxy.passed();
        pair.request(|_| {});
        std::thread::sleep(Duration::from_millis(100));
        // A registration of so many scattered pages, and not only a hello.
        pair.proxy.passed() > passed && !pair.opened().contains(&"connect tcp".to_owned())
    });
    assert_eq!(pair.failed, before, "a transport is tried beside the requests");
    pair.decode.check_idle("at the end");
    pair.prefill.close();
    pair.decode.close("decode");
}
