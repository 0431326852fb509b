//! Records with clocks that differ by hours are joined into one clock, and the truth is never farther away than the
//! uncertainty says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use kv_core::Room;
use kv_timeline::{JoinError, MAX_RECORDS, Message, Outcome, Phase, Record, Side, Timeline, What};
use support::{HOUR, MS, Made, Random, START, pair, push};

/// By how much clocks may drift apart: so many nanoseconds are one.
const DRIFT: u64 = 5000;

/// By how much the estimate of the difference of two clocks is wrong, and by how much it says that it may be wrong.
fn error(timeline: &Timeline, made: &[Made]) -> (i128, u64) {
    let clock = |made: &Made| {
        let worker = timeline.workers().iter().find(|actor| actor.worker == made.record.worker).unwrap();
        worker.recorded.as_ref().unwrap().clock
    };
    let [a, b] = [clock(&made[0]), clock(&made[1])];
    // With the true shifts, a moment is at the same time on both clocks.
    let wrong = (a.shift + i128::from(made[0].ahead)) - (b.shift + i128::from(made[1].ahead));
    (wrong.abs(), a.uncertainty.unwrap() + b.uncertainty.unwrap())
}

fn joined(made: &[Made]) -> Timeline {
    Timeline::join(made.iter().map(|made| made.record.clone()).collect()).unwrap()
}

#[test]
fn clocks_that_differ_by_hours_are_joined_to_within_half_a_round_trip() {
    for ahead in [[0, 0], [3 * HOUR, -2 * HOUR], [-50 * HOUR, 7], [0, HOUR]] {
        let mut made = pair(ahead);
        push(&mut made, &Room::Number(7), 7, START, [100_000, 100_000]);
        let timeline = joined(&made);
        let (wrong, unsure) = error(&timeline, &made);
        assert_eq!(wrong, 0, "equal delays cancel out: {ahead:?}");
        // And what the clocks may have drifted between the messages.
        assert!((100_000..100_000 + 10 * MS / DRIFT).contains(&unsure), "{unsure}");
        // Both lanes of the request lie beside each other, as they were in truth.
        let [request] = timeline.requests() else { panic!("one room is one request") };
        let [sends, receives] = &request.lanes[..] else { panic!("both sides have a lane") };
        assert_eq!((sends.side, receives.side), (Side::Sender, Side::Receiver));
        assert_eq!((receives.from, sends.from), (0, MS as i64));
        assert_eq!(sends.posts[0].to, Some((5 * MS + 100_000) as i64));
        assert_eq!(sends.bytes(), 8192);
        assert_eq!(sends.outcome, Outcome::Succeeded);
    }
}

#[test]
fn unequal_delays_make_an_estimate_wrong_by_no_more_than_its_uncertainty() {
    let mut made = pair([HOUR, -HOUR]);
    push(&mut made, &Room::Number(7), 7, START, [10_000, 5 * MS]);
    let (wrong, unsure) = error(&joined(&made), &made);
    assert_eq!(wrong, 2_495_000);
    assert!((2_505_000..2_505_000 + 20 * MS / DRIFT).contains(&unsure), "{unsure}");
    // A faster message says more.
    push(&mut made, &Room::Number(8), 8, START + 50 * MS, [30_000, 20_000]);
    let (wrong, unsure) = error(&joined(&made), &made);
    assert!((5_000..15_000).contains(&wrong), "{wrong}");
    assert!((15_000..15_000 + 100 * MS / DRIFT).contains(&unsure), "{unsure}");
}

