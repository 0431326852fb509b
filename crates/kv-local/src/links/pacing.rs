//! What one connection may cost while there are others.
//!
//! Reading a frame, and what the owner of the plane does about it, takes processor time, and how much of it
//! is the sender's choice. So the time is counted, by the clock of this thread's processor time, and a
//! connection that has used more than its share is left alone for a while: the socket fills, and its sender
//! waits. A peer that says little is thus heard at once, however much another one says. Where there is
//! only one connection nobody else is kept waiting, and nothing is counted.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::mem;
use std::time::Duration;

use kv_core::Time;
use kv_host::clock;

use super::MESSAGE_SHARE;
use crate::connection::Message;
use crate::link::{Link, LinkId};
use crate::plane::LocalPlane;

/// One part in so many of the time is what a connection may use in the long run,
const PARTS: u32 = 4;
/// … where its messages take little time each. Whoever comes while one is handled waits for its end: so the
/// share shrinks as messages take longer, to a half where they take `PARTS` times this.
const SHORT: Duration = Duration::from_micros(25);
/// What a connection may use at once, in short messages.
const BURST: Duration = Duration::from_millis(2);
/// Longest rest, whatever a message has cost: leases and permissions wait in the socket meanwhile.
const LONGEST: Duration = Duration::from_millis(100);
/// What a message costs beside its bytes, in bytes, where a turn's time is divided among connections.
const OF_MESSAGE: usize = 256;

/// Whose time that of a turn is.
#[derive(Debug, Default)]
pub(crate) struct Pacing {
    /// What was read in the last call of `poll`.
    read: Vec<Read>,
    /// The processor time when that began, and when the events of it were handed over.
    begun: Duration,
    handed: Duration,
    /// What reading took.
    reading: Duration,
    /// The processor time when the owner had handled the events, and asked how to wait.
    handled: Cell<Option<Duration>>,
    /// Connections that are left alone, by the end of that.
    resting: BTreeSet<(Time, LinkId)>,
}

/// What was read from a connection.
#[derive(Debug)]
struct Read {
    id: LinkId,
    bytes: usize,
    messages: u32,
}

impl Pacing {
    /// Some bytes were taken from a connection.
    pub(super) fn note_bytes(&mut self, id: LinkId, bytes: usize) {
        self.of(id).bytes += bytes;
    }

    /// A message is taken from a connection.
    pub(super) fn note_message(&mut self, id: LinkId, message: &Message) {
        let read = self.of(id);
        read.bytes += OF_MESSAGE + message.len();
        read.messages += 1;
    }

    fn of(&mut self, id: LinkId) -> &mut Read {
        if self.read.is_empty() {
            self.begun = clock::thread_time();
        }
        let at = match self.read.iter().rposition(|read| read.id == id) {
            Some(at) => at,
            None => {
                self.read.push(Read { id, bytes: 0, messages: 0 });
                self.read.len() - 1
            }
        };
        &mut self.read[at]
    }

    /// Everything is read that is to be read in this call of `poll`; what it does then, copies for the
    /// most part, is counted to nobody.
    pub(crate) fn end_reading(&mut self) {
        if !self.read.is_empty() {
            self.reading = clock::thread_time().saturating_sub(self.begun);
        }
    }

    /// The owner is given the events.
    pub(crate) fn hand_over(&mut self) {
        if !self.read.is_empty() {
            self.handed = clock::thread_time();
        }
    }

    /// The owner has handled the events.
    pub(crate) fn handled(&self) {
        if !self.read.is_empty() && self.handled.get().is_none() {
            self.handled.set(Some(clock::thread_time()));
        }
    }

    pub(super) fn forget(&mut self, id: LinkId, resting: Option<Time>) {
        if let Some(until) = resting {
            self.resting.remove(&(until, id));
        }
    }

    /// How long until a connection is listened to again, if one is left alone.
    pub(crate) fn next(&self) -> Option<Duration> {
        self.resting.first().map(|(until, _)| until.since(clock::now()))
    }
}

impl Link {
    /// How many messages are taken from it in one turn: one by one where it uses much of its time, so that
    /// nobody waits for longer than for one.
    pub(super) fn share(&self) -> usize {
        if self.paid.since(clock::now()) > BURST * PARTS / 4 { 1 } else { MESSAGE_SHARE }
    }
}

impl LocalPlane {
    /// Counts the time of the turn that has ended, leaves alone who has used too much, and listens again
    /// to those who have waited for long enough.
    pub(crate) fn keep_pace(&mut self) {
        let handled = self.pacing.handled.take();
        let read = mem::take(&mut self.pacing.read);
        if handled.is_none() && self.pacing.resting.is_empty() {
            return;
        }
        let now = clock::now();
        if let Some(handled) = handled.filter(|_| self.links.len() > 1) {
            let spent = self.pacing.reading + handled.saturating_sub(self.pacing.handed);
            let total: usize = read.iter().map(|read| read.bytes).sum();
            for Read { id, bytes, messages } in read {
                let time = spent.mul_f64(bytes as f64 / total.max(1) as f64);
                let each = time / messages.max(1);
                self.charge(id, time.mul_f64(f64::from(PARTS) + each.div_duration_f64(SHORT)), now);
            }
        }
        while let Some((until, id)) = self.pacing.resting.first().copied()
            && until <= now
        {
            self.end_rest(id);
        }
    }

    fn charge(&mut self, id: LinkId, price: Duration, now: Time) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        link.paid = (link.paid.max(now) + price).min(now + LONGEST);
        if link.paid.since(now) <= BURST * PARTS || link.resting.is_some() {
            return;
        }
        // Half of what it may use at once is left when it is heard again, so that this is not for one
        // message.
        let until = now + (link.paid.since(now) - BURST * PARTS / 2);
        link.resting = Some(until);
        self.pacing.resting.insert((until, id));
        self.backlog.retain(|other| *other != id);
        self.set_interest(id, false);
    }

    /// Listens to a connection again.
    pub(super) fn end_rest(&mut self, id: LinkId) {
        let Some(until) = self.links.get_mut(&id).and_then(|link| link.resting.take()) else {
            return;
        };
        self.pacing.resting.remove(&(until, id));
        // There may be messages in its buffer, of which the kernel knows nothing.
        self.backlog.push_back(id);
        self.set_interest(id, false);
    }
}
