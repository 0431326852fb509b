//! Random pairs of engines: every element of the cache is moved, and compared one by one.
//!
//! `KV_LAYOUT_CASES=200000 cargo test --release -p kv-core --test layouts` runs more pairs,
//! `KV_LAYOUT_SEED=… KV_LAYOUT_CASES=1` one of them again.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod engine;
mod memory;
mod protocol;
mod rng;
mod tables;

use std::ops::Range;

use engine::{Engine, Model, Request};
use kv_core::layout::{consumers, receivers_of, sources};
use kv_core::plan::{Plan, PlanError, RegionMap, Side};
use kv_core::{Descriptor, Geometry, Op, PageList};
use memory::Memory;
use rng::Rng;

/// A pair of engines, a request, and one decode rank that gets its cache.
struct Case {
    model: Model,
    prefill: Engine,
    decode: Engine,
    request: Request,
    rank: usize,
    op: Op,
}

impl Case {
    fn new(rng: &mut Rng) -> Case {
        let model = Model::random(rng);
        let prefill = Engine::random(rng, &model, None);
        let decode = Engine::random(rng, &model, Some(&prefill));
        let request = Request::random(rng, &model, &prefill, &decode);
        let rank = rng.below(decode.ranks.len());
        let op = if rng.chance(2) { Op::Write } else { Op::Read };
        Case { model, prefill, decode, request, rank, op }
    }
}

/// A number that whoever runs the test gives.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

fn list(pages: &[u32]) -> PageList {
    PageList::from_pages(pages.iter().copied()).unwrap()
}

/// The descriptors of a plan, in posts of random bounds; checks the count that the plan gave before.
fn posts(rng: &mut Rng, mut plan: Plan) -> Vec<Descriptor> {
    let counts = plan.counts();
    let bytes = plan.bytes_left();
    if rng.chance(2) {
        let mut descriptors = Vec::new();
        assert!(plan.fill(&mut descriptors, usize::MAX, u64::MAX).done);
        assert!(descriptors.len() as u64 <= counts.descriptors, "the plan counted its descriptors wrongly");
        assert!(counts.descriptors <= counts.pieces);
        assert_eq!(descriptors.iter().map(|descriptor| descriptor.len).sum::<u64>(), bytes);
        assert!(
            !descriptors.windows(2).any(|pair| joins(&pair[0], &pair[1])),
            "two descriptors could be one"
        );
        return descriptors;
    }
    let mut all = Vec::new();
    while !plan.is_done() {
        // What one post had no room for, a larger one may have.
        let (max_descriptors, max_bytes) = (1 + rng.below(9), 1 + rng.below(60) as u64);
        let mut descriptors = Vec::new();
        let progress = plan.fill(&mut descriptors, max_descriptors, max_bytes);
        assert!(
            progress.descriptors > 0
                && progress.descriptors <= max_descriptors
                && progress.bytes <= max_bytes
        );
        assert_eq!(progress.bytes, descriptors.iter().map(|descriptor| descriptor.len).sum::<u64>());
        all.append(&mut descriptors);
    }
    assert_eq!(all.iter().map(|descriptor| descriptor.len).sum::<u64>(), bytes);
    all
}

fn joins(first: &Descriptor, second: &Descriptor) -> bool {
    (first.local_region, first.remote_region) == (second.local_region, second.remote_region)
        && first.local_offset + first.len == second.local_offset
        && first.remote_offset + first.len == second.remote_offset
}

/// Disjoint ranges that are all layers together, in any order; or `None` once, for all of them.
fn partition(rng: &mut Rng, layers: u32) -> Vec<Option<Range<u32>>> {
    if rng.chance(2) {
        return vec![None];
    }
    cuts(rng, 0..layers).into_iter().map(Some).collect()
}

/// A range, cut at random, the pieces in any order.
fn cuts(rng: &mut Rng, range: Range<u32>) -> Vec<Range<u32>> {
    let mut pieces = Vec::new();
    let mut start = range.start;
    for layer in range.clone() {
        if layer + 1 == range.end || rng.chance(2) {
            pieces.push(start..layer + 1);
            start = layer + 1;
        }
    }
    rng.shuffled(pieces)
}

/// The cache groups of which a source has something for the decode rank.
fn groups_between(case: &Case, map: &RegionMap) -> impl Iterator<Item = usize> {
    (0..case.model.groups.len()).filter(|group| map.has_group(*group as u16))
}

