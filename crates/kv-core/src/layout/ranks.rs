//! Which ranks exchange bytes when both engines have several ranks.
//!
//! Both sides compute the same answer from the same geometries, so that each side knows how many
//! completions to wait for. The rules are those of vLLM and SGLang: a tensor-parallel rank of the
//! smaller engine belongs to a block of neighbouring ranks of the larger engine, and shares all its
//! heads with that block. A destination whose source block is larger reads every head once, from
//! the first rank of the block that has the head. The other ranks of the block are only told that
//! they are released.
//!
//! Context parallelism comes in two kinds. Prefill-context-parallel ranks
//! ([`Parallel::pcp_size`](crate::Parallel::pcp_size)) hold the same pages. All of them are sources
//! of a destination, which asks each for a [range](crate::Parallel::page_range) of the pages; state
//! and aux rows come from the first rank. Decode-context-parallel ranks
//! ([`Layout::dcp_size`](super::Layout::dcp_size)) are dealt the pages in turn. A rank then has
//! pages in common with those ranks of the other engine whose numbers are congruent.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

use super::cells::{first_head, holders, overlaps};
use super::shape::Holds;
use super::{Geometry, RegionShape};
use crate::error::Mismatch;
use crate::layout::{Parallel, RegionRole};
use crate::meter::each;

/// A rank of the source engine with which a destination rank has to speak: the source rank sends bytes, or
/// only waits for the destination's message that its pages may be used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The position of the rank in the list that was given.
    pub index: usize,
    /// True if bytes of pages or state come from this rank. False if the rank only waits to be
    /// released.
    pub bytes: bool,
    /// True for exactly one of the sources: the rank whose aux row counts. That rank is on the last
    /// pipeline stage, where the first token is sampled.
    pub aux: bool,
}

/// The ranks of `engine` (one data-parallel replica) from which rank `dest` gets its cache, in the
/// order of the list. Fails if the geometries do not fit, or if the ranks together do not hold
/// every layer that `dest` has.
///
/// ```
/// use kv_core::layout::{Geometry, NHD, sources};
/// use kv_core::{Holds, KvArgs, Parallel, Region, RegionRole};
///
/// // A model with 4 heads of 8 bytes, 1 layer, on engines of any size.
/// let rank = |tp_size: u32, tp_rank: u32| -> Result<Geometry, kv_core::ArgsError> {
///     let item_len = 16 * 8 * u64::from(4 / tp_size);
///     let region = Region::dram(RegionRole::Kv, 0x1000, 10 * item_len, item_len).layer(0);
///     let args = KvArgs::builder("engine", tp_rank)
///         .pages(10, 16)
///         .heads(4 / tp_size, 8)
///         .parallel(Parallel::default().with(|group| (group.tp_size, group.tp_rank) = (tp_size, tp_rank)))
///         .region(region.holds(Holds::Key))
///         .build()?;
///     Ok(args.geometry().clone())
/// };
/// let prefill = [rank(4, 0)?, rank(4, 1)?, rank(4, 2)?, rank(4, 3)?];
/// let found = sources(&rank(2, 1)?, &prefill)?;
/// assert_eq!(found.iter().map(|source| source.index).collect::<Vec<_>>(), [2, 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn sources<G: Borrow<Geometry>>(dest: &Geometry, engine: &[G]) -> Result<Vec<Source>, Mismatch> {
    let mut found = Vec::new();
    let mut covered = 0;
    let mut stages: BTreeMap<u32, (Place, BTreeSet<(u32, u32)>)> = BTreeMap::new();
    for (index, source) in each(engine).map(Borrow::borrow).enumerate() {
        let Some(shares) = Place::of(source).shares(&Place::of(dest)) else { continue };
        dest.check(source)?;
        found.push(Source { index, bytes: shares.any_bytes(source, dest), aux: false });
        let Parallel { tp_rank, pp_rank, pcp_rank, .. } = source.parallel;
        if !stages.contains_key(&pp_rank) {
            covered += shared_cells(source, dest);
        }
        let here = Place::of(source);
        let (place, ranks) = stages.entry(pp_rank).or_insert_with(|| (here, BTreeSet::new()));
        // A rank that counts its siblings differently has another part than they leave to it.
        if here.sizes() == place.sizes() {
            ranks.insert((tp_rank, pcp_rank));
        }
    }
    let last = found.iter_mut().rev().max_by_key(|source| {
        let Some(geometry) = engine.get(source.index).map(Borrow::borrow) else { return (0, 0, 0) };
        let Parallel { tp_rank, pp_rank, pcp_rank, .. } = geometry.parallel;
        (pp_rank, u32::MAX - tp_rank, u32::MAX - pcp_rank)
    });
    let Some(last) = last else {
        return Err(nobody(dest, engine));
    };
    last.aux = true;
    // Each rank of the stage has a part that no other rank sends.
    for (stage, (place, ranks)) in stages {
        let needed = place.siblings_that_serve(&Place::of(dest));
        if ranks.len() != needed {
            let field = format!("ranks of stage {stage}");
            return Err(Mismatch { field, ours: needed.to_string(), theirs: ranks.len().to_string() });
        }
    }
    let wanted: u64 = holders(dest, RegionRole::Kv, 0).map(|holder| holder.cells()).sum();
    if covered != wanted { Err(nobody(dest, engine)) } else { Ok(found) }
}

