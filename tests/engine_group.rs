//! Two engines of two ranks each, each engine driven by one thread through an engine group over real workers.
//! Every rank gets its bytes, and pages come back once, however a request ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::time::Instant;

use kv_transfer::allocator::{PageAllocator, RunAllocator};
use kv_transfer::prelude::*;
use kv_transfer::{
    AuxIndex, Cause, EngineGroup, EngineGroupError, EngineReceiver, EngineSender, FinalLayers, Parallel,
    PeerCause, TransferMode,
};
use support::host::{Host, Setup};
use support::memory::{Shape, page_content, row_content};
use support::{PATIENCE, server};

const RANKS: u32 = 2;
const SHAPE: Shape = Shape { pages: 64, tensors: 4, piece: 768, page_major: false, rows: 4, aux_regions: 1 };

/// How a request ends, and which side ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Story {
    Sent,
    /// The pages are given before they are final.
    Overlapped,
    PrefillAborts,
    DecodeAborts,
    /// The handle is dropped with pages in the session.
    PrefillDrops,
    DecodeDrops,
}

/// An engine: its ranks, and the resources of its scheduler.
struct Engine {
    hosts: Vec<Host>,
    ranks: EngineGroup,
    cache: RunAllocator,
}

impl Engine {
    fn start(setup: impl Fn(u32) -> Setup) -> Engine {
        let hosts: Vec<Host> = (0..RANKS).map(|rank| setup(rank).start()).collect();
        let ranks = EngineGroup::new(hosts.iter().map(|host| host.manager.clone()).collect()).unwrap();
        Engine { hosts, ranks, cache: RunAllocator::new(SHAPE.pages) }
    }

    fn pages(&mut self, count: usize) -> Pages {
        let pages = self.cache.allocate(count).unwrap();
        for host in &self.hosts {
            pages.list().iter().for_each(|page| host.memory.check_page(page, &"a free page"));
        }
        pages
    }

    /// Pages in which every rank has bytes of its own.
    fn prompt(&mut self, count: usize, content: u64) -> Pages {
        let pages = self.pages(count);
        for (rank, host) in (0..).zip(&mut self.hosts) {
            for (position, page) in pages.list().iter().enumerate() {
                let bytes = page_content(content ^ rank, position, SHAPE.page_len());
                host.memory.write_page(page, &bytes);
            }
        }
        pages
    }

    fn turn(&self) {
        self.ranks.drain(|_| {});
    }

    fn check_idle(&self, what: &str) {
        assert_eq!(self.cache.available(), self.cache.capacity(), "{what}: free pages");
        for host in &self.hosts {
            host.memory.check_all(what);
            host.check_idle(what);
        }
    }
}

/// Advances both engines until `done` returns something.
fn until<T>(what: &str, engines: [&Engine; 2], mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        engines.iter().for_each(|engine| engine.turn());
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < deadline, "{what}: waited in vain");
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
}

fn reclaim<S: KvSession>(what: &str, engines: [&Engine; 2], mut session: S) -> Pages {
    // The peer is that of the first rank that has failed, and another rank may fail meanwhile.
    let cause = |session: &S| session.failure().map(|failure| failure.cause);
    let failed = cause(&session);
    let pages = until(what, engines, || session.reclaim()).pages;
    assert_eq!(cause(&session), failed, "{what}: the failure after the pages are back");
    pages
}

fn orphan(what: &str, engines: [&Engine; 2], of: &Engine) -> Pages {
    until(what, engines, || of.ranks.orphans().pop())
}

