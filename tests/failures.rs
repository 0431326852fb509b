//! Failures: each ends both halves of its request soon, with the true cause, and gives every page back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::io::ErrorKind;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use kv_conformance::Random;
use kv_transfer::Limits;
use kv_transfer::prelude::*;
use kv_transfer::{
    AuxIndex, BootstrapError, Cause, Mismatch, Obstacle, OpenError, OsError, PagesError, PeerCause, Phase,
};
use support::host::{Host, Setup};
use support::memory::Shape;
use support::pair::Pair;
use support::traffic::{Load, run};
use support::{PATIENCE, ended, failed, reclaimed, server, until};

const SMALL: Shape = Shape { pages: 64, tensors: 4, piece: 128, page_major: false, rows: 8, aux_regions: 1 };
/// Long enough to be caught in the middle: 32 MiB in pieces.
const LARGE: Shape =
    Shape { pages: 512, tensors: 2, piece: 32 << 10, page_major: false, rows: 0, aux_regions: 0 };

fn pair() -> Pair {
    Pair::new(SMALL, |_| ())
}

fn within(deadline: Duration) -> SessionOptions {
    SessionOptions::default().with(|options| options.deadline = Some(deadline))
}

/// Runs a test in one room with both orders of opening.
fn in_both_orders(pair: &mut Pair, room: u64, test: impl Fn(&mut Pair, u64, bool)) {
    test(pair, room, true);
    test(pair, room + 1, false);
}

#[test]
fn halves_that_give_up_at_any_moment_end_both_and_lose_no_page() {
    let mut random = Random::new("halves_that_give_up_at_any_moment_end_both_and_lose_no_page");
    for (shape, command_queue) in
        [(Shape::layer_major(700, 8, 512), 4096), (Shape::page_major(700, 4, 4096), 8)]
    {
        let shape = Shape { rows: 512, ..shape };
        let mut pair = Pair::new(shape, |setup| {
            setup.command_queue = command_queue;
            setup.limits = Limits::default().with(|limits| limits.max_post_bytes = 8 << 10);
            setup.max_inflight = 4;
        });
        let load = Load { requests: 400, at_once: 24, max_pages: 24, give_up: 35 };
        let (prefills, decodes) =
            (std::slice::from_mut(&mut pair.prefill), std::slice::from_mut(&mut pair.decode));
        let tally = run(&mut random, prefills, decodes, load);
        println!("{tally:?}");
        let seen = [tally.sent, tally.received, tally.aborted, tally.dropped];
        assert!(seen.iter().all(|seen| *seen > 0), "{tally:?}");
        assert!(tally.senders_told > 0 && tally.receivers_told > 0, "{tally:?}");
        pair.close();
    }
}

/// After an abort, no copy touches pages that came back, not even the copy that was in flight.
#[test]
fn an_abort_ends_a_long_copy_before_the_pages_come_back() {
    // Everything is one post: when the abort comes, most of it is still to be copied.
    let mut pair = Pair::new(LARGE, |setup| {
        setup.limits = Limits::default().with(|limits| limits.max_post_bytes = 1 << 30);
        setup.runs = true;
    });
    let most = LARGE.pages as usize;
    let mine = vec![0xee; LARGE.page_len()];
    for room in 0..8 {
        let by_sender = room % 2 == 0;
        let mut receiver = pair.receiver(room);
        let into = pair.decode.room_for(most);
        let list: Vec<u32> = into.list().iter().collect();
        let before = pair.decode.memory.page(list[0]);
        receiver.init(into, None).unwrap();
        let mut sender = pair.announced(room, most);
        // The last page is never given: whenever the abort comes, it comes before the end.
        let mut pages = pair.prefill.prompt(most, room);
        let kept = pages.split_off(most - 1);
        sender.send(pages).unwrap();
        let deadline = Instant::now() + PATIENCE;
        while pair.decode.memory.page(list[0]) == before {
            assert!(Instant::now() < deadline, "nothing comes");
        }
        let (sender_cause, receiver_cause) = if by_sender {
            sender.abort();
            (Cause::Aborted, Cause::ByPeer(PeerCause::Aborted))
        } else {
            receiver.abort();
            (Cause::ByPeer(PeerCause::Aborted), Cause::Aborted)
        };
        // The moment that the pages are back they are written on, from the end, which a copy that
        // still went on would reach last.
        while !receiver.poll().is_terminal() {
            assert!(Instant::now() < deadline, "the receiver does not end");
        }
        assert_eq!(receiver.failure().unwrap().cause, receiver_cause);
        let back = loop {
            if let Some(back) = receiver.reclaim() {
                break back.pages;
            }
            assert!(Instant::now() < deadline, "the pages do not come back");
        };
        let (head, tail) = list.split_at(most / 2);
        tail.iter().rev().for_each(|page| pair.decode.memory.write_page(*page, &mine));
        pair.decode.missed(&PageList::from_pages(head.iter().copied()).unwrap(), room, &"the first half");
        assert_eq!(back.list().iter().collect::<Vec<_>>(), list);
        pair.decode.free(back);
        assert_eq!(failed(&sender), sender_cause);
        assert_eq!(pair.end_sender(sender), most - 1);
        pair.prefill.free(kept);
        pair.decode.memory.check_all("after the abort");
    }
    pair.close();
}

