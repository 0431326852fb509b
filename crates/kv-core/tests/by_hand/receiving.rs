//! The receiving half: sources, registrations, parts, and what is believed of them.

use std::time::Duration;

use kv_core::proto::{Command, Input};
use kv_core::wire::{
    Abort, AbortAck, Body, ConversationId, Destination, Failed, Progress, Refused, Registered,
};
use kv_core::{
    Attempt, BootstrapError, Cause, KvPoll, Mismatch, Obstacle, PeerCause, PeerId, Phase, Replica, Room,
    SessionId, SessionOptions, TransportError, WayEnd, WorkerId,
};

use crate::solo::{
    Solo, args, asks_to_write, destination, hello, list, record, record_with, release, sign_of_life,
};

const ONE: Attempt = Attempt(1);
const SECOND: Duration = Duration::from_secs(1);

fn done(attempt: u64, part: u32, total: Option<u32>) -> Body {
    crate::solo::done(attempt, part, total, Vec::new())
}

fn registered(attempt: u64) -> Body {
    Body::Registered(Registered { attempt: Attempt(attempt) })
}

#[test]
fn pages_that_no_frame_can_name_fail_the_session_at_once() {
    let num_pages = 1 << 20;
    let mut solo = Solo::new(|config| config.args = crate::solo::args("us", num_pages));
    let session = solo.open_receiver(Room::Number(1), None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    solo.welcome(1, 1);
    let pages: Vec<u32> = (0..num_pages / 2).map(|page| page * 2).collect();
    solo.init_receiver(session, &pages, None);
    assert_eq!(solo.cause(session), Cause::Protocol("pages too scattered for one frame"));
    solo.says(1, Body::AbortAck(AbortAck { attempt: ONE }));
    assert_eq!(solo.released(session), [list(&pages)]);
}

/// Lets time pass with a peer that says a sign of life twice a second.
fn run_alive(solo: &mut Solo, time: Duration) -> Vec<(Duration, Body)> {
    let mut frames = Vec::new();
    let step = SECOND / 2;
    for number in 0..(time.as_millis() / 500) as u32 {
        frames.extend(solo.run_for(step).into_iter().map(|(at, body)| (step * number + at, body)));
        solo.says(1, sign_of_life());
    }
    frames
}

fn count(frames: &[(Duration, Body)], hit: impl Fn(&Body) -> bool) -> usize {
    frames.iter().filter(|(_, body)| hit(body)).count()
}

fn is_register(body: &Body) -> bool {
    matches!(body, Body::Register(_))
}

/// A receiver of two sources, peers 1 and 2, that has registered at both.
fn two_sources() -> (Solo, SessionId) {
    let mut solo = Solo::new(|_| {});
    let session = solo.open_receiver(Room::Number(1), None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1), record(2)]);
    solo.welcome(1, 1);
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping, "the other one is not met yet");
    solo.welcome(2, 1);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
    solo.init_receiver(session, &[3], None);
    assert_eq!(solo.frames_to().iter().filter(|(_, body)| is_register(body)).count(), 2);
    (solo, session)
}

#[test]
fn a_receiver_of_two_sources_succeeds_when_both_have_written() {
    let (mut solo, session) = two_sources();
    solo.says(1, registered(1));
    let repeated = solo.run_for(SECOND / 2);
    assert!(count(&repeated, is_register) > 0, "the other one has not answered");
    solo.says(1, done(1, 0, Some(1)));
    assert_eq!(solo.poll(session), KvPoll::Transferring);
    assert!(solo.released(session).is_empty());
    solo.says(2, done(1, 0, Some(1)));
    assert_eq!(solo.poll(session), KvPoll::Success);
    assert_eq!(solo.released(session), [list(&[3])]);
}

#[test]
fn an_aborted_receiver_waits_for_the_word_of_each_source() {
    let (mut solo, session) = two_sources();
    solo.abort(session);
    let aborts = |solo: &Solo| -> Vec<PeerId> {
        let frames = solo.frames_to();
        frames.iter().filter(|(_, body)| matches!(body, Body::Abort(_))).map(|&(peer, _)| peer).collect()
    };
    assert_eq!(aborts(&solo), [PeerId(0), PeerId(1)]);
    solo.says(1, Body::AbortAck(AbortAck { attempt: ONE }));
    assert!(solo.released(session).is_empty());
    let again = solo.run_for(SECOND);
    assert!(count(&again, |body| matches!(body, Body::Abort(_))) > 0);
    // Of one that is proven dead nothing follows for the other.
    solo.says(2, Body::AbortAck(AbortAck { attempt: ONE }));
    assert_eq!(solo.released(session).len(), 1);

    let (mut solo, session) = two_sources();
    solo.input(Input::PeerGone { peer: PeerId(0), end: WayEnd::Dead { quiet_after: Duration::ZERO } });
    assert_eq!(solo.cause(session), Cause::PeerLost);
    assert!(solo.released(session).is_empty(), "the other one may still write");
    solo.says(2, Body::Failed(Failed { attempt: ONE, cause: PeerCause::Aborted, quiet: true }));
    assert_eq!(solo.released(session).len(), 1);
}