fn tell(story: Story, mode: TransferMode, prefill: &mut Engine, decode: &mut Engine, addr: &str, room: u64) {
    let what = format!("{story:?} {mode}");
    let content = room << 8;
    let options = SessionOptions::default().with(|options| options.mode = Some(mode));
    let mut sender: EngineSender = prefill.ranks.sender(addr, room.into(), &[], options.clone()).unwrap();
    let options = options.with(|options| options.lease_refs = pull(mode, &sender));
    let mut receiver: EngineReceiver = decode.ranks.receiver(addr, room.into(), options).unwrap();
    until(&what, [prefill, decode], || (receiver.poll() == KvPoll::WaitingForInput).then_some(()));

    let (mut prompt, room_for) = (prefill.prompt(6, content), decode.pages(6));
    let (sent, expected) = (prompt.list().clone(), room_for.list().clone());
    receiver.init(room_for, None).unwrap();
    sender.init(6, None).unwrap();
    let rest = prompt.split_off(2);
    if story == Story::Overlapped {
        let (first, second) = (sender.begin_chunk(prompt).unwrap(), sender.begin_chunk(rest).unwrap());
        sender.layers_final(FinalLayers::all(second)).unwrap();
        sender.layers_final(FinalLayers::all(first)).unwrap();
    } else {
        sender.send(prompt).unwrap();
        match story {
            Story::PrefillAborts => sender.abort(),
            Story::DecodeAborts => receiver.abort(),
            _ => {}
        }
        if story != Story::PrefillDrops {
            sender.send(rest).unwrap();
        } else {
            prefill.cache.free(rest).unwrap();
        }
    }

    let good = matches!(story, Story::Sent | Story::Overlapped);
    match story {
        Story::PrefillDrops => {
            drop(sender);
            let pages = orphan(&what, [prefill, decode], prefill);
            assert_eq!(pages.list(), &sent.slice(0, 2).unwrap(), "{what}");
            prefill.cache.free(pages).unwrap();
        }
        _ => {
            until(&what, [prefill, decode], || sender.poll().is_terminal().then_some(()));
            if story == Story::PrefillAborts {
                assert_eq!(sender.failure().unwrap().cause, Cause::Aborted, "{what}");
            }
            let pages = reclaim(&what, [prefill, decode], sender);
            assert_eq!(pages.list(), &sent, "{what}");
            prefill.cache.free(pages).unwrap();
        }
    }
    let pages = match story {
        Story::DecodeDrops => {
            drop(receiver);
            orphan(&what, [prefill, decode], decode)
        }
        _ => {
            until(&what, [prefill, decode], || receiver.poll().is_terminal().then_some(()));
            assert_eq!(receiver.poll() == KvPoll::Success, good, "{what}: {:?}", receiver.failure());
            if story == Story::PrefillAborts {
                let cause = receiver.failure().unwrap().cause;
                assert_eq!(cause, Cause::ByPeer(PeerCause::Aborted), "{what}");
            }
            reclaim(&what, [prefill, decode], receiver)
        }
    };
    assert_eq!(pages.list(), &expected, "{what}");
    for (rank, host) in (0..).zip(&mut decode.hosts) {
        match good {
            true => host.arrived(pages.list(), content ^ rank, &what),
            false => host.missed(pages.list(), content ^ rank, &what),
        }
    }
    decode.cache.free(pages).unwrap();
}

/// The lease ids that the router carries in pull mode: the sessions of all ranks.
fn pull(mode: TransferMode, sender: &EngineSender) -> Vec<kv_transfer::LeaseRef> {
    let lease_refs = sender.lease_refs();
    assert_eq!(lease_refs.len(), RANKS as usize);
    if mode == TransferMode::Pull { lease_refs } else { Vec::new() }
}

fn engines(addr: &str) -> [Engine; 2] {
    dealt_engines(addr, 1)
}

/// Two engines whose ranks hold pages in turn, in groups of `dcp_size`.
fn dealt_engines(addr: &str, dcp_size: u32) -> [Engine; 2] {
    let parallel = |tp_rank| {
        Parallel::default().with(|parallel| {
            parallel.tp_size = RANKS;
            parallel.tp_rank = tp_rank;
        })
    };
    [
        Engine::start(|rank| Setup {
            rank,
            parallel: parallel(rank),
            dcp_size,
            ..Setup::prefill(addr, SHAPE)
        }),
        Engine::start(|rank| Setup {
            rank,
            parallel: parallel(rank),
            dcp_size,
            ..Setup::decode(addr, SHAPE)
        }),
    ]
}

#[test]
fn every_rank_gets_its_bytes_and_pages_come_back_once_however_a_request_ends() {
    let (_server, addr) = server();
    let [mut prefill, mut decode] = engines(&addr);
    let stories = [
        Story::Sent,
        Story::Overlapped,
        Story::PrefillAborts,
        Story::DecodeAborts,
        Story::PrefillDrops,
        Story::Sent,
        Story::DecodeDrops,
        Story::Overlapped,
    ];
    let mut room = 0;
    for mode in [TransferMode::Push, TransferMode::Pull] {
        for story in stories {
            room += 1;
            tell(story, mode, &mut prefill, &mut decode, &addr, room);
        }
        for engine in [&prefill, &decode] {
            engine.check_idle(&format!("after all of {mode}"));
        }
    }
}