/// Plans of one source of the decode rank.
fn plans(rng: &mut Rng, case: &Case, source: usize) -> Result<Vec<Plan>, PlanError> {
    let (here, there) = (&case.prefill.ranks[source], &case.decode.ranks[case.rank]);
    let (ours, theirs) = (&case.request.prefill[source], &case.request.decode[case.rank]);
    let prefix = case.request.prefix[case.rank];
    // What this source is asked for.
    let share = here.parallel.page_range(theirs.pages.len() - prefix);
    let first = prefix + share.start;
    let wanted = list(&theirs.pages[first..prefix + share.end]);
    let mut plans = Vec::new();
    match case.op {
        Op::Write => {
            let map = RegionMap::directed(here, there, Side::Local)?;
            let mut sent = 0;
            while sent < ours.pages.len() {
                let count = (1 + rng.below(4)).min(ours.pages.len() - sent);
                let chunk = list(&ours.pages[sent..sent + count]);
                for layers in partition(rng, case.model.layers) {
                    let map = match layers {
                        Some(layers) => RegionMap::layers(here, there, Side::Local, layers)?,
                        None => map.clone(),
                    };
                    plans.push(if (first, share.len()) == (0, theirs.pages.len()) && rng.chance(2) {
                        Plan::chunk(&map, &chunk, sent, &wanted)?
                    } else {
                        Plan::suffix(&map, (&chunk, sent), (&wanted, first))?
                    });
                }
                sent += count;
            }
            for group in groups_between(case, &map) {
                let (ours, theirs) = (&ours.groups[group], &theirs.groups[group]);
                plans.push(Plan::window(&map, group as u16, (&list(ours), 0), (&list(theirs), 0))?);
            }
        }
        Op::Read => {
            let map = RegionMap::directed(there, here, Side::Remote)?;
            for layers in partition(rng, case.model.layers) {
                let map = match layers {
                    Some(layers) => RegionMap::layers(there, here, Side::Remote, layers)?,
                    None => map.clone(),
                };
                plans.push(Plan::chunk(&map, &wanted, first, &list(&ours.pages))?);
            }
            for group in groups_between(case, &map) {
                let (ours, theirs) = (list(&ours.groups[group]), list(&theirs.groups[group]));
                plans.push(if case.model.groups[group].slots {
                    Plan::state(&map, group as u16, &theirs, &ours)?
                } else {
                    Plan::window(&map, group as u16, (&theirs, 0), (&ours, 0))?
                });
            }
        }
    }
    Ok(plans)
}

/// Both sides know the same about who has to do with whom.
fn check_ranks(case: &Case) {
    for (index, source) in case.prefill.ranks.iter().enumerate() {
        let served = |dest: &&Geometry| {
            let found = sources(dest, &case.prefill.ranks).unwrap();
            found.iter().any(|source| source.index == index)
        };
        let count = case.decode.ranks.iter().filter(served).count();
        assert_eq!(consumers(source, &case.decode.ranks), count);
        assert_eq!(receivers_of(source, &case.decode.ranks[case.rank]), count);
        assert!(count > 0, "nobody releases rank {index}");
    }
}

/// Page numbers on both sides agree with those that tokens have.
fn check_pages(case: &Case, source: usize) {
    let (here, there) = (&case.prefill.ranks[source], &case.decode.ranks[case.rank]);
    let map = RegionMap::new(here, there).unwrap();
    let count = |lists: &engine::Lists| lists.pages.len();
    let (ours, theirs) = (count(&case.request.prefill[source]), count(&case.request.decode[case.rank]));
    assert!(map.local_pages(theirs) >= ours);
    if here.layout.dcp_size != 1 || there.layout.dcp_size != 1 {
        assert_eq!(map.check_counts(ours, theirs), Ok(()));
        return;
    }
    let (ours_of, theirs_of) = (|tokens| here.pages_of(tokens), |tokens| there.pages_of(tokens));
    for other in theirs.saturating_sub(2)..theirs + 3 {
        let most = (ours * here.page_size as usize).max(other * there.page_size as usize);
        let possible = (0..=most).any(|tokens| ours_of(tokens) == ours && theirs_of(tokens) == other);
        assert_eq!(map.check_counts(ours, other).is_ok(), possible, "{ours} here, {other} there");
    }
    assert_eq!(map.local_pages(theirs), ours_of(theirs * there.page_size as usize));
}

fn run(seed: u64) {
    let mut rng = Rng::new(seed);
    let case = Case::new(&mut rng);
    let (model, request) = (&case.model, &case.request);
    let dest = &case.decode.ranks[case.rank];
    let mut memory = Memory::empty(dest);
    let mut moved = 0;
    let found = sources(dest, &case.prefill.ranks).unwrap();
    assert_eq!(found.iter().filter(|source| source.aux).count(), 1);
    for source in found {
        let geometry = &case.prefill.ranks[source.index];
        let from = Memory::filled(model, geometry, &request.prefill[source.index]);
        let plans = plans(&mut rng, &case, source.index).unwrap();
        assert_eq!(
            source.bytes,
            plans.iter().any(|plan| !plan.is_done())
                || (source.bytes && (request.is_short() || geometry.parallel.pcp_size > 1))
        );
        for plan in plans {
            for descriptor in posts(&mut rng, plan) {
                moved += descriptor.len;
                memory.take(&from, &descriptor, case.op);
            }
        }
        check_pages(&case, source.index);
    }
    let expected = memory.compare(model, &case.prefill, dest, request, case.rank);
    assert_eq!(moved, expected, "bytes were moved twice");
    check_ranks(&case);
}

#[test]
fn every_element_arrives_once_in_its_place_between_any_two_engines() {
    let cases: u64 = number("KV_LAYOUT_CASES").unwrap_or(2_000);
    let first: u64 = number("KV_LAYOUT_SEED").unwrap_or(1);
    for seed in first..first + cases {
        let outcome = std::panic::catch_unwind(|| run(seed));
        if let Err(panic) = outcome {
            let case = Case::new(&mut Rng::new(seed));
            println!("prefill: {:#?}", case.prefill.ranks[0]);
            println!("decode, rank {}: {:#?}", case.rank, case.decode.ranks[case.rank]);
            println!("again: KV_LAYOUT_SEED={seed} KV_LAYOUT_CASES=1 cargo test -p kv-core --test layouts");
            std::panic::resume_unwind(panic);
        }
    }
    println!("{cases} pairs from seed {first} on");
}