#[test]
fn a_forgotten_conversation_begins_anew_without_old_attempts() {
    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[3], None);
    solo.says(1, done(1, 0, Some(3)));
    solo.run_for(SECOND * 4);
    solo.welcome(1, 2);
    assert!(solo.frames().iter().any(|body| matches!(body, Body::Register(r) if r.attempt == Attempt(2))));
    assert!(count(&solo.run_for(SECOND / 2), is_register) > 0, "it is repeated like the first");
    solo.says(1, registered(2));
    solo.says(1, done(1, 2, None));
    solo.says(1, done(2, 1, None));
    assert_eq!(solo.poll(session), KvPoll::Transferring);
    solo.says(1, done(2, 2, Some(3)));
    assert_eq!(solo.poll(session), KvPoll::Transferring, "part 0 was written before it was forgotten");
    solo.says(1, done(2, 0, None));
    assert_eq!(solo.poll(session), KvPoll::Success);

    // How many parts there are may differ, too.
    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[3], None);
    solo.says(1, done(1, 0, Some(3)));
    solo.run_for(SECOND * 4);
    solo.welcome(1, 2);
    solo.says(1, done(2, 0, Some(1)));
    assert_eq!(solo.poll(session), KvPoll::Success);
}

#[test]
fn questions_of_a_forgotten_conversation_are_not_answered_in_the_next() {
    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[3], None);
    for ask in 2..9 {
        solo.says(1, asks_to_write(ask));
        assert!(
            matches!(solo.answer(), Body::HeartbeatAck(answer) if answer.number == ask && answer.permit_ms > 0)
        );
    }
    // The peer counts its questions from 1 again.
    solo.run_for(SECOND * 4);
    solo.welcome(1, 2);
    let answered = |solo: &Solo| -> Vec<u64> {
        let asks = solo.frames().into_iter().filter_map(|body| match body {
            Body::Register(register) => Some(destination(&register).ask),
            Body::HeartbeatAck(answer) if answer.permit_ms > 0 => Some(answer.number),
            _ => None,
        });
        asks.collect()
    };
    assert_eq!(answered(&solo), [1], "{:?}", solo.said);
    solo.says(1, asks_to_write(2));
    assert_eq!(answered(&solo), [2], "an answer to question 8 would count from when that is asked");
}

#[test]
fn a_peer_that_forgot_a_failed_attempt_writes_no_more() {
    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[3], None);
    solo.abort(session);
    solo.run_for(SECOND * 4);
    assert!(solo.released(session).is_empty());
    solo.welcome(1, 2);
    assert_eq!(solo.released(session), [list(&[3])]);
    assert_eq!(solo.node().gauges().receivers, 0);
}

#[test]
fn a_registration_is_repeated_more_and_more_slowly_until_it_is_acknowledged() {
    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[3], None);
    let frames = run_alive(&mut solo, SECOND * 60);
    let registers: Vec<Duration> =
        frames.iter().filter(|(_, body)| is_register(body)).map(|&(at, _)| at).collect();
    assert!((25..45).contains(&registers.len()), "{} repetitions in a minute", registers.len());
    let longest = registers.windows(2).map(|pair| pair[1] - pair[0]).max();
    assert!(longest < Some(Duration::from_millis(2_300)), "{longest:?}");
    let last: Vec<Duration> = registers.windows(2).rev().take(5).map(|pair| pair[1] - pair[0]).collect();
    assert!(last.iter().any(|gap| *gap != last[0]), "pauses of many sessions must spread: {last:?}");
    solo.says(1, registered(1));
    assert_eq!(count(&run_alive(&mut solo, SECOND * 20), is_register), 0);

    // Its abort is urgent again, however often the registration was repeated.
    solo.abort(session);
    assert!(solo.frames().iter().any(|body| matches!(body, Body::Abort(_))));
    assert_eq!(count(&solo.run_for(SECOND / 4), |body| matches!(body, Body::Abort(_))), 1);
}

