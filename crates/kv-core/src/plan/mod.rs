//! Pages × regions → descriptors: a request's transfer, in as few contiguous ranges as possible.
//!
//! Planning is pure arithmetic, in two steps. [`PagePlan`] finds, once for a list of pages, the
//! runs of pages that are contiguous on both sides. [`Plan`] walks these runs region by region, and
//! hands out descriptors in portions that fit a post. A plan is not a scheduler: the protocol
//! decides who posts when.
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
//! let mut descriptors = Vec::new();
//! let progress = plan.fill(&mut descriptors, 1024, 8 << 20);
//! assert!(progress.done);
//! assert_eq!(descriptors.len(), 2);
//! assert_eq!((descriptors[1].local_region, descriptors[1].local_offset), (1, 3 * 4096));
//! assert_eq!((descriptors[1].remote_offset, descriptors[1].len), (40 * 4096, 4 * 4096));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod map;
mod pages;
mod pair;
mod segment;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::error::PagesError;
use crate::id::AuxIndex;
use crate::meter::{each, step};
use crate::page_list::PageList;
use crate::transport::Descriptor;

pub use error::{PlanError, Side};
use map::Lane;
pub use map::RegionMap;
pub use pages::PagePlan;
use pages::{Cover, Span};
use pair::Pair;
pub use segment::Segment;

/// For how many descriptors room is made at once: as many as one page has in a cache with a region for each layer.
const FEW: usize = 128;

/// The descriptors of one transfer, handed out post by post ([`fill`](Plan::fill)): a cursor over regions ×
/// segments.
///
/// The descriptors go region by region, and within a region in the order of the pages. Every descriptor
/// of a `Plan` stays inside the regions of both sides, so handing out needs no checks and cannot fail. A
/// `Plan` allocates nothing for a descriptor: its size is that of the lists of pages, in runs.
#[derive(Debug, Clone)]
pub struct Plan {
    pairs: Arc<[Pair]>,
    segments: Vec<Segment>,
    pair: usize,
    row: u64,
    /// The offsets at which the current row starts, here and at the peer.
    base: (u64, u64),
    segment: usize,
    unit: u32,
    token: u32,
    /// Bytes of the current range that were handed out.
    offset: u64,
    bytes_left: u64,
}

/// What one call of [`Plan::fill`] handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// How many descriptors were appended.
    pub descriptors: usize,
    /// How many bytes the appended descriptors have together.
    pub bytes: u64,
    /// True if the whole plan has been handed out.
    pub done: bool,
}

/// How many descriptors a plan has, and how many it would have without joining neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Ranges within single pages (or units, or tokens) that are contiguous on both sides.
    pub pieces: u64,
    /// Descriptors after neighbours were joined, if no post cuts one. Where pages are cut, `fill`
    /// may rarely produce a few less.
    pub descriptors: u64,
}

impl Plan {
    /// The plan of pages in all KV regions: page *i* of the list here goes with page *i* of the list at
    /// the peer.
    pub fn pages(map: &RegionMap, pages: PagePlan) -> Result<Plan, PlanError> {
        let lane = &map.kv;
        if !map.same_pages() {
            let (local, remote) = (lane.local.tokens, lane.remote.tokens);
            return Err(PlanError::PageSize { local, remote });
        }
        for (side, end, num_pages) in [
            (Side::Local, pages.local_end, lane.local.count),
            (Side::Remote, pages.remote_end, lane.remote.count),
        ] {
            if end > num_pages {
                let error = PagesError::OutOfRange { page: end - 1, num_pages };
                return Err(PlanError::Pages { side, error });
            }
        }
        let PagePlan { mut segments, count, .. } = pages;
        let units = lane.local.units;
        if units > 1 {
            if u64::from(count) * u64::from(units) > u64::from(u32::MAX) {
                return Err(PlanError::TooLarge { items: count, item_bytes: units.into() });
            }
            for segment in &mut segments {
                segment.position *= units;
                segment.local *= units;
                segment.remote *= units;
                segment.len *= units;
            }
        }
        Plan::new(&lane.pairs, segments, count * units)
    }