#[test]
fn sides_that_disagree_about_the_number_of_pages_both_learn_both_numbers() {
    let mut pair = pair();
    in_both_orders(&mut pair, 1, |pair, room, sender_first| {
        let sender = sender_first.then(|| pair.announced(room, 5));
        let receiver = pair.registered(room, 4);
        let sender = sender.unwrap_or_else(|| pair.announced(room, 5));
        assert_eq!(failed(&sender), Cause::PageCount { sent: 5, registered: 4 });
        assert_eq!(failed(&receiver), Cause::ByPeer(PeerCause::PageCount { sent: 5, registered: 4 }));
        assert_eq!(pair.end_sender(sender), 0);
        assert_eq!(pair.end_receiver(receiver, room), 4);
    });
    pair.close();
}

#[test]
fn an_aux_row_on_one_side_only_fails_both_halves() {
    let mut pair = pair();
    in_both_orders(&mut pair, 1, |pair, room, sender_has_it| {
        let row = Some(AuxIndex(3));
        let mut sender = pair.sender(room);
        sender.init(2, row.filter(|_| sender_has_it)).unwrap();
        sender.send(pair.prefill.prompt(2, room)).unwrap();
        let mut receiver = pair.receiver(room);
        receiver.init(pair.decode.room_for(2), row.filter(|_| !sender_has_it)).unwrap();
        let (sender_row, receiver_row) = (sender_has_it, !sender_has_it);
        assert_eq!(failed(&sender), Cause::AuxOneSided { sender: sender_row, receiver: receiver_row });
        let told = PeerCause::AuxOneSided { sender: sender_row, receiver: receiver_row };
        assert_eq!(failed(&receiver), Cause::ByPeer(told));
        assert_eq!(pair.end_sender(sender), 2);
        assert_eq!(pair.end_receiver(receiver, room), 2);
    });
    pair.close();
}

/// Pages of a pool that is larger than the cache.
fn minted(list: PageList) -> Pages {
    PagePool::new(2 * SMALL.pages).adopt(list).unwrap()
}