#[test]
fn any_part_acknowledges_the_registration() {
    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[3], None);
    solo.says(1, done(1, 0, None));
    assert_eq!(count(&run_alive(&mut solo, SECOND * 5), is_register), 0);
    assert_eq!(solo.poll(session), KvPoll::Transferring);
}

#[test]
fn only_a_quiet_source_is_asked_about_its_attempt() {
    let asked = |body: &Body| matches!(body, Body::Heartbeat(asks) if asks.asked == [(1, 1)]);
    for news in [done(1, 0, None), registered(1)] {
        let (mut solo, session) = Solo::receiving();
        solo.init_receiver(session, &[3], None);
        for _ in 0..20 {
            solo.says(1, news.clone());
            let said = solo.run_for(SECOND / 2);
            assert_eq!(count(&said, |body| matches!(body, Body::Heartbeat(_))), 0, "{said:?}");
        }
        assert!(count(&run_alive(&mut solo, SECOND * 5), asked) >= 3);
    }
}

#[test]
fn the_registration_carries_the_time_left_until_the_deadline() {
    let (mut solo, session) = Solo::receiving();
    run_alive(&mut solo, SECOND * 100);
    solo.init_receiver(session, &[3], None);
    let ttl = solo.frames().iter().find_map(|body| match body {
        Body::Register(register) => Some(register.ttl_ms),
        _ => None,
    });
    assert_eq!(ttl, Some(200_200), "one repetition longer than the receiver waits");
}

#[test]
fn impossible_parts_and_contradicting_totals_break_the_protocol() {
    let parts = |parts: &[(u32, Option<u32>)]| -> Vec<Body> {
        parts.iter().map(|&(part, total)| done(1, part, total)).collect()
    };
    let gaps = |from: u32| {
        let done = (from..from + 20_000).map(|part| (2 * part, 1)).collect();
        Body::Progress(Progress { attempt: ONE, done, total: None, skipped: Vec::new() })
    };
    for said in [
        parts(&[(0, Some(3)), (1, Some(4))]),
        parts(&[(2, Some(2))]),
        parts(&[(2, None), (0, Some(2))]),
        parts(&[(u32::MAX, None)]),
        (0..4).map(|number| gaps(20_000 * number)).collect(),
    ] {
        let (mut solo, session) = Solo::receiving();
        solo.init_receiver(session, &[3], None);
        for body in said {
            solo.says(1, body);
        }
        assert!(matches!(solo.cause(session), Cause::Protocol(_)));
        assert!(solo.released(session).is_empty(), "it may still write");
    }
}

#[test]
fn only_a_failure_that_is_not_quiet_needs_an_abort() {
    for quiet in [true, false] {
        let (mut solo, session) = Solo::receiving();
        solo.init_receiver(session, &[3], None);
        solo.says(1, Body::Failed(Failed { attempt: ONE, cause: PeerCause::DataOperation, quiet }));
        assert_eq!(solo.cause(session), Cause::ByPeer(PeerCause::DataOperation));
        assert_eq!(solo.released(session).len(), usize::from(quiet));
        let cause = PeerCause::DataOperation;
        let abort = Body::Abort(Abort {
            failed_ms_ago: None,
            low_watermark: ONE,
            attempt: ONE,
            room: Room::Number(1),
            lease_id: None,
            cause,
        });
        assert_eq!(solo.answer(), if quiet { release(1, 2) } else { abort });
    }
}

#[test]
fn a_failure_is_answered_for_ended_attempts_but_not_for_unknown_attempts() {
    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[3], None);
    solo.says(1, done(1, 0, Some(1)));
    assert_eq!(solo.answer(), release(1, 2));
    let failed =
        |attempt| Body::Failed(Failed { attempt: Attempt(attempt), cause: PeerCause::Aborted, quiet: true });
    solo.says(1, failed(1));
    assert_eq!(solo.answer(), release(1, 2), "the peer would keep it for ever");
    solo.says(1, failed(2));
    assert_eq!(solo.frames(), []);
}

