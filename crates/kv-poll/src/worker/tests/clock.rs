//! Which reading of the clock goes with which input, on a worker without a thread.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::machine::Machine;
use kv_core::proto::{Command, Input, Output, Resource};
use kv_core::trace::KvWhat;
use kv_core::{
    BootstrapClient, BootstrapError, BootstrapEvent, KvManager, KvPoll, KvSession, LookupId, Origin, PeerId,
    Post, PostId, Quarantine, RankQuery, RankRecord, Region, Room, SessionOptions, Time, TransferError,
    Transport, TransportError, TransportEvent, TransportOffer, TransportWait, WorkerRole, WriteFence,
};

use super::client::FakeClient;
use super::script::{SLOW, Script};
use super::transport::{Wire, fake_transport};
use super::{Log, args, driver, manager};
use crate::kv::{Manager, WorkerConfig};
use crate::worker::Turn;
use crate::worker::clock::Clock;

/// A clock that goes on by `step` at every reading: no two readings are alike.
#[derive(Clone, Default)]
pub(super) struct Ticking {
    at: Arc<AtomicU64>,
    step: u64,
    /// Uses this manager at every reading: a scheduler that is never late.
    scheduler: Arc<Mutex<Option<Manager>>>,
}

impl Ticking {
    pub(super) fn new(step: u64) -> Ticking {
        Ticking { step, ..Ticking::default() }
    }

    /// What the last reading was.
    fn last(&self) -> u64 {
        self.at.load(Ordering::SeqCst)
    }

    pub(super) fn go_on(&self, by: Duration) {
        self.at.fetch_add(by.as_nanos() as u64, Ordering::SeqCst);
    }
}

impl Clock for Ticking {
    fn now(&self) -> Time {
        let now = self.at.fetch_add(self.step, Ordering::SeqCst) + self.step;
        if let Some(manager) = &*self.scheduler.lock().unwrap() {
            let _ = manager.sender("", Room::from(now), &[], SessionOptions::default());
        }
        Time::from_nanos(now)
    }
}

/// A transport and a client whose events say what the clock's last reading was when they came.
struct Stamping {
    clock: Ticking,
    connected: Arc<AtomicU64>,
    polls: usize,
}

impl Transport for Stamping {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn register(&mut self, _: &Region) -> Result<(), TransportError> {
        Ok(())
    }

    fn metadata(&self) -> Result<Bytes, TransportError> {
        Ok(Bytes::from_static(b"metadata"))
    }

    fn connect(&mut self, _: PeerId, _: &[u8]) -> Result<(), TransportError> {
        self.connected.store(self.clock.last(), Ordering::SeqCst);
        Ok(())
    }

    fn disconnect(&mut self, _: PeerId) {}

    fn send(&mut self, _: PeerId, _: Bytes) -> Result<(), TransportError> {
        Ok(())
    }

    fn post(&mut self, _: PeerId, _: Post) -> Result<(), TransportError> {
        Ok(())
    }

    fn cancel(&mut self, _: PostId) {}

    fn permit(&mut self, _: PeerId, _: Time) {}

    fn write_fence(&self, _: PeerId) -> WriteFence {
        WriteFence::AtDeath
    }

    fn poll(&mut self, now: Time, events: &mut Vec<TransportEvent>) {
        let stamp = self.clock.last();
        assert_eq!(now.as_nanos(), stamp, "a transport is polled at the time of the clock");
        let frame = Bytes::copy_from_slice(&stamp.to_le_bytes());
        events.push(TransportEvent::Frame { from: Origin(1), frame });
        events.push(TransportEvent::Posted { post: PostId(stamp), result: Err(TransportError::Cancelled) });
    }

    fn wait(&self) -> TransportWait {
        TransportWait::Now
    }
}

impl BootstrapClient for Stamping {
    fn publish(&mut self, _: Time, _: &str, _: RankRecord) {}

    fn withdraw(&mut self, _: Time) {}

    fn lookup(&mut self, _: Time, _: LookupId, _: &str, _: &RankQuery) {}

    fn poll(&mut self, now: Time) -> Option<BootstrapEvent> {
        assert_eq!(now.as_nanos(), self.clock.last(), "a client is polled at the time of the clock");
        self.polls += 1;
        let (lookup, error) = (LookupId(self.clock.last()), BootstrapError::TimedOut);
        (!self.polls.is_multiple_of(3)).then_some(BootstrapEvent::Failed { lookup, error })
    }

