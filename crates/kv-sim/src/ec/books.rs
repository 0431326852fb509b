//! Who has which block of a host, as the cache itself shows it: compared with its gauges, with what the oracle
//! knows of encoders, and with what the machine says of its transfers.

use kv_ec::SharedStore;

use super::ledger::{Desk, Item, Save, State, Use, hash_of, item_of};
use super::service::{EcWorld, Moving};
use crate::net::lives::LifeId;
use crate::planted::Planted;
use crate::violation::Violation;

/// A committed entry, as the cache shows it.
#[derive(Debug)]
pub(super) struct Committed {
    pub(super) item: Item,
    pub(super) blocks: Vec<u32>,
    pub(super) generation: u64,
    pub(super) pins: u64,
}

/// All committed entries of a cache, in the order of their numbers.
pub(super) fn committed(store: &SharedStore) -> Vec<Committed> {
    let mut entries: Vec<Committed> = store.with_cache(|cache| {
        let entries = cache.committed().filter_map(|entry| {
            let (item, blocks) = (item_of(entry.hash)?, entry.blocks.iter().collect());
            Some(Committed { item, blocks, generation: entry.generation, pins: entry.pins })
        });
        entries.collect()
    });
    entries.sort_by_key(|entry| entry.generation);
    entries
}

fn two_hands(what: String) -> Result<(), Violation> {
    Err(Violation { invariant: "no_block_in_two_hands", what })
}

impl EcWorld {
    /// Looks at the cache of a life: every block has one user, and the gauges tell the truth. A block that has
    /// become free is overwritten, and every new use of a block is a hold of its own.
    pub(super) fn look(&mut self, life: LifeId) -> Result<(), Violation> {
        let living = self.lives.get(life).is_some_and(|known| known.alive);
        let Some(desk) = self.service.ledger.desks.get(life).filter(|_| living) else { return Ok(()) };
        let entries = committed(&desk.store);
        let uses = uses(life, desk, &entries)?;
        gauges_are_true(life, desk, &entries, &uses)?;
        self.encoders_have_their_blocks(life, &uses)?;
        let given_up = self.given_up(life);
        for (block, now) in uses.into_iter().enumerate() {
            let freed = now == Use::Free || given_up.contains(&(block as u32));
            let was = self.service.ledger.desks[life].uses[block];
            if was != now || freed {
                self.service.ledger.desks[life].uses[block] = now;
                let hold = if freed { 0 } else { self.service.ledger.new_hold() };
                let memory = &mut self.memories[life];
                if freed && memory.pages[block] != 0 {
                    memory.poison_page(block as u32);
                }
                memory.pages[block] = hold;
            }
        }
        self.note_states(life, &entries);
        Ok(())
    }

    /// Compares what a machine says of its transfers with the cache.
    pub(super) fn look_at_transfers(&mut self, life: LifeId, moving: &Moving) -> Result<(), Violation> {
        self.abandon(life, moving);
        for block in 0..self.service.ledger.desks.get(life).map_or(0, |desk| desk.uses.len()) {
            let desk = &mut self.service.ledger.desks[life];
            let (was, now) = (desk.moving[block], moving.blocks[block]);
            desk.moving[block] = now;
            if now != 0 {
                desk.filled_by[block] = now;
            }
            if now != 0 && desk.uses[block] != Use::Out {
                let used = desk.uses[block];
                return two_hands(format!(
                    "block {block} of life {life} is filled by a transfer, and is {used:?}"
                ));
            }
            if now != 0 && was != 0 && now != was {
                self.memories[life].pages[block] = self.service.ledger.new_hold();
            }
            let written = |save: &Save| {
                save.life == life && save.reservation.is_some() && save.blocks.contains(&(block as u32))
            };
            if now != 0 && self.service.ledger.saves.iter().any(written) {
                return two_hands(format!(
                    "block {block} of life {life} is filled by a transfer and by an encoder"
                ));
            }
        }
        Ok(())
    }

