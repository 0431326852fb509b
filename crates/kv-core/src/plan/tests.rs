//! Plans by hand: what is handed out, in which order, and what is refused.

mod unequal;

use super::*;
use crate::args::KvArgs;
use crate::layout::MAX_REGIONS;
use crate::layout::{Geometry, RegionShape};
use crate::layout::{Region, RegionRole};

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

fn all(mut plan: Plan) -> Vec<Descriptor> {
    let mut descriptors = Vec::new();
    assert!(plan.fill(&mut descriptors, usize::MAX, u64::MAX).done);
    descriptors
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
    let rows: [(&[u32], &[u64]); 2] =
        [(&[5, 2, 9], &[5, 2, 9, 15, 12, 19, 25, 22, 29]), (&[5, 2, 7], &[5, 2, 7, 15, 12, 17, 25, 22, 27])];
    let map = RegionMap::new(&geometry(3, 10), &geometry(3, 10)).unwrap();
    for (blocks, expected) in rows {
        let descriptors = all(plan(&map, blocks, &[0, 1, 2]).unwrap());
        let ids = descriptors.iter().map(|descriptor| {
            let item_len = 8 * (u64::from(descriptor.local_region) + 1);
            assert_eq!((descriptor.local_offset % item_len, descriptor.len), (0, item_len));
            u64::from(descriptor.local_region) * 10 + descriptor.local_offset / item_len
        });
        assert_eq!(ids.collect::<Vec<_>>(), expected);
    }
}

#[test]
fn contiguous_pages_make_one_descriptor_for_each_region() {
    let map = RegionMap::new(&geometry(160, 10), &geometry(160, 20)).unwrap();
    let descriptors = all(plan(&map, &[2, 3, 4, 5], &[16, 17, 18, 19]).unwrap());
    assert_eq!(descriptors.len(), 160);
    let last = Descriptor {
        local_region: 159,
        remote_region: 159,
        local_offset: 2 * 1280,
        remote_offset: 16 * 1280,
        len: 4 * 1280,
    };
    assert_eq!(descriptors[159], last);
}

