//! The attempts of this worker at one peer: the peer sends, and this worker receives.
//!
//! | an attempt is | from | when |
//! |---|---|---|
//! | open | – | the session registers, or asks for a lease |
//! | closing | open | the session failed: the peer is told to stop |
//! | ended | open | everything was read: the peer is told until it acknowledges |
//! | ended | open, closing | the session that reads failed: the peer is told until it acknowledges |
//! | ended | – | the session failed before the peer answered the hello: the peer is told until it acknowledges |
//! | ended | closing, ended | the conversation is over, and the peer has not spoken of the attempt in it: under another number, the peer is told [again](crate::wire::Abort::failed_ms_ago) until it acknowledges |
//! | over | open | everything is in place, or the peer said that the attempt failed and is quiet |
//! | over | closing, ended | the peer acknowledged the end, forgot the conversation, or is proven to write no more |

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use crate::id::{Attempt, SessionId};
use crate::meter::each;
use crate::proto::conversation::millis;
use crate::proto::run_set::{self, MAX_RUNS};
use crate::time::Time;
use crate::wire::Abort;

/// Most ended attempts at which an abort may be noted under a number of its own.
const MAX_ENDED: usize = 4096;
/// Most aborts that are repeated at once.
const MAX_ABORTS: usize = 256;

/// All attempts at one peer.
#[derive(Debug, Clone)]
pub(in crate::proto) struct Outgoing {
    /// The number of the next attempt, from 1.
    next: u64,
    /// Open and closing attempts, each with its session and the position among the session's
    /// sources.
    open: BTreeMap<Attempt, (SessionId, usize)>,
    closing: BTreeSet<Attempt>,
    ended: BTreeMap<Attempt, Ended>,
    /// Receivers that need the peer and have no attempt at it yet.
    waiting: BTreeSet<SessionId>,
    /// The shortest heartbeat interval of a live lease.
    interval: Option<Duration>,
    /// The attempt from which the next questions about quiet attempts begin.
    asking: Attempt,
}

/// Why an attempt has ended here.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Ended {
    /// Everything was read by the session.
    Read,
    /// The session failed before everything was there.
    Aborted {
        abort: Abort,
        /// When the session failed, if the peer has not spoken of the attempt. It may have heard of it all the same.
        unanswered: Option<Time>,
    },
}

impl Default for Outgoing {
    fn default() -> Outgoing {
        Outgoing::from(1)
    }
}

impl Outgoing {
    /// No attempts yet; the next one gets this number.
    pub(super) fn from(next: u64) -> Outgoing {
        Outgoing {
            next,
            open: BTreeMap::new(),
            closing: BTreeSet::new(),
            ended: BTreeMap::new(),
            waiting: BTreeSet::new(),
            interval: None,
            asking: Attempt(0),
        }
    }

    /// The number of the next attempt.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    // ---- sessions that wait for the peer --------------------------------------------------------

    pub(in crate::proto) fn wait(&mut self, session: SessionId) {
        self.waiting.insert(session);
    }

    pub(in crate::proto) fn wait_no_more(&mut self, session: SessionId) {
        self.waiting.remove(&session);
    }

    /// The sessions that wait for the peer to answer.
    pub(in crate::proto) fn waiting(&self) -> &BTreeSet<SessionId> {
        &self.waiting
    }

    /// The sessions that depend on the peer. A session with several attempts is named for each.
    pub(in crate::proto) fn sessions(&self) -> Vec<SessionId> {
        let open = each(self.open.values()).map(|&(session, _)| session);
        open.chain(self.waiting.iter().copied()).collect()
    }

    /// True if this worker needs an answer of the peer.
    pub(super) fn is_needed(&self) -> bool {
        !(self.open.is_empty() && self.ended.is_empty() && self.waiting.is_empty())
    }

    // ---- attempts -------------------------------------------------------------------------------

    /// Opens an attempt for a session's source.
    pub(in crate::proto) fn open(&mut self, session: SessionId, source: usize) -> Attempt {
        let attempt = self.draw();
        self.open.insert(attempt, (session, source));
        self.waiting.remove(&session);
        attempt
    }

    fn draw(&mut self) -> Attempt {
        let attempt = Attempt(self.next);
        self.next += 1;
        attempt
    }

    /// The session has failed. The peer may write until it has said that it stopped, or is known to
    /// have stopped.
    pub(in crate::proto) fn close(&mut self, attempt: Attempt) {
        self.closing.insert(attempt);
    }

    /// True while the peer has not said of every failed session that it writes no more.
    pub(super) fn is_closing(&self) -> bool {
        !self.closing.is_empty()
    }

    /// The attempt is over, and is forgotten.
    pub(in crate::proto) fn end(&mut self, attempt: Attempt) {
        self.open.remove(&attempt);
        self.closing.remove(&attempt);
    }

    /// Everything was read. The peer is told until it acknowledges.
    pub(super) fn end_read(&mut self, attempt: Attempt) {
        self.end(attempt);
        self.ended.insert(attempt, Ended::Read);
    }

