//! Which region holds which layers and which kinds of bytes, and where these lie inside an item.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

use super::axes::{Axes, Axis};
use super::shape::{CacheGroup, Holds};
use super::{Geometry, RegionShape};
use crate::layout::RegionRole;
use crate::meter::{each, step};

/// A region that says what it holds: some layers, some kinds of bytes of each, and of these all
/// elements of a head or some.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) region: u32,
    pub(crate) layers: Range<u32>,
    pub(crate) kinds: Range<u32>,
    pub(crate) elements: (u32, u32),
}

impl Holder {
    /// How many triples of a layer, a kind of bytes and an element of a head the region holds.
    pub(crate) fn cells(&self) -> u64 {
        let pairs = self.layers.len() as u64 * self.kinds.len() as u64;
        pairs.saturating_mul(u64::from(self.elements.1 - self.elements.0))
    }

    /// How many pairs of a layer and a kind of bytes the region holds something of.
    pub(crate) fn pairs(&self) -> u64 {
        self.layers.len() as u64 * self.kinds.len() as u64
    }
}

/// The layers, kinds of bytes and elements that a region here and a region at the peer both hold.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Overlap {
    pub(crate) local: u32,
    pub(crate) remote: u32,
    pub(crate) layers: (u32, u32),
    pub(crate) kinds: (u32, u32),
    pub(crate) elements: (u32, u32),
}

impl Overlap {
    /// How many triples of a layer, a kind of bytes and an element of a head both regions hold.
    pub(crate) fn cells(&self) -> u64 {
        let pairs = u64::from(self.layers.1 - self.layers.0) * u64::from(self.kinds.1 - self.kinds.0);
        pairs.saturating_mul(u64::from(self.elements.1 - self.elements.0))
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
    geometry: &Geometry,
    role: RegionRole,
    group: u16,
) -> impl Iterator<Item = Holder> + '_ {
    let of_role = (0_u32..).zip(each(&geometry.regions)).filter(move |(_, region)| {
        region.role == role && region.group == group && region.holds != Holds::Opaque
    });
    of_role.map(|(region, shape)| Holder {
        region,
        layers: shape.layer_range(),
        kinds: shape.holds.kinds(),
        elements: geometry.elements_of(shape),
    })
}

/// Two regions that hold the same bytes: their positions, and the first layer that both hold. State regions are
/// compared first, group by group.
pub(crate) fn held_twice(geometry: &Geometry) -> Option<(u32, u32, u32)> {
    let telling = (0_u32..).zip(each(&geometry.regions)).filter(|(_, region)| region.holds != Holds::Opaque);
    let telling: Vec<_> =
        telling.map(|(number, region)| (number, region, geometry.elements_of(region))).collect();
    let cuts = Cuts::of(telling.iter().map(|(_, region, elements)| (region.holds.kinds(), *elements)));
    let mut held = Vec::with_capacity(telling.len());
    for (number, region, elements) in telling {
        let of = (Reverse(region.role), region.group);
        for kind in region.holds.kinds() {
            for slice in cuts.slices(kind, elements) {
                held.push(((of, kind, slice.0), region.layer_range(), number));
            }
        }
    }
    step(held.len());
    held.sort_by_key(|(of, layers, number)| (*of, layers.start, *number));
    held.windows(2).find_map(|pair| {
        let ((of, before, first), (other, after, second)) = (&pair[0], &pair[1]);
        (of == other && before.end > after.start).then_some((*first, *second, after.start))
    })
}

/// Where the elements of heads begin or end in some region, by kind of bytes. Between two neighbouring
/// cuts, a region holds all elements or none.
struct Cuts(Vec<(u32, u32)>);

impl Cuts {
    fn of(held: impl Iterator<Item = (Range<u32>, (u32, u32))>) -> Cuts {
        let mut cuts = BTreeSet::new();
        let mut last = None;
        for (kinds, elements) in held {
            // Neighbouring regions are mostly alike.
            if last.replace((kinds.clone(), elements)) != Some((kinds.clone(), elements)) {
                cuts.extend(kinds.flat_map(|kind| [(kind, elements.0), (kind, elements.1)]));
            }
        }
        step(cuts.len());
        Cuts(cuts.into_iter().collect())
    }

