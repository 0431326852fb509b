//! Planted bugs of the encoder cache. All but one act from outside of the machine: on its outputs, on frames,
//! and on what a consumer or an encoder does. The one evicts pinned entries by a door that the cache has for
//! simulators only.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use kv_core::machine::Output;
use kv_core::wire::{Abort, Body, Delivery, Failed, Frame};
use kv_core::{Attempt, PeerCause, Room, SessionId, Time};
use kv_ec::{EcPoll, Resource};

use super::books::committed;
use super::ledger::{Item, Taken, hash_of};
use super::params::EcParams;
use super::service::{Ec, EcWorld, Moving};
use crate::clock::MS;
use crate::net::lives::LifeId;
use crate::net::params::ChaosParams;
use crate::net::service::OutputOf;
use crate::planted::Planted;

/// What planted bugs remember of a world.
#[derive(Debug, Default)]
pub(crate) struct Plants {
    /// Entries that were granted to a reader, and are pinned no longer.
    granted: BTreeSet<(LifeId, Item)>,
    /// Blocks of transfers that were given up.
    pub(super) given_up: BTreeSet<(LifeId, u32)>,
    /// The latest request of a consumer to a producer.
    latest: BTreeMap<(LifeId, LifeId), Attempt>,
    /// When a consumer sent each numbered question, by its own clock.
    numbers: BTreeMap<(LifeId, u64), Time>,
    /// Sessions whose end is not told.
    forgotten: BTreeSet<(LifeId, SessionId)>,
}

/// Changes the parameters of a world so that the bug has an occasion to show.
pub(crate) fn provoke(planted: Planted, params: &mut EcParams) {
    let reads: &[_] = &[kv_core::TransferMode::Pull];
    (params.saves, params.wants, params.lossless) = (20, 20, false);
    match planted {
        Planted::UnpinnedAtGrant | Planted::EvictedInUse | Planted::NoPinForWaiter => {
            params.blocks.fill(8);
            params.items.iter_mut().for_each(|blocks| *blocks = (*blocks).max(4));
            (params.physics.dma.slow, params.hold_max) = (400, 300 * MS);
        }
        Planted::FreedWhenGivenUp => (params.abort, params.physics.dma.slow) = (700, 600),
        Planted::LateAnswerTaken => {
            (params.abort, params.modes) = (500, reads);
            (params.physics.net.tail, params.physics.net.delay_max) = (600, 200 * MS);
        }
        Planted::LeaseFromTheAnswer => provoke_leases(params),
        Planted::DrainUnheardByEntries | Planted::EmptyWhileItServes => {
            (params.physics.chaos, params.physics.dma.slow) = (ChaosParams::default(), 600);
            params.physics.chaos.drains = 3;
        }
        Planted::AliveTakenForDone => provoke_long_reads(params),
        Planted::HealedInName => params.physics.net.drop = 990,
        _ => {}
    }
}

/// Leases are short beside the ways of frames, and what was read last soon makes room.
fn provoke_leases(params: &mut EcParams) {
    let hosts = params.physics.hosts();
    (params.blocks, params.items) = (vec![8; hosts], vec![4; 6]);
    (params.lease, params.modes) = (Duration::from_millis(30), &[kv_core::TransferMode::Pull]);
    (params.saves, params.wants, params.hold_max) = (40, 60, MS);
    (params.abort, params.other_size, params.own_budget) = (0, 0, 0);
    params.budget = Duration::from_secs(3);
    let physics = &mut params.physics;
    physics.chaos = ChaosParams::default();
    (physics.fault_span, physics.lookup.fail) = (800 * MS, 0);
    (physics.net.drop, physics.net.tail, physics.net.delay) = (50, 300, 10 * MS);
    physics.net.delay_max = 200 * MS;
    (physics.dma.slow, physics.dma.error, physics.dma.connect_fail) = (300, 0, 0);
    physics.timing.peer_timeout = Duration::from_secs(2);
}

