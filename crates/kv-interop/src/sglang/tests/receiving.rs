//! An SGLang prefill engine and our decode rank, from the lookup to the last page.

use super::*;
use kv_core::{BootstrapError, QuarantineReason};

const QUIET: Duration = Duration::from_secs(2);
const DEAD: WayEnd = WayEnd::Dead { quiet_after: QUIET };

/// A receiver of room 9 whose pages a prefill engine of one rank was told; the rank's peer.
fn told(rig: &mut Rig) -> (SessionId, PeerId) {
    let session = rig.open(1, 9);
    rig.answer(vec![rank(tp(1, 0), 7001, 5, plain())]);
    let peer = rig.connect()[0].0;
    rig.init(session, &[3, 4, 7], 5);
    rig.said();
    (session, peer)
}

fn strings(parts: &[&str]) -> Vec<String> {
    parts.iter().map(|part| (*part).to_owned()).collect()
}

fn abort(room: &str) -> Vec<String> {
    strings(&["ABORT", room, PULL.0, "4321", GENERATION])
}

#[test]
fn a_prefill_rank_is_registered_once_and_told_the_pages_of_each_request() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let session = rig.open_with(1, 9, SessionOptions::default().with(|options| options.prefix_pages = 2));
    assert_eq!(rig.states(session), "");
    rig.answer(vec![rank(tp(1, 0), 7001, 5, plain())]);
    let ways = rig.connect();
    assert_eq!(ways[0].1, "10.0.0.2:7001");
    let said = rig.said();
    assert_eq!((said.len(), said[0].0, said[0].1.len()), (1, ways[0].0, 25));
    assert_eq!(
        said[0].1[..6],
        strings(&["NixlMsgGuard", "None", PULL.0, "4321", "agent-1", "nixlSerDes|blob"])
    );
    assert_eq!(said[0].1[9..13], strings(&["0", "1", "0", "64"]));
    assert_eq!(said[0].1[17..19], strings(&["64", "DRAM,DRAM"]));
    assert_eq!(rig.states(session), "WaitingForInput");
    rig.init(session, &[3, 4, 7], 5);
    let pages = "\u{3}\0\0\0\u{4}\0\0\0\u{7}\0\0\0";
    let request = ["NixlMsgGuard", "9", PULL.0, "4321", "agent-1", pages, "5", "1", "", "32", "0"];
    assert_eq!(rig.said(), [(ways[0].0, strings(&request))]);
    rig.rows.lock().unwrap().insert(5, 9);
    rig.hear(&["KV_STATUS", "9", "4", "0", ""]);
    assert_eq!(rig.states(session), "WaitingForInput Transferring Success");
    assert_eq!((rig.back(session), rig.machine.remembered().0), (Some(3), [0, 0, 1]));
    // The next request needs neither a lookup nor a registration.
    let second = rig.open(2, 10);
    rig.init(second, &[1], 0);
    let said = rig.said();
    assert_eq!((said.len(), said[0].1[1].as_str(), rig.lookups.len(), rig.ways.len()), (1, "10", 0, 0));
    assert_eq!(rig.states(second), "WaitingForInput Transferring");
}

