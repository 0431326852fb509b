//! Workers of different versions: one is upgraded before the other.

use kv_core::proto::Spoken;
use kv_core::wire::{VERSIONS, Versions};
use kv_core::{Cause, KvPoll, PeerCause, Room, SessionOptions, TransferMode};

use crate::pair::{D, P, Pair, list};

const ROOM: Room = Room::Number(1);

/// Two workers that speak these versions.
fn pair(prefill: Versions, decode: Versions) -> Pair {
    Pair::with(|config| {
        let is_prefill = config.args.worker().engine.as_str() == "prefill";
        config.versions = Spoken::of_another_library(if is_prefill { prefill } else { decode });
    })
}

#[test]
fn disjoint_version_ranges_fail_both_sides_with_both_ranges_named() {
    let newer = Versions { min: VERSIONS.max + 1, max: VERSIONS.max + 2 };
    let older = Versions { min: 1, max: VERSIONS.min - 1 };
    for (prefill, decode) in [(VERSIONS, newer), (newer, VERSIONS), (VERSIONS, older), (older, VERSIONS)] {
        for mode in [TransferMode::Push, TransferMode::Pull] {
            let options = || SessionOptions::default().with(|options| options.mode = Some(mode));
            let mut pair = pair(prefill, decode);
            let sender = pair.open_sender_with(ROOM, 1, options());
            pair.init_sender(sender, 2, None);
            pair.send(sender, &[3, 4]);
            let receiver = pair.open_receiver_with(ROOM, options());
            pair.init_receiver(receiver, &[0, 1], None);
            // No time has passed.
            assert_eq!(pair.failure(D, receiver), Cause::Versions { ours: decode, theirs: prefill });
            let told = PeerCause::Versions { ours: decode, theirs: prefill };
            assert_eq!(pair.failure(P, sender), Cause::ByPeer(told));
            assert_eq!(pair.released(D, receiver), [list(&[0, 1])]);
            assert_eq!(pair.released(P, sender), [list(&[3, 4])]);
            // The second request ends as the first.
            let sender = pair.open_sender_with(Room::Number(2), 1, options());
            let again = pair.open_receiver_with(Room::Number(2), options());
            assert_eq!(pair.failure(D, again), Cause::Versions { ours: decode, theirs: prefill });
            assert!(matches!(pair.failure(P, sender), Cause::ByPeer(PeerCause::Versions { .. })));
            pair.assert_empty();
            for node in [P, D] {
                assert_eq!(pair.node(node).gauges().dropped.total(), 0);
            }
        }
    }
}

#[test]
fn overlapping_version_ranges_use_the_newest_common_version() {
    let wide = Versions { min: VERSIONS.min - 1, max: VERSIONS.max + 3 };
    let newer = Versions { min: VERSIONS.max, max: VERSIONS.max + 1 };
    for (prefill, decode) in [(VERSIONS, wide), (wide, VERSIONS), (VERSIONS, newer), (newer, VERSIONS)] {
        let mut pair = pair(prefill, decode);
        let (sender, receiver) = pair.transferring(ROOM, &[3, 4], &[0, 1]);
        let notify = pair.only_post().notify.expect("the last post says so");
        assert_eq!(notify[1], VERSIONS.max);
        pair.complete_posts();
        assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
        pair.assert_empty();
    }
}

#[test]
fn an_upgraded_worker_serves_a_peer_its_former_incarnation_could_not() {
    for upgraded in [P, D] {
        let older = Versions { min: VERSIONS.min - 1, max: VERSIONS.min - 1 };
        let mut pair = pair(VERSIONS, VERSIONS);
        pair.upgrade(upgraded, older);
        let sender = pair.open_sender(ROOM, 1);
        let receiver = pair.open_receiver(ROOM);
        assert!(matches!(pair.failure(D, receiver), Cause::Versions { .. }));
        assert!(matches!(pair.failure(P, sender), Cause::ByPeer(PeerCause::Versions { .. })));
        pair.upgrade(upgraded, Versions { min: older.min, max: VERSIONS.max });
        let (sender, receiver) = pair.transferring(Room::Number(2), &[3, 4], &[0, 1]);
        pair.complete_posts();
        assert_eq!((pair.poll(P, sender), pair.poll(D, receiver)), (KvPoll::Success, KvPoll::Success));
        pair.assert_empty();
    }
}
