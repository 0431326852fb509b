//! What one connection may cost while there are others.
//!
//! Reading a frame, and what the owner of the transport does about it, takes processor time, and how much of it
//! is the sender's choice. So the time is counted, by the clock of this thread's processor time, and a
//! connection that has used more than its share is left alone for a while: the socket fills, and its sender
//! waits. A peer that says little is thus heard at once, however much another one says. Where there is
//! only one connection nobody else is kept waiting, and nothing is counted.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::mem;
use std::time::Duration;

use kv_core::Time;
use kv_host::clock;

use crate::framing::Message;
use crate::link::LinkId;

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
    accounts: HashMap<LinkId, Account>,
    /// Connections that are left alone, by the end of that.
    resting: BTreeSet<(Time, LinkId)>,
}

/// What a connection has used.
#[derive(Debug)]
struct Account {
    /// When the time that its messages have taken is paid for.
    paid: Time,
    /// Until when it is left alone for that.
    resting: Option<Time>,
}

/// Connections of which something else is wanted than before.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// To be left alone from now on.
    pub(crate) rest: Vec<LinkId>,
    /// To be listened to again.
    pub(crate) listen: Vec<LinkId>,
}

/// What was read from a connection.
#[derive(Debug)]
struct Read {
    id: LinkId,
    bytes: usize,
    messages: u32,
}

impl Pacing {
    /// A connection that has used nothing.
    pub(crate) fn open(&mut self, id: LinkId) {
        self.accounts.insert(id, Account { paid: Time::ZERO, resting: None });
    }

    /// A connection has ended.
    pub(crate) fn close(&mut self, id: LinkId) {
        if let Some(Account { resting: Some(until), .. }) = self.accounts.remove(&id) {
            self.resting.remove(&(until, id));
        }
    }

    /// Some bytes were taken from a connection.
    pub(crate) fn note_bytes(&mut self, id: LinkId, bytes: usize) {
        self.of(id).bytes += bytes;
    }

    /// A message is taken from a connection.
    pub(crate) fn note_message(&mut self, id: LinkId, message: &Message) {
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

    /// How long until a connection is listened to again, if one is left alone.
    pub(crate) fn next(&self) -> Option<Duration> {
        self.resting.first().map(|(until, _)| until.since(clock::now()))
    }

    /// Whether a connection is left alone.
    pub(crate) fn is_resting(&self, id: LinkId) -> bool {
        self.accounts.get(&id).is_some_and(|account| account.resting.is_some())
    }

    /// How many messages, `most` at most, are taken from a connection in one turn: one by one where it uses
    /// much of its time, so that nobody waits for longer than for one.
    pub(crate) fn share(&self, id: LinkId, most: usize) -> usize {
        let paid = self.accounts.get(&id).map_or(Time::ZERO, |account| account.paid);
        if paid.since(clock::now()) > BURST * PARTS / 4 { 1 } else { most }
    }

    /// Counts the time of the turn that has ended, leaves alone who has used too much, and listens again
    /// to those who have waited for long enough.
    pub(crate) fn keep_pace(&mut self) -> Changes {
        let mut changes = Changes::default();
        let handled = self.handled.take();
        let read = mem::take(&mut self.read);
        if handled.is_none() && self.resting.is_empty() {
            return changes;
        }
        let now = clock::now();
        if let Some(handled) = handled.filter(|_| self.accounts.len() > 1) {
            let spent = self.reading + handled.saturating_sub(self.handed);
            let total: usize = read.iter().map(|read| read.bytes).sum();
            for Read { id, bytes, messages } in read {
                let time = spent.mul_f64(bytes as f64 / total.max(1) as f64);
                let each = time / messages.max(1);
                let price = time.mul_f64(f64::from(PARTS) + each.div_duration_f64(SHORT));
                if self.charge(id, price, now) {
                    changes.rest.push(id);
                }
            }
        }
        while let Some((until, id)) = self.resting.first().copied()
            && until <= now
        {
            self.end_rest(id);
            changes.listen.push(id);
        }
        changes
    }

    /// Listens to a connection again; false if it was not left alone.
    pub(crate) fn end_rest(&mut self, id: LinkId) -> bool {
        let until = self.accounts.get_mut(&id).and_then(|account| account.resting.take());
        until.is_some_and(|until| self.resting.remove(&(until, id)))
    }

    /// True if the connection is to be left alone from now on.
    fn charge(&mut self, id: LinkId, price: Duration, now: Time) -> bool {
        let Some(account) = self.accounts.get_mut(&id) else {
            return false;
        };
        account.paid = (account.paid.max(now) + price).min(now + LONGEST);
        if account.paid.since(now) <= BURST * PARTS || account.resting.is_some() {
            return false;
        }
        // Half of what it may use at once is left when it is heard again, so that this is not for one
        // message.
        let until = now + (account.paid.since(now) - BURST * PARTS / 2);
        account.resting = Some(until);
        self.resting.insert((until, id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads one message of a connection, and handles it for so long.
    fn turn(pacing: &mut Pacing, id: LinkId, work: Duration) -> Changes {
        pacing.note_message(id, &Message::Goodbye);
        pacing.end_reading();
        pacing.hand_over();
        let begun = clock::thread_time();
        while clock::thread_time() - begun < work {
            std::hint::spin_loop();
        }
        pacing.handled();
        pacing.keep_pace()
    }

    #[test]
    fn a_busy_connection_rests_only_beside_other_connections() {
        let mut pacing = Pacing::default();
        pacing.open(1);
        let work = Duration::from_millis(20);
        assert_eq!(turn(&mut pacing, 1, work), Changes::default());
        assert!(!pacing.is_resting(1));

        pacing.open(2);
        assert_eq!(turn(&mut pacing, 1, work), Changes { rest: vec![1], listen: vec![] });
        assert!(pacing.is_resting(1) && !pacing.is_resting(2));
        assert_eq!((pacing.share(1, 50), pacing.share(2, 50)), (1, 50));
        assert!(pacing.next().is_some_and(|after| after <= LONGEST));
        assert!(pacing.end_rest(1) && !pacing.end_rest(1));
        assert_eq!(pacing.next(), None);

        // A connection that ended in the turn that it used is not charged, and nothing of it stays.
        pacing.close(2);
        pacing.open(3);
        turn(&mut pacing, 2, work);
        assert_eq!((pacing.accounts.len(), pacing.resting.len()), (2, 0));
    }
}
