//! Chunks announced layer by layer, between two nodes.

use std::ops::Range;

use kv_core::proto::Command;
use kv_core::{
    AuxIndex, Cause, ChunkId, FinalLayers, KvArgs, KvPoll, LayersError, PeerCause, ReadyEventError, Region,
    RegionRole, Room, SessionId, SessionOptions, TransferMode, TransportError,
};

use crate::pair::{D, P, Pair, list, pages};

const ROOM: Room = Room::Number(42);

/// Two workers whose layers 2 to 6 lie in regions 0 to 3, of which nobody knows more; the aux rows are
/// region 4.
fn layered() -> Pair {
    pair_of(&[2, 3, 4, 5])
}

fn pair_of(layers: &'static [u32]) -> Pair {
    Pair::with(move |config| {
        let engine = config.args.worker().engine.as_str().to_owned();
        let mut builder = KvArgs::builder(&engine, 0).pages(32, 16);
        for &layer in layers {
            let addr = u64::from(layer) << 16;
            builder = builder.region(Region::dram(RegionRole::Kv, addr, 32 * 64, 64).layer(layer));
        }
        let aux = Region::dram(RegionRole::Aux, 0x10_0000, 4 * 16, 16);
        config.args = builder.region(aux).max_inflight(8).build().unwrap();
    })
}

fn begin(pair: &mut Pair, session: SessionId, chunk: &[u32]) {
    pair.command(P, Command::BeginChunk { session, chunk: pages(chunk) });
}

fn layers_final(pair: &mut Pair, session: SessionId, chunk: u32, layers: impl Into<Option<Range<u32>>>) {
    let mut told = FinalLayers::all(ChunkId(chunk));
    told.layers = layers.into();
    pair.command(P, Command::LayersFinal { session, layers: told });
}

/// What the posts in flight move: region, pages from, pages to.
fn moves(pair: &mut Pair) -> Vec<(u32, u64, u64)> {
    let mut moves = Vec::new();
    for (node, post) in pair.take_posts() {
        moves.extend(
            post.descriptors.iter().map(|d| (d.local_region, d.local_offset / 64, d.remote_offset / 64)),
        );
        pair.complete(node, post, Ok(()));
    }
    moves.sort_unstable();
    moves
}

/// A request of three pages with an aux row, whose receiver is there.
fn met(pair: &mut Pair) -> (SessionId, SessionId) {
    let sender = pair.open_sender(ROOM, 1);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[7, 9, 11], Some(2));
    pair.init_sender(sender, 3, Some(0));
    (sender, receiver)
}

#[test]
fn layers_are_written_as_they_are_announced_and_the_aux_row_with_the_last() {
    let mut pair = layered();
    let (sender, receiver) = met(&mut pair);
    begin(&mut pair, sender, &[1, 3]);
    assert_eq!((pair.poll(P, sender), pair.posts()), (KvPoll::WaitingForInput, 0), "nothing is final");
    layers_final(&mut pair, sender, 0, 4..5);
    assert_eq!(pair.poll(P, sender), KvPoll::Transferring);
    assert_eq!(moves(&mut pair), [(2, 1, 7), (2, 3, 9)]);
    // The next chunk begins before the first is through.
    begin(&mut pair, sender, &[5]);
    layers_final(&mut pair, sender, 1, 2..4);
    assert_eq!(moves(&mut pair), [(0, 5, 11), (1, 5, 11)]);
    layers_final(&mut pair, sender, 1, 4..6);
    assert_eq!(moves(&mut pair), [(2, 5, 11), (3, 5, 11)]);
    layers_final(&mut pair, sender, 0, 5..6);
    assert_eq!(moves(&mut pair), [(3, 1, 7), (3, 3, 9)]);
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Transferring, KvPoll::Transferring));
    layers_final(&mut pair, sender, 0, 2..4);
    assert_eq!(moves(&mut pair), [(0, 1, 7), (0, 3, 9), (1, 1, 7), (1, 3, 9), (4, 0, 0)]);
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
    assert_eq!(pair.released(P, sender), [list(&[1, 3]), list(&[5])]);
    pair.assert_empty();
}

#[test]
fn a_receiver_that_comes_late_gets_what_is_final_by_then_and_the_rest_later() {
    let mut pair = layered();
    let sender = pair.open_sender(ROOM, 1);
    pair.init_sender(sender, 1, None);
    begin(&mut pair, sender, &[1]);
    layers_final(&mut pair, sender, 0, 3..5);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[7], None);
    assert_eq!(moves(&mut pair), [(1, 1, 7), (2, 1, 7)]);
    layers_final(&mut pair, sender, 0, 2..3);
    layers_final(&mut pair, sender, 0, 5..6);
    assert_eq!(moves(&mut pair), [(0, 1, 7), (3, 1, 7)]);
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    pair.assert_empty();
}