#[test]
fn a_failure_names_the_phase_and_the_peer() {
    let named = |solo: &Solo, session| {
        let failure = solo.failure(session);
        assert_eq!(failure.room, Room::Number(1));
        (failure.phase, failure.peer.as_ref().map(ToString::to_string))
    };
    let peer = || Some("peer-1/0".to_owned());
    let mut solo = Solo::new(|_| {});
    let session = solo.open_receiver(Room::Number(1), None);
    solo.abort(session);
    assert_eq!(named(&solo, session), (Phase::Bootstrap, None));

    let session = solo.open_receiver(Room::Number(1), None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    solo.abort(session);
    assert_eq!(named(&solo, session), (Phase::Handshake, peer()));

    for (parts, phase) in [(0, Phase::Rendezvous), (1, Phase::Transfer)] {
        let (mut solo, session) = Solo::receiving();
        solo.init_receiver(session, &[3], None);
        (0..parts).for_each(|part| solo.says(1, done(1, part, None)));
        solo.abort(session);
        assert_eq!(named(&solo, session), (phase, peer()));
    }
}

#[test]
fn the_timers_of_a_session_end_with_the_session() {
    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[3], None);
    assert_eq!(solo.node().gauges().timers, 3, "deadline, repetition, peer");
    solo.says(1, done(1, 0, Some(1)));
    assert_eq!(solo.poll(session), KvPoll::Success);
    assert_eq!(solo.node().gauges().timers, 1, "peer");

    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[3], None);
    solo.abort(session);
    assert_eq!(solo.node().gauges().timers, 2, "repetition of the abort, peer");

    let mut solo = Solo::new(|_| {});
    let session = solo.open_receiver(Room::Number(1), None);
    let lookup = solo.lookups()[0].0;
    solo.input(Input::LookupFailed { lookup, error: BootstrapError::TimedOut });
    assert_eq!((solo.node().gauges().timers, solo.node().gauges().lookups), (2, 1));
    solo.abort(session);
    assert_eq!((solo.node().gauges().timers, solo.node().gauges().lookups), (0, 0));
}

#[test]
fn pages_for_a_session_that_has_failed_come_straight_back() {
    let (mut solo, session) = Solo::receiving();
    solo.abort(session);
    assert_eq!(solo.node().gauges().receivers, 1, "its goodbye is not acknowledged yet");
    solo.init_receiver(session, &[3], None);
    assert_eq!(solo.released(session), [list(&[3])]);
    solo.says(1, Body::AbortAck(AbortAck { attempt: ONE }));
    assert_eq!((solo.released(session).len(), solo.node().gauges().receivers), (1, 0));
}

#[test]
fn a_worker_that_is_stopping_refuses_to_open_receivers() {
    let (mut solo, session) = Solo::receiving();
    solo.input(Input::Command(Command::Shutdown));
    assert_eq!(solo.cause(session), Cause::WorkerStopped);
    let late = solo.open_receiver(Room::Number(2), None);
    assert_eq!(solo.cause(late), Cause::WorkerStopped);
    assert_eq!(solo.lookups(), []);
}

#[test]
fn a_receiver_notices_that_its_idle_source_has_died() {
    let (mut solo, session) = Solo::receiving();
    solo.init_receiver(session, &[3], None);
    solo.says(1, done(1, 0, Some(1)));
    solo.run_for(SECOND * 60);
    // The answer is known, the peer seems to be up: nobody has listened for a minute.
    let next = solo.open_receiver(Room::Number(2), None);
    assert_eq!((solo.lookups(), solo.poll(next)), (vec![], KvPoll::WaitingForInput));
    solo.run_for(SECOND * 4);
    assert_eq!(solo.poll(next), KvPoll::WaitingForInput, "it had no time to answer");
    solo.run_for(SECOND * 3);
    assert!(matches!(solo.cause(next), Cause::PeerUnresponsive { .. }));
}

#[test]
fn a_node_that_was_stopped_blames_its_peers_for_later_silence_only() {
    let (mut solo, session) = Solo::receiving();
    let later = solo.now + SECOND * 30;
    // A process that continues finds commands first, and frames that came meanwhile later.
    solo.now = later;
    let next = solo.open_receiver(Room::Number(2), None);
    assert_eq!((solo.poll(session), solo.poll(next)), (KvPoll::WaitingForInput, KvPoll::WaitingForInput));
    solo.run_for(SECOND * 7);
    for session in [session, next] {
        let Cause::PeerUnresponsive { silent_for } = solo.cause(session) else { panic!("another cause") };
        assert!(silent_for < SECOND * 7, "{silent_for:?}");
    }
}

