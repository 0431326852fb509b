//! Plans are carried out on real memory, and compared with a copy made page by page.

#![allow(clippy::unwrap_used, clippy::panic, reason = "the helpers belong to the tests")]

use std::ops::Range;

use kv_core::layout::{Axes, Form};
use kv_core::plan::{PagePlan, Plan, RegionMap};
use kv_core::random::SplitMix64;
use kv_core::{
    AuxIndex, Axis, CacheGroup, Descriptor, Geometry, Holds, KvArgs, Layout, MemoryKind, Op, PageList,
    Parallel, Region, RegionRole, RegionShape,
};
use proptest::prelude::*;
use proptest::sample::Index;

const AUX_ROWS: u32 = 3;

/// Two caches of one kind, pages here and there, and how they are to be sent.
#[derive(Debug, Clone)]
struct Case {
    /// Bytes of a page in each KV region; one region is a page-major cache.
    kv: Vec<u64>,
    aux: Vec<u64>,
    num_pages: [u32; 2],
    pages: [Vec<u32>; 2],
    rows: [u32; 2],
    /// Pages of each chunk, repeated until all pages are sent.
    chunks: Vec<usize>,
    max_descriptors: usize,
    max_bytes: u64,
    write: bool,
}

/// How the pages of a request lie in the cache.
#[derive(Debug, Clone)]
enum Shape {
    Random,
    Contiguous,
    Reversed,
    /// Runs of up to this many pages, at random places.
    Runs(usize),
}

fn shape() -> impl Strategy<Value = Shape> {
    let runs = (2_usize..6).prop_map(Shape::Runs);
    prop_oneof![Just(Shape::Random), Just(Shape::Contiguous), Just(Shape::Reversed), runs]
}

/// `count` distinct pages out of `num_pages`.
fn pages(num_pages: u32, count: usize) -> impl Strategy<Value = Vec<u32>> {
    let all: Vec<u32> = (0..num_pages).collect();
    let start = any::<Index>();
    (shape(), Just(all).prop_shuffle(), start).prop_map(move |(shape, shuffled, start)| {
        let start = start.index(num_pages as usize - count + 1) as u32;
        let mut pages: Vec<u32> = match shape {
            Shape::Random => shuffled,
            Shape::Contiguous => (start..num_pages).collect(),
            Shape::Reversed => (0..num_pages - start).rev().collect(),
            Shape::Runs(max) => {
                // Blocks of `max` pages, in the order in which their first pages were shuffled.
                let starts = shuffled.iter().filter(|page| (**page as usize).is_multiple_of(max));
                starts.flat_map(|&page| page..(page + max as u32).min(num_pages)).collect()
            }
        };
        pages.truncate(count);
        pages
    })
}

fn case() -> impl Strategy<Value = Case> {
    let num_pages = [1_u32..40, 1..40];
    let counted = num_pages.prop_flat_map(|num_pages| {
        let most = num_pages[0].min(num_pages[1]) as usize;
        (Just(num_pages), 0..=most)
    });
    let placed = counted.prop_flat_map(|(num_pages, count)| {
        (Just(num_pages), [pages(num_pages[0], count), pages(num_pages[1], count)])
    });
    let layer_major = proptest::collection::vec(1_u64..12, 1..=6);
    let page_major = (1_u64..100).prop_map(|page| vec![page]);
    let aux = proptest::collection::vec(1_u64..12, 0..=3);
    let rows = [0..AUX_ROWS, 0..AUX_ROWS];
    let chunks = proptest::collection::vec(1_usize..12, 1..4);
    let bounds = (1_usize..12, 1_u64..200);
    (placed, prop_oneof![layer_major, page_major], aux, rows, chunks, bounds, any::<bool>()).prop_map(
        |((num_pages, pages), kv, aux, rows, chunks, (max_descriptors, max_bytes), write)| Case {
            kv,
            aux,
            num_pages,
            pages,
            rows,
            chunks,
            max_descriptors,
            max_bytes,
            write,
        },
    )
}

impl Case {
    fn geometry(&self, side: usize) -> Geometry {
        let num_pages = self.num_pages[side];
        let mut builder = KvArgs::builder("engine", 0).pages(num_pages, 16);
        let kv = self.kv.iter().map(|&item_len| (RegionRole::Kv, u64::from(num_pages), item_len));
        let aux = self.aux.iter().map(|&item_len| (RegionRole::Aux, u64::from(AUX_ROWS), item_len));
        for (addr, (role, items, item_len)) in (1_u64..).zip(kv.chain(aux)) {
            builder = builder.region(Region::dram(role, addr << 32, items * item_len, item_len));
        }
        builder.build().unwrap().geometry().clone()
    }