    /// A session has failed. The peer is told until it acknowledges.
    pub(super) fn end_aborted(&mut self, abort: Abort, unanswered: Option<Time>) {
        self.end(abort.attempt);
        self.ended.insert(abort.attempt, Ended::Aborted { abort, unanswered });
    }

    /// A session failed at `failed_at`, before the peer answered: a sender there should not wait in vain.
    /// The number and the low watermark are filled in. Does nothing if too many such ends are noted already.
    pub(super) fn abort_unopened(&mut self, abort: Abort, failed_at: Time) {
        if self.ended.len() < MAX_ENDED {
            let low_watermark = self.low_watermark();
            let attempt = self.draw();
            self.end_aborted(Abort { attempt, low_watermark, ..abort }, Some(failed_at));
        }
    }

    /// The same, if the peer may have been told in a conversation that is over. The age of the failure is filled in
    /// whenever that is said.
    pub(super) fn abort_again(&mut self, abort: Abort, failed_at: Time) {
        self.abort_unopened(Abort { failed_ms_ago: Some(0), ..abort }, failed_at);
    }

    /// True if an abort is to be said again.
    pub(in crate::proto) fn says_again(&self) -> bool {
        each(self.ended.values())
            .any(|ended| matches!(ended, Ended::Aborted { abort, .. } if abort.failed_ms_ago.is_some()))
    }

    /// Takes the ends of attempts. Returns the aborts of those of which the peer has not spoken, each with the time of
    /// the failure.
    pub(super) fn take_unanswered(&mut self) -> Vec<(Abort, Time)> {
        let unanswered =
            each(std::mem::take(&mut self.ended).into_values()).filter_map(|ended| match ended {
                Ended::Aborted { abort, unanswered } => Some((abort, unanswered?)),
                Ended::Read => None,
            });
        unanswered.collect()
    }

    /// The peer has acknowledged the end of these attempts.
    pub(in crate::proto) fn acknowledged(&mut self, attempts: Range<Attempt>) {
        let over: Vec<Attempt> = each(self.ended.range(attempts)).map(|(&attempt, _)| attempt).collect();
        for attempt in over {
            self.ended.remove(&attempt);
        }
    }

    /// The peer does not know any of the attempts: there is nobody to tell of their ends.
    pub(in crate::proto) fn forget_ended(&mut self) {
        self.ended.clear();
    }

    /// The peer has forgotten all attempts. Returns the open ones, which begin anew, and the closing ones. Aborts of
    /// attempts of which the peer has not spoken are said again under new numbers; other ends are forgotten.
    pub(in crate::proto) fn take_open(&mut self) -> BTreeMap<Attempt, (SessionId, usize)> {
        self.closing.clear();
        let open = std::mem::take(&mut self.open);
        for (abort, failed_at) in self.take_unanswered() {
            self.abort_again(abort, failed_at);
        }
        open
    }

    /// True if an attempt is open or closing.
    pub(super) fn has_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// The session of the attempt, and the position of its source; `None` unless the attempt is
    /// open or closing.
    pub(in crate::proto) fn of(&self, attempt: Attempt) -> Option<(SessionId, usize)> {
        self.open.get(&attempt).copied()
    }

    /// The open and closing attempts in this range, with their sessions and positions.
    pub(in crate::proto) fn iter(
        &self,
        range: Range<Attempt>,
    ) -> impl Iterator<Item = (Attempt, SessionId, usize)> {
        each(self.open.range(range)).map(|(&attempt, &(session, source))| (attempt, session, source))
    }

    /// All open and closing attempts, with their sessions and positions.
    pub(in crate::proto) fn all(&self) -> impl Iterator<Item = (Attempt, SessionId, usize)> {
        self.iter(Attempt(0)..Attempt(u64::MAX))
    }

    /// All open and closing attempts, beginning with those about which it is the turn to ask.
    pub(in crate::proto) fn in_turn(&self) -> impl Iterator<Item = (Attempt, SessionId, usize)> {
        self.iter(self.asking..Attempt(u64::MAX)).chain(self.iter(Attempt(0)..self.asking))
    }

    /// The peer was asked about attempts up to this one. The attempts after it come first the next
    /// time.
    pub(in crate::proto) fn asked(&mut self, last: Attempt) {
        self.asking = Attempt(last.0.saturating_add(1));
    }

    /// True if an attempt with this number was ever made.
    pub(super) fn was_made(&self, attempt: Attempt) -> bool {
        attempt.0 < self.next
    }

    /// All attempts below this number are over.
    pub(in crate::proto) fn low_watermark(&self) -> Attempt {
        let open = self.open.first_key_value().map(|(&attempt, _)| attempt);
        let ended = self.ended.first_key_value().map(|(&attempt, _)| attempt);
        open.into_iter().chain(ended).min().unwrap_or(Attempt(self.next))
    }

    /// How many attempts are over here without an acknowledgement of the peer.
    pub(in crate::proto) fn ended_len(&self) -> usize {
        self.ended.len()
    }

