//! The pull protocol between two nodes: acquire messages, leases, proofs, releases.

use std::time::Duration;

use kv_core::wire::Body;
use kv_core::{
    AuxIndex, Cause, Directions, Incarnation, KvPoll, Lease, LeaseRef, Op, PeerCause, Room, SessionId,
    SessionOptions, TransferMode, TransportError,
};

use crate::pair::{D, P, Pair, list};

const ROOM: Room = Room::Number(42);
const LEASE: Duration = Duration::from_secs(6);

fn pull() -> SessionOptions {
    let lease = Some(Lease::Renewable(LEASE));
    SessionOptions::default().with(|options| {
        options.mode = Some(TransferMode::Pull);
        options.lease = lease;
    })
}

/// A sender whose pages are complete.
fn granted(pair: &mut Pair, from: &[u32], aux: Option<u32>) -> SessionId {
    let sender = pair.open_sender_with(ROOM, 1, pull());
    pair.init_sender(sender, from.len(), aux);
    pair.send(sender, from);
    sender
}

/// A receiver that acquires a sender's pages by its reference.
fn acquire(pair: &mut Pair, sender: SessionId) -> SessionId {
    let lease_refs = vec![pair.lease_ref(sender)];
    pair.open_receiver_with(ROOM, pull().with(|options| options.lease_refs = lease_refs))
}

fn leased(pair: &Pair) -> usize {
    pair.node(P).gauges().pages_leased
}

#[test]
fn a_request_is_read_and_released_without_another_round_trip() {
    let mut pair = Pair::new();
    let sender = pair.open_sender_with(ROOM, 1, pull());
    assert_eq!(pair.poll(P, sender), KvPoll::WaitingForInput, "the forward pass waits for nobody");
    pair.init_sender(sender, 3, Some(0));
    pair.send(sender, &[4, 5]);
    assert_eq!((pair.poll(P, sender), leased(&pair)), (KvPoll::Transferring, 0));
    pair.send(sender, &[6]);
    assert_eq!(leased(&pair), 3);

    let receiver = acquire(&mut pair, sender);
    assert_eq!(pair.poll(D, receiver), KvPoll::WaitingForInput);
    assert_eq!(pair.posts(), 0, "nowhere to read to yet");
    pair.lose(|body| matches!(body, Body::Heartbeat(asks) if !asks.leases.is_empty()));
    pair.init_receiver(receiver, &[7, 8, 1], Some(2));
    let post = pair.only_post();
    assert_eq!(post.op, Op::Read);
    let moved: Vec<_> =
        post.descriptors.iter().map(|d| (d.local_region, d.local_offset, d.remote_offset, d.len)).collect();
    assert_eq!(
        moved,
        [
            (0, 7 * 64, 4 * 64, 128),
            (0, 64, 6 * 64, 64),
            (1, 7 * 64, 4 * 64, 128),
            (1, 64, 6 * 64, 64),
            (2, 2 * 16, 0, 16),
        ]
    );
    assert_eq!(pair.released(P, sender), [], "pinned while they are read");
    pair.complete_posts();
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
    assert_eq!(pair.released(P, sender), [list(&[4, 5]), list(&[6])]);
    assert_eq!(pair.released(D, receiver), [list(&[7, 8, 1])]);
    pair.assert_empty();
}

#[test]
fn an_acquire_may_arrive_before_the_sender_and_its_pages() {
    let mut pair = Pair::new();
    let receiver = pair.open_receiver_with(ROOM, pull());
    pair.init_receiver(receiver, &[7, 8], None);
    let sender = granted(&mut pair, &[1, 2], None);
    pair.complete_posts();
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
    pair.assert_empty();
}

