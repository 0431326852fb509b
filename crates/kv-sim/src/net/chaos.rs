//! Faults that strike at one moment, and the end of all faults.

use crate::clock::{MS, SEC};
use crate::net::calendar::{Event, Strike};
use crate::net::host::Engine;
use crate::net::lives::{LifeId, ROADS, Road, Slot};
use crate::net::service::Service;
use crate::net::world::World;
use crate::planted::Planted;

impl<S: Service> World<S> {
    /// Draws which faults strike, and when.
    pub(crate) fn plan_chaos(&mut self) {
        let (chaos, span, hosts) = (self.params.chaos.clone(), self.params.fault_span, self.params.hosts());
        for _ in 0..chaos.crashes {
            let down_for = self.rng.tail(5 * MS, 400 * MS);
            let slot = self.rng.index(hosts);
            self.strike_at(span, Strike::Crash { slot, down_for });
        }
        for _ in 0..chaos.pauses {
            let (slot, pause) = (self.rng.index(hosts), self.rng.tail(20 * MS, 1000 * MS));
            self.strike_at(span, Strike::Pause { slot, span: pause });
        }
        for _ in 0..chaos.stops {
            let slot = self.rng.index(hosts);
            let pause = self.rng.between(chaos.stop_max / 2, chaos.stop_max);
            self.strike_at(span, Strike::Pause { slot, span: pause });
        }
        for _ in 0..chaos.partitions {
            let (from, to) = (self.rng.index(hosts), self.rng.index(hosts));
            let (both_ways, lasts) = (self.rng.chance(500), self.rng.tail(20 * MS, 1000 * MS));
            let road = self.draw_road();
            self.strike_at(span, Strike::Partition { from, to, road, both_ways, span: lasts });
        }
        for _ in 0..chaos.breaks {
            let (prefills, decodes) = (self.params.prefills, self.params.decodes);
            let (one, other) = (self.rng.index(prefills), prefills + self.rng.index(decodes));
            // One of the two loses its connection, or both do.
            let ways = if self.rng.chance(500) {
                [(one, other), (other, one)]
            } else {
                [(other, one), (one, other)]
            };
            let (both, refused) = (self.rng.chance(300), self.rng.below(self.params.ways.refused_max + 1));
            let (at, road) = (self.rng.below(span), self.draw_road());
            for (from, to) in ways.into_iter().take(if both { 2 } else { 1 }) {
                self.calendar.enter(at, Event::Strike(Strike::Break { from, to, road, refused }));
            }
        }
        for _ in 0..chaos.drains {
            let slot = self.rng.index(hosts);
            self.strike_at(span, Strike::Drain { slot });
        }
        for _ in 0..chaos.shutdowns {
            let slot = self.rng.index(hosts);
            self.strike_at(span, Strike::Shutdown { slot });
        }
    }

    fn strike_at(&mut self, span: u64, strike: Strike) {
        let at = self.rng.below(span);
        self.calendar.enter(at, Event::Strike(strike));
    }

    pub(crate) fn strike(&mut self, strike: Strike) {
        if let Strike::Publish { life } = strike {
            return self.publish(life);
        }
        if let Strike::Replace { life } = strike {
            return self.replace(life);
        }
        if self.healed.is_some() {
            return;
        }
        self.trace.note(self.now, || format!("strike    {strike:?}"));
        match strike {
            Strike::Crash { slot, down_for } => {
                self.crash(slot);
                self.calendar.enter(self.now + down_for, Event::Strike(Strike::Boot { slot }));
            }
            Strike::Boot { slot } => {
                if self.slots[slot].is_none() {
                    self.counters.restarts += 1;
                    S::boot(self, slot);
                }
            }
            Strike::Publish { .. } | Strike::Replace { .. } => {}
            Strike::Pause { slot, span } => {
                if let Some(life) = self.slots[slot] {
                    self.counters.pauses += 1;
                    let known = &mut self.lives[life];
                    known.paused_until = known.paused_until.max(self.now + span);
                    let until = known.paused_until;
                    if let Engine::Rig(_) = self.hosts[life].engine {
                        self.hosts[life].stopped.get_or_insert(self.now);
                        let late = self.rng.below(MS / 5);
                        self.calendar.enter(until + late, Event::Turn { life });
                    }
                    if S::may_jump(self, slot) && self.rng.chance(300) {
                        let ahead = self.rng.tail(MS, SEC);
                        self.calendar.enter(until, Event::Strike(Strike::Jump { life, ahead }));
                    }
                    if self.planted == Some(Planted::PermissionExcused) {
                        self.excuse(life, span);
                    }
                }
            }
            Strike::Jump { life, ahead } => self.jump(life, ahead),
            Strike::Partition { from, to, road, both_ways, span } => {
                self.counters.partitions += 1;
                self.net.block(road, (from, to), self.now + span);
                if both_ways {
                    self.net.block(road, (to, from), self.now + span);
                }
            }
            Strike::Break { from, to, road, refused } => self.break_connection((from, to), road, refused),
            Strike::Shutdown { slot } => self.shut_down(slot),
            Strike::Drain { slot } => self.drain(slot),
        }
    }

