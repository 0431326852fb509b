//! The decode queues, and a bench that takes requests through them.

mod admission;
mod endings;
mod groups;
mod quarantine;
mod random;
mod retraction;

use kv_core::{KvPoll, Room};
use kv_poll::allocator::RunAllocator;
use kv_poll::consensus::{RequestKey, SingleRank};
use kv_poll::queue::{AdmissionRule, DecodeConfig, DecodeQueues, Demand, Incoming};

use crate::fake::{Fake, Rows};

type Queues = DecodeQueues<u64, Fake>;

/// Pages of 16 tokens; each active request reserves one page.
const CONFIG: DecodeConfig = {
    let mut config = DecodeConfig::new(AdmissionRule::new(16));
    config.rule.reserved_tokens = 16;
    config.aux_rows = 4;
    config
};

struct Bench {
    queues: Queues,
    fake: Fake,
    rows: Rows,
}

impl Bench {
    fn new(num_pages: u32, config: DecodeConfig) -> Bench {
        let fake = Fake::new();
        let allocator = RunAllocator::new(num_pages);
        let queues = DecodeQueues::new(fake.clone(), SingleRank::default(), allocator, config);
        Bench { queues, fake, rows: Rows::default() }
    }

    fn push(&mut self, room: u64, pages: usize) -> RequestKey {
        self.queues.push(room, incoming(room, pages)).unwrap()
    }

    fn step(&mut self) {
        self.queues.step(self.fake.changes(), &mut self.rows).unwrap();
        let accounting = self.queues.accounting();
        assert_eq!(accounting.sum(), accounting.capacity, "{accounting:?}");
    }

    /// Pushes a request and lets its handshake succeed.
    fn shake_hands(&mut self, room: u64, pages: usize) -> RequestKey {
        let key = self.push(room, pages);
        self.fake.set(room, KvPoll::WaitingForInput, false);
        self.step();
        key
    }

    /// Lets the transfer of an admitted request succeed.
    fn succeed(&mut self, room: u64) {
        if let Some(row) = self.fake.at(room, |session| session.aux) {
            self.rows.write(row, room);
        }
        self.fake.set(room, KvPoll::Success, true);
        self.step();
    }

    fn in_transfer(&self, room: u64) -> usize {
        self.fake.at(room, |session| session.custody.len())
    }
}

fn incoming(room: u64, pages: usize) -> Incoming<'static> {
    Incoming::new("p:1", Room::Number(room), Demand::new(pages, 16))
}
