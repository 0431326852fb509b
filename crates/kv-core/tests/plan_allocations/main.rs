//! Planning allocates for lists of pages, never for a descriptor: handing out descriptors allocates
//! nothing at all, and a hundred times as many pages cost no more than a few larger vectors.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod sys;

use kv_core::layout::{HND, NHD};
use kv_core::plan::{Plan, RegionMap, Side};
use kv_core::{Descriptor, Geometry, Holds, KvArgs, Layout, PageList, Region, RegionRole};

#[global_allocator]
static COUNTING: sys::Counting = sys::Counting;

const LAYERS: u32 = 16;
const HEADS: u32 = 4;
const TOKENS: u32 = 64 * 1024;

/// A cache of so many tokens a page: a region for each layer, or one for all.
fn cache(page_size: u32, page_major: bool, head_major: bool) -> Geometry {
    let axes = if head_major { HND } else { NHD };
    let (pages, token) = (TOKENS / page_size, u64::from(HEADS) * 8);
    let mut args = KvArgs::builder("engine", 0)
        .pages(pages, page_size)
        .heads(HEADS, 1)
        .layout(Layout::default().with(|layout| layout.axes = axes));
    let per_region = if page_major { LAYERS } else { 1 };
    for (number, layer) in (1..).zip((0..LAYERS).step_by(per_region as usize)) {
        let item = u64::from(per_region) * 2 * u64::from(page_size) * token;
        let region = Region::dram(RegionRole::Kv, number << 32, u64::from(pages) * item, item);
        args = args.region(region.layers(layer..layer + per_region).holds(Holds::KeyValue));
    }
    args.build().unwrap().geometry().clone()
}

/// So many pages, no two of them neighbours in order.
fn scattered(count: u32, of: u32) -> PageList {
    let step = (of / 2 + 1) | 1;
    PageList::from_pages((0..count).map(|page| page * step % of)).unwrap()
}

/// Plans the KV of so many tokens and hands all of it out, post by post. Allocations of planning and of
/// handing out, and how many descriptors there were.
fn plan(map: &RegionMap, sides: [&Geometry; 2], tokens: u32, out: &mut Vec<Descriptor>) -> (u64, u64, u64) {
    let [local, remote] = sides.map(|side| scattered(tokens / side.page_size, side.num_pages));
    let start = sys::allocations();
    let mut plan = Plan::suffix(map, (&local, 0), (&remote, 0)).unwrap();
    let planned = sys::allocations();
    let mut descriptors = 0;
    while !plan.is_done() {
        out.clear();
        descriptors += plan.fill(out, 1024, u64::MAX).descriptors as u64;
    }
    (planned - start, sys::allocations() - planned, descriptors)
}

#[test]
fn allocations_of_planning_do_not_grow_with_the_descriptors() {
    let caches = [
        ("layer-major", cache(16, false, false)),
        ("page-major", cache(16, true, false)),
        ("head-major", cache(16, false, true)),
        ("larger pages", cache(64, true, true)),
    ];
    let mut out = Vec::with_capacity(1024);
    for (here, local) in &caches {
        for (there, remote) in &caches {
            let whole = RegionMap::directed(local, remote, Side::Local).unwrap();
            let some = RegionMap::layers(local, remote, Side::Local, 3..9).unwrap();
            for (what, map) in [("all layers", whole), ("some layers", some)] {
                let few = plan(&map, [local, remote], 64 * 4, &mut out);
                let many = plan(&map, [local, remote], 64 * 400, &mut out);
                let name = format!("{here} to {there}, {what}");
                println!("{name}: {few:?} and {many:?} (planning, handing out, descriptors)");
                assert!(many.2 >= 90 * few.2, "{name}: {} and {} descriptors", few.2, many.2);
                assert_eq!((few.1, many.1), (0, 0), "{name}: handing out allocates");
                // A vector that doubles, seven times.
                assert!(many.0 <= few.0 + 8, "{name}: {} and {} allocations", few.0, many.0);
            }
        }
    }
}

#[test]
fn the_counting_allocator_counts_allocations_of_this_test() {
    let before = sys::allocations();
    let boxes: Vec<Box<u8>> = (0..100).map(Box::new).collect();
    assert!(sys::allocations() - before > 100, "{}", boxes.len());
}