/// Nothing is lost, leases last, reads take long, some are given up, and all hosts drain.
fn provoke_long_reads(params: &mut EcParams) {
    (params.lossless, params.modes) = (true, &[kv_core::TransferMode::Pull]);
    (params.lease, params.try_limit) = (Duration::from_secs(2), Duration::from_secs(1));
    let physics = &mut params.physics;
    (physics.chaos, physics.lookup.fail, physics.lookup.stale) = (ChaosParams::default(), 0, 0);
    physics.chaos.drains = 3;
    (physics.net.drop, physics.net.misdeliver, physics.net.garbage) = (0, 0, 0);
    physics.net.delay_max = physics.net.delay + MS;
    (physics.dma.slow, physics.dma.time_max) = (600, 2000 * MS);
    (physics.dma.error, physics.dma.connect_fail) = (0, 0);
}

impl EcWorld {
    /// Evicts an entry that is in use: any, or one that was granted to a reader. False if there is none, or if
    /// another bug is planted.
    pub(super) fn evict_wrongly(&mut self, life: LifeId, planted: Planted) -> bool {
        if self.planted != Some(planted) {
            return false;
        }
        let desk = &self.service.ledger.desks[life];
        let granted = &self.service.plants.granted;
        let in_use = committed(&desk.store).into_iter().find(|entry| {
            entry.pins > 0 && (planted == Planted::EvictedInUse || granted.contains(&(life, entry.item)))
        });
        let Some(hash) = in_use.and_then(|entry| hash_of(entry.item)) else { return false };
        desk.store.with_cache(|cache| cache.evict_pinned(&hash))
    }

    /// Notes the blocks of transfers that end before their entries are committed.
    pub(super) fn abandon(&mut self, life: LifeId, moving: &Moving) {
        if self.planted != Some(Planted::FreedWhenGivenUp) || life >= self.service.ledger.desks.len() {
            return;
        }
        let desk = &self.service.ledger.desks[life];
        for block in 0..desk.uses.len() {
            let ended = desk.moving[block] != 0 && moving.blocks[block] == 0;
            let out = desk.uses[block] == super::ledger::Use::Out;
            let key = (life, block as u32);
            if ended && out {
                self.service.plants.given_up.insert(key);
                self.memories[life].pages[block] = 0;
            } else if !out || moving.blocks[block] != 0 {
                self.service.plants.given_up.remove(&key);
            }
        }
    }

    /// Changes what a machine tells its scheduler.
    pub(super) fn sabotage_entries(&mut self, life: LifeId, outputs: Vec<OutputOf<Ec>>) -> Vec<OutputOf<Ec>> {
        match self.planted {
            Some(Planted::WaitersForgotten) => self.forget_waiters(life, outputs),
            Some(Planted::CommittedEarly) => {
                for output in &outputs {
                    if let Output::Status { session, poll: EcPoll::Transferring, .. } = output {
                        self.use_early(life, *session);
                    }
                }
                outputs
            }
            _ => outputs,
        }
    }

    /// Of the sessions that fail in one step, all but the first hear nothing.
    fn forget_waiters(&mut self, life: LifeId, outputs: Vec<OutputOf<Ec>>) -> Vec<OutputOf<Ec>> {
        let forgotten = &mut self.service.plants.forgotten;
        let mut failed = 0;
        let keeps = |output: &OutputOf<Ec>| match output {
            Output::Status { session, poll: EcPoll::Failed, .. } => {
                failed += 1;
                if failed > 1 {
                    forgotten.insert((life, *session));
                }
                failed == 1
            }
            Output::Release { session, resource: Resource::Slot(None) } => {
                !forgotten.contains(&(life, *session))
            }
            _ => true,
        };
        outputs.into_iter().filter(keeps).collect()
    }

