//! Which regions here and at one peer share bytes, and how the pages of both are counted.

use std::ops::Range;
use std::sync::Arc;

use super::error::{PlanError, Side};
use super::pair::Pair;
use crate::groups::CacheGroupSpan;
use crate::layout::RegionRole;
use crate::layout::{Geometry, Overlap, gcd, holders, overlaps, shares};
use crate::meter::each;

/// Which bytes here correspond to which bytes at one peer. Made once for each peer, and cheap to
/// clone.
#[derive(Debug, Clone)]
pub struct RegionMap {
    pub(super) kv: Lane,
    pub(super) aux: Arc<[Pair]>,
    pub(super) aux_rows: (u32, u32),
    pub(super) groups: Arc<[Lane]>,
}

/// Regions whose items are indexed by the same numbers.
#[derive(Debug, Clone)]
pub(super) struct Lane {
    pub(super) pairs: Arc<[Pair]>,
    pub(super) local: Items,
    pub(super) remote: Items,
}

/// The items of a lane on one side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Items {
    pub(super) count: u32,
    /// How many tokens an item holds.
    pub(super) tokens: u32,
    /// How many units an item holds; a unit is the largest number of tokens that divides the items
    /// of both sides.
    pub(super) units: u32,
    /// To how many ranks the items of a request are dealt in turn, and this rank's place among
    /// them.
    pub(super) cycle: u32,
    pub(super) place: u32,
}

impl RegionMap {
    /// Matches all bytes that the regions of two workers share. Both geometries must be valid, and
    /// must fit. Heads that several ranks hold are matched with each of these ranks; see
    /// [`directed`](RegionMap::directed).
    pub fn new(ours: &Geometry, theirs: &Geometry) -> Result<RegionMap, PlanError> {
        RegionMap::build(ours, theirs, None, None)
    }

    /// As [`new`](RegionMap::new), without the bytes that another rank of the `source` side's
    /// engine sends: heads and latents that several ranks hold come from one of them. Two ranks
    /// that exchange nothing have an [empty](RegionMap::is_empty) map.
    pub fn directed(ours: &Geometry, theirs: &Geometry, source: Side) -> Result<RegionMap, PlanError> {
        RegionMap::build(ours, theirs, Some(source), None)
    }

    /// As [`directed`](RegionMap::directed), with the KV of these layers only: those that have been
    /// computed.
    pub fn layers(
        ours: &Geometry,
        theirs: &Geometry,
        source: Side,
        layers: Range<u32>,
    ) -> Result<RegionMap, PlanError> {
        RegionMap::build(ours, theirs, Some(source), Some(layers))
    }

    /// The same map with the KV of these layers only, made anew from the two geometries of this
    /// map, with this side as the source of [`directed`](RegionMap::directed).
    pub(crate) fn of_layers(&self, ours: &Geometry, theirs: &Geometry, layers: Range<u32>) -> RegionMap {
        let pairing = Pairing::new(ours, theirs, Some(Side::Local), Some(layers));
        RegionMap { kv: pairing.lane(RegionRole::Kv, 0), ..self.clone() }
    }

    fn build(
        ours: &Geometry,
        theirs: &Geometry,
        source: Option<Side>,
        layers: Option<Range<u32>>,
    ) -> Result<RegionMap, PlanError> {
        let invalid = |side| move |error| PlanError::Invalid { side, error };
        ours.validate().map_err(invalid(Side::Local))?;
        theirs.validate().map_err(invalid(Side::Remote))?;
        ours.check(theirs)?;
        // Layers are a part of the KV only: the cache groups stay whole.
        let whole = Pairing::new(ours, theirs, source, None);
        let pairing = Pairing::new(ours, theirs, source, layers);
        let rows = |geometry: &Geometry| geometry.aux_rows().unwrap_or(0);
        let groups = ours.layout.groups.len().max(theirs.layout.groups.len()).max(1);
        let aux = ours.aux_regions().zip(theirs.aux_regions());
        Ok(RegionMap {
            kv: pairing.lane(RegionRole::Kv, 0),
            aux: aux
                .map(|(here, there)| Pair::whole(here as u32, there as u32, ours.regions[here].item_len))
                .collect(),
            aux_rows: (rows(ours), rows(theirs)),
            groups: (0_u16..).take(groups).map(|group| whole.lane(RegionRole::State, group)).collect(),
        })
    }

