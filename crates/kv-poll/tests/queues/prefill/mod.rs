//! The prefill queues, and the steps that most tests begin with.

mod chunks;
mod endings;
mod groups;
mod line;
mod quarantine;
mod random;

use kv_core::{KvPoll, Room};
use kv_poll::consensus::{RequestKey, SingleRank};
use kv_poll::queue::{Outgoing, PrefillConfig, PrefillPolicy, PrefillQueues};

use crate::fake::Fake;

type Queues = PrefillQueues<u64, Fake>;

fn queues(policy: PrefillPolicy) -> (Queues, Fake) {
    let fake = Fake::new();
    (PrefillQueues::new(fake.clone(), SingleRank::default(), PrefillConfig::new(policy)), fake)
}

fn push(queues: &mut Queues, room: u64) -> RequestKey {
    queues.push(room, Outgoing::new("p:1", Room::Number(room))).unwrap()
}

fn step(queues: &mut Queues, fake: &Fake) {
    queues.step(fake.changes()).unwrap();
}

/// Pushes a request and takes it through bootstrap.
fn popped(queues: &mut Queues, fake: &Fake, room: u64) -> RequestKey {
    let key = push(queues, room);
    fake.set(room, KvPoll::WaitingForInput, false);
    step(queues, fake);
    assert_eq!(queues.pop_waiting(|_, _| true), Some(key));
    key
}
