//! Plans between caches that differ in pages, ranks or heads, and what of them is refused.

use super::*;
use crate::groups::CacheGroupSpan;
use crate::layout::Parallel;
use crate::layout::{CacheGroup, Holds, Layout};

/// One layer of keys, `page_size` bytes a page, whose units of pages can be told apart.
fn told(num_pages: u32, page_size: u32) -> Geometry {
    let item_len = u64::from(page_size);
    let region = Region::dram(RegionRole::Kv, 0x1000, u64::from(num_pages) * item_len, item_len);
    let args = KvArgs::builder("e", 0).pages(num_pages, page_size).region(region.layer(0).holds(Holds::Key));
    args.build().unwrap().geometry().clone()
}

/// A latent, one byte a page, whose pages are dealt to `size` ranks.
fn dealt(size: u32, rank: u32) -> Geometry {
    let layout = Layout { dcp_size: size, dcp_rank: rank, ..Layout::default() };
    let region = Region::dram(RegionRole::Kv, 0x1000, 40, 1).layer(0).holds(Holds::Latent);
    let parallel = Parallel { tp_size: size, tp_rank: rank, ..Parallel::default() };
    let args = KvArgs::builder("e", rank).pages(40, 1).parallel(parallel).layout(layout).region(region);
    args.build().unwrap().geometry().clone()
}

#[test]
fn a_chunk_with_more_pages_than_the_peer_is_refused_with_both_counts() {
    // Pages of two units here, of one at the peer; the chunk is pages 1 and 2 of the request: units 2 to 5.
    let map = RegionMap::new(&told(10, 4), &told(20, 2)).unwrap();
    let chunk = |remote: u32| {
        let remote = PageList::from_pages(10..10 + remote).unwrap();
        Plan::chunk(&map, &list(&[7, 4]), 1, &remote)
    };
    let descriptor = |local_offset, remote_offset, len| Descriptor {
        local_region: 0,
        remote_region: 0,
        local_offset,
        remote_offset,
        len,
    };
    assert_eq!(all(chunk(6).unwrap()), [descriptor(28, 24, 4), descriptor(16, 28, 4)]);
    assert_eq!(chunk(6).unwrap().counts(), Counts { pieces: 4, descriptors: 2 });
    // Only a part of the last page is missing.
    assert_eq!(all(chunk(5).unwrap()), [descriptor(28, 24, 4), descriptor(16, 28, 2)]);
    for remote in 0..5 {
        let error = PlanError::PageCount { local: 3, remote: remote as usize };
        assert_eq!(chunk(remote).unwrap_err(), error);
    }
    // Nothing needs no place.
    assert!(Plan::chunk(&map, &list(&[]), 3, &list(&[])).unwrap().is_done());
    assert!(Plan::chunk(&map, &list(&[]), 3, &list(&[1])).unwrap().is_done());
}

#[test]
fn a_chunk_of_dcp_pages_with_too_few_at_the_peer_is_refused() {
    // Pages 1, 3, 5 … of a request here, all of them at the peer.
    let map = RegionMap::new(&dealt(2, 1), &dealt(1, 0)).unwrap();
    let chunk = |remote: u32| {
        let remote = PageList::from_pages(10..10 + remote).unwrap();
        Plan::chunk(&map, &list(&[7, 4]), 1, &remote)
    };
    let offsets = |plan| {
        all(plan)
            .iter()
            .map(|descriptor| (descriptor.local_offset, descriptor.remote_offset))
            .collect::<Vec<_>>()
    };
    assert_eq!(offsets(chunk(6).unwrap()), [(7, 13), (4, 15)]);
    for remote in 0..6 {
        let error = PlanError::PageCount { local: 3, remote: remote as usize };
        assert_eq!(chunk(remote).unwrap_err(), error);
    }
}

