//! Sessions of a machine that meets no producer: who waits, for how long, and what is left afterwards.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::{Input, Machine, Output};
use kv_core::proto::NodeConfig;
use kv_core::{ContentHash, Incarnation, SessionId, Time};
use kv_ec::{
    Command, EcError, EcMachine, EcPoll, EcRegion, EncoderCache, EntryGuard, Eviction, MachineConfig,
    Resource, SharedStore, Want,
};

const BLOCK: u64 = 4096;
const SECOND: Duration = Duration::from_secs(1);

struct Consumer {
    machine: EcMachine,
    store: SharedStore,
    now: Time,
    /// The addresses that were looked up, in order.
    asked: Vec<String>,
    polls: BTreeMap<u64, EcPoll>,
    failures: BTreeMap<u64, EcError>,
    entries: BTreeMap<u64, EntryGuard>,
}

impl Consumer {
    fn start() -> Consumer {
        let args = EcRegion::create(16, BLOCK as u32).unwrap().args("prefill", 0).build().unwrap();
        let store = SharedStore::new(EncoderCache::new(16, BLOCK as u32, Eviction::Lru));
        let node = NodeConfig::new(args, Incarnation::from_random(9), "test", Bytes::from_static(b"us"));
        Consumer {
            machine: EcMachine::new(MachineConfig::new("one model"), node, store.clone()),
            store,
            now: Time::from_nanos(1_000_000_000),
            asked: Vec::new(),
            polls: BTreeMap::new(),
            failures: BTreeMap::new(),
            entries: BTreeMap::new(),
        }
    }

    fn input(&mut self, input: Input<Command>) {
        self.machine.handle(self.now, input);
        while let Some(output) = self.machine.poll_output() {
            match output {
                Output::Lookup { addr, .. } => self.asked.push(addr),
                Output::Status { session, poll, failure } => {
                    let before = self.polls.insert(session.0, poll);
                    assert!(!matches!(before, Some(EcPoll::Ready | EcPoll::Failed)), "{session} ends twice");
                    self.failures.extend(failure.map(|failure| (session.0, *failure)));
                }
                Output::Release { session, resource: Resource::Slot(entry) } => {
                    self.entries.extend(entry.map(|entry| (session.0, entry)));
                }
                _ => {}
            }
        }
    }

    fn command(&mut self, command: Command) {
        self.input(Input::Command(command));
    }

    fn wants(&mut self, session: u64, source: &str, budget: Duration) {
        let want = Want::new(hash(), 3 * BLOCK, source).with(|want| want.budget = Some(budget));
        self.command(Command::Fetch { session: SessionId(session), want: Box::new(want) });
    }

    fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(at) = self.machine.next_timeout().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.input(Input::Timeout);
        }
        self.now = end;
    }

    fn poll(&self, session: u64) -> EcPoll {
        self.polls.get(&session).copied().unwrap_or(EcPoll::Waiting)
    }

    fn is_out_of_budget(&self, session: u64, budget: Duration) -> bool {
        matches!(self.failures.get(&session), Some(EcError::Budget { after, .. }) if *after == budget)
    }

    /// Nothing is left: no session, no transfer, no block, no timer.
    fn is_idle(&self) -> bool {
        let gauges = self.machine.gauges();
        let left = (gauges.waiting, gauges.transfers, gauges.node.receivers, gauges.node.timers);
        left == (0, 0, 0, 0) && self.machine.next_timeout().is_none() && self.store.gauges().free == 16
    }
}

fn hash() -> ContentHash {
    ContentHash::new("image").unwrap()
}

