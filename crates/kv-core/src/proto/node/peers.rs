//! What becomes of sessions when a peer arrives, falls silent, goes, or starts anew. The
//! conversation is asked first; then sending and receiving are told.

use std::time::Duration;

use super::Node;
use crate::error::Cause;
use crate::id::{Attempt, PeerId};
use crate::meter::each;
use crate::proto::conversation::{
    AnswerHeard, Asks, HelloHeard, MAX_ASKED, NextWay, Peer, Silence, Unanswered,
};
use crate::proto::ending::Ending;
use crate::proto::rendezvous::Latecomers;
use crate::proto::run_set::is_rising;
use crate::proto::timer::Timer;
use crate::time::Time;
use crate::trace::{Dropped, KvWhat, Message, WayFault};
use crate::transport::{Origin, TransportError, WayEnd};
use crate::wire::{Heartbeat, HeartbeatAck, Hello, Refused, Welcome};

impl Node {
    pub(super) fn on_hello(&mut self, from: Origin, mut hello: Hello) {
        let id = match self.cx.hear_hello(from, &mut hello) {
            HelloHeard::Nothing => return,
            HelloHeard::Goes(id) => id,
            HelloHeard::Forgotten(id) => {
                self.cx.fx.tell(id, || KvWhat::PeerRestarted);
                self.fail_peer_sessions(id, &Cause::PeerRestarted, None);
                // Sessions of the peer that read from here have failed there.
                self.sending.readers_have_failed(&mut self.cx, id);
                if !self.cx.begin_anew(id) {
                    return;
                }
                id
            }
        };
        self.cx.fx.tell(id, || KvWhat::Heard(Message::Hello));
        if self.cx.answer_hello(id, from, &hello) {
            self.came_up(id);
            self.cx.say_if_draining(id);
        }
    }

    pub(super) fn on_welcome(&mut self, from: Origin, id: PeerId, welcome: &Welcome) {
        let heard = self.cx.hear_welcome(from, id, welcome);
        self.answer_heard(id, &heard);
    }

    pub(super) fn on_refused(&mut self, from: Origin, id: PeerId, refused: Refused) {
        let heard = self.cx.hear_refused(from, id, refused);
        self.answer_heard(id, &heard);
    }

    fn answer_heard(&mut self, id: PeerId, heard: &AnswerHeard) {
        match heard {
            AnswerHeard::Nothing => {}
            AnswerHeard::Up { forgot, refuses } => {
                self.tell_answer(id);
                if *forgot && *refuses {
                    self.fail_refused(id);
                }
                if *forgot {
                    self.peer_forgot_us(id);
                }
                if *refuses {
                    // The receivers of this peer fail, and abort their rooms at its senders. Later
                    // receivers ask the bootstrap server anew: another incarnation may fit.
                    self.cx.lookups.forget(id);
                }
                self.came_up(id);
                if !*refuses {
                    self.go_on_here(id);
                }
            }
            AnswerHeard::AnotherLife => {
                self.cx.fx.tell(id, || KvWhat::PeerRestarted);
                // The next session asks the bootstrap server anew, and goes by another way if the server names this one.
                self.cx.note_fault(id, WayFault::AnotherLife);
                self.cx.lookups.forget(id);
                // That proves nothing about writes that the known incarnation left in flight.
                self.fail_peer_sessions(id, &Cause::PeerRestarted, None);
                // What is forgotten would be said again over this way, where another incarnation answers. The known one may
                // live, and may write: that is waited for.
                if let Some(peer) = self.cx.peers.get_mut(id) {
                    peer.outgoing_mut().forget_ended();
                    peer.incoming_mut().forget_results();
                }
                self.cx.give_up(id);
                if self.cx.peers.get(id).is_some_and(|peer| peer.is_idle()) {
                    self.cx.forget_peer(id);
                }
            }
        }
    }

    fn tell_answer(&mut self, id: PeerId) {
        match self.cx.peers.get(id).and_then(Peer::refuses) {
            Some(cause) => self.cx.fx.tell(id, || KvWhat::PeerRefuses(Box::new(cause.clone()))),
            None => self.cx.fx.tell(id, || KvWhat::PeerAnswers),
        }
    }

