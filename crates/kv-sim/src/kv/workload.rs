//! The requests of a world, and how their two halves differ.

use std::time::Duration;

use kv_core::{Lease, Room, TransferMode};

use crate::clock::{MS, SEC};
use crate::kv::act::{Act, KvAct};
use crate::kv::fact::Check;
use crate::kv::ledger::{Leg, Side};
use crate::kv::params::{Faults, Topology};
use crate::kv::request::{Plan, Request};
use crate::kv::service::KvWorld;
use crate::net::calendar::Event;
use crate::net::lives::Slot;

impl KvWorld {
    /// Draws the requests of the fault phase.
    pub(crate) fn plan_requests(&mut self) {
        for _ in 0..self.service.params.requests {
            let start = self.rng.below(self.service.params.physics.fault_span * 3 / 4);
            let sched = self.service.params.sched.clone();
            let request = self.draw_request();
            if self.rng.chance(sched.twins) {
                self.draw_twin(request, start);
            }
            if self.rng.chance(sched.one_sided) {
                self.service.requests[request].one_sided =
                    Some(if self.rng.chance(500) { Side::Sender } else { Side::Receiver });
                self.service.counters.one_sided += 1;
            }
            if self.rng.chance(sched.disagree) {
                self.service.requests[request].disagree = true;
                self.service.counters.disagreeing += 1;
            }
            self.service.requests[request].retry = self.rng.chance(sched.retry);
            self.service.requests[request].must_succeed = self.service.params.faults == Faults::Losses;
            self.open_request(request, start, true);
        }
    }

    /// Sends the healed world its next request.
    pub(crate) fn serve_one(&mut self) {
        if self.service.to_serve == 0 {
            return;
        }
        // A host that was paused goes on with what it knew before.
        let known = self.lives.iter().map(|life| life.paused_until).filter(|&until| until > 0).max();
        if let Some(until) = known.map(|until| until + self.grace()).filter(|&until| until > self.now) {
            return self.calendar.enter(until, Event::Act(KvAct::Serve));
        }
        if let Some(until) = self.wait_for_drains() {
            return self.calendar.enter(until, Event::Act(KvAct::Serve));
        }
        // One at a time: two that wait for each other's pages are no fault of the protocol.
        if self.service.ledger.legs.iter().any(|leg| leg.must_succeed && !leg.poll.is_terminal()) {
            let again = self.rng.between(5 * MS, 20 * MS);
            return self.calendar.enter(self.now + again, Event::Act(KvAct::Serve));
        }
        // A peer that begins anew is not welcomed while a post of before is under way, and a post may be slow. One that
        // takes longer than any may is no excuse.
        let slowest = self.params.fault_span + self.params.dma.time_max + self.grace();
        let is_under_way = self.flights.iter().any(|flight| !flight.over && self.lives[flight.life].alive);
        if self.now < slowest && is_under_way {
            return self.calendar.enter(self.now + 20 * MS, Event::Act(KvAct::Serve));
        }
        self.service.to_serve -= 1;
        for _ in 0..8 {
            let request = self.draw_request();
            let drawn = &self.service.requests[request];
            let mut hosts =
                drawn.groups.iter().flat_map(|(senders, receivers)| receivers.iter().chain(senders));
            let misfit = hosts.any(|&slot| self.service.params.misfit == Some(slot));
            drop(hosts);
            if misfit {
                continue;
            }
            self.service.requests[request].must_succeed = true;
            let most = self.service.params.limits.max_peers;
            self.service.requests[request]
                .groups
                .iter_mut()
                .for_each(|(_, receivers)| receivers.truncate(most));
            self.open_request(request, self.now, false);
            return;
        }
    }

