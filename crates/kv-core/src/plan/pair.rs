//! Two regions that share bytes: the pattern of ranges that repeats from unit to unit.

use crate::layout::{Geometry, Loop, Loops, Overlap, Steps};
use crate::transport::Descriptor;

use super::segment::Segment;

/// What a region here and a region at the peer share, as nested loops: over rows (layers, parts, heads
/// and elements that are not contiguous), over the units of pages, over tokens, with one contiguous block
/// in the middle.
///
/// A unit is the largest number of tokens that divides the pages of both sides. Loops that are
/// contiguous on both sides are folded into the block when the pair is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) local: u32,
    pub(super) remote: u32,
    /// Bytes of the block, contiguous on both sides.
    pub(super) block: u64,
    /// Tokens of a unit; 1 if they are contiguous.
    pub(super) tokens: u32,
    local_token: u64,
    remote_token: u64,
    pub(super) rows: u64,
    /// The loops that could not be folded into the block.
    dims: [Loop; 5],
    here: Steps,
    there: Steps,
}

impl Steps {
    fn offset(&self, unit: u32) -> u64 {
        if self.per_item == 1 {
            return self.base + u64::from(unit) * self.item;
        }
        let (item, within) = (unit / self.per_item, unit % self.per_item);
        self.base + u64::from(item) * self.item + u64::from(within) * self.step
    }

    /// How many units from `unit` on are contiguous, if each is one block.
    fn together(&self, unit: u32, block: u64) -> u32 {
        let within = self.per_item == 1 || self.step == block;
        if within && self.item == u64::from(self.per_item) * block {
            u32::MAX
        } else if within {
            self.per_item - unit % self.per_item
        } else {
            1
        }
    }
}

impl Pair {
    /// Items of `item_len` bytes that are equal on both sides, whatever they hold.
    pub(super) fn whole(local: u32, remote: u32, item_len: u64) -> Pair {
        let units = Steps { base: 0, item: item_len, per_item: 1, step: item_len };
        Pair {
            local,
            remote,
            block: item_len,
            tokens: 1,
            local_token: 0,
            remote_token: 0,
            rows: 1,
            dims: [Loop::ONCE; 5],
            here: units,
            there: units,
        }
    }

    /// What the two regions of an overlap share, in units of `unit` tokens; `None` if they have no
    /// head in common. The geometries are valid and fit.
    pub(super) fn shared<'a>(
        ours: &'a Geometry,
        theirs: &'a Geometry,
        overlap: &Overlap,
        unit: u32,
    ) -> Option<Pair> {
        let region =
            |geometry: &'a Geometry, index: u32| Some((geometry, geometry.regions.get(index as usize)?));
        let (here, there) = (region(ours, overlap.local)?, region(theirs, overlap.remote)?);
        let loops = Loops::between(here, there, overlap, unit).ok()??;
        Some(Pair {
            local: overlap.local,
            remote: overlap.remote,
            block: loops.block,
            tokens: loops.tokens.count,
            local_token: loops.tokens.local,
            remote_token: loops.tokens.remote,
            rows: loops.row_count(),
            dims: loops.rows,
            here: loops.here,
            there: loops.there,
        })
    }

    /// True if any number of neighbouring units is one contiguous range.
    pub(super) fn is_linear(&self) -> bool {
        let endless = |units: &Steps| units.together(0, self.block) == u32::MAX;
        self.rows == 1 && self.tokens == 1 && endless(&self.here) && endless(&self.there)
    }

    /// Bytes of one unit, in all rows.
    pub(super) fn unit_len(&self) -> u64 {
        self.rows * u64::from(self.tokens) * self.block
    }

    /// The offsets at which a row starts, relative to the first row: here, and at the peer.
    pub(super) fn row(&self, mut row: u64) -> (u64, u64) {
        let (mut local, mut remote) = (0, 0);
        for dim in self.dims.iter().rev() {
            let index = row % u64::from(dim.count);
            row /= u64::from(dim.count);
            local += index * dim.local;
            remote += index * dim.remote;
        }
        (local, remote)
    }

    /// How many units of a segment, from `unit` on, are one contiguous range; 1 if even a single
    /// unit is several ranges, because its tokens are apart.
    pub(super) fn together(&self, segment: &Segment, unit: u32) -> u32 {
        if self.tokens > 1 {
            return 1;
        }
        let here = self.here.together(segment.local + unit, self.block);
        let there = self.there.together(segment.remote + unit, self.block);
        here.min(there).min(segment.len - unit)
    }

    /// The range that starts at a token of a unit of a segment, `len` bytes long.
    pub(super) fn descriptor(
        &self,
        row: (u64, u64),
        segment: &Segment,
        unit: u32,
        token: u32,
        len: u64,
    ) -> Descriptor {
        Descriptor {
            local_region: self.local,
            remote_region: self.remote,
            local_offset: row.0
                + self.here.offset(segment.local + unit)
                + u64::from(token) * self.local_token,
            remote_offset: row.1
                + self.there.offset(segment.remote + unit)
                + u64::from(token) * self.remote_token,
            len,
        }
    }

    /// The range after `descriptor` among the tokens of a unit.
    pub(super) fn next_token(&self, mut descriptor: Descriptor) -> Descriptor {
        descriptor.local_offset += self.local_token;
        descriptor.remote_offset += self.remote_token;
        descriptor
    }

    /// How many bytes of a range to hand out from `offset` on, if `budget` does not cover the rest:
    /// up to the end of a block, and less than a block only if the post is empty.
    pub(super) fn cut(&self, offset: u64, budget: u64, empty: bool) -> u64 {
        let end_of_block = (offset + budget) / self.block * self.block;
        match end_of_block.checked_sub(offset) {
            Some(whole) if whole > 0 => whole,
            _ if empty => budget,
            _ => 0,
        }
    }
}
