//! Engines that hold the cache of one model differently: other tensor-parallel sizes, pipeline stages, pages,
//! layouts, shares of cache groups and context-parallel groups.
//!
//! Which rank sends what to which rank is computed here from the model alone, and not by kv-core, so that
//! both can be compared.

mod cells;
mod context;
mod describe;
mod meet;
mod name;
mod place;

use std::ops::Range;

use kv_core::Axis;
use kv_core::layout::Axes;

use crate::kv::items::{DRAFTS, GROUPS};
use crate::rng::Rng;

pub use name::Name;
pub use place::Deal;

/// A model, and two engines that serve it.
#[derive(Debug, Clone)]
pub struct Unequal {
    /// The number of layers of the model.
    pub layers: u32,
    /// The number of KV heads of the model; one if its cache is a latent one.
    pub heads: u32,
    /// The number of KV heads of the layers with an odd number.
    pub odd_heads: u32,
    /// Every rank has all of a latent cache.
    pub latent: bool,
    /// Bytes of a head of a token; an element has one byte.
    pub atom: u32,
    /// The cache groups of the model. Worlds without state items have none.
    pub groups: [Group; GROUPS],
    /// True if the second group holds the pages of a sliding window, which neither side may leave out.
    pub windows: bool,
    /// The prefill engine and the decode engine.
    pub engines: [Engine; 2],
}

/// A cache group of the model.
#[derive(Debug, Clone)]
pub struct Group {
    /// Heads of an item, over all tensor-parallel ranks.
    pub heads: u32,
    /// The layers that have the group. A pipeline stage without any of these layers knows the group, and has
    /// no items of it.
    pub layers: Range<u32>,
    /// Kinds of bytes: states of a slot; a draft page has keys and values.
    pub kinds: u8,
}

/// How an engine holds the cache.
#[derive(Debug, Clone)]
pub struct Engine {
    /// The number of tensor-parallel ranks of each stage.
    pub tp: u32,
    /// The number of ranks that hold the same pages and share the sending.
    pub cp: u32,
    /// The number of neighbouring tensor-parallel ranks that hold the pages of a request in turn.
    pub context: u32,
    /// The layers of the engine's pipeline stages, in order.
    pub stages: Vec<Range<u32>>,
    /// The number of tokens in a page.
    pub page_size: u32,
    /// The order of the dimensions of an item, outermost first.
    pub axes: Axes,
    /// The same for regions that hold values, if they differ.
    pub value_axes: Option<Axes>,
    /// True if heads of several bytes are in two regions, the first byte in one and the others in another.
    pub cuts_heads: bool,
    /// True if keys and values are in one region.
    pub packed: bool,
    /// The number of layers in one region.
    pub per_region: u32,
    /// The number of tokens in a draft page.
    pub draft_tokens: u32,
    /// Whether the engine has draft pages.
    pub drafts: Drafts,
}

/// What an engine has of the optional cache group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drafts {
    /// The engine has all draft pages of its layers.
    Held,
    /// The engine knows of the group, and has no pages of it.
    Empty,
    /// The engine does not know of the group.
    Unknown,
}

/// What has a numbering of its own: the pages, or the items of one cache group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// The pages of the KV cache.
    Kv,
    /// The items of the cache group with this number.
    Group(usize),
}