#[test]
fn a_cached_prefix_is_not_read_and_a_full_hit_only_releases() {
    let mut pair = Pair::new();
    let sender = granted(&mut pair, &[4, 5, 6, 7], None);
    let receiver = acquire(&mut pair, sender);
    pair.init_receiver(receiver, &[20, 21], None);
    let offsets: Vec<_> =
        pair.only_post().descriptors.iter().map(|d| (d.remote_offset / 64, d.len / 64)).collect();
    assert_eq!(offsets, [(6, 2), (6, 2)]);
    pair.complete_posts();
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);

    let sender = granted(&mut pair, &[4, 5, 6, 7], None);
    let receiver = acquire(&mut pair, sender);
    pair.init_receiver(receiver, &[], None);
    assert_eq!(pair.posts(), 0);
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));

    let sender = granted(&mut pair, &[4], None);
    let receiver = acquire(&mut pair, sender);
    pair.init_receiver(receiver, &[20, 21], None);
    assert_eq!(pair.failure(D, receiver), Cause::PageCount { sent: 1, registered: 2 });
    pair.assert_empty();
}

#[test]
fn an_abort_before_any_page_was_allocated_frees_the_senders_pages_at_once() {
    let mut pair = Pair::new();
    let sender = granted(&mut pair, &[4, 5], None);
    let receiver = acquire(&mut pair, sender);
    pair.abort(D, receiver);
    assert_eq!(pair.failure(P, sender), Cause::ByPeer(PeerCause::Aborted));
    assert_eq!(pair.released(P, sender), [list(&[4, 5])]);
    pair.assert_empty();
}

#[test]
fn a_lease_without_a_reader_expires_and_its_pages_come_back() {
    let mut pair = Pair::new();
    let sender = granted(&mut pair, &[4, 5], None);
    pair.run_for(LEASE - Duration::from_millis(1));
    assert_eq!((pair.poll(P, sender), leased(&pair)), (KvPoll::Transferring, 2));
    pair.run_for(Duration::from_millis(1));
    assert_eq!((pair.failure(P, sender), leased(&pair)), (Cause::LeaseExpired, 0));
    assert_eq!(pair.released(P, sender), [list(&[4, 5])]);
    let receiver = acquire(&mut pair, sender);
    assert_eq!(pair.failure(D, receiver), Cause::LeaseExpired);
    pair.assert_empty();
}

#[test]
fn heartbeats_keep_a_waiting_request_alive_and_silence_ends_it_within_one_lease() {
    let mut pair = Pair::new();
    let sender = granted(&mut pair, &[4, 5], None);
    let receiver = acquire(&mut pair, sender);
    pair.run_for(LEASE * 10);
    assert_eq!(
        (pair.poll(P, sender), pair.poll(D, receiver)),
        (KvPoll::Transferring, KvPoll::WaitingForInput)
    );
    // The decode side stops: nothing of it arrives any more.
    pair.lose(|_| true);
    pair.run_for(LEASE);
    assert_eq!(pair.poll(P, sender), KvPoll::Failed);
    assert_eq!(pair.released(P, sender), [list(&[4, 5])]);
    assert_eq!(pair.poll(D, receiver), KvPoll::Failed);
    pair.lose(|_| false);
    pair.assert_empty();
}

#[test]
fn a_late_read_succeeds_if_the_holder_confirms_that_it_kept_the_pages() {
    let mut pair = Pair::new();
    let sender = granted(&mut pair, &[4, 5], None);
    let receiver = acquire(&mut pair, sender);
    pair.init_receiver(receiver, &[7, 8], None);
    // What the receiver knows of its lease runs out; the heartbeats arrive, their answers do not.
    pair.lose(|body| matches!(body, Body::HeartbeatAck(ack) if !ack.leases.is_empty()));
    pair.run_for(LEASE * 2);
    pair.complete_posts();
    assert_eq!(pair.poll(D, receiver), KvPoll::Transferring, "not proven");
    pair.lose(|_| false);
    pair.run_for(LEASE / 3);
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
    pair.assert_empty();
}