/// How many ranks of `engine` (one data-parallel replica) rank `source` has to serve: the number of
/// completions for which `source` waits before it frees the pages of a request.
pub fn consumers(source: &Geometry, engine: &[Geometry]) -> usize {
    let source = Place::of(source);
    engine.iter().filter(|dest| source.shares(&Place::of(dest)).is_some()).count()
}

/// How many ranks of the engine of `dest` the rank `source` has to serve: the number that [`consumers`]
/// computes, from the geometry of one rank of that engine instead of all. For engines of several pipeline
/// stages the answer needs [`Layout::stages`].
///
/// [`Layout::stages`]: super::Layout::stages
pub fn receivers_of(source: &Geometry, dest: &Geometry) -> usize {
    let source = Place::of(source);
    let own = Place::of(dest);
    let stages = dest.parallel.pp_size.max(1);
    let mut count = 0;
    for stage in 0..stages {
        let layers = match dest.layout.stages.get(stage as usize) {
            Some(&layers) => Some(layers),
            None if stage == own.pp_rank => own.layers,
            // Unknown: then the same stage of the other engine is meant.
            None => None,
        };
        let siblings = Place { pp_rank: stage, layers, ..own }.siblings();
        count += siblings.filter(|sibling| source.shares(sibling).is_some()).count();
    }
    count * own.pcp_size as usize
}

/// The part that a source rank has for a destination rank; `None` if they exchange nothing.
pub(crate) fn shares(source: &Geometry, dest: &Geometry) -> Option<Shares> {
    Place::of(source).shares(&Place::of(dest))
}

/// The source's place in the block of ranks with which the destination shares all its heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shares {
    /// Ranks of the source engine that hold different heads.
    replicas: u32,
    /// The place of the source among those ranks.
    replica: u32,
    /// The first rank of the block.
    first: u32,
    /// The place of the source among the ranks that hold the same pages.
    pcp_rank: u32,
}

impl Shares {
    /// True if the source sends its bytes of a region: a rank before it in the block may have the
    /// same heads.
    pub(crate) fn sends(self, source: &Geometry, region: &RegionShape) -> bool {
        // The context-parallel ranks share out pages, but not state.
        if self.pcp_rank > 0 && region.role == RegionRole::State {
            return false;
        }
        if self.replica == self.first {
            return true;
        }
        if region.role == RegionRole::State && source.group(region).is_none() {
            return false;
        }
        let (_, total) = source.head_counts(region);
        let head = |replica| first_head(total, self.replicas, replica);
        !region.holds.is_replicated() && head(self.replica) != head(self.replica - 1)
    }

    fn any_bytes(self, source: &Geometry, dest: &Geometry) -> bool {
        let opaque =
            |geometry: &Geometry| each(&geometry.regions).all(|region| region.holds == Holds::Opaque);
        if opaque(source) || opaque(dest) {
            return true;
        }
        let sends = |region: u32| {
            source.regions.get(region as usize).is_some_and(|region| self.sends(source, region))
        };
        let groups = source.layout.groups.len() as u16;
        let roles = (0..groups).map(|group| (RegionRole::State, group)).chain([(RegionRole::Kv, 0)]);
        roles.into_iter().any(|(role, group)| {
            let shared = overlaps(holders(source, role, group), holders(dest, role, group));
            shared.iter().any(|overlap| sends(overlap.local))
        })
    }
}

