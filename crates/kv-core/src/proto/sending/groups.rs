//! The cache groups of a sending session: given before the pages are complete, and planned with
//! each receiver once the lists of both sides are known.

use crate::error::Cause;
use crate::groups::RequestCacheGroups;
use crate::id::SessionId;
use crate::meter::each;
use crate::plan::Side;
use crate::proto::context::Context;
use crate::proto::ending::Ending;
use crate::proto::groups::{Between, check_own_groups};
use crate::proto::sending::Sending;

impl Sending {
    /// Takes the items of a session's cache groups. Items that come too late were not promised to
    /// any receiver, and come back at once.
    pub(in crate::proto) fn take_groups(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        groups: RequestCacheGroups,
    ) {
        let bad = check_own_groups(&groups, cx.config.args.geometry());
        match self.sessions.get_mut(&session) {
            None => cx.fx.release_groups(session, groups, Vec::new()),
            Some(sender) if !sender.standing.is_going() => cx.fx.release_groups(session, groups, Vec::new()),
            Some(sender) if sender.given.is_complete() || sender.groups.is_some() => {
                self.fail(cx, session, Cause::InitOrder);
                cx.fx.release_groups(session, groups, Vec::new());
            }
            Some(sender) => {
                sender.groups = Some(groups);
                if let Some(cause) = bad {
                    self.fail(cx, session, cause);
                }
            }
        }
    }

    /// Plans the cache groups with each receiver that is written to, once the request is complete.
    pub(super) fn plan_groups(&mut self, cx: &mut Context, session: SessionId) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        if !sender.standing.is_going() || !sender.given.is_complete() {
            return;
        }
        let none = RequestCacheGroups::none();
        let groups = sender.groups.as_ref().unwrap_or(&none);
        let mut disagreement = None;
        for target in each(sender.targets.iter_mut()) {
            let peer = cx.peers.get(target.peer);
            let Some(written) = target.written_mut().filter(|written| !written.has_group_plans()) else {
                continue;
            };
            let Some(peer) = peer else { continue };
            let Some(map) = peer.maps().out() else { continue };
            let (ours, theirs) = (cx.config.args.geometry(), peer.maps().geometry());
            match (Between { map, ours, theirs, source: Side::Local }).plan(groups, written.groups()) {
                Ok(plans) => written.plan_groups(plans),
                Err(cause) => disagreement = disagreement.or(Some(cause)),
            }
        }
        if let Some(cause) = disagreement {
            self.fail(cx, session, cause);
        }
    }
}
