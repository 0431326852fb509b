//! Pages on both sides, as the longest runs that are contiguous on both.

use super::error::{PlanError, Side};
use super::map::Lane;
use super::segment::Segment;
use crate::meter::{each, step};
use crate::page_list::{PageList, PageRun};

/// Which page here goes with which page at the peer, as the longest possible segments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagePlan {
    pub(super) segments: Vec<Segment>,
    pub(super) local_end: u32,
    pub(super) remote_end: u32,
    pub(super) count: u32,
}

impl PagePlan {
    /// Matches page *i* of `local` with page *i* of `remote`.
    pub fn new(local: &PageList, remote: &PageList) -> Result<PagePlan, PlanError> {
        if local.len() != remote.len() {
            return Err(PlanError::PageCount { local: local.len(), remote: remote.len() });
        }
        // Not more than the list can name: MAX_PAGES.
        let count = local.len() as u32;
        let segments = segments((local, 1, 0), (remote, 1, 0), count);
        Ok(PagePlan { segments, local_end: end(local), remote_end: end(remote), count })
    }

    /// The segments, in the order of the pages.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// How many pages each of the two lists has.
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// True if there is no page.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// The runs of `count` units that are contiguous on both sides. Each side is given as a list of
/// pages, the number of units in a page, and the number of units to skip.
fn segments(local: (&PageList, u32, u32), remote: (&PageList, u32, u32), count: u32) -> Vec<Segment> {
    let runs = local.0.runs().len().max(remote.0.runs().len());
    let mut segments = Vec::with_capacity(runs.min(count as usize));
    let walk = |(list, units, skip)| {
        let mut walk = Walk::new(list, units);
        walk.skip(skip);
        walk
    };
    let (mut here, mut there) = (walk(local), walk(remote));
    let mut position = 0;
    // Neighbouring runs of a list never touch, so a segment that ends with a run of one of the lists
    // cannot go on in the next: no merging is needed.
    while let (Some(ours), Some(theirs)) = (here.rest, there.rest)
        && position < count
    {
        let len = ours.len.min(theirs.len).min(count - position);
        step(1);
        segments.push(Segment { position, local: ours.start, remote: theirs.start, len });
        position += len;
        here.advance(len);
        there.advance(len);
    }
    segments
}

/// Pages of a request on one side: a list, and the number of its first page in the request, counted
/// among the pages of this rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span<'a> {
    pub(super) list: &'a PageList,
    pub(super) first: usize,
}

/// How strictly two spans must cover each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cover {
    /// Every local page must have its place at the peer; only of the last page a part may be
    /// missing there.
    Local,
    /// The plan covers what both spans have.
    Both,
}

impl Lane {
    /// The segments of the units that two spans share, and how many units those are.
    pub(super) fn segments(
        &self,
        here: Span,
        there: Span,
        cover: Cover,
    ) -> Result<(Vec<Segment>, u32), PlanError> {
        for (side, span, items) in [(Side::Local, here, self.local), (Side::Remote, there, self.remote)] {
            span.list.check_below(items.count).map_err(|error| PlanError::Pages { side, error })?;
            let (items, item_bytes) = (span.list.len(), u64::from(items.units));
            if items as u64 * item_bytes > u64::from(u32::MAX) {
                return Err(PlanError::TooLarge { items: items as u32, item_bytes });
            }
        }
        if (self.local.cycle, self.local.place) == (self.remote.cycle, self.remote.place) {
            self.shared_range(here, there, cover)
        } else {
            self.dealt(here, there, cover)
        }
    }