#[test]
fn a_peer_that_was_given_up_or_refused_is_up_only_when_it_answers() {
    let (mut solo, session) = Solo::receiving();
    solo.run_for(SECOND * 7);
    assert!(matches!(solo.cause(session), Cause::PeerUnresponsive { .. }));
    let next = solo.open_receiver(Room::Number(2), None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    assert_eq!(solo.poll(next), KvPoll::Bootstrapping);
    solo.welcome(1, 1);
    assert_eq!(solo.poll(next), KvPoll::WaitingForInput);

    let mut solo = Solo::new(|_| {});
    let mut stranger = hello(1, kv_core::wire::ConversationId::new(1, 1));
    stranger.transport = "another".to_owned();
    solo.hello(stranger);
    assert!(matches!(solo.answer(), Body::Refused(_)));
    let session = solo.open_receiver(Room::Number(2), None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
}

#[test]
fn a_lookup_is_repeated_until_it_serves_all_waiting_sessions() {
    let mut solo = Solo::new(|_| {});
    let sessions = [1, 2].map(|_| solo.open_receiver(Room::Number(4), None));
    assert_eq!(solo.lookups(), [], "one question, asked once");
    let mut lookup = kv_core::LookupId(0);
    for _ in 0..3 {
        solo.input(Input::LookupFailed { lookup, error: BootstrapError::TimedOut });
        solo.run_until_said(SECOND);
        let asked = solo.lookups();
        assert_eq!(asked.iter().map(|&(_, replica)| replica).collect::<Vec<_>>(), [Replica::Modulo(4)]);
        lookup = asked[0].0;
    }
    solo.found(lookup, vec![record(1)]);
    solo.welcome(1, 1);
    for session in sessions {
        assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
    }
    assert_eq!((solo.node().gauges().lookups, solo.node().gauges().timers), (0, 3));
}

#[test]
fn a_lookup_is_repeated_more_and_more_slowly() {
    let mut solo = Solo::new(|_| {});
    solo.open_receiver(Room::Number(4), None);
    let start = solo.now;
    for _ in 0..20 {
        let lookup = kv_core::LookupId(0);
        solo.input(Input::LookupFailed { lookup, error: BootstrapError::TimedOut });
        solo.run_until_said(SECOND * 3);
    }
    assert!(solo.now - start > SECOND * 25, "{:?}", solo.now - start);
}

#[test]
fn a_lookup_fails_waiting_sessions_at_once_or_appears_in_their_reason() {
    let mut solo = Solo::new(|_| {});
    let sessions = [1, 2].map(|_| solo.open_receiver(Room::Number(4), None));
    let error = BootstrapError::Address(String::new());
    solo.input(Input::LookupFailed { lookup: kv_core::LookupId(0), error: error.clone() });
    for session in sessions {
        assert_eq!(solo.cause(session), Cause::Bootstrap(error.clone()));
    }
    let session = solo.open_receiver(Room::Number(4), None);
    let lookup = solo.lookups()[0].0;
    solo.input(Input::LookupFailed { lookup, error: BootstrapError::TimedOut });
    solo.run_for(SECOND * 301);
    let Cause::DeadlineExceeded { last, .. } = solo.cause(session) else { panic!("not its deadline") };
    assert_eq!(last, Some(Obstacle::Bootstrap(BootstrapError::TimedOut)));
}

#[test]
fn unusable_lookup_answers_fail_all_waiting_sessions() {
    let answers = [
        vec![elsewhere(record(1))],
        vec![],
        vec![broken(1, |geometry| geometry.regions.clear())],
        vec![broken(1, |geometry| geometry.parallel.pp_size = 2)],
    ];
    for ranks in answers {
        let mut solo = Solo::new(|_| {});
        let sessions = [1, 2].map(|_| solo.open_receiver(Room::Number(4), None));
        solo.found(kv_core::LookupId(0), ranks.clone());
        for session in sessions {
            match solo.cause(session) {
                Cause::Incompatible(mismatch) => {
                    assert_ne!(mismatch.ours, mismatch.theirs);
                    assert!(!["2", "another"].contains(&&*mismatch.ours), "{mismatch:?}");
                }
                cause => assert!(matches!(cause, Cause::Bootstrap(_)), "{cause}"),
            }
        }
        assert_eq!(solo.node().gauges().peers, 0);
    }
}

#[test]
fn an_answer_with_more_ranks_than_there_is_room_for_fails_everyone_at_once() {
    let mut solo = Solo::new(|config| config.limits.max_peers = 2);
    let rank = |pcp_rank| {
        broken(u64::from(pcp_rank) + 1, |geometry| {
            (geometry.parallel.pcp_size, geometry.parallel.pcp_rank) = (3, pcp_rank);
        })
    };
    for _ in 0..2 {
        let first = solo.open_receiver(Room::Number(4), None);
        let lookup = solo.lookups()[0].0;
        let second = solo.open_receiver(Room::Number(4), None);
        solo.found(lookup, (0..3).map(rank).collect());
        for session in [first, second] {
            assert_eq!(solo.cause(session), Cause::TooManyPeers { max: 2 });
        }
        assert!(solo.node().gauges().peers <= 2);
    }
    // Nobody needs those that were met: they make way for others.
    let session = solo.open_receiver(Room::Number(5), None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(8)]);
    solo.welcome(8, 8);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
}

/// The rank that is known, and idle for the longest, is needed again.
#[test]
fn ranks_of_a_lookup_answer_do_not_evict_each_other() {
    let mut solo = Solo::new(|config| config.limits.max_peers = 2);
    let session = solo.open_receiver(Room::Number(4), None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    solo.welcome(1, 1);
    solo.abort(session);
    solo.says(1, Body::AbortAck(AbortAck { attempt: Attempt(1) }));
    solo.run_for(SECOND);
    solo.greet(5);
    let rank = |peer: u64| {
        broken(peer, |geometry| {
            (geometry.parallel.pcp_size, geometry.parallel.pcp_rank) = (2, peer as u32 - 1)
        })
    };
    let session = solo.open_receiver_with(
        Room::Number(4),
        SessionOptions::default().with(|options| options.prefill_dp_rank = Some(1)),
    );
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![rank(1), rank(2)]);
    solo.welcome(2, 2);
    assert_eq!(solo.poll(session), KvPoll::WaitingForInput);
}

#[test]
fn a_lookup_answer_with_a_duplicate_worker_fails_all_waiting_sessions() {
    let mut solo = Solo::new(|_| {});
    let session = solo.open_receiver(Room::Number(4), None);
    let rank = |pcp_rank| {
        broken(1, |geometry| (geometry.parallel.pcp_size, geometry.parallel.pcp_rank) = (2, pcp_rank))
    };
    solo.found(kv_core::LookupId(0), vec![rank(0), rank(1)]);
    assert_eq!(
        solo.cause(session),
        Cause::Bootstrap(BootstrapError::Malformed("two ranks are the same worker"))
    );
}

#[test]
fn a_rank_of_another_shape_is_met_so_that_its_sender_is_told() {
    let mut solo = Solo::new(|_| {});
    let session = solo.open_receiver(Room::Number(4), None);
    let ranks = vec![broken(1, |geometry| geometry.parallel.tp_size = 2)];
    solo.found(kv_core::LookupId(0), ranks);
    assert_eq!((solo.poll(session), solo.node().gauges().peers), (KvPoll::Bootstrapping, 1));
    assert!(solo.frames().iter().any(|body| matches!(body, Body::Hello(_))));
}

fn broken(peer: u64, change: impl FnOnce(&mut kv_core::layout::Geometry)) -> kv_core::RankRecord {
    let mut geometry = args(&format!("peer-{peer}"), 16).geometry().clone();
    change(&mut geometry);
    let mut record = record(peer);
    record.parallel = geometry.parallel;
    record.offers = vec![kv_core::ServiceOffer::kv(&geometry).unwrap()];
    record
}

fn elsewhere(mut record: kv_core::RankRecord) -> kv_core::RankRecord {
    record.transports[0].name = "another".to_owned();
    record
}

#[test]
fn a_rank_with_two_offers_that_fit_is_refused_with_both_named() {
    let mut solo = Solo::new(|_| {});
    let session = solo.open_receiver(Room::Number(4), None);
    let mut twice = record(1);
    twice.offers.push(twice.offers[0].clone());
    solo.found(kv_core::LookupId(0), vec![twice]);
    let Cause::Bootstrap(error) = solo.cause(session) else { panic!("not the rendezvous") };
    let version = kv_core::wire::VERSIONS.max;
    let expected = format!("peer-1/0 has two offers that fit: kv version {version} and kv version {version}");
    assert_eq!((error.to_string(), error.is_retryable()), (expected, false));
    assert_eq!(solo.node().gauges().peers, 0);
}

#[test]
fn a_rank_in_another_place_is_no_source() {
    let mut solo = Solo::new(|config| {
        config.args = tensor_parallel("us", 0);
    });
    let session = solo.open_receiver(Room::Number(4), None);
    let ranks = [0, 1].map(|rank| record_with(u64::from(rank) + 1, tensor_parallel("peer", rank).geometry()));
    solo.found(kv_core::LookupId(0), ranks.to_vec());
    solo.welcome(1, 1);
    assert_eq!((solo.poll(session), solo.node().gauges().peers), (KvPoll::WaitingForInput, 1));
}

/// A session whose two sources, peers 1 and 2, hold the same pages, and the workers of these.
fn of_two_ranks(solo: &mut Solo) -> (SessionId, [WorkerId; 2]) {
    let session = solo.open_receiver(Room::Number(4), None);
    let ranks = [0, 1].map(|rank| {
        broken(rank + 1, |geometry| {
            (geometry.parallel.pcp_size, geometry.parallel.pcp_rank) = (2, rank as u32);
        })
    });
    let workers = [0, 1].map(|rank: usize| ranks[rank].worker.clone());
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, ranks.to_vec());
    (session, workers)
}

