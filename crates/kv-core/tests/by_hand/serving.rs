//! The serving half: registrations, aborts, releases, and what is remembered of them.

use std::time::Duration;

use kv_core::proto::{Command, Input, NodeConfig};
use kv_core::wire::{
    AbortAck, Body, ConversationId, Failed, Frame, Heartbeat, HeartbeatAck, Progress, Register, Registered,
};
use kv_core::{
    Attempt, AuxIndex, Cause, KvPoll, Obstacle, PeerCause, Phase, Room, SessionId, SessionOptions,
    TransportError,
};

use crate::solo::{
    Solo, abort, ack, asks_about, done, heartbeat, hello, list, permits, register, release, sign_of_life,
    with,
};

const ROOM: Room = Room::Number(7);
const ONE: Attempt = Attempt(1);

fn failed(cause: PeerCause, quiet: bool) -> Body {
    Body::Failed(Failed { attempt: ONE, cause, quiet })
}

#[test]
fn pages_that_no_cache_holds_are_refused_and_the_sender_is_told() {
    let good = register(1, ROOM, &[0]);
    for bad in [
        with(good.clone(), |to| to.pages = list(&[16])),
        with(good.clone(), |to| to.pages = list(&[3, 4, 3])),
        with(good.clone(), |to| to.aux = Some(AuxIndex(4))),
        with(good.clone(), |to| to.total_pages = 0),
        with(good.clone(), |to| (to.first_page, to.total_pages) = (3, 3)),
    ] {
        let mut solo = Solo::serving(|_| {});
        let sender = solo.open_sender(ROOM, 1);
        solo.says(1, Body::Register(bad));
        assert!(solo.frames().contains(&failed(PeerCause::OutOfRange, true)));
        assert_eq!(solo.cause(sender), Cause::ByPeer(PeerCause::OutOfRange));
    }
}

#[test]
fn every_repetition_of_a_registration_is_acknowledged() {
    let mut solo = Solo::serving(|_| {});
    let registered = Body::Registered(Registered { attempt: ONE });
    for _ in 0..3 {
        solo.says(1, Body::Register(register(1, ROOM, &[0])));
        assert_eq!(solo.answer(), registered);
    }
    solo.open_sender(ROOM, 1);
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    assert_eq!(solo.answer(), registered);
}

#[test]
fn a_part_that_is_written_at_once_answers_its_registration() {
    let registered = [Body::Registered(Registered { attempt: ONE })];
    // Of one page, of two pages in two chunks, and of two pages of which one is still to come.
    for (pages, chunks, answers) in [(1, [&[5][..]].as_slice(), 0), (2, &[&[5], &[6]], 0), (2, &[&[5]], 1)] {
        let mut solo = Solo::serving(|_| {});
        let sender = solo.open_sender(ROOM, 1);
        solo.send(sender, pages, chunks);
        let to: Vec<u32> = (0..pages as u32).collect();
        solo.says(1, Body::Register(register(1, ROOM, &to)));
        assert_eq!(solo.frames(), registered[..answers], "{pages} pages in {chunks:?}");
        let posts = solo.take_posts();
        let notify = Frame::decode(posts[0].notify.as_ref().unwrap()).unwrap().body;
        assert!(matches!(notify, Body::Progress(Progress { attempt: ONE, .. })), "{notify:?}");
        // The receiver's patience ends before the part is in place.
        solo.says(1, Body::Register(register(1, ROOM, &to)));
        assert_eq!(solo.frames(), registered);
    }
}

#[test]
fn a_worker_that_stops_refuses_registrations_of_peers_it_knows() {
    let mut solo = Solo::serving(|_| {});
    solo.input(kv_core::proto::Input::Command(kv_core::proto::Command::Shutdown));
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    assert_eq!(solo.answer(), failed(PeerCause::WorkerStopped, true));
}

#[test]
fn runs_of_waiting_registrations_are_bounded_and_given_back_when_they_leave() {
    let mut solo =
        Solo::serving(|config| (config.limits.max_waiting_runs, config.limits.connections_share) = (3, 1));
    for attempt in 1..20 {
        // Two runs, then one more than fits, told to the sender when it comes.
        solo.says(1, Body::Register(register(3 * attempt, Room::Number(attempt), &[0, 2])));
        assert!(matches!(solo.answer(), Body::Registered(_)), "{:?}", solo.answer());
        solo.says(1, Body::Register(register(3 * attempt + 1, Room::Number(1000), &[4, 6])));
        assert!(matches!(solo.answer(), Body::Failed(Failed { cause: PeerCause::Overloaded, .. })));
        let late = solo.open_sender(Room::Number(1000), 1);
        assert_eq!(solo.cause(late), Cause::ByPeer(PeerCause::Overloaded));
        if attempt % 2 == 0 {
            solo.says(1, abort(3 * attempt, Room::Number(attempt)));
        } else {
            solo.open_sender(Room::Number(attempt), 1);
        }
    }
}

