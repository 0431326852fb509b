//! What a peer's frames may cost: steps, memory and answers are paid for by the bytes that came, or by what
//! the own scheduler has asked for.

use std::time::Duration;

use kv_core::plan::{Plan, RegionMap, Side};
use kv_core::proto::{Input, Output};
use kv_core::wire::{
    Abort, Acquire, Body, ConversationId, Delivery, Frame, Granted, Refused, Register, Release, VERSIONS,
};
use kv_core::{
    Attempt, Cause, Geometry, Holds, Incarnation, KvArgs, KvPoll, Layout, Lease, LeaseRef, MAX_FRAME,
    Mismatch, Origin, PageList, PeerCause, Region, RegionRole, Room, SessionId, SessionOptions, TransferMode,
    meter,
};

use crate::memory;
use crate::solo::{Solo, abort_for, args, asks_about, list, record_with, register, release, with};

const ROOM: Room = Room::Number(7);

/// Steps of what is done.
fn steps_of(act: impl FnOnce()) -> u64 {
    let before = meter::steps();
    act();
    meter::steps() - before
}

/// Bytes that are kept of what is done.
fn kept_of(act: impl FnOnce()) -> i64 {
    let before = memory::held();
    act();
    memory::held() - before
}

/// Bytes of the frames among the last outputs.
fn said(solo: &Solo) -> usize {
    let len = |output: &Output| if let Output::Send { frame, .. } = output { frame.len() } else { 0 };
    solo.said.iter().map(len).sum()
}

/// A cause with as much text as fits.
fn long_cause(len: usize) -> PeerCause {
    let text = "x".repeat(len);
    PeerCause::Incompatible(Mismatch { field: text, ours: String::new(), theirs: String::new() })
}

/// The frame as it is said, whether or not it can be written.
fn say_if_it_fits(solo: &mut Solo, incarnation: u64, body: Body) -> bool {
    let frame = Frame { conversation: solo.conversation(incarnation), body };
    let fits = frame.encode().is_ok();
    if fits {
        solo.frame_from(incarnation, frame);
    }
    fits
}

/// A sender of a large request, which peer 1 has acquired as attempt 1. Bytes of the lease.
fn granted() -> (Solo, usize) {
    let mut solo = Solo::serving_pages(1 << 20);
    let options = SessionOptions::default().with(|options| options.mode = Some(TransferMode::Pull));
    let session = solo.open_sender_with(ROOM, 1, options);
    // Every other page: as scattered as can be.
    solo.send_list(session, PageList::from_pages((0..100_000).map(|n| n * 2 + 1)).unwrap());
    solo.says(1, Body::Register(crate::solo::acquire(1, ROOM, None, 1)));
    let len = said(&solo);
    assert!(len > MAX_FRAME / 3, "the lease is {len} bytes");
    (solo, len)
}

#[test]
fn a_ping_asks_about_each_attempt_once_and_in_rising_order() {
    for attempts in [vec![(1, 1); 4096], vec![(2, 1), (1, 1)], vec![(1, 2), (2, 2)], vec![(1, 0); 4096]] {
        let (mut solo, _) = granted();
        let dropped = solo.node().gauges().dropped.total();
        solo.says(1, asks_about(&attempts));
        assert_eq!(solo.said, []);
        assert_eq!(solo.node().gauges().dropped.total(), dropped + 1);
    }
    let (mut solo, lease_id) = granted();
    solo.says(1, asks_about(&[(1, u32::MAX), (1 << 40, 7)]));
    assert!(said(&solo) < lease_id + 16_384, "{} bytes are said", said(&solo));
    assert!(solo.said.len() < 300, "{} answers", solo.said.len());
}

#[test]
fn a_long_reason_of_a_peer_is_shortened_for_other_ranks() {
    for len in [100, 10_000, 1_000_000] {
        let mut solo = Solo::serving(|_| {});
        solo.open_sender(ROOM, 2);
        solo.says(1, Body::Register(register(1, ROOM, &[0])));
        solo.says(1, Body::Register(register(2, ROOM, &[1])));
        say_if_it_fits(&mut solo, 1, abort_for(1, ROOM, long_cause(len)));
        solo.says(1, asks_about(&[(2, 1)]));
        assert!(said(&solo) < 4096, "{} bytes are said of a reason of {len}", said(&solo));
    }
}