    /// The segments where both sides hold the same pages of the request; the pages may differ in
    /// size.
    fn shared_range(&self, here: Span, there: Span, cover: Cover) -> Result<(Vec<Segment>, u32), PlanError> {
        let range = |span: Span, units: u32| {
            let units = u64::from(units);
            let start = (span.first as u64).saturating_mul(units);
            (start, start.saturating_add(span.list.len() as u64 * units))
        };
        let (ours, theirs) = (range(here, self.local.units), range(there, self.remote.units));
        let start = ours.0.max(theirs.0);
        let end = ours.1.min(theirs.1);
        let late = start > ours.0 || end.saturating_add(self.local.units.into()) <= ours.1;
        if cover == Cover::Local && late && ours.0 < ours.1 {
            return Err(PlanError::PageCount {
                local: here.first + here.list.len(),
                remote: there.list.len(),
            });
        }
        // Both differences are at most the units of a list, which a u32 can count.
        let count = end.saturating_sub(start) as u32;
        if count == 0 {
            return Ok((Vec::new(), 0));
        }
        let skip = |range: (u64, u64)| (start - range.0) as u32;
        let local = (here.list, self.local.units, skip(ours));
        let remote = (there.list, self.remote.units, skip(theirs));
        Ok((segments(local, remote, count), count))
    }

    /// The segments where one side deals the pages to more ranks than the other: page by page, the
    /// pages that both ranks have. The page sizes are equal.
    fn dealt(&self, here: Span, there: Span, cover: Cover) -> Result<(Vec<Segment>, u32), PlanError> {
        let (ours, theirs) = (self.local, self.remote);
        let units = ours.units;
        let mut segments: Vec<Segment> = Vec::new();
        let mut position = 0;
        let mut remote = Walk::new(there.list, units);
        let mut at = there.first as u64;
        for (index, page) in (here.first as u64..).zip(here.list.iter()) {
            let whole = index * u64::from(ours.cycle) + u64::from(ours.place);
            let Some(whole) = whole.checked_sub(theirs.place.into()) else { continue };
            if !whole.is_multiple_of(theirs.cycle.into()) {
                continue;
            }
            let wanted = whole / u64::from(theirs.cycle);
            let Some(ahead) = wanted.checked_sub(at) else { continue };
            remote.skip(u32::try_from(ahead.saturating_mul(units.into())).unwrap_or(u32::MAX));
            at = wanted;
            let Some(rest) = remote.rest else {
                if cover == Cover::Both {
                    break;
                }
                return Err(PlanError::PageCount {
                    local: here.first + here.list.len(),
                    remote: there.list.len(),
                });
            };
            let local = page * units;
            match segments.last_mut() {
                Some(last) if last.local + last.len == local && last.remote + last.len == rest.start => {
                    last.len += units;
                }
                _ => segments.push(Segment { position, local, remote: rest.start, len: units }),
            }
            position += units;
        }
        Ok((segments, position))
    }
}

/// The first number beyond all pages of a list.
fn end(list: &PageList) -> u32 {
    each(list.runs()).map(|run| run.end()).max().unwrap_or(0)
}

/// A walk along the runs of a list, counted in units, in steps that may end within a run.
struct Walk<'a> {
    rest: Option<PageRun>,
    runs: std::slice::Iter<'a, PageRun>,
    units: u32,
}

impl<'a> Walk<'a> {
    /// A walk from the beginning of the list. The caller has checked that a `u32` can count the
    /// units of all pages.
    fn new(list: &'a PageList, units: u32) -> Walk<'a> {
        let mut walk = Walk { rest: None, runs: list.runs().iter(), units };
        walk.next_run();
        walk
    }

    fn next_run(&mut self) {
        let units = self.units;
        let scaled = |run: &PageRun| PageRun { start: run.start * units, len: run.len * units };
        self.rest = self.runs.next().map(scaled);
    }

    /// Goes on by `len` units, at most to the end of the run.
    fn advance(&mut self, len: u32) {
        match &mut self.rest {
            Some(run) if len < run.len => {
                run.start += len;
                run.len -= len;
            }
            _ => self.next_run(),
        }
    }

    /// Goes on by `len` units, through any number of runs.
    fn skip(&mut self, mut len: u32) {
        while let Some(run) = self.rest
            && len > 0
        {
            let part = len.min(run.len);
            self.advance(part);
            step(1);
            len -= part;
        }
    }
}
