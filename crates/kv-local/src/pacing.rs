//! Processor time that one connection may take while there are other connections.
//!
//! Reading a frame takes processor time, and so does the owner's work on the frame; the sender decides how
//! much. So the time is counted for each connection, by the clock of this thread's processor time, and a
//! connection that has used more than its share is not read for a while: its socket fills, and its sender
//! waits. The few frames of one peer are thus handled at once, however many another peer sends. With only one
//! connection, nothing is counted, because no other one waits.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::mem;
use std::time::Duration;

use kv_core::Time;
use kv_host::clock;

use crate::framing::Message;
use crate::link::LinkId;

/// In the long run, a connection whose messages take little time each may use one part in so many of the
/// time.
const PARTS: u32 = 4;
/// A message that takes less time than this is short. Other connections wait while a message is handled, so a
/// connection's share shrinks as its messages take longer: to a half where they take `PARTS` times this.
const SHORT: Duration = Duration::from_micros(25);
/// Time that a connection may use at once, in short messages.
const BURST: Duration = Duration::from_millis(2);
/// Longest rest, however much time a message has taken: leases and permissions wait in the socket meanwhile.
const LONGEST: Duration = Duration::from_millis(100);
/// Bytes added to the length of each message where a turn's time is divided among connections by bytes.
const OF_MESSAGE: usize = 256;

/// Divides the processor time of a turn among connections, and decides which of them rest.
#[derive(Debug, Default)]
pub(crate) struct Pacing {
    /// What was read from each connection in the last call of `poll`.
    read: Vec<Read>,
    /// True if there were other connections when reading began: only then is the time counted.
    counts: bool,
    /// The processor time when reading began.
    begun: Duration,
    /// The processor time when the owner began to handle the events.
    handed: Duration,
    /// Processor time that reading took.
    reading: Duration,
    /// The processor time when the owner had handled the events, and asked how to wait.
    handled: Cell<Option<Duration>>,
    accounts: HashMap<LinkId, Account>,
    /// Connections that rest (are not read), by the time when they are read again.
    resting: BTreeSet<(Time, LinkId)>,
}

/// The time that a connection has used.
#[derive(Debug)]
struct Account {
    /// When the connection has paid, by its share, for the time that its messages have taken.
    paid: Time,
    /// Until when the connection rests; `None` if it does not.
    resting: Option<Time>,
}

/// Connections that begin or end their rest.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// Connections that are not read from now on.
    pub(crate) rest: Vec<LinkId>,
    /// Connections that are read again.
    pub(crate) listen: Vec<LinkId>,
}

/// How much was read from a connection in one call of `poll`.
#[derive(Debug)]
struct Read {
    id: LinkId,
    bytes: usize,
    messages: u32,
}

impl Pacing {
    /// Adds a connection, which has used no time yet.
    pub(crate) fn open(&mut self, id: LinkId) {
        self.accounts.insert(id, Account { paid: Time::ZERO, resting: None });
    }

    /// Removes a connection that has ended.
    pub(crate) fn close(&mut self, id: LinkId) {
        if let Some(Account { resting: Some(until), .. }) = self.accounts.remove(&id) {
            self.resting.remove(&(until, id));
        }
    }

    /// True if there are several connections: messages of one may wait for those of another.
    pub(crate) fn is_shared(&self) -> bool {
        self.accounts.len() > 1
    }

    /// Notes that bytes were read from a connection.
    pub(crate) fn note_bytes(&mut self, id: LinkId, bytes: usize) {
        self.of(id).bytes += bytes;
    }

    /// Notes that a message was taken from a connection.
    pub(crate) fn note_message(&mut self, id: LinkId, message: &Message) {
        let read = self.of(id);
        read.bytes += OF_MESSAGE + message.len();
        read.messages += 1;
    }

    fn of(&mut self, id: LinkId) -> &mut Read {
        if self.read.is_empty() {
            self.counts = self.is_shared();
            self.begun = self.time();
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

    /// Notes that this call of `poll` has ended reading. The rest of the call, mostly copies, is not counted
    /// for any connection.
    pub(crate) fn end_reading(&mut self) {
        if !self.read.is_empty() {
            self.reading = self.time().saturating_sub(self.begun);
        }
    }

    /// Notes that the owner begins to handle the events now.
    pub(crate) fn hand_over(&mut self) {
        if !self.read.is_empty() {
            self.handed = self.time();
        }
    }

    /// Notes that the owner has handled the events.
    pub(crate) fn handled(&self) {
        if !self.read.is_empty() && self.handled.get().is_none() {
            self.handled.set(Some(self.time()));
        }
    }

    /// The processor time of this thread, if it is counted.
    fn time(&self) -> Duration {
        if self.counts { clock::thread_time() } else { Duration::ZERO }
    }

    /// How long until the first resting connection is read again; `None` if no connection rests.
    pub(crate) fn next(&self) -> Option<Duration> {
        self.resting.first().map(|(until, _)| until.since(clock::now()))
    }

    /// True if a connection rests.
    pub(crate) fn is_resting(&self, id: LinkId) -> bool {
        self.accounts.get(&id).is_some_and(|account| account.resting.is_some())
    }

    /// How many messages, `most` at most, may be taken from a connection in one turn: only one if the
    /// connection has used much of its time, so that other connections wait for one message at most.
    pub(crate) fn share(&self, id: LinkId, most: usize) -> usize {
        let paid = self.accounts.get(&id).map_or(Time::ZERO, |account| account.paid);
        if paid.since(clock::now()) > BURST * PARTS / 4 { 1 } else { most }
    }

    /// Counts the time of the turn that has ended. Returns the connections that have used too much and rest
    /// from now on, and those whose rest is over.
    pub(crate) fn keep_pace(&mut self) -> Changes {
        let mut changes = Changes::default();
        let handled = self.handled.take();
        let read = mem::take(&mut self.read);
        if handled.is_none() && self.resting.is_empty() {
            return changes;
        }
        let now = clock::now();
        if let Some(handled) = handled.filter(|_| self.counts) {
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

    /// Ends the rest of a connection; false if the connection did not rest.
    pub(crate) fn end_rest(&mut self, id: LinkId) -> bool {
        let until = self.accounts.get_mut(&id).and_then(|account| account.resting.take());
        until.is_some_and(|until| self.resting.remove(&(until, id)))
    }

    /// Counts `price` for a connection. True if the connection rests from now on.
    fn charge(&mut self, id: LinkId, price: Duration, now: Time) -> bool {
        let Some(account) = self.accounts.get_mut(&id) else {
            return false;
        };
        account.paid = (account.paid.max(now) + price).min(now + LONGEST);
        if account.paid.since(now) <= BURST * PARTS || account.resting.is_some() {
            return false;
        }
        // After its rest, the connection may use half a burst again, so that it does not rest after each
        // message.
        let until = now + (account.paid.since(now) - BURST * PARTS / 2);
        account.resting = Some(until);
        self.resting.insert((until, id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads one message of a connection, and spends processor time on the message.
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

        // A connection that ends in the turn whose time it used is not charged, and leaves no account behind.
        pacing.close(2);
        pacing.open(3);
        turn(&mut pacing, 2, work);
        assert_eq!((pacing.accounts.len(), pacing.resting.len()), (2, 0));
    }
}