    fn list(&self, side: usize) -> PageList {
        PageList::from_pages(self.pages[side].iter().copied()).unwrap()
    }

    fn map(&self) -> RegionMap {
        RegionMap::new(&self.geometry(0), &self.geometry(1)).unwrap()
    }

    fn plan(&self) -> Plan {
        Plan::pages(&self.map(), PagePlan::new(&self.list(0), &self.list(1)).unwrap()).unwrap()
    }
}

/// The regions of both sides.
#[derive(Clone, PartialEq, Eq)]
struct Memory([Vec<Vec<u8>>; 2]);

impl Memory {
    /// Every byte depends on its side, region and place.
    fn new(case: &Case) -> Memory {
        Memory([0, 1].map(|side| {
            let regions = case.geometry(side).regions;
            let bytes = |(number, len): (usize, u64)| {
                let seed = (side * 4099 + number) as u64;
                (0..len).map(|at| mix(seed << 32 | at)).collect()
            };
            regions.iter().map(|region| region.len).enumerate().map(bytes).collect()
        }))
    }

    fn copy(&mut self, op: Op, region: [u32; 2], from: [Range<usize>; 2]) {
        let (source, target) = if op == Op::Write { (0, 1) } else { (1, 0) };
        let bytes = self.0[source][region[source] as usize][from[source].clone()].to_vec();
        self.0[target][region[target] as usize][from[target].clone()].copy_from_slice(&bytes);
    }

    /// Carries out descriptors. A piece outside its region panics.
    fn carry_out(&mut self, op: Op, descriptors: &[Descriptor]) {
        for descriptor in descriptors {
            self.copy(op, [descriptor.local_region, descriptor.remote_region], ranges(descriptor));
        }
    }
}

fn mix(seed: u64) -> u8 {
    (SplitMix64::new(seed).bits() >> 56) as u8
}

fn ranges(descriptor: &Descriptor) -> [Range<usize>; 2] {
    [descriptor.local_offset, descriptor.remote_offset]
        .map(|offset| offset as usize..(offset + descriptor.len) as usize)
}

fn all(mut plan: Plan) -> Vec<Descriptor> {
    let mut descriptors = Vec::new();
    assert!(plan.fill(&mut descriptors, usize::MAX, u64::MAX).done);
    descriptors
}

/// The posts of a plan, all of the same bounds.
fn posts(mut plan: Plan, max_descriptors: usize, max_bytes: u64) -> Vec<Vec<Descriptor>> {
    let mut posts = Vec::new();
    while !plan.is_done() {
        let mut descriptors = Vec::new();
        assert!(plan.fill(&mut descriptors, max_descriptors, max_bytes).descriptors > 0, "no progress");
        posts.push(descriptors);
    }
    posts
}

/// True if one descriptor could stand for both.
fn mergeable(first: &Descriptor, second: &Descriptor) -> bool {
    first.local_region == second.local_region
        && first.remote_region == second.remote_region
        && first.local_offset + first.len == second.local_offset
        && first.remote_offset + first.len == second.remote_offset
}

