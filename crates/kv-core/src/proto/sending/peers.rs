//! What becomes of the attempts of a peer when the peer fails or falls silent.

use crate::error::Cause;
use crate::id::{PeerId, SessionId};
use crate::meter::each;
use crate::proto::context::Context;
use crate::proto::conversation::Incoming;
use crate::proto::ending::Ending;
use crate::proto::rendezvous::Named;
use crate::proto::sending::Sending;
use crate::trace::KvWhat;
use crate::wire::Delivery;

impl Sending {
    /// The conversation with the peer has failed: the peer's registrations fail, and so do the
    /// sessions that serve them.
    pub(in crate::proto) fn peer_failed(&mut self, cx: &mut Context, id: PeerId, cause: &Cause) {
        let Some(peer) = cx.peers.get(id) else { return };
        let (mut senders, mut waiting) = (Vec::new(), Vec::new());
        for (attempt, incoming) in peer.incoming().live() {
            match incoming {
                Incoming::Waiting(_) => waiting.push(attempt),
                Incoming::Reading { session, .. } | Incoming::Active(session, _) => senders.push(*session),
                Incoming::Served { .. } | Incoming::Failed { .. } => {}
            }
        }
        for attempt in each(waiting) {
            self.drop_registration(cx, id, attempt, cause.for_peer());
        }
        for session in each(senders) {
            self.fail(cx, session, cause.clone());
        }
    }

    /// The rooms in which this worker writes to the peer, or lets the peer read.
    pub(in crate::proto) fn served(&self, cx: &Context, id: PeerId) -> Vec<Named> {
        let Some(peer) = cx.peers.get(id) else { return Vec::new() };
        let sessions = peer.incoming().live().filter_map(|(_, incoming)| match incoming {
            Incoming::Active(session, _) | Incoming::Reading { session, .. } => Some(session),
            _ => None,
        });
        let senders = sessions.filter_map(|session| self.sessions.get(session));
        senders.filter(|sender| sender.standing.is_going()).map(|sender| sender.named.clone()).collect()
    }

    /// The peer has failed all its sessions that read from here: they rely on no lease any more.
    pub(in crate::proto) fn readers_have_failed(&mut self, cx: &mut Context, id: PeerId) {
        let Some(peer) = cx.peers.get(id) else { return };
        let readers = peer.incoming().live().filter_map(|(_, incoming)| match incoming {
            &Incoming::Reading { session, target, .. } => Some((session, target)),
            _ => None,
        });
        let readers: Vec<(SessionId, usize)> = readers.collect();
        for (session, target) in each(readers) {
            self.reader_has_failed(cx, session, target);
        }
    }

    /// The permission to write is to be renewed, if anything is to be written.
    pub(in crate::proto) fn on_permission_due(&mut self, cx: &mut Context, id: PeerId) {
        let Some(peer) = cx.peers.get(id) else { return };
        let writes = peer.incoming().live().any(|(_, incoming)| match incoming {
            Incoming::Active(session, index) => {
                let sender = self.sessions.get(session);
                sender
                    .is_some_and(|sender| sender.targets.get(*index).is_some_and(|target| !target.is_over()))
            }
            Incoming::Waiting(registration) => matches!(registration.delivery, Delivery::Write(_)),
            _ => false,
        });
        if writes {
            cx.ask_to_write(id);
        } else {
            cx.fx.tell(id, || KvWhat::PermissionEnded);
        }
    }
}
