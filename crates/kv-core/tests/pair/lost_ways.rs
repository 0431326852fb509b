//! What a receiver is told of a sender that has lost the way to it.

use std::time::Duration;

use kv_core::{Cause, KvPoll, Room};

use crate::pair::*;

const SECOND: Duration = Duration::from_secs(1);
const ROOM: Room = Room::Number(5);

/// P3: the prefill worker loses its way to the decode worker, and fails the request. The other one greets it
/// anew, registers again, and waits for a sender that has failed.
#[test]
fn a_receiver_is_told_when_its_sender_has_lost_the_way_to_it() {
    let mut pair = Pair::new();
    let (sender, receiver) = pair.transferring(ROOM, &[1, 2], &[20, 21]);
    for (node, post) in pair.take_posts() {
        pair.complete(node, post, Err(kv_core::TransportError::PeerGone));
    }
    // The same without a post that fails.
    let other = Room::Number(6);
    let (waiting, left) = (pair.open_sender(other.clone(), 1), pair.open_receiver(other));
    pair.init_receiver(left, &[22], None);
    pair.lose_way(P);
    assert_eq!(pair.failure(P, waiting), Cause::WayLost);
    pair.run_for(SECOND * 60);
    assert_eq!(pair.poll(P, sender), KvPoll::Failed);
    let ended = [receiver, left].map(|session| pair.poll(D, session));
    assert_eq!(ended, [KvPoll::Failed; 2], "its sender has failed a minute ago");
}

/// The same at once: what was in flight is failed by the lost way.
#[test]
fn a_receiver_is_told_in_mid_transfer_that_its_sender_lost_the_way() {
    let mut pair = Pair::new();
    let sender = pair.open_sender(ROOM, 1);
    let receiver = pair.open_receiver(ROOM);
    pair.init_receiver(receiver, &[20, 21], None);
    pair.init_sender(sender, 2, None);
    pair.send(sender, &[1]);
    pair.complete_posts();
    pair.lose_way(P);
    assert_eq!(pair.failure(P, sender), Cause::WayLost);
    pair.run_for(SECOND * 60);
    assert_eq!(pair.poll(D, receiver), KvPoll::Failed, "its sender has failed a minute ago");
}