#[test]
fn a_failure_names_the_rank_that_could_not_be_reached() {
    let mut solo = Solo::new(|_| {});
    let (session, [_, second]) = of_two_ranks(&mut solo);
    solo.input(Input::ConnectFailed { peer: PeerId(1), error: TransportError::PeerGone });
    assert_eq!(solo.failure(session).peer, Some(second));
    assert_eq!(solo.cause(session), Cause::Connect(TransportError::PeerGone));
}

#[test]
fn a_failure_names_the_rank_that_did_not_answer() {
    let mut solo = Solo::new(|_| {});
    let (session, [_, second]) = of_two_ranks(&mut solo);
    solo.welcome(1, 1);
    for _ in 0..100 {
        solo.run_for(Duration::from_millis(200));
        solo.says(1, sign_of_life());
    }
    assert!(matches!(solo.cause(session), Cause::PeerUnresponsive { .. }));
    assert_eq!(solo.failure(session).peer, Some(second));
}

#[test]
fn a_failure_names_the_rank_whose_way_was_lost_and_not_opened_again() {
    let mut solo = Solo::new(|_| {});
    let (first, [_, second]) = of_two_ranks(&mut solo);
    [1, 2].into_iter().for_each(|peer| solo.welcome(peer, 1));
    solo.init_receiver(first, &[1, 2], None);
    solo.input(Input::PeerGone { peer: PeerId(1), end: WayEnd::Lost });
    assert_eq!(solo.failure(first).peer, Some(second.clone()));
    let (session, _) = of_two_ranks(&mut solo);
    for _ in 0..100 {
        solo.run_for(Duration::from_millis(200));
        solo.says(1, sign_of_life());
    }
    assert_eq!((solo.cause(session), &solo.failure(session).peer), (Cause::WayLost, &Some(second)));
}

