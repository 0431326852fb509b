//! How a life begins: with poisoned memory, an empty cache, the machine, and a clock.

use std::error::Error;

use kv_core::proto::NodeConfig;
use kv_core::random::mix;
use kv_core::{
    Incarnation, KvArgs, RankRecord, Region, RegionRole, Service, ServiceOffer, TransferMode, WorkerRole,
};
use kv_ec::{EC_SERVICE, EcMachine, EncoderCache, MachineConfig, SharedStore};

use super::ledger::{Desk, Item, LastSeen, Use};
use super::params::EcParams;
use super::service::EcWorld;
use crate::clock::{Clock, SEC};
use crate::kv::memory::Memory;
use crate::net::lives::{LifeId, Slot, transports_of};

impl EcWorld {
    /// Starts a new life in a slot.
    pub(super) fn boot_ec(&mut self, slot: Slot) {
        if self.slots[slot].is_some() {
            return;
        }
        let (salt, bits) = (self.rng.bits(), self.rng.bits());
        let drift = self.params.drift_ppm;
        let rate = 1_000_000 - drift + self.rng.below(2 * drift + 1);
        let clock = Clock::new(self.now, self.rng.below(1000 * SEC), rate);
        let _ = self.begin_ec_life(slot, (salt, bits), clock);
    }

    /// Starts a life with this clock. Its memory, its incarnation and the seed of its machine are made from
    /// the two numbers.
    pub(crate) fn begin_ec_life(
        &mut self,
        slot: Slot,
        (salt, bits): (u64, u64),
        clock: Clock,
    ) -> Result<(), Box<dyn Error>> {
        let params = &self.service.params;
        let (blocks, block_bytes) = (params.blocks[slot], params.block_bytes);
        let memory = Memory::new(1, blocks, block_bytes, 0, salt);
        let store = SharedStore::new(EncoderCache::new(blocks, block_bytes as u32, params.eviction));
        let (machine, record) = machine(params, (slot, self.next_life()), bits, &store)?;
        self.service.ledger.desks.push(Desk {
            store,
            uses: vec![Use::Free; blocks as usize],
            moving: vec![0; blocks as usize],
            filled_by: vec![0; blocks as usize],
            seen: vec![LastSeen::missing(); params.items.len()],
            next_session: 1,
            evictions: 0,
        });
        self.start(slot, (machine, memory), (record, Some(EcParams::addr(slot))), clock);
        Ok(())
    }

    /// From what the content of an entry is made on a host.
    pub(super) fn content_key(&self, slot: Slot, item: Item) -> u64 {
        let other = self.service.params.misfit == Some(slot);
        mix(self.params.seed ^ mix(item as u64) ^ u64::from(other))
    }

    /// Bytes of an entry of so many blocks. The last block is not full.
    pub(super) fn bytes_of(&self, blocks: u32) -> u64 {
        u64::from(blocks) * self.service.params.block_bytes as u64 - 3
    }
}

/// The machine of a life, and the record by which peers find the life.
fn machine(
    params: &EcParams,
    (slot, life): (Slot, LifeId),
    bits: u64,
    store: &SharedStore,
) -> Result<(EcMachine, RankRecord), Box<dyn Error>> {
    let len = u64::from(params.blocks[slot]) * params.block_bytes as u64;
    let region = Region::dram(RegionRole::Kv, 1 << 20, len, params.block_bytes as u64).layer(0);
    let args = KvArgs::builder(&format!("ec{slot}"), 0)
        .pages(params.blocks[slot], 1)
        .max_inflight(params.posting.0)
        .max_sge(params.posting.1)
        .transfer_mode(TransferMode::Auto)
        .region(region)
        .build()?;
    let compatibility = params.compatibility(slot);
    let offer =
        ServiceOffer::kv(args.geometry())?.of_service(&Service::by_content(EC_SERVICE, compatibility));
    let incarnation = Incarnation::from_random(bits);
    let transports = transports_of(params.physics.seed, &params.physics.ways, life);
    let (parallel, who) = (args.geometry().parallel, (args.worker().clone(), incarnation));
    let record = RankRecord::new(who, WorkerRole::Encode, parallel, transports.clone(), vec![offer])?;
    let node = NodeConfig::over(args, incarnation, transports).with(|node| {
        node.seed = bits;
        node.timing = params.physics.timing;
        node.limits = params.limits;
    });
    let config = MachineConfig::new(compatibility).with(|config| {
        config.budget = params.budget;
        (config.retry_first, config.retry_max) = params.retry;
        config.lease = params.lease;
        config.answer_deadline = params.answer_deadline;
        config.try_limit = params.try_limit;
        config.max_answers = params.max_answers;
    });
    Ok((EcMachine::new(config, node, store.clone()), record))
}
