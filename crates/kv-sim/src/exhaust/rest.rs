//! What comes of a world in which nothing more goes wrong.

use super::choice::Choice;
use super::ledger::{Life, violation};
use super::world::{P, World};
use crate::Violation;

const RULE: &str = "rests_in_the_end";
/// More events than any session can cause before its deadline.
const EVENTS: usize = 5000;

impl World {
    /// Lets the world run to its end, in order and without faults, and looks whether all sessions
    /// have ended, all pages are back, and nothing is left. With `lossy`, what is in flight is lost
    /// first.
    pub(super) fn rest(mut self, lossy: bool) -> Result<(), Violation> {
        if lossy {
            self.wire.clear();
        }
        // What is given from now on is not lost for want of room.
        self.scope.frames = usize::MAX;
        for _ in 0..EVENTS {
            let Some(choice) = self.next_in_order() else { return self.check_rest(lossy) };
            self.apply(choice)?;
        }
        Err(violation(RULE, format!("something still happens after {EVENTS} events")))
    }

    fn next_in_order(&self) -> Option<Choice> {
        if !self.sent {
            return Some(Choice::Send);
        }
        if let Some(&(host, other)) = self.gone.first() {
            return Some(Choice::Gone(host, other));
        }
        if let Some(host) = (1..self.hosts.len()).find(|&d| self.hosts[d].alive && !self.hosts[d].init) {
            return Some(Choice::Init(host));
        }
        if !self.wire.is_empty() {
            return Some(Choice::Deliver { letter: 0, again: false });
        }
        if let Some(read) = self.reads.first() {
            return Some(match (read.copied, self.can_copy(read)) {
                (true, _) => Choice::End(0),
                (false, true) => Choice::Copy(0),
                (false, false) => Choice::Fail(0),
            });
        }
        let alive = (P..self.hosts.len()).filter(|&host| self.hosts[host].alive);
        let timers = alive.filter_map(|host| {
            let due = self.hosts[host].node.next_timeout()?;
            Some((self.hosts[host].when(due), host))
        });
        timers.min().map(|(_, host)| Choice::Ring(host))
    }

    fn check_rest(&self, lossy: bool) -> Result<(), Violation> {
        let goes_on = |(host, life): Life| self.hosts[host].alive && self.life(host).1 == life;
        if let Some(what) = self.ledger.unfinished(goes_on) {
            return Err(violation(RULE, what));
        }
        for (number, host) in self.hosts.iter().enumerate().filter(|(_, host)| host.alive) {
            let gauges = host.node.gauges();
            let left = [
                gauges.senders,
                gauges.receivers,
                gauges.registrations,
                // A result that is kept for a reader whose last word was lost makes way when the
                // room is needed.
                if lossy { 0 } else { gauges.incoming },
                gauges.failed_rooms,
                gauges.posts,
                gauges.lookups,
                gauges.timers,
                gauges.pages_leased,
                gauges.releasing,
            ];
            if left != [0; 10] {
                return Err(violation(RULE, format!("host {number} keeps {gauges:?}")));
            }
        }
        Ok(())
    }
}