#[test]
fn a_waiting_registration_lasts_as_long_as_its_receiver_and_one_session() {
    let session = NodeConfig::new(crate::solo::args("x", 4), crate::solo::US, "test", bytes::Bytes::new());
    let session = session.timing.session_deadline;
    for (ttl_ms, ends) in [(2_000, Duration::from_secs(2)), (u64::MAX, session)] {
        let mut solo = Solo::serving(|config| config.timing.peer_timeout = Duration::from_secs(3600));
        solo.says(1, Body::Register(Register { ttl_ms, ..register(1, ROOM, &[0]) }));
        let said = solo.run_for(ends - Duration::from_millis(1));
        assert!(said.iter().all(|(_, body)| !matches!(body, Body::Failed(_))), "{said:?}");
        let said = solo.run_for(Duration::from_millis(2));
        assert!(said.iter().any(|(_, body)| *body == failed(PeerCause::DeadlineExceeded, true)), "{said:?}");
        let sender = solo.open_sender(ROOM, 1);
        assert_eq!(solo.cause(sender), Cause::ByPeer(PeerCause::DeadlineExceeded));
    }
}

/// A request whose pages are computed for longer than a permission lasts would wait for an answer of its peer
/// first.
#[test]
fn a_waiting_registration_keeps_the_permission_to_write_until_its_sender_opens() {
    let mut solo = Solo::serving(|_| {});
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    for _ in 0..30 {
        let said = solo.run_for(Duration::from_secs(1));
        solo.says(1, sign_of_life());
        for (_, body) in said {
            if let Body::Heartbeat(Heartbeat { number, writes: true, .. }) = body {
                solo.says(1, permits(number, 10_000));
            }
        }
    }
    let sender = solo.open_sender(ROOM, 1);
    solo.send(sender, 1, &[&[3]]);
    assert_eq!(solo.take_posts().len(), 1);
}

#[test]
fn results_are_forgotten_when_any_frame_raises_the_low_watermark() {
    let low_watermark = Attempt(2);
    for frame in [
        Body::Register(Register { low_watermark, ..register(2, Room::Number(8), &[1]) }),
        Body::Heartbeat(Heartbeat { low_watermark, ..heartbeat() }),
        Body::HeartbeatAck(HeartbeatAck { low_watermark, ..ack() }),
        release(5, 2),
    ] {
        let mut solo = Solo::serving(|_| {});
        solo.says(1, Body::Register(register(1, ROOM, &[77])));
        assert_eq!(solo.node().gauges().incoming, 1);
        solo.says(1, frame.clone());
        let left = usize::from(matches!(frame, Body::Register(_)));
        assert_eq!(solo.node().gauges().incoming, left, "{frame:?}");
    }
}

#[test]
fn a_release_ends_its_attempt_while_older_attempts_stay_open() {
    let mut solo = Solo::serving(|_| {});
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    solo.says(1, Body::Register(register(2, Room::Number(8), &[77])));
    solo.says(1, Body::Register(register(3, Room::Number(9), &[1])));
    solo.says(1, release(2, 1));
    assert_eq!(solo.node().gauges().incoming, 2);
    solo.says(1, release(3, 1));
    let gauges = solo.node().gauges();
    assert_eq!((gauges.incoming, gauges.registrations), (1, 1), "a released registration waits no more");
    let sender = solo.open_sender(Room::Number(9), 1);
    assert_eq!(solo.poll(sender), KvPoll::Bootstrapping);
}

#[test]
fn a_receiver_that_finishes_before_everything_was_sent_breaks_the_protocol() {
    let mut solo = Solo::serving(|_| {});
    let sender = solo.open_sender(ROOM, 1);
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    solo.says(1, release(1, 2));
    assert!(matches!(solo.cause(sender), Cause::Protocol(_)));
}

