//! The region of a host with real processes, which end in every way: what they held is released when nobody can
//! touch it any more, and nothing stays behind.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kv_core::ContentHash;
use kv_ec::host::{HostAddress, HostClient, HostConfig, HostError, HostServer, HostThread};
use kv_ec::{EcRegion, EncoderCache, Eviction, ReserveError, SharedStore};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const ROLE: &str = "KV_EC_TEST_CHILD";
const READY: &str = "the child is ready";
const BLOCKS: u32 = 64;
const BLOCK: u32 = 4096;
const LONG: Duration = Duration::from_secs(30);

fn hash(name: &str) -> ContentHash {
    ContentHash::new(name).unwrap()
}

fn bytes(blocks: u32) -> u64 {
    u64::from(blocks * BLOCK)
}

/// The bytes of an entry that are this process's test data.
fn pattern(seed: u8) -> Vec<u8> {
    (0..3 * BLOCK as usize - 100).map(|at| seed.wrapping_add((at / 5) as u8)).collect()
}

fn address(name: &str) -> HostAddress {
    format!("@kv-ec-test-{name}-{}", std::process::id()).parse().unwrap()
}

/// Another process of this test, which is killed when the value is dropped.
struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    /// Open until the process has ended, because the process prints at its end.
    _stdout: BufReader<ChildStdout>,
}

impl Process {
    /// Starts a process that does `role` at the address, and returns when the process has done its part.
    fn start(role: &str, address: &HostAddress) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{role} {address}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut lines = stdout.by_ref().lines().map_while(Result::ok);
        assert!(lines.any(|line| line.contains(READY)), "the process that was to {role} has ended");
        Process { stdin: child.stdin.take(), _stdout: stdout, child }
    }

    /// Kills the process with SIGKILL.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Lets the process go on to its end.
    fn finish(&mut self) {
        self.stdin = None;
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A process that has ended by itself cannot be killed any more.
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// The body of the other processes; nothing for the test runner.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (role, address) = role.split_once(' ').unwrap();
    let address: HostAddress = address.parse().unwrap();
    let _kept: Box<dyn std::any::Any> = match role {
        "own" => Box::new(serve(&address)),
        "hold" => Box::new(hold(&address)),
        "leave" => {
            drop(hold(&address));
            Box::new(())
        }
        "starve" => {
            let served = serve(&address);
            leave_two_descriptors();
            Box::new(served)
        }
        "visit" => {
            visit(&address);
            Box::new(())
        }
        "write" => {
            let rank = HostClient::connect(&address, "", LONG).unwrap();
            let data = pattern(7);
            let reservation = rank.reserve(&hash("written"), data.len() as u64).unwrap();
            reservation.write(0, &data).unwrap();
            reservation.commit().unwrap();
            Box::new(())
        }
        other => panic!("{other}"),
    };
    println!("{READY}");
    std::io::stdout().flush().unwrap();
    // Until the parent lets go of the pipe.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// A rank that reads one entry and has written a part of another.
fn hold(address: &HostAddress) -> impl Sized + use<> {
    let rank = HostClient::connect(address, "", LONG).unwrap();
    let pin = rank.pin(&hash("kept")).unwrap();
    let reservation = rank.reserve(&hash("unfinished"), bytes(5)).unwrap();
    reservation.write(0, b"half of it").unwrap();
    (rank, pin, reservation)
}

/// The process that owns the region, with an entry of 4 blocks.
fn serve(address: &HostAddress) -> (HostThread, SharedStore, EcRegion) {
    let (server, store, region) = listen(address);
    (server.spawn().unwrap(), store, region)
}

/// A server that the caller turns.
fn listen(address: &HostAddress) -> (HostServer, SharedStore, EcRegion) {
    let region = EcRegion::create(BLOCKS, BLOCK).unwrap();
    let store = SharedStore::new(EncoderCache::new(BLOCKS, BLOCK, Eviction::Lru));
    let reservation = store.reserve(&hash("kept"), bytes(4)).unwrap();
    region.write(reservation.pages(), 0, b"kept bytes").unwrap();
    store.commit(reservation).unwrap();
    let server = HostServer::bind(address, &region, &store, HostConfig::default()).unwrap();
    (server, store, region)
}

/// Waits until something is so; the test fails if that takes too long.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < LONG, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_killed_rank_gives_back_its_pins_and_its_unfinished_entries() {
    let address = address("killed-rank");
    let (server, store, _region) = serve(&address);
    let mut rank = Process::start("hold", &address);
    assert_eq!((store.gauges().pinned, store.gauges().filling), (4, 5));
    let full = ReserveError::Full { blocks: 60, free: 55, evictable: 0 };
    assert_eq!(store.reserve(&hash("other"), bytes(60)).unwrap_err(), full);
    rank.kill();
    until("pins and reservations of a killed rank", || {
        (store.gauges().pinned, store.gauges().filling) == (0, 0)
    });
    assert_eq!((store.contains(&hash("kept")), store.contains(&hash("unfinished"))), (Some(true), None));
    let all = store.reserve(&hash("other"), bytes(64)).unwrap();
    store.discard(all);
    until("the server forgets the rank", || server.gauges() == Default::default());
    assert_eq!((store.gauges().free, store.gauges().lost), (64, 0));
}

