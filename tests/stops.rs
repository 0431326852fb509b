//! Processes that are stopped for longer than every timeout, in the middle of large copies, and then resumed
//! or killed. No byte changes in a page that was given back, every page comes back in the end, and both sides
//! serve again.
//!
//! `KV_STOPS=50` stops each side fifty times over each transport instead of a few times; then a quarter of the stops must
//! come within a transfer, for which the transports need turns of their own (`--test-threads=1`). `SEED` repeats a run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::time::{Duration, Instant};

use kv_conformance::Random;
use kv_transfer::prelude::*;
use rustix::process::Signal;
use support::process::{Actor, Kind, Process};
use support::store::TransportKind;
use support::{PATIENCE, server};

/// Pages of a large request: 56 MiB.
const MANY: usize = 112;
/// The number of pages of a request that shows that both sides serve.
const FEW: usize = 6;
/// The deadline of large requests.
const DEADLINE: Duration = Duration::from_millis(1000);
/// Longer than that, and than every other timeout of [`Kind::Stopped`].
const STOPPED: Duration = Duration::from_millis(1800);
/// How long pages that were given back are watched after that.
const WATCHED: Duration = Duration::from_millis(800);
/// How often each side is stopped, unless `KV_STOPS` says otherwise.
const TIMES: usize = 2;

/// The entry point of the other process. In the test's own process it does nothing.
#[test]
fn child() {
    support::process::child();
}

#[test]
fn stopped_processes_of_the_local_transport_write_into_no_page_that_was_given_back() {
    stop_each_side(TransportKind::Local);
}

#[test]
fn stopped_processes_of_the_tcp_transport_write_into_no_page_that_was_given_back() {
    stop_each_side(TransportKind::Tcp);
}

#[cfg(feature = "nixl")]
#[test]
fn stopped_processes_of_the_nixl_transport_write_into_no_page_that_was_given_back() {
    if support::store::nixl().is_some() {
        stop_each_side(TransportKind::Nixl);
    }
}

#[cfg(feature = "ucx")]
#[test]
fn stopped_processes_of_the_ucx_transport_write_into_no_page_that_was_given_back() {
    const NAME: &str = "stopped_processes_of_the_ucx_transport_write_into_no_page_that_was_given_back";
    if kv_conformance::needed("UCX", kv_transfer::ucx::Ucx::look(None)).is_some() {
        apart_from_nixl(NAME, TransportKind::Ucx);
    }
}

#[cfg(feature = "nixl")]
#[test]
fn stopped_processes_write_into_no_gpu_page_that_was_given_back_over_nixl() {
    if support::store::nixl().is_some()
        && kv_conformance::needed("GPU", kv_conformance::Gpu::first()).is_some()
    {
        stop_each_side(TransportKind::NixlGpu);
    }
}

#[cfg(feature = "ucx")]
#[test]
fn stopped_processes_write_into_no_gpu_page_that_was_given_back_over_ucx() {
    const NAME: &str = "stopped_processes_write_into_no_gpu_page_that_was_given_back_over_ucx";
    let ucx = kv_conformance::needed("UCX", kv_transfer::ucx::Ucx::look(None));
    if ucx.is_some() && kv_conformance::needed("GPU", kv_conformance::Gpu::first()).is_some() {
        apart_from_nixl(NAME, TransportKind::UcxGpu);
    }
}

/// Runs the test of this name in a process of its own: NIXL, which other tests load, brings another copy of UCX.
#[cfg(feature = "ucx")]
fn apart_from_nixl(name: &str, transport: TransportKind) {
    const APART: &str = "KV_STOPS_APART";
    if std::env::var_os(APART).is_some() {
        return stop_each_side(transport);
    }
    let this = std::env::current_exe().unwrap();
    let again = std::process::Command::new(this).args(support::only(name)).env(APART, "").status();
    assert!(again.unwrap().success());
}

#[cfg(feature = "fabric")]
#[test]
fn stopped_processes_of_the_libfabric_transport_write_into_no_page_that_was_given_back() {
    if kv_conformance::needed("FABRIC", kv_transfer::fabric::installed()).is_some() {
        stop_each_side(TransportKind::Fabric);
    }
}

fn stop_each_side(transport: TransportKind) {
    let times = std::env::var("KV_STOPS").map_or(TIMES, |times| times.parse().unwrap());
    let mut random = Random::new(&format!("stops over {transport:?}"));
    for side in [WorkerRole::Prefill, WorkerRole::Decode] {
        let mut scene = Scene::new(transport, side);
        let mut hits = 0;
        for number in 0..times as u64 {
            hits += usize::from(scene.stop(number, &mut random));
        }
        println!("{side:?} was stopped {times} times over {transport:?}, {hits} of them within a transfer");
        assert!(times < 20 || hits > times / 4, "hardly any stop came within a transfer");
        scene.close();
    }
}

/// One side in this process, which survives, and the other side in a process that is stopped.
struct Scene {
    transport: TransportKind,
    kind: Kind,
    /// The side that is stopped.
    side: WorkerRole,
    here: Actor,
    there: Process,
    addr: String,
    _server: KvBootstrapServer,
}

impl Scene {
    fn new(transport: TransportKind, side: WorkerRole) -> Scene {
        let (server, addr) = server();
        let kind = Kind::Stopped(transport);
        let other = if side == WorkerRole::Prefill { WorkerRole::Decode } else { WorkerRole::Prefill };
        let here = Actor::start(kind, other, &addr);
        let there = Process::start_as(kind, side, &addr);
        Scene { transport, kind, side, here, there, addr, _server: server }
    }