    /// Draws which hosts exchange the pages of a request.
    fn draw_groups(&mut self) -> Vec<(Vec<Slot>, Vec<Slot>)> {
        let (prefills, decodes) = (self.params.prefills, self.params.decodes);
        let two = self.service.params.sched.two_receivers;
        match self.service.params.topology {
            Topology::TensorParallel => vec![(vec![0], vec![2]), (vec![1], vec![3])],
            Topology::Unequal => vec![((0..prefills).collect(), (prefills..prefills + decodes).collect())],
            Topology::Plain | Topology::DataParallel => {
                let first = prefills + self.rng.index(decodes);
                let mut receivers = vec![first];
                if decodes > 1 && self.rng.chance(two) {
                    receivers.push(prefills + (first - prefills + 1) % decodes);
                    self.service.counters.two_receivers += 1;
                }
                vec![(vec![self.rng.index(prefills)], receivers)]
            }
        }
    }

    fn draw_request(&mut self) -> usize {
        let params = &self.service.params;
        let room = |(slot, pages): (usize, &u32)| *pages as usize * params.page_size(slot);
        let smallest = params.num_pages.iter().enumerate().map(room).min().unwrap_or(1);
        let groups = self.draw_groups();
        let number = self.service.requests.len() as u64 * 64 + self.rng.below(32) * 2;
        // In a data-parallel engine the number leads to the replica.
        let number = number
            + if self.service.params.topology == Topology::DataParallel { groups[0].0[0] as u64 } else { 0 };
        let by_id = self.rng.chance(self.service.params.sched.request_ids);
        let tokens = match self.rng.below(10) {
            0 => 0,
            1 if self.service.params.faults != Faults::Losses => smallest,
            _ => 1 + self.rng.index(smallest.min(10)),
        };
        let wants_aux = self.service.params.aux_rows > 0 && self.rng.chance(700);
        let stateful = self.service.params.state_items > 0;
        let slots = if stateful { self.rng.index(3) } else { 0 };
        let (drafts, window) = if stateful { self.draw_drafts() } else { (0, 0) };
        let pulls = self.rng.chance(self.service.params.sched.pull);
        let accepts = match (self.rng.chance(self.service.params.sched.auto), pulls) {
            (true, _) => TransferMode::Auto,
            (false, true) => TransferMode::Pull,
            (false, false) => TransferMode::Push,
        };
        self.service.counters.requests += 1;
        let key = self.rng.bits();
        self.service.counters.pulled += u64::from(pulls);
        self.service.requests.push(Request {
            number,
            family: self.service.requests.len(),
            by_id,
            suffix: self.rng.bits() as u32,
            groups,
            tokens,
            key,
            wants_aux,
            slots,
            drafts,
            window,
            one_sided: None,
            disagree: false,
            retry: false,
            must_succeed: false,
            pulls,
            accepts,
        });
        self.service.requests.len() - 1
    }

    /// Draws a twin: another request between the same hosts, whose id differs only in its suffix.
    fn draw_twin(&mut self, request: usize, start: u64) {
        self.service.counters.twins += 1;
        let twin = self.draw_request();
        let Request { number, groups, tokens, .. } = self.service.requests[request].clone();
        let same = self.rng.chance(700);
        let other = &mut self.service.requests[twin];
        other.tokens = if same { tokens } else { other.tokens };
        (other.number, other.groups) = (number, groups);
        for request in [request, twin] {
            self.service.requests[request].by_id = true;
        }
        let start = start + self.pause();
        self.open_request(twin, start, true);
    }

