//! Pages × regions → descriptors: what a request's transfer is made of, in as few pieces as it can be.
//!
//! It is pure arithmetic, done in two steps. [`PagePlan`] finds, once for a list of pages, the
//! stretches that are contiguous on both sides. [`Plan`] walks them region by region, and hands out
//! descriptors in portions that fit a post. It is not a scheduler: who posts when is the protocol's
//! business.
//!
//! ```
//! use kv_core::plan::{PagePlan, Plan, RegionMap};
//! use kv_core::{KvArgs, PageList, Region, RegionRole};
//!
//! let args = KvArgs::builder("prefill-0", 0)
//!     .pages(64, 16)
//!     .region(Region::dram(RegionRole::Kv, 0x10_0000, 64 * 4096, 4096))
//!     .region(Region::dram(RegionRole::Kv, 0x20_0000, 64 * 4096, 4096))
//!     .build()?;
//! // Once for each peer, which here has the same geometry …
//! let map = RegionMap::new(args.geometry(), args.geometry())?;
//! // … once for each chunk: its pages here, and a part of those that the peer registered …
//! let chunk = PageList::from_pages([3, 4, 5, 6])?;
//! let registered = PageList::from_pages([0, 1, 40, 41, 42, 43])?;
//! let destination = registered.slice(2, 4).ok_or("the chunk is longer than the registration")?;
//! let mut plan = Plan::pages(&map, PagePlan::new(&chunk, &destination)?)?;
//! // … and once for each post.
//! let mut descs = Vec::new();
//! let progress = plan.fill(&mut descs, 1024, 8 << 20);
//! assert!(progress.done);
//! assert_eq!(descs.len(), 2);
//! assert_eq!((descs[1].local_region, descs[1].local_offset), (1, 3 * 4096));
//! assert_eq!((descs[1].remote_offset, descs[1].len), (40 * 4096, 4 * 4096));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::sync::Arc;

use crate::args::RegionRole;
use crate::error::{Mismatch, PagesError};
use crate::id::AuxIndex;
use crate::layout::{Geometry, GeometryError};
use crate::pages::{PageList, PageRun};
use crate::plane::Desc;

/// `len` items that are neighbours on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Position of the first in the list: how many items the segments before it hold.
    pub position: u32,
    /// The first item here.
    pub local: u32,
    /// The first item at the peer.
    pub remote: u32,
    /// How many items, at least one.
    pub len: u32,
}

/// Which page here goes with which page at the peer, as the longest possible segments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagePlan {
    segments: Vec<Segment>,
    local_end: u32,
    remote_end: u32,
    count: u32,
}

impl PagePlan {
    /// Matches page *i* of `local` with page *i* of `remote`.
    pub fn new(local: &PageList, remote: &PageList) -> Result<PagePlan, PlanError> {
        if local.len() != remote.len() {
            return Err(PlanError::PageCount { local: local.len(), remote: remote.len() });
        }
        let mut segments = Vec::with_capacity(local.runs().len().max(remote.runs().len()));
        let mut position = 0;
        let mut walk = (Walk::new(local), Walk::new(remote));
        // Neighbouring runs of a list never touch, so a segment that ends with a run of one of the
        // lists cannot go on in the next: no merging is needed.
        while let (Some(here), Some(there)) = (walk.0.rest, walk.1.rest) {
            let len = here.len.min(there.len);
            segments.push(Segment { position, local: here.start, remote: there.start, len });
            position += len;
            walk.0.advance(len);
            walk.1.advance(len);
        }
        Ok(PagePlan { segments, local_end: end(local), remote_end: end(remote), count: position })
    }

    /// The segments, in the order of the pages.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// How many pages.
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// True if there is no page.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// Which region here goes with which region at one peer. Made once for each peer, and cheap to
/// clone.
#[derive(Debug, Clone)]
pub struct RegionMap {
    kv: Arc<[Pair]>,
    aux: Arc<[Pair]>,
    local: Bounds,
    remote: Bounds,
}

/// Two regions whose items are the same bytes.
#[derive(Debug, Clone, Copy)]
struct Pair {
    local: u32,
    remote: u32,
    item_len: u64,
}

/// How many items each region of a role has at least.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    pages: u32,
    aux_rows: u32,
}