#[test]
fn success_needs_a_word_of_every_rank_that_writes_and_none_of_dummies() {
    let mut rig = Rig::decode(&args_in(MemoryKind::Vram, tp(1, 0)));
    let session = rig.open(1, 9);
    rig.answer((0..2).map(|n| rank(tp(2, n), 7001 + n as u16, 5, plain())).collect());
    rig.connect();
    rig.init(session, &[3], 5);
    rig.rows.lock().unwrap().insert(5, 9);
    rig.hear(&["KV_STATUS", "9", "4", "0", ""]);
    rig.hear(&["KV_STATUS", "9", "4", "0", ""]);
    assert_eq!((rig.states(session).as_str(), rig.back(session)), ("WaitingForInput Transferring", None));
    rig.hear(&["KV_STATUS", "9", "4", "1", ""]);
    assert_eq!(
        (rig.states(session).as_str(), rig.back(session)),
        ("WaitingForInput Transferring Success", Some(1))
    );

    // Ranks of a latent cache hold the same: the first one writes, the others are told a dummy.
    let latent = |at: u64, layer| {
        let region = Region::dram(RegionRole::Kv, at, 64 * 64, 64).layer(layer);
        region.holds(kv_core::Holds::Latent)
    };
    let mut args = KvArgs::builder("ours", 0).pages(64, 16).dtype("f16").heads(1, 2);
    args = args.region(latent(0x1_0000, 1)).region(latent(0x2_0000, 0));
    for (buffer, len) in (0..).zip(AUX_ITEM_LENS) {
        args = args.region(Region::dram(RegionRole::Aux, 0x10_0000 + buffer * 0x1_0000, 8 * len, len));
    }
    let mut rig = Rig::decode(&args.build().unwrap());
    let session = rig.open(1, 9);
    rig.answer((0..2).map(|n| rank(tp(2, n), 7001 + n as u16, 5, plain())).collect());
    rig.connect();
    assert_eq!(rig.said()[0].1[6], "\0\0\u{2}\0\0\0\0\0\0\0\u{1}\0\0\0\0\0", "layers in order");
    rig.init(session, &[3], 5);
    let dummies: Vec<_> = rig.said().into_iter().map(|(_, said)| (said[5].len(), said[10].clone())).collect();
    assert_eq!(dummies, [(4, "0".to_owned()), (0, "1".to_owned())]);
    rig.rows.lock().unwrap().insert(5, 9);
    rig.hear(&["KV_STATUS", "9", "4", "0", ""]);
    assert_eq!(rig.back(session), Some(1));
}

#[test]
fn each_prefill_rank_is_told_how_many_decode_ranks_it_serves() {
    for (ours, theirs, required) in [(2, 2, "1"), (4, 2, "2"), (4, 1, "4"), (1, 2, "1")] {
        let mut rig = Rig::decode(&args_in(MemoryKind::Vram, tp(ours, ours - 1)));
        let session = rig.open(1, 9);
        rig.answer((0..theirs).map(|n| rank(tp(theirs, n), 7001 + n as u16, 5, plain())).collect());
        let peers = rig.connect().len();
        assert_eq!(peers, if theirs > ours { 2 } else { 1 });
        rig.said();
        rig.init(session, &[3], 5);
        let told: Vec<_> = rig.said().into_iter().map(|(_, said)| said[7].clone()).collect();
        assert_eq!(told, vec![required; peers], "{ours} decode ranks, {theirs} prefill ranks");
    }
}

#[test]
fn an_aux_row_of_another_room_is_no_success() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let (session, peer) = told(&mut rig);
    rig.rows.lock().unwrap().insert(5, 8);
    rig.hear(&["KV_STATUS", "9", "4", "0", ""]);
    assert_eq!(
        rig.cause(session),
        "the peer broke the protocol: bootstrap_room in the aux row is not the room of the request"
    );
    assert_eq!((rig.back(session), rig.said()), (None, vec![(peer, abort("9"))]), "the word was not true");
    rig.hear(&["ABORT_ACK", "9", "0", GENERATION]);
    assert_eq!(rig.back(session), Some(3));
}

