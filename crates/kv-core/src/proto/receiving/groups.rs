//! The cache groups of a receiving session: which groups the sources have, and which groups they
//! leave out.

use crate::error::Cause;
use crate::groups::RequestCacheGroups;
use crate::id::SessionId;
use crate::meter::each;
use crate::plan::Side;
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::ending::Ending;
use crate::proto::groups::{Between, check_own_groups};
use crate::proto::receiving::{ReceiveSession, Receiving};

impl Receiving {
    /// Takes the items of a session's cache groups. Items that come too late were not promised to
    /// any source, and come back at once.
    pub(in crate::proto) fn take_groups(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        groups: RequestCacheGroups,
    ) {
        let bad = check_own_groups(&groups, cx.config.args.geometry());
        match self.sessions.get_mut(&session) {
            None => cx.fx.release_groups(session, groups, Vec::new()),
            Some(receiver) if !receiver.standing.is_going() => {
                cx.fx.release_groups(session, groups, Vec::new())
            }
            Some(receiver) if receiver.given.is_some() || receiver.groups.is_some() => {
                self.fail(cx, session, Cause::InitOrder);
                cx.fx.release_groups(session, groups, Vec::new());
            }
            Some(receiver) => {
                receiver.groups = Some(groups);
                if let Some(cause) = bad {
                    self.fail(cx, session, cause);
                }
            }
        }
    }

    /// Checks that a source leaves out only optional groups. Of the groups that the source has left
    /// out, only those are kept that the session has named.
    pub(super) fn check_skipped(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        index: usize,
    ) -> Option<Cause> {
        let receiver = self.sessions.get_mut(&session)?;
        let source = receiver.sources.get_mut(index)?;
        if source.skipped.is_empty() {
            return None;
        }
        let peer = cx.peers.get(source.peer)?;
        let (map, ours, theirs) = (peer.maps().inward()?, cx.config.args.geometry(), peer.maps().geometry());
        let between = Between { map, ours, theirs, source: Side::Remote };
        let skipped = std::mem::take(&mut source.skipped);
        let named = receiver.groups.iter().flat_map(RequestCacheGroups::iter);
        for items in named.filter(|items| each(&skipped).any(|&group| group == items.group)) {
            if !between.is_optional(items.group) {
                return Some(between.disagreement(items.group, Some(items), None));
            }
            source.skipped.push(items.group);
        }
        None
    }

    /// The groups that a session names and of which no source sends anything. Call this while all
    /// sources are known: a source that is done with the session may be forgotten before the
    /// others.
    pub(super) fn unheld_groups(&self, cx: &Context, receiver: &ReceiveSession) -> Vec<u16> {
        let maps =
            each(receiver.sources.iter()).filter_map(|source| cx.peers.get(source.peer)?.maps().inward());
        let named = receiver.groups.iter().flat_map(RequestCacheGroups::iter).map(|items| items.group);
        let held = |group: u16| maps.clone().any(|map| map.has_group(group));
        named.filter(|&group| !held(group)).collect()
    }
}

impl ReceiveSession {
    /// The groups of a successful session that at least one source has left out, or that no source
    /// has.
    pub(super) fn skipped_groups(&self) -> Vec<u16> {
        if self.standing.poll() != KvPoll::Success {
            return Vec::new();
        }
        let left_out = |group: &u16| {
            let mut sources = self.sources.iter();
            self.unheld.contains(group) || sources.any(|source| source.skipped.contains(group))
        };
        let named = self.groups.iter().flat_map(RequestCacheGroups::iter).map(|items| items.group);
        named.filter(left_out).collect()
    }
}
