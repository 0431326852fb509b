//! Engines that hold the cache of one model differently: other tensor-parallel sizes, pages, layouts.
//!
//! What is known here of who sends what to whom is told from the model alone, not from kv-core.

use std::ops::Range;

use kv_core::layout::Axes;
use kv_core::{Axis, Holds, KvArgs, KvArgsBuilder, Layout, Parallel, Region, RegionRole};

use crate::rng::Rng;

/// A model, and two engines that serve it.
#[derive(Debug, Clone)]
pub struct Unequal {
    /// Layers of the model.
    pub layers: u32,
    /// Its KV heads; one if its cache is a latent one.
    pub heads: u32,
    /// Every rank has all of a latent cache.
    pub latent: bool,
    /// Bytes of a head of a token.
    pub atom: u32,
    /// Prefill and decode.
    pub engines: [Engine; 2],
}

/// How an engine holds the cache.
#[derive(Debug, Clone)]
pub struct Engine {
    /// Its ranks.
    pub tp: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// How items lie, outermost first.
    pub axes: Axes,
    /// Keys and values in one region.
    pub packed: bool,
    /// Layers in one region.
    pub per_region: u32,
}

/// A byte of a page, by what it is of the model: kind, layer, token within the page, head, place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    kind: u8,
    /// Its layer.
    pub layer: u8,
    /// Its token, counted from the first of the page.
    pub token: u8,
    head: u8,
    byte: u8,
}

impl Name {
    /// The name as a number, with the token counted from the first of the request.
    pub fn of_request(self, first_token: u64) -> u64 {
        let [kind, layer, head, byte] = [self.kind, self.layer, self.head, self.byte].map(u64::from);
        (first_token + u64::from(self.token)) << 32 | kind << 24 | layer << 16 | head << 8 | byte
    }
}

/// What a region holds.
struct Cell {
    layers: Range<u32>,
    holds: Holds,
}

impl Unequal {
    /// Two engines of one model.
    pub(crate) fn draw(rng: &mut Rng) -> Unequal {
        let latent = rng.chance(250);
        let heads = if latent { 1 } else { rng.pick(&[1, 2, 4, 8]) };
        let layers = 1 + rng.below(3) as u32;
        let engine = |rng: &mut Rng| {
            let mut axes = [Axis::Layer, Axis::Part, Axis::Token, Axis::Head];
            rng.shuffle(&mut axes);
            Engine {
                tp: rng.pick(&[1, 2, 4]),
                page_size: rng.pick(&[1, 2, 3, 4]),
                axes,
                packed: !latent && rng.chance(500),
                per_region: rng.pick(&[1, layers, 2]).min(layers),
            }
        };
        let engines = [engine(rng), engine(rng)];
        Unequal { layers, heads, latent, atom: 1 + rng.below(2) as u32, engines }
    }

    fn engine(&self, prefill: bool) -> &Engine {
        &self.engines[usize::from(!prefill)]
    }

    /// Tokens of a page.
    pub(crate) fn page_size(&self, prefill: bool) -> usize {
        self.engine(prefill).page_size as usize
    }

    /// The prefill ranks that a decode rank has to do with: their heads are its heads.
    pub(crate) fn sources(&self, dest: u32) -> Range<u32> {
        let [ours, theirs] = [self.engines[0].tp, self.engines[1].tp];
        let first = dest * ours / theirs;
        first..first + (ours / theirs).max(1)
    }

    /// Bytes of a token that a prefill rank sends to a decode rank: of heads that several have, the
    /// first one's.
    pub(crate) fn bytes_per_token(&self, source: u32, dest: u32) -> u64 {
        let before = self.sources(dest).start..source;
        let has = |rank: u32, head: u32| self.heads_of(true, rank).contains(&head);
        let sent = |head: &u32| has(source, *head) && !before.clone().any(|rank| has(rank, *head));
        let heads = self.heads_of(false, dest).filter(sent).count() as u64;
        let kinds = if self.latent { 1 } else { 2 };
        heads * kinds * u64::from(self.layers) * u64::from(self.atom)
    }