#[test]
fn an_abort_keeps_the_pages_until_the_rank_has_acknowledged_this_very_abort() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let (session, peer) = told(&mut rig);
    rig.abort(session);
    assert_eq!(rig.said(), [(peer, abort("9"))]);
    assert_eq!((rig.cause(session).as_str(), rig.back(session)), ("aborted by the local scheduler", None));
    let held = rig.quarantine();
    assert_eq!((held.len(), held[0].pages, held[0].reason), (1, 3, QuarantineReason::Unacknowledged));
    assert_eq!(held[0].peer.as_ref().unwrap().to_string(), "theirs/0");
    // The room's next session would be mistaken for this one.
    let retry = rig.open(2, 9);
    assert!(rig.cause(retry).contains("former session is in quarantine"), "{}", rig.cause(retry));
    for wrong in [["ABORT_ACK", "9", "0", "16"], ["ABORT_ACK", "9", "1", "17"], ["ABORT_ACK", "8", "0", "17"]]
    {
        rig.hear(&wrong);
    }
    rig.hear(&["ABORT_ACK", "9", "0"]);
    rig.hear(&["KV_STATUS", "9", "4", "0", ""]);
    assert_eq!((rig.back(session), rig.gauges.of(Ignored::UnknownRequest)), (None, 5));
    // The acknowledgement may have been lost: the rank is asked again, under the same number.
    for _ in 0..3 {
        rig.wait(Duration::from_secs(9));
        assert_eq!(rig.said(), []);
        rig.wait(Duration::from_secs(1));
        assert_eq!((rig.said(), rig.back(session)), (vec![(peer, abort("9"))], None));
    }
    rig.hear(&["ABORT_ACK", "9", "0", "17"]);
    assert_eq!((rig.back(session), rig.quarantine().len()), (Some(3), 0));
    rig.wait(Duration::from_secs(3600));
    assert_eq!(rig.said(), [], "nobody is asked any more");
    let again = rig.open(3, 9);
    assert_eq!(rig.cause(again), "", "the room is free");
}

#[test]
fn a_request_that_the_prefill_engine_fails_is_held_until_its_writes_have_ended() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let (session, peer) = told(&mut rig);
    rig.hear(&["KV_STATUS", "9", "0", "0", "NIXL transfer encountered ERR"]);
    assert_eq!(
        rig.cause(session),
        "ended by the peer: NIXL transfer encountered ERR (a cause that this version does not know)"
    );
    assert_eq!((rig.said(), rig.back(session)), (vec![(peer, abort("9"))], None));
    rig.hear(&["ABORT_ACK", "9", "0", "17"]);
    assert_eq!(rig.back(session), Some(3));
}

#[test]
fn the_deadline_ends_each_phase_with_what_the_session_waited_for() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let options =
        || SessionOptions::default().with(|options| options.deadline = Some(Duration::from_secs(5)));
    let looking = rig.open_with(1, 9, options());
    let (lookup, _) = rig.lookups.remove(0);
    rig.input(Input::LookupFailed { lookup, error: BootstrapError::NotReady { registered: 0, expected: 2 } });
    rig.wait(Duration::from_secs(1));
    assert_eq!(rig.lookups.len(), 1, "the lookup is repeated");
    rig.wait(Duration::from_secs(5));
    assert_eq!(
        rig.cause(looking),
        "not finished within 5s (the engine is not ready: 0 of 2 ranks have registered)"
    );
    rig.answer(vec![rank(tp(1, 0), 7001, 5, plain())]);
    let waiting = rig.open_with(2, 10, options());
    let peer = rig.connect()[0].0;
    let told = rig.open_with(3, 11, options());
    rig.init(told, &[1, 2], 0);
    rig.said();
    rig.wait(Duration::from_secs(5));
    assert_eq!(
        (rig.cause(waiting), rig.cause(told)),
        ("not finished within 5s".to_owned(), "not finished within 5s".to_owned())
    );
    let unarmed = strings(&["ABORT", "10", PULL.0, "4321"]);
    assert_eq!(rig.said(), [(peer, unarmed), (peer, abort("11"))]);
    assert_eq!((rig.back(told), rig.quarantine()[0].pages), (None, 2));
    rig.hear(&["ABORT_ACK", "11", "0", GENERATION]);
    assert_eq!(rig.back(told), Some(2));
}

