//! The state groups of a session: taken in before its pages are complete, planned with each peer once
//! both sides' lists are known.
//!
//! A group is the business of two ranks if bytes of it go between them at all: a pipeline stage without
//! recurrent layers has nothing to do with their slots. Of those that are, both sides name each, unless
//! it is optional.

use super::io::Output;
use super::node::Node;
use super::receive::ReceiveSession;
use crate::command::Resource;
use crate::error::{Cause, PagesError};
use crate::groups::{GroupItems, GroupList, GroupLists, Groups};
use crate::id::SessionId;
use crate::layout::Geometry;
use crate::meter::each;
use crate::plan::{Plan, RegionMap, Side};
use crate::poll::KvPoll;

/// What two ranks do about the groups of a request.
#[derive(Debug, Default)]
pub(super) struct GroupPlans {
    /// One for each group that is moved, by falling group number.
    pub(super) plans: Vec<Plan>,
    /// The groups that only one side named: all of them optional.
    pub(super) skipped: Vec<u16>,
}

/// The two ranks.
pub(super) struct Between<'a> {
    pub(super) map: &'a RegionMap,
    pub(super) ours: &'a Geometry,
    pub(super) theirs: &'a Geometry,
    /// Where the bytes come from.
    pub(super) source: Side,
}

impl Between<'_> {
    /// Matches the lists of both sides.
    pub(super) fn plan(&self, local: &Groups, remote: &GroupLists) -> Result<GroupPlans, Cause> {
        let mut found = GroupPlans { plans: Vec::new(), skipped: Vec::new() };
        let only_remote = remote.iter().map(|list| list.group).filter(|&group| local.get(group).is_none());
        let mut groups: Vec<u16> = local.iter().map(|items| items.group).chain(only_remote).collect();
        groups.sort_unstable_by(|a, b| b.cmp(a));
        for group in each(groups.into_iter().filter(|&group| self.map.has_group(group))) {
            match (local.get(group), remote.get(group)) {
                (Some(here), Some(there)) => found.plans.push(self.plan_one(here, there)?),
                _ if self.is_optional(group) => found.skipped.push(group),
                (here, there) => return Err(self.disagreement(group, here, there)),
            }
        }
        Ok(found)
    }

    fn plan_one(&self, here: &GroupItems, there: &GroupList) -> Result<Plan, Cause> {
        let group = here.group;
        let (sent, wanted) = self.directed(here.span(), there.span());
        if !self.map.covers(group, sent, wanted, self.source) {
            return Err(self.disagreement(group, Some(here), Some(there)));
        }
        let local = (here.items.list(), here.first as usize);
        let remote = (&there.items, there.first as usize);
        Plan::window(self.map, group, local, remote)
            .map_err(|_| Cause::Protocol("items of a state group that no plan leads to"))
    }

    fn disagreement(&self, group: u16, here: Option<&GroupItems>, there: Option<&GroupList>) -> Cause {
        let (sent, wanted) = self.directed(here.map(GroupItems::span), there.map(GroupList::span));
        Cause::GroupItems { group, sent, wanted }
    }

    /// What the source has, and what the other side wants.
    fn directed<T>(&self, here: T, there: T) -> (T, T) {
        match self.source {
            Side::Local => (here, there),
            Side::Remote => (there, here),
        }
    }

    /// True if every side that knows the group says so.
    pub(super) fn is_optional(&self, group: u16) -> bool {
        let known = [self.ours, self.theirs].map(|side| side.layout.groups.get(usize::from(group)));
        known.iter().any(Option::is_some) && known.iter().flatten().all(|group| group.optional)
    }
}

/// Why the items cannot be ones of this worker.
pub(super) fn check_own_groups(groups: &Groups, geometry: &Geometry) -> Option<Cause> {
    groups.iter().find_map(|items| {
        let group = items.group;
        match geometry.group_items(group) {
            0 => Some(Cause::UnknownGroup { group }),
            count => {
                let range = items.items.list().check_below(count);
                range.err().map(|error| Cause::BadGroup { group, error })
            }
        }
    })
}

/// Checks the lists of a peer that has so many items of each group: every item is one of its own, and
/// named once.
pub(super) fn check_peer_groups(groups: &GroupLists, items: &[u32]) -> Result<(), PagesError> {
    groups.iter().try_for_each(|list| {
        list.items.check_below(items.get(usize::from(list.group)).copied().unwrap_or(0))?;
        list.items.check_distinct()
    })
}

