use crate::groups::Groups;
use crate::id::{PeerId, SessionId};
use crate::meter::each;
use crate::plan::Side;
use crate::proto::context::Context;
use crate::proto::conversation::incoming::Incoming;
use crate::proto::conversation::peer::Wish;
use crate::proto::groups::{Between, GroupPlans};
use crate::proto::rendezvous::Named;
use crate::proto::sending::Sending;

impl Sending {
    /// Plans the state groups with each receiver that is to be written, once the request is complete.
    pub(in crate::proto) fn plan_groups(&mut self, cx: &mut Context, session: SessionId) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        if sender.poll.is_terminal() || !sender.complete {
            return;
        }
        let none = Groups::none();
        let groups = sender.groups.as_ref().unwrap_or(&none);
        let mut disagreement = None;
        let waiting =
            each(sender.targets.iter_mut()).filter(|target| !target.reads && target.group_plans.is_none());
        for target in each(waiting) {
            let Some(peer) = cx.peers.get(target.peer) else { continue };
            let Some(map) = &peer.out else { continue };
            let (ours, theirs) = (cx.config.args.geometry(), &peer.geometry);
            match (Between { map, ours, theirs, source: Side::Local }).plan(groups, &target.groups) {
                Ok(GroupPlans { plans, mut skipped }) => {
                    skipped.retain(|&group| target.groups.get(group).is_some());
                    target.group_plans = Some(plans);
                    target.skipped = skipped;
                }
                Err(cause) => disagreement = disagreement.or(Some(cause)),
            }
        }
        if let Some(cause) = disagreement {
            self.fail_sender(cx, session, cause);
        }
    }

    /// The rooms in which this worker serves the peer, or lets it read.
    pub(in crate::proto) fn served(&self, cx: &Context, id: PeerId) -> Vec<Named> {
        let Some(peer) = cx.peers.get(id) else { return Vec::new() };
        let sessions = each(peer.incoming.live()).filter_map(|incoming| match incoming {
            Incoming::Active(session, _) | Incoming::Reading { session, .. } => Some(session),
            _ => None,
        });
        let senders = sessions.filter_map(|session| self.sessions.get(session));
        senders.filter(|sender| !sender.poll.is_terminal()).map(|sender| sender.named.clone()).collect()
    }

    /// The peer has failed all its sessions that read from here: their leases are worth nothing.
    pub(in crate::proto) fn readers_have_failed(&mut self, cx: &mut Context, id: PeerId) {
        let Some(peer) = cx.peers.get(id) else { return };
        let readers = each(peer.incoming.live()).filter_map(|incoming| match incoming {
            &Incoming::Reading { session, target, .. } => Some((session, target)),
            _ => None,
        });
        let readers: Vec<(SessionId, usize)> = readers.collect();
        for (session, target) in each(readers) {
            self.reader_has_failed(cx, session, target);
        }
    }

    /// The permission is to be renewed, if anything is to be written.
    pub(in crate::proto) fn on_permission_due(&mut self, cx: &mut Context, id: PeerId) {
        let Some(peer) = cx.peers.get(id) else { return };
        let writes = each(peer.incoming.live()).any(|incoming| match incoming {
            Incoming::Active(session, index) => {
                let sender = self.sessions.get(session);
                sender.is_some_and(|sender| sender.targets.get(*index).is_some_and(|target| !target.over))
            }
            Incoming::Waiting(registration) => matches!(registration.wish, Wish::Write { .. }),
            _ => false,
        });
        if writes {
            cx.ask_to_write(id);
        }
    }
}
