//! The simulated forward pass: chunks that are given before they are computed, and announced layer by
//! layer, those of one chunk between those of the next.

use std::ops::Range;

use kv_core::proto::{Command, Input};
use kv_core::{ChunkId, FinalLayers};

use crate::calendar::{Act, Event};
use crate::ledger::{HoldId, LegId, LifeId};
use crate::planted::Planted;
use crate::world::World;

/// A chunk that is being computed.
#[derive(Debug, Clone)]
pub(crate) struct Computing {
    number: ChunkId,
    hold: HoldId,
    pages: Vec<u32>,
    /// Number of the first page in its request.
    start: u32,
    /// Layers that are not computed, cut as they will be announced, the next ones last.
    left: Vec<Range<u32>>,
}

impl World {
    /// Gives the next pages: computed, or to be.
    pub(crate) fn chunk(&mut self, leg: LegId, life: LifeId, tries: u32) {
        let Some(&chunk) = self.plans[leg].chunks.last() else { return };
        if chunk > self.hosts[life].free_pages.len() {
            return self.starve(leg, life, Act::Chunk { tries: tries + 1 }, tries);
        }
        self.plans[leg].chunks.pop();
        let pages = self.take_pages(life, chunk);
        if self.rng.chance(self.params.sched.layered) {
            self.begin(leg, life, pages);
        } else {
            let last = self.plans[leg].chunks.is_empty() && self.plans[leg].computing.is_empty();
            self.fill(leg, life, &pages, last);
            let session = self.ledger.legs[leg].session;
            let Some(chunk) = self.give_final(leg, life, &pages) else { return };
            self.feed(life, "send", Input::Command(Command::Send { session, chunk }));
        }
        if !self.plans[leg].chunks.is_empty() {
            self.act_later(leg, Act::Chunk { tries: 0 });
        }
    }

    /// Gives pages away of which nothing is computed yet.
    fn begin(&mut self, leg: LegId, life: LifeId, pages: Vec<u32>) {
        let start = self.ledger.legs[leg].pages.len() as u32;
        let number = ChunkId(self.plans[leg].given);
        let session = self.ledger.legs[leg].session;
        let Some(chunk) = self.give(leg, life, &pages) else { return };
        let hold = self.ledger.legs[leg].holds.last().copied().unwrap_or(0);
        let left = self.cut_layers(self.params.layers(self.ledger.legs[leg].slot));
        self.plans[leg].computing.push(Computing { number, hold, pages, start, left });
        self.counters.begun += 1;
        let command = match self.planted {
            Some(Planted::WrittenEarly | Planted::GrantedEarly) => Command::Send { session, chunk },
            _ => Command::BeginChunk { session, chunk },
        };
        self.feed(life, "begin", Input::Command(command));
        self.act_later(leg, Act::Layers);
    }

    /// Computes some layers of one of the chunks, and says so.
    pub(crate) fn layers(&mut self, leg: LegId, life: LifeId) {
        let computing = self.plans[leg].computing.len();
        if computing == 0 {
            return;
        }
        let at = self.rng.index(computing);
        let mut chunk = self.plans[leg].computing.swap_remove(at);
        let Some(layers) = chunk.left.pop() else { return };
        let known = &self.ledger.legs[leg];
        let (key, session) = (known.key, known.session);
        let whole = self.params.layers(known.slot);
        // What has come back may be somebody else's by now.
        if known.holds.contains(&chunk.hold) {
            for (page, position) in chunk.pages.iter().zip(chunk.start..) {
                self.memories[life].fill_layers(*page, key, position, &layers);
            }
            self.ledger.announce(chunk.hold, &layers);
        }
        let whole = layers == whole;
        let layers = if whole && self.rng.chance(500) { None } else { Some(layers) };
        let number = chunk.number;
        if !chunk.left.is_empty() {
            self.plans[leg].computing.push(chunk);
        }
        let more = !self.plans[leg].computing.is_empty();
        if !more && self.plans[leg].chunks.is_empty() {
            self.fill_own_row(leg, life);
        }
        self.counters.announced += 1;
        if !matches!(self.planted, Some(Planted::WrittenEarly | Planted::GrantedEarly)) {
            let command =
                Command::LayersFinal { session, layers: FinalLayers { chunk: number, layers, fence: None } };
            self.feed(life, "layers", Input::Command(command));
        }
        if more {
            let pause = self.pause();
            self.calendar.enter(self.now + pause, Event::Act { leg, act: Act::Layers });
        }
    }

    /// Computes the next pages of a request, and with the last of them the aux row.
    pub(crate) fn fill(&mut self, leg: LegId, life: LifeId, pages: &[u32], last: bool) {
        let known = &self.ledger.legs[leg];
        for (position, &page) in pages.iter().enumerate() {
            self.memories[life].fill_page(page, known.key, (known.pages.len() + position) as u32);
        }
        if last {
            self.fill_own_row(leg, life);
        }
    }

    /// Computes the aux row of a request.
    fn fill_own_row(&mut self, leg: LegId, life: LifeId) {
        let known = &self.ledger.legs[leg];
        if let Some(row) = known.row {
            self.memories[life].fill_row(row, known.key, self.params.row_source(known.slot));
            self.ledger.announce(known.row_hold, &(0..64));
        }
        self.fill_items(leg, life);
    }

    /// All layers of a rank, cut at random, in any order.
    fn cut_layers(&mut self, layers: Range<u32>) -> Vec<Range<u32>> {
        let mut cuts = Vec::new();
        let mut start = layers.start;
        for layer in layers.start + 1..=layers.end {
            if layer == layers.end || self.rng.chance(600) {
                cuts.push(start..layer);
                start = layer;
            }
        }
        self.rng.shuffle(&mut cuts);
        cuts
    }
}