#[test]
fn attempts_that_are_aborted_or_below_the_low_watermark_are_never_served() {
    let mut solo = Solo::serving(|_| {});
    solo.says(1, abort(5, Room::Number(5)));
    assert_eq!(solo.answer(), Body::AbortAck(AbortAck { attempt: Attempt(5) }));
    solo.says(1, abort(5, Room::Number(5)));
    assert_eq!(solo.answer(), Body::AbortAck(AbortAck { attempt: Attempt(5) }), "also when repeated");
    solo.says(1, Body::Heartbeat(Heartbeat { low_watermark: Attempt(4), ..heartbeat() }));
    let dropped = solo.node().gauges().dropped.total();
    for attempt in [5, 3] {
        solo.says(1, Body::Register(register(attempt, ROOM, &[0])));
        assert_eq!(solo.frames(), []);
    }
    let gauges = solo.node().gauges();
    assert_eq!((gauges.registrations, gauges.dropped.total()), (0, dropped + 2));
    solo.says(1, Body::Register(register(4, ROOM, &[0])));
    assert!(matches!(solo.answer(), Body::Registered(_)), "the low_watermark itself is open");
}

#[test]
fn attempts_beyond_the_window_are_dropped_in_every_message() {
    let mut solo = Solo::serving(|config| config.limits.max_attempts = 4);
    for (attempt, answered) in [(3, true), (4, false), (u64::MAX, false)] {
        for frame in [Body::Register(register(attempt, ROOM, &[0])), abort(attempt, ROOM)] {
            let dropped = solo.node().gauges().dropped.total();
            solo.says(1, frame);
            assert_eq!(solo.frames().is_empty(), !answered, "attempt {attempt}");
            assert_eq!(solo.node().gauges().dropped.total() - dropped, u64::from(!answered));
        }
    }
}

#[test]
fn the_abort_of_a_refused_attempt_harms_no_later_sender_of_the_room() {
    let mut solo = Solo::serving(|config| config.limits.max_registrations = 0);
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    let first = solo.open_sender(ROOM, 1);
    assert_eq!(solo.cause(first), Cause::ByPeer(PeerCause::Overloaded));
    solo.says(1, abort(1, ROOM));
    let again = solo.open_sender(ROOM, 1);
    assert_eq!(solo.poll(again), KvPoll::Bootstrapping);
}

#[test]
fn a_receiver_that_gave_up_leaves_nothing_for_the_next_receiver() {
    let mut solo = Solo::serving(|_| {});
    for (attempt, sender_first) in [(1, true), (3, false)] {
        let early = sender_first.then(|| solo.open_sender(ROOM, 1));
        solo.says(1, abort(attempt, ROOM));
        let sender = early.unwrap_or_else(|| solo.open_sender(ROOM, 1));
        assert_eq!(solo.cause(sender), Cause::ByPeer(PeerCause::Aborted));
        solo.says(1, Body::Register(register(attempt + 1, ROOM, &[0])));
        assert!(matches!(solo.answer(), Body::Registered(_)), "the second try waits for its sender");
        let sender = solo.open_sender(ROOM, 1);
        assert_eq!(solo.poll(sender), KvPoll::WaitingForInput);
    }
}

#[test]
fn of_many_failed_senders_none_fails_the_receiver_of_the_next() {
    let mut solo = Solo::serving(|_| {});
    for _ in 0..2 {
        let sender = solo.open_sender(ROOM, 3);
        solo.abort(sender);
    }
    assert_eq!(solo.node().gauges().failed_rooms, 1, "one, for each receiver of the last");
    let sender = solo.open_sender(ROOM, 2);
    for attempt in 1..3 {
        solo.says(1, Body::Register(register(attempt, ROOM, &[attempt as u32])));
        assert!(matches!(solo.answer(), Body::Registered(_)));
    }
    assert_eq!(solo.poll(sender), KvPoll::WaitingForInput);
}

#[test]
fn late_ranks_learn_of_a_failed_sender_with_an_unknown_receiver_count() {
    let mut solo = Solo::serving(|_| {});
    let sender = solo.open_sender(ROOM, 0);
    solo.abort(sender);
    for attempt in 1..4 {
        let late = Register { ranks: 3, ..register(attempt, ROOM, &[attempt as u32]) };
        solo.says(1, Body::Register(late));
        let told = Failed { attempt: Attempt(attempt), cause: PeerCause::Aborted, quiet: true };
        assert_eq!(solo.frames(), [Body::Failed(told)]);
    }
    assert_eq!(solo.node().gauges().failed_rooms, 0);
    solo.says(1, Body::Register(register(4, ROOM, &[4])));
    assert!(matches!(solo.answer(), Body::Registered(_)), "the next one waits");
}