#[test]
fn pages_are_granted_to_readers_when_every_layer_of_every_chunk_is_final() {
    let mut pair = layered();
    let options = SessionOptions::default().with(|options| options.mode = Some(TransferMode::Pull));
    let sender = pair.open_sender_with(ROOM, 1, options.clone());
    let lease_refs = vec![pair.lease_ref(sender)];
    let receiver = pair.open_receiver_with(ROOM, options.with(|options| options.lease_refs = lease_refs));
    pair.init_receiver(receiver, &[7, 9], None);
    pair.init_sender(sender, 2, None);
    begin(&mut pair, sender, &[1]);
    begin(&mut pair, sender, &[3]);
    layers_final(&mut pair, sender, 1, None);
    for layer in [5, 2, 4] {
        layers_final(&mut pair, sender, 0, layer..layer + 1);
        assert_eq!((pair.posts(), pair.node(P).gauges().pages_leased), (0, 0));
    }
    layers_final(&mut pair, sender, 0, 3..4);
    assert_eq!(pair.node(P).gauges().pages_leased, 2);
    pair.complete_posts();
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
    pair.assert_empty();
}

#[test]
fn all_layers_at_once_are_one_announcement_and_an_empty_chunk_completes_a_request() {
    let mut pair = layered();
    let (sender, receiver) = met(&mut pair);
    begin(&mut pair, sender, &[1, 3, 5]);
    begin(&mut pair, sender, &[]);
    layers_final(&mut pair, sender, 0, 2..6);
    assert_eq!(moves(&mut pair).len(), 12);
    assert_eq!(pair.poll(D, receiver), KvPoll::Transferring, "the empty chunk carries the aux row");
    layers_final(&mut pair, sender, 1, None);
    assert_eq!(moves(&mut pair), [(4, 0, 0)]);
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    pair.assert_empty();
}

#[test]
fn impossible_announcements_fail_the_session_with_both_values_and_lose_no_page() {
    let out = |layers| LayersError::OutOfRange { layers, held: 2..6 };
    let twice = |layers, announced| LayersError::Twice { chunk: 0, layers, announced };
    let empty = Range { start: 4, end: 4 };
    let backwards = Range { start: 5, end: 3 };
    for (chunk, layers, error, text) in [
        (0, Some(1..3), out(1..3), "layers 1..3 are final, but this rank holds layers 2..6"),
        (0, Some(5..7), out(5..7), "layers 5..7"),
        (0, Some(empty.clone()), out(empty), "layers 4..4"),
        (0, Some(backwards.clone()), out(backwards), "layers 5..3"),
        (0, Some(0..u32::MAX), out(0..u32::MAX), "holds layers 2..6"),
        (
            0,
            Some(2..4),
            twice(2..4, 3..4),
            "layers 2..4 of chunk 0 are final, but layers 3..4 were announced before",
        ),
        (0, None, twice(2..6, 3..4), "layers 3..4 were announced before"),
        (1, None, LayersError::UnknownChunk { chunk: 1, given: 1 }, "the session was given only 1 chunks"),
        (u32::MAX, Some(2..3), LayersError::UnknownChunk { chunk: u32::MAX, given: 1 }, "4294967295"),
    ] {
        let mut pair = layered();
        let (sender, receiver) = met(&mut pair);
        begin(&mut pair, sender, &[1]);
        layers_final(&mut pair, sender, 0, 3..4);
        layers_final(&mut pair, sender, chunk, layers);
        let cause = pair.failure(P, sender);
        assert!(cause.to_string().contains(text), "{cause}");
        assert_eq!(cause, Cause::Layers(error));
        assert_eq!(pair.failure(D, receiver), Cause::ByPeer(PeerCause::BadArguments));
        assert_eq!((pair.released(P, sender).len(), pair.released(D, receiver).len()), (0, 0), "in flight");
        pair.complete_posts();
        assert_eq!(pair.released(P, sender), [list(&[1])]);
        assert_eq!(pair.released(D, receiver), [list(&[7, 9, 11])]);
        begin(&mut pair, sender, &[5]);
        layers_final(&mut pair, sender, 1, None);
        assert_eq!(pair.released(P, sender), [list(&[1]), list(&[5])], "what comes after the end comes back");
        pair.assert_empty();
    }
}