#[test]
fn a_rank_that_dies_frees_the_pages_once_its_last_writes_are_in() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let (session, peer) = told(&mut rig);
    let (aborted, waiting) = (rig.open(2, 10), rig.open(3, 11));
    rig.init(aborted, &[8], 1);
    rig.abort(aborted);
    rig.gone(peer, DEAD);
    assert_eq!(rig.cause(session), "the peer's process has ended or has closed its transport");
    assert_eq!(rig.cause(waiting), "the peer's process has ended or has closed its transport");
    assert_eq!((rig.back(session), rig.back(aborted), rig.disconnected.len()), (None, None, 1));
    assert_eq!(rig.quarantine()[0].ends_within, Some(QUIET));
    rig.wait(QUIET - Duration::from_millis(1));
    assert_eq!((rig.back(session), rig.back(aborted)), (None, None));
    rig.wait(Duration::from_millis(1));
    assert_eq!((rig.back(session), rig.back(aborted)), (Some(3), Some(1)));
    assert_eq!((rig.quarantine().len(), rig.ways.len()), (0, 0));
}

#[test]
fn a_lost_way_holds_the_pages_until_the_rank_can_be_asked_or_is_dead() {
    for dies in [false, true] {
        let mut rig = Rig::decode(&args(tp(1, 0)));
        let (session, peer) = told(&mut rig);
        rig.gone(peer, WayEnd::Lost);
        assert_eq!(rig.cause(session), "the connection to the peer was lost");
        assert_eq!(rig.quarantine()[0].reason, QuarantineReason::WayLost);
        rig.wait(Duration::from_secs(1));
        if dies {
            let (peer, _) = rig.ways.remove(0);
            rig.gone(peer, DEAD);
            rig.wait(QUIET);
        } else {
            let again = rig.connect()[0].0;
            let said = rig.said();
            assert_eq!((said.len(), said[0].1.len()), (2, 25), "registered anew");
            assert_eq!(said[1], (again, abort("9")));
            assert_eq!(rig.quarantine()[0].reason, QuarantineReason::Unacknowledged);
            rig.hear(&["ABORT_ACK", "9", "0", GENERATION]);
        }
        assert_eq!((rig.back(session), rig.quarantine().len()), (Some(3), 0));
        rig.wait(Duration::from_secs(60));
        assert_eq!(rig.ways.len(), 0, "nobody needs the way");
    }
}

#[test]
fn a_restarted_rank_is_looked_up_and_registered_anew() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let (session, peer) = told(&mut rig);
    rig.gone(peer, WayEnd::Dead { quiet_after: Duration::ZERO });
    assert_eq!(rig.back(session), Some(3), "nothing is on its way");
    let next = rig.open(2, 9);
    rig.answer(vec![rank(tp(1, 0), 7002, 6, plain())]);
    assert_eq!(rig.connect()[0].1, "10.0.0.2:7002");
    assert_eq!(rig.said()[0].1[1], "None");
    assert_eq!(rig.states(next), "WaitingForInput");
}

#[test]
fn one_lookup_serves_all_requests_of_a_replica_and_each_replica_has_its_own() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let replica = |dp_rank| {
        let place = tp(1, 0).with(|place| (place.dp_size, place.dp_rank) = (2, dp_rank));
        rank(place, 7001 + dp_rank as u16, 5, plain())
    };
    let sessions: Vec<_> = (0..6).map(|n| rig.open(n, 10 + n)).collect();
    rig.answer(vec![replica(0)]);
    assert_eq!(rig.lookups[0].1.replica, kv_core::Replica::Rank(1));
    rig.answer(vec![replica(1)]);
    assert_eq!(rig.connect().len(), 2);
    assert!(sessions.iter().all(|session| rig.states(*session) == "WaitingForInput"));
    rig.wait(Duration::from_secs(10));
    rig.open(9, 30);
    assert_eq!(rig.lookups.len(), 1, "the answers are too old");
}

#[test]
fn a_stopping_worker_ends_its_sessions_and_opens_none() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let (session, peer) = told(&mut rig);
    rig.input(Input::Command(Command::Shutdown));
    assert_eq!(
        (rig.cause(session).as_str(), rig.said()),
        ("the local worker is stopping", vec![(peer, abort("9"))])
    );
    let late = rig.open(2, 10);
    assert_eq!(rig.cause(late), "the local worker is stopping");
    rig.hear(&["ABORT_ACK", "9", "0", GENERATION]);
    assert_eq!(rig.back(session), Some(3));
}

