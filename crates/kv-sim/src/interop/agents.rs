//! NIXL agents: notifications, which may be late, out of order, and lost with a process or a way; and data
//! operations, which copy bytes piece by piece, whatever has become of the sessions that wanted them.

use std::collections::VecDeque;

use bytes::Bytes;
use kv_core::machine::Input;
use kv_core::{Descriptor, Op, Origin, PeerId, Post, PostId, TransportError, WayEnd};
use kv_interop::message::{AgentRegion, Incoming};

use super::memory::Holder;
use super::world::{Event, Peer, World};
use super::{LegId, LifeId, hosts};
use crate::clock::{MS, SEC};
use crate::planted::Planted;

/// How soon something is tried again whose way is parted.
const AGAIN: u64 = 100 * MS;
/// How long a data operation goes on trying to reach the other side.
const UNREACHABLE: u64 = 15 * SEC;

/// A post that has not ended.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) life: LifeId,
    peer: PeerId,
    pub(super) target: LifeId,
    id: PostId,
    op: Op,
    pub(super) rest: VecDeque<Descriptor>,
    pub(super) regions: Vec<AgentRegion>,
    notify: Option<Bytes>,
    /// The leg for which the bytes move, and the leg on the other side.
    pub(super) legs: (LegId, Option<LegId>),
    /// How many more descriptors move before the post fails.
    fails_after: Option<usize>,
    /// The step before which the post is stuck, and for how long.
    stuck: Option<(usize, u64)>,
    /// True if hardware moves the bytes even while a process is stopped.
    hardware: bool,
    unreachable_since: Option<u64>,
    /// The machine was told the end.
    told: bool,
    pub(super) over: bool,
}

impl World {
    /// Sends a notification to an agent.
    pub(super) fn notify(&mut self, from: LifeId, peer: PeerId, to: LifeId, bytes: Bytes) {
        self.note_registered(from, &bytes);
        let (usual, most) = if self.healed { (MS, 2 * MS) } else { self.params.notify_delay };
        let delay = self.rng.tail(usual, most);
        self.enter(delay, Event::Notify { from, peer, to, bytes });
    }

    pub(super) fn notified(&mut self, from: LifeId, peer: PeerId, to: LifeId, bytes: Bytes) {
        let dies_with_sender = !self.lives[from].alive && self.rng.chance(self.params.notify_lost);
        if !self.lives[to].alive || dies_with_sender {
            self.counters.notifications_lost += 1;
            // A notification that fails is how NIXL notices the end of an agent.
            return self.agent_gone(from, peer);
        }
        if self.are_parted(from, to) {
            if !self.is_deaf(to) && self.rng.chance(self.params.notify_lost / 8) {
                self.counters.notifications_lost += 1;
                self.trace.note(self.now, || format!("a notification from life {from} to life {to} is lost"));
                return self.enter(SEC, Event::AgentGone { life: from, peer });
            }
            return self.enter(AGAIN, Event::Notify { from, peer, to, bytes });
        }
        self.counters.notifications += 1;
        self.note_told(from, to, &bytes);
        let agent = hosts::agent_name(from);
        self.trace.note(self.now, || format!("{agent} notifies life {to}: {}", bytes.escape_ascii()));
        let frame = Incoming::Notification { agent, bytes }.encode();
        self.tell(to, "notification", Input::Frame { from: Origin(from as u64), frame });
    }

    /// Notes that a sender tells a receiver of vLLM's push mode the end of its writes.
    fn note_told(&mut self, from: LifeId, to: LifeId, bytes: &[u8]) {
        let text = String::from_utf8_lossy(bytes);
        let id = text.rsplit_once(':').map_or("", |(id, _)| id).to_owned();
        if let Some(leg) = self.registered.get(&id).copied().filter(|leg| self.legs[*leg].life == to) {
            self.legs[leg].told_by.insert(from);
        }
    }