    fn tell(&mut self, side: WorkerRole, line: &str) {
        if side == self.side { self.there.tell(line) } else { self.here.obey(line) }
    }

    fn both(&mut self, line: &str) {
        self.tell(WorkerRole::Prefill, line);
        self.tell(WorkerRole::Decode, line);
    }

    /// Lets the side in this process go on until `done` is true.
    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Scene) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < end, "{what}: waited in vain; {:?}", self.here.host.gauges());
            self.here.step();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for an answer of a side.
    fn expect(&mut self, side: WorkerRole, word: &str) -> String {
        let mut heard = None;
        self.until(&format!("{side:?} to say {word:?}"), |scene| {
            let line = if side == scene.side { scene.there.hear(word) } else { scene.here.hear(word) };
            heard = line.map(|words| words.join(" "));
            heard.is_some()
        });
        heard.unwrap()
    }

    /// Begins a large request.
    fn begin(&mut self, room: u64, pull: bool, held: usize) {
        use WorkerRole::{Decode, Prefill};
        let content = room + 1;
        if pull {
            self.tell(Prefill, &format!("keep {room} {MANY} {content} 500"));
            let params = self.expect(Prefill, "kept");
            self.tell(Decode, &format!("acquire {content} {params}"));
            self.expect(Decode, "acquired");
            self.tell(Decode, &format!("read {room} {MANY} 0"));
        } else {
            self.tell(Decode, &format!("receive {room} {MANY} {content}"));
            self.tell(Prefill, &format!("send {room} {MANY} {held} {content}"));
        }
    }

    /// Stops the other side at some moment of a large request, for longer than every timeout, and resumes or
    /// kills it. Afterwards both sides must serve. Returns what happened, and whether the stop was within the
    /// transfer.
    fn stop(&mut self, number: u64, random: &mut Random) -> bool {
        let room = 1000 * number;
        let (pull, killed) = (random.chance(33) && self.transport.reads(), random.chance(25));
        // A request of which pages are held back is still under way whenever the stop comes.
        let held = usize::from(!pull && random.chance(70));
        let (at_bytes, delay) = (random.chance(70), Duration::from_micros(random.below(12_000) as u64));
        self.both(&format!("deadline {}", DEADLINE.as_millis()));
        self.both(&format!("watch {}", random.below(256)));
        let posts = self.here.host.gauges().posts;
        self.begin(room, pull, held);
        // A sender that is read from sees nothing of it.
        let seen = self.side == WorkerRole::Prefill || !pull;
        if at_bytes && seen {
            self.until("the first bytes", |scene| {
                let ended = scene.here.said.iter().any(|line| line.starts_with("ended"));
                ended || scene.here.host.gauges().posts > posts || scene.here.sees_bytes()
            });
        }
        std::thread::sleep(delay);
        self.there.signal(Signal::STOP);
        let stopped = Instant::now();

        let mut back = None;
        while stopped.elapsed() < STOPPED {
            self.here.step();
            if back.is_none() && !self.here.said.is_empty() {
                back = Some(stopped.elapsed());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let side = self.side;
        if killed {
            self.there.signal(Signal::KILL);
        } else {
            self.there.signal(Signal::CONT);
        }
        let other = if side == WorkerRole::Prefill { WorkerRole::Decode } else { WorkerRole::Prefill };
        let ended_here = self.expect(other, "ended");
        let back = back.unwrap_or_else(|| stopped.elapsed());
        let ended_there = if killed { "killed".to_owned() } else { self.expect(side, "ended") };
        while stopped.elapsed() < STOPPED + WATCHED {
            self.here.step();
            std::thread::sleep(Duration::from_millis(1));
        }
        self.tell(other, "free");
        self.expect(other, "freed");
        if killed {
            self.there = Process::start_as(self.kind, side, &self.addr);
        } else {
            self.tell(side, "free");
            self.expect(side, "freed");
        }
        let mode = if pull { "pull" } else { "push" };
        let then = if killed { "killed" } else { "resumed" };
        println!(
            "{number:>3}: {side:?} stopped {delay:?} after the {}, {mode}, {held} held, {then}; the other \
             side had its pages {} ms after the stop: {ended_here}; the stopped one: {ended_there}",
            if at_bytes && seen { "first bytes" } else { "beginning" },
            back.as_millis(),
        );
        self.serve(room + 1);
        !ended_here.ends_with("Success")
    }

    /// Checks that both sides serve. On a busy machine, a side can stand still for longer than the times of
    /// [`Kind::Stopped`] allow; a request that ends for this reason is tried again in the next room.
    fn serve(&mut self, mut room: u64) {
        const STOOD_STILL: [&str; 3] = ["PeerUnresponsive", "ByPeer(OtherRankLost)", "Post(Revoked)"];
        let until = Instant::now() + PATIENCE;
        self.both(&format!("deadline {}", PATIENCE.as_millis()));
        loop {
            self.tell(WorkerRole::Decode, &format!("receive {room} {FEW} {room}"));
            self.tell(WorkerRole::Prefill, &format!("send {room} {FEW} 0 {room}"));
            let success = format!("{room} Success");
            let ends = [WorkerRole::Prefill, WorkerRole::Decode].map(|side| self.expect(side, "ended"));
            if ends.iter().all(|end| *end == success) {
                return;
            }
            let again = ends.iter().all(|end| {
                *end == success || STOOD_STILL.iter().any(|why| end.starts_with(&format!("{room} {why}")))
            });
            assert!(again && Instant::now() < until, "the ends of a request after the stop: {ends:?}");
            println!("a request after the stop is tried again: {ends:?}");
            room += 1;
        }
    }

    fn close(self) {
        self.there.close();
        self.here.host.close("the side here");
    }
}
