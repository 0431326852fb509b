//! Which requests get pages next: retracted requests first, then new ones. Nothing overtakes the first in
//! line. Only new requests that other ranks have admitted already go before retracted ones.

use kv_core::{KvManager, RequestCacheGroups};

use super::DecodeQueues;
use super::cache::Place;
use super::entry::{Entry, Retracted, Stage};
use super::types::{Blocked, Origin, Ready, Shortage};
use crate::allocator::PageAllocator;
use crate::consensus::{RankConsensus, RequestKey};
use crate::queue::admission::Load;
use crate::queue::desk::{InLine, Turn};
use crate::queue::gate::AuxMemory;

impl<R, M: KvManager, C: RankConsensus, A: PageAllocator> DecodeQueues<R, M, C, A> {
    /// Gives pages to the requests in line, retracted ones first, until the first in line does not fit.
    pub(super) fn admit(&mut self, aux: &mut impl AuxMemory<R>) {
        self.blocked = loop {
            let step = match self.retracted.len() {
                0 => self.admit_first(aux),
                _ => match self.admit_next(None, aux) {
                    // Pages are what a retracted request needs, and it may give back what the other one lacks.
                    None
                    | Some(Admission::Blocked(Blocked {
                        shortage: Shortage::AuxRow | Shortage::RequestCacheGroups,
                        ..
                    })) => self.resume_first(),
                    Some(step) => step,
                },
            };
            match step {
                Admission::Admitted => {}
                Admission::Blocked(blocked) => break Some(blocked),
                Admission::Nobody => break None,
            }
        };
    }

    fn load(&self) -> Load {
        Load {
            available: self.cache.available(),
            active: self.transfers + self.waiting.len() + self.running.len(),
            running_pages: self.cache.at(Place::Server),
        }
    }

    fn resume_first(&mut self) -> Admission {
        let Some((key, retracted)) = self.retracted.front() else { return Admission::Nobody };
        let missing = self.rule.missing_to_resume(retracted.pages, &self.load());
        if missing > 0 {
            return blocked(key, Shortage::Pages(missing));
        }
        let Some(pages) = self.cache.allocate(retracted.pages, Place::Held) else {
            return blocked(key, Shortage::Pages(1));
        };
        if let Some((key, Retracted { request, priority, .. })) = self.retracted.pop() {
            let (groups, skipped, origin) = (RequestCacheGroups::none(), Vec::new(), Origin::Retracted);
            self.arrive(priority, Ready { key, request, pages, groups, skipped, origin });
        }
        Admission::Admitted
    }

    fn admit_first(&mut self, aux: &mut impl AuxMemory<R>) -> Admission {
        let first = self.ready.front().map(|(first, ())| first);
        first.and_then(|first| self.admit_next(Some(first), aux)).unwrap_or(Admission::Nobody)
    }

    /// Admits the request whose turn it is; `None` if it is nobody's turn. `first` is the first in line; `None` to admit
    /// only what another rank has passed.
    fn admit_next(&mut self, first: Option<RequestKey>, aux: &mut impl AuxMemory<R>) -> Option<Admission> {
        if self.desk.stopped.is_some() {
            return None;
        }
        let entries = &self.entries;
        let is_in_line = |key| entries.get(&key).map_or(InLine::Never, Entry::is_in_line);
        match self.desk.turn(first, is_in_line) {
            Turn::Of(key) => Some(self.give_pages(key, aux)),
            Turn::Awaited => Some(Admission::Nobody),
            Turn::Nobodys => None,
        }
    }

    fn give_pages(&mut self, key: RequestKey, aux: &mut impl AuxMemory<R>) -> Admission {
        let load = self.load();
        let Some(entry) = self.entries.get_mut(&key) else { return Admission::Nobody };
        let missing = self.rule.missing(&entry.demand, &load);
        if missing > 0 {
            return blocked(key, Shortage::Pages(missing));
        }
        let row = match self.aux_rows.capacity() {
            0 => None,
            _ => match self.aux_rows.take() {
                Some(row) => Some(row),
                None => return blocked(key, Shortage::AuxRow),
            },
        };
        let Some(pages) = self.cache.allocate(entry.demand.pages, Place::Held) else {
            self.free_row(row);
            return blocked(key, Shortage::Pages(1));
        };
        let given = pages.len();
        let Some(groups) = aux.take_groups(&mut entry.request) else {
            self.cache.give_back(pages, given, Place::Held);
            self.free_row(row);
            return blocked(key, Shortage::RequestCacheGroups);
        };
        if let Some(row) = row {
            aux.clear(row);
        }
        self.ready.remove(key);
        self.desk.took_turn();
        self.transfers += 1;
        let groups = Some(groups).filter(|groups| !groups.is_empty());
        entry.stage = Stage::Transfer { pages: given, row, init: Some(pages), groups, passed: false };
        match entry.flush() {
            Some(given) => self.cache.shift(given, Place::Held, Place::Transfer),
            None => self.desk.enqueue(key),
        }
        Admission::Admitted
    }
}

/// What happened to the first request in line.
enum Admission {
    Admitted,
    Blocked(Blocked),
    /// No request is in line, or admission is stopped.
    Nobody,
}

fn blocked(key: RequestKey, shortage: Shortage) -> Admission {
    Admission::Blocked(Blocked { key, shortage })
}
