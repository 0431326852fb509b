//! Hybrid models: the pages, window pages and state slots of a request move together between real workers,
//! and all of them come back, however the request ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::time::{Duration, Instant};

use kv_conformance::Random;
use kv_transfer::prelude::*;
use kv_transfer::{CacheGroupItems, Receiver, Reclaimed, RequestCacheGroups, Sender, TransferMode};
use support::hybrid::{DRAFT, Hybrid, Items, KV, SLOTS, WINDOW};
use support::{PATIENCE, server};

/// The number of tokens in the sliding window.
const SPAN: usize = 10;

/// A request in progress. A half that was dropped early is `None`.
struct Request {
    room: u64,
    tokens: usize,
    sender: Option<Sender>,
    receiver: Option<Receiver>,
    /// True if neither side has ended the request early.
    whole: bool,
    /// The sender has the draft model's pages.
    drafted: bool,
    asks_for_draft: bool,
}

impl Request {
    /// The session options of a half. A half whose counterpart was dropped before they met ends at its
    /// deadline.
    fn options(&self, mode: TransferMode) -> SessionOptions {
        let deadline = (!self.whole).then_some(Duration::from_secs(5));
        SessionOptions::default().with(|options| {
            options.mode = Some(mode);
            options.deadline = deadline;
        })
    }

    fn window(&self) -> usize {
        self.tokens.saturating_sub(SPAN)
    }
}

/// The cache groups of the request on one side. The prefill side also computes their content.
fn groups(host: &mut Hybrid, request: &Request, draft: bool, computes: bool) -> RequestCacheGroups {
    let (tokens, window) = (request.tokens, request.window());
    let mut groups = RequestCacheGroups::none();
    for (lane, from, to) in [(SLOTS, 0, 1), (WINDOW, window, tokens), (DRAFT, 0, tokens)] {
        if lane == DRAFT && !draft {
            continue;
        }
        let (first, items) = host.take(lane, from, to);
        if computes {
            host.compute(&Items { lane, first, list: items.list() }, request.room);
        }
        groups.push(CacheGroupItems::from_number(lane as u16 - 1, first as u32, items)).unwrap();
    }
    groups
}

fn begin_sender(
    host: &mut Hybrid,
    addr: &str,
    request: &mut Request,
    mode: TransferMode,
    random: &mut Random,
) {
    let options = request.options(mode);
    let mut sender = host.manager.sender(addr, Room::Number(request.room), &[], options).unwrap();
    let (_, mut pages) = host.take(KV, 0, request.tokens);
    host.compute(&Items { lane: KV, first: 0, list: pages.list() }, request.room);
    sender.init(pages.len(), None).unwrap();
    let last = pages.split_off(random.below(pages.len()));
    sender.send(pages).unwrap();
    sender.give_groups(groups(host, request, request.drafted, true)).unwrap();
    sender.send(last).unwrap();
    request.sender = Some(sender);
}

fn begin_receiver(host: &mut Hybrid, addr: &str, request: &mut Request, mode: TransferMode) {
    let options = request.options(mode);
    let mut receiver = host.manager.receiver(addr, Room::Number(request.room), options).unwrap();
    receiver.give_groups(groups(host, request, request.asks_for_draft, false)).unwrap();
    let (_, pages) = host.take(KV, 0, request.tokens);
    receiver.init(pages, None).unwrap();
    request.receiver = Some(receiver);
}

/// Checks the items of a receiver that has succeeded.
fn check(host: &Hybrid, request: &Request, reclaimed: &Reclaimed) {
    let (tokens, window) = (request.tokens, request.window());
    let skips = request.asks_for_draft && !request.drafted;
    assert_eq!(reclaimed.skipped, if skips { vec![DRAFT as u16 - 1] } else { vec![] });
    let kv = Items { lane: KV, first: 0, list: reclaimed.pages.list() };
    host.check(&kv, (0, tokens), request.room);
    for items in reclaimed.groups.iter().filter(|items| !reclaimed.skipped.contains(&items.group)) {
        let lane = usize::from(items.group) + 1;
        let items = Items { lane, first: items.first as usize, list: items.items.list() };
        let range =
            if lane == WINDOW { (window, tokens) } else { (0, if lane == SLOTS { 1 } else { tokens }) };
        host.check(&items, range, request.room);
    }
}