#[test]
fn a_rank_count_of_a_peer_sizes_no_table_and_evicts_no_entry() {
    for ranks in [2, 100, 65_536, u32::MAX - 1, u32::MAX] {
        let mut solo = Solo::serving(|_| {});
        // A failure that another room's receiver is still to be told of.
        let other = solo.open_sender(Room::Number(8), 1);
        solo.abort(other);
        let session = solo.open_sender(ROOM, 0);
        solo.says(1, Body::Register(Register { ranks, ..register(1, ROOM, &[0, 1]) }));
        let before = solo.node().gauges().failed_rooms;
        let steps = steps_of(|| solo.abort(session));
        assert!(steps < 1000, "{steps} steps to fail the sender");
        assert!(solo.node().gauges().failed_rooms <= before + 1, "{:?}", solo.node().gauges());
        let steps = steps_of(|| {
            for attempt in 2..12 {
                solo.says(1, Body::Register(register(attempt, ROOM, &[0, 1])));
            }
        });
        assert!(steps < 10_000, "{steps} steps to refuse ten");
        let steps = steps_of(|| {
            solo.open_sender(ROOM, 1);
        });
        assert!(steps < 1000, "{steps} steps to open the room again");
        solo.says(1, Body::Register(register(20, Room::Number(8), &[0])));
        let told = solo.frames().into_iter().any(|body| matches!(body, Body::Failed(failed) if failed.quiet));
        assert!(told, "the failure of the other room is forgotten");
    }
}

#[test]
fn aborts_of_rooms_that_nobody_opens_keep_little_however_long_their_reasons() {
    for len in [10, 1000, 1_000_000] {
        let mut solo = Solo::serving(|_| {});
        let kept = kept_of(|| {
            for number in 1..=500 {
                say_if_it_fits(&mut solo, 1, abort_for(number, Room::Number(number), long_cause(len)));
            }
            solo.said.clear();
        });
        // The room by name and by time, and a reason of bounded length.
        assert!(kept < 500 * 2048, "{kept} bytes are kept of 500 reasons of {len}");
    }
}

#[test]
fn ended_attempts_far_beyond_the_window_are_not_remembered() {
    let mut solo = Solo::serving(|_| {});
    let kept = kept_of(|| {
        for number in 0..2_000_000_u64 {
            solo.says(1, release((1 << 40) | (number * 2), 0));
        }
    });
    assert!(kept < 1 << 20, "{kept} bytes are kept");
    assert_eq!(solo.node().gauges().closed_runs, 0);
}

#[test]
fn ended_attempts_within_the_window_keep_a_bounded_number_of_gaps() {
    let mut solo = Solo::serving(|_| {});
    let kept = kept_of(|| {
        for number in 0..200_000_u64 {
            // Of a lease that is not known: nothing is kept but that the attempt is over.
            let (attempt, lease_id, cause) =
                (Attempt(number * 2 + 1), Some(SessionId(99)), PeerCause::Aborted);
            solo.says(
                1,
                Body::Abort(Abort {
                    failed_ms_ago: None,
                    low_watermark: Attempt(0),
                    attempt,
                    room: ROOM,
                    lease_id,
                    cause,
                }),
            );
        }
    });
    assert!(kept < 2 << 20, "{kept} bytes are kept in {} runs", solo.node().gauges().closed_runs);
}

/// A hello of another version, or with a cache that is not understood, says little: little is kept of it, however
/// many regions this worker has.
#[test]
fn a_hello_whose_cache_is_not_understood_costs_no_map_of_this_workers_cache() {
    let args = (0..1024).fold(KvArgs::builder("us", 0).pages(32, 16), |args, region| {
        args.region(Region::dram(RegionRole::Kv, 0x100_0000 * (region + 1), 32 * 64, 64))
    });
    let args = args.build().unwrap();
    let mut solo = Solo::new(|config| config.args = args.clone());
    let hello = |incarnation| {
        let geometry = None;
        kv_core::wire::Hello {
            geometry,
            ..crate::solo::hello(incarnation, ConversationId::new(1, incarnation as u32))
        }
    };
    solo.hello(hello(1));
    let kept = kept_of(|| {
        for incarnation in 2..=4 {
            solo.hello(hello(incarnation));
        }
        solo.said.clear();
    });
    assert_eq!(solo.node().gauges().peers, 4);
    assert!(kept < 3 * 16_384, "{kept} bytes are kept of three hellos");
}