#[test]
fn layers_that_nobody_holds_end_no_chunk_a_second_time() {
    for mode in [TransferMode::Push, TransferMode::Pull] {
        let mut pair = pair_of(&[2, 3, 5]);
        let options = || SessionOptions::default().with(|options| options.mode = Some(mode));
        let sender = pair.open_sender_with(ROOM, 1, options());
        let receiver = pair.open_receiver_with(ROOM, options());
        pair.init_receiver(receiver, &[7, 9], Some(2));
        pair.init_sender(sender, 2, Some(0));
        begin(&mut pair, sender, &[1]);
        layers_final(&mut pair, sender, 0, 5..6);
        layers_final(&mut pair, sender, 0, 2..4);
        layers_final(&mut pair, sender, 0, 4..5);
        begin(&mut pair, sender, &[3]);
        layers_final(&mut pair, sender, 1, 4..5);
        layers_final(&mut pair, sender, 1, 2..4);
        let before = moves(&mut pair);
        let first: &[_] = &[(0, 1, 7), (0, 3, 9), (1, 1, 7), (1, 3, 9), (2, 1, 7)];
        assert_eq!(
            before,
            if mode == TransferMode::Push { first } else { &[] },
            "no aux row, nothing granted"
        );
        layers_final(&mut pair, sender, 1, 5..6);
        if mode == TransferMode::Push {
            assert_eq!(moves(&mut pair), [(2, 3, 9), (3, 0, 0)]);
        } else {
            // The reader names its own pages first.
            let all = [(0, 7, 1), (0, 9, 3), (1, 7, 1), (1, 9, 3), (2, 7, 1), (2, 9, 3), (3, 0, 0)];
            assert_eq!(moves(&mut pair), all);
        }
        assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
        assert_eq!(pair.released(P, sender), [list(&[1]), list(&[3])]);
        pair.assert_empty();
    }
}

#[test]
fn pages_are_granted_once_despite_further_announcements() {
    let mut pair = pair_of(&[2, 4]);
    let options = SessionOptions::default().with(|options| options.mode = Some(TransferMode::Pull));
    let sender = pair.open_sender_with(ROOM, 1, options);
    pair.init_sender(sender, 1, None);
    begin(&mut pair, sender, &[1]);
    layers_final(&mut pair, sender, 0, 2..3);
    layers_final(&mut pair, sender, 0, 4..5);
    assert_eq!(pair.node(P).gauges().pages_leased, 1);
    layers_final(&mut pair, sender, 0, 3..4);
    assert_eq!(pair.node(P).gauges().pages_leased, 1);
    pair.run_for(std::time::Duration::from_secs(300));
    assert_eq!(pair.node(P).gauges().pages_leased, 0);
    assert_eq!(pair.released(P, sender), [list(&[1])]);
}

#[test]
fn regions_that_do_not_say_their_layer_take_whole_announcements_only() {
    let mut pair = Pair::with(|config| {
        let engine = config.args.worker().engine.as_str().to_owned();
        let builder = KvArgs::builder(&engine, 0).pages(32, 16);
        config.args = builder.region(Region::dram(RegionRole::Kv, 0x1_0000, 32 * 64, 64)).build().unwrap();
    });
    // Nor are all of them all twice.
    let sender = pair.open_sender(ROOM, 1);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[7, 9, 11], None);
    pair.init_sender(sender, 3, None);
    begin(&mut pair, sender, &[1]);
    layers_final(&mut pair, sender, 0, None);
    layers_final(&mut pair, sender, 0, None);
    let twice = LayersError::Twice { chunk: 0, layers: 0..0, announced: 0..0 };
    assert_eq!(pair.failure(P, sender), Cause::Layers(twice));
    pair.complete_posts();
    assert_eq!(
        (pair.released(P, sender), pair.released(D, receiver)),
        (vec![list(&[1])], vec![list(&[7, 9, 11])])
    );
    for (layers, good) in [(None, true), (Some(0..1), false)] {
        let sender = pair.open_sender(ROOM, 1);
        let receiver = pair.open_receiver(ROOM);
        pair.init_receiver(receiver, &[7], None);
        pair.init_sender(sender, 1, None);
        begin(&mut pair, sender, &[1]);
        layers_final(&mut pair, sender, 0, layers);
        pair.complete_posts();
        if good {
            assert_eq!(pair.poll(D, receiver), KvPoll::Success);
        } else {
            let untold = LayersError::Untold { layers: 0..1, region: 0 };
            assert_eq!(pair.failure(P, sender), Cause::Layers(untold));
        }
        assert_eq!(pair.released(P, sender), [list(&[1])]);
    }
    pair.assert_empty();
}