#[test]
fn a_server_that_ends_after_its_rank_gives_back_what_the_rank_had() {
    let address = address("server-ends");
    let (mut server, store, _region) = listen(&address);
    let mut rank = std::thread::scope(|scope| {
        let starting = scope.spawn(|| Process::start("hold", &address));
        while !starting.is_finished() {
            server.turn(Some(Duration::from_millis(1))).unwrap();
        }
        starting.join().unwrap()
    });
    assert_eq!((store.gauges().pinned, store.gauges().filling), (4, 5));
    rank.kill();
    drop(server);
    assert_eq!((store.gauges().cached, store.gauges().free, store.gauges().lost), (4, 60, 0));
}

#[test]
fn blocks_that_a_live_process_may_still_write_outlast_its_connection() {
    let address = address("leaving-rank");
    let (server, store, _region) = serve(&address);
    let mut rank = Process::start("leave", &address);
    until("the end of the connection", || server.gauges().leaving == 1);
    assert_eq!((server.gauges().connections, server.gauges().reservations), (0, 1));
    // The pin is over, the reservation is not.
    assert_eq!((store.gauges().cached, store.gauges().filling), (4, 5));
    let known = ReserveError::Known { ready: false };
    assert_eq!(store.reserve(&hash("unfinished"), 1).unwrap_err(), known);
    rank.finish();
    until("the end of the process", || store.gauges().filling == 0);
    assert_eq!((store.gauges().free, store.gauges().lost), (60, 0));
}

#[test]
fn an_entry_that_one_process_writes_is_read_by_the_others() {
    let address = address("two-ranks");
    let (_server, store, region) = serve(&address);
    Process::start("write", &address).finish();
    let data = pattern(7);
    let rank = HostClient::connect(&address, "", LONG).unwrap();
    let pin = rank.pin(&hash("written")).unwrap();
    assert_eq!(pin.bytes(), data.len() as u64);
    let mut theirs = vec![0; data.len()];
    pin.read(0, &mut theirs).unwrap();
    assert!(theirs == data);
    let mut ours = vec![0; data.len()];
    region.read(store.pin_guard(&hash("written")).unwrap().pages(), 0, &mut ours).unwrap();
    assert!(ours == data);
    assert_ne!(rank.region().memory().addr(), region.memory().addr());
}

/// Names in the directory of POSIX shared memory that this project could have made. Those of UCX, of tests that run beside
/// this one, are not among them.
fn shared_names() -> BTreeSet<String> {
    let names = std::fs::read_dir("/dev/shm").into_iter().flatten().map_while(Result::ok);
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| !name.starts_with("ucx") && (name.contains("kv") || name.contains("ec"))).collect()
}