fn merged(descriptors: &[Descriptor]) -> Vec<Descriptor> {
    let mut merged: Vec<Descriptor> = Vec::new();
    for descriptor in descriptors {
        match merged.last_mut() {
            Some(last) if mergeable(last, descriptor) => last.len += descriptor.len,
            _ => merged.push(*descriptor),
        }
    }
    merged
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_byte_of_every_page_and_no_other_arrives(case in case()) {
        let op = if case.write { Op::Write } else { Op::Read };
        let before = Memory::new(&case);
        let mut expected = before.clone();
        for (number, &item_len) in (0..).zip(&case.kv) {
            for (&here, &there) in case.pages[0].iter().zip(&case.pages[1]) {
                let item = |page: u32| (u64::from(page) * item_len) as usize..((u64::from(page) + 1) * item_len) as usize;
                expected.copy(op, [number, number], [item(here), item(there)]);
            }
        }
        for (number, &item_len) in (case.kv.len() as u32..).zip(&case.aux) {
            let item = |row: u32| (u64::from(row) * item_len) as usize..((u64::from(row) + 1) * item_len) as usize;
            expected.copy(op, [number, number], [item(case.rows[0]), item(case.rows[1])]);
        }
        let aux = (!case.aux.is_empty())
            .then(|| Plan::aux(&case.map(), AuxIndex(case.rows[0]), AuxIndex(case.rows[1])).unwrap());

        // Whole.
        let mut whole = before.clone();
        whole.carry_out(op, &all(case.plan()));
        whole.carry_out(op, &aux.clone().map(all).unwrap_or_default());
        prop_assert!(whole == expected, "sent whole, the memories differ from the copy");

        // In chunks, each a part of the registered pages, in posts of bounded size.
        let mut chunked = before;
        let (map, mut sent) = (case.map(), 0);
        let mut plans = Vec::new();
        for &chunk in case.chunks.iter().cycle() {
            let chunk = chunk.min(case.pages[0].len() - sent);
            let here = PageList::from_pages(case.pages[0][sent..sent + chunk].iter().copied()).unwrap();
            let there = case.list(1).slice(sent, chunk).unwrap();
            plans.push(Plan::pages(&map, PagePlan::new(&here, &there).unwrap()).unwrap());
            sent += chunk;
            if sent == case.pages[0].len() {
                break;
            }
        }
        for plan in plans.into_iter().chain(aux) {
            for descriptors in posts(plan, case.max_descriptors, case.max_bytes) {
                chunked.carry_out(op, &descriptors);
            }
        }
        prop_assert!(chunked == expected, "sent in chunks, the memories differ from the copy");
    }

    #[test]
    fn descriptors_are_as_few_and_as_long_as_the_pages_allow(case in case()) {
        let descriptors = all(case.plan());
        for pair in descriptors.windows(2) {
            prop_assert!(!mergeable(&pair[0], &pair[1]), "{pair:?} could be one");
        }
        let count = case.pages[0].len();
        let jumps = |at: &usize| (0..2).any(|side| case.pages[side][at - 1] + 1 != case.pages[side][*at]);
        let segments = if count == 0 { 0 } else { 1 + (1..count).filter(jumps).count() };
        prop_assert_eq!(descriptors.len(), segments * case.kv.len());
        // Region by region.
        prop_assert!(descriptors.is_sorted_by_key(|descriptor| descriptor.local_region));
    }

    #[test]
    fn no_byte_is_written_twice_and_none_outside_the_kv_regions(case in case()) {
        for side in 0..2 {
            let regions = case.geometry(side).regions;
            let mut touched: Vec<Vec<u8>> = regions.iter().map(|region| vec![0; region.len as usize]).collect();
            for descriptor in all(case.plan()) {
                let region = if side == 0 { descriptor.local_region } else { descriptor.remote_region } as usize;
                prop_assert!(region < case.kv.len());
                let bytes = touched[region].get_mut(ranges(&descriptor)[side].clone());
                prop_assert!(bytes.is_some(), "{descriptor:?} leaves its region");
                bytes.unwrap_or_default().iter_mut().for_each(|byte| *byte += 1);
            }
            let twice = touched.iter().flatten().any(|&times| times > 1);
            prop_assert!(!twice);
            let once = touched.iter().flatten().filter(|times| **times == 1).count();
            prop_assert_eq!(once as u64, case.kv.iter().sum::<u64>() * case.pages[side].len() as u64);
        }
    }

    #[test]
    fn any_bounds_hand_out_the_same_bytes_in_the_same_order(
        case in case(),
        bounds in proptest::collection::vec((1_usize..6, 1_u64..120), 1..5),
    ) {
        let mut plan = case.plan();
        let mut descriptors = Vec::new();
        let mut left = plan.bytes_left();
        for &(max_descriptors, max_bytes) in bounds.iter().cycle() {
            if plan.is_done() {
                break;
            }
            let mut new = Vec::new();
            let progress = plan.fill(&mut new, max_descriptors, max_bytes);
            left -= progress.bytes;
            prop_assert_eq!(progress.descriptors, new.len());
            prop_assert_eq!(progress.bytes, new.iter().map(|descriptor| descriptor.len).sum::<u64>());
            prop_assert_eq!(progress.done, left == 0);
            prop_assert!((1..=max_descriptors).contains(&progress.descriptors));
            prop_assert!((1..=max_bytes).contains(&progress.bytes));
            prop_assert_eq!(plan.bytes_left(), left);
            prop_assert!(!new.windows(2).any(|pair| mergeable(&pair[0], &pair[1])));
            descriptors.append(&mut new);
        }
        prop_assert_eq!(merged(&descriptors), all(case.plan()));
    }

    #[test]
    fn a_page_that_fits_a_post_is_never_cut(case in case()) {
        let largest = case.kv.iter().copied().max().unwrap_or(1);
        let max_bytes = case.max_bytes.max(largest);
        for descriptor in posts(case.plan(), case.max_descriptors, max_bytes).concat() {
            let item_len = case.kv[descriptor.local_region as usize];
            prop_assert_eq!(descriptor.local_offset % item_len, 0);
            prop_assert_eq!(descriptor.len % item_len, 0);
        }
    }
}

