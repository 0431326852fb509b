//! Which byte of the model's cache each byte of an item is.

use std::ops::Range;

use kv_core::{Axis, Holds};

use super::name::Name;
use super::{Engine, Lane, Unequal};
use crate::kv::items::SLOTS;

/// The part of the cache that a region holds.
pub(super) struct Cell {
    pub(super) layers: Range<u32>,
    pub(super) holds: Holds,
    kinds: Range<u8>,
}

impl Unequal {
    /// The heads of a rank: its share of the model's heads, or one head that neighbouring ranks hold, too.
    pub(super) fn heads_of(&self, prefill: bool, rank: u32, lane: Lane) -> Range<u32> {
        let tp = self.engine(prefill).tp;
        let (heads, shared) = match lane {
            Lane::Kv => (self.heads, !self.latent),
            Lane::Group(group) => (self.groups[group].heads, true),
        };
        if !shared {
            return 0..1;
        }
        let first = rank % tp * heads / tp;
        first..first + (heads / tp).max(1)
    }

    /// What the regions of a rank hold, in the order of the regions.
    pub(super) fn cells(&self, prefill: bool, rank: u32, lane: Lane) -> Vec<Cell> {
        let engine = self.engine(prefill);
        let pair = |first: u8| match engine.packed {
            true => vec![(Holds::KeyValue, first..first + 2)],
            false => vec![(Holds::Key, first..first + 1), (Holds::Value, first + 1..first + 2)],
        };
        let kinds = match lane {
            Lane::Kv if self.latent => vec![(Holds::Latent, 0..1)],
            Lane::Kv => pair(0),
            Lane::Group(SLOTS) => {
                let states = 0..self.groups[SLOTS].kinds;
                states.map(|state| (Holds::State(state), 16 + state..17 + state)).collect()
            }
            Lane::Group(_) => pair(32),
        };
        let held = self.lane_layers(prefill, rank, lane);
        let starts = held.clone().step_by(engine.per_region as usize);
        let ranges = starts.map(|start| start..(start + engine.per_region).min(held.end));
        ranges
            .flat_map(|layers| kinds.iter().cloned().map(move |kind| (layers.clone(), kind)))
            .map(|(layers, (holds, kinds))| Cell { layers, holds, kinds })
            .collect()
    }

    /// For each region of a lane of a rank, the name of each byte of an item.
    pub(crate) fn regions(&self, prefill: bool, rank: u32, lane: Lane) -> Vec<Vec<Name>> {
        let heads = self.heads_of(prefill, rank, lane);
        let tokens = self.tokens_of(prefill, lane);
        let names = |cell: &Cell| self.names(self.engine(prefill), cell, tokens, heads.clone());
        self.cells(prefill, rank, lane).iter().map(names).collect()
    }

    fn names(&self, engine: &Engine, cell: &Cell, tokens: u32, heads: Range<u32>) -> Vec<Name> {
        let extents = engine.axes.map(|axis| match axis {
            Axis::Layer => cell.layers.len() as u32,
            Axis::Part => cell.kinds.len() as u32,
            Axis::Token => tokens,
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
                    Axis::Part => name.kind = cell.kinds.start + index as u8,
                    Axis::Token => name.token = index as u8,
                    Axis::Head => name.head = (heads.start + index) as u8,
                }
            }
            names.extend((0..self.atom as u8).map(|byte| Name { byte, ..name }));
        }
        names
    }
}
