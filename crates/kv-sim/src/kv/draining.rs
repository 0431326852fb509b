//! How schedulers drain their hosts, and what they do with requests that come to a host that drains.

use bytes::Bytes;
use kv_core::KvPoll;
use kv_core::proto::{Command, Input};
use kv_core::wire::{Body, Frame};

use crate::clock::{MS, SEC};
use crate::kv::act::KvAct;
use crate::kv::fact::{Check, Fact, KvFact};
use crate::kv::ledger::{Leg, LegId, Side};
use crate::kv::params::{Faults, Topology};
use crate::kv::service::{Kv, KvWorld};
use crate::net::lives::{LifeId, is_drained};
use crate::planted::Planted;

impl KvWorld {
    /// Tells a machine to drain, and plans the checks of what must follow.
    pub(crate) fn begin_drain(&mut self, life: LifeId) {
        let open: Vec<LegId> = self.open_at(life).collect();
        match self.planted {
            Some(Planted::DrainUnheard) => {}
            Some(Planted::DrainAborts) => {
                for &leg in &open {
                    let session = self.service.ledger.legs[leg].session;
                    self.feed(life, "abort", Input::Command(Command::Abort { session }));
                }
            }
            _ => drop(self.feed(life, "drain", Input::Command(Command::Drain))),
        }
        if !self.service.params.spares_hosts() {
            return;
        }
        let deadlines = open.iter().map(|&leg| self.service.ledger.legs[leg].deadline);
        let due = deadlines.map(|deadline| self.lives[life].clock.global(deadline)).max().unwrap_or(self.now);
        self.enter(due.max(self.now) + self.quieting_time(), KvAct::Check(Check::Drained { life }));
        for leg in 0..self.service.ledger.legs.len() {
            self.watch_refused(leg);
        }
    }

    /// The sessions of a life that have not ended.
    fn open_at(&self, life: LifeId) -> impl Iterator<Item = LegId> + '_ {
        let legs = self.service.ledger.legs.iter().enumerate();
        legs.filter(move |(_, leg)| leg.life == Some(life) && leg.is_open()).map(|(id, _)| id)
    }

    /// How long the pages of a session may be kept beyond its deadline, where no host fails: until readers
    /// have lost their leases, writers their permission, and posts have ended.
    fn quieting_time(&self) -> u64 {
        let physics = &self.service.params.physics;
        let (timing, dma) = (&physics.timing, &physics.dma);
        let told = timing.write_permission + timing.peer_timeout * 2;
        let longest_lease = 60 * SEC;
        2 * dma.time_max + told.as_nanos() as u64 + longest_lease + self.service.params.serving_time()
    }

    /// True if a scheduler does not open a half of a request, because its host drains, or has drained and is
    /// stopped. The other half is not expected to be served.
    pub(crate) fn refuses_to_open(&mut self, leg: LegId) -> bool {
        let (slot, request) = (self.service.ledger.legs[leg].slot, self.service.ledger.legs[leg].request);
        if !is_drained(&self.lives, slot) {
            return false;
        }
        self.service.counters.turned_away += 1;
        let halves = self.service.ledger.legs.iter_mut().filter(|half| half.request == request);
        halves.for_each(|half| half.must_succeed = false);
        // The machine is asked nonetheless now and then, as by a scheduler that was not told yet.
        self.slots[slot].is_none() || !self.rng.chance(200)
    }

    /// In a world without loss: a receiver that has registered at a host that drains, in whose room no sender
    /// is open there, must soon be refused.
    pub(crate) fn watch_refused(&mut self, leg: LegId) {
        let known = &self.service.ledger.legs[leg];
        let waits = known.side == Side::Receiver && known.is_open() && known.poll == KvPoll::Transferring;
        if self.service.params.faults != Faults::None || self.healed.is_some() || !waits {
            return;
        }
        let legs = &self.service.ledger.legs;
        let in_vain = |&slot: &usize| {
            let drains = self.slots[slot].is_some_and(|life| self.lives[life].draining.is_some());
            let opened = |half: &Leg| {
                half.side == Side::Sender && half.slot == slot && half.is_of(known) && half.life.is_some()
            };
            drains && !legs.iter().any(opened)
        };
        if known.servers.iter().any(in_vain) {
            self.service.counters.refused_by_drains += 1;
            let at = self.now + self.service.params.telling_time();
            self.enter(at, KvAct::Check(Check::Refused { leg }));
        }
    }

    /// Tells the invariants that a host registers, or asks for a lease, at a host that drains.
    pub(crate) fn tell_registered(&mut self, from: LifeId, to: LifeId, bytes: &Bytes) {
        const REGISTER: u8 = 4;
        if self.service.params.physics.chaos.drains == 0 || bytes.get(2) != Some(&REGISTER) {
            return;
        }
        let Ok(Frame { conversation, body: Body::Register(register) }) = Frame::decode(bytes) else { return };
        let (Kv { attempts, ledger, .. }, now) = (&mut self.service, self.now);
        // Also before the drain: what is said then may be repeated later, when there is a second half in the
        // room, which knows that the host has left, and does not go there.
        let leg = attempts.note(ledger, now, (from, conversation, register.attempt), &register.room);
        let Some(leg) = leg.filter(|_| self.lives[to].draining.is_some()) else { return };
        let known_at = self.knows_since(from, to);
        self.tell(&Fact::Own(KvFact::Registers { leg, at: to, known_at }));
    }

    /// Since when a host knows that another takes no new requests and is not named any more: the other has
    /// refused it, and no answer that names the other is under way to it. `None` if it may not know.
    fn knows_since(&self, host: LifeId, other: LifeId) -> Option<u64> {
        let params = &self.service.params;
        let one_rank = matches!(params.topology, Topology::Plain | Topology::DataParallel);
        if !one_rank || params.physics.driven || params.physics.chaos.shutdowns > 0 {
            return None;
        }
        let key = (host, other);
        if self.answers.get(&key).is_some_and(|under_way| *under_way > 0) {
            return None;
        }
        let named = self.named.get(&key).copied().unwrap_or_default();
        let refused = *self.service.refused.get(&key)?;
        Some(self.lives[other].withdrawn?.max(refused).max(named))
    }

    /// Notes that a receiver was refused because a host takes no new requests.
    pub(crate) fn note_refused(&mut self, leg: LegId) {
        let known = &self.service.ledger.legs[leg];
        let server = known.servers.first().and_then(|&slot| self.slots[slot]);
        let (Some(host), Some(server)) = (known.life, server) else { return };
        if self.lives[server].draining.is_some_and(|since| since < self.now) {
            self.service.refused.entry((host, server)).or_insert(self.now);
        }
    }

    /// Until when the healed world gets no request, because a host drains, or was replaced a moment ago.
    pub(crate) fn wait_for_drains(&self) -> Option<u64> {
        if self.is_any_draining() {
            return Some(self.now + 20 * MS);
        }
        self.replaced.map(|at| at + self.grace()).filter(|&until| until > self.now)
    }
}
