//! What two regions share, as nested loops around one contiguous block.

use super::axes::Axis;
use super::cells::{Inside, Overlap};
use super::{Geometry, RegionShape};

/// What a region here and a region at the peer share in one unit of tokens: rows (layers, parts,
/// heads and elements that are not contiguous), in each row tokens, and of each token one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Loops {
    /// Bytes of the block, contiguous on both sides.
    pub(crate) block: u64,
    /// The loop over tokens; once if they are contiguous.
    pub(crate) tokens: Loop,
    /// The loops that make the rows, outermost first.
    pub(crate) rows: [Loop; 5],
    /// The items of this side.
    pub(crate) here: Steps,
    /// The items of the peer.
    pub(crate) there: Steps,
    /// True if the elements of one head are not one range on both sides.
    pub(crate) split: bool,
}

/// How the units of tokens of one side follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Steps {
    /// The first byte in an item that both sides hold.
    pub(crate) base: u64,
    /// Bytes of an item, and how many units it has.
    pub(crate) item: u64,
    pub(crate) per_item: u32,
    /// Bytes from unit to unit within an item.
    pub(crate) step: u64,
}

/// A loop with the distances in bytes between its steps, here and at the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Loop {
    pub(crate) count: u32,
    pub(crate) local: u64,
    pub(crate) remote: u64,
}

impl Loop {
    pub(crate) const ONCE: Loop = Loop { count: 1, local: 0, remote: 0 };
}

/// The packs of two sides do not divide one another, or an end of the elements divides a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unaligned;

/// The elements that both sides hold of a head, as loops over packs.
struct Elements {
    block: u64,
    packs: [Loop; 2],
    base: (u64, u64),
}

impl Loops {
    /// What the two regions of an overlap share of `unit` tokens; `None` if they have no head in common.
    /// The geometries are valid, and the bytes of heads and elements are equal.
    pub(crate) fn between(
        (ours, our_region): (&Geometry, &RegionShape),
        (theirs, their_region): (&Geometry, &RegionShape),
        overlap: &Overlap,
        unit: u32,
    ) -> Result<Option<Loops>, Unaligned> {
        let (here, there) = (ours.inside(our_region), theirs.inside(their_region));
        let (layers, kinds) = (overlap.layers, overlap.kinds);
        let heads = (here.heads.0.max(there.heads.0), here.heads.1.min(there.heads.1));
        let elements = Elements::between(&here, &there, overlap.elements)?;
        let Some(head_count) = heads.1.checked_sub(heads.0).filter(|count| *count > 0) else {
            return Ok(None);
        };
        let along = |axis, count| Loop { count, local: here.stride(axis), remote: there.stride(axis) };
        let [packs, inner] = elements.packs;
        let mut loops = [
            along(Axis::Layer, layers.1 - layers.0),
            along(Axis::Part, kinds.1 - kinds.0),
            along(Axis::Head, head_count),
            packs,
            inner,
            along(Axis::Token, unit),
        ];
        // Fold what lies together, from the inside out.
        let mut block = elements.block;
        let together =
            |step: &&mut Loop, block| step.count > 1 && step.local == block && step.remote == block;
        while let Some(step) = loops.iter_mut().find(|step| together(step, block)) {
            block *= u64::from(step.count);
            step.count = 1;
        }
        let [outer @ .., tokens] = loops;
        let mut rows = [Loop::ONCE; 5];
        for (row, unfolded) in rows.iter_mut().zip(outer.into_iter().filter(|step| step.count > 1)) {
            *row = unfolded;
        }
        let steps = |inside: &Inside, tokens: u32, within: u64| Steps {
            base: inside.offset(layers.0, kinds.0, heads.0) + within,
            item: inside.item,
            per_item: tokens / unit.max(1),
            step: inside.stride(Axis::Token) * u64::from(unit),
        };
        let (our_tokens, their_tokens) = (ours.tokens_of(our_region), theirs.tokens_of(their_region));
        let (ours, theirs) =
            (steps(&here, our_tokens, elements.base.0), steps(&there, their_tokens, elements.base.1));
        let split = outer[3].count > 1 || outer[4].count > 1;
        Ok(Some(Loops { block, tokens, rows, here: ours, there: theirs, split }))
    }

    /// How many rows there are.
    pub(crate) fn row_count(&self) -> u64 {
        self.rows.iter().fold(1, |count, row| count.saturating_mul(row.count.into()))
    }
}

impl Elements {
    fn between(here: &Inside, there: &Inside, (start, end): (u32, u32)) -> Result<Elements, Unaligned> {
        let whole = |inside: &Inside| inside.pack.is_none() && inside.elements == (start, end);
        if whole(here) && whole(there) {
            return Ok(Elements { block: here.atom, packs: [Loop::ONCE; 2], base: (0, 0) });
        }
        let element = here.element().ok_or(Unaligned)?;
        let count = end - start;
        let pack = |inside: &Inside| inside.pack.unwrap_or(count).max(1);
        let (small, large) = (pack(here).min(pack(there)), pack(here).max(pack(there)));
        let aligned = |inside: &Inside| {
            inside.pack.is_none_or(|pack| (start - inside.elements.0).is_multiple_of(pack.max(1)))
        };
        if !large.is_multiple_of(small) || !count.is_multiple_of(large) || !aligned(here) || !aligned(there) {
            return Err(Unaligned);
        }
        // The distance between elements that are `apart`: within a pack, or whole packs.
        let distance = |inside: &Inside, apart: u32| match inside.pack {
            Some(pack) if apart >= pack => u64::from(apart / pack.max(1)) * inside.stride(Axis::Dim),
            _ => u64::from(apart) * element,
        };
        let along =
            |count, apart| Loop { count, local: distance(here, apart), remote: distance(there, apart) };
        let before = |inside: &Inside| distance(inside, start - inside.elements.0);
        Ok(Elements {
            block: u64::from(small) * element,
            packs: [along(count / large, large), along(large / small, small)],
            base: (before(here), before(there)),
        })
    }
}
