//! What becomes of the attempts of a peer when the peer fails or falls silent.

use crate::error::{Cause, PeerCause};
use crate::id::{PeerId, SessionId};
use crate::meter::each;
use crate::proto::context::Context;
use crate::proto::conversation::Incoming;
use crate::proto::ending::Ending;
use crate::proto::rendezvous::Named;
use crate::proto::sending::Sending;
use crate::proto::sending::target::Target;
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

    /// The rooms in which the peer may look for a sender again when the way to it is lost, and why it finds none: senders
    /// that write to the peer, or let the peer read, fail of `loss`, and others have failed before, of which the peer may
    /// not have heard.
    pub(in crate::proto) fn lost_rooms(
        &self,
        cx: &Context,
        id: PeerId,
        loss: &PeerCause,
    ) -> Vec<(Named, PeerCause)> {
        let Some(peer) = cx.peers.get(id) else { return Vec::new() };
        let serving = peer.incoming().live().filter_map(|(_, incoming)| {
            let (session, target) = match incoming {
                Incoming::Active(session, target) | Incoming::Reading { session, target, .. } => {
                    (session, target)
                }
                _ => return None,
            };
            let sender = self.sessions.get(session)?;
            let ends = sender.targets.get(*target).is_none_or(Target::is_abort_asked);
            let cause = sender.standing.failure().unwrap_or(loss);
            (!ends).then(|| (sender.named.clone(), cause.clone()))
        });
        let failed = peer.incoming().failed_senders();
        serving.chain(failed.map(|(named, cause)| (named.clone(), cause.clone()))).collect()
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