#[test]
fn a_read_of_pages_that_were_given_away_meanwhile_never_succeeds() {
    let mut pair = Pair::new();
    let sender = granted(&mut pair, &[4, 5], None);
    let receiver = acquire(&mut pair, sender);
    pair.init_receiver(receiver, &[7, 8], None);
    pair.lose(|body| match body {
        Body::Heartbeat(asks) => !asks.leases.is_empty(),
        body => matches!(body, Body::Failed(_)),
    });
    pair.run_for(LEASE + Duration::from_millis(1));
    assert_eq!(pair.failure(P, sender), Cause::LeaseExpired);
    assert_eq!(pair.released(P, sender), [list(&[4, 5])], "they may be overwritten now");
    pair.complete_posts();
    assert_eq!(pair.poll(D, receiver), KvPoll::Transferring);
    pair.lose(|_| false);
    pair.run_for(LEASE);
    assert_eq!(pair.failure(D, receiver), Cause::LeaseExpired);
    assert_eq!(pair.released(D, receiver), [list(&[7, 8])]);
    pair.assert_empty();
}

#[test]
fn an_aborted_sender_keeps_pages_until_release_or_end_of_lease() {
    for lost in [false, true] {
        let mut pair = Pair::new();
        let sender = granted(&mut pair, &[4, 5], None);
        let receiver = acquire(&mut pair, sender);
        pair.init_receiver(receiver, &[7, 8], None);
        pair.lose(move |_| lost);
        pair.abort(P, sender);
        assert_eq!(pair.failure(P, sender), Cause::Aborted);
        if lost {
            // The reader does not know, and its lease is good: its success would be right.
            assert_eq!(pair.released(P, sender), []);
            pair.complete_posts();
            assert_eq!(pair.poll(D, receiver), KvPoll::Success);
            pair.run_for(LEASE);
        } else {
            assert_eq!(pair.failure(D, receiver), Cause::ByPeer(PeerCause::Aborted));
            assert_eq!(pair.released(D, receiver), [], "its reads are still in flight");
            pair.complete_posts();
            assert_eq!(pair.released(D, receiver), [list(&[7, 8])]);
        }
        assert_eq!(pair.released(P, sender), [list(&[4, 5])]);
        pair.lose(|_| false);
        pair.assert_empty();
    }
}

#[test]
fn a_lost_release_is_repeated() {
    let mut pair = Pair::new();
    let sender = granted(&mut pair, &[4, 5], None);
    let receiver = acquire(&mut pair, sender);
    pair.lose(|body| matches!(body, Body::Release(_)));
    pair.init_receiver(receiver, &[7, 8], None);
    pair.complete_posts();
    assert_eq!((pair.poll(D, receiver), pair.poll(P, sender)), (KvPoll::Success, KvPoll::Transferring));
    pair.lose(|_| false);
    pair.run_for(Duration::from_secs(1));
    assert_eq!(pair.poll(P, sender), KvPoll::Success);
    pair.assert_empty();
}

#[test]
fn every_frame_may_come_twice() {
    let mut pair = Pair::new();
    pair.duplicate_frames(2);
    let sender = granted(&mut pair, &[4, 5], None);
    let receiver = acquire(&mut pair, sender);
    pair.init_receiver(receiver, &[7, 8], None);
    pair.complete_posts();
    assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
    assert_eq!(pair.released(P, sender).len(), 1);
    pair.assert_empty();
}