impl Unequal {
    /// Two engines of one model, drawn at random.
    pub(crate) fn draw(rng: &mut Rng) -> Unequal {
        let latent = rng.chance(250);
        let heads = if latent { 1 } else { rng.pick(&[1, 2, 4, 8]) };
        let layers = rng.pick(&[1, 2, 2, 3, 3, 4]);
        let groups = [0, 1].map(|group| {
            let first = rng.below(u64::from(layers)) as u32;
            let end = first + 1 + rng.below(u64::from(layers - first)) as u32;
            let kinds = if group == DRAFTS { 2 } else { rng.pick(&[1, 1, 2]) };
            Group { heads: rng.pick(&[1, 2, 4, 4]), layers: first..end, kinds }
        });
        let mut engines = [0, 1].map(|_| Engine::draw(rng, latent, layers));
        let windows = rng.chance(300);
        if windows {
            engines.iter_mut().for_each(|engine| engine.drafts = Drafts::Held);
        }
        let atom = 1 + rng.below(2) as u32;
        // Draws of their own, so that the worlds are otherwise those of the seed.
        let mut more = rng.clone();
        let odd_heads = if latent || !more.chance(250) { heads } else { more.pick(&[1, 2, 4, 8]) };
        for engine in &mut engines {
            engine.cuts_heads = atom > 1 && more.chance(150);
        }
        // An end of the elements that one engine has in a region must not divide a pack of the other.
        let pack = if engines.iter().any(|engine| engine.cuts_heads) { 1 } else { atom };
        for engine in &mut engines {
            engine.reshape(&mut more, pack);
        }
        Unequal { layers, heads, odd_heads, latent, atom, groups, windows, engines }
    }

    pub(super) fn engine(&self, prefill: bool) -> &Engine {
        &self.engines[usize::from(!prefill)]
    }

    /// The number of tokens in a page of an engine.
    pub(crate) fn page_size(&self, prefill: bool) -> usize {
        self.engine(prefill).page_size as usize
    }

    /// The number of tokens in an item of a cache group; one for a slot.
    pub(crate) fn item_tokens(&self, prefill: bool, group: usize) -> usize {
        self.tokens_of(prefill, Lane::Group(group)) as usize
    }

    fn tokens_of(&self, prefill: bool, lane: Lane) -> u32 {
        match lane {
            Lane::Kv => self.engine(prefill).page_size,
            Lane::Group(DRAFTS) => self.engine(prefill).draft_tokens,
            Lane::Group(_) => 1,
        }
    }

    /// The layers of a rank's pipeline stage, of which its scheduler may announce the content.
    pub(crate) fn layers_of(&self, prefill: bool, rank: u32) -> Range<u32> {
        let engine = self.engine(prefill);
        engine.stages.get(engine.place(rank).stage as usize).cloned().unwrap_or(0..0)
    }

    /// True if a rank has items of a cache group.
    pub(crate) fn holds_group(&self, prefill: bool, rank: u32, group: usize) -> bool {
        !self.lane_layers(prefill, rank, Lane::Group(group)).is_empty()
    }

    /// The layers that a rank holds of a lane.
    fn lane_layers(&self, prefill: bool, rank: u32, lane: Lane) -> Range<u32> {
        let stage = self.layers_of(prefill, rank);
        match lane {
            Lane::Kv => stage,
            Lane::Group(DRAFTS) if self.engine(prefill).drafts != Drafts::Held => 0..0,
            Lane::Group(group) => {
                let layers = &self.groups[group].layers;
                stage.start.max(layers.start)..stage.end.min(layers.end)
            }
        }
    }
}

impl Engine {
    fn draw(rng: &mut Rng, latent: bool, layers: u32) -> Engine {
        let mut axes = [Axis::Layer, Axis::Part, Axis::Token, Axis::Head];
        rng.shuffle(&mut axes);
        let tp = rng.pick(&[1, 2, 4]);
        // Six ranks at most, before there is more than one of each: a world has enough to do with them.
        let most = if tp == 4 { 1 } else { layers.min(3) };
        let pp = rng.pick(&[1, 1, 2, 3]).min(most);
        Engine {
            tp,
            cp: 1,
            context: 1,
            stages: cut(rng, layers, pp),
            page_size: rng.pick(&[1, 2, 3, 4]),
            axes: Axes::new(axes),
            value_axes: None,
            cuts_heads: false,
            packed: !latent && rng.chance(500),
            per_region: rng.pick(&[1, layers, 2]).min(layers),
            draft_tokens: rng.pick(&[1, 2, 4]),
            drafts: rng.pick(&[Drafts::Held, Drafts::Held, Drafts::Held, Drafts::Empty, Drafts::Unknown]),
        }
    }

