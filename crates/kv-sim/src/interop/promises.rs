//! The promises, as checks of every step.

use kv_core::layout::RegionRole;

use super::memory::Holder;
use super::requests::{Leg, Request};
use super::world::{Event, World};
use super::{Dialect, LegId};
use crate::clock::{MS, SEC};

/// How long a holder waits for vLLM's readers after the end of a session, in the machines of these worlds.
const READ_BOUND: u64 = 30 * SEC;

impl World {
    /// Success means that every page at the receiver holds what the sender's page held when it was given.
    pub(super) fn check_bytes(&mut self, leg: LegId) {
        let Leg { life, request, receives, row, .. } = self.legs[leg];
        if !receives {
            return;
        }
        if self.is_among_strangers(leg) {
            return;
        }
        let Request { key, name, prefix, .. } = self.requests[request];
        let (pages, memory) = (&self.legs[leg].pages, &self.lives[life].memory);
        let wrong = pages.iter().enumerate().find_map(|(position, page)| {
            let region = memory.wrong_page(*page, key, prefix + position)?;
            Some(format!("page {page} of leg {leg} of life {life} has other bytes in region {region}"))
        });
        let wrong = wrong.or_else(|| {
            let buffer = memory.wrong_row(row?, key, name)?;
            Some(format!("the aux row of leg {leg} of life {life} has other bytes in buffer {buffer}"))
        });
        let expected = self.requests[request].pages.len() - prefix;
        let wrong = wrong.or_else(|| {
            (pages.len() != expected)
                .then(|| format!("leg {leg} succeeds with {} pages of {expected}", pages.len()))
        });
        let Some(wrong) = wrong else { return };
        // If the sender's process has ended, somebody else's words or bytes were taken for its own.
        let restarted = self.requests[request].sources.iter().any(|source| !self.lives[*source].alive);
        let invariant = if restarted { "dialect_lives_are_apart" } else { "dialect_bytes_are_right" };
        self.violate(invariant, wrong);
    }

    /// A slice moves bytes: all of its pages are lent to the legs for which the post was made.
    pub(super) fn check_slice(
        &mut self,
        flight: usize,
        (here, there): ((usize, usize), (usize, usize)),
        len: usize,
    ) {
        let (life, target) = self.ends_of(flight);
        let (own, other) = self.flights[flight].legs;
        let reads = self.legs[own].receives;
        let held = self.lives[life].memory.holders(here.0, here.1, len);
        if held.iter().any(|holder| *holder != Holder::Lent(own)) {
            let wrong = format!("a post of leg {own} of life {life} touches its pages, which are {held:?}");
            return self.violate("dialect_pages_are_quiet", wrong);
        }
        let theirs = self.lives[target].memory.holders(there.0, there.1, len);
        if other.is_some() && theirs.iter().all(|holder| Some(*holder) == other.map(Holder::Lent)) {
            return;
        }
        let pages = self.lives[target].memory.pages_at(there.0, there.1, len);
        if !pages.is_empty() && pages.clone().all(|page| self.is_kept(target, own, page)) {
            return;
        }
        if reads && other.is_some_and(|other| self.is_excused(other)) {
            self.counters.late_reads += 1;
            return;
        }
        if reads && self.is_among_strangers(own) {
            self.counters.strange_reads += 1;
            return;
        }
        let verb = if reads { "reads" } else { "writes" };
        let wrong = format!(
            "a post of leg {own} of life {life} {verb} pages of life {target} that are {theirs:?}, not of {other:?}"
        );
        let invariant = if other.is_some() { "dialect_pages_are_quiet" } else { "dialect_lives_are_apart" };
        self.violate(invariant, wrong);
    }

    /// Pages or a row come back: nothing moves there any more.
    pub(super) fn check_quiet(&mut self, leg: LegId, role: RegionRole, item: u32) {
        let touched = self.flights.iter().position(|flight| {
            let concerned = flight.legs.0 == leg || flight.legs.1 == Some(leg);
            let moves = !flight.over && self.lives[flight.life].alive;
            moves && concerned && self.touches(flight, leg, (role, item))
        });
        let Some(flight) = touched else { return };
        let life = self.flights[flight].life;
        if role == RegionRole::Kv && self.is_kept(self.legs[leg].life, leg, item) {
            return;
        }
        let reader = self.flights[flight].legs.0;
        if self.legs[reader].receives && (self.is_excused_now(leg) || self.is_among_strangers(reader)) {
            return;
        }
        let wrong =
            format!("{role:?} {item} of leg {leg} comes back while a post of life {life} moves its bytes");
        self.violate("dialect_pages_are_quiet", wrong);
    }

    /// True if the session of a leg has failed, and its machine has handed the pages back only after the time in
    /// which a vLLM reader may still read.
    fn is_excused(&self, leg: LegId) -> bool {
        let leg = &self.legs[leg];
        let waited = leg
            .back
            .zip(leg.ended.as_ref())
            .is_some_and(|(back, ended)| back - ended.at >= READ_BOUND - drift(ended.at, back));
        self.params.dialect == Dialect::VllmPull && leg.has_failed() && waited
    }

    fn is_excused_now(&self, leg: LegId) -> bool {
        let leg = &self.legs[leg];
        let waited = leg
            .ended
            .as_ref()
            .is_some_and(|ended| self.now - ended.at >= READ_BOUND - drift(ended.at, self.now));
        self.params.dialect == Dialect::VllmPull && leg.has_failed() && waited
    }