#[test]
fn refused_attempts_of_a_connection_keep_little_memory_for_any_incarnations() {
    let mut solo = Solo::serving(|_| {});
    let kept = kept_of(|| {
        for incarnation in 1..=64 {
            let hello = crate::solo::hello(incarnation, ConversationId::new(1, incarnation as u32));
            solo.frame_from(1, Frame { conversation: ConversationId::NONE, body: Body::Hello(hello) });
            let welcome = solo.frames().into_iter().find_map(|body| match body {
                Body::Welcome(welcome) => Some(welcome.conversation),
                _ => None,
            });
            let Some(conversation) = welcome else { continue };
            for number in 1..20_000 {
                let body = Body::Register(register(number, Room::Number(number), &[1000]));
                solo.frame_from(1, Frame { conversation, body });
            }
        }
        solo.said.clear();
    });
    let gauges = solo.node().gauges();
    assert!(kept < 12 << 20, "{kept} bytes are kept: {gauges:?}");
    assert!(gauges.peers <= 8, "{gauges:?}");
}

#[test]
fn a_receiver_that_repeats_its_hello_counts_as_one_receiver() {
    let mut solo = Solo::serving(|_| {});
    let lease = Some(Lease::Fixed(Duration::from_secs(400)));
    let options = SessionOptions::default().with(|options| {
        options.mode = Some(TransferMode::Auto);
        options.lease = lease;
    });
    let session = solo.open_sender_with(ROOM, 2, options);
    solo.send(session, 2, &[&[0, 1]]);
    // It has all pages already: nothing is to be written.
    let all = || with(register(1, ROOM, &[]), |to| (to.first_page, to.total_pages) = (2, 2));
    let mut last = 0;
    let steps = steps_of(|| {
        for round in 2..2002 {
            solo.says(1, Body::Register(all()));
            solo.greet_again(1, ConversationId::new(round, 1));
            last = solo.node().gauges().targets;
        }
    });
    assert!(last <= 2, "{last} receivers of a session that waits for two");
    assert!(steps < 2000 * 400, "{steps} steps in 2000 rounds");
    assert!(!solo.poll(session).is_terminal(), "the other one has not come");
}

#[test]
fn a_peer_whose_posts_never_end_does_not_hold_up_another() {
    let mut solo = Solo::serving(|_| {});
    solo.greet(2);
    let pages: Vec<u32> = (0..8).map(|number| number * 2).collect();
    for number in 0..20 {
        let session = solo.open_sender(Room::Number(number), 1);
        solo.says(1, Body::Register(register(number + 1, Room::Number(number), &pages)));
        solo.send(session, 8, &[&pages]);
    }
    let stuck = solo.take_posts();
    assert!(!stuck.is_empty());
    let session = solo.open_sender(Room::Number(100), 1);
    solo.says(2, Body::Register(register(1, Room::Number(100), &pages)));
    solo.send(session, 8, &[&pages]);
    solo.run_for(Duration::from_secs(1));
    let mut posts = solo.take_posts();
    assert_eq!(posts.len(), 1, "the healthy peer's post has not started within a second");
    solo.posted(posts.remove(0).id, Ok(()));
    assert_eq!(solo.poll(session), KvPoll::Success);
}

#[test]
fn a_release_of_all_attempts_costs_only_the_existing_attempts() {
    let (mut solo, _) = granted();
    for attempts in [vec![(0, u32::MAX)], (0..20_000).map(|number| (number * 10, 9)).collect()] {
        let len = 5 * attempts.len() as u64 + 20;
        let steps = steps_of(|| {
            solo.says(
                1,
                Body::Release(Release {
                    low_watermark: Attempt(0),
                    attempts: attempts.clone(),
                    answer: true,
                }),
            );
        });
        assert!(steps < 2000 + 8 * len, "{steps} steps for {len} bytes");
    }
}

#[test]
fn a_page_that_a_peer_does_not_have_is_refused_whatever_its_number() {
    for page in [16, 17, 1 << 20, 1 << 23, u32::MAX - 1] {
        let mut solo = Solo::serving(|_| {});
        let session = solo.open_sender(ROOM, 1);
        solo.send(session, 1, &[&[3]]);
        solo.says(1, Body::Register(register(1, ROOM, &[page])));
        let refused = solo.frames().into_iter().any(
            |body| matches!(body, Body::Failed(failed) if failed.cause == PeerCause::OutOfRange && failed.quiet),
        );
        assert!(refused, "page {page}: {:?}", solo.said);
        assert!(solo.take_posts().is_empty(), "page {page} of 16 is written");
    }
}