#[test]
fn the_truth_is_within_the_uncertainty_whatever_is_lost_or_said_again() {
    let mut random = Random::new("clocks");
    let mut bounded = 0;
    for _ in 0..300 {
        let ahead = [0, 0].map(|_| random.below(20 * HOUR as u64) as i64 - 10 * HOUR);
        let mut made = pair(ahead);
        let mut now = START;
        for number in 0..1 + random.below(6) {
            let delays = [0, 0].map(|_| 1 + random.below(3 * MS));
            // The message was sent before, and was lost: an answer is to the first one.
            let room = Room::Number(number);
            now = push(&mut made, &room, number, now, delays);
            if random.below(2) == 0 {
                let again = What::Said(Message::Register { room, pages: 2 });
                made[1].notes(number, Some((1, number)), now + MS, again);
            }
            if random.below(4) == 0 {
                let side = &mut made[random.below(2) as usize].record;
                // A whole session is lost, as a recorder drops sessions.
                side.sessions.pop();
                side.lost.sessions += 1;
            }
            // The answer that is said first is of no session; if it is dropped, the next one must not count.
            if random.below(3) == 0 && made[0].record.sessions.iter().any(|one| one.session == number) {
                let about = Some((1, number));
                made[0].record.lost.other_events += 1;
                made[0].notes(number, about, now + 9 * MS, What::Said(Message::Registered));
                if made[1].record.sessions.iter().any(|one| one.session == number) {
                    made[1].notes(number, about, now + MS, What::Heard(Message::Registered));
                }
            }
            now += 20 * MS;
        }
        let timeline = joined(&made);
        let known = |actor: &kv_timeline::Actor| {
            actor.recorded.as_ref().is_some_and(|recorded| recorded.clock.uncertainty.is_some())
        };
        if timeline.workers().iter().all(known) {
            bounded += 1;
            let (wrong, unsure) = error(&timeline, &made);
            assert!(wrong <= i128::from(unsure), "wrong by {wrong}, and sure to {unsure}");
        }
    }
    assert!(bounded > 150, "only {bounded} of 300 conversations said anything");
}

#[test]
fn the_clock_of_a_third_worker_is_known_through_a_second_one() {
    let (mut far, mut middle, mut other) = (
        Made::new("prefill", 0, 1, 5 * HOUR),
        Made::new("decode", 0, 2, 0),
        Made::new("prefill", 1, 3, -4 * HOUR),
    );
    far.meets(1, &middle);
    middle.meets(1, &far);
    other.meets(1, &middle);
    middle.meets(2, &other);
    let beat = |number| Message::Heartbeat { number, leases: 1, asked: 0, writes: false };
    let answer = |number| Message::HeartbeatAnswered { number, leases: 1, lease: 30, permission: 0 };
    for (peer, delay, end) in [(1, 200_000, &mut far), (2, 300_000, &mut other)] {
        middle.other(Some(peer), START, What::Said(beat(5)));
        end.other(Some(1), START + delay, What::Heard(beat(5)));
        end.other(Some(1), START + delay, What::Said(answer(5)));
        middle.other(Some(peer), START + 2 * delay, What::Heard(answer(5)));
    }
    let timeline = joined(&[far, middle, other]);
    let clock = |at: usize| timeline.workers()[at].recorded.as_ref().unwrap().clock;
    assert_eq!(timeline.workers()[0].worker.to_string(), "decode/0");
    assert_eq!((clock(0).shift, clock(0).uncertainty, clock(0).through), (0, Some(0), None));
    assert_eq!((clock(1).shift, clock(2).shift), (i128::from(-5 * HOUR), i128::from(4 * HOUR)));
    for (worker, delay) in [(1, 200_000), (2, 300_000)] {
        let unsure = clock(worker).uncertainty.unwrap();
        assert!((delay..delay + MS / DRIFT).contains(&unsure), "{unsure}");
    }
    assert_eq!((clock(1).through, clock(2).through), (Some(0), Some(0)));
}