    /// True if a sender's process has ended whose agent the receiver has not met since the session was opened, so
    /// that the process that has taken its place cannot be told from it.
    fn is_among_strangers(&self, leg: LegId) -> bool {
        let Leg { request, receives, .. } = self.legs[leg];
        let met = |source: &super::LifeId| match self.lives[*source].died_at {
            None => true,
            Some(_) => self.legs[leg].met.contains(source),
        };
        let pulls = receives && self.params.dialect == Dialect::VllmPull;
        pulls && !self.requests[request].sources.iter().all(met)
    }

    /// True if another rank of the engine of `life` holds a page for the request of a leg: an engine's page is free
    /// once all ranks have handed the page back, and a rank that has died hands nothing back.
    fn is_kept(&self, life: super::LifeId, leg: LegId, page: u32) -> bool {
        let ranks = &self.engines[self.lives[life].place.engine].lives;
        ranks.iter().filter(|rank| **rank != life).any(|rank| {
            let holder = self.lives[*rank].memory.pages[page as usize];
            matches!(holder, Holder::Lent(other) if self.name_of(other) == self.name_of(leg))
        })
    }

    /// A session must have ended, unless its host is stopped.
    pub(super) fn check_overdue(&mut self, leg: LegId) {
        let Leg { life, session, .. } = self.legs[leg];
        if self.legs[leg].ended.is_some() || !self.lives[life].alive {
            return;
        }
        if self.lives[life].stopped {
            return self.enter(100 * MS, Event::Overdue { leg });
        }
        let wrong = format!("session {session:?} (leg {leg}) of life {life} has not ended by its deadline");
        self.violate("dialect_sessions_end_once", wrong);
    }

    /// The world rests. With `all`, every prefill engine was restarted, and nothing may be held any more.
    pub(super) fn check_rest(&mut self, all: bool) {
        if self.violation.is_some() {
            return;
        }
        for leg in 0..self.legs.len() {
            let record = &self.legs[leg];
            let life = record.life;
            if record.back.is_some() || !self.lives[life].alive {
                continue;
            }
            if !all && self.is_unpromised(leg) {
                self.counters.unpromised += 1;
                continue;
            }
            let Leg { request, receives, ref ended, .. } = self.legs[leg];
            let wrong = format!(
                "leg {leg} (request {request}, receives: {receives}) of life {life}, which ended as {ended:?}, holds pages; quarantine: {:?}",
                self.lives[life].machine.quarantine()
            );
            return self.violate("dialect_pages_come_back", wrong);
        }
        for life in 0..self.lives.len() {
            let record = &self.lives[life];
            let shown: usize = record.machine.quarantine().iter().map(|entry| entry.pages).sum();
            let held: usize = self
                .legs
                .iter()
                .filter(|leg| leg.life == life && leg.back.is_none())
                .map(|leg| leg.pages.len())
                .sum();
            let leased = record.machine.leased();
            if record.alive && (shown != held || leased > 0) {
                let wrong = format!(
                    "life {life} shows {shown} pages in quarantine of {held}, and {leased} under a lease"
                );
                return self.violate("dialect_pages_come_back", wrong);
            }
            let ranks = (self.params.prefills as u32 * self.params.prefill_tp)
                .max(self.params.decodes as u32 * self.params.decode_tp);
            let most = 3 * ranks as usize + 4;
            if all && record.alive && record.peers.len() > 2 * most {
                let wrong = format!("life {life} at rest has {} peers", record.peers.len());
                return self.violate("dialect_machines_are_bounded", wrong);
            }
        }
        let served = |request: &Request| {
            request.receivers.iter().all(|leg| self.legs[*leg].has_succeeded())
                && !request.receivers.is_empty()
        };
        let unserved = self.requests.iter().position(|request| request.must && !served(request));
        if let Some(request) = unserved.filter(|_| self.violation.is_none()) {
            self.violate(
                "dialect_requests_are_served",
                format!("request {request} has not succeeded after healing"),
            );
        }
    }

    /// True if no message of the protocol could have freed the pages of a leg: a sender has not written them, or not
    /// told so.
    fn is_unpromised(&self, leg: LegId) -> bool {
        let Leg { request, receives, .. } = self.legs[leg];
        let told = |source: &super::LifeId| self.legs[leg].told_by.contains(source);
        let all = self.requests[request].sources.iter().all(told);
        receives && self.legs[leg].has_failed() && !all && self.params.dialect == Dialect::VllmPush
    }

    fn ends_of(&self, flight: usize) -> (super::LifeId, super::LifeId) {
        (self.flights[flight].life, self.flights[flight].target)
    }

    /// True if the places of a post that have not moved yet are in this page or row of a leg.
    fn touches(&self, flight: &super::agents::Flight, leg: LegId, (role, item): (RegionRole, u32)) -> bool {
        let own = flight.legs.0 == leg;
        let memory = &self.lives[if own { flight.life } else { flight.target }].memory;
        flight.rest.iter().any(|descriptor| {
            let place = if own {
                Some((descriptor.local_region as usize, descriptor.local_offset as usize))
            } else {
                self.there(flight.target, descriptor, &flight.regions)
            };
            place.is_some_and(|(region, offset)| {
                memory.touches((region, offset), descriptor.len as usize, (role, item))
            })
        })
    }
}

/// By how much two clocks may differ over a span, with room for late timers.
fn drift(from: u64, to: u64) -> u64 {
    (to - from) / 1000 + 10 * MS
}