    /// A session takes the entry while the transfer still fills the blocks.
    fn use_early(&mut self, life: LifeId, session: SessionId) {
        let Some(known) = self.service.ledger.sessions.get(&(life, session)) else { return };
        let desk = &self.service.ledger.desks[life];
        let (item, count) = (known.item, self.service.params.items[known.item] as usize);
        let filled = desk.moving.iter().zip(0..).filter(|(transfer, _)| **transfer != 0);
        let blocks: Vec<u32> = filled.map(|(_, block)| block).take(count).collect();
        let taken = self.service.ledger.next_taken;
        self.service.ledger.next_taken += 1;
        self.service.ledger.taken.insert(taken, Taken { life, item, blocks, guard: None });
    }

    /// Changes a frame as it is sent, and notes what was sent.
    pub(super) fn sabotage_word(
        &mut self,
        (from, to): (LifeId, LifeId),
        frame: Frame,
        bytes: Bytes,
    ) -> (Frame, Option<Bytes>) {
        let Some(planted) = self.planted else { return (frame, Some(bytes)) };
        let asked = match &frame.body {
            Body::XferReq(request) => {
                self.service.plants.latest.insert((from, to), request.attempt);
                match &request.delivery {
                    Delivery::Read(acquire) => Some(acquire.number),
                    Delivery::Write(_) => None,
                }
            }
            Body::Heartbeat(heartbeat) => Some(heartbeat.number),
            Body::Granted(granted) => {
                let id = (to, from, frame.conversation, granted.attempt.0);
                if let Some(heard) = self.service.ledger.heard.get(&id) {
                    self.service.plants.granted.insert((from, heard.item));
                }
                None
            }
            _ => None,
        };
        if let Some(number) = asked {
            self.service.plants.numbers.insert((from, number), self.lives[from].clock.local(self.now));
        }
        match (planted, frame) {
            (Planted::RefusedFalsely, Frame { conversation, body: Body::Failed(failed) })
                if failed.cause == PeerCause::EntryNotReady =>
            {
                let body = Body::Failed(Failed { cause: PeerCause::EntryMissing, ..failed });
                let frame = Frame { conversation, body };
                let bytes = frame.encode().ok();
                (frame, bytes)
            }
            (_, frame) => (frame, Some(bytes)),
        }
    }

    /// Changes a frame as it arrives.
    pub(super) fn sabotage_hearing(&self, from: LifeId, at: LifeId, bytes: Bytes) -> Bytes {
        let Some(planted) = self.planted else { return bytes };
        let Ok(mut frame) = Frame::decode(&bytes) else { return bytes };
        let age = |number: u64| {
            let now = self.lives[at].clock.local(self.now);
            self.service.plants.numbers.get(&(at, number)).map_or(0, |sent| (now - *sent).as_millis() as u64)
        };
        let latest = || self.service.plants.latest.get(&(at, from)).copied();
        match (planted, &mut frame.body) {
            (Planted::LeaseFromTheAnswer, Body::Granted(granted)) => granted.lease_ms += age(granted.number),
            (Planted::LeaseFromTheAnswer, Body::HeartbeatAck(ack)) => ack.lease_ms += age(ack.number),
            (Planted::LateAnswerTaken, Body::Granted(granted)) => {
                granted.attempt = latest().unwrap_or(granted.attempt);
            }
            (Planted::AliveTakenForDone, Body::Heartbeat(heartbeat)) => {
                let Some(&attempt) = self.service.plants.latest.get(&(from, at)) else { return bytes };
                let (room, cause) = (Room::Number(0), PeerCause::Aborted);
                let low_watermark = heartbeat.low_watermark;
                frame.body = Body::Abort(Abort {
                    failed_ms_ago: None,
                    attempt,
                    room,
                    lease_id: None,
                    cause,
                    low_watermark,
                });
            }
            (Planted::RefusalRetried, Body::Failed(failed)) if failed.cause == PeerCause::EntryMissing => {
                failed.cause = PeerCause::EntryNotReady;
            }
            _ => return bytes,
        }
        frame.encode().unwrap_or(bytes)
    }
}