    /// The peer has forgotten the conversation, with all that it had asked to be written and all that it has
    /// permitted: its pages of then may be anybody's.
    fn peer_forgot_us(&mut self, id: PeerId) {
        self.cx.ask_anew(id);
        self.sending.peer_failed(&mut self.cx, id, &Cause::PeerRestarted);
        self.sending.readers_have_failed(&mut self.cx, id);
        self.receiving.peer_forgot_us(&mut self.cx, id);
    }

    /// A peer that has forgotten the conversation refuses a new one: what it was asked to write, or
    /// to let this worker read, will never come.
    fn fail_refused(&mut self, id: PeerId) {
        let Some(peer) = self.cx.peers.get(id) else { return };
        let Some(cause) = peer.refuses().cloned() else { return };
        for session in each(peer.outgoing().sessions()) {
            self.receiving.fail_by(&mut self.cx, session, Some(id), cause.clone());
        }
    }

    /// Messages can be sent to the peer now. Sessions that wait for the peer go on if it has also answered a hello of
    /// this worker.
    fn came_up(&mut self, id: PeerId) {
        let Some(peer) = self.cx.peers.get(id) else { return };
        let waiting = peer.outgoing().waiting().clone();
        let (is_lost, is_up) = (peer.is_lost(), peer.is_up());
        if is_lost {
            self.cx.reopen_sooner(id);
        } else {
            self.cx.watch_peer(id);
            let at = self.cx.fx.now() + self.cx.config.timing.keepalive;
            // While the peer greets and does not answer, the hello of this worker must be said again in time.
            if is_up || self.cx.fx.due(Timer::Peer(id)).is_some_and(|due| due > at) {
                self.cx.fx.arm(Timer::Peer(id), at);
            }
        }
        for session in each(waiting) {
            self.receiving.source_came_up(&mut self.cx, session);
        }
        self.cx.say_releases(id);
    }

    pub(super) fn heard_from(&mut self, id: PeerId) {
        if self.cx.hear(id) {
            self.cx.fx.tell(id, || KvWhat::PeerBack);
            self.came_up(id);
        }
    }

    pub(super) fn on_heartbeat(&mut self, id: PeerId, heartbeat: &Heartbeat) {
        let Heartbeat { number, low_watermark, leases, asked, writes } = heartbeat;
        // Each attempt at most once: the cost of the answer is small, or this worker's own
        // scheduler has caused it.
        if !(is_rising(leases) && is_rising(asked)) {
            self.cx.fx.drop_frame(Some(id), Dropped::Disordered);
            return;
        }
        self.sending.on_low_watermark(&mut self.cx, id, *low_watermark);
        let permit_ms = if *writes { self.cx.permit_asked(id, *number) } else { 0 };
        let (extended, missing) = self.sending.extend_leases(&mut self.cx, id, leases);
        self.cx.say_heartbeat_ack(id, *number, extended, permit_ms);
        let run = |&(start, count): &(u64, u32)| start..start.saturating_add(u64::from(count));
        let asked = asked.iter().flat_map(run).map(Attempt);
        for attempt in each(missing.into_iter().chain(asked).take(MAX_ASKED)) {
            self.sending.tell_about(&mut self.cx, id, attempt);
        }
    }

    pub(super) fn on_heartbeat_ack(&mut self, id: PeerId, ack: HeartbeatAck) {
        if !is_rising(&ack.leases) {
            self.cx.fx.drop_frame(Some(id), Dropped::Disordered);
            return;
        }
        self.sending.on_low_watermark(&mut self.cx, id, ack.low_watermark);
        self.cx.note_permission(id, ack.number, ack.permit_ms);
        self.receiving.leases_extended(&mut self.cx, id, ack);
    }

    // ---- silence --------------------------------------------------------------------------------

