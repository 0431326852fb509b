//! What becomes of receiving sessions when a source falls silent, is proven to write no more, or
//! forgets the conversation.

use std::time::Duration;

use crate::error::{BootstrapError, Cause};
use crate::id::{Attempt, PeerId, SessionId};
use crate::meter::each;
use crate::proto::context::Context;
use crate::proto::conversation::{MAX_ASKED, MAX_ASKING};
use crate::proto::ending::Ending;
use crate::proto::receiving::source::Source;
use crate::proto::receiving::{ReceiveSession, Receiving};
use crate::proto::run_set;
use crate::proto::timer::Timer;
use crate::time::Time;

impl Receiving {
    /// Attempts at the peer about which nothing was heard for `quiet`, as runs, one list for each
    /// heartbeat. If there are too many for one time, they take turns.
    pub(in crate::proto) fn quiet_attempts(
        &self,
        cx: &mut Context,
        id: PeerId,
        quiet: Duration,
    ) -> Vec<Vec<(u64, u32)>> {
        let now = cx.fx.now();
        let Some(peer) = cx.peers.get_mut(id) else { return Vec::new() };
        let asks = |&(_, session, source): &(Attempt, SessionId, usize)| {
            self.sessions.get(&session).is_some_and(|receiver| receiver.is_quiet(source, now, quiet))
        };
        let asked = peer.outgoing().in_turn().filter(asks).map(|(attempt, ..)| attempt.0);
        let mut asked: Vec<u64> = asked.take(MAX_ASKING * MAX_ASKED).collect();
        if let Some(&last) = asked.last() {
            peer.outgoing_mut().asked(Attempt(last));
        }
        asked.sort_unstable();
        let runs = |attempts: &[u64]| {
            let mut runs = Vec::new();
            attempts.iter().for_each(|&attempt| run_set::append(&mut runs, attempt));
            runs
        };
        asked.chunks(MAX_ASKED).map(runs).collect()
    }

    /// The sessions that have waited for the peer as long as they would wait for a silent peer.
    pub(in crate::proto) fn impatient(&self, cx: &Context, id: PeerId) -> Vec<SessionId> {
        let (now, patience) = (cx.fx.now(), cx.config.timing.peer_timeout);
        let Some(peer) = cx.peers.get(id) else { return Vec::new() };
        let waited = |session: &&SessionId| {
            self.sessions.get(session).is_some_and(|receiver| now - receiver.opened >= patience)
        };
        each(peer.outgoing().waiting()).filter(waited).copied().collect()
    }

    /// The sessions that wait for a peer which was not met, or is out of touch, wait from now on for another
    /// conversation with the same worker, over another transport.
    pub(in crate::proto) fn wait_elsewhere(&mut self, cx: &mut Context, from: PeerId, to: PeerId) {
        let waiting = cx.peers.get(from).map(|peer| peer.outgoing().waiting().clone());
        for session in each(waiting.unwrap_or_default()) {
            let Some(receiver) = self.sessions.get_mut(&session) else { continue };
            if each(receiver.sources.iter()).any(|source| source.peer == to) {
                let cause = Cause::Bootstrap(BootstrapError::Malformed("two ranks are the same worker"));
                self.fail_by(cx, session, Some(from), cause);
                continue;
            }
            for source in each(receiver.sources.iter_mut()).filter(|source| source.peer == from) {
                source.peer = to;
            }
            if let Some(peer) = cx.peers.get_mut(from) {
                peer.outgoing_mut().wait_no_more(session);
            }
            if let Some(peer) = cx.peers.get_mut(to) {
                peer.outgoing_mut().wait(session);
            }
            cx.watch_peer(to);
            self.source_came_up(cx, session);
        }
    }

    /// It is proven that the peer writes nothing after `quiet_at`.
    pub(in crate::proto) fn source_is_quiet_at(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        id: PeerId,
        quiet_at: Time,
    ) {
        if quiet_at <= cx.fx.now() {
            self.on_quiet(cx, session, id);
        } else if self.has(session) {
            cx.fx.arm(Timer::Quiet(session, id), quiet_at);
        }
    }

    pub(in crate::proto) fn on_quiet(&mut self, cx: &mut Context, session: SessionId, id: PeerId) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        for index in each(0..receiver.sources.len()) {
            if receiver.sources.get(index).is_none_or(|source| source.peer != id) {
                continue;
            }
            receiver.tell_if_unanswered(cx, index);
            let attempt = receiver.sources.get_mut(index).and_then(Source::end);
            if let (Some(attempt), Some(peer)) = (attempt, cx.peers.get_mut(id)) {
                peer.outgoing_mut().end(attempt);
            }
        }
        self.settle(cx, session);
    }

    /// The peer has forgotten the conversation, which it does only when none of its writes is in
    /// flight: failed attempts are over, and live attempts begin again in the new conversation. Aborts of closing
    /// attempts of which the peer has not spoken are said again there.
    pub(in crate::proto) fn peer_forgot_us(&mut self, cx: &mut Context, id: PeerId) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let open = peer.outgoing_mut().take_open();
        for (_, (session, index)) in each(open) {
            let Some(receiver) = self.sessions.get_mut(&session) else { continue };
            let live = receiver.standing.is_going();
            receiver.tell_if_unanswered(cx, index);
            let Some(source) = receiver.sources.get_mut(index) else { continue };
            if !live || !source.is_open() {
                source.end();
                cx.fx.cancel(Timer::Quiet(session, id));
                self.settle(cx, session);
                continue;
            }
            if source.reading.is_some() {
                // A peer that has forgotten the conversation has no lease of it any more.
                source.end();
                self.fail_by(cx, session, Some(id), Cause::PeerRestarted);
                continue;
            }
            let Some(peer) = cx.peers.get_mut(id) else { return };
            source.reopen(peer.outgoing_mut().open(session, index));
            self.say_registrations(cx, session);
        }
    }
}

impl ReceiveSession {
    /// The conversation ends in which a source was to be told that the session has failed. A source that has not spoken
    /// of the session is told again in the next one, because a sender there may be waiting for the session.
    fn tell_if_unanswered(&self, cx: &mut Context, index: usize) {
        let Some(source) = self.sources.get(index) else { return };
        let Some(failed_at) = source.closes_unanswered_since() else { return };
        if let (Some(cause), Some(peer)) = (self.standing.failure(), cx.peers.get_mut(source.peer)) {
            peer.abort_again(&self.room, cause, failed_at);
        }
    }
}