#[test]
fn a_sender_with_contradictory_calls_fails_with_the_broken_rule() {
    type Misuse = fn(&mut Pair, &mut kv_transfer::Sender) -> Cause;
    let misuses: [Misuse; 5] = [
        |pair, sender| {
            sender.init(2, None).unwrap();
            sender.send(pair.prefill.prompt(3, 0)).unwrap();
            Cause::TooManyPages { sent: 3, announced: 2 }
        },
        |pair, sender| {
            sender.send(pair.prefill.prompt(1, 0)).unwrap();
            Cause::InitOrder
        },
        |_, sender| {
            sender.init(2, None).unwrap();
            sender.init(2, None).unwrap();
            Cause::InitOrder
        },
        |_, sender| {
            sender.init(2, None).unwrap();
            sender.send(minted(PageList::from_pages([SMALL.pages]).unwrap())).unwrap();
            Cause::BadPages(PagesError::OutOfRange { page: SMALL.pages, num_pages: SMALL.pages })
        },
        |_, sender| {
            sender.init(2, Some(AuxIndex(SMALL.rows))).unwrap();
            Cause::BadAux { index: SMALL.rows, rows: SMALL.rows }
        },
    ];
    let mut pair = pair();
    for (room, misuse) in (1..).zip(misuses) {
        let receiver = pair.registered(room, 2);
        let mut sender = pair.sender(room);
        let cause = misuse(&mut pair, &mut sender);
        assert_eq!(failed(&sender), cause);
        assert_eq!(failed(&receiver), Cause::ByPeer(PeerCause::BadArguments), "{cause}");
        let pages = reclaimed(sender);
        if !matches!(cause, Cause::BadPages(_)) {
            pair.prefill.free(pages);
        } else {
            assert_eq!(pages.list().iter().collect::<Vec<_>>(), [SMALL.pages]);
        }
        assert_eq!(pair.end_receiver(receiver, 0), 2);
    }
    pair.close();
}

#[test]
fn a_receiver_with_contradictory_calls_fails_and_its_sender_is_told() {
    let mut pair = pair();
    let mut sender = pair.announced(1, 2);
    sender.send(pair.prefill.prompt(2, 1)).unwrap();
    let mut receiver = pair.receiver(1);
    let beyond = PageList::from_pages([7, SMALL.pages + 4]).unwrap();
    receiver.init(minted(beyond.clone()), None).unwrap();
    let cause = PagesError::OutOfRange { page: SMALL.pages + 4, num_pages: SMALL.pages };
    assert_eq!(failed(&receiver), Cause::BadPages(cause));
    assert_eq!(failed(&sender), Cause::ByPeer(PeerCause::BadArguments));
    assert_eq!(*reclaimed(receiver).list(), beyond);
    assert_eq!(pair.end_sender(sender), 2);

    let (sender, mut receiver) = (pair.announced(2, 2), pair.registered(2, 2));
    let second = pair.decode.room_for(3);
    receiver.init(second, None).unwrap();
    assert_eq!(failed(&receiver), Cause::InitOrder);
    assert_eq!(failed(&sender), Cause::ByPeer(PeerCause::BadArguments));
    assert_eq!(pair.end_receiver(receiver, 0), 5);
    assert_eq!(pair.end_sender(sender), 0);
    pair.close();
}

#[test]
fn caches_that_cannot_be_paired_fail_with_field_and_both_values() {
    let (_server, addr) = server();
    let prefill = Setup { page_size: 32, ..Setup::prefill(&addr, SMALL) }.start();
    let decode = Setup { page_size: 16, ..Setup::decode(&addr, SMALL) }.start();
    let mut pair = Pair { prefill, decode, addr, server: _server };
    for room in 0..3 {
        let sender = pair.announced(room, 2);
        let receiver = pair.registered(room, 2);
        let mismatch = |ours: u32, theirs: u32| Mismatch {
            field: "page_size".to_owned(),
            ours: ours.to_string(),
            theirs: theirs.to_string(),
        };
        assert_eq!(failed(&receiver), Cause::Incompatible(mismatch(16, 32)));
        assert_eq!(failed(&sender), Cause::ByPeer(PeerCause::Incompatible(mismatch(16, 32))));
        assert_eq!(pair.end_sender(sender), 0);
        assert_eq!(pair.end_receiver(receiver, 0), 2);
    }
    pair.prefill.close("prefill");
    pair.decode.close("decode");
}

/// A request at an address without a server ends at its deadline, and its error names the last answer.
fn names_the_last_answer(decode: &mut Host, at: &str, last: &BootstrapError) {
    // Where the machine stands still for a whole deadline nobody was asked: the next one is longer.
    for after in [1, 5, 25].map(Duration::from_secs) {
        let mut receiver = decode.receiver(at, 1, within(after));
        receiver.init(decode.room_for(3), None).unwrap();
        let cause = failed(&receiver);
        assert_eq!(receiver.failure().unwrap().phase, Phase::Bootstrap);
        decode.free(reclaimed(receiver));
        if cause != (Cause::DeadlineExceeded { after, last: None }) {
            let last = Some(Obstacle::Bootstrap(last.clone()));
            assert_eq!(cause, Cause::DeadlineExceeded { after, last });
            return;
        }
    }
    panic!("{at} was never asked");
}