#[test]
fn each_session_has_its_own_budget_and_the_last_one_takes_everything_along() {
    let mut consumer = Consumer::start();
    consumer.wants(1, "a:1", SECOND * 3);
    consumer.wants(2, "a:1", SECOND);
    consumer.wants(3, "a:1", SECOND * 100);
    assert_eq!(
        (consumer.poll(2), consumer.machine.gauges().transfers),
        (EcPoll::Waiting, 1),
        "nothing moves yet"
    );
    consumer.run_for(SECOND);
    assert!(consumer.is_out_of_budget(2, SECOND) && consumer.failures.len() == 1);
    consumer.run_for(SECOND * 2);
    assert!(consumer.is_out_of_budget(1, SECOND * 3) && consumer.failures.len() == 2);
    consumer.run_for(SECOND);
    let gauges = consumer.machine.gauges();
    assert_eq!((gauges.transfers, gauges.node.receivers), (1, 1), "the last one's try is under way");
    consumer.command(Command::Abort { session: SessionId(3) });
    assert_eq!(consumer.failures.get(&3), Some(&EcError::Aborted));
    assert!(consumer.is_idle());
    // The next one begins anew.
    consumer.wants(4, "a:1", SECOND);
    assert_eq!((consumer.poll(4), consumer.machine.gauges().transfers), (EcPoll::Waiting, 1));
    consumer.run_for(SECOND);
    assert!(consumer.is_out_of_budget(4, SECOND) && consumer.is_idle());
}

#[test]
fn each_session_has_its_own_producer_asked_while_it_has_half_of_its_time_left() {
    let mut consumer = Consumer::start();
    let moment = Duration::from_millis(50);
    consumer.wants(1, "a:1", SECOND * 100);
    consumer.wants(2, "b:1", SECOND * 4);
    consumer.wants(3, "c:1", SECOND * 8);
    consumer.run_for(SECOND * 2 - moment);
    assert_eq!(consumer.asked, ["a:1"]);
    consumer.run_for(moment * 2);
    assert_eq!(consumer.asked, ["a:1", "b:1"]);
    // Six seconds are left of eight.
    consumer.run_for(SECOND * 3 - moment * 2);
    assert_eq!(consumer.asked, ["a:1", "b:1"]);
    assert!(consumer.is_out_of_budget(2, SECOND * 4));
    consumer.run_for(moment * 2);
    assert_eq!(consumer.asked, ["a:1", "b:1", "c:1"]);
    assert_eq!((consumer.poll(1), consumer.poll(3)), (EcPoll::Waiting, EcPoll::Waiting));
    consumer.run_for(SECOND * 100);
    assert!(consumer.is_out_of_budget(1, SECOND * 100) && consumer.is_out_of_budget(3, SECOND * 8));
    assert!(consumer.is_idle());
}

#[test]
fn an_entry_that_this_host_fills_is_waited_for_and_asked_of_nobody() {
    let mut consumer = Consumer::start();
    let reservation = consumer.store.reserve(&hash(), 3 * BLOCK).unwrap();
    consumer.wants(1, "a:1", SECOND * 10);
    consumer.run_for(SECOND);
    assert_eq!((consumer.poll(1), consumer.asked.len()), (EcPoll::Waiting, 0));
    consumer.store.commit(reservation).unwrap();
    consumer.run_for(Duration::from_millis(2));
    assert_eq!((consumer.poll(1), consumer.entries[&1].bytes()), (EcPoll::Ready, 3 * BLOCK));
}

#[test]
fn a_machine_that_stops_ends_every_session_and_those_that_come_late() {
    let mut consumer = Consumer::start();
    consumer.wants(1, "a:1", SECOND);
    consumer.command(Command::Save { session: SessionId(2) });
    consumer.command(Command::Shutdown);
    consumer.wants(3, "a:1", SECOND);
    consumer.command(Command::Save { session: SessionId(4) });
    for session in 1..=4 {
        assert_eq!(consumer.failures.get(&session), Some(&EcError::WorkerStopped), "session {session}");
    }
    assert!(consumer.is_idle());
}

#[test]
fn a_machine_that_drains_refuses_sessions_that_come_late_and_goes_on_with_the_others() {
    let mut consumer = Consumer::start();
    consumer.wants(1, "a:1", SECOND);
    consumer.command(Command::Save { session: SessionId(2) });
    consumer.command(Command::Drain);
    consumer.wants(3, "a:1", SECOND);
    consumer.command(Command::Save { session: SessionId(4) });
    for late in [3, 4] {
        assert_eq!(consumer.failures.get(&late), Some(&EcError::Draining), "session {late}");
    }
    assert_eq!((consumer.poll(1), consumer.failures.get(&2)), (EcPoll::Waiting, None));
    consumer.run_for(SECOND * 2);
    assert!(consumer.is_out_of_budget(1, SECOND), "{:?}", consumer.failures[&1]);
    consumer.command(Command::Abort { session: SessionId(2) });
    assert!(consumer.is_idle());
}
