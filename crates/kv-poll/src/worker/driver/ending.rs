//! How a worker comes to its end: it drains until it is empty, and stops when everything lent is back.

use std::time::Duration;

use kv_core::Time;
use kv_core::machine::{Input, Machine, SessionCommand};

use super::{Driver, Ended};
use crate::worker::ebb::Ebb;
use crate::worker::shared::Publication;

/// How long a stopping worker waits for the withdrawal of its publication once all pages are back. A
/// publication that was not withdrawn ends with its lease at the bootstrap server.
const WITHDRAWING: Duration = Duration::from_millis(250);

/// A worker that was asked to stop.
pub(super) struct Stopping {
    pub(super) deadline: Time,
    /// Until when to wait if only the withdrawal of the publication is missing.
    pub(super) withdrawing: Time,
    sessions: usize,
}

impl<M: Machine> Driver<M> {
    /// Drains, if the worker was asked to: tells the machine, leaves the bootstrap server once no peer is
    /// awaited, and tells when the worker is empty.
    pub(super) fn drain(&mut self, now: Time) {
        if self.ebb.is_none() && self.shared.is_draining() {
            // Sessions that were opened before are served.
            self.take_commands_so_far();
            self.ebb = Some(Ebb::new());
            if let Some(drain) = M::Command::drain() {
                self.feed(Input::Command(drain));
            }
        }
        if self.ebb.is_none() || self.stopping.is_some() {
            return;
        }
        let quiet = self.is_quiet();
        let Some(ebb) = &mut self.ebb else { return };
        ebb.stop_after(now, self.shared.stop_after());
        if !ebb.left && !self.machine.awaits_peers() {
            ebb.left = true;
            if self.shared.publication() != Publication::None {
                self.client.leave(now);
                self.client_stirred = true;
                self.shared.set_publication(Publication::Left);
            }
        }
        let machine = &self.machine;
        if ebb.is_empty(now, quiet, || machine.owes_answers()) {
            self.shared.set_drained();
        }
        if let Some(grace) = ebb.stops(now) {
            self.shared.request_stop(grace);
        }
    }

    /// Everything lent is back, no command waits, and nothing is under way for peers.
    pub(super) fn is_quiet(&self) -> bool {
        let sessions = self.sessions.is_empty() && self.ready_events.is_empty();
        sessions && !self.shared.has_commands() && !self.machine.is_busy()
    }

    /// Stops, if the worker was asked to: at the deadline, or when everything lent is back and the
    /// publication, if there was one, has had its time to be withdrawn. A bootstrap client without a timeout
    /// has no request under way.
    pub(super) fn wind_up(&mut self, now: Time) -> Option<Ended> {
        if self.stopping.is_none()
            && let Some(grace) = self.shared.stop_requested()
        {
            // Sessions that were opened before the stop was asked for are counted, and told of it.
            self.take_commands_so_far();
            self.client.withdraw(now);
            self.client_stirred = true;
            self.stopping = Some(Stopping {
                deadline: now + grace,
                withdrawing: now + grace.min(WITHDRAWING),
                sessions: self.sessions.running(),
            });
            self.feed(Input::Command(M::Command::shutdown()));
        }
        let stopping = self.stopping.as_ref()?;
        let withdrawn = self.shared.publication() == Publication::None
            || (!self.client_stirred && self.client.next_timeout().is_none());
        let done = self.is_quiet() && (withdrawn || now >= stopping.withdrawing);
        (done || now >= stopping.deadline).then_some(Ended { sessions: stopping.sessions })
    }
}