#[test]
fn a_killed_owner_leaves_nothing_behind_and_its_ranks_keep_what_they_have_mapped() {
    let path = std::env::temp_dir().join(format!("kv-ec-owner-{}.sock", std::process::id()));
    let before = shared_names();
    for address in [address("killed-owner"), HostAddress::Path(path.clone())] {
        let mut owner = Process::start("own", &address);
        let rank = HostClient::connect(&address, "", LONG).unwrap();
        let pin = rank.pin(&hash("kept")).unwrap();
        let reservation = rank.reserve(&hash("mine"), bytes(1)).unwrap();
        owner.kill();
        assert_eq!(shared_names(), before);
        assert_eq!(rank.pin(&hash("kept")).unwrap_err(), HostError::Closed);
        assert_eq!(reservation.discard().unwrap_err(), HostError::Closed);
        let (mut kept, blocks) = ([0; 10], pin.pages().clone());
        assert_eq!(pin.read(0, &mut kept).unwrap_err(), HostError::Closed, "the pin is over");
        rank.region().read(&blocks, 0, &mut kept).unwrap();
        assert_eq!(&kept, b"kept bytes");
        let mapped = rank.region().clone();
        // The next owner has the same address at once, and memory of its own.
        let mut next = Process::start("own", &address);
        let rank = HostClient::connect(&address, "", LONG).unwrap();
        mapped.read(&blocks, 0, &mut kept).unwrap();
        assert_eq!(&kept, b"kept bytes");
        drop((pin, rank));
        next.finish();
    }
    assert!(!path.exists(), "a server that ends removes its file");
    assert_eq!(shared_names(), before);
}

/// How many descriptors a process has open: a process id, or `self`.
fn descriptors(process: &str) -> usize {
    std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().count()
}

/// Connects and reads again and again, in a process in which no other test opens descriptors.
fn visit(address: &HostAddress) {
    let before = descriptors("self");
    for _ in 0..200 {
        let rank = HostClient::connect(address, "", LONG).unwrap();
        drop(rank.pin(&hash("kept")).unwrap());
    }
    assert_eq!(descriptors("self"), before);
}

#[test]
fn connections_that_come_and_go_leave_no_descriptors_in_either_process() {
    let address = address("come-and-go");
    let mut owner = Process::start("own", &address);
    let of_owner = || descriptors(&owner.child.id().to_string());
    let before = of_owner();
    Process::start("visit", &address).finish();
    until("the owner closes the ends of 200 connections", || of_owner() == before);
    owner.finish();
}

/// Limits the descriptors of this process so that it can open two more: one connection takes two.
fn leave_two_descriptors() {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().map(|fd| fd.unwrap().path());
    // The directory that is being read is closed afterwards.
    let open = open.filter(|fd| !std::fs::read_link(fd).unwrap().ends_with("fd"));
    let open: BTreeSet<u64> =
        open.map(|fd| fd.file_name().unwrap().to_str().unwrap().parse().unwrap()).collect();
    let most = (0..).find(|most| most - open.range(..most).count() as u64 == 2);
    let limits = Rlimit { current: most, ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limits).unwrap();
}

#[test]
fn a_server_without_descriptors_accepts_again_when_it_has_some() {
    let address = address("starve");
    let mut owner = Process::start("starve", &address);
    let first = HostClient::connect(&address, "", LONG).unwrap();
    let short = Duration::from_millis(100);
    // The server has no descriptor for another connection, which waits.
    assert_eq!(HostClient::connect(&address, "", short).unwrap_err(), HostError::TimedOut { after: short });
    assert!(first.pin(&hash("kept")).is_ok());
    let second = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| HostClient::connect(&address, "", LONG));
        drop(first);
        waiting.join().unwrap()
    });
    assert!(second.unwrap().pin(&hash("kept")).is_ok());
    owner.finish();
}