#[test]
fn when_one_rank_aborts_the_other_ranks_learn_of_the_failure() {
    let mut solo = Solo::serving(|_| {});
    let sender = solo.open_sender(ROOM, 0);
    solo.says(1, abort(1, ROOM));
    assert_eq!(solo.cause(sender), Cause::ByPeer(PeerCause::Aborted));
    solo.frames();
    solo.says(1, Body::Register(Register { ranks: 2, ..register(2, ROOM, &[2]) }));
    let told = Failed { attempt: Attempt(2), cause: PeerCause::Aborted, quiet: true };
    assert_eq!(solo.frames(), [Body::Failed(told)]);
    assert_eq!(solo.node().gauges().failed_rooms, 0);
}

#[test]
fn a_sender_takes_as_many_registrations_as_it_has_receivers_and_no_more() {
    let mut solo = Solo::serving(|_| {});
    for attempt in 1..5 {
        solo.says(1, Body::Register(register(attempt, ROOM, &[attempt as u32])));
    }
    let sender = solo.open_sender(ROOM, 2);
    assert_eq!(solo.poll(sender), KvPoll::WaitingForInput);
    assert_eq!(solo.node().gauges().registrations, 2);
    solo.send(sender, 1, &[&[0]]);
    assert_eq!(solo.take_posts().len(), 2);
}

#[test]
fn repeated_aborts_are_acknowledged_once_after_the_last_post() {
    let mut solo = Solo::serving(|config| config.limits.max_post_bytes = 64);
    let sender = solo.open_sender(ROOM, 1);
    solo.says(1, Body::Register(register(1, ROOM, &[0, 2])));
    solo.send(sender, 2, &[&[4, 5]]);
    let posts = solo.take_posts();
    solo.says(1, abort(1, ROOM));
    assert_eq!(solo.frames(), [], "neither an acknowledgement nor a failure: it knows");
    solo.says(1, asks_about(&[(1, 1)]));
    assert!(solo.frames().contains(&failed(PeerCause::Aborted, false)));
    for (post, ack) in posts.iter().zip([false, true]) {
        solo.posted(post.id, Ok(()));
        let expected = ack.then_some(Body::AbortAck(AbortAck { attempt: ONE }));
        assert_eq!(solo.frames(), Vec::from_iter(expected));
        assert_eq!(solo.released(sender).len(), usize::from(ack));
    }
    assert_eq!(solo.node().gauges().incoming, 0);
}

#[test]
fn a_receiver_that_asks_learns_the_state_of_its_attempt() {
    let mut solo = Solo::serving(|config| config.limits.max_post_bytes = 64);
    let told = |solo: &mut Solo, attempt| {
        solo.says(1, asks_about(&[(attempt, 1)]));
        let mut frames = solo.frames();
        assert!(matches!(frames.remove(0), Body::HeartbeatAck(_)), "every heartbeat is answered");
        frames
    };
    assert_eq!(told(&mut solo, 1), [failed(PeerCause::Unknown, true)]);
    solo.says(1, Body::Register(register(1, ROOM, &[0, 2, 4])));
    assert_eq!(told(&mut solo, 1), [], "it waits");
    let sender = solo.open_sender(ROOM, 1);
    solo.send(sender, 3, &[&[5], &[6], &[7]]);
    let posts = solo.take_posts();
    assert_eq!(told(&mut solo, 1), [], "nothing is there yet");
    let progress = |done: &[(u32, u32)]| {
        Body::Progress(Progress { attempt: ONE, done: done.to_vec(), total: Some(3), skipped: Vec::new() })
    };
    solo.posted(posts[2].id, Ok(()));
    assert_eq!(told(&mut solo, 1), [progress(&[(2, 1)])]);
    solo.posted(posts[0].id, Ok(()));
    assert_eq!(told(&mut solo, 1), [progress(&[(0, 1), (2, 1)])]);
    solo.posted(posts[1].id, Ok(()));
    assert_eq!(told(&mut solo, 1), [progress(&[(0, 3)])]);
    assert_eq!(solo.poll(sender), KvPoll::Success);
    solo.says(1, Body::Register(register(1, ROOM, &[0, 2, 4])));
    assert_eq!(solo.frames(), [progress(&[(0, 3)])], "the registration was late, not new");

    let sender = solo.open_sender(Room::Number(2), 1);
    solo.says(1, Body::Register(register(2, Room::Number(2), &[1])));
    solo.abort(sender);
    let failed = Body::Failed(Failed { attempt: Attempt(2), cause: PeerCause::Aborted, quiet: true });
    assert_eq!(solo.answer(), failed);
    assert_eq!(told(&mut solo, 2), [failed]);
}