#[test]
fn a_page_that_is_named_twice_is_refused() {
    for runs in [vec![(3, 1), (3, 1)], vec![(2, 4), (5, 1)], vec![(5, 1), (2, 4)]] {
        let mut solo = Solo::serving(|_| {});
        let pages = PageList::try_from(runs).unwrap();
        let whole = pages.len() as u32;
        solo.says(
            1,
            Body::Register(with(register(1, ROOM, &[]), |to| (to.pages, to.total_pages) = (pages, whole))),
        );
        let refused = solo.frames().into_iter().any(
            |body| matches!(body, Body::Failed(failed) if failed.cause == PeerCause::OutOfRange && failed.quiet),
        );
        assert!(refused, "{:?}", solo.said);
    }
}

/// A cache of pages that are made of 512 physical ones each, in two layers.
fn of_pieces(num_pages: u32) -> Geometry {
    let item = 8192;
    let region = |layer| {
        let addr = 0x10_0000 + (u64::from(layer) << 30);
        Region::dram(RegionRole::Kv, addr, 64 * item, item).layer(layer).holds(Holds::Latent)
    };
    let builder = KvArgs::builder("engine", 0).pages(64, 8192).heads(1, 1);
    let layout = Layout::default().with(|layout| layout.kernel_page_size = 16);
    let args = builder.region(region(0)).region(region(1)).layout(layout).build().unwrap();
    let mut geometry = args.geometry().clone();
    geometry.num_pages = num_pages;
    for region in &mut geometry.regions {
        region.len = u64::from(num_pages) * item;
    }
    geometry
}

#[test]
fn a_page_number_that_cannot_be_counted_in_physical_pages_is_never_written_elsewhere() {
    let ours = of_pieces(64);
    for (num_pages, page) in [(1 << 22, (1 << 22) - 1), (1 << 23, (1 << 23) - 1), (1 << 24, (1 << 23) + 1)] {
        let theirs = of_pieces(num_pages);
        let remote = PageList::from_pages([page]).unwrap();
        for layers in [0..1, 0..2] {
            // Refused at any stage will do.
            let Ok(map) = RegionMap::layers(&ours, &theirs, Side::Local, layers) else { continue };
            let Ok(mut plan) = Plan::suffix(&map, (&list(&[0]), 0), (&remote, 0)) else { continue };
            let mut descriptors = Vec::new();
            plan.fill(&mut descriptors, 10, u64::MAX);
            for descriptor in descriptors {
                let item = u64::from(page) * 8192;
                let there = descriptor.remote_offset;
                assert!((item..item + 8192).contains(&there), "page {page} is written at {there}");
            }
        }
    }
    assert!(of_pieces(1 << 22).validate().is_ok() && of_pieces(1 << 24).validate().is_err());
}

#[test]
fn a_list_longer_than_its_frame_is_refused_before_allocation() {
    let mut solo = Solo::serving(|_| {});
    let frame = Frame { conversation: solo.conversation(1), body: asks_about(&[]) };
    let mut bytes = frame.encode().unwrap().to_vec();
    // In place of the empty list at the end.
    bytes.pop();
    bytes.extend([0xdd, 0x00, 0xff, 0xff, 0xff]);
    let dropped = solo.node().gauges().dropped.total();
    let before = memory::allocated();
    solo.input(Input::Frame { from: Origin(1), frame: bytes.into() });
    let allocated = memory::allocated() - before;
    assert!(allocated < 4096, "{allocated} bytes are asked for");
    assert_eq!(solo.node().gauges().dropped.total(), dropped + 1);
}

#[test]
fn a_plan_of_few_pages_allocates_for_these_pages_only() {
    let mut solo = Solo::new(|config| {
        config.args = args("us", 1 << 17);
        // A page each.
        config.limits.max_post_bytes = 64;
    });
    let options = SessionOptions::default().with(|options| options.mode = Some(TransferMode::Pull));
    let session = solo.open_receiver_with(ROOM, options);
    solo.found(kv_core::LookupId(0), vec![record_with(1, args("peer-1", 1 << 17).geometry())]);
    solo.welcome(1, 1);
    let Some(Body::Register(Register { attempt, delivery: Delivery::Read(Acquire { number, .. }), .. })) =
        solo.frames().pop()
    else {
        panic!("{:?}", solo.frames())
    };
    // Every other page: as scattered as can be.
    let pages = PageList::from_pages((0..50_000).map(|n| n * 2 + 1)).unwrap();
    let (lease_id, aux, groups) = (SessionId(5), None, Default::default());
    let (lease_ms, interval_ms) = (30_000, 5000);
    solo.says(
        1,
        Body::Granted(Granted { attempt, number, lease_id, pages, aux, lease_ms, interval_ms, groups }),
    );
    assert_eq!(solo.node().gauges().granted_runs, 50_000);
    let kept = kept_of(|| solo.init_receiver(session, &[1, 3, 5, 7, 9, 11, 13, 15], None));
    assert_eq!((solo.poll(session), solo.take_posts().len()), (KvPoll::Transferring, 4));
    assert!(kept < 16 << 10, "{kept} bytes are kept for eight pages");
    assert_eq!(solo.node().gauges().granted_runs, 0);
}

