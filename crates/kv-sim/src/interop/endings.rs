//! What schedulers see of their sessions: states, ends, and what comes back.

use kv_core::layout::RegionRole;
use kv_core::proto::Resource;
use kv_core::{KvPoll, SessionId, TransferError};

use super::memory::Holder;
use super::requests::{Ended, Leg, Request};
use super::scheduler::Act;
use super::world::{Event, World};
use super::{LegId, LifeId};
use crate::clock::SEC;
use crate::kv::stats::cause_name;
use crate::planted::Planted;

impl World {
    /// A session tells its state.
    pub(super) fn status(
        &mut self,
        life: LifeId,
        session: SessionId,
        poll: KvPoll,
        failure: Option<&TransferError>,
    ) {
        let Some(leg) = self.lives[life].sessions.get(&session).copied() else {
            let wrong =
                format!("life {life} tells the state of session {session:?}, which is none of its own");
            return self.violate("dialect_sessions_end_once", wrong);
        };
        if self.planted == Some(Planted::EndsUntold) && poll.is_terminal() && self.rng.chance(100) {
            return;
        }
        if let Some(ended) = &self.legs[leg].ended {
            let wrong = format!("leg {leg} of life {life} tells {poll} after {}", ended.poll);
            return self.violate("dialect_sessions_end_once", wrong);
        }
        if !poll.is_terminal() {
            return;
        }
        if let Some(failure) = failure {
            self.counters.failures.count(cause_name(&failure.cause));
        }
        if (poll == KvPoll::Failed) != failure.is_some() {
            let wrong = format!("leg {leg} ends as {poll} with the failure {failure:?}");
            return self.violate("dialect_sessions_end_once", wrong);
        }
        self.legs[leg].ended = Some(Ended { at: self.now, poll });
        if poll == KvPoll::Success {
            self.counters.succeeded += 1;
            self.counters.received += u64::from(self.legs[leg].receives);
            self.check_bytes(leg);
        } else {
            self.counters.failed += 1;
        }
        if self.planted == Some(Planted::PagesBackAtTheEnd) {
            self.take_back(leg);
        } else if self.legs[leg].lent == 0 {
            self.settle(leg);
        }
        self.follow(leg, poll);
    }

    /// What schedulers do about the end of a session.
    fn follow(&mut self, leg: LegId, poll: KvPoll) {
        let Leg { request, receives, .. } = self.legs[leg];
        let Request { must, .. } = self.requests[request];
        if poll == KvPoll::Success {
            if must && receives {
                self.counters.served += 1;
            }
            return;
        }
        if must && receives {
            self.violate(
                "dialect_requests_are_served",
                format!("leg {leg} of request {request} fails after healing"),
            );
        }
        let siblings =
            if receives { &self.requests[request].receivers } else { &self.requests[request].senders };
        for sibling in siblings.clone() {
            if self.legs[sibling].ended.is_none() && self.rng.chance(700) {
                let after = self.rng.below(SEC);
                self.enter(after, Event::Act(Act::Abort { leg: sibling }));
            }
        }
        let again = receives && !self.healed && self.retries < self.params.requests;
        if again && self.rng.chance(self.params.retry) {
            self.counters.retries += 1;
            self.retries += 1;
            let after = self.rng.tail(SEC, 30 * SEC);
            self.enter(after, Event::Act(Act::Begin { again: Some(request), must: false }));
        }
    }

    /// A session hands something back.
    pub(super) fn released(&mut self, life: LifeId, session: SessionId, resource: Resource) {
        let Some(leg) = self.lives[life].sessions.get(&session).copied() else {
            let wrong = format!("life {life} hands back what session {session:?} was never lent");
            return self.violate("dialect_pages_come_back", wrong);
        };
        if self.planted == Some(Planted::PagesKept) && self.rng.chance(100) {
            return;
        }
        let ended_before = self.legs[leg].ended.is_some() || self.planted == Some(Planted::EndsUntold);
        if !ended_before {
            let wrong = format!("leg {leg} of life {life} hands pages back before its end");
            return self.violate("dialect_sessions_end_once", wrong);
        }
        let Resource::Pages(pages) = resource else { return };
        let list: Vec<u32> = pages.list().iter().collect();
        if let Err(error) = self.lives[life].pool.release(pages) {
            return self.violate("dialect_pages_come_back", format!("leg {leg} of life {life}: {error}"));
        }
        let Some(left) = self.legs[leg].lent.checked_sub(1) else {
            return self
                .violate("dialect_pages_come_back", format!("leg {leg} of life {life} hands back twice"));
        };
        self.legs[leg].lent = left;
        self.free_list(leg, &list);
        if left == 0 {
            self.settle(leg);
        }
    }

    /// With a planted bug: pages are taken to be back when the session ends.
    fn take_back(&mut self, leg: LegId) {
        let pages = self.legs[leg].pages.clone();
        self.free_list(leg, &pages);
        self.settle(leg);
    }

    /// Pages are the scheduler's again, which uses them for something else at once.
    fn free_list(&mut self, leg: LegId, pages: &[u32]) {
        let life = self.legs[leg].life;
        for page in pages {
            self.check_quiet(leg, RegionRole::Kv, *page);
            let memory = &mut self.lives[life].memory;
            if memory.pages[*page as usize] == Holder::Lent(leg) {
                memory.pages[*page as usize] = Holder::Free;
                memory.poison(RegionRole::Kv, *page as usize);
            }
        }
    }

    /// Everything that a session was lent has come back.
    fn settle(&mut self, leg: LegId) {
        let Leg { life, row, .. } = self.legs[leg];
        if self.legs[leg].back.replace(self.now).is_some() {
            return;
        }
        let at = self.legs[leg].ended.as_ref().map_or(self.now, |ended| ended.at);
        self.counters.quarantined += u64::from(self.now > at);
        for page in 0..self.params.pages {
            let memory = &mut self.lives[life].memory;
            if memory.pages[page as usize] == Holder::Scheduler(leg) {
                memory.pages[page as usize] = Holder::Free;
            }
        }
        if let Some(row) = row {
            self.check_quiet(leg, RegionRole::Aux, row);
            let memory = &mut self.lives[life].memory;
            memory.rows[row as usize] = Holder::Free;
            memory.poison(RegionRole::Aux, row as usize);
            self.note_row(life, row);
        }
    }

    /// With a process die its sessions, and what they were lent is nobody's.
    pub(super) fn scheduler_dies(&mut self, life: LifeId) {
        for leg in &mut self.legs {
            if leg.life == life && leg.back.is_none() {
                leg.back = Some(self.now);
            }
        }
    }
}