/// Numbers at which arithmetic breaks.
fn edge() -> impl Strategy<Value = u64> {
    let near = (0_u32..64, 0_u64..3).prop_map(|(power, below)| (1_u64 << power).wrapping_sub(below));
    prop_oneof![0_u64..5, near, any::<u64>()]
}

/// What a peer may say that a region holds.
fn holds() -> impl Strategy<Value = Holds> {
    let told = prop_oneof![
        Just(Holds::Key),
        Just(Holds::KeyValue),
        Just(Holds::Latent),
        any::<u8>().prop_map(Holds::State)
    ];
    prop_oneof![2 => Just(Holds::Opaque), 1 => told]
}

/// What a peer may send as a region: often whole items, modulo 2^64.
fn foreign_region() -> impl Strategy<Value = RegionShape> {
    let role = prop_oneof![Just(RegionRole::Kv), Just(RegionRole::Aux), Just(RegionRole::State)];
    let content = (holds(), edge(), proptest::option::of(edge()), 0_u16..3, foreign_form());
    (role, edge(), edge(), any::<bool>(), content).prop_map(|(role, item_len, items, whole, content)| {
        let len = if whole { item_len.wrapping_mul(items) } else { items };
        let memory = MemoryKind::Vram;
        let (holds, layers, layer, group, form) = content;
        let (layer, layers) = (layer.map(|layer| layer as u32), layers as u32);
        RegionShape { role, len, item_len, memory, layer, layers, holds, group, form }
    })
}

/// What a peer may say of a region beside that; seldom anything.
fn foreign_form() -> impl Strategy<Value = Form> {
    let pair = || proptest::option::of((edge(), edge()).prop_map(|(one, other)| (one as u32, other as u32)));
    let own = (proptest::option::of(foreign_axes()), pair(), proptest::option::of(edge()), pair());
    let form = own.prop_map(|(axes, heads, head_dim, elements)| {
        let mut form = Form::default();
        (form.axes, form.heads, form.elements) = (axes, heads, elements);
        form.head_dim = head_dim.map(|elements| elements as u32);
        form
    });
    prop_oneof![2 => Just(Form::default()), 1 => form]
}

fn foreign_axes() -> impl Strategy<Value = Axes> {
    let all = vec![Axis::Layer, Axis::Part, Axis::Token, Axis::Head, Axis::Dim];
    let axis = proptest::sample::select(all.clone());
    let order = prop_oneof![3 => Just(all).prop_shuffle(), 1 => proptest::collection::vec(axis, 5)];
    (order, edge()).prop_map(|(order, pack)| {
        Axes::with_dim([order[0], order[1], order[2], order[3], order[4]]).packed(pack as u32)
    })
}

fn foreign_layout() -> impl Strategy<Value = Layout> {
    let group = (edge(), edge(), edge()).prop_map(|(page_size, heads, total)| {
        CacheGroup::pages(page_size as u32, heads as u32, total as u32)
    });
    let stages = proptest::collection::vec((edge(), edge()), 0..2);
    (foreign_axes(), [edge(), edge(), edge(), edge()], stages, proptest::collection::vec(group, 0..3))
        .prop_map(|(axes, numbers, stages, groups)| {
            Layout::default().with(|layout| {
                layout.axes = axes;
                layout.total_kv_heads = numbers[0] as u32;
                layout.kernel_page_size = numbers[1] as u32;
                layout.dcp_size = numbers[2] as u32;
                layout.dcp_rank = numbers[3] as u32;
                layout.stages = stages.into_iter().map(|(first, end)| (first as u32, end as u32)).collect();
                layout.groups = groups;
            })
        })
}

