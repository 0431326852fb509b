//! The cache groups of a session: given before the pages are complete, and planned with each peer
//! once the lists of both sides are known.
//!
//! A group matters to two ranks only if bytes of the group go between them: a pipeline stage
//! without recurrent layers has nothing to do with their slots. Both sides must name every group
//! that moves between the two ranks; only optional groups may be named by one side alone.

use crate::error::{Cause, PagesError};
use crate::groups::{CacheGroupItems, CacheGroupList, CacheGroupLists, RequestCacheGroups};
use crate::id::AuxIndex;
use crate::layout::Geometry;
use crate::meter::each;
use crate::plan::{Plan, RegionMap, Side};

/// The plans for the cache groups of a request, between two ranks.
#[derive(Debug, Default)]
pub(super) struct CacheGroupPlans {
    /// One plan for each group that is moved, by falling group number.
    pub(super) plans: Vec<Plan>,
    /// The groups that only one side named, all of them optional.
    pub(super) skipped: Vec<u16>,
}

/// The two ranks between which groups are moved, and their geometries.
pub(super) struct Between<'a> {
    pub(super) map: &'a RegionMap,
    pub(super) ours: &'a Geometry,
    pub(super) theirs: &'a Geometry,
    /// The side from which the bytes come.
    pub(super) source: Side,
}

impl Between<'_> {
    /// Plans every group that both sides name. Fails if the lists of the two sides do not fit.
    pub(super) fn plan(
        &self,
        local: &RequestCacheGroups,
        remote: &CacheGroupLists,
    ) -> Result<CacheGroupPlans, Cause> {
        let mut found = CacheGroupPlans { plans: Vec::new(), skipped: Vec::new() };
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

    fn plan_one(&self, here: &CacheGroupItems, there: &CacheGroupList) -> Result<Plan, Cause> {
        let group = here.group;
        let (sent, wanted) = self.directed(here.span(), there.span());
        if !self.map.covers(group, sent, wanted, self.source) {
            return Err(self.disagreement(group, Some(here), Some(there)));
        }
        let local = (here.items.list(), here.first as usize);
        let remote = (&there.items, there.first as usize);
        Plan::window(self.map, group, local, remote)
            .map_err(|_| Cause::Protocol("the items of a cache group do not fit the two geometries"))
    }

    pub(super) fn disagreement(
        &self,
        group: u16,
        here: Option<&CacheGroupItems>,
        there: Option<&CacheGroupList>,
    ) -> Cause {
        let (sent, wanted) = self.directed(here.map(CacheGroupItems::span), there.map(CacheGroupList::span));
        Cause::GroupItems { group, sent, wanted }
    }

    /// Sorts two values by direction: the source's value first, the other side's second.
    fn directed<T>(&self, here: T, there: T) -> (T, T) {
        match self.source {
            Side::Local => (here, there),
            Side::Remote => (there, here),
        }
    }

    /// True if every side that has the group declares it optional.
    pub(super) fn is_optional(&self, group: u16) -> bool {
        let known = [self.ours, self.theirs].map(|side| side.layout.groups.get(usize::from(group)));
        known.iter().any(Option::is_some) && known.iter().flatten().all(|group| group.optional)
    }
}

/// Why the items cannot be items of this worker; `None` if they can.
pub(super) fn check_own_groups(groups: &RequestCacheGroups, geometry: &Geometry) -> Option<Cause> {
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

/// Checks the lists of a peer that has `items[group]` items of each group: every item must be one
/// of the peer's, and named once.
pub(super) fn check_peer_groups(groups: &CacheGroupLists, items: &[u32]) -> Result<(), PagesError> {
    groups.iter().try_for_each(|list| {
        list.items.check_below(items.get(usize::from(list.group)).copied().unwrap_or(0))?;
        list.items.check_distinct()
    })
}

/// Checks an aux row of a request against the number of rows; `None` if it exists, or if there is
/// no row.
pub(super) fn check_aux(aux: Option<AuxIndex>, rows: u32) -> Option<Cause> {
    match aux {
        Some(AuxIndex(index)) if index >= rows => Some(Cause::BadAux { index, rows }),
        _ => None,
    }
}