    pub(super) fn on_peer_tick(&mut self, id: PeerId) {
        let Some(peer) = self.cx.peers.get(id) else { return };
        if peer.is_lost() {
            self.end_waiting(id);
            self.cx.tell_no_more_if_vanished(id);
            if !self.cx.reopen_way(id) {
                // Receivers of the peer may have registered since the way was lost: their senders fail now.
                let cause = self.cx.loss(id, Cause::WayLost);
                self.fail_peer_sessions(id, &cause, None);
                self.cx.forget_peer(id);
            }
            return;
        }
        if peer.writes_in().is_revoking() {
            self.end_waiting(id);
        }
        match self.cx.unanswered_hello(id) {
            Some(Unanswered::Repeat) => return self.cx.say_hello(id),
            Some(Unanswered::NextWay) => {
                self.cx.note_silence(id);
                self.cx.peers.note_slow(id);
                if !self.go_by_next_way(id) {
                    self.cx.say_hello(id);
                }
                return;
            }
            Some(Unanswered::GiveUp { silent_for }) => {
                self.cx.note_silence(id);
                // The next session asks the bootstrap server anew, and may find another way.
                self.cx.lookups.forget(id);
                for session in each(self.cx.stop_greeting(id)) {
                    let cause = Cause::PeerUnresponsive { silent_for };
                    self.receiving.fail_by(&mut self.cx, session, Some(id), cause);
                }
            }
            None => {}
        }
        self.cx.say_releases(id);
        if self.cx.rest_if_idle(id) {
            return;
        }
        let silent_for = self.cx.silent_for(id);
        let silence = self.cx.judge_silence(id);
        if silence == Silence::TooLong {
            self.cx.fx.tell(id, || KvWhat::PeerGivenUp { silent_for });
            self.cx.note_fault(id, WayFault::Silent);
            let cause = self.cx.loss(id, Cause::PeerUnresponsive { silent_for });
            // The next session asks the bootstrap server anew.
            self.cx.lookups.forget(id);
            self.fail_peer_sessions(id, &cause, None);
        }
        if silence != Silence::Short {
            self.cx.fence_off(id);
        }
        self.ask_peer(id, silent_for);
        self.cx.tell_no_more_if_vanished(id);
        self.cx.set_next_tick(id);
    }

    /// Sends a heartbeat that also asks about attempts of which nothing was heard for a while. A
    /// peer that does not react may have forgotten the conversation, and is greeted again.
    fn ask_peer(&mut self, id: PeerId, silent_for: Duration) {
        let keepalive = self.cx.config.timing.keepalive;
        let mut quiet = self.receiving.quiet_attempts(&mut self.cx, id, keepalive);
        if quiet.is_empty() && silent_for >= keepalive {
            self.cx.fx.tell(id, || KvWhat::PeerSilent { silent_for });
            quiet.push(Vec::new());
        }
        for asked in each(quiet) {
            self.cx.say_heartbeat(id, Asks { asked, ..Asks::default() });
        }
        self.cx.greet_if_forgetful(id, silent_for);
    }

    /// Ends the wait of sessions that have waited for a lost way, or for a revocation, as long as
    /// they would wait for a silent peer.
    fn end_waiting(&mut self, id: PeerId) {
        let ended = self.receiving.impatient(&self.cx, id);
        if !ended.is_empty() && self.cx.peers.get(id).is_some_and(Peer::is_lost) {
            // The next session may find another way whose pause is over.
            self.cx.note_fault(id, WayFault::Silent);
        }
        let cause = self.cx.silence(id);
        for session in each(ended) {
            self.receiving.fail_by(&mut self.cx, session, Some(id), cause.clone());
        }
    }

    // ---- ends -----------------------------------------------------------------------------------

    /// A transport has not led to the peer: the sessions that wait for the peer go by the next one. False if there
    /// is none.
    fn go_by_next_way(&mut self, id: PeerId) -> bool {
        match self.cx.greet_by_next_way(id) {
            None => false,
            Some(NextWay::Free) => true,
            Some(NextWay::Known(there)) => {
                self.receiving.wait_elsewhere(&mut self.cx, id, there);
                self.cx.say_releases(there);
                self.cx.forget_peer(id);
                true
            }
        }
    }

    /// The peer answers: sessions that wait for it over another transport, over which it is silent, wait no more.
    fn go_on_here(&mut self, id: PeerId) {
        for silent in each(self.cx.peers.waited_for_beside(id)) {
            self.receiving.wait_elsewhere(&mut self.cx, silent, id);
        }
    }

