//! Plans the reads from one source: the pages of source and receiver become descriptors.

use crate::error::Cause;
use crate::groups::RequestCacheGroups;
use crate::layout::Geometry;
use crate::meter::each;
use crate::plan::{Plan, PlanError, RegionMap, Side};
use crate::proto::conversation::Maps;
use crate::proto::groups::{Between, CacheGroupPlans};
use crate::proto::receiving::ReceiveSession;
use crate::proto::receiving::reading::Reading;

/// The plans of the reads from one source.
#[derive(Debug, Default)]
pub(super) struct Planned {
    /// The plans; the last one is read first.
    pub(super) plans: Vec<Plan>,
    /// The cache groups that only one side named, all of them optional.
    pub(super) skipped: Vec<u16>,
}

/// Plans the reads from the source at this position, once the session's pages are given. `None` if
/// the source or the session is not ready, an error if the two sides do not mean the same pages.
pub(super) fn plan_reads(
    receiver: &ReceiveSession,
    index: usize,
    maps: &Maps,
    ours: &Geometry,
) -> Option<Result<Planned, Cause>> {
    let (given, row) = receiver.given.as_ref()?;
    let reading = receiver.sources.get(index)?.reading.as_ref()?;
    let map = maps.inward()?;
    let (held, wanted) = (reading.pages().len(), given.len());
    let prefix = prefix_of(receiver, map, held, wanted);
    let counted = is_counted(receiver, map);
    let mut others = each(receiver.sources.iter()).filter_map(|source| source.reading.as_ref());
    let agreed = others.find(|reading| reading.is_planned()).map(|reading| reading.pages().len());
    let registered = match agreed {
        // Sources with different numbers of pages would each mean another prefix.
        Some(pages) if counted => pages,
        _ => prefix.saturating_add(wanted),
    };
    if map.check_counts(registered, held).is_err() {
        return Some(Err(Cause::PageCount { sent: held, registered }));
    }
    if row.is_some() && reading.aux().is_none() {
        return Some(Err(Cause::AuxOneSided { sender: false, receiver: true }));
    }
    // Other ranks that hold the same pages are asked for the other pages.
    let share = maps.geometry().parallel.page_range(wanted);
    let mine = given.list().slice(share.start, share.len()).unwrap_or_default();
    let pages = Plan::chunk(map, &mine, prefix.saturating_add(share.start), reading.pages());
    // The aux row of the first source counts.
    let rows = row.filter(|_| index == 0).zip(reading.aux());
    let aux = rows.map(|(here, there)| Plan::aux(map, here, there)).transpose();
    Some(gather(pages, plan_groups(receiver, reading, (map, ours, maps.geometry())), aux))
}

fn gather(
    pages: Result<Plan, PlanError>,
    groups: Result<CacheGroupPlans, Cause>,
    aux: Result<Option<Plan>, PlanError>,
) -> Result<Planned, Cause> {
    let no_plan = |_| Cause::Protocol("the leased pages do not fit the two geometries");
    let pages = pages.map_err(no_plan)?;
    let CacheGroupPlans { plans, skipped } = groups?;
    let plans = aux.map_err(no_plan)?.into_iter().chain(plans).chain([pages]);
    Ok(Planned { plans: plans.filter(|plan| !plan.is_done()).collect(), skipped })
}

/// True if the number of pages that the receiver already has follows from the pages of both sides,
/// because both sides count pages alike.
fn is_counted(receiver: &ReceiveSession, map: &RegionMap) -> bool {
    receiver.prefix == 0 && map.same_pages()
}

/// How many pages of the request the receiver already has; the given pages come after them.
fn prefix_of(receiver: &ReceiveSession, map: &RegionMap, held: usize, wanted: usize) -> usize {
    if !is_counted(receiver, map) {
        return receiver.prefix;
    }
    // With dealt pages, the number of tokens tells: ranks that disagree about the end must not
    // shift the rest.
    let total_pages = receiver.total_pages.filter(|_| wanted > 0).unwrap_or(held);
    total_pages.saturating_sub(wanted)
}

fn plan_groups(
    receiver: &ReceiveSession,
    reading: &Reading,
    (map, ours, theirs): (&RegionMap, &Geometry, &Geometry),
) -> Result<CacheGroupPlans, Cause> {
    let between = Between { map, ours, theirs, source: Side::Remote };
    match (&receiver.groups, &receiver.given) {
        (Some(groups), _) => between.plan(groups, reading.groups()),
        // A receiver that gives neither pages nor items reads nothing.
        (None, Some((given, _))) if given.is_empty() => Ok(CacheGroupPlans::default()),
        (None, _) => between.plan(&RequestCacheGroups::none(), reading.groups()),
    }
}