    /// True if the two ranks exchange no byte of pages or state.
    pub fn is_empty(&self) -> bool {
        self.kv.pairs.is_empty() && self.groups.iter().all(|lane| lane.pairs.is_empty())
    }

    /// True if the two ranks exchange bytes of this cache group.
    pub fn has_group(&self, group: u16) -> bool {
        self.groups.get(usize::from(group)).is_some_and(|lane| !lane.pairs.is_empty())
    }

    /// True if the `source` side's items of a cache group include all items that the other side
    /// wants. Both lists must end with the same token, as far as whole items can tell, and the
    /// source's list must begin no later than in the first item of the other list.
    pub fn covers(&self, group: u16, sent: CacheGroupSpan, wanted: CacheGroupSpan, source: Side) -> bool {
        let Some(lane) = self.groups.get(usize::from(group)) else { return false };
        let (from, to) = match source {
            Side::Local => (lane.local, lane.remote),
            Side::Remote => (lane.remote, lane.local),
        };
        let range = |span: CacheGroupSpan, items: Items| {
            let (first, units) = (u64::from(span.first), u64::from(items.units));
            // Item numbers are u32, and so are the units of an item.
            (first * units, (first + u64::from(span.len)).saturating_mul(units), units)
        };
        let (sent, to_fill) = (range(sent, from), range(wanted, to));
        // The last item of each side holds one token at least.
        let ends = sent.1 < to_fill.1.saturating_add(sent.2) && to_fill.1 < sent.1.saturating_add(to_fill.2);
        ends && (wanted.len == 0 || sent.0 < to_fill.0.saturating_add(to_fill.2))
    }

    /// The most pages that are needed here for the tokens of `peer_pages` pages of the peer. Of the
    /// last page only a part may be used, and under context parallelism other ranks may have fewer
    /// pages.
    pub fn local_pages(&self, peer_pages: usize) -> usize {
        convert(peer_pages, &self.kv.remote, &self.kv.local)
    }

    /// True if page *i* of a request here holds the tokens of page *i* at the peer.
    pub fn same_pages(&self) -> bool {
        let (here, there) = (self.kv.local, self.kv.remote);
        (here.units, here.cycle) == (there.units, there.cycle)
    }

    /// Checks that these numbers of pages can hold the same tokens.
    pub fn check_counts(&self, local: usize, remote: usize) -> Result<(), PlanError> {
        // Fewest and most units of so many pages: the last page may hold one token only. Under context
        // parallelism the next pages of the request may lie on other ranks.
        let tokens = |pages: usize, items: &Items| {
            let units = u64::from(items.units);
            let before = pages.checked_sub(1).map(|last| (last as u64).saturating_mul(items.cycle.into()));
            let fewest = before.map_or(0, |before| {
                before.saturating_add(items.place.into()).saturating_mul(units).saturating_add(1)
            });
            (fewest, items.whole_pages(pages).saturating_mul(units))
        };
        let (here, there) = (tokens(local, &self.kv.local), tokens(remote, &self.kv.remote));
        if here.0 <= there.1 && there.0 <= here.1 {
            Ok(())
        } else {
            Err(PlanError::PageCount { local, remote })
        }
    }
}

fn convert(pages: usize, from: &Items, to: &Items) -> usize {
    if (from.units, from.cycle, from.place) == (to.units, to.cycle, to.place) {
        return pages;
    }
    let units = from.whole_pages(pages).saturating_mul(from.units.into());
    let whole = units.div_ceil(to.units.max(1).into());
    let there = whole.saturating_sub(to.place.into()).div_ceil(to.cycle.max(1).into());
    usize::try_from(there).unwrap_or(usize::MAX)
}

impl Items {
    /// The most pages that a request can have on all ranks together, if it has `pages` pages on
    /// this rank.
    fn whole_pages(&self, pages: usize) -> u64 {
        (pages as u64).saturating_mul(self.cycle.into()).saturating_add(self.place.into())
    }
}

/// Two geometries that fit.
struct Pairing<'a> {
    ours: &'a Geometry,
    theirs: &'a Geometry,
    source: Option<Side>,
    layers: Option<Range<u32>>,
    /// True if items go with items at the same position, as they are.
    same: bool,
}

