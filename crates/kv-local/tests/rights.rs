//! The right to write: permissions that begin and end, and revocations of peers that run, stop and die.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::time::{Duration, Instant};

use kv_conformance::process::{self, Process};
use kv_conformance::{A_KNOWS_B, Job, Other, Pair, Side, boottime, connect, rest};
use kv_core::{
    Descriptor, Op, PeerId, Post, PostId, Time, Transport, TransportError, TransportEvent, TransportWait,
    WayEnd, WriteFence,
};
use kv_local::LocalTransport;
use rustix::process::{Pid, Signal, kill_process};
use workers::{PLACES, Place, place, worker};

const LEN: usize = 32 << 20;
const PEER: PeerId = PeerId(1);
const DEAD: TransportEvent =
    TransportEvent::PeerGone { peer: PEER, end: WayEnd::Dead { quiet_after: Duration::ZERO } };
const REVOKED: TransportEvent = TransportEvent::Revoked { peer: PEER };

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    process::child(|kind| worker(place(kind), &[LEN]));
}

fn write(id: u64, len: usize) -> Post {
    let descriptor =
        Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: len as u64 };
    Post { id: PostId(id), op: Op::Write, descriptors: vec![descriptor], notify: None }
}

/// Two workers whose first may not write yet.
fn unpermitted(a: Place, b: Place) -> Pair<LocalTransport> {
    let mut pair = Pair::new(worker(a, &[LEN]), worker(b, &[LEN])).introduce();
    pair.a.transport.permit(A_KNOWS_B, Time::ZERO);
    pair
}

#[test]
fn a_write_without_permission_waits_asleep_and_goes_on_with_it() {
    for (a, b) in PLACES {
        let mut pair = unpermitted(a, b);
        pair.a.memory.write(0, 0, &[7; 4096]);
        pair.a.transport.post(A_KNOWS_B, write(1, 4096)).unwrap();
        pair.a.transport.post(A_KNOWS_B, Post { op: Op::Read, ..write(2, 4096) }).unwrap();
        pair.until("the read", |pair| !pair.a_events.is_empty());
        assert_eq!(pair.a_events, [TransportEvent::Posted { post: PostId(2), result: Ok(()) }]);
        pair.a.memory.write(0, 0, &[7; 4096]);
        // A permission that ends before a slice surely has does not help.
        pair.a.transport.permit(A_KNOWS_B, boottime() + Duration::from_millis(5));
        pair.until("rest", |pair| pair.a.transport.wait() != TransportWait::Now);
        assert_eq!(first_bytes(&pair.b), [0; 4096]);
        pair.a.transport.permit(A_KNOWS_B, boottime() + Duration::from_secs(60));
        assert_eq!(pair.a.transport.wait(), TransportWait::Now);
        pair.until("the write", |pair| pair.a_events.len() == 2);
        assert_eq!(pair.a_events[1], TransportEvent::Posted { post: PostId(1), result: Ok(()) });
        assert_eq!(first_bytes(&pair.b), [7; 4096]);
    }
}

#[test]
fn waiting_writes_end_with_their_cancel_and_with_their_peer() {
    let mut pair = unpermitted(Place::Arena, Place::Arena);
    for id in 0..3 {
        pair.a.transport.post(A_KNOWS_B, write(id, 4096)).unwrap();
    }
    pair.turn();
    pair.a.transport.cancel(PostId(0));
    pair.turn();
    assert_eq!(
        pair.a_events,
        [TransportEvent::Posted { post: PostId(0), result: Err(TransportError::Cancelled) }]
    );
    let metadata = pair.b.transport.metadata().unwrap();
    pair.a.transport.disconnect(A_KNOWS_B);
    pair.turn();
    assert_eq!(pair.a_events.len(), 3);
    // A peer that is connected anew has allowed nothing.
    pair.a.transport.connect(A_KNOWS_B, &metadata).unwrap();
    pair.a.transport.post(A_KNOWS_B, write(3, 4096)).unwrap();
    for _ in 0..200 {
        pair.turn();
    }
    assert_eq!(pair.a_events.len(), 3);
    assert_ne!(pair.a.transport.wait(), TransportWait::Now);
}

fn first_bytes(side: &Side<LocalTransport>) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    side.memory.read(0, 0, &mut bytes);
    bytes
}

#[test]
fn a_revoked_right_ends_writes_while_reads_and_frames_go_on() {
    for (a, b) in PLACES {
        let mut pair = Pair::new(worker(a, &[LEN]), worker(b, &[LEN])).introduce();
        assert_eq!(pair.b.transport.write_fence(kv_conformance::B_KNOWS_A), WriteFence::Revocable);
        assert_eq!(pair.b.transport.write_fence(PeerId(99)), WriteFence::AtDeath);
        pair.a.transport.post(A_KNOWS_B, write(1, LEN)).unwrap();
        pair.turn();
        pair.b.transport.revoke(kv_conformance::B_KNOWS_A);
        pair.b.transport.poll(boottime(), &mut pair.b_events);
        assert_eq!(pair.b_events, [TransportEvent::Revoked { peer: kv_conformance::B_KNOWS_A }], "at once");
        pair.b.memory.write(0, 0, &vec![0xee; LEN]);
        pair.until("the end", |pair| !pair.a_events.is_empty());
        assert_eq!(
            pair.a_events,
            [TransportEvent::Posted { post: PostId(1), result: Err(TransportError::Revoked) }]
        );
        pair.a.transport.post(A_KNOWS_B, Post { op: Op::Read, ..write(2, LEN) }).unwrap();
        pair.until("a read", |pair| pair.a_events.len() == 2);
        assert_eq!(pair.a_events[1], TransportEvent::Posted { post: PostId(2), result: Ok(()) });
        assert!(kv_conformance::snapshot(&pair.a)[0].iter().all(|byte| *byte == 0xee));
        pair.a.transport.send(A_KNOWS_B, bytes::Bytes::from_static(b"still here")).unwrap();
        pair.until("a frame", |pair| kv_conformance::heard(&pair.b_events, b"still here"));
        // A new connection brings a new right.
        let metadata = pair.b.transport.metadata().unwrap();
        pair.a.transport.disconnect(A_KNOWS_B);
        connect(&mut pair.a.transport, A_KNOWS_B, &metadata).unwrap();
        pair.a.transport.post(A_KNOWS_B, write(3, 4096)).unwrap();
        pair.until("a write", |pair| pair.a_events.len() == 3);
        assert_eq!(pair.a_events[2], TransportEvent::Posted { post: PostId(3), result: Ok(()) });
    }
}