#[test]
fn ranks_to_which_other_pages_are_dealt_share_none() {
    let map = RegionMap::new(&dealt(2, 0), &dealt(2, 1)).unwrap();
    assert!(Plan::chunk(&map, &list(&[1, 2]), 0, &list(&[3, 4])).unwrap().is_done());
    // Pages 0, 2, 4, 6 … here, 2, 6 … at the peer.
    let map = RegionMap::new(&dealt(2, 0), &dealt(4, 2)).unwrap();
    let descriptors = all(Plan::chunk(&map, &list(&[1, 2, 3, 4]), 0, &list(&[30, 31])).unwrap());
    let offsets: Vec<_> = descriptors
        .iter()
        .map(|descriptor| (descriptor.local_offset, descriptor.remote_offset, descriptor.len))
        .collect();
    assert_eq!(offsets, [(2, 30, 1), (4, 31, 1)]);
}

#[test]
fn pages_that_a_side_does_not_have_are_refused_however_a_plan_is_made() {
    let map = RegionMap::new(&told(10, 4), &told(20, 2)).unwrap();
    let out = |side, page, num_pages| {
        let error = PagesError::OutOfRange { page, num_pages };
        PlanError::Pages { side, error }
    };
    for (local, remote, error) in
        [([9, 10], [0, 1], out(Side::Local, 10, 10)), ([0, 9], [20, 19], out(Side::Remote, 20, 20))]
    {
        let (local, remote) = (list(&local), list(&remote));
        assert_eq!(Plan::chunk(&map, &local, 0, &remote).unwrap_err(), error);
        assert_eq!(Plan::suffix(&map, (&local, 0), (&remote, 0)).unwrap_err(), error);
        assert_eq!(Plan::suffix(&map, (&local, 3), (&remote, 70)).unwrap_err(), error);
    }
    assert!(Plan::suffix(&map, (&list(&[9]), 0), (&list(&[19]), 0)).is_ok());
}

#[test]
fn plans_end_at_the_largest_number_of_units_that_can_be_counted() {
    // 2^32 - 1 = 65537 × 65535 units, the most that one list without repetitions can have.
    let map = RegionMap::new(&told(65_537, 65_535), &told(10, 1)).unwrap();
    let pages = |last: u32| PageList::from_pages((0..65_537).chain(0..last)).unwrap();
    let plan = |last| Plan::suffix(&map, (&pages(last), 0), (&list(&[3, 5]), 0));
    assert_eq!(plan(0).unwrap().bytes_left(), 2);
    assert_eq!(plan(1).unwrap_err(), PlanError::TooLarge { items: 65_538, item_bytes: 65_535 });
    // Of whole pages, too: here the peer's physical pages are of one token.
    let mut single = told(65_537, 65_535);
    single.layout.kernel_page_size = 1;
    let map = RegionMap::new(&told(65_537, 65_535), &single).unwrap();
    let plan = |last| Plan::pages(&map, PagePlan::new(&pages(last), &pages(last))?);
    assert_eq!(plan(0).unwrap().bytes_left(), u64::from(u32::MAX));
    assert_eq!(plan(1).unwrap_err(), PlanError::TooLarge { items: 65_538, item_bytes: 65_535 });
    // Tokens that all lie together are one unit, and may be more.
    let map = RegionMap::new(&told(65_537, 65_536), &told(65_537, 65_536)).unwrap();
    let (here, there) = (pages(0), list(&[7]));
    assert_eq!(Plan::suffix(&map, (&here, 0), (&there, 0)).unwrap().bytes_left(), 65_536);
}

#[test]
fn page_numbers_beyond_any_cache_are_neither_wrapped_nor_planned() {
    let map = RegionMap::new(&told(10, 2), &told(10, 1)).unwrap();
    let huge = 1_usize << (usize::BITS - 1);
    // Twice as many units would be none.
    assert!(Plan::suffix(&map, (&list(&[1]), huge), (&list(&[2, 3]), 0)).unwrap().is_done());
    let counts = |local, remote| PlanError::PageCount { local, remote };
    assert_eq!(map.check_counts(huge + 1, 2), Err(counts(huge + 1, 2)));
    assert_eq!(map.check_counts(usize::MAX, 2), Err(counts(usize::MAX, 2)));
    let map = RegionMap::new(&dealt(2, 0), &dealt(1, 0)).unwrap();
    assert_eq!(map.check_counts(huge + 1, 2), Err(counts(huge + 1, 2)));
}