    /// Opens all halves of a request from `start` on, in any order.
    fn open_request(&mut self, request: usize, start: u64, abortable: bool) {
        let drawn = self.service.requests[request].clone();
        let base = format!("cmpl-{:x}-0", drawn.number);
        let exact = self.rng.chance(200) || !self.service.params.suffixed;
        // Ranks of one engine share its suffix.
        let suffixes =
            if exact { [drawn.suffix; 2] } else { [self.rng.bits() as u32, self.rng.bits() as u32] };
        for group in &drawn.groups {
            let (senders, receivers) = group;
            let sides = senders.iter().map(|&slot| (Side::Sender, slot));
            for (side, slot) in sides.chain(receivers.iter().map(|&slot| (Side::Receiver, slot))) {
                if drawn.one_sided.is_some_and(|only| only != side) {
                    continue;
                }
                let room = if drawn.by_id {
                    let own = suffixes[usize::from(side == Side::Receiver)];
                    Room::request(&format!("{base}-{own:08x}")).unwrap_or(Room::Number(drawn.number))
                } else {
                    Room::Number(drawn.number)
                };
                let leg = self.new_leg(request, &drawn, (side, slot), group, room);
                let mut pause = self.pause();
                let (limits, count) = (&self.service.params.limits, receivers.len());
                let fits = count <= limits.max_registrations
                    && count * (drawn.tokens + drawn.slots + drawn.drafts) <= limits.max_waiting_runs;
                if drawn.must_succeed && side == Side::Receiver && !self.service.params.heal_eager && !fits {
                    // Where registrations are few, the sender comes first.
                    pause += 20 * MS;
                }
                self.calendar.enter(start + pause, Event::Act(KvAct::Do { leg, act: Act::Open }));
                let sched = self.service.params.sched.clone();
                if abortable && self.rng.chance(sched.abort) {
                    let at = start + pause + self.rng.tail(5 * MS, 500 * MS);
                    self.calendar.enter(at, Event::Act(KvAct::Do { leg, act: Act::Abort }));
                }
                if abortable && self.rng.chance(sched.misuse) {
                    self.service.ledger.legs[leg].misused = true;
                    let at = start + pause + self.pause();
                    self.calendar.enter(at, Event::Act(KvAct::Do { leg, act: Act::Misuse }));
                }
                if drawn.must_succeed {
                    let at = self.now.max(start) + self.service.params.serving_time();
                    self.calendar.enter(at, Event::Act(KvAct::Check(Check::Served { leg })));
                }
            }
        }
    }

    fn new_leg(
        &mut self,
        request: usize,
        drawn: &Request,
        (side, slot): (Side, Slot),
        (senders, receivers): &(Vec<Slot>, Vec<Slot>),
        room: Room,
    ) -> usize {
        let servers = match side {
            Side::Sender => vec![slot],
            Side::Receiver => self.service.params.servers(senders, slot),
        };
        let serves = |receiver: &&Slot| self.service.params.servers(senders, **receiver).contains(&slot);
        let receivers = match side {
            Side::Sender => receivers.iter().filter(serves).count() as u32,
            Side::Receiver => receivers.len() as u32,
        };
        let server = servers.first().copied().unwrap_or(0);
        let mut num_pages = self.service.params.pages_of(slot, drawn.tokens);
        let mut prefix = 0;
        let mut wants_aux = drawn.wants_aux;
        let unequal = self.service.params.unequal.is_some();
        if unequal && side == Side::Receiver && self.rng.chance(300) {
            // The first pages are in its prefix cache; maybe all of them.
            prefix = self.rng.index(num_pages + 1);
            num_pages -= prefix;
        }
        let miscounted = self.miscount(drawn, (side, slot), &mut num_pages);
        if drawn.disagree && side == Side::Receiver {
            (num_pages, wants_aux) = self.disagree(num_pages, wants_aux);
        }
        if drawn.pulls && !unequal && side == Side::Receiver && self.rng.chance(300) {
            // The first pages are in its prefix cache; maybe all of them.
            num_pages = self.rng.index(num_pages + 1);
            wants_aux &= self.rng.chance(500);
        }
        num_pages = num_pages.min(self.service.params.num_pages[slot] as usize);
        let state = self.draw_state(request, side, slot);
        let leg = self.service.ledger.legs.len();
        let plan = self.draw_plan(drawn, num_pages, server);
        self.service.plans.push(plan);
        self.service.ledger.legs.push(Leg {
            family: drawn.family,
            servers,
            num_pages,
            wants_aux,
            pulls: drawn.pulls,
            receivers,
            key: if unequal { drawn.key } else { self.rng.bits() },
            must_succeed: drawn.must_succeed,
            miscounted,
            prefix,
            state,
            ..Leg::unopened(request, (side, slot), room)
        });
        leg
    }

    /// Draws what a receiver wants that disagrees with its sender.
    fn disagree(&mut self, num_pages: usize, wants_aux: bool) -> (usize, bool) {
        if self.service.params.aux_rows > 0 && self.rng.chance(300) {
            (num_pages, !wants_aux)
        } else if self.service.params.unequal.is_some() {
            // Whether other page counts disagree depends on the sizes of pages.
            (num_pages, wants_aux)
        } else if num_pages > 1 && self.rng.chance(500) {
            (num_pages - 1, wants_aux)
        } else {
            (num_pages + 1, wants_aux)
        }
    }