    fn encoders_have_their_blocks(&self, life: LifeId, uses: &[Use]) -> Result<(), Violation> {
        let ledger = &self.service.ledger;
        let mut taken = vec![false; uses.len()];
        for save in ledger.saves.iter().filter(|save| save.life == life && save.reservation.is_some()) {
            for &block in &save.blocks {
                let used = uses[block as usize];
                if used != Use::Out || std::mem::replace(&mut taken[block as usize], true) {
                    return two_hands(format!(
                        "block {block} of life {life} is an encoder's, and is {used:?}"
                    ));
                }
            }
        }
        Ok(())
    }

    fn note_states(&mut self, life: LifeId, entries: &[Committed]) {
        let now = self.now;
        let desk = &mut self.service.ledger.desks[life];
        for item in 0..desk.seen.len() {
            let ready = entries.iter().any(|entry| entry.item == item);
            let known = hash_of(item).and_then(|hash| desk.store.contains(&hash));
            desk.seen[item].look(
                now,
                match known {
                    _ if ready => State::Ready,
                    Some(_) => State::Filling,
                    None => State::Missing,
                },
            );
        }
        let evictions = desk.store.gauges().evictions;
        let evicted = evictions - desk.evictions;
        desk.evictions = evictions;
        self.service.counters.evictions += evicted;
        if evicted > 0 && self.flights.iter().any(|flight| !flight.over && flight.life == life) {
            self.service.counters.evicted_in_flight += evicted;
        }
    }

    /// With a planted bug: the blocks of transfers that were given up, which the cache then takes for free.
    fn given_up(&self, life: LifeId) -> Vec<u32> {
        match self.planted {
            Some(Planted::FreedWhenGivenUp) => {
                let given_up = self.service.plants.given_up.iter();
                given_up.filter(|(at, _)| *at == life).map(|(_, block)| *block).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// Who has each block. No two committed entries have one block, and no block of an entry is free.
fn uses(life: LifeId, desk: &Desk, entries: &[Committed]) -> Result<Vec<Use>, Violation> {
    let free = |block: usize| desk.store.with_cache(|cache| cache.is_free(block as u32));
    let first = |block| if free(block) { Use::Free } else { Use::Out };
    let mut uses: Vec<Use> = (0..desk.uses.len()).map(first).collect();
    for entry in entries {
        for &block in &entry.blocks {
            let used = std::mem::replace(&mut uses[block as usize], Use::Committed(entry.generation));
            if used != Use::Out {
                two_hands(format!(
                    "block {block} of life {life} is of image {}, and is {used:?}",
                    entry.item
                ))?;
            }
        }
    }
    Ok(uses)
}

fn gauges_are_true(life: LifeId, desk: &Desk, entries: &[Committed], uses: &[Use]) -> Result<(), Violation> {
    let gauges = desk.store.gauges();
    let of = |pinned: bool| {
        let entries = entries.iter().filter(move |entry| (entry.pins > 0) == pinned);
        entries.map(|entry| entry.blocks.len() as u32).sum::<u32>()
    };
    let count = |wanted: fn(&Use) -> bool| uses.iter().filter(|used| wanted(used)).count() as u32;
    let seen = [
        ("free", gauges.free, count(|used| *used == Use::Free)),
        ("filling", gauges.filling, count(|used| *used == Use::Out)),
        ("cached", gauges.cached, of(false)),
        ("pinned", gauges.pinned, of(true)),
        ("lost", gauges.lost, 0),
        ("lost pins", gauges.lost_pins as u32, 0),
    ];
    match seen.iter().find(|(_, told, seen)| told != seen) {
        Some((what, told, seen)) => {
            two_hands(format!("life {life} tells of {told} blocks {what}, and has {seen}: {gauges:?}"))
        }
        None => Ok(()),
    }
}