#[test]
fn lease_ids_without_pages_fail_by_name_and_move_nothing() {
    let mut pair = Pair::new();
    let sender = granted(&mut pair, &[4, 5], None);
    let lease_ref = pair.lease_ref(sender);
    let nobody = SessionId(999);
    let stale = Incarnation::from_random(1);
    let cases: [(LeaseRef, Cause); 4] = [
        (
            LeaseRef::new(lease_ref.incarnation, nobody),
            Cause::ByPeer(PeerCause::UnknownLease { lease_id: 999 }),
        ),
        (
            LeaseRef::new(stale, lease_ref.lease_id),
            Cause::StaleLease { referenced: stale, found: lease_ref.incarnation },
        ),
        (
            lease_ref.clone().of_pages(list(&[4, 99])),
            Cause::LeaseOutOfRange(kv_core::PagesError::OutOfRange { page: 99, num_pages: 32 }),
        ),
        (
            lease_ref.clone().of_pages(list(&[4, 6])),
            Cause::LeasePages { position: 1, referenced: Some(6), held: Some(5) },
        ),
    ];
    for (lease_ref, cause) in cases {
        let options = pull().with(|options| options.lease_refs = vec![lease_ref]);
        let receiver = pair.open_receiver_with(ROOM, options);
        pair.init_receiver(receiver, &[7, 8], None);
        assert_eq!(pair.failure(D, receiver), cause);
        assert_eq!(pair.posts(), 0);
        pair.run_for(Duration::from_millis(10));
    }

    // The last one was a bug of the router, and has failed the sender.
    let sender = granted(&mut pair, &[4, 5], None);
    let first = acquire(&mut pair, sender);
    let second = acquire(&mut pair, sender);
    let consumed = Cause::ByPeer(PeerCause::LeaseConsumed { lease_id: sender.0 });
    assert_eq!(pair.failure(D, second), consumed);
    pair.init_receiver(first, &[7, 8], None);
    pair.complete_posts();
    assert_eq!(pair.poll(D, first), KvPoll::Success);
    let replayed = acquire(&mut pair, sender);
    assert_eq!(pair.failure(D, replayed), consumed);
    pair.assert_empty();
}

#[test]
fn a_restarted_sender_has_no_leases_of_its_former_life() {
    let mut pair = Pair::new();
    let sender = granted(&mut pair, &[4, 5], None);
    let lease_refs = vec![pair.lease_ref(sender)];
    pair.restart(P);
    let receiver = pair.open_receiver_with(ROOM, pull().with(|options| options.lease_refs = lease_refs));
    assert!(matches!(pair.failure(D, receiver), Cause::StaleLease { .. }));
    pair.run_for(Duration::from_secs(1));
}

#[test]
fn a_failed_read_is_told_at_once_and_both_sides_get_their_pages_back() {
    let mut pair = Pair::with(|config| config.limits.max_post_bytes = 64);
    let sender = granted(&mut pair, &[4, 5], None);
    let receiver = acquire(&mut pair, sender);
    pair.init_receiver(receiver, &[7, 8], None);
    let mut posts = pair.take_posts();
    let (node, failed) = posts.remove(0);
    pair.complete(node, failed, Err(TransportError::PeerGone));
    assert_eq!(pair.failure(D, receiver), Cause::Post(TransportError::PeerGone));
    assert_eq!(pair.failure(P, sender), Cause::ByPeer(PeerCause::DataOperation));
    assert_eq!(pair.released(P, sender), [list(&[4, 5])]);
    assert_eq!(pair.released(D, receiver), [], "three reads are still in flight");
    for (node, post) in posts {
        pair.complete(node, post, Err(TransportError::Cancelled));
    }
    assert_eq!(pair.released(D, receiver), [list(&[7, 8])]);
    pair.assert_empty();
}

#[test]
fn pages_return_when_all_readers_have_released_or_lost_their_leases() {
    let mut pair = Pair::new();
    let sender = pair.open_sender_with(ROOM, 2, pull());
    pair.init_sender(sender, 1, None);
    pair.send(sender, &[4]);
    let first = acquire(&mut pair, sender);
    pair.init_receiver(first, &[7], None);
    pair.complete_posts();
    assert_eq!((pair.poll(D, first), pair.poll(P, sender)), (KvPoll::Success, KvPoll::Transferring));
    assert_eq!(pair.released(P, sender), []);
    pair.run_for(LEASE);
    assert_eq!(pair.failure(P, sender), Cause::LeaseExpired, "the second never came");
    assert_eq!(pair.released(P, sender), [list(&[4])]);
    pair.assert_empty();
}