    /// The heads on a rank.
    fn heads_of(&self, prefill: bool, rank: u32) -> Range<u32> {
        let tp = self.engine(prefill).tp;
        let first = if self.latent { 0 } else { rank * self.heads / tp };
        first..first + if self.latent { 1 } else { (self.heads / tp).max(1) }
    }

    fn cells(&self, prefill: bool) -> Vec<Cell> {
        let engine = self.engine(prefill);
        let kinds = match (self.latent, engine.packed) {
            (true, _) => vec![Holds::Latent],
            (false, true) => vec![Holds::KeyValue],
            (false, false) => vec![Holds::Key, Holds::Value],
        };
        let starts = (0..self.layers).step_by(engine.per_region as usize);
        let ranges = starts.map(|start| start..(start + engine.per_region).min(self.layers));
        ranges
            .flat_map(|layers| kinds.clone().into_iter().map(move |holds| (layers.clone(), holds)))
            .map(|(layers, holds)| Cell { layers, holds })
            .collect()
    }

    /// Of each KV region of a rank, what each byte of an item is.
    pub(crate) fn regions(&self, prefill: bool, rank: u32) -> Vec<Vec<Name>> {
        let heads = self.heads_of(prefill, rank);
        self.cells(prefill).iter().map(|cell| self.names(self.engine(prefill), cell, heads.clone())).collect()
    }

    fn names(&self, engine: &Engine, cell: &Cell, heads: Range<u32>) -> Vec<Name> {
        let kinds: &[u8] = match cell.holds {
            Holds::KeyValue => &[0, 1],
            Holds::Value => &[1],
            _ => &[0],
        };
        let extents = engine.axes.map(|axis| match axis {
            Axis::Layer => cell.layers.len() as u32,
            Axis::Part => kinds.len() as u32,
            Axis::Token => engine.page_size,
            Axis::Head => heads.len() as u32,
        });
        let pieces: u32 = extents.iter().product();
        let mut names = Vec::with_capacity((pieces * self.atom) as usize);
        for piece in 0..pieces {
            let mut name = Name { kind: 0, layer: 0, token: 0, head: 0, byte: 0 };
            let mut rest = piece;
            for (axis, extent) in engine.axes.into_iter().zip(extents).rev() {
                let index = rest % extent;
                rest /= extent;
                match axis {
                    Axis::Layer => name.layer = (cell.layers.start + index) as u8,
                    Axis::Part => name.kind = kinds[index as usize],
                    Axis::Token => name.token = index as u8,
                    Axis::Head => name.head = (heads.start + index) as u8,
                }
            }
            names.extend((0..self.atom as u8).map(|byte| Name { byte, ..name }));
        }
        names
    }

    /// The description of a rank, with its KV regions at these addresses and lengths.
    pub(crate) fn describe(
        &self,
        prefill: bool,
        rank: u32,
        num_pages: u32,
        regions: impl Iterator<Item = (u64, u64, u64)>,
    ) -> KvArgsBuilder {
        let engine = self.engine(prefill);
        let parallel = Parallel { tp_size: engine.tp, tp_rank: rank, ..Parallel::default() };
        let total_kv_heads = if self.latent { 0 } else { self.heads };
        let layout = Layout { axes: engine.axes, total_kv_heads, ..Layout::default() };
        let mut builder = KvArgs::builder(if prefill { "p" } else { "d" }, rank)
            .pages(num_pages, engine.page_size)
            .heads(self.heads_of(prefill, rank).len() as u32, 1)
            .parallel(parallel)
            .layout(layout);
        for ((addr, len, item_len), cell) in regions.zip(self.cells(prefill)) {
            let region = Region::dram(RegionRole::Kv, addr, len, item_len);
            builder = builder.region(region.layers(cell.layers).holds(cell.holds));
        }
        builder
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_sources_send_is_what_a_rank_holds() {
        for seed in 0..500 {
            let pair = Unequal::draw(&mut Rng::new(seed));
            for dest in 0..pair.engines[1].tp {
                let sent: u64 = pair.sources(dest).map(|source| pair.bytes_per_token(source, dest)).sum();
                let held: usize = pair.regions(false, dest).iter().map(Vec::len).sum();
                assert_eq!(sent * u64::from(pair.engines[1].page_size), held as u64, "seed {seed}");
            }
        }
    }
}