#[test]
fn the_aux_row_goes_with_the_last_chunk_even_without_pages() {
    let (_server, addr) = server();
    let [mut prefill, mut decode] = dealt_engines(&addr, RANKS);
    let stories = [TransferMode::Push, TransferMode::Pull].map(|mode| [(mode, false), (mode, true)]);
    for (room, (mode, overlapped)) in (1_u64..).zip(stories.into_iter().flatten()) {
        let what = format!("{mode}, overlapped: {overlapped}");
        // Three pages: the first rank alone has one for the end.
        let options = SessionOptions::default().with(|options| {
            options.mode = Some(mode);
            options.tokens = Some(40);
        });
        let mut sender = prefill.ranks.sender(&addr, room.into(), &[], options.clone()).unwrap();
        let options = options.with(|options| options.lease_refs = pull(mode, &sender));
        let mut receiver = decode.ranks.receiver(&addr, room.into(), options).unwrap();
        let (mut prompt, place) = (prefill.prompt(2, room << 8), decode.pages(2));
        let (sent, expected) = (prompt.list().clone(), place.list().clone());
        let last = prompt.split_off(1);
        receiver.init(place, Some(AuxIndex(1))).unwrap();
        sender.init(2, Some(AuxIndex(0))).unwrap();
        if overlapped {
            let chunk = sender.begin_chunk(prompt).unwrap();
            sender.layers_final(FinalLayers::all(chunk)).unwrap();
        } else {
            sender.send(prompt).unwrap();
        }
        // Time enough for what must not be sent yet.
        for _ in 0..50 {
            [&prefill, &decode].iter().for_each(|engine| engine.turn());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let row = row_content(room, SHAPE.row_len());
        prefill.hosts.iter_mut().for_each(|host| host.memory.write_row(0, &row));
        sender.send(last).unwrap();
        let both = [&prefill, &decode];
        until(&what, both, || (sender.poll().min(receiver.poll()).is_terminal()).then_some(()));
        assert_eq!(receiver.failure(), None, "{what}");
        let pages = reclaim(&what, [&prefill, &decode], sender);
        assert_eq!(pages.list(), &sent, "{what}");
        prefill.cache.free(pages).unwrap();
        let pages = reclaim(&what, [&prefill, &decode], receiver);
        assert_eq!(pages.list(), &expected, "{what}");
        for (rank, host) in (0..).zip(&mut decode.hosts) {
            let here = expected.slice(0, 2 - rank as usize).unwrap();
            host.arrived(&here, (room << 8) ^ rank, &what);
            host.memory.row_arrived(1, &row, &format!("{what}, rank {rank}"));
        }
        decode.cache.free(pages).unwrap();
    }
    for engine in [&prefill, &decode] {
        engine.check_idle("after all");
    }
}

/// Of three pages and of four, the first rank holds two. The second rank must not mistake the end.
#[test]
fn sides_that_disagree_about_the_end_of_a_request_fail() {
    let (_server, addr) = server();
    let [mut prefill, mut decode] = dealt_engines(&addr, RANKS);
    for (room, mode) in [(1, TransferMode::Push), (2, TransferMode::Pull)] {
        let what = mode.to_string();
        let options = |tokens| {
            SessionOptions::default().with(|options| {
                options.mode = Some(mode);
                options.tokens = Some(tokens);
            })
        };
        let mut sender = prefill.ranks.sender(&addr, room.into(), &[], options(64)).unwrap();
        let wanted = options(48).with(|options| options.lease_refs = pull(mode, &sender));
        let mut receiver = decode.ranks.receiver(&addr, room.into(), wanted).unwrap();
        let prompt = prefill.prompt(2, room << 8);
        receiver.init(decode.pages(2), None).unwrap();
        sender.init(2, None).unwrap();
        sender.send(prompt).unwrap();
        let both = [&prefill, &decode];
        until(&what, both, || receiver.poll().is_terminal().then_some(()));
        let cause = receiver.failure().map(|error| error.cause);
        if mode == TransferMode::Pull {
            assert_eq!(cause, Some(Cause::PageCount { sent: 2, registered: 1 }));
        }
        assert!(cause.is_some(), "{what}");
        let pages = reclaim(&what, both, receiver);
        until(&what, both, || sender.poll().is_terminal().then_some(()));
        let sent = reclaim(&what, both, sender);
        for (rank, host) in (0..).zip(&mut decode.hosts) {
            host.missed(pages.list(), (room << 8) ^ rank, &what);
        }
        decode.cache.free(pages).unwrap();
        prefill.cache.free(sent).unwrap();
    }
    for engine in [&prefill, &decode] {
        engine.check_idle("after all");
    }
}

#[test]
fn workers_of_different_engines_are_refused_as_a_group() {
    let (_server, addr) = server();
    let [prefill, decode] = engines(&addr);
    let managers = |engine: &Engine| engine.ranks.managers().to_vec();
    let mixed = [managers(&prefill), managers(&decode)].concat();
    let error = EngineGroup::new(mixed).unwrap_err();
    assert_eq!(
        error.to_string(),
        "engine is prefill on the first rank, but decode on rank number 2 of the group"
    );
    assert_eq!(EngineGroup::new(Vec::new()).unwrap_err(), EngineGroupError::Empty);
}