#[test]
fn a_failure_of_a_finished_attempt_leaves_nothing_behind() {
    let mut solo = Solo::serving(|_| {});
    let sender = solo.open_sender(ROOM, 1);
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    solo.send(sender, 1, &[&[5]]);
    let post = solo.take_posts().remove(0);
    // The receiver has heard of the last part before this side has.
    solo.says(1, release(1, 2));
    solo.posted(post.id, Err(TransportError::PeerGone));
    assert_eq!(solo.cause(sender), Cause::Post(TransportError::PeerGone));
    assert_eq!(solo.node().gauges().incoming, 0);
    solo.says(1, Body::Register(register(2, ROOM, &[0])));
    let sender = solo.open_sender(ROOM, 1);
    solo.send(sender, 1, &[&[5]]);
    let post = solo.take_posts().remove(0);
    solo.says(1, release(2, 3));
    solo.posted(post.id, Ok(()));
    assert_eq!(solo.poll(sender), KvPoll::Success);
    assert_eq!(solo.node().gauges().incoming, 0);
}

#[test]
fn a_refused_attempt_is_forgotten_with_a_peer_that_falls_silent() {
    let mut solo = Solo::serving(|config| config.limits.max_peers = 1);
    solo.says(1, Body::Register(register(1, ROOM, &[77])));
    assert_eq!(solo.answer(), failed(PeerCause::OutOfRange, true));
    solo.run_for(Duration::from_secs(60));
    solo.greet(2);
    assert!(matches!(solo.frames()[..], [Body::Welcome(_)]), "it makes way for another peer");
}

#[test]
fn a_failed_sender_counts_each_missing_receiver_once() {
    let mut solo = Solo::serving(|_| {});
    let sender = solo.open_sender(ROOM, 2);
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    assert_eq!(solo.poll(sender), KvPoll::Bootstrapping);
    solo.says(1, abort(2, ROOM));
    assert_eq!(solo.cause(sender), Cause::ByPeer(PeerCause::Aborted));
    assert_eq!(solo.failure(sender).phase, Phase::Rendezvous);
    assert_eq!(solo.failure(sender).peer.as_ref().map(ToString::to_string).as_deref(), Some("peer-1/0"));
    assert_eq!(solo.node().gauges().failed_rooms, 0, "both receivers know");
}

#[test]
fn the_last_part_without_bytes_counts_on_both_sides() {
    let mut solo = Solo::serving(|_| {});
    let sender = solo.open_sender(ROOM, 1);
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    solo.send(sender, 1, &[&[5]]);
    let first = solo.take_posts().remove(0);
    assert!(first.notify.is_some());
    solo.posted(first.id, Ok(()));
    assert_eq!(solo.poll(sender), KvPoll::Success);

    let sender = solo.open_sender(Room::Number(2), 1);
    solo.says(1, Body::Register(register(2, Room::Number(2), &[])));
    solo.send(sender, 0, &[&[]]);
    let done = done(2, 0, Some(1), Vec::new());
    assert!(solo.frames().contains(&done), "{:?}", solo.frames());
    assert_eq!(solo.poll(sender), KvPoll::Success);
    assert_eq!(solo.released(sender).len(), 1);
}

