//! Permission to write into the pages of a receiver, and what ends the danger of the last writes of
//! a sender that is not heard any more.
//!
//! ```text
//! sender                                           receiver
//!   Welcome{ask} ──────────────────────────────▶
//!                ◀──── Register{ask, permit_ms}    permission until now + permit_ms, by this side's clock
//!   until = when that ask was sent + permit_ms,
//!   less a margin for clocks of different rates
//!   Heartbeat{number, writes}, while a registration is open ─▶
//!                ◀──── HeartbeatAck{number, permit_ms}   0 while the receiver waits for the sender to stop,
//!                                                  and needs it to for its pages
//! ```
//!
//! Both sides count as [`numbers`](super::numbers) says: the sender from the moment at which it
//! *asked*. Only an answer extends a permission.
//!
//! Pages of a failed session come back when the sender has said that it writes no more, or is
//! proven dead. Where neither happens, because the peer is silent or the way to it is lost, the
//! transport's [`WriteFence`] decides: see [`Context::fence_off`].

use super::numbers::millis;
use super::said::Asks;
use crate::id::PeerId;
use crate::proto::context::Context;
use crate::proto::io::Output;
use crate::proto::timer::Timer;
use crate::trace::KvWhat;
use crate::transport::WriteFence;

impl Context {
    // ---- the prefill side ---------------------------------------------------------------------

    /// A registration of the peer is open: a permission should be there when the first chunk comes.
    pub(in crate::proto) fn want_permission(&mut self, id: PeerId) {
        if self.fx.is_armed(Timer::Permission(id)) {
            return;
        }
        let Some(peer) = self.peers.get(id) else { return };
        // A permission is renewed when a third of it has gone. Answers to old questions permit less
        // than that.
        let due = self.fx.now() + self.config.timing.write_permission / 3;
        match peer.writes_out.until() > due {
            true => self.fx.arm(Timer::Permission(id), due),
            false => self.ask_to_write(id),
        }
    }

    pub(in crate::proto) fn ask_to_write(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.writes_out.unanswered += 1;
        let times = peer.writes_out.unanswered;
        self.say_heartbeat(id, Asks { writes: true, ..Asks::default() });
        let pause = self.fx.backoff(self.config.timing.retry_first, times);
        self.fx.arm(Timer::Permission(id), self.fx.now() + pause);
    }

    /// The peer has answered a question: writes may begin for `permit_ms` from the moment of the
    /// question, or not at all.
    pub(in crate::proto) fn note_permission(&mut self, id: PeerId, ask: u64, permit_ms: u64) {
        let Some(peer) = self.peers.get_mut(id).filter(|_| permit_ms > 0) else { return };
        let Some(until) = peer.granted_until(ask, permit_ms) else { return };
        if !peer.writes_out.answered(until) {
            return;
        }
        if until <= self.fx.now() {
            return;
        }
        let lasts = until - self.fx.now();
        self.fx.tell(id, || KvWhat::PermissionBegan { lasts });
        self.fx.output(Output::Permit { peer: id, until });
        self.posts.wake(id);
        if self.fx.is_armed(Timer::Permission(id)) {
            let due = self.fx.now() + self.config.timing.write_permission / 3;
            self.fx.arm(Timer::Permission(id), due.min(until));
        }
    }

    // ---- the decode side ----------------------------------------------------------------------

    /// The answer to the last question that was heard from the peer: the number of the question,
    /// and the duration of the permission in milliseconds. Both are zero while the peer
    /// [must not write](Context::is_barred).
    pub(in crate::proto) fn permit(&mut self, id: PeerId) -> (u64, u64) {
        if self.is_barred(id) {
            return (0, 0);
        }
        let (now, permission) = (self.fx.now(), self.config.timing.write_permission);
        let Some(peer) = self.peers.get_mut(id) else { return (0, 0) };
        if peer.writes_in.heard == 0 {
            return (0, 0);
        }
        peer.writes_in.until = peer.writes_in.until.max(now + permission);
        (peer.writes_in.heard, millis(permission))
    }

    /// True while this worker waits for the peer to stop: the peer must not begin more writes. Where only the peer's word or
    /// its death gives pages back, more writes do no harm, and the word may be long in coming: it waits for writes that
    /// the transport cannot call back, as over one of several links that is cut.
    fn is_barred(&self, id: PeerId) -> bool {
        let Some(peer) = self.peers.get(id) else { return true };
        let waits = self.has_closing(id) && peer.writes_in.fence != WriteFence::AtDeath;
        peer.is_lost() || peer.writes_in.revoking || waits
    }

    /// True if a session of this worker has failed, and the peer has not said yet that it writes no
    /// more.
    fn has_closing(&self, id: PeerId) -> bool {
        self.peers.get(id).is_some_and(|peer| peer.outgoing.is_closing())
    }

    /// The peer asks whether it may write. The answer in milliseconds from now; 0 if nothing is to
    /// be written.
    pub(in crate::proto) fn permit_asked(&mut self, id: PeerId, number: u64) -> u64 {
        let Some(peer) = self.peers.get_mut(id) else { return 0 };
        peer.writes_in.hear(number, false);
        match peer.outgoing.has_open() {
            true => self.permit(id).1,
            false => 0,
        }
    }

    /// The peer is silent, or the way to it is lost, and pages of failed sessions wait for its
    /// word. Gets the pages back without that word, if the transport's write fence allows it.
    ///
    /// | fence | pages come back |
    /// |---|---|
    /// | [`AtDeath`](WriteFence::AtDeath) | with the peer's word, over a new way if this way is lost, or with its death |
    /// | [`Revocable`](WriteFence::Revocable) | when the transport has revoked the peer's right to write |
    /// | [`Within`](WriteFence::Within) | when the permission has ended, and the transport's bound after its end |
    ///
    /// Pages that came back without the peer's word end the conversation. The peer may still
    /// believe that it is to write, and gets no permission before it has forgotten the
    /// conversation. Returns true if the fence has been started: the conversation ends with the
    /// fence, unless the peer is heard first.
    pub(in crate::proto) fn fence_off(&mut self, id: PeerId) -> bool {
        if !self.has_closing(id) {
            return false;
        }
        let Some(peer) = self.peers.get_mut(id) else { return false };
        match peer.writes_in.fence {
            WriteFence::AtDeath => return false,
            WriteFence::Revocable if peer.writes_in.revoking => {}
            WriteFence::Revocable => {
                peer.writes_in.revoking = true;
                self.fx.tell(id, || KvWhat::Revoking);
                self.fx.output(Output::Revoke { peer: id });
            }
            WriteFence::Within(bound) => {
                let at = peer.writes_in.end_of_last(bound);
                self.fx.arm(Timer::WriteFence(id), at.max(self.fx.now()));
            }
        }
        true
    }
}