#[test]
fn a_failure_names_the_rank_that_refuses_or_fails() {
    let mut solo = Solo::new(|_| {});
    let (session, [_, second]) = of_two_ranks(&mut solo);
    let hello = solo.last_hello(2);
    let cause = PeerCause::WorkerStopped;
    let (versions, conversation) = (hello.versions, ConversationId::new(1, 2));
    solo.says(2, Body::Refused(Refused { versions, nonce: hello.nonce, conversation, cause: cause.clone() }));
    assert_eq!(solo.cause(session), Cause::ByPeer(cause.clone()));
    assert_eq!(solo.failure(session).peer, Some(second));

    let mut solo = Solo::new(|_| {});
    let (session, [_, second]) = of_two_ranks(&mut solo);
    [1, 2].into_iter().for_each(|peer| solo.welcome(peer, 1));
    solo.init_receiver(session, &[1, 2], None);
    let registered = solo.frames_to().into_iter().find_map(|(peer, body)| match body {
        Body::Register(register) if peer == PeerId(1) => Some(register.attempt),
        _ => None,
    });
    let attempt = registered.unwrap();
    solo.says(2, Body::Failed(Failed { attempt, cause: cause.clone(), quiet: true }));
    assert_eq!(solo.cause(session), Cause::ByPeer(cause));
    assert_eq!(solo.failure(session).peer, Some(second));
}

