//! Planted bugs of the lease protocol: how readers judge leases and answers, and how senders keep leases.

use bytes::Bytes;
use kv_core::Attempt;
use kv_core::wire::{Body, ConversationId, Delivery, Frame, HeartbeatAck, Register, Release};

use crate::kv::ledger::Side;
use crate::kv::service::KvWorld;
use crate::net::calendar::Event;
use crate::net::lives::LifeId;
use crate::planted::Planted;

impl KvWorld {
    /// Changes a frame as a reader or a sender hears it; `None` loses the frame.
    pub(super) fn mishear(
        &mut self,
        planted: Planted,
        (from, at): (LifeId, LifeId),
        bytes: Bytes,
    ) -> Option<Bytes> {
        let Ok(mut frame) = Frame::decode(&bytes) else { return Some(bytes) };
        match (planted, &mut frame.body) {
            (Planted::NoProof, Body::Granted(granted)) => granted.lease_ms = 1 << 40,
            (Planted::NoProof, Body::HeartbeatAck(ack)) => ack.lease_ms = 1 << 40,
            (Planted::ProofFromReceipt, Body::Granted(granted)) => {
                granted.lease_ms += self.age(at, granted.number);
            }
            (Planted::ProofFromReceipt, Body::HeartbeatAck(ack)) => ack.lease_ms += self.age(at, ack.number),
            (Planted::NoMargin, Body::Granted(granted)) => granted.lease_ms = granted.lease_ms * 32 / 31 + 1,
            (Planted::NoMargin, Body::HeartbeatAck(ack)) => ack.lease_ms = ack.lease_ms * 32 / 31 + 1,
            (Planted::RenewalsIgnored, Body::Heartbeat(heartbeat))
                if self.sends(at) && !heartbeat.leases.is_empty() =>
            {
                self.answer_in_its_place(at, heartbeat.number, &heartbeat.leases);
                return None;
            }
            (Planted::AnsweredAfterFailure, Body::Heartbeat(heartbeat))
                if !self.sends(at) && !heartbeat.leases.is_empty() =>
            {
                self.answer_in_its_place(at, heartbeat.number, &heartbeat.leases);
                return None;
            }
            (Planted::FreedByFirst, Body::Release(Release { answer: true, .. })) => self.overwrite(at),
            (Planted::EagerRelease, Body::Granted(granted)) => {
                let attempts = vec![(granted.attempt.0, 1)];
                self.forge(
                    (at, from),
                    Body::Release(Release { low_watermark: Attempt(0), attempts, answer: true }),
                );
            }
            (Planted::DeafToReleased, Body::Released(_)) => return None,
            _ => return Some(bytes),
        }
        frame.encode().ok()
    }

    /// True if a life has a sender that has not ended.
    fn sends(&self, life: LifeId) -> bool {
        self.service
            .ledger
            .legs
            .iter()
            .any(|leg| leg.life == Some(life) && leg.side == Side::Sender && leg.is_open())
    }

    /// Remembers when a question about a lease was asked.
    pub(super) fn note_number(&mut self, life: LifeId, body: &Body) {
        let number = match body {
            Body::Register(Register { delivery: Delivery::Read(acquire), .. }) => acquire.number,
            Body::Heartbeat(heartbeat) => heartbeat.number,
            _ => return,
        };
        self.service.sabotage.numbers.insert((life, number), self.lives[life].clock.local(self.now));
    }

    /// How long ago a heartbeat or acquire message was sent, in milliseconds.
    fn age(&self, life: LifeId, number: u64) -> u64 {
        let now = self.lives[life].clock.local(self.now);
        self.service.sabotage.numbers.get(&(life, number)).map_or(0, |&sent| (now - sent).as_millis() as u64)
    }

    /// Tells every reader of a host that its heartbeat was answered.
    fn answer_in_its_place(&mut self, host: LifeId, number: u64, leases: &[(u64, u32)]) {
        let lease_ms = self.service.params.physics.timing.kv_lease_duration.as_millis() as u64 * 2 / 3;
        for reader in 0..self.hosts.len() {
            let alive = self.lives[reader].alive;
            if alive && reader != host && self.service.sabotage.conversations.contains_key(&(reader, host)) {
                let (low_watermark, leases, permit_ms) = (Attempt(0), leases.to_vec(), 0);
                let ack = HeartbeatAck { number, low_watermark, lease_ms, leases, permit_ms };
                self.forge((host, reader), Body::HeartbeatAck(ack));
            }
        }
    }

    /// Sends a frame in the name of another life.
    fn forge(&mut self, (from, to): (LifeId, LifeId), body: Body) {
        let conversation =
            self.service.sabotage.conversations.get(&(to, from)).copied().unwrap_or(ConversationId::NONE);
        if let Ok(bytes) = (Frame { conversation, body }).encode() {
            self.calendar.enter(self.now + 1, Event::Frame { from, to, road: 0, bytes });
        }
    }

    /// Overwrites all pages of a host that its senders hold, as another user of the pages would.
    pub(super) fn overwrite(&mut self, life: LifeId) {
        if self.hosts[life].slot < self.service.params.physics.prefills {
            (0..self.memories[life].pages.len() as u32)
                .for_each(|page| self.memories[life].poison_page(page));
        }
    }

    /// True if the planted bug keeps the timers of a life from ringing.
    pub(crate) fn is_deaf(&self, life: LifeId) -> bool {
        match self.planted {
            Some(Planted::DeafToTime) => true,
            Some(Planted::NeverExpires) => self.hosts[life].slot < self.service.params.physics.prefills,
            _ => false,
        }
    }
}