    /// Sets the clock of a host forward, as the clock of a host that has slept is.
    fn jump(&mut self, life: LifeId, ahead: u64) {
        self.counters.jumps += 1;
        let clock = &mut self.lives[life].clock;
        *clock = clock.jump(self.now, ahead);
        let host = &mut self.hosts[life];
        let (generation, timer) = (host.timer_generation, host.timer);
        if let Some(due) = timer {
            let at = self.lives[life].clock.global(due).max(self.now);
            self.calendar.enter(at, Event::Timer { life, generation });
        }
    }

    /// Which of the transports a fault strikes: the other goes on.
    fn draw_road(&mut self) -> Road {
        if self.params.ways.several { self.rng.index(ROADS.len()) } else { 0 }
    }

    /// Breaks the connection of one living host to another over one transport, for good. A connection over
    /// the other transport stays as it was.
    fn break_connection(&mut self, (from, to): (Slot, Slot), road: Road, refused: u64) {
        let until = &mut self.net.refused[road][from][to];
        *until = (*until).max(self.now + refused);
        let (Some(from), Some(to)) = (self.slots[from], self.slots[to]) else { return };
        self.counters.breaks += 1;
        let conns = self.hosts[from].conns.iter();
        let lost: Vec<_> =
            conns.filter(|(_, conn)| (conn.target, conn.road) == (to, road)).map(|(&peer, _)| peer).collect();
        for peer in lost {
            let detected = self.now + self.rng.tail(MS, self.params.chaos.detect_max);
            self.lose(from, peer, detected);
        }
    }

    fn shut_down(&mut self, slot: Slot) {
        let Some(life) = self.slots[slot] else { return };
        self.counters.shutdowns += 1;
        self.lives[life].shut_down = true;
        S::shut_down(self, life);
        let dies = self.now + self.rng.tail(5 * MS, 100 * MS);
        let down_for = self.rng.tail(5 * MS, 100 * MS);
        self.calendar.enter(dies, Event::Strike(Strike::Crash { slot, down_for }));
    }

    /// Ends all faults for good, and starts every host that is down.
    pub(crate) fn heal(&mut self) {
        self.trace.note(self.now, || "heal".to_owned());
        self.healed = Some(self.now);
        if self.planted != Some(Planted::HealedInName) {
            self.net.heal();
        }
        S::heal(self);
        for flight in 0..self.flights.len() {
            if std::mem::take(&mut self.flights[flight].stuck) {
                let (soon, ending) = (self.rng.below(MS), self.flights[flight].outcome.is_some());
                let event = if ending { Event::Land { flight } } else { Event::Begin { flight } };
                self.calendar.enter(self.now + soon, event);
            }
        }
        for slot in 0..self.slots.len() {
            if let Some(life) = self.slots[slot] {
                // Who is paused continues when its time has come: soon.
                // Where hosts do not fail, a host that drains is replaced once it is empty.
                let drains = self.lives[life].draining.is_some() && !S::spares_hosts(self);
                if self.lives[life].shut_down || drains {
                    self.crash(slot);
                }
            }
            if self.slots[slot].is_none() {
                self.counters.restarts += 1;
                S::boot(self, slot);
            }
        }
        S::healed(self);
    }

    /// How long after the last fault every host must know which hosts live and which are dead, in
    /// nanoseconds.
    pub(crate) fn grace(&self) -> u64 {
        let (net, timing) = (&self.params.net, &self.params.timing);
        let once = self.params.chaos.detect_max + net.delay_max + 2 * timing.peer_timeout.as_nanos() as u64;
        SEC + 2 * once
    }
}