/// A worker here into whose memory a process writes all the time.
struct Written {
    side: Side<LocalTransport>,
    writer: Process,
    events: Vec<TransportEvent>,
}

impl Written {
    fn new(here: Place) -> Written {
        let mut side = worker(here, &[LEN]);
        let writer = Process::start("Arena", Job::Write, &side.transport.metadata().unwrap());
        connect(&mut side.transport, PEER, writer.metadata()).unwrap();
        let mut written = Written { side, writer, events: Vec::new() };
        written.until("writes", |written| first_bytes(&written.side)[8] == 8);
        written
    }

    fn turn(&mut self) {
        self.side.transport.poll(boottime(), &mut self.events);
        rest(&self.side.transport, Duration::from_millis(1));
    }

    fn until(&mut self, what: &str, done: impl Fn(&Written) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !done(self) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.events);
            self.turn();
        }
    }

    fn pass(&mut self, span: Duration) {
        let end = Instant::now() + span;
        while Instant::now() < end {
            self.turn();
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.writer.child().id() as i32).unwrap();
        kill_process(pid, signal).unwrap();
    }

    fn stop(&self) {
        self.signal(Signal::STOP);
        let stat = format!("/proc/{}/task", self.writer.child().id());
        let stopped = || {
            let mut tasks = std::fs::read_dir(&stat).unwrap();
            tasks.all(|task| {
                let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
                stat.rsplit(") ").next().unwrap().starts_with('T')
            })
        };
        while !stopped() {
            std::thread::yield_now();
        }
    }

    /// Fills the memory and checks that nothing else arrives in it.
    fn assert_quiet(&mut self) {
        self.side.memory.write(0, 0, &vec![0xee; LEN]);
        self.pass(Duration::from_millis(200));
        let memory = kv_conformance::snapshot(&self.side);
        let strange = memory[0].iter().position(|byte| *byte != 0xee);
        assert_eq!(strange, None, "a byte arrived after the right was revoked");
    }

    /// A writer that was stopped in the middle of a slice, after its right was asked back.
    fn stopped_in_a_slice(here: Place) -> Written {
        for attempt in 0..50 {
            let mut written = Written::new(here);
            written.stop();
            written.side.transport.revoke(PEER);
            written.pass(Duration::from_millis(100));
            if !written.events.contains(&REVOKED) {
                return written;
            }
            // Between two slices: nothing arrives any more, whatever it does now.
            println!("attempt {attempt}: stopped between slices");
            written.signal(Signal::CONT);
            written.assert_quiet();
        }
        panic!("never stopped in the middle of a slice");
    }
}

#[test]
fn a_writer_stopped_in_a_slice_keeps_its_right_until_it_moves_again() {
    for here in [Place::Arena, Place::Adopted] {
        let mut written = Written::stopped_in_a_slice(here);
        written.pass(Duration::from_millis(300));
        assert_eq!(written.events, [], "{here:?}: nothing is certain while it is stopped");
        assert!(matches!(written.side.transport.wait(), TransportWait::ReadableOrAfter(_, after)
            if after <= Duration::from_millis(10)));
        written.signal(Signal::CONT);
        written.until("the end of the slice", |written| written.events.contains(&REVOKED));
        written.assert_quiet();
        assert_eq!(written.events, [REVOKED], "{here:?}");
        assert!(written.writer.is_alive());
    }
}

#[test]
fn a_writer_killed_in_a_slice_is_dead_and_not_revoked() {
    let mut written = Written::stopped_in_a_slice(Place::Arena);
    written.writer.kill();
    written.until("its death", |written| written.events.contains(&DEAD));
    written.assert_quiet();
    written.events.retain(|event| *event != TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost });
    assert_eq!(written.events, [DEAD]);
    assert!(
        matches!(written.side.transport.wait(), TransportWait::Readable(_)),
        "nobody is looked at any more"
    );
}

#[test]
fn a_writer_stopped_in_a_slice_may_be_forgotten_and_is_answered_for() {
    let mut written = Written::stopped_in_a_slice(Place::Arena);
    written.side.transport.disconnect(PEER);
    written.pass(Duration::from_millis(100));
    assert_eq!(written.events, []);
    written.signal(Signal::CONT);
    written.until("the end of the slice", |written| written.events.contains(&REVOKED));
    assert_eq!(written.events, [REVOKED]);
}

#[test]
fn a_running_writer_loses_its_right_within_a_moment() {
    for here in [Place::Arena, Place::Adopted] {
        for _ in 0..5 {
            let mut written = Written::new(here);
            written.side.transport.revoke(PEER);
            written.until("the end of a slice", |written| written.events.contains(&REVOKED));
            written.assert_quiet();
            assert_eq!(written.events, [REVOKED]);
        }
    }
}