/// How many of so many pages are dealt to a rank.
fn held(size: u32, rank: u32, pages: usize) -> usize {
    (0..pages).skip(rank as usize).step_by(size as usize).len()
}

#[test]
fn page_counts_fit_if_some_number_of_tokens_has_them_on_both_ranks() {
    for (ours, theirs) in
        [((2, 1), (1, 0)), ((1, 0), (2, 0)), ((4, 3), (2, 1)), ((2, 0), (4, 2)), ((1, 0), (4, 3))]
    {
        let map = RegionMap::new(&dealt(ours.0, ours.1), &dealt(theirs.0, theirs.1)).unwrap();
        for (here, there) in (0..9).flat_map(|here| (0..17).map(move |there| (here, there))) {
            let possible =
                |tokens| held(ours.0, ours.1, tokens) == here && held(theirs.0, theirs.1, tokens) == there;
            let expected = (0..80).any(possible);
            assert_eq!(
                map.check_counts(here, there).is_ok(),
                expected,
                "{ours:?} {here}, {theirs:?} {there}"
            );
        }
    }
}

#[test]
fn as_many_pages_are_asked_for_as_the_tokens_can_need() {
    let pairs = [((2, 1), (1, 0)), ((4, 3), (2, 1)), ((2, 0), (4, 2)), ((1, 0), (4, 0))];
    for (ours, theirs) in pairs.into_iter().flat_map(|(one, other)| [(one, other), (other, one)]) {
        let map = RegionMap::new(&dealt(ours.0, ours.1), &dealt(theirs.0, theirs.1)).unwrap();
        for pages in 0..9 {
            let most = |from: (u32, u32), to: (u32, u32)| {
                let all = (0..80).filter(|tokens| held(from.0, from.1, *tokens) == pages);
                all.map(|tokens| held(to.0, to.1, tokens)).max().unwrap()
            };
            assert_eq!(map.local_pages(pages), most(theirs, ours), "{pages} of {theirs:?} at {ours:?}");
        }
        let huge = 1 << (usize::BITS - 1);
        assert!(map.local_pages(huge) > 1 << 60);
    }
    let map = RegionMap::new(&told(10, 4), &told(10, 8)).unwrap();
    assert!(map.local_pages(1 << (usize::BITS - 1)) > 1 << 60);
}

#[test]
fn pages_without_declared_content_move_whole_only_at_equal_sizes() {
    let map = RegionMap::new(&told(10, 4), &told(20, 2)).unwrap();
    assert_eq!(plan(&map, &[1], &[1]).unwrap_err(), PlanError::PageSize { local: 4, remote: 2 });
    let map = RegionMap::new(&dealt(1, 0), &dealt(2, 0)).unwrap();
    assert!(matches!(plan(&map, &[1], &[1]), Err(PlanError::PageSize { .. })));
    // Of one size, and yet cut into two units, as the peer's physical pages are smaller.
    let mut halves = told(20, 4);
    halves.layout.kernel_page_size = 2;
    let map = RegionMap::new(&told(10, 4), &halves).unwrap();
    let descriptor = |local_offset, remote_offset, len| Descriptor {
        local_region: 0,
        remote_region: 0,
        local_offset,
        remote_offset,
        len,
    };
    let plan = plan(&map, &[3, 4, 9], &[18, 19, 0]).unwrap();
    assert_eq!(plan.bytes_left(), 12);
    assert_eq!(all(plan), [descriptor(12, 72, 8), descriptor(36, 0, 4)]);
}