/// Takes back what has ended. True once nothing is left of the request.
fn advance(prefill: &mut Hybrid, decode: &mut Hybrid, request: &mut Request, succeeded: &mut usize) -> bool {
    if let Some(reclaimed) = request.sender.as_mut().and_then(Sender::reclaim) {
        assert!(reclaimed.skipped.is_empty());
        prefill.give_all(reclaimed);
        request.sender = None;
    }
    if let Some(receiver) = &mut request.receiver {
        let reclaimed = receiver.reclaim();
        // After that: the session may end between two looks.
        let (poll, failure) = (receiver.poll(), receiver.failure());
        assert!(poll != KvPoll::Failed || !request.whole, "{failure:?}");
        if let Some(reclaimed) = reclaimed {
            if poll == KvPoll::Success {
                check(decode, request, &reclaimed);
                *succeeded += 1;
            }
            decode.give_all(reclaimed);
            request.receiver = None;
        }
    }
    request.sender.is_none() && request.receiver.is_none()
}

/// Serves requests, several at once, of which some end early.
fn serve(name: &str, mode: TransferMode, requests: u64, ends_early: usize) {
    let mut random = Random::new(name);
    let (server, addr) = server();
    let mut prefill = Hybrid::start(&addr, WorkerRole::Prefill, [16, 1, 4, 8], 96);
    let mut decode = Hybrid::start(&addr, WorkerRole::Decode, [8, 1, 2, 8], 192);
    let mut open: Vec<Request> = Vec::new();
    let (mut room, mut succeeded, mut whole) = (0, 0, 0);
    let mut deadline = Instant::now() + PATIENCE;
    while room < requests || !open.is_empty() {
        assert!(Instant::now() < deadline, "{} requests never end", open.len());
        if room < requests && open.len() < 6 {
            room += 1;
            deadline = Instant::now() + PATIENCE;
            let tokens = 1 + random.below(120);
            let (drafted, asks_for_draft) = (random.chance(70), random.chance(70));
            let early = random.chance(ends_early);
            let mut request = Request {
                room,
                tokens,
                sender: None,
                receiver: None,
                whole: !early,
                drafted,
                asks_for_draft,
            };
            let first = random.below(2);
            for step in 0..2 {
                match (step + first) % 2 {
                    0 => begin_sender(&mut prefill, &addr, &mut request, mode, &mut random),
                    _ => begin_receiver(&mut decode, &addr, &mut request, mode),
                }
            }
            whole += usize::from(request.whole);
            if early {
                std::thread::sleep(Duration::from_micros(random.below(1500) as u64));
                // Dropped sessions give back through their manager.
                match random.below(4) {
                    0 => request.sender.iter_mut().for_each(Sender::abort),
                    1 => request.receiver.iter_mut().for_each(Receiver::abort),
                    2 => drop(request.sender.take()),
                    _ => drop(request.receiver.take()),
                }
            }
            open.push(request);
        }
        open.retain_mut(|request| !advance(&mut prefill, &mut decode, request, &mut succeeded));
        for host in [&mut prefill, &mut decode] {
            host.manager.orphans().into_iter().for_each(|pages| host.give(KV, pages));
            host.manager.orphan_groups().into_iter().for_each(|groups| host.give_groups(groups));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    println!("{succeeded} of {requests} succeeded, {whole} were not ended early");
    assert!(succeeded >= whole);
    prefill.close("prefill");
    decode.close("decode");
    server.stop();
}

#[test]
fn pages_windows_and_slots_are_pushed_and_the_bytes_are_right() {
    serve("push", TransferMode::Push, 60, 0);
}

#[test]
fn pages_windows_and_slots_are_pulled_and_the_bytes_are_right() {
    serve("pull", TransferMode::Pull, 60, 0);
}

#[test]
fn every_item_comes_back_from_pushed_requests_that_end_early() {
    serve("push, early ends", TransferMode::Push, 80, 60);
}

#[test]
fn every_item_comes_back_from_pulled_requests_that_end_early() {
    serve("pull, early ends", TransferMode::Pull, 80, 60);
}