    /// Draws what the scheduler of one half does with `num_pages` pages.
    fn draw_plan(&mut self, drawn: &Request, num_pages: usize, server: Slot) -> Plan {
        let chunks = self.cut(num_pages);
        let sched = self.service.params.sched.clone();
        let own_deadline = Duration::from_nanos(self.rng.between(10 * MS, SEC));
        let own_deadline = self.rng.chance(sched.own_deadline).then_some(own_deadline);
        let deadline = if drawn.must_succeed { Some(Duration::from_secs(60)) } else { own_deadline };
        let named = drawn.by_id || self.rng.chance(300);
        let replica =
            (self.service.params.topology == Topology::DataParallel && named).then_some(server as u32);
        let early_init = self.rng.chance(sched.early_init);
        let lease = match (drawn.must_succeed, self.rng.below(8)) {
            // Long enough for whatever may happen to it.
            (true, _) => Some(Lease::Renewable(Duration::from_secs(60))),
            (false, 0) => Some(Lease::Fixed(Duration::from_nanos(self.rng.between(MS, SEC)))),
            _ => None,
        };
        let (learns, given, computing) =
            (self.service.params.unequal.is_some() && self.rng.chance(300), 0, Vec::new());
        Plan { chunks, deadline, replica, early_init, lease, learns, given, computing }
    }

    /// Where engines differ: gives one of several senders a page less than the others have, or one more.
    fn miscount(&mut self, drawn: &Request, (side, slot): (Side, Slot), num_pages: &mut usize) -> bool {
        let Some(pair) = &self.service.params.unequal else { return false };
        if !drawn.disagree || side == Side::Receiver || !self.rng.chance(200) {
            return false;
        }
        // A receiver that pulls takes one page too many for one that it has, unless another of its
        // sources has fewer.
        let another = pair.sibling(self.service.params.rank(slot).1).0 > 0;
        let room = *num_pages < self.service.params.num_pages[slot] as usize;
        let exact = *num_pages;
        if another && room && self.rng.chance(500) {
            *num_pages += 1;
        } else {
            *num_pages = num_pages.saturating_sub(1);
        }
        self.service.counters.miscounted += u64::from(*num_pages != exact);
        *num_pages != exact
    }

    /// Cuts pages into chunks; a request without pages has one empty chunk.
    fn cut(&mut self, num_pages: usize) -> Vec<usize> {
        let mut chunks = Vec::new();
        let mut left = num_pages;
        let most = 1 + self.rng.index(4);
        while left > 0 {
            let chunk = if chunks.len() + 1 >= most { left } else { 1 + self.rng.index(left) };
            chunks.push(chunk);
            left -= chunk;
            if left > 0 && self.rng.chance(50) {
                chunks.push(0);
            }
        }
        if chunks.is_empty() {
            chunks.push(0);
        }
        chunks.reverse();
        chunks
    }

    pub(crate) fn pause(&mut self) -> u64 {
        let sched = &self.service.params.sched;
        let (pause, most) =
            if self.healed.is_some() { (sched.pause, sched.pause) } else { (sched.pause, sched.pause_max) };
        self.rng.tail(pause, most)
    }

    /// Tries a failed request again: with the same number or base id, and with new halves for both sides, or
    /// only for the side that failed.
    pub(crate) fn retry(&mut self, request: usize, side: Side) {
        if !std::mem::take(&mut self.service.requests[request].retry) || self.healed.is_some() {
            return;
        }
        self.service.counters.retries += 1;
        let one_sided = self.rng.chance(400).then_some(side);
        let again =
            Request { retry: false, one_sided, disagree: false, ..self.service.requests[request].clone() };
        self.service.requests.push(again);
        let start = self.now + self.pause();
        self.open_request(self.service.requests.len() - 1, start, self.service.params.sched.abort > 100);
    }
}