#[test]
fn a_clock_that_messages_bound_on_one_side_only_is_said_to_be_unknown() {
    let mut made = pair([HOUR, 0]);
    push(&mut made, &Room::Number(7), 7, START, [MS, MS]);
    // Nothing that the receiver has heard is left.
    made[1].record.sessions[0].notes.retain(|note| !matches!(note.what, What::Heard(_)));
    made[1].record.others.clear();
    let timeline = joined(&made);
    let unsure: Vec<Option<u64>> =
        timeline.workers().iter().map(|actor| actor.recorded.as_ref().unwrap().clock.uncertainty).collect();
    assert!(unsure.contains(&None) && unsure.contains(&Some(0)), "{unsure:?}");
    let page = timeline.html().unwrap();
    assert!(page.contains("\"unsure\":null"));
}

#[test]
fn clocks_that_drift_apart_are_shown_as_uncertain_by_as_much() {
    let mut made = pair([0, 0]);
    push(&mut made, &Room::Number(1), 1, START, [1000, 1000]);
    // An hour later the receiver's clock has gained 40 ms.
    made[1].ahead = 40 * MS as i64;
    push(&mut made, &Room::Number(2), 2, START + HOUR as u64, [1000, 1000]);
    let timeline = joined(&made);
    let shifted = |actor: &&kv_timeline::Actor| actor.recorded.as_ref().unwrap().clock.through.is_some();
    let clock = timeline.workers().iter().find(shifted).unwrap().recorded.as_ref().unwrap().clock;
    assert!(!clock.contradicted);
    // Both ends of the hour are within the uncertainty.
    let unsure = clock.uncertainty.unwrap();
    assert!((20 * MS..21 * MS).contains(&unsure), "{unsure}");
}

#[test]
fn a_side_without_a_record_is_shown_as_the_other_side_heard_it() {
    let [mut sender, receiver] = pair([0, HOUR]);
    let room = Room::Number(7);
    sender.opens(1, &room, Side::Sender, START);
    sender.notes(1, Some((1, 4)), START + MS, What::Heard(Message::Acquire { room: room.clone() }));
    sender.notes(1, Some((1, 4)), START + 2 * MS, What::Said(Message::Granted { pages: 2, lease: 9 }));
    sender.notes(1, None, START + 8 * MS, What::LeaseExpired);
    sender.other(Some(1), START + 5 * MS, What::PeerDead);
    drop(receiver);
    let timeline = joined(&[sender]);
    let [request] = timeline.requests() else { panic!("one request") };
    assert_eq!(request.unrecorded, [(1, MS as i64, 2 * MS as i64)]);
    assert!(timeline.workers()[1].recorded.is_none());
    let lane = &request.lanes[0];
    assert_eq!((lane.lease, &lane.outcome), (Some((2 * MS as i64, 8 * MS as i64)), &Outcome::Open));
    let incidents: Vec<(&str, Option<usize>)> =
        timeline.incidents().iter().map(|incident| (incident.kind.name(), incident.peer)).collect();
    assert_eq!(incidents, [("peer lost", Some(1)), ("lease expired", Some(1))]);
}

#[test]
fn a_worker_that_stops_after_its_record_was_taken_is_not_shown_as_lost() {
    let mut both = pair([0, HOUR]);
    let end = push(&mut both, &Room::Number(7), 1, START, [MS, MS]);
    both[0].other(Some(1), end + 5 * MS, What::PeerDead);
    assert!(joined(&both).incidents().is_empty());
    let [prefill, _] = both;
    let lost = joined(&[prefill]);
    assert_eq!(
        lost.incidents().iter().map(|incident| incident.kind.name()).collect::<Vec<_>>(),
        ["peer lost"]
    );
}