#[test]
fn an_address_without_a_server_is_named_at_the_deadline() {
    let decode = |addr: &str| Setup::decode(addr, SMALL).start();
    let (server, addr) = server();
    let mut decode = decode(&addr);
    let free_port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let refused = OsError { call: "connect", kind: ErrorKind::ConnectionRefused, errno: Some(111) };
    let refused = BootstrapError::Unreachable(refused);
    names_the_last_answer(&mut decode, &free_port, &refused);
    // A server, but no prefill engine.
    names_the_last_answer(&mut decode, &addr, &BootstrapError::UnknownRank);
    // What no retry mends does not wait for the deadline.
    let receiver = decode.receiver("no port here", 2, SessionOptions::default());
    let cause = Cause::Bootstrap(BootstrapError::Address("no port here".to_owned()));
    assert_eq!(failed(&receiver), cause);
    drop(reclaimed(receiver));
    decode.close("decode");
    server.stop();
}

#[test]
fn a_half_without_a_counterpart_ends_at_its_deadline_and_latecomers_learn() {
    let mut pair = pair();
    let after = Duration::from_millis(400);
    let mut sender = pair.prefill.sender(1, within(after));
    sender.init(2, None).unwrap();
    sender.send(pair.prefill.prompt(2, 1)).unwrap();
    let mut receiver = pair.decode.receiver(&pair.addr, 2, within(after));
    receiver.init(pair.decode.room_for(4), None).unwrap();
    assert_eq!(failed(&sender), Cause::DeadlineExceeded { after, last: None });
    assert_eq!(failed(&receiver), Cause::DeadlineExceeded { after, last: None });
    assert_eq!(pair.end_sender(sender), 2);
    assert_eq!(pair.end_receiver(receiver, 0), 4);

    let (sender, receiver) = (pair.announced(2, 4), pair.registered(1, 2));
    assert_eq!(failed(&sender), Cause::ByPeer(PeerCause::DeadlineExceeded));
    assert_eq!(failed(&receiver), Cause::ByPeer(PeerCause::DeadlineExceeded));
    assert_eq!(pair.end_sender(sender), 0);
    assert_eq!(pair.end_receiver(receiver, 0), 2);
    pair.close();
}

#[test]
fn a_half_that_waits_too_long_for_its_scheduler_fails_both_halves() {
    let mut pair = pair();
    let after = Duration::from_millis(500);
    // The sender's scheduler gives one page of two, and no more.
    let mut sender = pair.prefill.sender(1, within(after));
    sender.init(2, None).unwrap();
    sender.send(pair.prefill.prompt(1, 1)).unwrap();
    let receiver = pair.registered(1, 2);
    // The receiver's scheduler gives no pages.
    let idle = pair.decode.receiver(&pair.addr, 2, within(after));
    let waiting = pair.announced(2, 3);
    assert_eq!(failed(&sender), Cause::DeadlineExceeded { after, last: None });
    assert_eq!(failed(&receiver), Cause::ByPeer(PeerCause::DeadlineExceeded));
    assert_eq!(failed(&idle), Cause::DeadlineExceeded { after, last: None });
    assert_eq!(failed(&waiting), Cause::ByPeer(PeerCause::DeadlineExceeded));
    assert_eq!(pair.end_sender(sender), 1);
    assert_eq!(pair.end_receiver(receiver, 1), 2);
    assert_eq!(pair.end_receiver(idle, 0), 0);
    assert_eq!(pair.end_sender(waiting), 0);
    pair.close();
}

