//! Which region holds which layers and which kinds of bytes, and where these lie inside an item.

use std::cmp::Reverse;
use std::ops::Range;

use super::shape::{Axis, CacheGroup, Holds};
use super::{Geometry, RegionShape};
use crate::layout::RegionRole;
use crate::meter::{each, step};

/// A region that says what it holds: some layers, and some kinds of bytes of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) region: u32,
    pub(crate) layers: Range<u32>,
    pub(crate) kinds: Range<u32>,
}

impl Holder {
    /// How many pairs of a layer and a kind of bytes the region holds.
    pub(crate) fn cells(&self) -> u64 {
        self.layers.len() as u64 * self.kinds.len() as u64
    }
}

/// The layers and kinds of bytes that a region here and a region at the peer both hold.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Overlap {
    pub(crate) local: u32,
    pub(crate) remote: u32,
    pub(crate) layers: (u32, u32),
    pub(crate) kinds: (u32, u32),
}

impl Overlap {
    /// How many pairs of a layer and a kind of bytes both regions hold.
    pub(crate) fn cells(&self) -> u64 {
        u64::from(self.layers.1 - self.layers.0) * u64::from(self.kinds.1 - self.kinds.0)
    }
}

impl RegionShape {
    /// The layers of the region; empty if the region does not say its layers.
    pub fn layer_range(&self) -> Range<u32> {
        self.layer.map_or(0..0, |first| first..first.saturating_add(self.layers))
    }
}

/// The regions of a role (and, for state, of a group) that say what they hold.
pub(crate) fn holders(
    regions: &[RegionShape],
    role: RegionRole,
    group: u16,
) -> impl Iterator<Item = Holder> + '_ {
    let of_role = (0_u32..).zip(each(regions)).filter(move |(_, region)| {
        region.role == role && region.group == group && region.holds != Holds::Opaque
    });
    of_role.map(|(region, shape)| Holder { region, layers: shape.layer_range(), kinds: shape.holds.kinds() })
}

/// Two regions that hold the same bytes: their positions, and the first layer that both hold. State regions are
/// compared first, group by group.
pub(crate) fn held_twice(regions: &[RegionShape]) -> Option<(u32, u32, u32)> {
    let telling = (0_u32..).zip(each(regions)).filter(|(_, region)| region.holds != Holds::Opaque);
    let mut held: Vec<_> = telling
        .flat_map(|(number, region)| {
            let of = (Reverse(region.role), region.group);
            region.holds.kinds().map(move |kind| ((of, kind), region.layer_range(), number))
        })
        .collect();
    step(held.len());
    held.sort_by_key(|(of, layers, number)| (*of, layers.start, *number));
    held.windows(2).find_map(|pair| {
        let ((of, before, first), (other, after, second)) = (&pair[0], &pair[1]);
        (of == other && before.end > after.start).then_some((*first, *second, after.start))
    })
}

/// One kind of bytes of a holder.
struct Column {
    kind: u32,
    layers: Range<u32>,
    region: u32,
}

/// The columns, sorted by kind and then by layer.
fn columns(holders: impl Iterator<Item = Holder>) -> Vec<Column> {
    let mut columns: Vec<Column> = holders
        .flat_map(|Holder { region, layers, kinds }| {
            kinds.map(move |kind| Column { kind, layers: layers.clone(), region })
        })
        .collect();
    step(columns.len());
    columns.sort_by_key(|column| (column.kind, column.layers.start, column.region));
    columns
}

/// The overlaps of the regions of two workers, sorted by local and then by remote region. On each
/// side, no two holders may hold the same.
pub(crate) fn overlaps(
    local: impl Iterator<Item = Holder>,
    remote: impl Iterator<Item = Holder>,
) -> Vec<Overlap> {
    let (local, remote) = (columns(local), columns(remote));
    let mut shared: Vec<Overlap> = Vec::new();
    let (mut here, mut there) = (0, 0);
    while let (Some(ours), Some(theirs)) = (local.get(here), remote.get(there)) {
        step(1);
        let start = ours.layers.start.max(theirs.layers.start);
        let end = ours.layers.end.min(theirs.layers.end);
        if ours.kind == theirs.kind && start < end {
            let kinds = (ours.kind, ours.kind + 1);
            shared.push(Overlap { local: ours.region, remote: theirs.region, layers: (start, end), kinds });
        }
        if (ours.kind, ours.layers.end) <= (theirs.kind, theirs.layers.end) {
            here += 1;
        } else {
            there += 1;
        }
    }
    step(shared.len());
    shared.sort_unstable();
    // Keys and values of the same two regions become one overlap.
    shared.dedup_by(|next, kept| {
        let same = (next.local, next.remote, next.layers) == (kept.local, kept.remote, kept.layers);
        let joins = same && next.kinds.0 == kept.kinds.1;
        if joins {
            kept.kinds.1 = next.kinds.1;
        }
        joins
    });
    shared
}