    /// In some engines, the elements of a head are apart, in packs of at most `most`, or values lie otherwise than
    /// keys.
    fn reshape(&mut self, rng: &mut Rng, most: u32) {
        let pack = rng.pick(&[1, most]);
        let mut spread = |axes: Axes| {
            let mut order = axes.order();
            rng.shuffle(&mut order);
            if rng.chance(300) { Axes::with_dim(order).packed(pack) } else { axes }
        };
        self.axes = spread(self.axes);
        let values = spread(self.axes);
        self.value_axes = Some(values).filter(|values| *values != self.axes);
    }

    /// The number of ranks. They are numbered stage by stage; within a stage, first come the ranks that are
    /// the first among those with the same pages, then the second ones, and so on.
    pub(crate) fn ranks(&self) -> usize {
        (self.tp * self.cp) as usize * self.stages.len()
    }
}

/// Cuts the layers into `stages` stages, evenly or not.
fn cut(rng: &mut Rng, layers: u32, stages: u32) -> Vec<Range<u32>> {
    let mut cuts: Vec<u32> = (1..layers).collect();
    rng.shuffle(&mut cuts);
    cuts.truncate(stages as usize - 1);
    cuts.extend([0, layers]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_all_sources_are_exactly_those_a_rank_holds() {
        for seed in 0..500 {
            let pair = drawn(seed);
            for dest in 0..pair.engines[1].ranks() as u32 {
                let sources = pair.sources(dest);
                assert_eq!(sources.iter().filter(|&&source| source == pair.aux_source(dest)).count(), 1);
                // Where pages are dealt, there are no groups.
                let dealt = pair.engines.iter().any(|engine| engine.context > 1);
                let lanes = [Lane::Kv, Lane::Group(0), Lane::Group(1)];
                for lane in lanes.into_iter().take(if dealt { 1 } else { 3 }) {
                    let has = |rank| pair.engines[0].drafts == Drafts::Held || rank != Lane::Group(DRAFTS);
                    let held: usize = pair.regions(false, dest, lane).iter().map(Vec::len).sum();
                    let pages = if lane == Lane::Kv { 7 } else { 1 };
                    let from = |source: u32| match lane {
                        Lane::Kv => pair.tokens_from((source, usize::MAX), (dest, 2..2 + pages)),
                        Lane::Group(_) => u64::from(pair.tokens_of(false, lane)),
                    };
                    let bytes = |&source: &u32| pair.bytes_per_token(lane, source, dest) * from(source);
                    let sent: u64 = sources.iter().map(bytes).sum();
                    assert_eq!(sent, if has(lane) { (held * pages) as u64 } else { 0 }, "seed {seed}");
                }
            }
        }
    }

    fn drawn(seed: u64) -> Unequal {
        Unequal::draw(&mut Rng::new(seed)).spread(&mut Rng::new(!seed), seed.is_multiple_of(2))
    }

    #[test]
    fn every_stage_has_a_layer_and_every_layer_a_stage() {
        let [mut uneven, mut shared, mut dealt] = [0; 3];
        for seed in 0..500 {
            let pair = drawn(seed);
            for engine in &pair.engines {
                let layers: Vec<u32> = engine.stages.iter().cloned().flatten().collect();
                assert!(layers.into_iter().eq(0..pair.layers), "seed {seed}");
                assert!(engine.stages.iter().all(|stage| !stage.is_empty()) && engine.ranks() <= 8);
            }
            uneven += usize::from(pair.engines[0].stages.len() != pair.engines[1].stages.len());
            shared += usize::from(pair.engines[0].cp > 1);
            dealt += usize::from(pair.engines[0].context != pair.engines[1].context);
        }
        assert!(uneven > 100, "{uneven} pairs with other numbers of stages");
        assert!(shared > 50 && dealt > 10, "{shared} pairs with shared pages, {dealt} with dealt ones");
    }
}
