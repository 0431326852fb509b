//! When the worker renews the report on what the resources in quarantine wait for.

use std::time::Duration;

use kv_core::Time;
use kv_core::machine::Machine;

use super::shared::Shared;

/// Shortest time between two reports: for a report, the machine goes through all its ended sessions.
const PAUSE: Duration = Duration::from_millis(50);

/// The state of the report that schedulers read: whether it is out of date, and when it may be renewed.
#[derive(Debug, Default)]
pub(super) struct Face {
    /// The report has entries.
    shows: bool,
    /// The machine has taken an input since the report was made.
    stale: bool,
    next: Time,
}

impl Face {
    /// Notes that the machine has taken an input.
    pub(super) fn stir(&mut self) {
        self.stale = true;
    }

    /// Renews the report, if the quarantine may have changed and the last report is old enough. That the
    /// quarantine is empty is reported at once, because no look at the machine is needed.
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

    /// When the report is to be renewed.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.stale.then_some(self.next)
    }
}