#[test]
fn every_receiver_of_a_failed_sender_is_told_whether_its_posts_have_ended_or_not() {
    let mut solo = Solo::serving(|config| config.limits.max_post_bytes = 64);
    let sender = solo.open_sender(ROOM, 3);
    for attempt in 1..4 {
        solo.says(1, Body::Register(register(attempt, ROOM, &[attempt as u32])));
    }
    solo.send(sender, 1, &[&[5]]);
    let posts = solo.take_posts();
    solo.posted(posts[1].id, Ok(()));
    assert_eq!(solo.failure_count(sender), 0);
    solo.abort(sender);
    let told =
        |attempt, quiet| Body::Failed(Failed { attempt: Attempt(attempt), cause: PeerCause::Aborted, quiet });
    assert_eq!(solo.frames(), [told(1, false), told(3, false)]);
    assert_eq!(solo.cancelled(), [posts[0].id, posts[2].id]);
    solo.posted(posts[2].id, Err(TransportError::Cancelled));
    assert_eq!(solo.answer(), told(3, true));
    assert!(solo.released(sender).is_empty());
    solo.posted(posts[0].id, Err(TransportError::Cancelled));
    assert_eq!(solo.answer(), told(1, true));
    assert_eq!(solo.released(sender).len(), 1);
}

#[test]
fn a_failed_sender_cancels_its_own_posts_only() {
    let mut solo = Solo::serving(|_| {});
    let senders = [1, 2].map(|room| {
        let sender = solo.open_sender(Room::Number(room), 1);
        solo.says(1, Body::Register(register(room, Room::Number(room), &[room as u32])));
        solo.send(sender, 1, &[&[room as u32]]);
        sender
    });
    let posts = solo.take_posts();
    solo.abort(senders[1]);
    assert_eq!(solo.cancelled(), [posts[1].id]);
}

#[test]
fn failed_rooms_are_forgotten_on_both_sides_in_their_time() {
    let ttl = Duration::from_secs(10);
    let mut solo = Solo::serving(|config| config.timing.failed_room_ttl = ttl);
    let sender = solo.open_sender(Room::Number(1), 1);
    solo.abort(sender);
    solo.run_for(Duration::from_secs(4));
    solo.says(1, abort(1, Room::Number(2)));
    solo.run_for(Duration::from_secs(3));
    let sender = solo.open_sender(Room::Number(3), 1);
    solo.abort(sender);
    assert_eq!(solo.node().gauges().failed_rooms, 3);
    for (wait, left) in [(3_500, 2), (4_000, 1), (3_000, 0)] {
        solo.run_for(Duration::from_millis(wait));
        assert_eq!(solo.node().gauges().failed_rooms, left);
    }
    assert_eq!(solo.node().gauges().timers, 0);
}

#[test]
fn a_sender_has_one_receiver_at_least_and_is_announced_once() {
    let mut solo = Solo::serving(|_| {});
    let sender = solo.open_sender(ROOM, 0);
    solo.send(sender, 0, &[&[]]);
    assert_eq!(solo.poll(sender), KvPoll::Bootstrapping);
    solo.says(1, Body::Register(register(1, ROOM, &[])));
    assert_eq!(solo.answer(), done(1, 0, Some(1), vec![]));
    assert_eq!(solo.poll(sender), KvPoll::Success);
    let sender = solo.open_sender(ROOM, 1);
    solo.send(sender, 2, &[]);
    solo.send(sender, 2, &[]);
    assert_eq!(solo.cause(sender), Cause::InitOrder);
}

#[test]
fn a_post_that_is_cancelled_unasked_has_moved_nothing() {
    let mut solo = Solo::serving(|_| {});
    let sender = solo.open_sender(ROOM, 1);
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    solo.send(sender, 1, &[&[5]]);
    let post = solo.take_posts().remove(0);
    solo.posted(post.id, Err(TransportError::Cancelled));
    assert_eq!(solo.cause(sender), Cause::Post(TransportError::Cancelled));
}

#[test]
fn many_sessions_to_a_peer_make_progress_side_by_side() {
    let mut solo = Solo::serving(|config| config.limits.max_post_bytes = 64);
    for room in 1..4 {
        let sender = solo.open_sender(Room::Number(room), 1);
        let pages: Vec<u32> = (0..8).map(|page| 2 * page).collect();
        solo.says(1, Body::Register(register(room, Room::Number(room), &pages)));
        let pages: Vec<u32> = (0..8).map(|page| 10 * (room as u32 - 1) + page).collect();
        solo.send(sender, 8, &[&pages]);
    }
    // Once all three are in line, each gets every third post.
    let mut posts = std::collections::VecDeque::from(solo.take_posts());
    let mut turns = Vec::new();
    for _ in 0..12 {
        let post = posts.pop_front().unwrap();
        solo.posted(post.id, Ok(()));
        let next = solo.take_posts();
        turns.extend(next.iter().map(|post| post.descriptors[0].local_offset / 640));
        posts.extend(next);
    }
    for room in 0..3 {
        let got = turns.iter().filter(|&&turn| turn == room).count();
        assert!(got >= 3, "session {room} got {got} turns: {turns:?}");
    }
}