    /// The parts into which the cuts divide a range of elements.
    fn slices(&self, kind: u32, elements: (u32, u32)) -> impl Iterator<Item = (u32, u32)> + '_ {
        let first = self.0.partition_point(|cut| *cut < (kind, elements.0));
        let cuts = self.0.get(first..).unwrap_or_default();
        let within = cuts.windows(2).take_while(move |pair| pair[1] <= (kind, elements.1));
        within.map(|pair| (pair[0].1, pair[1].1))
    }
}

/// One kind of bytes of a holder, between two neighbouring cuts.
struct Column {
    kind: u32,
    elements: (u32, u32),
    layers: Range<u32>,
    region: u32,
}

/// The columns, sorted by kind, element and then by layer.
fn columns(holders: &[Holder], cuts: &Cuts) -> Vec<Column> {
    let mut columns = Vec::with_capacity(holders.len());
    for Holder { region, layers, kinds, elements } in holders {
        for kind in kinds.clone() {
            for elements in cuts.slices(kind, *elements) {
                columns.push(Column { kind, elements, layers: layers.clone(), region: *region });
            }
        }
    }
    step(columns.len());
    columns.sort_by_key(|column| (column.kind, column.elements, column.layers.start, column.region));
    columns
}

/// The overlaps of the regions of two workers, sorted by local and then by remote region. On each
/// side, no two holders may hold the same.
pub(crate) fn overlaps(
    local: impl Iterator<Item = Holder>,
    remote: impl Iterator<Item = Holder>,
) -> Vec<Overlap> {
    let (local, remote): (Vec<Holder>, Vec<Holder>) = (local.collect(), remote.collect());
    let cuts = Cuts::of(local.iter().chain(&remote).map(|holder| (holder.kinds.clone(), holder.elements)));
    let (local, remote) = (columns(&local, &cuts), columns(&remote, &cuts));
    let mut shared: Vec<Overlap> = Vec::new();
    let (mut here, mut there) = (0, 0);
    while let (Some(ours), Some(theirs)) = (local.get(here), remote.get(there)) {
        step(1);
        let start = ours.layers.start.max(theirs.layers.start);
        let end = ours.layers.end.min(theirs.layers.end);
        if (ours.kind, ours.elements) == (theirs.kind, theirs.elements) && start < end {
            shared.push(Overlap {
                local: ours.region,
                remote: theirs.region,
                layers: (start, end),
                kinds: (ours.kind, ours.kind + 1),
                elements: ours.elements,
            });
        }
        let after = |column: &Column| (column.kind, column.elements, column.layers.end);
        if after(ours) <= after(theirs) {
            here += 1;
        } else {
            there += 1;
        }
    }
    step(shared.len());
    shared.sort_unstable();
    // Neighbouring elements of the same two regions become one overlap, and then keys and values.
    shared.dedup_by(|next, kept| {
        let same = (next.local, next.remote, next.layers, &next.kinds)
            == (kept.local, kept.remote, kept.layers, &kept.kinds);
        join(same, next.elements, &mut kept.elements)
    });
    shared.dedup_by(|next, kept| {
        let same = (next.local, next.remote, next.layers, &next.elements)
            == (kept.local, kept.remote, kept.layers, &kept.elements);
        join(same, next.kinds, &mut kept.kinds)
    });
    shared
}

/// Makes `kept` longer by the range after it; false if there is something between them.
fn join(same: bool, next: (u32, u32), kept: &mut (u32, u32)) -> bool {
    let joins = same && next.0 == kept.1;
    if joins {
        kept.1 = next.1;
    }
    joins
}