#[test]
fn phases_follow_one_another_and_a_repeated_registration_is_a_repeat() {
    let [mut sender, mut receiver] = pair([0, 0]);
    let room = Room::request("cmpl-1-0123abcd").unwrap();
    receiver.opens(1, &room, Side::Receiver, START);
    receiver.notes(1, None, START + MS, What::WaitingForInput);
    receiver.notes(1, None, START + 3 * MS, What::PagesGiven { pages: 5 });
    receiver.notes(1, None, START + 3 * MS, What::Transferring);
    let register = || Message::Register { room: room.clone(), pages: 5 };
    receiver.notes(1, Some((1, 1)), START + 3 * MS, What::Said(register()));
    receiver.notes(1, Some((1, 1)), START + 5 * MS, What::Said(register()));
    receiver.notes(1, None, START + 8 * MS, What::Ended);
    receiver.notes(1, None, START + 9 * MS, What::Closed);
    // The other engine has another suffix, and has heard the receiver's.
    sender.opens(4, &Room::request("cmpl-1-89abcdef").unwrap(), Side::Sender, START + 6 * MS);
    sender.notes(4, Some((1, 1)), START + 6 * MS, What::Heard(register()));
    let timeline = joined(&[sender, receiver]);
    let [request] = timeline.requests() else { panic!("one request: {:?}", timeline.requests()) };
    let lane = &request.lanes[1];
    assert_eq!(lane.repeats, [5 * MS as i64]);
    assert_eq!(lane.pages, 5);
    let spans: Vec<(Phase, i64, i64)> =
        lane.spans.iter().map(|span| (span.phase, span.from / MS as i64, span.to / MS as i64)).collect();
    use Phase::{Bootstrapping, Closing, Transferring, WaitingForInput};
    assert_eq!(
        spans,
        [(Bootstrapping, 0, 1), (WaitingForInput, 1, 3), (Transferring, 3, 8), (Closing, 8, 9)]
    );
}

#[test]
fn of_two_records_of_one_life_the_later_one_counts_and_too_many_are_refused() {
    let [mut sender, _] = pair([0, 0]);
    sender.opens(1, &Room::Number(1), Side::Sender, START);
    let early = sender.record.clone();
    sender.opens(2, &Room::Number(2), Side::Sender, START + MS);
    let timeline = Timeline::join(vec![sender.record.clone(), early.clone()]).unwrap();
    assert_eq!(timeline.requests().len(), 2);
    let other_life = Record::new(early.worker.clone(), kv_core::Incarnation::from_random(99));
    let timeline = Timeline::join(vec![sender.record, other_life]).unwrap();
    let recorded = timeline.workers().iter().filter(|actor| actor.recorded.is_some()).count();
    assert_eq!(recorded, 2, "another life is another worker");
    let error = Timeline::join(vec![early; MAX_RECORDS + 1]).unwrap_err();
    assert_eq!(error, JoinError::TooManyRecords { found: MAX_RECORDS + 1, max: MAX_RECORDS });
}

#[test]
fn the_latest_requests_are_the_open_ones_and_then_the_newest_with_both_sides() {
    let mut made = pair([HOUR, -HOUR]);
    let mut now = START;
    for number in 1..=20 {
        made[0].other(Some(1), now, What::PeerBack);
        now = push(&mut made, &Room::Number(number), number, now, [MS, MS]);
    }
    // One that was never ended.
    for side in &mut made {
        side.record.sessions[4].notes.retain(|note| note.what != What::Closed);
    }
    let records = || made.iter().map(|made| made.record.clone()).collect::<Vec<Record>>();
    let rooms = |count| -> Vec<Room> {
        let timeline = Timeline::join_latest(records(), count).unwrap();
        assert!(timeline.requests().iter().all(|request| request.lanes.len() == 2));
        assert_eq!(timeline.requests().first().map_or(0, |request| request.lanes[1].from), 0);
        timeline.requests().iter().map(|request| request.room.clone()).collect()
    };
    assert_eq!(rooms(3), [5, 19, 20].map(Room::Number));
    assert_eq!(rooms(1), [Room::Number(5)]);
    assert_eq!(rooms(usize::MAX).len(), 20);
    assert!(rooms(0).is_empty());
    // A session that is open lasts until its record ends.
    let timeline = Timeline::join_latest(records(), 3).unwrap();
    let [open, closed, _] = timeline.requests() else { panic!("three requests") };
    assert!(open.lanes.iter().all(|lane| lane.to > closed.lanes[0].to), "{open:?}");
}
