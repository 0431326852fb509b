//! Which interesting deliveries a campaign has seen.

use std::collections::BTreeSet;

use kv_core::wire::{Body, Frame};

use crate::ledger::LifeId;
use crate::world::World;

/// Frames about attempts that were delivered: by and to whom, kind, attempt, part.
#[derive(Debug, Default)]
pub(crate) struct Seen(BTreeSet<(LifeId, LifeId, u8, u64, u32)>);

impl World {
    pub(crate) fn cover_frame(&mut self, from: LifeId, at: LifeId, bytes: &[u8]) {
        const ABORT: u8 = 9;
        const DONE: u8 = 6;
        const FINISH: u8 = 11;
        match bytes.get(2) {
            Some(4 | 6 | 9 | 11) => {}
            _ => return,
        }
        let Ok(frame) = Frame::decode(bytes) else { return };
        let seen = &mut self.seen.0;
        match frame.body {
            Body::Register(register) => {
                let after = seen.contains(&(from, at, ABORT, register.attempt.0, 0));
                self.counters.register_after_abort += u64::from(after);
            }
            Body::Abort(abort) => {
                seen.insert((from, at, ABORT, abort.attempt.0, 0));
            }
            Body::Done(done) => {
                let attempt = done.attempt.0;
                let later = (from, at, DONE, attempt, done.part + 1)..=(from, at, DONE, attempt, u32::MAX);
                self.counters.done_reordered += u64::from(seen.range(later).next().is_some());
                let again = !seen.insert((from, at, DONE, attempt, done.part));
                self.counters.done_twice += u64::from(again);
                self.counters.done_late += u64::from(seen.contains(&(at, from, FINISH, attempt, 0)));
            }
            Body::Finish(finish) => {
                seen.insert((from, at, FINISH, finish.attempt.0, 0));
            }
            _ => {}
        }
    }
}