#[test]
fn a_post_ends_with_a_whole_page_and_only_larger_pages_are_cut_within() {
    // Pages of 8 and of 16 bytes.
    let map = RegionMap::new(&geometry(2, 10), &geometry(2, 10)).unwrap();
    let lens = |max_bytes| {
        let mut plan = plan(&map, &[0, 1, 2], &[4, 5, 6]).unwrap();
        let mut posts = Vec::new();
        while !plan.is_done() {
            let mut descriptors = Vec::new();
            assert!(plan.fill(&mut descriptors, 10, max_bytes).descriptors > 0);
            posts.push(descriptors.iter().map(|descriptor| descriptor.len).collect::<Vec<_>>());
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
    let mut descriptors = all(plan(&map, &[0], &[0]).unwrap());
    let mut next = plan(&map, &[5], &[7]).unwrap();
    assert_eq!(next.fill(&mut descriptors, 10, 7), Progress { descriptors: 0, bytes: 0, done: false });
    assert_eq!(next.fill(&mut descriptors, 10, 8), Progress { descriptors: 1, bytes: 8, done: true });
}

#[test]
fn a_bound_of_zero_hands_out_nothing_and_an_empty_plan_is_done() {
    let map = RegionMap::new(&geometry(2, 10), &geometry(2, 10)).unwrap();
    let mut some = plan(&map, &[1], &[2]).unwrap();
    let mut descriptors = Vec::new();
    let nothing = Progress { descriptors: 0, bytes: 0, done: false };
    assert_eq!(some.fill(&mut descriptors, 0, 100), nothing);
    assert_eq!(some.fill(&mut descriptors, 100, 0), nothing);
    assert_eq!(some.bytes_left(), 24);
    let mut empty = plan(&map, &[], &[]).unwrap();
    assert!(empty.is_done());
    assert_eq!(empty.fill(&mut descriptors, 100, 100), Progress { done: true, ..nothing });
    assert!(descriptors.is_empty());
}

#[test]
fn one_row_of_every_aux_region_goes_with_the_aux_plan() {
    let map = RegionMap::new(&geometry(1, 10), &geometry(1, 10)).unwrap();
    let descriptors = all(Plan::aux(&map, AuxIndex(1), AuxIndex(0)).unwrap());
    let descriptor = |region, local_offset, len| Descriptor {
        local_region: region,
        remote_region: region,
        local_offset,
        remote_offset: 0,
        len,
    };
    assert_eq!(descriptors, [descriptor(1, 10, 10), descriptor(2, 20, 20)]);
    // The second region has two rows only.
    let row = |side| PlanError::Row { side, row: 2, rows: 2 };
    assert_eq!(Plan::aux(&map, AuxIndex(2), AuxIndex(0)).unwrap_err(), row(Side::Local));
    assert_eq!(Plan::aux(&map, AuxIndex(0), AuxIndex(2)).unwrap_err(), row(Side::Remote));
}

#[test]
fn impossible_plans_are_refused_with_side_and_values() {
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
    assert!(
        other.to_string().starts_with("page_size differs: 16 here, 32 at the peer: make them equal, or say")
    );
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

#[test]
fn some_layers_take_only_opaque_regions_that_lie_within_them() {
    let region = |number: u64, layers| Region::dram(RegionRole::Kv, number << 32, 8 * 8, 8).layers(layers);
    let args = KvArgs::builder("e", 0).pages(8, 16);
    let args = args.region(region(1, 0..3)).region(region(2, 3..4)).region(region(3, 4..6)).build().unwrap();
    let regions_in = |layers: std::ops::Range<u32>| -> Vec<u32> {
        let map = RegionMap::layers(args.geometry(), args.geometry(), Side::Local, layers).unwrap();
        all(plan(&map, &[1], &[2]).unwrap()).iter().map(|descriptor| descriptor.local_region).collect()
    };
    assert_eq!(regions_in(0..6), [0, 1, 2]);
    assert_eq!(regions_in(0..3), [0]);
    // What is cut is not moved: the caller has to announce it together.
    assert!(regions_in(0..2).is_empty());
    assert_eq!(regions_in(1..4), [1]);
    assert_eq!(regions_in(3..5), [1]);
    assert_eq!(regions_in(3..6), [1, 2]);
    // Nor is what does not say its layers.
    let untold = geometry(1, 8);
    let map = RegionMap::layers(&untold, &untold, Side::Local, 0..6).unwrap();
    assert!(plan(&map, &[1], &[2]).unwrap().is_done());
}

#[test]
fn a_plan_of_no_pages_reports_that_it_is_empty() {
    assert!(PagePlan::new(&list(&[]), &list(&[])).unwrap().is_empty());
    assert!(!PagePlan::new(&list(&[3]), &list(&[0])).unwrap().is_empty());
}

/// Two regions, of 6 and of 4 slots.
#[test]
fn slots_that_nobody_described_go_item_by_item_as_far_as_every_region_reaches() {
    let state = |addr, items: u64| Region::dram(RegionRole::State, addr, items * 8, 8);
    let args = KvArgs::builder("e", 0).pages(1, 1).region(Region::dram(RegionRole::Kv, 0x10, 4, 4));
    let args = args.region(state(0x100, 6)).region(state(0x200, 4)).build().unwrap();
    let map = RegionMap::new(args.geometry(), args.geometry()).unwrap();
    assert!(map.has_group(0) && !map.has_group(1));
    let state = |local: &[u32], remote: &[u32]| Plan::state(&map, 0, &list(local), &list(remote));
    let moved = all(state(&[3], &[1]).unwrap());
    let moved: Vec<_> = moved
        .iter()
        .map(|descriptor| (descriptor.local_region, descriptor.local_offset, descriptor.remote_offset))
        .collect();
    assert_eq!(moved, [(1, 24, 8), (2, 24, 8)]);
    let out = |side| PlanError::Pages { side, error: PagesError::OutOfRange { page: 4, num_pages: 4 } };
    assert_eq!(state(&[4], &[0]).unwrap_err(), out(Side::Local));
    assert_eq!(state(&[0], &[4]).unwrap_err(), out(Side::Remote));
    assert_eq!(state(&[0, 1], &[2]).unwrap_err(), PlanError::PageCount { local: 2, remote: 1 });
    assert_eq!(state(&[2], &[0, 1]).unwrap_err(), PlanError::PageCount { local: 1, remote: 2 });
    let unknown = Plan::state(&map, 1, &list(&[0]), &list(&[0])).unwrap_err();
    assert_eq!(unknown, PlanError::Group { group: 1, groups: 1 });
}
