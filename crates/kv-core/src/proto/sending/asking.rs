//! Requests by content: a receiver asks for an entry, and the service says what becomes of the
//! request.
//!
//! A request waits among the registrations, in a room that this worker names for it. The service sees
//! the request as [`Asked`], and opens a sender in that room or refuses. Nothing else comes into the
//! room: a worker that is asked by content accepts no registration for a room, and an abort ends the
//! attempt that it names and no room.

use crate::asked::{Asked, ContentRequest};
use crate::error::PeerCause;
use crate::id::{PeerId, Room};
use crate::meter::step;
use crate::proto::context::Context;
use crate::proto::conversation::Incoming;
use crate::proto::sending::Sending;
use crate::wire::{Delivery, Register, XferReq};

impl Sending {
    pub(in crate::proto) fn on_xfer_req(&mut self, cx: &mut Context, id: PeerId, request: XferReq) {
        let XferReq { attempt, low_watermark, hash, compatibility, bytes, ttl_ms, mut delivery } = request;
        let Some(peer) = cx.peers.get(id) else { return };
        let is_new = peer.incoming().get(attempt).is_none();
        if is_new && !cx.config.service.by_content && self.may_note(cx, peer, attempt) {
            self.on_low_watermark(cx, id, low_watermark);
            return self.refuse_attempt(cx, id, attempt, PeerCause::EntryMissing);
        }
        let reads = match &mut delivery {
            Delivery::Read(acquire) => {
                acquire.lease_id = None;
                true
            }
            Delivery::Write(_) => false,
        };
        // No two requests have one room: ids of peers, and numbers of attempts at a worker, are used once.
        let Ok(room) = Room::request(&format!("asked-{}-{}", id.0, attempt.0)) else { return };
        let register = Register { attempt, low_watermark, room: room.clone(), ranks: 1, ttl_ms, delivery };
        self.on_register(cx, id, register);
        let waiting = cx.peers.get(id).and_then(|peer| peer.incoming().get(attempt));
        if is_new && matches!(waiting, Some(Incoming::Waiting(_))) {
            let content = ContentRequest::new(hash, compatibility, bytes);
            self.asked.push_back(Asked { peer: id, attempt, content, room, reads });
        }
    }

    /// The oldest request that the service has not seen; `None` if there is none. Requests that are over are
    /// left out: a sender that is opened for such a request would wait for nobody.
    pub(in crate::proto) fn next_asked(&mut self, cx: &Context) -> Option<Asked> {
        loop {
            let asked = self.asked.pop_front()?;
            let attempt = cx.peers.get(asked.peer).and_then(|peer| peer.incoming().get(asked.attempt));
            if matches!(attempt, Some(Incoming::Waiting(_))) {
                return Some(asked);
            }
            step(1);
        }
    }

    /// The service refuses a request. No effect on a request that is over.
    pub(in crate::proto) fn refuse_asked(&mut self, cx: &mut Context, asked: &Asked, cause: PeerCause) {
        if self.take_registration(cx, asked.peer, asked.attempt).is_some() {
            self.refuse_attempt(cx, asked.peer, asked.attempt, cause);
        }
    }
}