#[test]
fn a_failed_ready_event_fails_its_session_and_no_other() {
    let mut pair = layered();
    let (sender, receiver) = met(&mut pair);
    let other = pair.transferring(Room::Number(43), &[20], &[21]);
    begin(&mut pair, sender, &[1, 3, 5]);
    layers_final(&mut pair, sender, 0, 2..3);
    let error = ReadyEventError::Device { code: 719 };
    pair.command(P, Command::ReadyEventFailed { session: sender, chunk: ChunkId(0), error });
    let cause = pair.failure(P, sender);
    assert_eq!(cause, Cause::ReadyEvent { chunk: ChunkId(0), error });
    assert!(cause.to_string().contains("chunk 0 failed: the device reports error 719"), "{cause}");
    assert_eq!(pair.failure(D, receiver), Cause::ByPeer(PeerCause::Internal));
    pair.complete_posts();
    assert_eq!(pair.released(P, sender), [list(&[1, 3, 5])]);
    assert_eq!((pair.poll(P, other.0), pair.poll(D, other.1)), (KvPoll::Success, KvPoll::Success));
    pair.assert_empty();
}

#[test]
fn a_write_that_fails_between_two_announcements_brings_every_page_back() {
    let mut pair = layered();
    let (sender, receiver) = met(&mut pair);
    begin(&mut pair, sender, &[1, 3]);
    begin(&mut pair, sender, &[5]);
    layers_final(&mut pair, sender, 0, 2..3);
    let (node, post) = pair.take_posts().remove(0);
    layers_final(&mut pair, sender, 1, 3..6);
    pair.complete(node, post, Err(TransportError::PeerGone));
    assert_eq!(pair.failure(P, sender), Cause::Post(TransportError::PeerGone));
    assert_eq!(pair.released(P, sender), [], "the second write is in flight");
    layers_final(&mut pair, sender, 0, 3..6);
    assert_eq!(pair.posts(), 1, "nothing is posted after the failure");
    begin(&mut pair, sender, &[20]);
    assert_eq!(pair.released(P, sender), [list(&[20])], "nobody writes from what comes after the failure");
    pair.complete_posts();
    assert_eq!(pair.released(P, sender), [list(&[20]), list(&[1, 3]), list(&[5])]);
    assert_eq!(pair.released(D, receiver), [list(&[7, 9, 11])]);
    assert_eq!(pair.failure(D, receiver), Cause::ByPeer(PeerCause::DataOperation));
    pair.assert_empty();
}

#[test]
fn a_sender_that_never_announces_ends_at_its_deadline() {
    let mut pair = layered();
    let (sender, receiver) = met(&mut pair);
    begin(&mut pair, sender, &[1, 3, 5]);
    layers_final(&mut pair, sender, 0, 2..5);
    pair.complete_posts();
    pair.run_for(std::time::Duration::from_secs(301));
    assert!(matches!(pair.failure(P, sender), Cause::DeadlineExceeded { .. }));
    assert_eq!(pair.released(P, sender), [list(&[1, 3, 5])]);
    assert_eq!(pair.released(D, receiver), [list(&[7, 9, 11])]);
    pair.assert_empty();
}

#[test]
fn announcements_of_a_long_request_and_a_short_one_take_turns() {
    let mut pair = Pair::with(|config| {
        config.limits.max_post_bytes = 64;
        let engine = config.args.worker().engine.as_str().to_owned();
        let region = |layer: u64| Region::dram(RegionRole::Kv, layer << 16, 32 * 64, 64).layer(layer as u32);
        let builder = KvArgs::builder(&engine, 0).pages(32, 16).region(region(1)).region(region(2));
        config.args = builder.max_inflight(1).build().unwrap();
    });
    let long: Vec<u32> = (0..20).collect();
    let sender = pair.open_sender(ROOM, 1);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &long, None);
    pair.init_sender(sender, long.len(), None);
    begin(&mut pair, sender, &long);
    layers_final(&mut pair, sender, 0, 1..2);
    let (_, short) = pair.transferring(Room::Number(43), &[30], &[31]);
    layers_final(&mut pair, sender, 0, 2..3);
    let mut before = 0;
    while pair.poll(D, short) != KvPoll::Success {
        pair.complete_first();
        before += 1;
    }
    assert!(before <= 5, "{before} posts before a short request was through");
    pair.complete_posts();
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    pair.assert_empty();
}

#[test]
fn an_announcement_without_a_waiting_receiver_changes_nothing() {
    let mut pair = layered();
    layers_final(&mut pair, SessionId(999), 0, 2..3);
    let sender = pair.open_sender(ROOM, 1);
    begin(&mut pair, sender, &[1]);
    assert_eq!(pair.failure(P, sender), Cause::InitOrder);
    layers_final(&mut pair, sender, 0, 2..3);
    assert_eq!(pair.released(P, sender), [list(&[1])]);
    let sender = pair.open_sender(Room::Number(43), 1);
    pair.command(P, Command::InitSender { session: sender, num_pages: 1, aux: Some(AuxIndex(0)) });
    begin(&mut pair, sender, &[1, 2]);
    assert_eq!(pair.failure(P, sender), Cause::TooManyPages { sent: 2, announced: 1 });
    assert_eq!(pair.released(P, sender), [list(&[1, 2])]);
}