    /// The plan of one chunk of a request, in all KV regions. `local` are the pages of the chunk here;
    /// the first of these is page number `offset` of the request, counted among the pages of this rank.
    /// `remote` are all pages of the request at the peer. The plan serves both directions: what a
    /// prefill rank writes of a chunk, and what a decode rank reads after the prefix in its own cache.
    ///
    /// Pages may differ in size. If the last page here is larger than what the peer's pages cover,
    /// only the covered part is in the plan. Fails if the peer has no place for a whole page.
    pub fn chunk(
        map: &RegionMap,
        local: &PageList,
        offset: usize,
        remote: &PageList,
    ) -> Result<Plan, PlanError> {
        let (here, there) = (Span { list: local, first: offset }, Span { list: remote, first: 0 });
        Plan::spans(&map.kv, here, there, Cover::Local)
    }

    /// As [`chunk`](Plan::chunk), for a peer that has a prefix: `remote` begins with page number
    /// `remote_offset` of the request, and no local page may lie before this page.
    pub fn suffix(
        map: &RegionMap,
        local: (&PageList, usize),
        remote: (&PageList, usize),
    ) -> Result<Plan, PlanError> {
        let (here, there) =
            (Span { list: local.0, first: local.1 }, Span { list: remote.0, first: remote.1 });
        Plan::spans(&map.kv, here, there, Cover::Both)
    }

    /// The plan of a cache group whose items are slots of recurrent layers, or pages of equal size: item
    /// *i* of `local` goes with item *i* of `remote`, in all regions of the group.
    pub fn state(
        map: &RegionMap,
        group: u16,
        local: &PageList,
        remote: &PageList,
    ) -> Result<Plan, PlanError> {
        if local.len() != remote.len() {
            return Err(PlanError::PageCount { local: local.len(), remote: remote.len() });
        }
        let lane = Plan::group(map, group)?;
        if lane.local.units != lane.remote.units {
            let (local, remote) = (lane.local.tokens, lane.remote.tokens);
            return Err(PlanError::PageSize { local, remote });
        }
        Plan::spans(lane, Span { list: local, first: 0 }, Span { list: remote, first: 0 }, Cover::Local)
    }

    /// The plan of a cache group whose items are pages of a sliding window or of a draft model, in all
    /// regions of the group. Each list is given with the number of its first page in the request. The
    /// plan covers the pages that both sides have.
    pub fn window(
        map: &RegionMap,
        group: u16,
        local: (&PageList, usize),
        remote: (&PageList, usize),
    ) -> Result<Plan, PlanError> {
        let (here, there) =
            (Span { list: local.0, first: local.1 }, Span { list: remote.0, first: remote.1 });
        Plan::spans(Plan::group(map, group)?, here, there, Cover::Both)
    }

    /// The plan of one aux row, in all aux regions: row `local` here goes with row `remote` at the peer.
    pub fn aux(map: &RegionMap, local: AuxIndex, remote: AuxIndex) -> Result<Plan, PlanError> {
        let (here, there) = map.aux_rows;
        for (side, AuxIndex(row), rows) in [(Side::Local, local, here), (Side::Remote, remote, there)] {
            if row >= rows {
                return Err(PlanError::Row { side, row, rows });
            }
        }
        Plan::new(&map.aux, vec![Segment { position: 0, local: local.0, remote: remote.0, len: 1 }], 1)
    }

    fn group(map: &RegionMap, group: u16) -> Result<&Lane, PlanError> {
        let groups = map.groups.len();
        map.groups.get(usize::from(group)).ok_or(PlanError::Group { group, groups })
    }

    fn spans(lane: &Lane, here: Span, there: Span, cover: Cover) -> Result<Plan, PlanError> {
        let (segments, count) = lane.segments(here, there, cover)?;
        Plan::new(&lane.pairs, segments, count)
    }