impl RegionMap {
    /// Matches the regions of two workers. Both geometries are validated, and must fit.
    pub fn new(ours: &Geometry, theirs: &Geometry) -> Result<RegionMap, PlanError> {
        let invalid = |side| move |error| PlanError::Invalid { side, error };
        ours.validate().map_err(invalid(Side::Local))?;
        theirs.validate().map_err(invalid(Side::Remote))?;
        ours.check(theirs)?;
        let pairs = |role| -> Arc<[Pair]> {
            // At equal parallel sizes the same position is the same region.
            let regions = (0_u32..).zip(&ours.regions).filter(|(_, region)| region.role == role);
            regions
                .map(|(index, region)| Pair { local: index, remote: index, item_len: region.item_len })
                .collect()
        };
        Ok(RegionMap {
            kv: pairs(RegionRole::Kv),
            aux: pairs(RegionRole::Aux),
            local: Bounds::of(ours),
            remote: Bounds::of(theirs),
        })
    }
}

impl Bounds {
    fn of(geometry: &Geometry) -> Bounds {
        Bounds { pages: geometry.num_pages, aux_rows: geometry.aux_rows().unwrap_or(0) }
    }
}

/// The descriptors of one transfer, not yet handed out: a cursor over regions × segments.
///
/// The order is region by region, and within a region that of the pages. A `Plan` that exists stays
/// inside the regions of both sides, so handing out needs no checks and cannot fail.
#[derive(Debug, Clone)]
pub struct Plan {
    pairs: Arc<[Pair]>,
    segments: Vec<Segment>,
    pair: usize,
    segment: usize,
    /// Bytes of the current segment that were handed out.
    offset: u64,
    bytes_left: u64,
}

/// What one [`Plan::fill`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Descriptors appended.
    pub descs: usize,
    /// Their bytes.
    pub bytes: u64,
    /// True if nothing is left.
    pub done: bool,
}

impl Plan {
    /// All KV regions of the pages.
    pub fn pages(map: &RegionMap, pages: PagePlan) -> Result<Plan, PlanError> {
        for (side, end, num_pages) in [
            (Side::Local, pages.local_end, map.local.pages),
            (Side::Remote, pages.remote_end, map.remote.pages),
        ] {
            if end > num_pages {
                let error = PagesError::OutOfRange { page: end - 1, num_pages };
                return Err(PlanError::Pages { side, error });
            }
        }
        Plan::new(&map.kv, pages.segments, pages.count)
    }

    /// All aux regions of one row: row `local` here, row `remote` at the peer.
    pub fn aux(map: &RegionMap, local: AuxIndex, remote: AuxIndex) -> Result<Plan, PlanError> {
        for (side, AuxIndex(row), rows) in
            [(Side::Local, local, map.local.aux_rows), (Side::Remote, remote, map.remote.aux_rows)]
        {
            if row >= rows {
                return Err(PlanError::Row { side, row, rows });
            }
        }
        Plan::new(&map.aux, vec![Segment { position: 0, local: local.0, remote: remote.0, len: 1 }], 1)
    }

    /// Every segment lies inside every region of the pairs: each region is, without overflow, as
    /// long as the items that its bound promises (`Geometry::validate`), and the callers have
    /// compared the segments with the bounds.
    fn new(pairs: &Arc<[Pair]>, segments: Vec<Segment>, items: u32) -> Result<Plan, PlanError> {
        // At most MAX_REGIONS × MAX_ITEM_LEN; but a list of pages may name a page often.
        let item_bytes: u64 = pairs.iter().map(|pair| pair.item_len).sum();
        let bytes_left =
            item_bytes.checked_mul(items.into()).ok_or(PlanError::TooLarge { items, item_bytes })?;
        Ok(Plan { pairs: Arc::clone(pairs), segments, pair: 0, segment: 0, offset: 0, bytes_left })
    }

