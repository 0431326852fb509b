//! Which byte of the model's cache each byte of an item is.

use std::ops::Range;

use kv_core::layout::Axes;
use kv_core::{Axis, Holds};

use super::name::Name;
use super::{Lane, Unequal};
use crate::kv::items::SLOTS;

/// The part of the cache that a region holds.
pub(super) struct Cell {
    pub(super) layers: Range<u32>,
    pub(super) holds: Holds,
    /// The bytes of each head.
    pub(super) elements: Range<u32>,
    /// The axes of the region, if they are not those of the engine.
    pub(super) axes: Option<Axes>,
    kinds: Range<u8>,
}

impl Unequal {
    /// The heads of a rank in a layer: its share of the model's heads, or one head that neighbouring ranks
    /// hold, too.
    pub(super) fn heads_of(&self, prefill: bool, rank: u32, lane: Lane, layer: u32) -> Range<u32> {
        let tp = self.engine(prefill).tp;
        let (heads, shared) = match lane {
            Lane::Kv => (self.heads_in(layer), !self.latent),
            Lane::Group(group) => (self.groups[group].heads, true),
        };
        if !shared {
            return 0..1;
        }
        let first = rank % tp * heads / tp;
        first..first + (heads / tp).max(1)
    }

    /// The KV heads that the model has in a layer.
    pub(super) fn heads_in(&self, layer: u32) -> u32 {
        if layer.is_multiple_of(2) { self.heads } else { self.odd_heads }
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
        // The layers of a region have the same heads.
        let per_region = if self.odd_heads == self.heads { engine.per_region } else { 1 };
        let starts = held.clone().step_by(per_region as usize);
        let ranges = starts.map(|start| start..(start + per_region).min(held.end));
        let cuts = if engine.cuts_heads { &[0, 1, self.atom][..] } else { &[0, self.atom] };
        let elements: Vec<_> = cuts.windows(2).map(|cut| cut[0]..cut[1]).collect();
        let mut cells = Vec::new();
        for layers in ranges {
            for (holds, kinds) in &kinds {
                let axes = engine.value_axes.filter(|_| *holds == Holds::Value);
                cells.extend(elements.iter().map(|elements| Cell {
                    layers: layers.clone(),
                    holds: *holds,
                    elements: elements.clone(),
                    axes,
                    kinds: kinds.clone(),
                }));
            }
        }
        cells
    }

    /// For each region of a lane of a rank, the name of each byte of an item.
    pub(crate) fn regions(&self, prefill: bool, rank: u32, lane: Lane) -> Vec<Vec<Name>> {
        let tokens = self.tokens_of(prefill, lane);
        let names = |cell: &Cell| {
            let heads = self.heads_of(prefill, rank, lane, cell.layers.start);
            names(cell.axes.unwrap_or(self.engine(prefill).axes), cell, tokens, heads)
        };
        self.cells(prefill, rank, lane).iter().map(names).collect()
    }
}

fn names(axes: Axes, cell: &Cell, tokens: u32, heads: Range<u32>) -> Vec<Name> {
    let bytes = cell.elements.len() as u32;
    let pack = if axes.dim_is_innermost() { bytes } else { axes.pack() };
    let extents = axes.order().map(|axis| match axis {
        Axis::Layer => cell.layers.len() as u32,
        Axis::Part => cell.kinds.len() as u32,
        Axis::Token => tokens,
        Axis::Head => heads.len() as u32,
        Axis::Dim => bytes / pack,
    });
    let pieces: u32 = extents.iter().product();
    let mut names = Vec::with_capacity((pieces * pack) as usize);
    for piece in 0..pieces {
        let mut name = Name { kind: 0, layer: 0, token: 0, head: 0, byte: 0 };
        let mut rest = piece;
        for (axis, extent) in axes.order().into_iter().zip(extents).rev() {
            let index = rest % extent;
            rest /= extent;
            match axis {
                Axis::Layer => name.layer = (cell.layers.start + index) as u8,
                Axis::Part => name.kind = cell.kinds.start + index as u8,
                Axis::Token => name.token = index as u8,
                Axis::Head => name.head = (heads.start + index) as u8,
                Axis::Dim => name.byte = (cell.elements.start + index * pack) as u8,
            }
        }
        names.extend((0..pack as u8).map(|byte| Name { byte: name.byte + byte, ..name }));
    }
    names
}