impl Node {
    pub(super) fn take_groups(&mut self, session: SessionId, groups: Groups) {
        let bad = check_own_groups(&groups, self.config.args.geometry());
        // Those that come too late were promised to nobody.
        let (late, taken) = if let Some(sender) = self.senders.get_mut(&session) {
            if sender.poll.is_terminal() {
                return self.release_groups(session, groups, Vec::new());
            }
            (sender.complete, &mut sender.groups)
        } else if let Some(receiver) = self.receivers.get_mut(&session) {
            if receiver.poll.is_terminal() {
                return self.release_groups(session, groups, Vec::new());
            }
            (receiver.given.is_some(), &mut receiver.groups)
        } else {
            return self.release_groups(session, groups, Vec::new());
        };
        if late || taken.is_some() {
            self.end_session(session, Cause::InitOrder);
            return self.release_groups(session, groups, Vec::new());
        }
        *taken = Some(groups);
        if let Some(cause) = bad {
            self.end_session(session, cause);
        }
    }

    /// Plans the state groups with each receiver that is to be written, once the request is complete.
    pub(super) fn plan_groups(&mut self, session: SessionId) {
        let Some(sender) = self.senders.get_mut(&session) else { return };
        if sender.poll.is_terminal() || !sender.complete {
            return;
        }
        let none = Groups::none();
        let groups = sender.groups.as_ref().unwrap_or(&none);
        let mut disagreement = None;
        let waiting =
            each(sender.targets.iter_mut()).filter(|target| !target.reads && target.group_plans.is_none());
        for target in each(waiting) {
            let Some(peer) = self.peers.get(target.peer) else { continue };
            let Some(map) = &peer.out else { continue };
            let (ours, theirs) = (self.config.args.geometry(), &peer.geometry);
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
            self.fail_sender(session, cause);
        }
    }

    /// Only optional groups may be left out, whatever the source says. Keeps of those that it says it
    /// has left out the ones that the session has named.
    pub(super) fn check_skipped(&mut self, session: SessionId, index: usize) -> Option<Cause> {
        let receiver = self.receivers.get_mut(&session)?;
        let source = receiver.sources.get_mut(index)?;
        if source.skipped.is_empty() {
            return None;
        }
        let peer = self.peers.get(source.peer)?;
        let (map, ours, theirs) = (peer.inward.as_ref()?, self.config.args.geometry(), &peer.geometry);
        let between = Between { map, ours, theirs, source: Side::Remote };
        let skipped = std::mem::take(&mut source.skipped);
        let named = receiver.groups.iter().flat_map(Groups::iter);
        for items in named.filter(|items| each(&skipped).any(|&group| group == items.group)) {
            if !between.is_optional(items.group) {
                return Some(between.disagreement(items.group, Some(items), None));
            }
            source.skipped.push(items.group);
        }
        None
    }

    /// The groups that a session names, of which nothing comes from any of its sources. To be asked
    /// while all of them are there: one that is done with the session may leave before the others.
    pub(super) fn unheld_groups(&self, receiver: &ReceiveSession) -> Vec<u16> {
        let maps =
            each(receiver.sources.iter()).filter_map(|source| self.peers.get(source.peer)?.inward.as_ref());
        let named = receiver.groups.iter().flat_map(Groups::iter).map(|items| items.group);
        let held = |group: u16| maps.clone().any(|map| map.has_group(group));
        named.filter(|&group| !held(group)).collect()
    }

    pub(super) fn release_groups(&mut self, session: SessionId, groups: Groups, skipped: Vec<u16>) {
        self.output(Output::Release { session, resource: Resource::Groups { groups, skipped } });
    }
}

impl ReceiveSession {
    /// The groups of a session that succeeded, of which no source had all.
    pub(super) fn skipped_groups(&self) -> Vec<u16> {
        if self.poll != KvPoll::Success {
            return Vec::new();
        }
        let left_out = |group: &u16| {
            let mut sources = self.sources.iter();
            self.unheld.contains(group) || sources.any(|source| source.skipped.contains(group))
        };
        let named = self.groups.iter().flat_map(Groups::iter).map(|items| items.group);
        named.filter(left_out).collect()
    }
}
