//! The store on its own: who shares which pages, who waits, and what is lost.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use kv_examples::model::Rng;

use super::*;

const PAGE: usize = 4;

/// What the future gives if it is ready.
fn now<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

fn free(store: &Store) -> usize {
    let counts = store.counts();
    assert_eq!((counts.leaked(), counts.held, counts.requests), (0, 0, 0));
    counts.free
}

#[test]
fn full_pages_of_a_prefix_are_shared_but_never_that_of_the_last_token() {
    let store = Store::new(16, PAGE, 8);
    let chat: Vec<u32> = (0..12).collect();
    let first = now(store.take(&chat, 12)).unwrap();
    assert_eq!((first.numbers().len(), first.prefix_pages()), (3, 0));
    first.keep(&chat, 12);
    let again = now(store.take(&chat, 14)).unwrap();
    // All three pages are kept, and the last token is wanted.
    assert_eq!((again.numbers().len(), again.prefix_pages()), (4, 2));
    assert_eq!(again.numbers()[..2], first.numbers()[..2]);
    let other = now(store.take(&[0, 1, 2, 3, 9, 9, 9, 9, 9], 9)).unwrap();
    assert_eq!((other.prefix_pages(), other.numbers()[0]), (1, first.numbers()[0]));
    assert!(!first.numbers().contains(&other.numbers()[1]));
    let counts = store.counts();
    assert_eq!((counts.free, counts.held, counts.leaked()), (16 - 3 - 2 - 2, 7, 0));
    drop((first, again, other));
    assert_eq!((store.counts().cached, free(&store)), (3, 13));
    store.forget_prefixes();
    assert_eq!(free(&store), 16);
}

#[test]
fn requests_wait_in_order_until_pages_come_back_and_lent_pages_are_not_free() {
    let store = Store::new(4, PAGE, 8);
    let first = now(store.take(&[1; 12], 12)).unwrap();
    let lent = first.lend(2);
    let mut long = Box::pin(store.take(&[2; 16], 16));
    let mut short = Box::pin(store.take(&[3; 2], 2));
    let context = &mut Context::from_waker(Waker::noop());
    assert!(long.as_mut().poll(context).is_pending());
    // There is a page for it, and the one before it in the line comes first.
    assert!(short.as_mut().poll(context).is_pending());
    first.restore(lent);
    drop(first);
    let Poll::Ready(all) = long.as_mut().poll(context) else { panic!("pages are free") };
    assert!(short.as_mut().poll(context).is_pending());
    assert_eq!(all.numbers().len(), 4);
    drop((all, long));
    assert!(short.as_mut().poll(context).is_ready());
    drop(short);
    assert_eq!(free(&store), 4);
}

#[test]
fn pages_that_were_lent_and_not_restored_are_counted_as_leaked() {
    let store = Store::new(4, PAGE, 8);
    let taken = now(store.take(&[1; 12], 12)).unwrap();
    let _lost = taken.lend(2);
    assert_eq!(store.counts().leaked(), 0);
    drop(taken);
    assert_eq!((store.counts().leaked(), store.counts().free), (2, 2));
}

/// A thousand steps of some requests at once, with a memory that says whose KV each page holds.
#[test]
fn whatever_requests_do_a_shared_page_holds_their_tokens_and_no_page_is_lost() {
    let seed = std::env::var("KV_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7);
    println!("KV_SEED={seed}");
    let mut rng = Rng::new(seed);
    let store = Store::new(24, PAGE, 8);
    let mut memory: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let mut open: Vec<(Taken, Vec<u32>)> = Vec::new();
    let mut shared = 0;
    for _ in 0..5000 {
        if open.len() < 4 && rng.below(2) == 0 {
            // Few different tokens, so that prompts begin alike.
            let len = 1 + rng.below(24) as usize;
            let tokens: Vec<u32> = (0..len).map(|_| u32::from(rng.below(8) == 0)).collect();
            let Some(taken) = now(store.take(&tokens, len + rng.below(8) as usize)) else { continue };
            for (page, number) in tokens.chunks(PAGE).zip(&taken.numbers()[..taken.prefix_pages()]) {
                assert_eq!(memory.get(number).map(Vec::as_slice), Some(page));
                shared += 1;
            }
            // What it computes goes into pages that nobody else has.
            for (page, number) in tokens.chunks(PAGE).zip(taken.numbers()).skip(taken.prefix_pages()) {
                assert!(open.iter().all(|(other, _)| !other.numbers().contains(number)));
                memory.insert(*number, page.to_vec());
            }
            open.push((taken, tokens));
        } else if let Some(at) = (!open.is_empty()).then(|| rng.below(open.len() as u64) as usize) {
            if rng.below(3) > 0 {
                open[at].0.keep(&open[at].1, 24);
            } else {
                open.swap_remove(at);
            }
        }
        assert_eq!(store.counts().leaked(), 0);
    }
    assert!(shared > 1000, "{shared}");
    open.clear();
    store.forget_prefixes();
    assert_eq!(free(&store), 24);
}