    /// Every segment must lie inside every region of the pairs. That holds because each region is,
    /// without overflow, as long as the items that its lane promises (`Geometry::validate`), and
    /// because the callers have compared the segments with the lane.
    fn new(pairs: &Arc<[Pair]>, segments: Vec<Segment>, items: u32) -> Result<Plan, PlanError> {
        // At most MAX_REGIONS × MAX_ITEM_LEN; but a list of pages may name a page often.
        let item_bytes: u64 = each(pairs.iter()).map(Pair::unit_len).sum();
        let bytes_left =
            item_bytes.checked_mul(items.into()).ok_or(PlanError::TooLarge { items, item_bytes })?;
        Ok(Plan {
            pairs: Arc::clone(pairs),
            segments,
            pair: 0,
            row: 0,
            base: (0, 0),
            segment: 0,
            unit: 0,
            token: 0,
            offset: 0,
            bytes_left,
        })
    }

    /// How many bytes were not handed out yet.
    pub fn bytes_left(&self) -> u64 {
        self.bytes_left
    }

    /// True if the whole plan has been handed out.
    pub fn is_done(&self) -> bool {
        self.bytes_left == 0
    }

    /// How many ranges the whole plan has, before and after joining neighbours. Where pages are
    /// cut, the ranges are counted one by one.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts { pieces: 0, descriptors: 0 };
        let units: u64 = self.segments.iter().map(|segment| u64::from(segment.len)).sum();
        for pair in self.pairs.iter() {
            let each = pair.rows * u64::from(pair.tokens);
            counts.pieces += each * units;
            let mut runs = 0;
            for segment in &self.segments {
                let mut unit = 0;
                while unit < segment.len {
                    unit += pair.together(segment, unit);
                    runs += 1;
                }
            }
            counts.descriptors += each * runs;
        }
        counts
    }

    /// Appends the next descriptors to `out`, as many as fit a post: at most `max_descriptors`, with at
    /// most `max_bytes` together. Descriptors that `out` holds already do not count.
    ///
    /// A range that does not fit is cut at the end of an item (page, row), or of a part of the item
    /// that is contiguous on both sides. If that part alone is larger than `max_bytes` and `out` is
    /// empty, the part is cut, too. So an empty `out` gets at least one descriptor, unless a bound
    /// is zero or the plan is done.
    pub fn fill(&mut self, out: &mut Vec<Descriptor>, max_descriptors: usize, max_bytes: u64) -> Progress {
        let before = out.len();
        let (mut slots, mut budget) = (max_descriptors, max_bytes);
        let pairs = Arc::clone(&self.pairs);
        if out.is_empty() {
            out.reserve_exact(self.segments.len().saturating_mul(pairs.len()).min(slots).min(FEW));
        }
        while let Some(pair) = pairs.get(self.pair) {
            step(1);
            if self.offset == 0 && self.unit == 0 && pair.is_linear() {
                let whole = self.whole_segments(slots, budget / pair.block);
                let piece = |segment: &Segment| u64::from(segment.len) * pair.block;
                let all = whole.iter().map(|segment| pair.descriptor((0, 0), segment, 0, 0, piece(segment)));
                out.extend(all);
                budget -= pair.block * items(whole);
                slots -= whole.len();
                self.segment += whole.len();
            }
            let Some(&segment) = self.segments.get(self.segment) else {
                self.next_row(pair);
                continue;
            };
            if self.offset == 0 && pair.tokens > 1 && !self.begins_row() {
                let count = self.tokens(pair, &segment, slots, budget, out);
                slots -= count as usize;
                budget -= u64::from(count) * pair.block;
                if self.token == 0 && count > 0 {
                    continue;
                }
            }
            let units = pair.together(&segment, self.unit);
            let len = u64::from(units) * pair.block;
            let descriptor = pair.descriptor(self.base, &segment, self.unit, self.token, len);
            let rest = len - self.offset;
            let part = if rest <= budget { rest } else { pair.cut(self.offset, budget, out.is_empty()) };
            if slots == 0 || part == 0 {
                break;
            }
            // A row may by chance go on where the one before it ended.
            let last = out.get_mut(before..).and_then(<[Descriptor]>::last_mut);
            match last.filter(|last| self.begins_row() && goes_on(last, &descriptor)) {
                Some(last) => last.len += part,
                None => {
                    out.push(Descriptor {
                        local_offset: descriptor.local_offset + self.offset,
                        remote_offset: descriptor.remote_offset + self.offset,
                        len: part,
                        ..descriptor
                    });
                    slots -= 1;
                }
            }
            budget -= part;
            self.offset += part;
            if self.offset == len {
                self.offset = 0;
                self.advance(pair, &segment, units);
            }
        }
        step(out.len() - before);
        let bytes = max_bytes - budget;
        self.bytes_left -= bytes;
        Progress { descriptors: out.len() - before, bytes, done: self.is_done() }
    }

    /// Hands out tokens of the current unit, as many as fit whole, and returns how many.
    fn tokens(
        &mut self,
        pair: &Pair,
        segment: &Segment,
        slots: usize,
        budget: u64,
        out: &mut Vec<Descriptor>,
    ) -> u32 {
        let fit = u32::try_from((budget / pair.block).min(slots as u64)).unwrap_or(u32::MAX);
        let count = (pair.tokens - self.token).min(fit);
        let first = pair.descriptor(self.base, segment, self.unit, self.token, pair.block);
        let descriptors = std::iter::successors(Some(first), |descriptor| Some(pair.next_token(*descriptor)));
        out.extend(descriptors.take(count as usize));
        self.token += count;
        if self.token == pair.tokens {
            self.token = 0;
            self.next_unit(segment, 1);
        }
        count
    }

    /// True before the first byte of a row, unless the row is the first of its pair.
    fn begins_row(&self) -> bool {
        self.row > 0 && (self.segment, self.unit, self.token, self.offset) == (0, 0, 0, 0)
    }

    fn advance(&mut self, pair: &Pair, segment: &Segment, units: u32) {
        self.token += 1;
        if self.token == pair.tokens {
            self.token = 0;
            self.next_unit(segment, units);
        }
    }

    fn next_unit(&mut self, segment: &Segment, units: u32) {
        self.unit += units;
        if self.unit == segment.len {
            self.unit = 0;
            self.segment += 1;
        }
    }

    /// Goes on to the next row, after all segments of this row were handed out.
    fn next_row(&mut self, pair: &Pair) {
        self.segment = 0;
        self.row += 1;
        if self.row < pair.rows && !self.segments.is_empty() {
            self.base = pair.row(self.row);
        } else {
            self.row = 0;
            self.base = (0, 0);
            self.pair += 1;
        }
    }

    /// The next segments of the row, as many as fit whole.
    fn whole_segments(&self, max_segments: usize, max_units: u64) -> &[Segment] {
        let rest = self.segments.get(self.segment..).unwrap_or_default();
        let rest = rest.get(..max_segments).unwrap_or(rest);
        let start = rest.first().map_or(0, |segment| segment.position);
        let fits =
            |segment: &Segment| u64::from(segment.position - start) + u64::from(segment.len) <= max_units;
        rest.get(..rest.partition_point(fits)).unwrap_or_default()
    }
}

fn goes_on(last: &Descriptor, next: &Descriptor) -> bool {
    (last.local_region, last.remote_region) == (next.local_region, next.remote_region)
        && last.local_offset + last.len == next.local_offset
        && last.remote_offset + last.len == next.remote_offset
}

/// How many units these neighbouring segments hold together.
fn items(segments: &[Segment]) -> u64 {
    match (segments.first(), segments.last()) {
        (Some(first), Some(last)) => u64::from(last.position - first.position) + u64::from(last.len),
        _ => 0,
    }
}
