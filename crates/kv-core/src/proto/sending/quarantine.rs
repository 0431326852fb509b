//! What the pages of failed sending sessions wait for.

use crate::proto::context::Context;
use crate::proto::sending::{SendSession, Sending};
use crate::quarantine::{Quarantine, QuarantineReason};

impl Sending {
    /// What each failed session waits for whose pages may not be used again yet.
    pub(in crate::proto) fn quarantine(&self, cx: &Context) -> impl Iterator<Item = Quarantine> {
        let failed = self.sessions.iter().filter(|(_, sender)| !sender.standing.is_going());
        failed.map(|(_, sender)| sender.waits(cx))
    }
}

impl SendSession {
    pub(super) fn waits(&self, cx: &Context) -> Quarantine {
        let busy = self.targets.iter().find(|target| target.outstanding() > 0);
        let leased = self.readers().map(|(_, target)| target).filter(|target| !target.is_over());
        let until = leased.clone().filter_map(|target| target.reads()?.fence).max();
        let (target, reason) = match busy {
            Some(target) => (Some(target), QuarantineReason::OwnPosts),
            None => (leased.clone().next(), QuarantineReason::ReaderLease),
        };
        let until = until.filter(|_| reason == QuarantineReason::ReaderLease);
        Quarantine {
            peer: target.and_then(|target| cx.peers.get(target.peer)).map(|peer| peer.worker().clone()),
            reason,
            pages: self.given.num_pages(),
            items: self.groups.as_ref().map_or(0, |groups| groups.len()),
            sessions: 1,
            ends_within: until.map(|until| until - cx.fx.now()),
        }
    }
}
