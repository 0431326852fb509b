//! Counters of interesting situations, which show that a campaign has met them.

use kv_core::wire::{Body, Frame, Progress};
use kv_core::{Attempt, Lease, Room};

use crate::kv::fact::{Fact, KvFact};
use crate::kv::ledger::{Ledger, Leg, LegId, Side};
use crate::kv::service::KvWorld;
use crate::net::lives::{LifeId, Slot};

impl KvWorld {
    pub(crate) fn cover_frame(&mut self, from: LifeId, at: LifeId, bytes: &[u8]) {
        const ABORT: u8 = 9;
        const PROGRESS: u8 = 7;
        const RELEASE: u8 = 18;
        match bytes.get(2) {
            Some(4 | 7 | 9 | 18) => {}
            _ => return,
        }
        let Ok(frame) = Frame::decode(bytes) else { return };
        let seen = &mut self.service.seen.0;
        match frame.body {
            Body::Register(register) => {
                let after = seen.contains(&(from, at, ABORT, register.attempt.0, 0));
                self.service.counters.register_after_abort += u64::from(after);
            }
            Body::Abort(abort) => {
                seen.insert((from, at, ABORT, abort.attempt.0, 0));
            }
            // A notice is of one part; answers to questions may be, and count as well.
            Body::Progress(Progress { attempt: Attempt(attempt), done, .. }) => {
                let &[(part, 1)] = &done[..] else { return };
                let later = (from, at, PROGRESS, attempt, part.saturating_add(1))
                    ..=(from, at, PROGRESS, attempt, u32::MAX);
                self.service.counters.done_reordered += u64::from(seen.range(later).next().is_some());
                let again = !seen.insert((from, at, PROGRESS, attempt, part));
                self.service.counters.done_twice += u64::from(again);
                self.service.counters.done_late += u64::from(seen.contains(&(at, from, RELEASE, attempt, 0)));
            }
            Body::Release(release) if !release.answer => {
                seen.extend(release.attempts.first().map(|&(attempt, _)| (from, at, RELEASE, attempt, 0)));
            }
            _ => {}
        }
    }

    /// A lease names pages to a reader.
    pub(crate) fn tell_granted(&mut self, life: LifeId, bytes: &[u8]) {
        const GRANTED: u8 = 15;
        if bytes.get(2) == Some(&GRANTED)
            && let Ok(Frame { body: Body::Granted(granted), .. }) = Frame::decode(bytes)
            && let Some(&leg) = self.service.stock[life].sessions.get(&granted.lease_id)
        {
            self.tell(&Fact::Own(KvFact::Granted { leg }));
        }
    }

    /// Counts a heartbeat that renews leases of a host's sessions.
    pub(crate) fn cover_lease(&mut self, at: LifeId, bytes: &[u8]) {
        const HEARTBEAT: u8 = 16;
        let extends = |frame: Frame| matches!(frame.body, Body::Heartbeat(asks) if !asks.leases.is_empty());
        if bytes.get(2) != Some(&HEARTBEAT) || !Frame::decode(bytes).is_ok_and(extends) {
            return;
        }
        let now = self.lives[at].clock.local(self.now);
        let Ledger { legs, leased, .. } = &mut self.service.ledger;
        for leg in leased {
            let leg = &mut legs[*leg];
            if leg.life != Some(at) {
                continue;
            }
            let Some(extension) = leg.lease.and_then(Lease::extension) else { continue };
            leg.leased_until = leg.leased_until.map(|until| until.max(now + extension));
        }
    }

    /// Notes that all pages of a sender are complete, so that readers may be granted them.
    pub(crate) fn cover_complete(&mut self, leg: LegId) {
        let known = &mut self.service.ledger.legs[leg];
        if let (Some(life), Some(lease)) = (known.life, known.lease) {
            known.leased_until = Some(self.lives[life].clock.local(self.now) + lease.duration());
            self.service.ledger.leased.push(leg);
        }
    }

    pub(crate) fn cover_open(&mut self, leg: LegId) {
        let known = &self.service.ledger.legs[leg];
        let same_base = |other: &Leg| {
            other.side == known.side
                && other.slot == known.slot
                && other.is_open()
                && Ledger::rooms_match(&other.room, &known.room)
        };
        self.service.counters.ambiguous += u64::from(self.service.ledger.legs.iter().any(same_base));
        let others = self
            .service
            .ledger
            .counterparts(leg)
            .filter(|&other| self.service.ledger.legs[other].life.is_some())
            .count();
        let first = others == 0;
        match known.side {
            Side::Sender if first => self.service.counters.sender_first += 1,
            Side::Receiver if first => self.service.counters.receiver_first += 1,
            _ => {}
        }
    }

    pub(crate) fn cover_success(&mut self, leg: LegId) {
        let known = &self.service.ledger.legs[leg];
        let ranks = self.service.params.unequal.is_some();
        let gathered = ranks && known.side == Side::Receiver && known.servers.len() > 1;
        self.service.counters.gathered += u64::from(gathered);
        if let Some(pair) = self.service.params.unequal.as_ref().filter(|_| gathered) {
            let stage = |slot: &Slot| pair.layers_of(true, *slot as u32);
            self.service.counters.staged +=
                u64::from(known.servers.first().map(stage) != known.servers.last().map(stage));
            self.service.counters.shared += u64::from(pair.engines[0].cp > 1 && known.num_pages > 1);
            self.service.counters.gathered_state += u64::from(known.state.hold != 0);
        }
        if let Some(pair) = self.service.params.unequal.as_ref().filter(|_| known.side == Side::Receiver) {
            let [ours, theirs] = pair.engines.each_ref().map(|engine| engine.context);
            self.service.counters.dealt += u64::from(ours != theirs && known.num_pages > 0);
        }
        self.service.counters.scattered +=
            u64::from(ranks && known.side == Side::Sender && known.receivers > 1);
        if known.must_succeed && known.side == Side::Receiver {
            self.service.counters.served += 1;
        }
        if known.side == Side::Sender {
            let holds = |hold: u32| hold != 0 && self.service.ledger.holds[hold as usize].leg == leg;
            let flights = self
                .flights
                .iter()
                .filter(|flight| flight.pieces.iter().any(|piece| holds(piece.local_hold)));
            self.service.counters.multi_part += u64::from(flights.count() > 1);
        } else if let Room::Request(_) = known.room {
            let exact = self
                .service
                .ledger
                .counterparts(leg)
                .any(|other| self.service.ledger.legs[other].room == known.room);
            self.service.counters.base_match += u64::from(!exact);
        }
    }
}