/// Where things lie inside the physical items of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inside {
    /// Bytes of a physical item.
    pub(crate) item: u64,
    /// Bytes of one head of one token of one part of one layer: of those elements that the region holds.
    pub(crate) atom: u64,
    /// The distance in bytes between neighbours along each [`Axis`].
    strides: [u64; 5],
    first_layer: u32,
    first_kind: u32,
    /// The heads on this rank, by their number in the model.
    pub(crate) heads: (u32, u32),
    /// The elements of a head, first and one past the last.
    pub(crate) elements: (u32, u32),
    /// How many neighbouring elements lie together; `None` for all.
    pub(crate) pack: Option<u32>,
}

impl Inside {
    pub(crate) fn stride(&self, axis: Axis) -> u64 {
        self.strides[axis as usize]
    }

    /// Bytes of one element of a head; `None` if the bytes of a head are not whole elements.
    pub(crate) fn element(&self) -> Option<u64> {
        let count = u64::from(self.elements.1 - self.elements.0).max(1);
        self.atom.is_multiple_of(count).then_some(self.atom / count)
    }

    /// Bytes from the start of an item to the given layer, kind and head, all of the first token and the
    /// first element.
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

    /// The heads that this rank holds of the region's layers, and those that the model has there.
    pub(crate) fn head_counts(&self, region: &RegionShape) -> (u32, u32) {
        match (region.form.heads, region.role, self.group(region)) {
            (Some(own), ..) => own,
            (None, RegionRole::State, Some(group)) => (group.heads, group.total_heads),
            _ => (self.kv_heads, self.total_kv_heads()),
        }
    }

    /// The heads of the region, first and one past the last, by their number in the model.
    pub(crate) fn heads_of(&self, region: &RegionShape) -> (u32, u32) {
        if region.holds.is_replicated() {
            return (0, 1);
        }
        let (heads, total) = self.head_counts(region);
        let start = first_head(total, self.replicas(), self.replica());
        (start, start + heads)
    }

    /// The elements of a whole head in the region's layers.
    pub(crate) fn head_dim_of(&self, region: &RegionShape) -> u32 {
        region.form.head_dim.unwrap_or(self.head_dim)
    }

    /// The elements of each head that the region holds, first and one past the last.
    pub(crate) fn elements_of(&self, region: &RegionShape) -> (u32, u32) {
        region.form.elements.unwrap_or((0, self.head_dim_of(region)))
    }

    /// The order of the axes in the region's items.
    pub fn axes_of(&self, region: &RegionShape) -> Axes {
        region.form.axes.unwrap_or(self.layout.axes)
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
        let (heads, elements, axes) = (self.heads_of(region), self.elements_of(region), self.axes_of(region));
        let mut extents = [region.layers, region.holds.parts(), self.tokens_of(region), heads.1 - heads.0, 1];
        let pieces: u64 = extents.into_iter().map(u64::from).product();
        let item = region.item_len / u64::from(self.ratio_of(region).max(1));
        let atom = item / pieces.max(1);
        let pack = (!axes.dim_is_innermost()).then_some(axes.pack());
        if let Some(pack) = pack {
            extents[Axis::Dim as usize] = ((elements.1 - elements.0) / pack.max(1)).max(1);
        }
        let mut strides = [0; 5];
        let mut stride = atom / u64::from(extents[Axis::Dim as usize]);
        for axis in axes.order().into_iter().rev() {
            strides[axis as usize] = stride;
            stride *= u64::from(extents[axis as usize]);
        }
        let first_kind = region.holds.kinds().start;
        let first_layer = region.layer.unwrap_or(0);
        Inside { item, atom, strides, first_layer, first_kind, heads, elements, pack }
    }
}

/// The first head of rank `rank` of `ranks` that share `total` heads. Each rank has an equal share;
/// if there are fewer heads than ranks, several ranks have the same head.
pub(crate) fn first_head(total: u32, ranks: u32, rank: u32) -> u32 {
    (u64::from(rank) * u64::from(total) / u64::from(ranks.max(1))) as u32
}