/// Where things lie inside the physical items of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inside {
    /// Bytes of a physical item.
    pub(crate) item: u64,
    /// Bytes of one head of one token of one part of one layer.
    pub(crate) atom: u64,
    /// The distance in bytes between neighbours along each [`Axis`].
    strides: [u64; 4],
    first_layer: u32,
    first_kind: u32,
    /// The heads on this rank, by their number in the model.
    pub(crate) heads: (u32, u32),
}

impl Inside {
    pub(crate) fn stride(&self, axis: Axis) -> u64 {
        self.strides[axis as usize]
    }

    /// Bytes from the start of an item to the given layer, kind and head, all of the first token.
    pub(crate) fn offset(&self, layer: u32, kind: u32, head: u32) -> u64 {
        u64::from(layer - self.first_layer) * self.stride(Axis::Layer)
            + u64::from(kind - self.first_kind) * self.stride(Axis::Part)
            + u64::from(head - self.heads.0) * self.stride(Axis::Head)
    }
}

impl Geometry {
    /// The group that a state region belongs to.
    pub(crate) fn group(&self, region: &RegionShape) -> Option<&CacheGroup> {
        self.layout.groups.get(usize::from(region.group))
    }

    /// Tokens of a physical item of the region.
    pub(crate) fn tokens_of(&self, region: &RegionShape) -> u32 {
        match region.role {
            RegionRole::Kv => self.kernel_page_size(),
            RegionRole::Aux => 1,
            RegionRole::State => self.group(region).map_or(1, |group| group.page_size),
        }
    }

    /// How many physical items an item of the region is made of.
    pub(crate) fn ratio_of(&self, region: &RegionShape) -> u32 {
        match region.role {
            RegionRole::Kv => self.page_size / self.kernel_page_size().max(1),
            RegionRole::Aux | RegionRole::State => 1,
        }
    }

    /// The heads of the region, first and one past the last, by their number in the model.
    pub(crate) fn heads_of(&self, region: &RegionShape) -> (u32, u32) {
        let (heads, total) = match (region.role, self.group(region)) {
            (RegionRole::State, Some(group)) => (group.heads, group.total_heads),
            _ => (self.kv_heads, self.total_kv_heads()),
        };
        if region.holds.is_replicated() {
            return (0, 1);
        }
        let start = first_head(total, self.replicas(), self.replica());
        (start, start + heads)
    }

    /// How many ranks differ in the heads they hold. The ranks of a decode-context-parallel group
    /// hold the same heads.
    pub(crate) fn replicas(&self) -> u32 {
        (self.parallel.tp_size / self.layout.dcp_size.max(1)).max(1)
    }

    /// The place of this rank among those ranks.
    pub(crate) fn replica(&self) -> u32 {
        self.parallel.tp_rank / self.layout.dcp_size.max(1)
    }

    /// How the items of a region are built. The geometry must be valid, and the region not opaque.
    pub(crate) fn inside(&self, region: &RegionShape) -> Inside {
        let heads = self.heads_of(region);
        let extents = [region.layers, region.holds.parts(), self.tokens_of(region), heads.1 - heads.0];
        let pieces: u64 = extents.into_iter().map(u64::from).product();
        let item = region.item_len / u64::from(self.ratio_of(region).max(1));
        let atom = item / pieces.max(1);
        let mut strides = [0; 4];
        let mut stride = atom;
        for axis in self.layout.axes.into_iter().rev() {
            strides[axis as usize] = stride;
            stride *= u64::from(extents[axis as usize]);
        }
        let first_kind = region.holds.kinds().start;
        Inside { item, atom, strides, first_layer: region.layer.unwrap_or(0), first_kind, heads }
    }
}

/// The first head of rank `rank` of `ranks` that share `total` heads. Each rank has an equal share;
/// if there are fewer heads than ranks, several ranks have the same head.
pub(crate) fn first_head(total: u32, ranks: u32, rank: u32) -> u32 {
    (u64::from(rank) * u64::from(total) / u64::from(ranks.max(1))) as u32
}