    pub(super) fn on_connect_failed(&mut self, id: PeerId, error: TransportError) {
        self.cx.fx.tell(id, || KvWhat::ConnectFailed(error.clone()));
        // A lost way is opened again: the failure proves nothing about the peer. A peer that has never answered owes
        // nothing: its sessions fail.
        if self.cx.peers.get(id).is_some_and(|peer| !(peer.is_lost() && peer.has_met())) {
            self.cx.note_fault(id, WayFault::Refused(error.clone()));
            if self.go_by_next_way(id) {
                return;
            }
            self.fail_peer_sessions(id, &Cause::Connect(error), Some(self.cx.fx.now()));
            // It is kept, and its way tried again, only while it must be told again of failures.
            if self.cx.peers.get(id).is_some_and(|peer| !peer.has_met() && peer.outgoing().says_again()) {
                self.cx.greet_later(id, self.cx.config.timing.retry_max);
            } else {
                self.cx.forget_peer(id);
            }
        }
    }

    pub(super) fn on_peer_gone(&mut self, id: PeerId, end: WayEnd) {
        let Some(peer) = self.cx.peers.get(id) else { return };
        if !peer.has_met() {
            // Nothing was asked of the peer yet, which may be reached by another transport.
            self.cx.note_fault(id, WayFault::Lost);
            if self.go_by_next_way(id) {
                return;
            }
        }
        match end {
            WayEnd::Dead { quiet_after } => {
                self.cx.fx.tell(id, || KvWhat::PeerDead { quiet_after });
                let cause = self.cx.loss(id, Cause::PeerLost);
                self.fail_peer_sessions(id, &cause, Some(self.cx.fx.now() + quiet_after));
                self.cx.forget_peer(id);
            }
            WayEnd::Lost => self.on_way_lost(id),
        }
    }

    /// This side's way to the peer is lost. The peer may live, and go on writing through a way of
    /// its own. Pages that it may write wait for its word, over a new way, or for the transport's
    /// write fence.
    fn on_way_lost(&mut self, id: PeerId) {
        self.cx.fx.tell(id, || KvWhat::WayLost);
        if self.cx.peers.get(id).is_some_and(Peer::has_met) {
            self.cx.note_fault(id, WayFault::Lost);
        }
        let cause = self.cx.loss(id, Cause::WayLost);
        let served = self.sending.served(&self.cx, id);
        self.fail_peer_sessions(id, &cause, None);
        if !self.cx.lose_way(id) {
            return;
        }
        // The next session asks the bootstrap server anew.
        self.cx.lookups.forget(id);
        if self.cx.fence_off(id) {
            // The results end with the conversation. The peer's receivers will register again in a new one, and must then
            // be refused.
            for named in served {
                let (with, told) = ((&mut self.cx.fx, &self.cx.config), cause.for_peer());
                self.cx.rendezvous.sender_failed(with, named, told, Latecomers::Left(1));
            }
        }
        self.cx.reopen_later(id);
    }

    /// The peer's permission has ended, and its last writes have arrived.
    pub(super) fn on_fence_due(&mut self, id: PeerId) {
        // A peer that is heard again tells itself when it has stopped.
        if self.cx.peers.get(id).is_some_and(|peer| peer.is_out_of_touch()) {
            self.fenced(id);
        }
    }

    pub(super) fn on_revoked(&mut self, id: PeerId) {
        if self.cx.peers.get(id).is_some_and(|peer| peer.writes_in().is_revoking()) {
            self.fenced(id);
        }
    }

    /// No write of the peer arrives any more: ends the conversation, and gives the pages back.
    fn fenced(&mut self, id: PeerId) {
        self.cx.fx.tell(id, || KvWhat::WritesOver);
        let cause = self.cx.loss(id, self.cx.silence(id));
        self.fail_peer_sessions(id, &cause, Some(self.cx.fx.now()));
        self.cx.end_conversation(id);
    }

    /// Fails every session that depends on the peer. `quiet_at` is the time from which it is proven
    /// that the peer writes no more; `None` if that is not proven.
    fn fail_peer_sessions(&mut self, id: PeerId, cause: &Cause, quiet_at: Option<Time>) {
        let Some(peer) = self.cx.peers.get(id) else { return };
        let receivers = peer.outgoing().sessions();
        self.sending.peer_failed(&mut self.cx, id, cause);
        for session in each(receivers) {
            self.receiving.fail_by(&mut self.cx, session, Some(id), cause.clone());
            if let Some(quiet_at) = quiet_at {
                self.receiving.source_is_quiet_at(&mut self.cx, session, id, quiet_at);
            }
        }
    }
}
