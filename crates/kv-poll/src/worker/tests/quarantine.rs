//! What schedulers are told of the pages of ended sessions, on workers without threads.

use std::sync::Arc;
use std::time::Duration;

use kv_core::{
    KvManager, KvSender, KvSession, Quarantine, QuarantineReason, Room, SessionOptions, WorkerRole,
};

use super::client::FakeClient;
use super::clock::Ticking;
use super::script::{STUCK, Script, peer};
use super::transport::{Wire, fake_transport};
use super::{Log, Seen, args, driver, manager, pages};
use crate::kv::{KvMachine, WorkerConfig};
use crate::worker::{Driver, Turn};
use crate::{EngineGroup, Sender};

struct Bare {
    driver: Driver<KvMachine>,
    log: Log,
    wire: Arc<Wire>,
    clock: Ticking,
}

impl Bare {
    fn new() -> Bare {
        let (log, wire, clock) = (Log::default(), Wire::new(), Ticking::new(0));
        let config = WorkerConfig::new(args(), WorkerRole::Prefill).with(|config| config.max_sessions = 64);
        let (transport, client) = (fake_transport(&log, &wire), FakeClient::new(&log));
        let driver = driver(Box::new(Script::new(&log)), config, transport, client, clock.clone());
        Bare { driver, log, wire, clock }
    }

    /// A session that has ended, and whose pages nobody can call quiet.
    fn stuck(&mut self, list: &[u32]) -> Sender {
        let manager = manager(&self.driver);
        let mut sender = manager.sender("", Room::from(STUCK), &[], SessionOptions::default()).unwrap();
        sender.send(pages(list)).unwrap();
        self.turn();
        sender.abort();
        sender
    }

    /// One turn that ends with a sleep: for how long.
    fn turn(&mut self) -> Option<Duration> {
        match self.driver.turn() {
            Turn::Rest(rest) => rest.at_most,
            other => panic!("{other:?}"),
        }
    }

    fn told(&self) -> Vec<Quarantine> {
        manager(&self.driver).quarantine()
    }

    fn looks(&self) -> usize {
        self.log.lock().unwrap().iter().filter(|seen| **seen == Seen::Looked).count()
    }
}

fn waits(sessions: usize, pages: usize) -> Quarantine {
    let (reason, peer) = (QuarantineReason::Unacknowledged, Some(peer()));
    Quarantine::new(peer, reason, sessions, pages)
}

#[test]
fn quarantined_pages_are_told_by_peer_and_reason_until_they_are_free() {
    let mut bare = Bare::new();
    let mut first = bare.stuck(&[1, 2, 3]);
    assert_eq!((bare.told(), bare.looks()), (vec![], 0));
    assert_eq!(bare.turn(), None);
    assert_eq!(bare.told(), [waits(1, 3)]);
    let gauges = manager(&bare.driver).gauges();
    assert_eq!((gauges.pages_quarantined(), gauges.held_bytes().quarantined), (3, 3 * 64));
    bare.wire.say("release");
    assert_eq!(bare.turn(), None);
    assert_eq!((bare.told(), bare.looks()), (vec![], 1), "nothing is left: no look is needed");
    assert_eq!(first.reclaim().map(|back| back.pages), Some(pages(&[1, 2, 3])));
}

#[test]
fn the_machine_is_looked_at_once_in_50_ms_and_the_last_change_is_told_even_so() {
    let mut bare = Bare::new();
    let (pause, half) = (Duration::from_millis(50), Duration::from_millis(25));
    let first = bare.stuck(&[1, 2, 3]);
    bare.turn();
    let second = bare.stuck(&[7]);
    assert_eq!(bare.turn(), Some(pause));
    bare.clock.go_on(half);
    bare.wire.say("nothing");
    assert_eq!(bare.turn(), Some(half));
    assert_eq!((bare.told(), bare.looks()), (vec![waits(1, 3)], 1));
    bare.clock.go_on(half);
    // Nothing happens but that the time has come; then the worker sleeps for good.
    assert_eq!(bare.turn(), None);
    assert_eq!((bare.told(), bare.looks()), (vec![waits(2, 4)], 2));
    bare.clock.go_on(pause * 10);
    assert_eq!((bare.turn(), bare.looks()), (None, 2));
    bare.wire.say("release");
    bare.turn();
    assert_eq!(bare.told(), []);
    drop((first, second));
}

#[test]
fn pages_that_a_stopped_worker_has_left_behind_are_told_as_such() {
    let mut bare = Bare::new();
    let sender = bare.stuck(&[1, 2]);
    bare.turn();
    let manager = manager(&bare.driver);
    drop(bare);
    let lost = Quarantine::new(None, QuarantineReason::WorkerStopped, 1, 2);
    assert_eq!(manager.quarantine(), [lost]);
    assert_eq!(manager.gauges().pages_quarantined(), 2);
    drop(sender);
}

#[test]
fn a_page_that_several_ranks_wait_for_counts_once_for_a_peer() {
    let (mut first, mut second) = (Bare::new(), Bare::new());
    let group = EngineGroup::new(vec![manager(&first.driver), manager(&second.driver)]).unwrap();
    let kept = [first.stuck(&[1, 2, 3]), second.stuck(&[1, 2, 3]), second.stuck(&[9])];
    assert_eq!(group.quarantine(), [waits(1, 3)]);
    first.turn();
    second.turn();
    second.clock.go_on(Duration::from_secs(1));
    first.turn();
    second.turn();
    assert_eq!(group.quarantine(), [waits(2, 4)]);
    drop(kept);
}
