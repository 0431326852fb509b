//! How a life begins: with poisoned memory, a protocol machine, and a clock.

use crate::clock::{Clock, SEC};
use crate::kv::host::{Stock, new_host};
use crate::kv::items::GROUPS;
use crate::kv::memory::Memory;
use crate::kv::params::Params;
use crate::kv::service::KvWorld;
use crate::kv::unequal::Lane;
use crate::net::lives::Slot;
use crate::violation::Violation;

impl KvWorld {
    /// Starts a new life in a slot.
    pub(crate) fn boot_kv(&mut self, slot: Slot) {
        if self.slots[slot].is_some() {
            return;
        }
        let params = &self.service.params;
        let salt = self.rng.bits();
        let memory = memory_of(params, slot, salt);
        let bits = self.rng.bits();
        let drift = params.physics.drift_ppm;
        let rate = 1_000_000 - drift + self.rng.below(2 * drift + 1);
        let clock = Clock::new(self.now, self.rng.below(1000 * SEC), rate);
        self.begin_kv_life(slot, memory, bits, clock);
    }

    /// Starts a life with this memory and this clock. The incarnation and the seed of the machine are made
    /// from `bits`.
    pub(crate) fn begin_kv_life(&mut self, slot: Slot, memory: Memory, bits: u64, clock: Clock) {
        let life = self.hosts.len();
        let mut shown = self.service.params.clone();
        if let Some(planted) = self.planted {
            planted.loosen(&mut shown);
        }
        let host = new_host(&shown, (slot, life), (bits, clock), &memory, self.planted);
        let host = match host {
            Ok(host) => host,
            // The world is drawn wrongly.
            Err(error) => {
                let what = format!("slot {slot} cannot start: {error}");
                self.violation.get_or_insert(Violation { invariant: "requests_are_served", what });
                return;
            }
        };
        self.service.stock.push(Stock::of(&memory));
        self.begin_life(host, memory, clock);
    }
}

/// The memory with which a life in a slot begins.
pub(crate) fn memory_of(params: &Params, slot: Slot, salt: u64) -> Memory {
    let (num_pages, aux) = (params.num_pages[slot], (params.aux_rows, params.item_len));
    let Some(pair) = &params.unequal else {
        let memory = Memory::new(params.kv_regions, num_pages, params.item_len, params.aux_rows, salt);
        return memory.with_state(params.state_items, params.item_len);
    };
    let (prefill, rank) = params.rank(slot);
    let regions = pair.regions(prefill, rank, Lane::Kv);
    let memory = Memory::named(regions, pair.deal(prefill, rank), num_pages, aux, salt);
    let groups = if params.state_items > 0 { 0..GROUPS } else { 0..0 };
    groups.fold(memory, |memory, group| {
        let regions = pair.regions(prefill, rank, Lane::Group(group));
        memory.with_group(group, regions, pair.item_tokens(prefill, group), params.state_items)
    })
}
