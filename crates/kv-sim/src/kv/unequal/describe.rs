//! The arguments with which a rank describes its cache to its peers.

use kv_core::{CacheGroup, KvArgs, KvArgsBuilder, Layout, Parallel, Region, RegionRole};

use super::{Drafts, Lane, Unequal};
use crate::kv::items::{DRAFTS, SLOTS};
use crate::kv::memory::Memory;

impl Unequal {
    /// The description of a rank with this memory.
    pub(crate) fn describe(
        &self,
        prefill: bool,
        rank: u32,
        memory: &Memory,
        stateful: bool,
    ) -> KvArgsBuilder {
        let engine = self.engine(prefill);
        let pp_size = engine.stages.len() as u32;
        let place = engine.place(rank);
        let parallel = Parallel::default().with(|parallel| {
            parallel.tp_size = engine.tp;
            parallel.tp_rank = place.tp;
            parallel.pp_size = pp_size;
            parallel.pp_rank = place.stage;
            parallel.pcp_size = engine.cp;
            parallel.pcp_rank = place.cp;
        });
        let layout = Layout::default().with(|layout| {
            layout.axes = engine.axes;
            layout.dcp_size = engine.context;
            layout.dcp_rank = place.context;
            layout.total_kv_heads = if self.latent { 0 } else { self.heads };
            layout.stages = engine.stages.iter().map(|stage| (stage.start, stage.end)).collect();
            layout.groups = if stateful { self.groups_of(prefill, rank) } else { Vec::new() };
        });
        let mut builder = KvArgs::builder(if prefill { "p" } else { "d" }, rank)
            .pages(memory.pages.len() as u32, engine.page_size)
            .heads(self.heads_of(prefill, rank, Lane::Kv, 0).len() as u32, self.atom)
            .parallel(parallel)
            .layout(layout);
        let lanes = [Lane::Kv, Lane::Group(SLOTS), Lane::Group(DRAFTS)];
        let mut cells = lanes.map(|lane| self.cells(prefill, rank, lane).into_iter());
        for (number, region) in (1..).zip(memory.regions()) {
            let (len, item_len) = (region.bytes.len() as u64, region.item_len as u64);
            let shape = Region::dram(region.role, number << 20, len, item_len).group(region.group);
            let cell = match region.role {
                RegionRole::Kv => cells[0].next(),
                RegionRole::State => cells[1 + usize::from(region.group)].next(),
                _ => None,
            };
            let Some(cell) = cell else {
                builder = builder.region(shape);
                continue;
            };
            let layer = cell.layers.start;
            let mut shape = shape.layers(cell.layers).holds(cell.holds);
            if region.role == RegionRole::Kv && !self.latent && self.heads_in(layer) != self.heads {
                let here = self.heads_of(prefill, rank, Lane::Kv, layer).len() as u32;
                shape = shape.heads(here, self.heads_in(layer));
            }
            if cell.elements.len() as u32 != self.atom {
                shape = shape.elements(cell.elements);
            }
            builder = builder.region(match cell.axes {
                Some(axes) => shape.axes(axes),
                None => shape,
            });
        }
        builder
    }

    fn groups_of(&self, prefill: bool, rank: u32) -> Vec<CacheGroup> {
        let heads = |group: usize| {
            let here = self.heads_of(prefill, rank, Lane::Group(group), 0).len() as u32;
            (here, self.groups[group].heads)
        };
        let (here, total) = heads(SLOTS);
        let mut groups = vec![CacheGroup::slots(here, total)];
        if self.engine(prefill).drafts != Drafts::Unknown {
            let (here, total) = heads(DRAFTS);
            let tokens = self.tokens_of(prefill, Lane::Group(DRAFTS));
            let pages = CacheGroup::pages(tokens, here, total);
            groups.push(if self.windows { pages } else { pages.optional() });
        }
        groups
    }
}