fn foreign_geometry() -> impl Strategy<Value = Geometry> {
    let regions = proptest::collection::vec(foreign_region(), 1..5);
    let layout = prop_oneof![Just(Layout::default()), foreign_layout()];
    (edge(), edge(), regions, any::<bool>(), layout).prop_map(
        |(num_pages, page_size, mut regions, tidy, layout)| {
            let num_pages = num_pages as u32;
            if tidy {
                regions.sort_by_key(|region| region.role);
                for region in &mut regions {
                    region.group = 0;
                    if region.role == RegionRole::Kv {
                        region.len = region.item_len.wrapping_mul(num_pages.into());
                    }
                }
            }
            Geometry {
                num_pages,
                page_size: (page_size as u32).max(u32::from(tidy)),
                dtype: "bf16".to_owned(),
                kv_heads: 1,
                head_dim: 1,
                model: String::new(),
                parallel: Parallel::default(),
                regions,
                layout,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn a_foreign_geometry_is_refused_or_leads_nowhere_outside_its_regions(
        geometry in foreign_geometry(),
        page in edge(),
        row in edge(),
    ) {
        let rows = geometry.aux_rows().unwrap_or(0);
        let valid = geometry.validate().is_ok();
        let Ok(map) = RegionMap::new(&geometry, &geometry) else {
            prop_assert!(!valid);
            return Ok(());
        };
        prop_assert!(valid);
        let last = geometry.num_pages - 1;
        let mut plans = Vec::new();
        for page in [page as u32, last] {
            let Ok(list) = PageList::from_pages([page]) else { continue };
            let plan = Plan::pages(&map, PagePlan::new(&list, &list).unwrap());
            prop_assert_eq!(plan.is_ok(), page <= last);
            plans.extend(plan);
        }
        for row in [row as u32, rows.saturating_sub(1)] {
            let plan = Plan::aux(&map, AuxIndex(row), AuxIndex(row));
            prop_assert_eq!(plan.is_ok(), row < rows);
            plans.extend(plan);
        }
        for descriptor in plans.into_iter().flat_map(all) {
            let region = &geometry.regions[descriptor.local_region as usize];
            let end = descriptor.local_offset.checked_add(descriptor.len);
            prop_assert!(end.is_some_and(|end| end <= region.len), "{descriptor:?} leaves {region:?}");
        }
    }
}

/// A cache of ours that says what it holds.
fn ours() -> Geometry {
    let kv =
        |addr: u64, holds| Region::dram(RegionRole::Kv, addr << 32, 10 * 64, 64).layers(0..2).holds(holds);
    let args = KvArgs::builder("engine", 0).pages(10, 16).region(kv(1, Holds::KeyValue));
    args.region(kv(2, Holds::Latent)).build().unwrap().geometry().clone()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn a_foreign_shape_that_fits_ours_leads_nowhere_outside_the_regions_of_either(
        mut geometry in foreign_geometry(),
        atoms in 0_u64..3,
        first in edge(),
    ) {
        // Near enough to be accepted at times.
        let tokens = geometry.page_size;
        geometry.num_pages = geometry.num_pages.clamp(1, 1000);
        for region in &mut geometry.regions {
            let pieces = u64::from(region.layers).saturating_mul(tokens.into()).max(1);
            region.item_len = pieces.saturating_mul(u64::from(region.holds.parts())).saturating_mul(atoms).clamp(1, 1 << 40);
            region.len = region.item_len * u64::from(geometry.num_pages);
        }
        let ours = ours();
        let Ok(map) = RegionMap::new(&ours, &geometry) else { return Ok(()) };
        let list = |pages: u32| PageList::from_pages(0..pages.min(200)).unwrap();
        let (here, there) = (list(ours.num_pages), list(geometry.num_pages));
        let _ = (map.local_pages(first as usize), map.check_counts(first as usize, 3));
        let plans = [
            Plan::chunk(&map, &here, 0, &there),
            Plan::chunk(&map, &here, first as usize, &there),
            Plan::suffix(&map, (&here, first as usize), (&there, 2)),
            Plan::window(&map, 0, (&here, 0), (&there, first as usize)),
        ];
        for mut plan in plans.into_iter().flatten() {
            let mut descriptors = Vec::new();
            plan.fill(&mut descriptors, 10_000, u64::MAX);
            for descriptor in descriptors {
                let (local, remote) = (&ours.regions[descriptor.local_region as usize], &geometry.regions[descriptor.remote_region as usize]);
                prop_assert!(descriptor.local_offset.checked_add(descriptor.len).is_some_and(|end| end <= local.len));
                prop_assert!(descriptor.remote_offset.checked_add(descriptor.len).is_some_and(|end| end <= remote.len));
            }
        }
    }
}
