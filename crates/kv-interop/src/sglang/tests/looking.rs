//! Lookups of several replicas and rooms at one address: what is unknown of one holds up no other.

use super::*;
use kv_core::{BootstrapError, Replica};

/// A rank of an engine of two replicas in which the server knows which replica serves a room.
fn by_room(dp_rank: u32) -> RankRecord {
    let place = tp(1, 0).with(|place| (place.dp_size, place.dp_rank) = (2, dp_rank));
    let fields = serde_json::json!({"load_balance_method": "round_robin"});
    rank(place, 7001 + dp_rank as u16, 5, fields)
}

impl Rig {
    /// Fails the only lookup; the replica that was asked for.
    fn fail_lookup(&mut self, error: BootstrapError) -> Replica {
        let (lookup, query) = self.lookups.remove(0);
        assert!(self.lookups.is_empty(), "one lookup at a time for each address");
        self.input(Input::LookupFailed { lookup, error });
        query.replica
    }
}

#[test]
fn a_room_that_the_server_does_not_know_yet_holds_up_no_other_room() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let (unknown, known) = (rig.open(1, 21), rig.open(2, 22));
    assert_eq!(rig.fail_lookup(BootstrapError::UnknownRank), Replica::Modulo(21));
    assert_eq!(rig.lookups[0].1.replica, Replica::Modulo(22), "the other room is asked for at once");
    rig.answer(vec![by_room(1)]);
    rig.connect();
    assert_eq!((rig.states(unknown).as_str(), rig.states(known).as_str()), ("", "WaitingForInput"));
    assert_eq!(rig.lookups.len(), 0, "the unknown room is not asked for without a pause");
    rig.wait(Duration::from_secs(1));
    assert_eq!(rig.lookups[0].1.replica, Replica::Modulo(21));
    rig.answer(vec![by_room(0)]);
    rig.connect();
    assert_eq!(rig.states(unknown), "WaitingForInput");
}

#[test]
fn a_server_that_does_not_answer_is_asked_once_in_a_while_whatever_is_waited_for() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    let sessions: Vec<_> = (0..3).map(|n| rig.open(n, 21 + n)).collect();
    for n in 0..3 {
        rig.fail_lookup(BootstrapError::TimedOut);
        assert_eq!(rig.lookups.len(), 0);
        let other = rig.open(10 + n, 30);
        rig.abort(other);
        assert_eq!(rig.lookups.len(), 0, "a new session does not shorten the pause");
        rig.wait(Duration::from_millis(999));
        assert_eq!(rig.lookups.len(), 0);
        rig.wait(Duration::from_millis(1));
    }
    rig.answer(vec![rank(tp(1, 0), 7001, 5, plain())]);
    rig.connect();
    assert!(sessions.iter().all(|session| rig.states(*session) == "WaitingForInput"));
}

#[test]
fn a_retry_that_nobody_waits_for_any_more_keeps_the_worker_from_no_sleep() {
    let mut rig = Rig::decode(&args(tp(1, 0)));
    rig.open(1, 22);
    rig.answer(vec![by_room(1)]);
    let gone = rig.open(2, 21);
    rig.fail_lookup(BootstrapError::UnknownRank);
    rig.abort(gone);
    rig.now = rig.now + Duration::from_secs(2);
    rig.input(Input::Timeout);
    let due = rig.machine.next_timeout().unwrap();
    assert!(
        due > rig.now,
        "a timeout that has passed is asked for again and again: {due:?} at {:?}",
        rig.now
    );
}
