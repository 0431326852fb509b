//! When the worker tells its schedulers what the resources in quarantine wait for.

use std::time::Duration;

use kv_core::Time;
use kv_core::machine::Machine;

use super::shared::Shared;

/// The machine looks at all its ended sessions to say it: not more often than this.
const PAUSE: Duration = Duration::from_millis(50);

/// The picture of the quarantine in the shared, and whether it is still true.
#[derive(Debug, Default)]
pub(super) struct Face {
    /// Something is in the picture.
    shows: bool,
    /// The machine has taken an input since the picture was made.
    stale: bool,
    next: Time,
}

impl Face {
    /// The machine has taken an input.
    pub(super) fn stir(&mut self) {
        self.stale = true;
    }

    /// Makes the picture anew, if it may have changed and the last one is old enough. An empty
    /// quarantine needs no look at the machine, and is told at once.
    pub(super) fn show<M: Machine>(&mut self, now: Time, shared: &Shared<M>, machine: &M) {
        if shared.counters.quarantined.get().is_empty() {
            if std::mem::take(&mut self.shows) {
                shared.set_quarantine(Vec::new());
            }
            self.stale = false;
        } else if self.stale && now >= self.next {
            shared.set_quarantine(machine.quarantine());
            (self.shows, self.stale, self.next) = (true, false, now + PAUSE);
        }
    }

    /// When the picture is to be made anew.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.stale.then_some(self.next)
    }
}