    /// Bytes not yet handed out.
    pub fn bytes_left(&self) -> u64 {
        self.bytes_left
    }

    /// True if nothing is left.
    pub fn is_done(&self) -> bool {
        self.bytes_left == 0
    }

    /// Appends the next descriptors to those of a post, as many as fit: at most `max_descs`, of at
    /// most `max_bytes` together. What `out` holds already does not count.
    ///
    /// A piece that does not fit is cut at the end of an item (page, row). An item that alone is
    /// larger than `max_bytes` is cut within, but only at the start of a post: if `out` is empty.
    /// So an empty `out` gets at least one descriptor, unless a bound is zero or nothing is left.
    pub fn fill(&mut self, out: &mut Vec<Desc>, max_descs: usize, max_bytes: u64) -> Progress {
        let before = out.len();
        let mut slots = max_descs;
        let mut budget = max_bytes;
        while let Some(&pair) = self.pairs.get(self.pair) {
            if self.offset == 0 {
                let whole = self.whole_segments(slots, budget / pair.item_len);
                out.extend(whole.iter().map(|segment| pair.desc(segment)));
                budget -= pair.item_len * items(whole);
                slots -= whole.len();
                self.segment += whole.len();
            }
            let Some(segment) = self.segments.get(self.segment) else {
                self.segment = 0;
                self.pair += 1;
                continue;
            };
            let Desc { local_offset, remote_offset, len, .. } = pair.desc(segment);
            let rest = len - self.offset;
            let part = if rest <= budget { rest } else { pair.cut(self.offset, budget, out.is_empty()) };
            if slots == 0 || part == 0 {
                break;
            }
            out.push(Desc {
                local_region: pair.local,
                remote_region: pair.remote,
                local_offset: local_offset + self.offset,
                remote_offset: remote_offset + self.offset,
                len: part,
            });
            slots -= 1;
            budget -= part;
            self.offset += part;
            if self.offset == len {
                self.offset = 0;
                self.segment += 1;
            }
        }
        let bytes = max_bytes - budget;
        self.bytes_left -= bytes;
        Progress { descs: out.len() - before, bytes, done: self.is_done() }
    }

    /// The next segments, as many as fit whole.
    fn whole_segments(&self, max_segments: usize, max_items: u64) -> &[Segment] {
        let rest = self.segments.get(self.segment..).unwrap_or_default();
        let rest = rest.get(..max_segments).unwrap_or(rest);
        let start = rest.first().map_or(0, |segment| segment.position);
        let fits =
            |segment: &Segment| u64::from(segment.position - start) + u64::from(segment.len) <= max_items;
        rest.get(..rest.partition_point(fits)).unwrap_or_default()
    }
}

impl Pair {
    fn desc(&self, segment: &Segment) -> Desc {
        Desc {
            local_region: self.local,
            remote_region: self.remote,
            local_offset: u64::from(segment.local) * self.item_len,
            remote_offset: u64::from(segment.remote) * self.item_len,
            len: u64::from(segment.len) * self.item_len,
        }
    }

    /// How much of a segment to hand out from `offset` on if `budget` does not cover the rest: up
    /// to the end of an item, and within an item only if the post is empty.
    fn cut(&self, offset: u64, budget: u64, empty: bool) -> u64 {
        let end_of_item = (offset + budget) / self.item_len * self.item_len;
        match end_of_item.checked_sub(offset) {
            Some(whole) if whole > 0 => whole,
            _ if empty => budget,
            _ => 0,
        }
    }
}

/// How many items some neighbouring segments hold.
fn items(segments: &[Segment]) -> u64 {
    match (segments.first(), segments.last()) {
        (Some(first), Some(last)) => u64::from(last.position - first.position) + u64::from(last.len),
        _ => 0,
    }
}