#[test]
fn a_prefill_worker_that_stops_tells_its_receivers_and_gives_all_pages_back() {
    let mut pair = pair();
    let mut half_sent = pair.announced(1, 4);
    half_sent.send(pair.prefill.prompt(3, 1)).unwrap();
    let unmet = pair.announced(2, 4);
    let receiving = pair.registered(1, 4);
    let alone = pair.registered(3, 5);
    let mut unregistered = pair.receiver(4);
    until("meeting", || half_sent.poll() == KvPoll::Transferring);
    until("meeting", || unregistered.poll() == KvPoll::WaitingForInput);
    until("registration", || alone.poll() == KvPoll::Transferring);

    let started = Instant::now();
    let report = pair.prefill.stop();
    assert!(started.elapsed() < PATIENCE);
    assert_eq!((report.sessions_ended, report.pages_quarantined, report.posts_in_flight), (2, 0, 0));
    assert!(!report.panicked);
    assert_eq!(half_sent.failure().unwrap().cause, Cause::WorkerStopped);
    assert_eq!(unmet.failure().unwrap().cause, Cause::WorkerStopped);
    let opened = pair.prefill.manager.sender(&pair.addr, Room::Number(9), &[], SessionOptions::default());
    assert_eq!(opened.map(drop).unwrap_err(), OpenError::WorkerStopped);
    pair.prefill.free(reclaimed(half_sent));
    drop(reclaimed(unmet));

    assert_eq!(failed(&receiving), Cause::ByPeer(PeerCause::WorkerStopped));
    // Nobody was going to serve these: they learn of the stop, or that nobody is there any more.
    let gone = |cause: Cause| matches!(cause, Cause::ByPeer(PeerCause::WorkerStopped) | Cause::PeerLost);
    assert!(gone(failed(&alone)), "{:?}", alone.failure());
    let _ = unregistered.init(pair.decode.room_for(2), None);
    assert!(gone(failed(&unregistered)), "{:?}", unregistered.failure());
    let pages = reclaimed(receiving);
    pair.decode.missed(pages.list(), 1, &"stopped");
    pair.decode.free(pages);
    pair.decode.free(reclaimed(alone));
    pair.decode.free(reclaimed(unregistered));
    // The registration was withdrawn: no time is lost with a worker that is not there.
    names_the_last_answer(&mut pair.decode, &pair.addr, &BootstrapError::UnknownRank);
    pair.decode.close("decode");
    assert_eq!(pair.prefill.cache.available(), SMALL.pages as usize);
}

#[test]
fn a_decode_worker_that_stops_tells_its_senders_and_gives_all_pages_back() {
    let mut pair = pair();
    let mut half_sent = pair.announced(1, 4);
    half_sent.send(pair.prefill.prompt(3, 1)).unwrap();
    let registered = pair.announced(2, 2);
    let receivers = [pair.registered(1, 4), pair.registered(2, 2)];
    let unmet = pair.announced(3, 2);
    until("meeting", || half_sent.poll() == KvPoll::Transferring);
    until("meeting", || registered.poll() == KvPoll::WaitingForInput);

    let report = pair.decode.stop();
    assert_eq!((report.sessions_ended, report.pages_quarantined, report.posts_in_flight), (2, 0, 0));
    for (receiver, content) in receivers.into_iter().zip([1, 2]) {
        assert_eq!(receiver.failure().unwrap().cause, Cause::WorkerStopped);
        let pages = reclaimed(receiver);
        pair.decode.missed(pages.list(), content, &"stopped");
        pair.decode.free(pages);
    }
    assert_eq!(pair.decode.cache.available(), SMALL.pages as usize);
    pair.decode.memory.check_all("decode");
    for sender in [half_sent, registered] {
        assert_eq!(failed(&sender), Cause::ByPeer(PeerCause::WorkerStopped));
        pair.end_sender(sender);
    }
    // A sender that nobody has come for yet is nobody's business: another engine may come.
    assert_eq!(unmet.poll(), KvPoll::Bootstrapping);
    let mut other = Setup { engine: "another".to_owned(), ..Setup::decode(&pair.addr, SMALL) }.start();
    let mut receiver = other.receiver(&pair.addr, 3, SessionOptions::default());
    receiver.init(other.room_for(2), None).unwrap();
    let mut sender = unmet;
    sender.send(pair.prefill.prompt(2, 3)).unwrap();
    assert_eq!(ended(&receiver), KvPoll::Success, "{:?}", receiver.failure());
    let pages = reclaimed(receiver);
    other.arrived(pages.list(), 3, &"room 3");
    other.free(pages);
    assert_eq!(ended(&sender), KvPoll::Success);
    pair.end_sender(sender);
    other.close("another");
    pair.prefill.close("prefill");
}

