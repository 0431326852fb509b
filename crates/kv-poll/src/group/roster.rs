//! The open sessions of a group, which are found by the numbers that the ranks gave them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use kv_core::{KvSession, Pages, Reclaimed, RequestCacheGroups, SessionId};

use super::deal::Deal;
use super::members::Members;
use crate::consensus::Standing;
use crate::kv::Change;

/// All open sessions of a group, by their numbers on the first rank.
pub(super) struct Roster<S: KvSession> {
    open: BTreeMap<SessionId, Members<S>>,
    /// For each rank: from the number of a session on that rank to the number on the first rank.
    by_rank: Vec<BTreeMap<SessionId, SessionId>>,
    /// Sessions that have changed, or that have commands waiting for room in the ring of a rank.
    touched: BTreeSet<SessionId>,
    /// Sessions of which the scheduler has yet to be told.
    untold: BTreeSet<SessionId>,
    orphans: Vec<Pages>,
    orphan_groups: Vec<RequestCacheGroups>,
}

impl<S: KvSession> Roster<S> {
    pub(super) fn new(ranks: usize) -> Roster<S> {
        let by_rank = (0..ranks).map(|_| BTreeMap::new()).collect();
        Roster {
            open: BTreeMap::new(),
            by_rank,
            touched: BTreeSet::new(),
            untold: BTreeSet::new(),
            orphans: Vec::new(),
            orphan_groups: Vec::new(),
        }
    }

    /// Enters the sessions of a request, which are given in the order of ranks.
    pub(super) fn enter(&mut self, id: SessionId, sessions: Vec<S>, deal: Deal) {
        for (known, session) in self.by_rank.iter_mut().zip(&sessions) {
            known.insert(session.id(), id);
        }
        self.open.insert(id, Members::new(sessions, deal));
    }

    /// True if nothing is known of any request.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        let known = self.by_rank.iter().map(BTreeMap::len).sum::<usize>();
        (self.open.len(), known, self.untold.len()) == (0, 0, 0)
    }

    pub(super) fn get(&self, id: SessionId) -> Option<&Members<S>> {
        self.open.get(&id)
    }

    /// The request, to be changed. The next `settle` looks at the request.
    pub(super) fn touch(&mut self, id: SessionId) -> Option<&mut Members<S>> {
        self.touched.insert(id);
        self.open.get_mut(&id)
    }

    /// Notes a change that a rank reports. False if the group has no such session.
    pub(super) fn note(&mut self, rank: usize, change: Change) -> bool {
        let Some(&id) = self.by_rank.get(rank).and_then(|known| known.get(&change.session)) else {
            return false;
        };
        if let Some(members) = self.touch(id) {
            members.note(rank, change.reclaimable);
        }
        true
    }

    /// Notes what is new for the scheduler. The result is the requests that are over: they hold ready events
    /// of the caller, and are to be dropped when the group is not locked any more.
    pub(super) fn settle(&mut self) -> Vec<Members<S>> {
        let mut over = Vec::new();
        for session in std::mem::take(&mut self.touched) {
            let Some(members) = self.open.get_mut(&session) else { continue };
            let news = members.settle();
            if members.is_behind() {
                self.touched.insert(session);
            }
            if members.abandoned {
                if let Some(reclaimed) = members.reclaim() {
                    over.extend(self.forget(session));
                    self.touched.remove(&session);
                    self.keep(reclaimed);
                }
            } else if news {
                self.untold.insert(session);
            }
        }
        over
    }

    /// Number of sessions of which the scheduler has yet to be told.
    pub(super) fn num_untold(&self) -> usize {
        self.untold.len()
    }

    /// Takes out the next change that the scheduler is to be told. A session whose handle is gone has none.
    pub(super) fn next_change(&mut self) -> Option<Change> {
        loop {
            let session = self.untold.pop_first()?;
            if let Some(members) = self.open.get(&session).filter(|members| !members.abandoned) {
                let Standing { poll, reclaimable } = members.told();
                return Some(Change { session, poll, reclaimable });
            }
        }
    }

    /// Takes out a request that was reclaimed on all ranks, to be dropped when the group is not locked any
    /// more.
    pub(super) fn forget(&mut self, id: SessionId) -> Option<Members<S>> {
        let members = self.open.remove(&id)?;
        for (known, session) in self.by_rank.iter_mut().zip(&members.ids) {
            known.remove(session);
        }
        Some(members)
    }

    /// Keeps pages and items of cache groups that their owner did not take back.
    pub(super) fn keep(&mut self, left: Reclaimed) {
        self.orphans.extend(Some(left.pages).filter(|pages| !pages.is_empty()));
        self.orphan_groups.extend(Some(left.groups).filter(|groups| !groups.is_empty()));
    }

    pub(super) fn take_orphan_groups(&mut self) -> Vec<RequestCacheGroups> {
        std::mem::take(&mut self.orphan_groups)
    }

    pub(super) fn take_orphans(&mut self) -> Vec<Pages> {
        std::mem::take(&mut self.orphans)
    }
}

impl<S: KvSession> fmt::Debug for Roster<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Roster").field("open", &self.open.len()).field("touched", &self.touched).finish()
    }
}