/// Each of the ranks that hold the same pages is asked for a range of them, beyond what is here already.
#[test]
fn context_parallel_ranks_are_asked_for_a_range_of_the_pages_each() {
    let ranks = |places: &[(u32, u32)]| -> Vec<_> {
        let rank = |&(pcp_rank, pcp_size)| {
            broken(u64::from(pcp_rank) + 1, |geometry| {
                (geometry.parallel.pcp_size, geometry.parallel.pcp_rank) = (pcp_size, pcp_rank);
            })
        };
        places.iter().map(rank).collect()
    };
    let mut solo = Solo::new(|_| {});
    let session = solo.open_receiver_with(
        Room::Number(4),
        SessionOptions::default().with(|options| options.prefix_pages = 2),
    );
    solo.found(kv_core::LookupId(0), ranks(&[(0, 3), (1, 3), (2, 3)]));
    for peer in 1..=3 {
        solo.welcome(peer, peer as u32);
    }
    solo.init_receiver(session, &[9, 8, 7, 6, 1, 2, 3], None);
    let asked = solo.frames().into_iter().map(|body| match body {
        Body::Register(register) => {
            let Destination { pages, first_page, total_pages, aux_here, .. } = destination(&register);
            (pages, first_page, total_pages, aux_here)
        }
        other => panic!("{other:?}"),
    });
    let parts = [(&[9, 8][..], 2, true), (&[7, 6], 4, false), (&[1, 2, 3], 6, false)];
    let expected = parts.map(|(pages, first, aux_here)| (list(pages), first, 9, aux_here));
    assert_eq!(asked.collect::<Vec<_>>(), expected);

    // Without one of them, nobody would send its range; one that counts them otherwise has another.
    for places in [&[(1, 3), (2, 3)][..], &[(0, 3), (1, 2), (2, 3)]] {
        let mut solo = Solo::new(|_| {});
        let session = solo.open_receiver(Room::Number(4), None);
        solo.found(kv_core::LookupId(0), ranks(places));
        let mismatch =
            Mismatch { field: "ranks of stage 0".to_owned(), ours: "3".to_owned(), theirs: "2".to_owned() };
        assert!(mismatch.to_string().contains("must have registered"), "{mismatch}");
        assert_eq!(solo.cause(session), Cause::Incompatible(mismatch), "{places:?}");
    }
}

fn tensor_parallel(engine: &str, tp_rank: u32) -> kv_core::KvArgs {
    let parallel = kv_core::Parallel::default().with(|parallel| {
        parallel.tp_size = 2;
        parallel.tp_rank = tp_rank;
    });
    kv_core::KvArgs::builder(engine, tp_rank)
        .pages(16, 16)
        .parallel(parallel)
        .region(kv_core::Region::dram(kv_core::RegionRole::Kv, 0x1_0000, 16 * 64, 64))
        .build()
        .unwrap()
}

#[test]
fn rooms_are_spread_over_the_replicas_of_an_engine_and_a_named_replica_comes_first() {
    let mut solo = Solo::new(|_| {});
    let answer = |number: u64| {
        vec![broken(number, |geometry| {
            geometry.parallel.dp_size = 3;
            geometry.parallel.dp_rank = number as u32;
        })]
    };
    solo.open_receiver(Room::Number(5), None);
    let asked = solo.lookups();
    assert_eq!(asked[0].1, Replica::Modulo(5));
    solo.found(asked[0].0, answer(2));
    // From now on it is known how many there are: 8 is served by the same as 5, 7 by another.
    solo.open_receiver(Room::Number(8), None);
    assert_eq!(solo.lookups(), []);
    for (room, named, replica) in [(7, None, 1), (7, Some(0), 0)] {
        solo.open_receiver(Room::Number(room), named);
        assert_eq!(solo.lookups()[0].1, Replica::Rank(replica), "room {room}, {named:?}");
    }
    // The peer is lost: nothing of its engine is believed any more.
    solo.input(Input::ConnectFailed { peer: PeerId(0), error: TransportError::PeerGone });
    let session = solo.open_receiver(Room::Number(11), None);
    assert_eq!(solo.lookups()[0].1, Replica::Modulo(11));
    assert_eq!(solo.poll(session), KvPoll::Bootstrapping);
}

#[test]
fn no_permission_is_given_to_a_peer_that_has_nothing_to_write_here() {
    let (mut solo, _) = Solo::receiving();
    solo.says(1, asks_to_write(5));
    assert!(
        matches!(solo.answer(), Body::HeartbeatAck(answer) if answer.number == 5 && answer.permit_ms == 0)
    );
}