/// A rank's place in its engine.
#[derive(Debug, Clone, Copy)]
struct Place {
    tp_size: u32,
    tp_rank: u32,
    pp_size: u32,
    pp_rank: u32,
    dcp_size: u32,
    dcp_rank: u32,
    pcp_size: u32,
    pcp_rank: u32,
    /// The layers of the rank's KV regions, if they all say their layers.
    layers: Option<(u32, u32)>,
}

impl Place {
    fn of(geometry: &Geometry) -> Place {
        Place {
            tp_size: geometry.parallel.tp_size.max(1),
            tp_rank: geometry.parallel.tp_rank,
            pp_size: geometry.parallel.pp_size,
            pp_rank: geometry.parallel.pp_rank,
            dcp_size: geometry.layout.dcp_size.max(1),
            dcp_rank: geometry.layout.dcp_rank,
            pcp_size: geometry.parallel.pcp_size.max(1),
            pcp_rank: geometry.parallel.pcp_rank,
            layers: geometry.kv_layers(),
        }
    }

    /// What the ranks of a stage have in common.
    fn sizes(&self) -> [u32; 3] {
        [self.tp_size, self.dcp_size, self.pcp_size]
    }

    /// The places of all ranks of this rank's tensor-parallel group.
    fn siblings(self) -> impl Iterator<Item = Place> {
        let sibling = move |tp_rank| Place { tp_rank, dcp_rank: tp_rank % self.dcp_size, ..self };
        each(0..self.tp_size).map(sibling)
    }

    /// How many ranks of this rank's stage have something for `dest`.
    fn siblings_that_serve(self, dest: &Place) -> usize {
        let serving = self.siblings().filter(|sibling| sibling.shares(dest).is_some()).count();
        serving * self.pcp_size as usize
    }

    fn shares(&self, dest: &Place) -> Option<Shares> {
        let same_layers = match (self.layers, dest.layers) {
            (Some(here), Some(there)) => here.0 < there.1 && there.0 < here.1,
            _ => self.pp_size == dest.pp_size && self.pp_rank == dest.pp_rank,
        };
        let cycle = gcd(self.dcp_size, dest.dcp_size);
        if !same_layers || self.dcp_rank % cycle != dest.dcp_rank % cycle {
            return None;
        }
        let replica = |place: &Place| (place.tp_rank / place.dcp_size, place.tp_size / place.dcp_size);
        let ((here, ours), (there, theirs)) = (replica(self), replica(dest));
        let (ours, theirs) = (ours.max(1), theirs.max(1));
        let first = first_head(ours, theirs, there);
        let end = first + if ours > theirs { ours / theirs } else { 1 };
        let shares = Shares { replicas: ours, replica: here, first, pcp_rank: self.pcp_rank };
        (first..end).contains(&here).then_some(shares)
    }
}

impl Geometry {
    /// The layers of the KV regions, as (first, one past the last); `None` unless all KV regions
    /// say their layers.
    pub fn kv_layers(&self) -> Option<(u32, u32)> {
        let kv = each(&self.regions).filter(|region| region.role == RegionRole::Kv);
        let mut hull: Option<(u32, u32)> = None;
        for region in kv {
            if region.holds == Holds::Opaque {
                return None;
            }
            let layers = region.layer_range();
            hull = Some(match hull {
                Some((start, end)) => (start.min(layers.start), end.max(layers.end)),
                None => (layers.start, layers.end),
            });
        }
        hull
    }
}

/// How many pairs of a layer and a kind of bytes both geometries have.
fn shared_cells(source: &Geometry, dest: &Geometry) -> u64 {
    let kv = |geometry| holders(geometry, RegionRole::Kv, 0);
    overlaps(kv(source), kv(dest)).iter().map(super::Overlap::cells).sum()
}

/// Why the ranks of `engine` do not have everything that `dest` needs.
fn nobody<G: Borrow<Geometry>>(dest: &Geometry, engine: &[G]) -> Mismatch {
    // A rank that does not fit is the better explanation.
    if let Some(mismatch) = engine.iter().find_map(|source| dest.check(source.borrow()).err()) {
        return mismatch;
    }
    let text = |layers: Option<(u32, u32)>| {
        layers.map_or_else(|| "not told".to_owned(), |(start, end)| format!("{start}..{end}"))
    };
    let all = engine.iter().filter_map(|source| source.borrow().kv_layers());
    let theirs = all.reduce(|all, one| (all.0.min(one.0), all.1.max(one.1)));
    Mismatch { field: "layers".to_owned(), ours: text(dest.kv_layers()), theirs: text(theirs) }
}

pub(crate) fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a.max(1) } else { gcd(b, a % b) }
}