    fn next_timeout(&self) -> Option<Time> {
        None
    }

    fn as_raw_fd(&self) -> Option<RawFd> {
        None
    }
}

/// A machine that compares the time of each input with the stamp in it.
struct Comparing {
    connected: Arc<AtomicU64>,
    outputs: Vec<Output>,
    last: Time,
    due: Option<Time>,
    seen: Arc<Mutex<[usize; 6]>>,
}

impl Machine for Comparing {
    type Command = Command;
    type Status = KvPoll;
    type Resource = Resource;
    type Failure = TransferError;
    type Quarantine = Quarantine;
    type Trace = KvWhat;

    fn handle(&mut self, now: Time, input: Input) {
        let (kind, stamp) = match &input {
            Input::Frame { frame, .. } => (0, u64::from_le_bytes(frame[..].try_into().unwrap())),
            Input::Posted { post, .. } => (1, post.0),
            Input::LookupFailed { lookup, .. } => (2, lookup.0),
            Input::Command(Command::OpenSender { room: Room::Number(stamp), .. }) => (3, *stamp),
            Input::Connected { .. } => (4, self.connected.load(Ordering::SeqCst)),
            Input::Timeout => (5, self.due.take().unwrap().as_nanos()),
            _ => return,
        };
        assert!(now.as_nanos() > stamp, "given as of {now:?}, it came after {stamp}: {input:?}");
        assert!(now > self.last, "{now:?} comes after {:?}", self.last);
        self.last = now;
        self.seen.lock().unwrap()[kind] += 1;
        if kind == 0 {
            let transport = TransportOffer::new("clock", Bytes::from_static(b"metadata"));
            self.outputs.push(Output::Connect { peer: PeerId(1), transport });
            self.due = Some(now);
        }
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop()
    }

    fn next_timeout(&self) -> Option<Time> {
        self.due
    }
}

#[test]
fn no_input_is_given_as_of_a_time_before_it_came() {
    let (clock, connected, seen) = (Ticking::new(1_000), Arc::default(), Arc::default());
    let stamping = || Stamping { clock: clock.clone(), connected: Arc::clone(&connected), polls: 0 };
    let node = Comparing {
        connected: Arc::clone(&connected),
        outputs: Vec::new(),
        last: Time::ZERO,
        due: None,
        seen: Arc::clone(&seen),
    };
    let config = WorkerConfig::new(args(), WorkerRole::Prefill).with(|config| config.max_sessions = 1 << 10);
    let mut driver = driver(Box::new(node), config, stamping(), stamping(), clock.clone());
    *clock.scheduler.lock().unwrap() = Some(manager(&driver));
    for _ in 0..4 {
        assert_eq!(driver.turn(), Turn::Again);
    }
    *clock.scheduler.lock().unwrap() = None;
    let seen: [usize; 6] = *seen.lock().unwrap();
    assert!(seen.iter().all(|&count| count >= 4), "each kind of input in each turn: {seen:?}");
}

#[test]
fn a_deadline_that_passes_while_the_host_is_suspended_does_not_wait_for_the_sleep_to_end() {
    let (log, wire, clock) = (Log::default(), Wire::new(), Ticking::new(0));
    let config = WorkerConfig::new(args(), WorkerRole::Prefill).with(|config| config.max_sessions = 64);
    let (transport, client) = (fake_transport(&log, &wire), FakeClient::new(&log));
    let mut driver = driver(Box::new(Script::new(&log)), config, transport, client, clock.clone());
    let sender = manager(&driver).sender("", Room::from(SLOW), &[], SessionOptions::default()).unwrap();
    wire.say("far timer");
    let Turn::Rest(rest) = driver.turn() else { panic!("there is nothing to do") };
    assert_eq!(rest.at_most, Some(Duration::from_secs(60)));
    // The kernel's sleep stands still while the host is suspended, and the deadline does not.
    clock.go_on(Duration::from_secs(60));
    let start = Instant::now();
    driver.sleep(&rest);
    assert!(start.elapsed() < Duration::from_secs(30), "slept {:?}", start.elapsed());
    driver.turn();
    assert_eq!(sender.poll(), KvPoll::Success, "the machine's timer has ended it");
    driver.stop(Duration::ZERO);
    while !matches!(driver.turn(), Turn::Ended(_)) {}
}