/// Sessions that wait for one answer of the bootstrap server, which names many ranks of one request's pages.
fn waiting(sessions: u64, ranks: u32, lease_refs: &[LeaseRef]) -> (Solo, Vec<SessionId>) {
    let mut solo = Solo::new(|_| {});
    let mode = Some(if lease_refs.is_empty() { TransferMode::Push } else { TransferMode::Pull });
    let options = SessionOptions::default().with(|options| {
        options.mode = mode;
        options.lease_refs = lease_refs.to_vec();
        options.prefill_dp_rank = Some(0);
    });
    let open = |room| solo.open_receiver_with(Room::Number(room), options.clone());
    let sessions = (0..sessions).map(open).collect();
    let rank = |pcp_rank| {
        let mut geometry = args("peer", 16).geometry().clone();
        (geometry.parallel.pcp_size, geometry.parallel.pcp_rank) = (ranks, pcp_rank);
        record_with(u64::from(pcp_rank) + 1, &geometry)
    };
    solo.found(kv_core::LookupId(0), (0..ranks).map(rank).collect());
    (solo, sessions)
}

#[test]
fn a_refusal_ends_each_waiting_session_in_few_passes_over_its_sources() {
    let lease_id = LeaseRef::new(Incarnation::from_random(2), SessionId(1));
    let pairs = 16 * 32;
    // Those that were met are told that the session has failed, each in a frame; or they have never heard of it.
    for (met, lease_refs, passes, left) in
        [(0, vec![], 5, pairs), (31, vec![], 19, pairs), (31, vec![lease_id], 7, 0)]
    {
        let (mut solo, sessions) = waiting(16, 32, &lease_refs);
        assert_eq!(solo.node().gauges().sources, pairs);
        for peer in 32 - met..32 {
            solo.welcome(peer + 1, 1);
        }
        let nonce = solo.last_hello(1).nonce;
        let (versions, cause, conversation) = (VERSIONS, PeerCause::Overloaded, ConversationId::new(1, 1));
        let steps =
            steps_of(|| solo.says(1, Body::Refused(Refused { versions, nonce, cause, conversation })));
        for session in sessions {
            assert_eq!(solo.cause(session), Cause::ByPeer(PeerCause::Overloaded));
        }
        let of =
            format!("{pairs} sources of 16 sessions, {met} of them met, for {} lease_refs", lease_refs.len());
        assert!(steps < passes * pairs as u64, "{steps} steps for {of}");
        assert_eq!(solo.node().gauges().sources, left, "{of}");
    }
}

#[test]
fn a_long_refusal_is_passed_on_with_shortened_texts() {
    let (mut solo, sessions) = waiting(16, 2, &[]);
    solo.welcome(2, 1);
    let nonce = solo.last_hello(1).nonce;
    let long = |text: &str| text.repeat(1000);
    let mismatch = Mismatch { field: long("ö"), ours: long("a"), theirs: long("1") };
    let (versions, cause, conversation) =
        (VERSIONS, PeerCause::Incompatible(mismatch), ConversationId::new(1, 1));
    solo.frames();
    solo.says(1, Body::Refused(Refused { versions, nonce, cause, conversation }));
    for session in sessions {
        let Cause::ByPeer(PeerCause::Incompatible(told)) = solo.cause(session) else { panic!() };
        assert_eq!((told.field.len(), told.ours.len(), told.theirs.len()), (512, 512, 512));
    }
    let aborts: Vec<Abort> = solo
        .frames()
        .into_iter()
        .filter_map(|body| match body {
            Body::Abort(abort) => Some(abort),
            _ => None,
        })
        .collect();
    assert_eq!(aborts.len(), 32);
    let expected = Mismatch { field: "ö".repeat(16), ours: "a".repeat(32), theirs: "1".repeat(32) };
    for abort in aborts {
        assert_eq!(abort.cause, PeerCause::Incompatible(expected.clone()));
    }
}
