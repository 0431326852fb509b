//! Faults that strike at a moment, the network's state, and the end of all faults.

use kv_core::proto::{Command, Input};

use crate::calendar::{Event, Report, Strike};
use crate::clock::{MS, SEC, US};
use crate::host::Engine;
use crate::ledger::{LifeId, Slot};
use crate::params::NetParams;
use crate::planted::Planted;
use crate::world::World;

/// The state of the network.
pub(crate) struct Net {
    params: NetParams,
    /// Until when nothing passes from one slot to another, in global time.
    blocked: Vec<Vec<u64>>,
    /// Until when no connection is opened from one slot to another, likewise.
    refused: Vec<Vec<u64>>,
}

impl Net {
    pub(crate) fn new(hosts: usize, params: &NetParams) -> Net {
        Net {
            params: params.clone(),
            blocked: vec![vec![0; hosts]; hosts],
            refused: vec![vec![0; hosts]; hosts],
        }
    }

    /// Its rates now: those of the seed until the world is healed.
    pub(crate) fn params(&self) -> &NetParams {
        &self.params
    }

    /// The end of the partition on this way, if there is one now.
    pub(crate) fn blocked_until(&self, from: Slot, to: Slot, now: u64) -> Option<u64> {
        Some(self.blocked[from][to]).filter(|&until| until > now)
    }

    /// True if no connection is opened from one slot to another.
    pub(crate) fn refused(&self, from: Slot, to: Slot, now: u64) -> bool {
        self.refused[from][to] > now
    }

    fn block(&mut self, from: Slot, to: Slot, until: u64) {
        let known = &mut self.blocked[from][to];
        *known = until.max(*known);
    }

    fn heal(&mut self) {
        let NetParams { delay, .. } = self.params;
        self.params = NetParams { delay, delay_max: delay, ..NetParams::default() };
        self.blocked.iter_mut().chain(&mut self.refused).for_each(|row| row.fill(0));
    }
}