    /// What the peer has not acknowledged, as it is told now: runs of attempts that were read, and aborts.
    pub(super) fn unacknowledged(&self, now: Time) -> (Vec<(u64, u32)>, Vec<Abort>) {
        let mut read: Vec<(u64, u32)> = Vec::new();
        let mut aborted = Vec::new();
        for (&attempt, ended) in each(&self.ended) {
            match ended {
                Ended::Read => {
                    run_set::append(&mut read, attempt.0);
                    if read.len() > MAX_RUNS {
                        read.pop();
                        break;
                    }
                }
                Ended::Aborted { abort, unanswered } if aborted.len() < MAX_ABORTS => {
                    // Rounded up: a sender that was opened later is not meant.
                    let ago = unanswered.map(|failed_at| millis(now - failed_at) + 1);
                    let failed_ms_ago = ago.filter(|_| abort.failed_ms_ago.is_some());
                    aborted.push(Abort { failed_ms_ago, ..abort.clone() });
                }
                Ended::Aborted { .. } => {}
            }
        }
        (read, aborted)
    }

    // ---- heartbeats -----------------------------------------------------------------------------

    /// Notes the interval of a lease. True if heartbeats must come more often than before.
    pub(super) fn quicken(&mut self, interval: Duration) -> bool {
        if self.interval.is_some_and(|before| before <= interval) {
            return false;
        }
        self.interval = Some(interval);
        true
    }

    /// Heartbeats are sent now. The shortest interval is computed anew from here on.
    pub(in crate::proto) fn last_numbered(&mut self) {
        self.interval = None;
    }

    /// True if no lease is left to keep alive, and there was one.
    pub(super) fn falls_silent(&mut self) -> bool {
        self.open.is_empty() && self.interval.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::PeerCause;
    use crate::id::Room;

    fn abort(attempt: Attempt) -> Abort {
        let (room, low_watermark) = (Room::Number(1), Attempt(0));
        Abort { attempt, room, lease_id: None, cause: PeerCause::Aborted, low_watermark, failed_ms_ago: None }
    }

    /// The table at the top, row by row: what is open, whether the peer must still stop, what it has to
    /// acknowledge, and the low watermark that it is told.
    #[test]
    fn an_attempt_is_open_then_closing_or_ended_then_over() {
        let state = |outgoing: &Outgoing| {
            let open: Vec<u64> = outgoing.all().map(|(attempt, ..)| attempt.0).collect();
            (open, outgoing.is_closing(), outgoing.ended_len(), outgoing.low_watermark().0)
        };
        let mut outgoing = Outgoing::default();
        outgoing.wait(SessionId(1));
        assert_eq!(state(&outgoing), (vec![], false, 0, 1));
        let [first, second, third] = [1, 2, 3].map(|session| outgoing.open(SessionId(session), 0));
        assert!(outgoing.waiting().is_empty(), "who has an attempt waits no more");
        assert_eq!(state(&outgoing), (vec![1, 2, 3], false, 0, 1));
        outgoing.close(first);
        assert_eq!(state(&outgoing), (vec![1, 2, 3], true, 0, 1));
        outgoing.end_read(second);
        assert_eq!(state(&outgoing), (vec![1, 3], true, 1, 1));
        outgoing.end(first);
        assert_eq!(state(&outgoing), (vec![3], false, 1, 2));
        outgoing.end_aborted(abort(third), None);
        assert_eq!(outgoing.unacknowledged(Time::ZERO), (vec![(2, 1)], vec![abort(third)]));
        outgoing.abort_unopened(abort(Attempt(0)), Time::ZERO);
        assert_eq!(state(&outgoing), (vec![], false, 3, 2));
        outgoing.acknowledged(Attempt(2)..Attempt(4));
        assert_eq!(state(&outgoing), (vec![], false, 1, 4));
        assert!(outgoing.is_needed() && outgoing.was_made(Attempt(4)) && !outgoing.was_made(Attempt(5)));
        outgoing.forget_ended();
        assert!(!outgoing.is_needed() && outgoing.low_watermark() == Attempt(5));
    }

    #[test]
    fn after_a_peer_forgot_its_conversation_open_sessions_and_unanswered_aborts_begin_anew() {
        let mut outgoing = Outgoing::default();
        let (open, closing) = (outgoing.open(SessionId(1), 4), outgoing.open(SessionId(2), 0));
        outgoing.close(closing);
        let [read, heard] = [3, 4].map(|session| outgoing.open(SessionId(session), 0));
        outgoing.end_read(read);
        outgoing.end_aborted(abort(heard), None);
        outgoing.abort_unopened(abort(Attempt(0)), Time::from_nanos(7_000_000));
        let taken = outgoing.take_open();
        assert_eq!(taken.get(&open), Some(&(SessionId(1), 4)));
        assert_eq!((taken.len(), outgoing.is_closing()), (2, false));
        let again = Abort { failed_ms_ago: Some(3), low_watermark: Attempt(6), ..abort(Attempt(6)) };
        let told = outgoing.unacknowledged(Time::from_nanos(9_999_999));
        assert_eq!(told, (vec![], vec![again]), "by a number of its own, with the age of the failure");
    }
}
