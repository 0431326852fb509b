//! What a receiving session asks of its sources, repeated until each source has acknowledged it.

use crate::asked::ContentRequest;
use crate::error::Cause;
use crate::few::Few;
use crate::groups::RequestCacheGroups;
use crate::id::{Attempt, PeerId, SessionId};
use crate::meter::each;
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::conversation::{Peer, of_incarnation};
use crate::proto::ending::Ending;
use crate::proto::receiving::{ReceiveSession, Receiving};
use crate::proto::timer::Timer;
use crate::wire::{Acquire, Body, Delivery, Destination, Register, XferReq};

impl Receiving {
    /// Sends the registrations that were not acknowledged, and sets the time of the next try.
    pub(super) fn say_registrations(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        let frames = receiver.registrations(cx);
        if frames.is_empty() {
            return;
        }
        receiver.repeats += 1;
        let repeats = receiver.repeats;
        let content = receiver.content.clone();
        for (peer, mut register) in each(frames) {
            cx.watch_peer(peer);
            match &mut register.delivery {
                Delivery::Write(to) => (to.ask, to.permit_ms) = cx.permit(peer),
                Delivery::Read(acquire) => acquire.number = cx.number(peer),
            }
            let body = match content.clone() {
                Some(content) => Body::XferReq(ask_for(content, register)),
                None => Body::Register(register),
            };
            if !cx.send_long(peer, &body) {
                // A frame of this length would never arrive.
                let cause = Cause::Protocol("pages too scattered for one frame");
                return self.fail(cx, session, cause);
            }
        }
        let pause = cx.fx.backoff(cx.config.timing.retry_first, repeats);
        cx.fx.arm(Timer::Repeat(session), cx.fx.now() + pause);
    }

    pub(in crate::proto) fn on_repeat(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get(&session) else { return };
        match receiver.standing.poll() {
            KvPoll::Failed => self.say_aborts(cx, session),
            _ => {
                self.say_registrations(cx, session);
                self.ask_for_proof(cx, session);
            }
        }
    }

    pub(in crate::proto) fn on_registered(&mut self, cx: &mut Context, id: PeerId, attempt: Attempt) {
        let now = cx.fx.now();
        if let Some((_, _, source, _)) = self.source_of(cx, id, attempt) {
            source.hear(now);
        }
    }
}

/// The request for an entry, in place of a registration for a room.
fn ask_for(content: ContentRequest, register: Register) -> XferReq {
    let ContentRequest { hash, compatibility, bytes } = content;
    let Register { attempt, low_watermark, ttl_ms, delivery, .. } = register;
    XferReq { attempt, low_watermark, hash, compatibility, bytes, ttl_ms, delivery }
}

impl ReceiveSession {
    /// The registrations for the sources that have not acknowledged one.
    fn registrations(&self, cx: &Context) -> Few<(PeerId, Register)> {
        // A little longer than this side waits: the session should end by its own deadline, not by
        // the sender's patience.
        let left = self.standing.deadline().saturating_sub(cx.fx.now() - self.opened);
        let ttl = left + cx.config.timing.retry_first;
        let mut frames = Few::default();
        for (index, source) in each(self.sources.iter().enumerate()) {
            let Some(attempt) = source.unacknowledged() else { continue };
            let Some(peer) = cx.peers.get(source.peer) else { continue };
            let Some(delivery) = self.delivery(index, peer) else { continue };
            let register = Register {
                attempt,
                low_watermark: peer.outgoing().low_watermark(),
                room: self.room.clone(),
                ranks: peer.maps().ranks_served(),
                ttl_ms: u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX),
                delivery,
            };
            frames.push((source.peer, register));
        }
        frames
    }

    /// What the source at a position is asked to do: to let the session read, or to write into its
    /// pages once they are given.
    fn delivery(&self, index: usize, peer: &Peer) -> Option<Delivery> {
        if self.pulls {
            let lease_id = of_incarnation(&self.lease_refs, peer.incarnation()).map(|lease| lease.lease_id);
            return Some(Delivery::Read(Acquire { lease_id, number: 0 }));
        }
        let (pages, aux) = self.given.as_ref()?;
        let share = peer.maps().geometry().parallel.page_range(pages.len());
        let number = |pages: usize| u32::try_from(pages).unwrap_or(u32::MAX);
        Some(Delivery::Write(Destination {
            pages: pages.list().slice(share.start, share.len()).unwrap_or_default(),
            first_page: number(self.prefix.saturating_add(share.start)),
            total_pages: number(self.prefix.saturating_add(pages.len())),
            aux: *aux,
            // The aux row of the first source counts.
            aux_here: index == 0,
            groups: self.groups.as_ref().map(RequestCacheGroups::lists).unwrap_or_default(),
            ask: 0,
            permit_ms: 0,
        }))
    }
}