/// The first number beyond all pages of a list.
fn end(list: &PageList) -> u32 {
    list.runs().iter().map(|run| run.end()).max().unwrap_or(0)
}

/// A walk along the runs of a list, in steps that may end within a run.
struct Walk<'a> {
    rest: Option<PageRun>,
    runs: std::slice::Iter<'a, PageRun>,
}

impl<'a> Walk<'a> {
    fn new(list: &'a PageList) -> Walk<'a> {
        let mut runs = list.runs().iter();
        Walk { rest: runs.next().copied(), runs }
    }

    /// Goes on by `len` pages, at most to the end of the run.
    fn advance(&mut self, len: u32) {
        self.rest = match self.rest {
            Some(run) if len < run.len => Some(PageRun { start: run.start + len, len: run.len - len }),
            _ => self.runs.next().copied(),
        };
    }
}

/// Which side of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// This worker.
    Local,
    /// The peer.
    Remote,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Side::Local => "local",
            Side::Remote => "remote",
        })
    }
}

/// Why a transfer cannot be planned. Nothing was planned, and nothing needs to be undone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A geometry that no worker can have. Do not talk to such a peer.
    #[error("the {side} geometry is not valid: {error}")]
    Invalid {
        /// Whose.
        side: Side,
        /// What is wrong with it.
        error: GeometryError,
    },
    /// The geometries do not fit. Configure both engines alike.
    #[error(transparent)]
    Incompatible(#[from] Mismatch),
    /// The lists of pages differ in length: one of the sides counts its pages wrongly.
    #[error("{local} local pages cannot be matched with {remote} remote pages")]
    PageCount {
        /// Pages here.
        local: usize,
        /// Pages at the peer.
        remote: usize,
    },
    /// A page that the cache of that side does not have.
    #[error("{side} pages: {error}")]
    Pages {
        /// Whose.
        side: Side,
        /// Which page, and how many there are.
        error: PagesError,
    },
    /// An aux row that not all aux regions of that side have.
    #[error("{side} aux row {row} is out of range: there are {rows} rows")]
    Row {
        /// Whose.
        side: Side,
        /// The row.
        row: u32,
        /// How many there are; none if there is no aux region.
        rows: u32,
    },
    /// More bytes than a number can count: the list names pages many times.
    #[error("{items} pages of {item_bytes} bytes are more than one transfer can be")]
    TooLarge {
        /// How many pages.
        items: u32,
        /// Bytes of each, in all regions.
        item_bytes: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{KvArgs, MAX_REGIONS, Region};
    use crate::layout::RegionShape;

    /// `kv` regions of `num_pages` pages, of 8, 16, 24 … bytes, and aux regions of 4 and of 2 rows.
    fn geometry(kv: u64, num_pages: u32) -> Geometry {
        let mut builder = KvArgs::builder("e", 0)
            .pages(num_pages, 16)
            .region(Region::dram(RegionRole::Aux, 0x10, 40, 10))
            .region(Region::dram(RegionRole::Aux, 0x80, 40, 20));
        for region in 1..=kv {
            let item_len = 8 * region;
            builder = builder.region(Region::dram(
                RegionRole::Kv,
                region << 32,
                u64::from(num_pages) * item_len,
                item_len,
            ));
        }
        builder.build().unwrap().geometry().clone()
    }

    fn list(pages: &[u32]) -> PageList {
        PageList::from_pages(pages.iter().copied()).unwrap()
    }

    fn plan(map: &RegionMap, local: &[u32], remote: &[u32]) -> Result<Plan, PlanError> {
        Plan::pages(map, PagePlan::new(&list(local), &list(remote))?)
    }

    fn all(mut plan: Plan) -> Vec<Desc> {
        let mut descs = Vec::new();
        assert!(plan.fill(&mut descs, usize::MAX, u64::MAX).done);
        descs
    }

    #[test]
    fn segments_end_where_either_side_jumps() {
        let pages = PagePlan::new(&list(&[5, 6, 7, 8, 1]), &list(&[0, 1, 9, 10, 11])).unwrap();
        let segment = |position, local, remote, len| Segment { position, local, remote, len };
        assert_eq!(pages.segments(), [segment(0, 5, 0, 2), segment(2, 7, 9, 2), segment(4, 1, 11, 1)]);
        assert_eq!(pages.len(), 5);
    }

    /// Block ids and the order of the descriptors made of them, as vLLM 0.33.0 computes them for
    /// three regions of ten blocks: number of the region × 10 + block. The second row has two
    /// groups of layers, whose blocks follow each other.
    #[test]
    fn descriptors_come_in_the_order_that_vllm_numbers_them() {
        let rows: [(&[u32], &[u64]); 2] = [
            (&[5, 2, 9], &[5, 2, 9, 15, 12, 19, 25, 22, 29]),
            (&[5, 2, 7], &[5, 2, 7, 15, 12, 17, 25, 22, 27]),
        ];
        let map = RegionMap::new(&geometry(3, 10), &geometry(3, 10)).unwrap();
        for (blocks, expected) in rows {
            let descs = all(plan(&map, blocks, &[0, 1, 2]).unwrap());
            let ids = descs.iter().map(|desc| {
                let item_len = 8 * (u64::from(desc.local_region) + 1);
                assert_eq!((desc.local_offset % item_len, desc.len), (0, item_len));
                u64::from(desc.local_region) * 10 + desc.local_offset / item_len
            });
            assert_eq!(ids.collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn contiguous_pages_make_one_descriptor_for_each_region() {
        let map = RegionMap::new(&geometry(160, 10), &geometry(160, 20)).unwrap();
        let descs = all(plan(&map, &[2, 3, 4, 5], &[16, 17, 18, 19]).unwrap());
        assert_eq!(descs.len(), 160);
        let last = Desc {
            local_region: 159,
            remote_region: 159,
            local_offset: 2 * 1280,
            remote_offset: 16 * 1280,
            len: 4 * 1280,
        };
        assert_eq!(descs[159], last);
    }

    #[test]
    fn a_post_ends_with_a_whole_page_and_only_larger_pages_are_cut_within() {
        // Pages of 8 and of 16 bytes.
        let map = RegionMap::new(&geometry(2, 10), &geometry(2, 10)).unwrap();
        let lens = |max_bytes| {
            let mut plan = plan(&map, &[0, 1, 2], &[4, 5, 6]).unwrap();
            let mut posts = Vec::new();
            while !plan.is_done() {
                let mut descs = Vec::new();
                assert!(plan.fill(&mut descs, 10, max_bytes).descs > 0);
                posts.push(descs.iter().map(|desc| desc.len).collect::<Vec<_>>());
            }
            posts
        };
        assert_eq!(lens(72), [vec![24, 48]]);
        assert_eq!(lens(45), [vec![24, 16], vec![32]]);
        assert_eq!(lens(20), [vec![16], vec![8], vec![16], vec![16], vec![16]]);
        assert_eq!(
            lens(12),
            [vec![8], vec![8], vec![8], vec![12], vec![4], vec![12], vec![4], vec![12], vec![4]]
        );
    }

    #[test]
    fn a_page_is_not_cut_to_fill_up_a_post_that_another_plan_began() {
        let map = RegionMap::new(&geometry(1, 10), &geometry(1, 10)).unwrap();
        let mut descs = all(plan(&map, &[0], &[0]).unwrap());
        let mut next = plan(&map, &[5], &[7]).unwrap();
        assert_eq!(next.fill(&mut descs, 10, 7), Progress { descs: 0, bytes: 0, done: false });
        assert_eq!(next.fill(&mut descs, 10, 8), Progress { descs: 1, bytes: 8, done: true });
    }

    #[test]
    fn a_bound_of_zero_hands_out_nothing_and_an_empty_plan_is_done() {
        let map = RegionMap::new(&geometry(2, 10), &geometry(2, 10)).unwrap();
        let mut some = plan(&map, &[1], &[2]).unwrap();
        let mut descs = Vec::new();
        let nothing = Progress { descs: 0, bytes: 0, done: false };
        assert_eq!(some.fill(&mut descs, 0, 100), nothing);
        assert_eq!(some.fill(&mut descs, 100, 0), nothing);
        assert_eq!(some.bytes_left(), 24);
        let mut empty = plan(&map, &[], &[]).unwrap();
        assert!(empty.is_done());
        assert_eq!(empty.fill(&mut descs, 100, 100), Progress { done: true, ..nothing });
        assert!(descs.is_empty());
    }

    #[test]
    fn one_row_of_every_aux_region_goes_with_the_aux_plan() {
        let map = RegionMap::new(&geometry(1, 10), &geometry(1, 10)).unwrap();
        let descs = all(Plan::aux(&map, AuxIndex(1), AuxIndex(0)).unwrap());
        let desc = |region, local_offset, len| Desc {
            local_region: region,
            remote_region: region,
            local_offset,
            remote_offset: 0,
            len,
        };
        assert_eq!(descs, [desc(1, 10, 10), desc(2, 20, 20)]);
        // The second region has two rows only.
        let row = |side| PlanError::Row { side, row: 2, rows: 2 };
        assert_eq!(Plan::aux(&map, AuxIndex(2), AuxIndex(0)).unwrap_err(), row(Side::Local));
        assert_eq!(Plan::aux(&map, AuxIndex(0), AuxIndex(2)).unwrap_err(), row(Side::Remote));
    }

    #[test]
    fn what_cannot_be_planned_is_refused_with_its_side_and_values() {
        let map = RegionMap::new(&geometry(1, 10), &geometry(1, 12)).unwrap();
        let error = |local, remote| plan(&map, local, remote).unwrap_err();
        assert_eq!(error(&[1, 2], &[3]), PlanError::PageCount { local: 2, remote: 1 });
        let out = |side, page, num_pages| {
            let error = PagesError::OutOfRange { page, num_pages };
            PlanError::Pages { side, error }
        };
        assert_eq!(error(&[10, 1], &[10, 11]), out(Side::Local, 10, 10));
        assert_eq!(error(&[9, 8], &[12, 3]), out(Side::Remote, 12, 12));
        assert_eq!(error(&[u32::MAX - 1], &[0]), out(Side::Local, u32::MAX - 1, 10));

        let mut other = geometry(1, 10);
        other.page_size = 32;
        let other = RegionMap::new(&geometry(1, 10), &other).unwrap_err();
        assert_eq!(other.to_string(), "page_size differs: 16 here, 32 at the peer");
        let mut hostile = geometry(1, 10);
        hostile.regions[0].item_len = 0;
        let hostile = RegionMap::new(&geometry(1, 10), &hostile).unwrap_err();
        assert!(matches!(hostile, PlanError::Invalid { side: Side::Remote, .. }));
    }

    #[test]
    fn more_bytes_than_can_be_counted_are_refused_not_wrapped() {
        // As many bytes a page as a valid geometry can have: 2^52, so 2^12 pages are 2^64 bytes.
        let mut huge = geometry(1, 1);
        let region = RegionShape { len: 1 << 40, item_len: 1 << 40, ..huge.regions[0].clone() };
        huge.regions = vec![region; MAX_REGIONS];
        let map = RegionMap::new(&huge, &huge).unwrap();
        let plan = |times| {
            let often = PageList::from_pages(std::iter::repeat_n(0, times)).unwrap();
            Plan::pages(&map, PagePlan::new(&often, &often).unwrap())
        };
        assert_eq!(plan(4095).unwrap().bytes_left(), 4095 << 52);
        assert_eq!(plan(4096).unwrap_err(), PlanError::TooLarge { items: 4096, item_bytes: 1 << 52 });
    }
}