    /// Notes the id of a request under which a receiver of vLLM's push mode registers.
    fn note_registered(&mut self, from: LifeId, bytes: &[u8]) {
        let text = String::from_utf8_lossy(bytes);
        let id = text.split("cmpl-").nth(1).filter(|_| text.starts_with("PUSH_REG:"));
        let Some(id) = id.and_then(|rest| {
            rest.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '-').next()
        }) else {
            return;
        };
        let name = id.split('-').next().and_then(|name| name.parse().ok());
        let of_name = |leg: &LegId| {
            let record = &self.legs[*leg];
            record.life == from && record.receives && Some(self.requests[record.request].name) == name
        };
        if let Some(leg) =
            (0..self.legs.len()).rev().filter(|leg| self.legs[*leg].ended.is_none()).find(of_name)
        {
            self.registered.insert(format!("cmpl-{id}"), leg);
        }
    }

    /// The way to an agent is gone: its posts end, and then the machine is told.
    pub(super) fn agent_gone(&mut self, life: LifeId, peer: PeerId) {
        if !self.lives[life].alive || !self.lives[life].peers.contains_key(&peer) {
            return;
        }
        for flight in 0..self.flights.len() {
            let of_peer = self.flights[flight].life == life && self.flights[flight].peer == peer;
            if of_peer && !self.flights[flight].over {
                self.land(flight, Err(TransportError::PeerGone));
            }
        }
        self.gone(life, peer, WayEnd::Lost);
    }

    /// Starts a data operation.
    pub(super) fn post(&mut self, life: LifeId, peer: PeerId, post: Post) -> Result<(), TransportError> {
        let Some(Peer::Agent { life: target, regions, permitted }) =
            self.lives[life].peers.get(&peer).cloned()
        else {
            return Err(TransportError::PeerGone);
        };
        self.counters.posts += 1;
        let in_flight =
            self.flights.iter().filter(|flight| !flight.over && flight.life == life && flight.peer == peer);
        let in_flight = in_flight.count() + 1;
        if in_flight > self.params.max_inflight || post.descriptors.len() > self.params.max_sge {
            let wrong = format!(
                "life {life} posts {} descriptors, with {in_flight} posts in flight to the peer",
                post.descriptors.len()
            );
            self.violate("dialect_machines_are_bounded", wrong);
        }
        if post.op == Op::Write && !permitted {
            self.violate("dialect_machines_are_bounded", format!("life {life} writes without a permission"));
        }
        let target = match self.planted {
            Some(Planted::ReadsSuccessorsPages) => self.successor(target),
            _ => target,
        };
        let legs = self.legs_of(life, target, &post, &regions);
        let Some(legs) = legs else {
            return Err(TransportError::Unsupported("a descriptor outside of its region"));
        };
        let faulty = !self.healed;
        let count = post.descriptors.len();
        let fails = faulty && self.rng.chance(self.params.post_error);
        let slow = faulty && self.rng.chance(self.params.post_slow);
        let fails_after = fails.then(|| self.rng.index(count + 1));
        let stuck = slow.then(|| (self.rng.index(count + 1), self.rng.between(5 * SEC, 100 * SEC)));
        let hardware = self.rng.chance(500);
        self.flights.push(Flight {
            life,
            peer,
            target,
            id: post.id,
            op: post.op,
            rest: post.descriptors.into(),
            regions,
            notify: post.notify,
            legs,
            fails_after,
            stuck,
            hardware,
            unreachable_since: None,
            told: false,
            over: false,
        });
        let flight = self.flights.len() - 1;
        let gap = self.slice_gap();
        self.enter(gap, Event::Slice { flight });
        if self.planted == Some(Planted::EndedWhileItMoves) && self.rng.chance(200) {
            self.tell_end(flight, Err(TransportError::Cancelled));
        }
        Ok(())
    }

    fn slice_gap(&mut self) -> u64 {
        let (usual, most) = if self.healed { (MS, 2 * MS) } else { self.params.slice };
        self.rng.tail(usual, most)
    }

    /// The leg for which a post moves bytes, and the leg on the other side. `None` if a descriptor leaves its
    /// region.
    fn legs_of(
        &mut self,
        life: LifeId,
        target: LifeId,
        post: &Post,
        regions: &[AgentRegion],
    ) -> Option<(LegId, Option<LegId>)> {
        let first = post.descriptors.first()?;
        let (here, there) = (self.local(life, first)?, self.there(target, first, regions)?);
        let len = first.len as usize;
        let own = match self.lives[life].memory.holders(here.0, here.1, len).first() {
            Some(Holder::Lent(leg)) => *leg,
            other => {
                let wrong = format!("life {life} posts {} with its own page held by {other:?}", post.id.0);
                self.violate("dialect_pages_are_quiet", wrong);
                return None;
            }
        };
        let other = match self.lives[target].memory.holders(there.0, there.1, len).first() {
            Some(Holder::Lent(leg)) if self.name_of(*leg) == self.name_of(own) => Some(*leg),
            _ => self.partner(own, target),
        };
        Some((own, other))
    }

    /// The leg of the same request that a life has, or had last.
    fn partner(&self, leg: LegId, life: LifeId) -> Option<LegId> {
        let of_life =
            |other: &LegId| self.legs[*other].life == life && self.name_of(*other) == self.name_of(leg);
        (0..self.legs.len()).rev().find(of_life)
    }

    pub(super) fn name_of(&self, leg: LegId) -> u64 {
        self.requests[self.legs[leg].request].name
    }

    fn local(&self, life: LifeId, descriptor: &Descriptor) -> Option<(usize, usize)> {
        let (region, offset) = (descriptor.local_region as usize, descriptor.local_offset as usize);
        self.lives[life].memory.bytes(region, offset, descriptor.len as usize)?;
        Some((region, offset))
    }

    pub(super) fn there(
        &self,
        life: LifeId,
        descriptor: &Descriptor,
        regions: &[AgentRegion],
    ) -> Option<(usize, usize)> {
        let region = regions.get(descriptor.remote_region as usize)?;
        if descriptor.remote_offset.checked_add(descriptor.len)? > region.len {
            return None;
        }
        self.lives[life].memory.find(region.addr + descriptor.remote_offset, descriptor.len)
    }

    /// The process that has taken the place of a life.
    fn successor(&self, life: LifeId) -> LifeId {
        let place = self.lives[life].place;
        (life..self.lives.len()).rev().find(|later| self.lives[*later].place == place).unwrap_or(life)
    }

    /// One step of a post.
    pub(super) fn slice(&mut self, flight: usize) {
        let Flight { life, target, hardware, over, .. } = self.flights[flight];
        if over {
            return;
        }
        if !self.lives[life].alive {
            // What a dead process has posted ends with the process.
            self.flights[flight].over = true;
            return;
        }
        if !self.lives[target].alive {
            return self.land(flight, Err(TransportError::PeerGone));
        }
        let stopped = self.lives[life].stopped || self.lives[target].stopped;
        if stopped && !hardware {
            return self.enter(AGAIN, Event::Slice { flight });
        }
        if self.are_parted(life, target) {
            let since = *self.flights[flight].unreachable_since.get_or_insert(self.now);
            if self.now - since > UNREACHABLE {
                return self.land(flight, Err(TransportError::PeerGone));
            }
            return self.enter(AGAIN, Event::Slice { flight });
        }
        let record = &mut self.flights[flight];
        record.unreachable_since = None;
        if let Some((before, span)) = record.stuck
            && record.rest.len() <= before
        {
            record.stuck = None;
            return self.enter(span, Event::Slice { flight });
        }
        if record.fails_after == Some(0) {
            return self.land(flight, Err(TransportError::Foreign("the operation failed".to_owned())));
        }
        record.fails_after = record.fails_after.map(|left| left - 1);
        match record.rest.pop_front() {
            Some(descriptor) => {
                self.copy(flight, &descriptor);
                let gap = self.slice_gap();
                self.enter(gap, Event::Slice { flight });
            }
            None => {
                if let Some(bytes) = self.flights[flight].notify.take() {
                    let peer = self.flights[flight].peer;
                    self.notify(life, peer, target, bytes);
                }
                self.land(flight, Ok(()));
            }
        }
    }

    fn copy(&mut self, flight: usize, descriptor: &Descriptor) {
        let Flight { life, target, op, legs, .. } = self.flights[flight];
        let len = descriptor.len as usize;
        let here = self.local(life, descriptor);
        let there = self.there(target, descriptor, &self.flights[flight].regions);
        let (Some(here), Some(there)) = (here, there) else {
            let wrong = format!("life {life} posts outside of a region: {descriptor:?}");
            return self.violate("dialect_machines_are_bounded", wrong);
        };
        self.check_slice(flight, (here, there), len);
        if self.legs[legs.0].ended.is_some() {
            self.counters.after_end += 1;
        }
        let aux = self.lives[life].memory.is_aux(here.0);
        let skips = match self.planted {
            Some(Planted::DescriptorSkipped) => !aux && self.rng.chance(50),
            Some(Planted::AuxRowSkipped) => aux && self.rng.chance(200),
            _ => false,
        };
        if skips {
            return;
        }
        let ((from, from_at), (to, to_at)) = match op {
            Op::Read => ((target, there), (life, here)),
            Op::Write => ((life, here), (target, there)),
        };
        let Some(bytes) = self.lives[from].memory.bytes(from_at.0, from_at.1, len).map(<[u8]>::to_vec) else {
            return;
        };
        self.lives[to].memory.overwrite(to_at.0, to_at.1, &bytes);
        if self.lives[to].memory.is_aux(to_at.0) {
            (0..hosts::ROWS).for_each(|row| self.note_row(to, row));
        }
    }

    /// A post ends: none of its bytes move any more.
    fn land(&mut self, flight: usize, result: Result<(), TransportError>) {
        self.flights[flight].over = true;
        self.tell_end(flight, result);
    }

    fn tell_end(&mut self, flight: usize, result: Result<(), TransportError>) {
        let Flight { life, id, .. } = self.flights[flight];
        if !std::mem::replace(&mut self.flights[flight].told, true) {
            let input = Input::Posted { post: id, result };
            let delay = self.rng.below(MS);
            self.enter(delay, Event::Told { life, what: "posted", input });
        }
    }

    /// The machine asks for the early end of a post.
    pub(super) fn cancel(&mut self, life: LifeId, post: PostId) {
        let found = self.flights.iter().position(|flight| flight.life == life && flight.id == post);
        let Some(flight) = found.filter(|flight| !self.flights[*flight].over) else { return };
        if self.rng.chance(self.params.cancel) {
            self.land(flight, Err(TransportError::Cancelled));
        }
    }

    /// Some agents notice that a process is dead, after a while.
    pub(super) fn lose_agent(&mut self, dead: LifeId) {
        for life in 0..self.lives.len() {
            let of_dead = |peer: &Peer| matches!(peer, Peer::Agent { life, .. } if *life == dead);
            let peers = &self.lives[life].peers;
            let peers: Vec<PeerId> =
                peers.iter().filter(|(_, peer)| of_dead(peer)).map(|(id, _)| *id).collect();
            for peer in peers {
                if self.rng.chance(500) {
                    let after = self.rng.below(5 * SEC);
                    self.enter(after, Event::AgentGone { life, peer });
                }
            }
        }
    }
}
