//! Page allocators against a model.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod fake;

use std::collections::BTreeSet;

use fake::{Rng, pages, seeds};
use kv_core::Pages;
use kv_poll::allocator::{FreeList, FreeReason, PageAllocator, RunAllocator};

fn random_walk(mut allocator: impl PageAllocator, first: u32, seed: u64) {
    let mut rng = Rng::new(seed);
    let capacity = allocator.capacity();
    let all: BTreeSet<u32> = (first..first + capacity as u32).collect();
    let mut free = all.clone();
    let mut out: Vec<Pages> = Vec::new();
    for step in 0..600 {
        if rng.below(2) == 0 {
            let n = rng.below(capacity / 3 + 2);
            let before = allocator.available();
            match allocator.allocate(n) {
                Some(got) => {
                    assert_eq!(got.len(), n, "step {step}");
                    for page in got.list().iter() {
                        assert!(free.remove(&page), "step {step}: page {page} is out twice, or foreign");
                    }
                    out.push(got);
                }
                None => assert!(n > before, "step {step}: {n} of {before} free pages refused"),
            }
        } else if !out.is_empty() {
            let index = rng.below(out.len());
            let mut token = out.swap_remove(index);
            let rest = token.split_off(rng.below(token.len() + 1));
            free.extend(token.list().iter());
            allocator.free(token).unwrap();
            out.push(rest);
        }
        if let Some(page) = free.iter().nth(rng.below(free.len())).copied() {
            // A token of an allocated page, if there is one, and a free one: all come back, none is freed.
            let wrong = all.difference(&free).next().copied().into_iter().chain([page]);
            let error = allocator.free(pages(wrong.clone())).unwrap_err();
            assert_eq!(error.reason, FreeReason::AlreadyFree { page }, "step {step}");
            assert_eq!(error.pages.list().iter().collect::<Vec<_>>(), wrong.collect::<Vec<_>>());
        }
        assert_eq!(allocator.available(), free.len(), "step {step}");
    }
    for token in out {
        allocator.free(token).unwrap();
    }
    let everything = allocator.allocate(capacity).unwrap();
    assert_eq!(everything.list().iter().collect::<BTreeSet<_>>(), all);
}

#[test]
fn free_list_never_gives_a_page_twice_and_loses_none() {
    seeds(40, |seed| random_walk(FreeList::over(5..5 + 90), 5, seed));
}

#[test]
fn run_allocator_never_gives_a_page_twice_and_loses_none() {
    seeds(40, |seed| random_walk(RunAllocator::over(5..5 + 90), 5, seed));
}

#[test]
fn foreign_pages_are_named_and_come_back() {
    fn check(mut allocator: impl PageAllocator) {
        let mine = allocator.allocate(10).unwrap();
        for (wrong, page) in [(vec![2], 2), (vec![18], 18), (vec![16, 17, 18], 18), (vec![12, 900], 900)] {
            let error = allocator.free(pages(wrong.clone())).unwrap_err();
            assert_eq!(error.reason, FreeReason::Foreign { page, first: 8, end: 18 });
            assert_eq!(error.pages.list().iter().collect::<Vec<_>>(), wrong);
        }
        assert_eq!(allocator.available(), 0);
        allocator.free(mine).unwrap();
        assert_eq!(allocator.available(), 10);
    }
    check(FreeList::over(8..18));
    check(RunAllocator::over(8..18));
}

#[test]
fn sizes_at_the_edges() {
    fn check(mut allocator: impl PageAllocator, capacity: usize) {
        assert_eq!((allocator.capacity(), allocator.available()), (capacity, capacity));
        assert!(allocator.allocate(capacity + 1).is_none());
        assert!(allocator.allocate(usize::MAX).is_none());
        assert!(allocator.allocate(0).unwrap().is_empty());
        assert_eq!(allocator.available(), capacity);
    }
    check(FreeList::new(0), 0);
    check(RunAllocator::new(0), 0);
    check(FreeList::new(65), 65);
    check(RunAllocator::new(65), 65);
    check(RunAllocator::over(std::ops::Range { start: 9, end: 3 }), 0);
    check(FreeList::over(u32::MAX - 3..u32::MAX), 3);
    check(RunAllocator::new(u32::MAX), kv_core::MAX_PAGES as usize);
}