#[test]
fn ranks_that_hold_other_heads_share_no_byte() {
    let rank = |tp_rank| {
        let mut rank = told(10, 4);
        rank.parallel = Parallel { tp_size: 2, tp_rank, ..Parallel::default() };
        rank.layout.total_kv_heads = 2;
        rank
    };
    assert!(RegionMap::new(&rank(0), &rank(1)).unwrap().is_empty());
    assert!(RegionMap::directed(&rank(1), &rank(0), Side::Local).unwrap().is_empty());
    assert!(!RegionMap::new(&rank(1), &rank(1)).unwrap().is_empty());
    // Other layers of the KV, and yet the same state; of a second group there is none.
    let stage = |pp_rank| {
        let mut stage = grouped(1);
        stage.parallel = Parallel { pp_size: 2, pp_rank, ..Parallel::default() };
        stage.regions[0].layer = Some(pp_rank);
        stage.layout.groups.push(CacheGroup::slots(1, 1).optional());
        stage
    };
    let map = RegionMap::new(&stage(0), &stage(1)).unwrap();
    assert!(!map.is_empty() && map.has_group(0) && !map.has_group(1));
}

#[test]
fn a_map_of_some_layers_keeps_the_state_whatever_it_holds() {
    let mut opaque = grouped(2);
    opaque.regions[1].holds = Holds::Opaque;
    for geometry in [opaque, grouped(2)] {
        let map = RegionMap::layers(&geometry, &geometry, Side::Local, 3..4).unwrap();
        assert!(Plan::chunk(&map, &list(&[1]), 0, &list(&[2])).unwrap().is_done(), "layer 0 is none of them");
        let state = all(Plan::state(&map, 0, &list(&[3]), &list(&[1])).unwrap());
        assert_eq!(
            state.iter().map(|descriptor| (descriptor.local_offset, descriptor.len)).collect::<Vec<_>>(),
            [(6, 2)]
        );
    }
}

/// KV, and one group of items of `page_size` tokens.
fn grouped(page_size: u32) -> Geometry {
    let region = Region::dram(RegionRole::State, 0x8000, 40 * u64::from(page_size), page_size.into());
    let layout = Layout { groups: vec![CacheGroup::pages(page_size, 1, 1)], ..Layout::default() };
    let kv = Region::dram(RegionRole::Kv, 0x1000, 10, 1).layer(0).holds(Holds::Key);
    let args = KvArgs::builder("e", 0).pages(10, 1).layout(layout).region(kv);
    args.region(region.layer(0).holds(Holds::Key)).build().unwrap().geometry().clone()
}

#[test]
fn items_that_begin_earlier_and_end_at_the_same_token_cover_a_request() {
    for (from, to) in [(1, 1), (4, 2), (2, 4), (2, 3)] {
        let out = RegionMap::new(&grouped(from), &grouped(to)).unwrap();
        let inward = RegionMap::new(&grouped(to), &grouped(from)).unwrap();
        let spans = || (0..6).flat_map(|first| (0..5).map(move |len| CacheGroupSpan { first, len }));
        for (sent, wanted) in spans().flat_map(|sent| spans().map(move |wanted| (sent, wanted))) {
            // The request has so many tokens that both last items are in use.
            let last = |span: CacheGroupSpan, size| (span.first + span.len) * size;
            let (ours, theirs) = (last(sent, from), last(wanted, to));
            let ends = (0..60).any(|tokens: u32| {
                tokens.next_multiple_of(from) == ours && tokens.next_multiple_of(to) == theirs
            });
            let begins = wanted.len == 0 || sent.first * from < (wanted.first + 1) * to;
            assert_eq!(
                out.covers(0, sent, wanted, Side::Local),
                ends && begins,
                "{sent} of {from}, {wanted} of {to}"
            );
            assert_eq!(inward.covers(0, sent, wanted, Side::Remote), ends && begins);
        }
    }
    let different = RegionMap::new(&grouped(4), &grouped(2)).unwrap();
    let error = Plan::state(&different, 0, &list(&[1]), &list(&[1])).unwrap_err();
    assert_eq!(error, PlanError::PageSize { local: 4, remote: 2 });
}