impl<'a> Pairing<'a> {
    fn new(
        ours: &'a Geometry,
        theirs: &'a Geometry,
        source: Option<Side>,
        layers: Option<Range<u32>>,
    ) -> Pairing<'a> {
        // Items that hold more layers can be cut only if their regions say where the layers are.
        let cut = layers.is_some() && ours.kv_layers().is_some() && theirs.kv_layers().is_some();
        Pairing { ours, theirs, source, layers, same: !cut && ours.is_same_shape(theirs) }
    }

    fn lane(&self, role: RegionRole, group: u16) -> Lane {
        if self.same {
            return self.same_lane(role, group);
        }
        let tokens = |geometry: &Geometry| match role {
            RegionRole::State => {
                let group = geometry.layout.groups.get(usize::from(group));
                group.map_or((1, 1), |group| (group.page_size, group.page_size))
            }
            _ => (geometry.page_size, geometry.kernel_page_size()),
        };
        let (here, there) = (tokens(self.ours), tokens(self.theirs));
        let unit = gcd(here.1, there.1);
        let shared = overlaps(holders(self.ours, role, group), holders(self.theirs, role, group));
        let pairs = each(&shared)
            .filter(|overlap| self.is_sent(overlap))
            .filter_map(|overlap| self.narrowed(overlap, role))
            .filter_map(|overlap| Pair::shared(self.ours, self.theirs, &overlap, unit));
        Lane {
            pairs: pairs.collect(),
            local: items(self.ours, role, group, here.0, unit),
            remote: items(self.theirs, role, group, there.0, unit),
        }
    }

    fn same_lane(&self, role: RegionRole, group: u16) -> Lane {
        let regions = (0_u32..).zip(each(&self.ours.regions));
        let elsewhere = role == RegionRole::State && self.source_cp_rank() > 0;
        let regions = regions.filter(|_| !elsewhere);
        let of_lane = regions.filter(|(_, region)| region.role == role && region.group == group);
        let wanted = of_lane.filter(|(_, region)| match &self.layers {
            Some(wanted) if role == RegionRole::Kv => {
                let held = region.layer_range();
                !held.is_empty() && wanted.start <= held.start && held.end <= wanted.end
            }
            _ => true,
        });
        let tokens = self.ours.page_size;
        Lane {
            pairs: wanted.map(|(index, region)| Pair::whole(index, index, region.item_len)).collect(),
            local: items(self.ours, role, group, tokens, tokens),
            remote: items(self.theirs, role, group, tokens, tokens),
        }
    }

    /// The place of the source among ranks that hold the same pages. The first rank sends state and aux rows.
    fn source_cp_rank(&self) -> u32 {
        match self.source {
            None => 0,
            Some(Side::Local) => self.ours.parallel.pcp_rank,
            Some(Side::Remote) => self.theirs.parallel.pcp_rank,
        }
    }

    fn is_sent(&self, overlap: &Overlap) -> bool {
        let (source, dest, index) = match self.source {
            None => return true,
            Some(Side::Local) => (self.ours, self.theirs, overlap.local),
            Some(Side::Remote) => (self.theirs, self.ours, overlap.remote),
        };
        let Some(region) = source.regions.get(index as usize) else { return false };
        shares(source, dest).is_some_and(|shares| shares.sends(source, region))
    }

    fn narrowed(&self, overlap: &Overlap, role: RegionRole) -> Option<Overlap> {
        let mut overlap = overlap.clone();
        if let Some(layers) = self.layers.as_ref().filter(|_| role == RegionRole::Kv) {
            overlap.layers.0 = overlap.layers.0.max(layers.start);
            overlap.layers.1 = overlap.layers.1.min(layers.end);
        }
        (overlap.layers.0 < overlap.layers.1).then_some(overlap)
    }
}

fn items(geometry: &Geometry, role: RegionRole, group: u16, tokens: u32, unit: u32) -> Items {
    let of_lane = each(&geometry.regions).filter(|region| region.role == role && region.group == group);
    let count = match role {
        RegionRole::Kv => geometry.num_pages,
        _ => of_lane.map(|region| u32::try_from(region.items()).unwrap_or(u32::MAX)).min().unwrap_or(0),
    };
    let (cycle, place) = match role {
        RegionRole::Kv => (geometry.layout.dcp_size, geometry.layout.dcp_rank),
        _ => (1, 0),
    };
    Items { count, tokens, units: tokens / unit.max(1), cycle, place }
}
