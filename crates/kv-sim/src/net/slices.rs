//! Writes move in slices. Each slice begins only under a permission, by the writer's own clock.

use kv_core::TransportError;

use crate::clock::MS;
use crate::net::calendar::Event;
use crate::net::service::Service;
use crate::net::world::World;
use crate::planted::Planted;

impl<S: Service> World<S> {
    pub(crate) fn begin_later(&mut self, flight: usize) {
        let pause = self.rng.below(self.flights[flight].pause + 1);
        self.calendar.enter(self.now + pause, Event::Begin { flight });
    }

    /// The writer's transport reads its clock, and begins the next slice if a permission allows it.
    pub(crate) fn begin_slice(&mut self, flight: usize) {
        let known = &self.flights[flight];
        let way = &self.ways[known.way];
        if known.over || known.slice.is_some() || known.stuck || !self.lives[known.life].alive {
            return;
        }
        let Some(&upto) = known.cuts.last() else { return };
        if way.revoked {
            self.counters.refused_slices += 1;
            self.flights[flight].outcome.get_or_insert(Err(TransportError::Revoked));
            return self.land(flight);
        }
        let ends = (self.hosts[known.life].slot, self.hosts[known.target].slot);
        if let Some(until) = self.net.blocked_until(way.road, ends, self.now) {
            let late = self.rng.below(MS);
            return self.calendar.enter(until + late, Event::Begin { flight });
        }
        let looked = std::mem::take(&mut self.flights[flight].looked);
        let way = &self.ways[self.flights[flight].way];
        let checks = self.planted != Some(Planted::PermissionUnchecked) && !looked;
        if checks && !way.is_open(&self.lives, self.now) {
            self.counters.unpermitted += 1;
            let known = &mut self.flights[flight];
            known.waits = true;
            if known.cancelled {
                // Nothing of it is under way, and nothing may ever be.
                known.outcome.get_or_insert(Err(TransportError::Cancelled));
                self.land(flight);
            }
            return;
        }
        let mut len = self.slice_len(flight);
        let known = &self.flights[flight];
        let way = &self.ways[known.way];
        if checks && way.copies() {
            // As much is copied as fits into the permission, if nobody stops the copier.
            let now = self.lives[known.life].clock.local(self.now);
            let left = way.permit.map_or(0, |until| until.since(now).as_nanos() as u64);
            len = len.min(left / 2);
        }
        let known = &mut self.flights[flight];
        known.cuts.pop();
        known.slice = Some(upto);
        self.calendar.enter(self.now + len, Event::End { flight });
    }

    /// Stops the writer before it has begun a slice; with the planted bug, between the check of the
    /// permission and the begin of the slice.
    pub(crate) fn stop_before_slice(&mut self, flight: usize) {
        if self.planted == Some(Planted::StoppedAfterTheLook) {
            let known = &self.flights[flight];
            let open = self.ways[known.way].is_open(&self.lives, self.now);
            self.flights[flight].looked |= open && !known.cuts.is_empty();
        }
    }

    /// Draws how long a slice takes if its writer is not stopped, in nanoseconds.
    fn slice_len(&mut self, flight: usize) -> u64 {
        let ways = &self.params.ways;
        let copies = self.ways[self.flights[flight].way].copies();
        let most = if copies { ways.slice_max } else { ways.bound };
        let (long, short) = (ways.long, self.flights[flight].pause.min(most));
        let healed = self.healed.is_some();
        match (!healed && self.rng.chance(long), self.rng.chance(200)) {
            // Hardware may need all the time that it was promised to need at most.
            (true, true) => most,
            (true, false) => self.rng.below(most + 1),
            (false, _) => self.rng.below(short + 1),
        }
    }

    /// The slice that is under way has arrived.
    pub(crate) fn end_slice(&mut self, flight: usize) {
        let known = &self.flights[flight];
        let way = &self.ways[known.way];
        let Some(upto) = known.slice else { return };
        let (life, alive) = (known.life, self.lives[known.life].alive);
        if !alive && way.copies() {
            self.flights[flight].slice = None;
            return;
        }
        let clock = &self.lives[life].clock;
        let late = way.permit.is_some_and(|until| clock.local(self.now) > until);
        self.counters.late_slices += u64::from(late);
        self.move_upto(flight, upto);
        if self.is_over() {
            return;
        }
        let known = &mut self.flights[flight];
        known.slice = None;
        if !self.revoking.is_empty() {
            self.tell_revoked();
        }
        let known = &self.flights[flight];
        let failed = known.fails_after.is_some_and(|limit| known.moved >= limit);
        if known.outcome.is_some() || failed || known.cuts.is_empty() {
            self.land(flight);
        } else {
            self.begin_later(flight);
        }
    }
}