#[test]
fn a_lost_readers_pages_come_back_when_its_lease_is_over_and_not_before() {
    let mut pair = Pair::new();
    let sender = granted(&mut pair, &[4, 5], None);
    let receiver = acquire(&mut pair, sender);
    pair.init_receiver(receiver, &[7, 8], None);
    // Only this side's connection is known to be dead: the reader may go on, and succeed.
    pair.lose(|_| true);
    pair.peer_gone(P, Duration::ZERO);
    assert_eq!(pair.failure(P, sender), Cause::PeerLost);
    pair.complete_posts();
    assert_eq!(pair.poll(D, receiver), KvPoll::Success);
    pair.run_for(LEASE - Duration::from_millis(1));
    assert_eq!(pair.released(P, sender), []);
    pair.run_for(Duration::from_millis(1));
    assert_eq!(pair.released(P, sender), [list(&[4, 5])]);
}

#[test]
fn a_fixed_lease_is_not_renewed_and_its_reader_sends_no_heartbeats() {
    let mut pair = Pair::new();
    let lease = Some(Lease::Fixed(LEASE));
    let sender = pair.open_sender_with(ROOM, 1, pull().with(|options| options.lease = lease));
    pair.init_sender(sender, 1, None);
    pair.send(sender, &[4]);
    let receiver = acquire(&mut pair, sender);
    pair.lose(|body| {
        assert!(!matches!(body, Body::Heartbeat(asks) if !asks.leases.is_empty()));
        false
    });
    pair.run_for(LEASE);
    assert_eq!(pair.failure(P, sender), Cause::LeaseExpired);
    assert_eq!(pair.failure(D, receiver), Cause::LeaseExpired);
    pair.assert_empty();
}

#[test]
fn conflicting_modes_fail_both_sides_and_auto_matches_any_mode() {
    let mut pair = Pair::new();
    let sender = pair.open_sender_with(ROOM, 1, pull());
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[7], None);
    let cause = PeerCause::Mode { sender: TransferMode::Pull, receiver: TransferMode::Push };
    assert_eq!(pair.failure(D, receiver), Cause::ByPeer(cause.clone()));
    assert_eq!(pair.failure(P, sender), Cause::ByPeer(cause));

    for mode in [TransferMode::Push, TransferMode::Pull] {
        let auto = SessionOptions::default().with(|options| options.mode = Some(TransferMode::Auto));
        let sender = pair.open_sender_with(ROOM, 1, auto);
        pair.init_sender(sender, 2, Some(1));
        pair.send(sender, &[4, 5]);
        let receiver = pair
            .open_receiver_with(ROOM, SessionOptions::default().with(|options| options.mode = Some(mode)));
        pair.command(
            D,
            kv_core::proto::Command::InitReceiver {
                session: receiver,
                pages: crate::pair::pages(&[7, 8]),
                aux: Some(AuxIndex(0)),
            },
        );
        let op = if mode == TransferMode::Push { Op::Write } else { Op::Read };
        assert_eq!(pair.only_post().op, op);
        pair.complete_posts();
        assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
    }
    pair.assert_empty();
}

#[test]
fn auto_follows_the_transport_and_prefers_a_lease_from_the_router() {
    let auto = || SessionOptions::default().with(|options| options.mode = Some(TransferMode::Auto));
    for (directions, referenced, op) in [
        (Directions::BOTH, false, Op::Write),
        (Directions::BOTH, true, Op::Read),
        (Directions::READ, false, Op::Read),
        (Directions::WRITE, true, Op::Write),
    ] {
        let mut pair = Pair::new();
        pair.directions = directions;
        let sender = pair.open_sender_with(ROOM, 1, auto());
        pair.init_sender(sender, 1, None);
        pair.send(sender, &[4]);
        let lease_refs = if referenced { vec![pair.lease_ref(sender)] } else { Vec::new() };
        let receiver = pair.open_receiver_with(ROOM, auto().with(|options| options.lease_refs = lease_refs));
        pair.init_receiver(receiver, &[7], None);
        assert_eq!(pair.only_post().op, op, "{directions:?}, referenced {referenced}");
        pair.complete_posts();
        assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
        pair.assert_empty();
    }
}