impl World {
    /// Draws when which fault strikes.
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
            self.strike_at(span, Strike::Partition { from, to, both_ways, span: lasts });
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
            let at = self.rng.below(span);
            for (from, to) in ways.into_iter().take(if both { 2 } else { 1 }) {
                self.calendar.enter(at, Event::Strike(Strike::Break { from, to, refused }));
            }
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
                    self.boot(slot);
                }
            }
            Strike::Publish { .. } => {}
            Strike::Pause { slot, span } => {
                if let Some(life) = self.slots[slot] {
                    self.counters.pauses += 1;
                    let known = &mut self.ledger.lives[life];
                    known.paused_until = known.paused_until.max(self.now + span);
                    let until = known.paused_until;
                    if let Engine::Rig(_) = self.hosts[life].engine {
                        self.hosts[life].stopped.get_or_insert(self.now);
                        let late = self.rng.below(MS / 5);
                        self.calendar.enter(until + late, Event::Turn { life });
                    }
                    if self.may_jump(slot) && self.rng.chance(300) {
                        let ahead = self.rng.tail(MS, SEC);
                        self.calendar.enter(until, Event::Strike(Strike::Jump { life, ahead }));
                    }
                    if self.planted == Some(Planted::PermissionExcused) {
                        self.excuse(life, span);
                    }
                }
            }
            Strike::Jump { life, ahead } => self.jump(life, ahead),
            Strike::Partition { from, to, both_ways, span } => {
                self.counters.partitions += 1;
                self.net.block(from, to, self.now + span);
                if both_ways {
                    self.net.block(to, from, self.now + span);
                }
            }
            Strike::Break { from, to, refused } => self.break_connection(from, to, refused),
            Strike::Shutdown { slot } => self.shut_down(slot),
        }
    }

    /// Whoever may do something until a moment may have a clock that is ahead; whoever waits for that
    /// moment to pass may not.
    fn may_jump(&self, slot: Slot) -> bool {
        let prefill = slot < self.params.prefills;
        self.params.sched.pull == if prefill { 0 } else { 1000 }
    }

    /// A clock that goes on ahead of what it showed.
    fn jump(&mut self, life: LifeId, ahead: u64) {
        self.counters.jumps += 1;
        let clock = &mut self.ledger.lives[life].clock;
        *clock = clock.jump(self.now, ahead);
        let host = &mut self.hosts[life];
        let (generation, timer) = (host.timer_generation, host.timer);
        if let Some(due) = timer {
            let at = self.ledger.lives[life].clock.global(due).max(self.now);
            self.calendar.enter(at, Event::Timer { life, generation });
        }
    }

    pub(crate) fn crash(&mut self, slot: Slot) {
        let Some(life) = self.slots[slot].take() else { return };
        self.counters.crashes += 1;
        self.hosts[life].engine = Engine::Dead;
        let lease = self.rng.below(self.params.lookup.lease + 1);
        self.servers.expire(life, self.now + lease);
        self.die(life);
    }

    /// What becomes of everything that has to do with a life when it ends.
    pub(crate) fn die(&mut self, life: LifeId) {
        let record = &mut self.ledger.lives[life];
        record.alive = false;
        self.counters.died += record.open_sessions as u64;
        record.open_sessions = 0;
        record.tokens_out = 0;
        self.ledger.last_change = self.now;
        for flight in 0..self.flights.len() {
            let known = &mut self.flights[flight];
            if known.over {
                continue;
            }
            if known.life == life {
                self.counters.crash_in_flight += 1;
            } else if known.target == life {
                self.counters.crash_target += 1;
            }
        }
        for other in 0..self.hosts.len() {
            let conns: Vec<_> = self.hosts[other]
                .conns
                .iter()
                .filter(|(_, conn)| conn.target == life)
                .map(|(&peer, _)| peer)
                .collect();
            for peer in conns {
                let detected = self.now + self.rng.tail(MS, self.params.chaos.detect_max);
                self.lose(other, peer, detected);
            }
        }
        // Posts of connections that were forgotten end, too.
        for flight in 0..self.flights.len() {
            let known = &self.flights[flight];
            if !known.over && known.target == life && known.outcome.is_none() {
                let detected = self.now + self.rng.tail(MS, self.params.chaos.detect_max);
                self.doom(flight, detected);
            }
        }
        self.tell_revoked();
    }

    /// The plane of a life will notice at `detected` that a connection is dead.
    pub(crate) fn lose(&mut self, life: LifeId, peer: kv_core::PeerId, detected: u64) {
        let Some(conn) = self.hosts[life].conns.get_mut(&peer) else { return };
        if conn.gone_at.is_some() || conn.dead {
            return;
        }
        conn.gone_at = Some(detected);
        let way = conn.way;
        self.calendar.enter(detected, Event::Report { life, report: Report::PeerGone { peer, way } });
        for flight in 0..self.flights.len() {
            let known = &self.flights[flight];
            if !known.over && known.way == way {
                self.doom(flight, detected);
            }
        }
    }

    /// Both live on, but the connection of one to the other will never carry a byte again; that of the
    /// other is as it was.
    fn break_connection(&mut self, from: Slot, to: Slot, refused: u64) {
        self.net.refused[from][to] = self.net.refused[from][to].max(self.now + refused);
        let (Some(from), Some(to)) = (self.slots[from], self.slots[to]) else { return };
        self.counters.breaks += 1;
        let conns = self.hosts[from].conns.iter();
        let lost: Vec<_> = conns.filter(|(_, conn)| conn.target == to).map(|(&peer, _)| peer).collect();
        for peer in lost {
            let detected = self.now + self.rng.tail(MS, self.params.chaos.detect_max);
            self.lose(from, peer, detected);
        }
    }

    fn shut_down(&mut self, slot: Slot) {
        let Some(life) = self.slots[slot] else { return };
        self.counters.shutdowns += 1;
        self.ledger.lives[life].shut_down = true;
        self.feed(life, "shutdown", Input::Command(Command::Shutdown));
        let dies = self.now + self.rng.tail(5 * MS, 100 * MS);
        let down_for = self.rng.tail(5 * MS, 100 * MS);
        self.calendar.enter(dies, Event::Strike(Strike::Crash { slot, down_for }));
    }

    /// Faults stop for good, and everybody lives.
    pub(crate) fn heal(&mut self) {
        self.trace.note(self.now, || "heal".to_owned());
        self.healed = Some(self.now);
        if self.planted != Some(Planted::HealedInName) {
            self.net.heal();
        }
        self.end_liars();
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
                if self.ledger.lives[life].shut_down {
                    self.crash(slot);
                }
            }
            if self.slots[slot].is_none() {
                self.counters.restarts += 1;
                self.boot(slot);
            }
        }
        if self.params.heal_eager {
            for serve in 0..self.to_serve as u64 {
                let at = self.now + self.grace() + 10 * MS * serve;
                self.calendar.enter(at, Event::Serve);
            }
        }
    }

    /// How long after the last fault everybody knows who lives and who is dead.
    pub(crate) fn grace(&self) -> u64 {
        let (net, timing) = (&self.params.net, &self.params.timing);
        let once = self.params.chaos.detect_max + net.delay_max + 2 * timing.peer_timeout.as_nanos() as u64;
        SEC + 2 * once
    }

    pub(crate) fn publish_later(&mut self, life: LifeId) {
        let delay = if life < self.slots.len() { 0 } else { self.rng.below(20 * MS) };
        self.calendar.enter(self.now + delay, Event::Strike(Strike::Publish { life }));
    }

    fn publish(&mut self, life: LifeId) {
        let host = &self.hosts[life];
        if host.slot < self.params.prefills && self.ledger.lives[life].alive {
            let addr = self.params.addr(host.slot);
            self.servers.publish(&addr, life, host.record.clone());
        }
    }

    pub(crate) fn lookup(
        &mut self,
        life: LifeId,
        lookup: kv_core::LookupId,
        addr: &str,
        query: &kv_core::RankQuery,
    ) {
        self.counters.lookups += 1;
        let params = self.params.lookup.clone();
        let healthy = self.healed.is_some();
        let delay = if healthy { params.delay } else { self.rng.tail(params.delay, params.delay_max) };
        let mut delay = delay + US;
        if !healthy && self.rng.chance(params.fail) {
            self.counters.lookup_failures += 1;
            let error = kv_core::BootstrapError::TimedOut;
            return self.report_later(delay, life, Report::LookupFailed { lookup, error });
        }
        let answer = self.servers.lookup(self.now, addr, query);
        if !healthy && self.rng.chance(params.stale) {
            // The answer is of now, but takes so long that it may be of a former life.
            delay += self.rng.tail(20 * MS, 300 * MS);
        }
        let report = match answer {
            Ok(ranks) => {
                let dead = |rank: &kv_core::RankRecord| {
                    let life = rank.transports.first().and_then(|way| crate::host::life_of(&way.metadata));
                    life.is_some_and(|life| !self.ledger.lives[life].alive)
                };
                self.counters.lookup_stale += u64::from(ranks.iter().any(dead));
                Report::Found { lookup, ranks }
            }
            Err(error) => {
                self.counters.lookup_failures += 1;
                Report::LookupFailed { lookup, error }
            }
        };
        self.report_later(delay, life, report);
    }
}
