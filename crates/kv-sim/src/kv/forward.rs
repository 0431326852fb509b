//! The simulated forward pass: chunks are given before they are computed, and announced as final layer by
//! layer, with the announcements of several chunks interleaved.

use std::ops::Range;

use kv_core::proto::{Command, Input};
use kv_core::{ChunkId, FinalLayers};

use crate::kv::act::{Act, KvAct};
use crate::kv::ledger::LegId;
use crate::kv::request::Computing;
use crate::kv::service::KvWorld;
use crate::net::calendar::Event;
use crate::net::lives::LifeId;
use crate::planted::Planted;

impl KvWorld {
    /// Gives the next pages: computed, or to be.
    pub(crate) fn chunk(&mut self, leg: LegId, life: LifeId, tries: u32) {
        let Some(&chunk) = self.service.plans[leg].chunks.last() else { return };
        if chunk > self.service.stock[life].free_pages.len() {
            return self.starve(leg, life, Act::Chunk { tries: tries + 1 }, tries);
        }
        self.service.plans[leg].chunks.pop();
        self.service.ledger.legs[leg].starved = false;
        let pages = self.take_pages(life, chunk);
        if self.rng.chance(self.service.params.sched.layered) {
            self.begin(leg, life, pages);
        } else {
            let last =
                self.service.plans[leg].chunks.is_empty() && self.service.plans[leg].computing.is_empty();
            self.fill(leg, life, &pages, last);
            let session = self.service.ledger.legs[leg].session;
            let Some(chunk) = self.give_final(leg, life, &pages) else { return };
            self.feed(life, "send", Input::Command(Command::Send { session, chunk }));
        }
        if !self.service.plans[leg].chunks.is_empty() {
            self.act_later(leg, Act::Chunk { tries: 0 });
        }
    }

    /// Gives pages away of which nothing is computed yet.
    fn begin(&mut self, leg: LegId, life: LifeId, pages: Vec<u32>) {
        let start = self.service.ledger.legs[leg].pages.len() as u32;
        let number = ChunkId(self.service.plans[leg].given);
        let session = self.service.ledger.legs[leg].session;
        let Some(chunk) = self.give(leg, life, &pages) else { return };
        let hold = self.service.ledger.legs[leg].holds.last().copied().unwrap_or(0);
        let left = self.cut_layers(self.service.params.layers(self.service.ledger.legs[leg].slot));
        self.service.plans[leg].computing.push(Computing { number, hold, pages, start, left });
        self.service.counters.begun += 1;
        let command = match self.planted {
            Some(Planted::WrittenEarly | Planted::GrantedEarly) => Command::Send { session, chunk },
            _ => Command::BeginChunk { session, chunk },
        };
        self.feed(life, "begin", Input::Command(command));
        self.act_later(leg, Act::Layers);
    }

    /// Computes some layers of one of the chunks of a sender, and announces them.
    pub(crate) fn layers(&mut self, leg: LegId, life: LifeId) {
        let computing = self.service.plans[leg].computing.len();
        if computing == 0 {
            return;
        }
        let at = self.rng.index(computing);
        let mut chunk = self.service.plans[leg].computing.swap_remove(at);
        let Some(layers) = chunk.left.pop() else { return };
        let known = &self.service.ledger.legs[leg];
        let (key, session) = (known.key, known.session);
        let whole = self.service.params.layers(known.slot);
        // What has come back may be somebody else's by now.
        if known.holds.contains(&chunk.hold) {
            for (page, position) in chunk.pages.iter().zip(chunk.start..) {
                self.memories[life].fill_layers(*page, key, position, &layers);
            }
            self.service.ledger.announce(chunk.hold, &layers);
        }
        let whole = layers == whole;
        let layers = if whole && self.rng.chance(500) { None } else { Some(layers) };
        let number = chunk.number;
        if !chunk.left.is_empty() {
            self.service.plans[leg].computing.push(chunk);
        }
        let more = !self.service.plans[leg].computing.is_empty();
        if !more && self.service.plans[leg].chunks.is_empty() {
            self.fill_own_row(leg, life);
        }
        self.service.counters.announced += 1;
        if !matches!(self.planted, Some(Planted::WrittenEarly | Planted::GrantedEarly)) {
            let mut told = FinalLayers::all(number);
            told.layers = layers;
            let command = Command::LayersFinal { session, layers: told };
            self.feed(life, "layers", Input::Command(command));
        }
        if more {
            let pause = self.pause();
            self.calendar.enter(self.now + pause, Event::Act(KvAct::Do { leg, act: Act::Layers }));
        }
    }

    /// Computes the next pages of a request, and with the last page the aux row.
    pub(crate) fn fill(&mut self, leg: LegId, life: LifeId, pages: &[u32], last: bool) {
        let known = &self.service.ledger.legs[leg];
        for (position, &page) in pages.iter().enumerate() {
            self.memories[life].fill_page(page, known.key, (known.pages.len() + position) as u32);
        }
        if last {
            self.fill_own_row(leg, life);
        }
    }

    /// Computes the aux row of a request.
    fn fill_own_row(&mut self, leg: LegId, life: LifeId) {
        let known = &self.service.ledger.legs[leg];
        if let Some(row) = known.row {
            self.memories[life].fill_row(row, known.key, self.service.params.row_source(known.slot));
            self.service.ledger.announce(known.row_hold, &(0..64));
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