#[test]
fn pages_of_dropped_handles_become_orphans_and_the_other_side_is_told() {
    let mut pair = pair();
    // A sender that is dropped while half of its pages are on their way.
    let receiver = pair.registered(1, 6);
    let mut sender = pair.announced(1, 6);
    for (chunk, pages) in [2, 1].into_iter().enumerate() {
        sender.send(pair.prefill.prompt(pages, chunk as u64)).unwrap();
    }
    until("transfer", || sender.poll() == KvPoll::Transferring);
    drop(sender);
    assert_eq!(failed(&receiver), Cause::ByPeer(PeerCause::Aborted));
    until("orphans", || pair.prefill.gauges().pages_orphaned() == 3);
    let orphans = pair.prefill.manager.orphans();
    assert_eq!(orphans.iter().map(Pages::len).sum::<usize>(), 3);
    orphans.into_iter().for_each(|pages| pair.prefill.free(pages));
    assert_eq!(pair.prefill.gauges().pages_orphaned(), 0);
    let pages = reclaimed(receiver);
    // Two prompts were sent under one room here: what arrived is each chunk's own.
    let shape = pair.decode.memory.shape;
    for (position, page) in pages.list().iter().enumerate() {
        let (content, position) = if position < 2 { (0, position) } else { (1, position - 2) };
        let new = support::memory::page_content(content, position, shape.page_len());
        pair.decode.memory.page_failed(page, &new, &"a receiver whose sender was dropped");
    }
    pair.decode.free(pages);

    // A receiver that is dropped while its sender has not given everything.
    let receiver = pair.registered(2, 4);
    let mut sender = pair.announced(2, 4);
    sender.send(pair.prefill.prompt(3, 2)).unwrap();
    until("transfer", || sender.poll() == KvPoll::Transferring);
    drop(receiver);
    assert_eq!(failed(&sender), Cause::ByPeer(PeerCause::Aborted));
    pair.end_sender(sender);
    until("orphans", || pair.decode.gauges().pages_orphaned() == 4);
    for pages in pair.decode.manager.orphans() {
        pair.decode.missed(pages.list(), 2, &"a dropped receiver");
        pair.decode.free(pages);
    }

    // Handles that are dropped when everything is over hand out their pages at once.
    let (mut sender, receiver) = (pair.announced(3, 2), pair.registered(3, 2));
    sender.send(pair.prefill.prompt(2, 3)).unwrap();
    assert_eq!((ended(&receiver), ended(&sender)), (KvPoll::Success, KvPoll::Success));
    until("pages", || {
        pair.decode.gauges().pages_quarantined() + pair.prefill.gauges().pages_quarantined() == 0
    });
    drop((sender, receiver));
    for pages in pair.decode.manager.orphans() {
        pair.decode.arrived(pages.list(), 3, &"room 3");
        pair.decode.free(pages);
    }
    pair.prefill.manager.orphans().into_iter().for_each(|pages| pair.prefill.free(pages));
    pair.close();
}

#[test]
fn as_many_sessions_as_allowed_are_open_and_no_more() {
    let mut pair = Pair::new(SMALL, |setup| setup.max_sessions = 5);
    until("the first request to be over", || pair.prefill.gauges().sessions_open == 0);
    let mut senders: Vec<_> = (0..5).map(|room| pair.sender(room)).collect();
    let refused = pair.prefill.manager.sender(&pair.addr, Room::Number(9), &[], SessionOptions::default());
    assert_eq!(refused.map(drop).unwrap_err(), OpenError::TooManySessions { open: 5, max: 5 });
    for sender in &mut senders {
        sender.abort();
    }
    for sender in senders {
        assert_eq!(failed(&sender), Cause::Aborted);
        pair.end_sender(sender);
    }
    until("room for sessions", || pair.prefill.gauges().sessions_open == 0);
    pair.close();
}
