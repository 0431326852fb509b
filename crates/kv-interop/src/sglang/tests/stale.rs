//! Words and aux rows of a former request with the same room number. SGLang names nothing but the room in
//! `KV_STATUS`, and can say `KV_STATUS` 4 of a request whose abort was acknowledged before: the thread that ends
//! transfers and the one that takes aborts do not wait for each other.

use super::*;
use kv_core::QuarantineReason;

const DEAD: WayEnd = WayEnd::Dead { quiet_after: Duration::from_secs(2) };

/// A receiver of room 9 whose pages were told to the ranks of a prefill engine of this size; the ranks' peers.
fn told(rig: &mut Rig, ranks: u32) -> (SessionId, Vec<PeerId>) {
    let session = rig.open(1, 9);
    rig.answer((0..ranks).map(|n| rank(tp(ranks, n), 7001 + n as u16, 5, plain())).collect());
    let peers = rig.connect().into_iter().map(|(peer, _)| peer).collect();
    rig.init(session, &[3, 4, 7], 5);
    rig.said();
    (session, peers)
}

fn vram() -> Rig {
    Rig::decode(&args_in(MemoryKind::Vram, tp(1, 0)))
}

#[test]
fn a_success_that_the_aux_row_disproves_leaves_the_pages_with_the_writer() {
    let mut rig = vram();
    let (session, _) = told(&mut rig, 1);
    // The word is one for a former request of the room: the rank has written nothing yet.
    rig.hear(&["KV_STATUS", "9", "4", "0", ""]);
    assert!(rig.cause(session).contains("bootstrap_room in the aux row"), "{}", rig.cause(session));
    assert_eq!((rig.back(session), rig.quarantine()[0].reason), (None, QuarantineReason::Unacknowledged));
    assert_eq!(rig.said()[0].1, ["ABORT", "9", PULL.0, "4321", GENERATION]);
    rig.hear(&["ABORT_ACK", "9", "0", GENERATION]);
    assert_eq!((rig.back(session), rig.quarantine().len()), (Some(3), 0));
}

#[test]
fn a_rank_whose_success_was_of_no_use_must_acknowledge_the_abort_like_the_others() {
    let mut rig = vram();
    let (session, _) = told(&mut rig, 2);
    rig.hear(&["KV_STATUS", "9", "4", "0", ""]);
    rig.hear(&["KV_STATUS", "9", "0", "1", "NIXL transfer encountered ERR"]);
    assert!(rig.states(session).ends_with("Failed"));
    rig.hear(&["ABORT_ACK", "9", "1", GENERATION]);
    assert_eq!(rig.back(session), None, "rank 0 has not said that it writes no more for this request");
    rig.hear(&["ABORT_ACK", "9", "0", GENERATION]);
    assert_eq!((rig.back(session), rig.quarantine().len()), (Some(3), 0));
}

#[test]
fn a_rank_that_dies_after_its_success_holds_the_pages_no_longer_than_its_last_writes() {
    let mut rig = vram();
    let (session, peers) = told(&mut rig, 2);
    rig.hear(&["KV_STATUS", "9", "4", "0", ""]);
    rig.gone(peers[0], DEAD);
    rig.hear(&["ABORT_ACK", "9", "1", GENERATION]);
    assert_eq!((rig.back(session), rig.quarantine()[0].reason), (None, QuarantineReason::PermissionEnds));
    rig.wait(Duration::from_secs(2));
    assert_eq!((rig.back(session), rig.quarantine().len()), (Some(3), 0));
}

#[test]
fn a_row_that_holds_the_room_before_anything_is_written_proves_nothing_and_is_refused() {
    let mut rig = vram();
    let (session, _) = told(&mut rig, 1);
    rig.rows.lock().unwrap().insert(5, 9);
    rig.hear(&["KV_STATUS", "9", "4", "0", ""]);
    assert!(rig.states(session).ends_with("Success"));
    let again = rig.open(2, 9);
    rig.init(again, &[8], 5);
    assert!(
        rig.cause(again).contains("the aux row holds the room of the request before"),
        "{}",
        rig.cause(again)
    );
    assert_eq!((rig.back(again), rig.quarantine().len()), (Some(1), 0), "no rank was told");
    // A row that was cleared, or another one, will do.
    rig.rows.lock().unwrap().insert(5, 0);
    let cleared = rig.open(3, 9);
    rig.init(cleared, &[8], 5);
    rig.hear(&["KV_STATUS", "9", "4", "0", ""]);
    assert!(rig.states(cleared).ends_with("Failed"), "a doubled word is not taken for the new request's");
    assert_eq!(rig.back(cleared), None);
}