/// How a session is ended, in every phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Abort,
    Deadline,
    Shutdown,
    Lost,
    Dead,
}

#[test]
fn whatever_ends_a_session_in_whatever_phase_ends_it_once_with_all_pages_back() {
    let phases = ["looking", "connecting", "waiting for pages", "written to"];
    for (phase, name) in phases.into_iter().enumerate() {
        for end in [End::Abort, End::Deadline, End::Shutdown, End::Lost, End::Dead] {
            let mut rig = Rig::decode(&args(tp(1, 0)));
            let options = SessionOptions::default().with(|options| options.deadline = Some(5 * QUIET));
            let session = rig.open_with(1, 9, options);
            let given = if phase == 2 { 0 } else { 3 };
            if given > 0 {
                rig.init(session, &[3, 4, 7], 5);
            }
            if phase > 0 {
                rig.answer(vec![rank(tp(1, 0), 7001, 5, plain())]);
            }
            let peer = rig.ways.first().map(|(peer, _)| *peer);
            if phase > 1 {
                rig.connect();
            }
            rig.hear(&["KV_STATUS", "9", "4", "7", ""]);
            rig.hear(&["KV_STATUS", "9", "junk", "0", ""]);
            rig.hear(&["ABORT_ACK", "9", "0", GENERATION]);
            rig.said();
            match (end, peer) {
                (End::Abort, _) => rig.abort(session),
                (End::Deadline, _) => rig.wait(5 * QUIET),
                (End::Shutdown, _) => rig.input(Input::Command(Command::Shutdown)),
                (_, None) => continue,
                (End::Lost, Some(peer)) => rig.gone(peer, WayEnd::Lost),
                (End::Dead, Some(peer)) => rig.gone(peer, DEAD),
            }
            assert!(rig.states(session).ends_with("Failed"), "{name} {end:?}");
            let told = rig.said().iter().filter(|(_, said)| said[0] == "ABORT").count();
            let speaks = phase > 1 && !matches!(end, End::Lost | End::Dead);
            assert_eq!(told, usize::from(speaks), "{name} {end:?}");
            let held = phase == 3;
            assert_eq!(rig.back(session).unwrap_or(0), if held { 0 } else { given }, "{name} {end:?}");
            assert_eq!(rig.quarantine().len(), usize::from(held), "{name} {end:?}");
            if end == End::Dead {
                rig.wait(QUIET);
            }
            if end == End::Lost && held {
                rig.wait(QUIET);
                rig.connect();
            }
            rig.hear(&["ABORT_ACK", "9", "0", GENERATION]);
            assert_eq!(rig.back(session).unwrap_or(0), given, "{name} {end:?}");
            assert_eq!((rig.quarantine().len(), rig.pool.num_out()), (0, 0), "{name} {end:?}");
            assert_eq!(rig.machine.remembered().0[..2], [0, 0], "{name} {end:?}");
            let next = rig.open(2, 9);
            assert_eq!(rig.cause(next).is_empty(), end != End::Shutdown, "the room is free: {name} {end:?}");
        }
    }
}

#[test]
fn a_lookup_that_nobody_waits_for_any_more_leaves_no_timer_behind() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let of_replica = |replica| SessionOptions::default().with(|it| it.prefill_dp_rank = Some(replica));
    rig.open_with(1, 11, of_replica(0));
    rig.answer(vec![rank(tp(1, 0), 7000, 1, plain())]);
    let session = rig.open_with(2, 12, of_replica(1));
    let (lookup, _) = rig.lookups.remove(0);
    let error = kv_core::BootstrapError::NotReady { registered: 1, expected: 2 };
    rig.input(Input::LookupFailed { lookup, error });
    rig.abort(session);
    rig.now = rig.now + Duration::from_secs(2);
    rig.input(Input::Timeout);
    assert!(rig.lookups.is_empty());
    assert!(rig.machine.next_timeout().is_none_or(|next| next > rig.now), "the worker would never sleep");
}