#[test]
fn a_peer_into_which_a_post_still_writes_does_not_make_way() {
    let mut solo = Solo::serving(|config| config.limits.max_peers = 1);
    let sender = solo.open_sender(ROOM, 1);
    solo.says(1, Body::Register(register(1, ROOM, &[0])));
    solo.send(sender, 1, &[&[5]]);
    let post = solo.take_posts().remove(0);
    solo.says(1, release(1, 2));
    assert_eq!(solo.node().gauges().incoming, 0);
    solo.greet(2);
    assert_eq!(solo.frames(), []);
    solo.posted(post.id, Ok(()));
    solo.greet(2);
    assert!(matches!(solo.answer(), Body::Welcome(_)));
}

/// A request of the peer's whose one page is given; its deadline is in `millis`.
fn sending(solo: &mut Solo, peer: u64, attempt: u64, room: u64, millis: u64) -> SessionId {
    let room = Room::Number(room);
    let deadline = Some(Duration::from_millis(millis));
    let session = solo.open_sender_with(
        room.clone(),
        1,
        SessionOptions::default().with(|options| options.deadline = deadline),
    );
    solo.says(peer, Body::Register(register(attempt, room, &[0])));
    solo.send(session, 1, &[&[3]]);
    session
}

#[test]
fn a_deadline_error_names_the_peer_that_posts_waited_for() {
    let worker = |peer: u64| hello(peer, ConversationId::NONE).worker;
    let last = |solo: &Solo, session| match solo.cause(session) {
        Cause::DeadlineExceeded { last, .. } => last,
        cause => panic!("{cause:?}"),
    };
    // Four peers have four posts each, and a fifth one waits for its turn.
    let mut solo = Solo::new(|_| {});
    (1..=5).for_each(|peer| solo.greet(peer));
    let mut stuck = None;
    for peer in 1..=4 {
        for attempt in 1..=4 {
            stuck = Some(sending(&mut solo, peer, attempt, peer * 10 + attempt, 700));
        }
    }
    let waiting = sending(&mut solo, 5, 1, 51, 500);
    assert_eq!(solo.take_posts().len(), 16);
    solo.run_for(Duration::from_millis(600));
    assert_eq!(last(&solo, waiting), Some(Obstacle::Behind { peer: worker(4), posts: 4 }));
    solo.run_for(Duration::from_millis(200));
    assert_eq!(last(&solo, stuck.unwrap()), Some(Obstacle::Stuck { peer: worker(4), posts: 1 }));
    // A fifth request of one peer waits for the other four of it.
    let mut solo = Solo::serving(|_| {});
    let last_one = (1..=5).map(|attempt| sending(&mut solo, 1, attempt, attempt, 500)).last().unwrap();
    solo.run_for(Duration::from_millis(600));
    assert_eq!(last(&solo, last_one), Some(Obstacle::Stuck { peer: worker(1), posts: 4 }));
    // Nobody has permitted to write.
    let mut solo = Solo::serving(|_| {});
    let options =
        SessionOptions::default().with(|options| options.deadline = Some(Duration::from_millis(500)));
    let session = solo.open_sender_with(ROOM, 1, options);
    solo.says(1, Body::Register(with(register(1, ROOM, &[0]), |to| (to.ask, to.permit_ms) = (0, 0))));
    solo.send(session, 1, &[&[3]]);
    solo.run_for(Duration::from_millis(600));
    assert_eq!(last(&solo, session), Some(Obstacle::NotPermitted { peer: worker(1) }));
    // More is given in the moment at which the deadline passes: what is stuck is still the first post.
    let mut solo = Solo::serving(|_| {});
    let options =
        SessionOptions::default().with(|options| options.deadline = Some(Duration::from_millis(500)));
    let session = solo.open_sender_with(ROOM, 1, options);
    solo.says(1, Body::Register(register(1, ROOM, &[0, 1])));
    solo.send(session, 2, &[&[3]]);
    solo.sleep(Duration::from_millis(500));
    let chunk = kv_core::Pages::unpooled(list(&[4])).unwrap();
    solo.input(Input::Command(Command::Send { session, chunk }));
    assert_eq!(last(&solo, session), Some(Obstacle::Stuck { peer: worker(1), posts: 1 }));
}