/// Requests come and go at random; counts the runs of all allocations.
fn churn(mut allocator: impl PageAllocator, seed: u64) -> usize {
    let mut rng = Rng::new(seed);
    let mut out = Vec::new();
    let mut runs = 0;
    for _ in 0..4000 {
        let n = 1 + rng.below(40);
        if allocator.available() >= n + 400 {
            let got = allocator.allocate(n).unwrap();
            runs += got.list().runs().len();
            out.push(got);
        } else {
            allocator.free(out.swap_remove(rng.below(out.len()))).unwrap();
        }
    }
    runs
}

#[test]
fn runs_stay_few_after_churn_where_a_free_list_scatters() {
    seeds(5, |seed| {
        let (stack, runs) = (churn(FreeList::new(2000), seed), churn(RunAllocator::new(2000), seed));
        assert!(runs * 2 < stack, "seed {seed}: {runs} runs, the free list made {stack}");
    });
}

#[test]
fn a_request_goes_into_the_smallest_run_that_holds_it() {
    let mut cache = RunAllocator::new(100);
    let mut rest = cache.allocate(100).unwrap();
    let mut next = |len| {
        let tail = rest.split_off(len);
        std::mem::replace(&mut rest, tail)
    };
    let (first, mut gap, second, _gap, third) = (next(10), next(10), next(6), next(14), next(20));
    for run in [first, second, third] {
        cache.free(run).unwrap();
    }
    assert_eq!(cache.free_runs(), 3);
    assert_eq!(cache.allocate(6).unwrap(), pages(20..26));
    let mut large = cache.allocate(25).unwrap();
    assert_eq!(large, pages((40..60).chain(0..5)));
    assert_eq!((cache.available(), cache.free_runs()), (5, 1));
    let _far = gap.split_off(2);
    cache.free(gap).unwrap();
    cache.free(large.split_off(23)).unwrap();
    assert_eq!(cache.free_runs(), 1, "neighbours on both sides merge");
    assert_eq!(cache.available(), 9);
}

#[test]
fn a_dropped_token_is_named_as_lost_and_never_allocated_again() {
    fn check(mut allocator: impl PageAllocator) {
        let mut kept = allocator.allocate(6).unwrap();
        let dropped: Vec<u32> = kept.list().iter().skip(4).collect();
        drop(kept.split_off(4));
        assert_eq!(allocator.lost().iter().collect::<Vec<_>>(), dropped);
        allocator.free(kept).unwrap();
        assert_eq!(allocator.available(), 8);
        let rest = allocator.allocate(8).unwrap();
        assert!(rest.list().iter().all(|page| !dropped.contains(&page)));
        assert!(allocator.allocate(1).is_none());
        allocator.free(rest).unwrap();
        assert_eq!(allocator.lost().len(), 2);
    }
    check(FreeList::over(5..15));
    check(RunAllocator::over(5..15));
}

#[test]
fn an_allocated_page_is_freed_by_no_other_token_than_its_own() {
    fn check(mut mine: impl PageAllocator, mut other: impl PageAllocator) {
        let (my_pages, theirs) = (mine.allocate(3).unwrap(), other.allocate(3).unwrap());
        let error = mine.free(theirs).unwrap_err();
        assert_eq!(error.reason, FreeReason::OtherToken { page: 0 });
        assert_eq!((mine.available(), other.lost().len()), (1, 0));
        other.free(error.pages).unwrap();
        mine.free(my_pages).unwrap();
        assert_eq!((mine.available(), other.available()), (4, 4));
    }
    check(FreeList::new(4), RunAllocator::new(4));
    check(RunAllocator::new(4), FreeList::new(4));
}
