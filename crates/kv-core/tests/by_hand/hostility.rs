//! Peers that break the rules, or stand where the rules are thin: impostors, peers that answer everything but
//! what counts, ways that are lost, and times that no clock shows.

use std::time::Duration;

use bytes::Bytes;
use kv_core::proto::{Input, Output};
use kv_core::wire::{AbortAck, Body, ConversationId, Frame, Granted, Hello, VERSIONS, Welcome};
use kv_core::{
    Attempt, Cause, Directions, KvPoll, Origin, PeerId, Quarantine, QuarantineReason, Room, SessionId,
    SessionOptions, TransferMode, WayEnd, WriteFence,
};

use crate::solo::*;

const SECOND: Duration = Duration::from_secs(1);
const ROOM: Room = Room::Number(1);

/// A frame on a connection that is not the peer's.
pub fn from_elsewhere(solo: &mut Solo, origin: u64, frame: Frame) {
    solo.input(Input::Frame { from: Origin(origin), frame: frame.encode().unwrap() });
}

pub fn connected(solo: &mut Solo, peer: PeerId, fence: WriteFence) {
    solo.input(Input::Connected { peer, directions: Directions::BOTH, fence });
}

/// To whom the node says hello, and asks for a way, in its last outputs.
pub fn connects(solo: &Solo) -> Vec<(PeerId, Bytes)> {
    let connect = |output: &Output| match output {
        Output::Connect { peer, transport } => Some((*peer, transport.metadata.clone())),
        _ => None,
    };
    solo.said.iter().filter_map(connect).collect()
}

/// A node that receives from peer 1, whose way has this fence.
pub fn receiving_over(fence: WriteFence) -> (Solo, SessionId, PeerId) {
    let mut solo = Solo::new(|_| {});
    let session = solo.open_receiver(ROOM, None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    let peer = connects(&solo)[0].0;
    connected(&mut solo, peer, fence);
    solo.welcome(1, 1);
    (solo, session, peer)
}

/// P5, P3: whoever knows the incarnation of an idle peer takes its conversation over, and with the highest
/// number of a conversation keeps the peer out for ever.
#[test]
fn an_impostor_of_an_idle_peer_does_not_lock_the_peer_out() {
    let mut solo = Solo::serving(|_| {});
    solo.run_for(SECOND * 10);
    // One frame, on another connection, of somebody who may speak for himself only.
    let mut forged = hello(1, ConversationId::new(u32::MAX, 7));
    forged.metadata = Bytes::from_static(b"impostor");
    from_elsewhere(&mut solo, 66, Frame { conversation: ConversationId::NONE, body: Body::Hello(forged) });
    // The peer goes on in its conversation, and greets anew as soon as nobody answers.
    solo.run_for(SECOND * 30);
    let mut welcomes = 0;
    for number in 2..20 {
        solo.hello(hello(1, ConversationId::new(number, 1)));
        welcomes += solo.frames().iter().filter(|body| matches!(body, Body::Welcome(_))).count();
        solo.run_for(SECOND * 3);
    }
    assert!(welcomes > 0, "the peer itself is never answered again");
}

/// The same at the decode side: the prefill peer is idle, and the impostor repeats his hello.
#[test]
fn an_impostor_of_an_idle_prefill_worker_does_not_get_its_registrations_lost() {
    let (mut solo, session, _) = receiving_over(WriteFence::AtDeath);
    solo.abort(session);
    solo.says(1, Body::AbortAck(AbortAck { attempt: Attempt(1) }));
    solo.run_for(SECOND * 10);
    // A transport lets nobody speak for memory that is another's.
    let impostor = Hello { metadata: Bytes::from_static(b"impostor"), ..hello(1, ConversationId::new(9, 7)) };
    let forged = || Frame { conversation: ConversationId::NONE, body: Body::Hello(impostor.clone()) };
    from_elsewhere(&mut solo, 66, forged());
    let session = solo.open_receiver(Room::Number(2), None);
    let lookups = solo.lookups();
    if let Some((lookup, _)) = lookups.first() {
        solo.found(*lookup, vec![record(1)]);
    }
    solo.init_receiver(session, &[1], None);
    // What the worker itself would take: a hello, or a registration in the conversation that it knows.
    let known = ConversationId::new(1, 1);
    let mut reached = solo.said.iter().any(
        |output| matches!(output, Output::Send { frame, .. } if Frame::decode(frame).unwrap().conversation == known),
    );
    for _ in 0..60 {
        from_elsewhere(&mut solo, 66, forged());
        let said = solo.run_for(SECOND / 2);
        reached |= said.iter().any(|(_, body)| matches!(body, Body::Hello(_)));
    }
    assert!(reached, "for thirty seconds nothing was said that the prefill worker could answer");
}

/// Lets time pass, in which another incarnation answers every hello that is said. Returns how many.
fn another_life_answers(solo: &mut Solo, time: Duration) -> usize {
    let hello = |(_, body)| if let Body::Hello(hello) = body { Some(hello) } else { None };
    let hellos: Vec<Hello> = solo.run_for(time).into_iter().filter_map(hello).collect();
    hellos.iter().for_each(|hello| solo.another_life_answers(hello));
    hellos.len()
}

/// P2, P4: at the address of a prefill worker another incarnation answers, for as long as it is asked. Its word was taken for
/// the worker's: the worker was never given up, so that nothing ended the wait for its last writes.
#[test]
fn a_peer_for_which_another_incarnation_answers_is_given_up_nevertheless() {
    let (mut solo, session, _) = receiving_over(WriteFence::Within(SECOND));
    solo.init_receiver(session, &[0], None);
    let (mut answers, mut since) = (0, Duration::ZERO);
    while solo.released(session).is_empty() && since < SECOND * 120 {
        since += SECOND / 4;
        answers += another_life_answers(&mut solo, SECOND / 4);
    }
    assert!(answers > 0, "the peer was never greeted");
    assert_eq!(solo.cause(session), Cause::PeerRestarted);
    assert_eq!(solo.released(session), [list(&[0])], "after {since:?}, and {answers} answers");
}

/// P2: another incarnation answered one hello. From then on, the frames of the prefill worker, which lives, were dropped as
/// if they came on a wrong connection, and its pages did not come back.
#[test]
fn a_peer_for_which_another_incarnation_has_answered_is_heard_itself_nevertheless() {
    let (mut solo, session, _) = receiving_over(WriteFence::AtDeath);
    solo.init_receiver(session, &[0], None);
    let answers = (0..100).map(|_| another_life_answers(&mut solo, SECOND / 4)).find(|answers| *answers > 0);
    assert!(answers.is_some(), "the peer was never greeted");
    assert_eq!(solo.cause(session), Cause::PeerRestarted);
    assert_eq!(solo.released(session), [], "the worker may still write");
    solo.says(1, Body::AbortAck(AbortAck { attempt: Attempt(1) }));
    assert_eq!(solo.released(session), [list(&[0])]);
}

/// P1: somebody says hello under the incarnation of a prefill worker that the node has not met yet. The node
/// registers its pages with him, and believes him that they are written.
#[test]
fn an_early_impostor_is_not_taken_for_the_registered_worker() {
    let mut solo = Solo::new(|_| {});
    let mut forged = hello(1, ConversationId::new(9, 7));
    forged.metadata = Bytes::from_static(b"impostor");
    from_elsewhere(&mut solo, 66, Frame { conversation: ConversationId::NONE, body: Body::Hello(forged) });
    let impostor = connects(&solo)[0].0;
    let welcomed = solo.frames().into_iter().find_map(|body| match body {
        Body::Welcome(welcome) => Some(welcome.conversation),
        _ => None,
    });
    connected(&mut solo, impostor, WriteFence::AtDeath);
    let session = solo.open_receiver(ROOM, None);
    let lookup = solo.lookups()[0].0;
    // The server's metadata are other ones.
    solo.found(lookup, vec![record(1)]);
    solo.init_receiver(session, &[1, 2], None);
    let registered = solo
        .frames_to()
        .into_iter()
        .any(|(peer, body)| peer == impostor && matches!(body, Body::Register(_)));
    if registered {
        from_elsewhere(
            &mut solo,
            66,
            Frame { conversation: welcomed.unwrap(), body: done(1, 0, Some(1), Vec::new()) },
        );
    }
    assert_ne!(solo.poll(session), KvPoll::Success, "nobody has written a byte");
    assert!(!registered, "the pages were registered with an impostor");
}

/// P2: a peer that this node both receives from and writes to is fenced off while a write to it is in
/// flight. When they meet again, its abort is acknowledged although that write has not ended.
#[test]
fn an_abort_is_not_acknowledged_while_a_write_of_a_former_conversation_is_in_flight() {
    let (mut solo, session, peer) = receiving_over(WriteFence::Revocable);
    solo.init_receiver(session, &[1, 2], None);
    // Peer 1 receives as well, and this node writes to it.
    let room = Room::Number(7);
    let sender = solo.open_sender(room.clone(), 1);
    solo.says(1, Body::Register(register(1, room.clone(), &[3])));
    let ask = solo.frames().into_iter().find_map(|body| match body {
        Body::Heartbeat(asks) if asks.writes => Some(asks.number),
        _ => None,
    });
    solo.says(1, permits(ask.unwrap(), 10_000));
    solo.send(sender, 1, &[&[5]]);
    let posts = solo.take_posts();
    assert_eq!(posts.len(), 1, "a write is in flight");
    // Nothing is heard of the peer: its right to write here is taken from it. Its way is not lost.
    solo.run_for(SECOND * 8);
    solo.input(Input::Revoked { peer });
    assert_eq!(solo.released(session), [list(&[1, 2])]);
    // The next request brings them together.
    let session = solo.open_receiver(Room::Number(2), None);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    if !solo.frames().iter().any(|body| matches!(body, Body::Hello(_))) {
        return;
    }
    // The peer takes it for a new conversation, fails what it has open in the old one, and aborts that.
    solo.welcome(1, 2);
    solo.says(1, abort(1, room));
    let acknowledged = solo.frames().iter().any(|body| matches!(body, Body::AbortAck(_)));
    assert!(!acknowledged, "the write to the peer's pages is still in flight");
    solo.posted(posts[0].id, Ok(()));
    let _ = session;
}

/// P3: a request that waits for a lost way is forgotten when the last page that waited for it is back.
#[test]
fn a_request_that_waits_for_a_lost_way_is_not_stranded() {
    let (mut solo, session, peer) = receiving_over(WriteFence::AtDeath);
    solo.init_receiver(session, &[1, 2], None);
    solo.input(Input::PeerGone { peer, end: WayEnd::Lost });
    assert_eq!(solo.poll(session), KvPoll::Failed);
    let options = SessionOptions::default().with(|options| options.deadline = Some(SECOND * 120));
    let next = solo.open_receiver_with(Room::Number(2), options);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    // Through its own way the peer says that it has stopped.
    solo.says(1, Body::AbortAck(AbortAck { attempt: Attempt(1) }));
    assert_eq!(solo.released(session), [list(&[1, 2])]);
    let mut greeted = false;
    for _ in 0..60 {
        let said = solo.run_for(SECOND);
        greeted |= said.iter().any(|(_, body)| matches!(body, Body::Hello(_)));
        greeted |= !connects(&solo).is_empty();
    }
    let ended = solo.poll(next) == KvPoll::Failed;
    assert!(greeted || ended, "for a minute nobody has tried to reach the peer: {:?}", solo.poll(next));
}

/// P3: a peer that greets again and again, because nobody answers over the lost way, put off its reopening for
/// ever.
#[test]
fn a_lost_way_is_opened_again_however_often_the_peer_greets() {
    let (mut solo, session, peer) = receiving_over(WriteFence::AtDeath);
    solo.init_receiver(session, &[1, 2], None);
    solo.input(Input::PeerGone { peer, end: WayEnd::Lost });
    let mut opened = false;
    for step in 0..1000 {
        if step % 10 == 0 {
            solo.hello(hello(1, ConversationId::new(1, 1)));
            opened |= !connects(&solo).is_empty();
        }
        solo.run_for(SECOND / 100);
        opened |= !connects(&solo).is_empty();
    }
    assert!(opened, "for ten seconds nobody has tried to reach the peer");
}

/// P3: a request that is opened while the way is lost ends with a cause that names it, and not after its
/// whole deadline.
#[test]
fn a_request_over_a_lost_way_fails_as_with_a_silent_peer() {
    let (mut solo, session, peer) = receiving_over(WriteFence::AtDeath);
    solo.init_receiver(session, &[1, 2], None);
    solo.input(Input::PeerGone { peer, end: WayEnd::Lost });
    let options = SessionOptions::default().with(|options| options.deadline = Some(SECOND * 60));
    let next = solo.open_receiver_with(Room::Number(2), options);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    for _ in 0..70 {
        solo.run_for(SECOND);
        for (peer, _) in connects(&solo) {
            let error = kv_core::TransportError::PeerGone;
            solo.input(Input::ConnectFailed { peer, error });
        }
    }
    let cause = solo.cause(next);
    assert!(!matches!(cause, Cause::DeadlineExceeded { last: None, .. }), "{cause:?}");
}

/// The fence ends the conversation, and with it what this node remembers of the peer's attempt. The receiver
/// would wait for a sender that has failed.
#[test]
fn after_a_fence_a_receiver_that_registers_again_is_refused_at_once() {
    let (mut solo, session, peer) = receiving_over(WriteFence::Within(SECOND));
    solo.init_receiver(session, &[0], None);
    let sender = solo.open_sender(Room::Number(77), 1);
    solo.says(1, Body::Register(register(1, Room::Number(77), &[1])));
    solo.input(Input::PeerGone { peer, end: WayEnd::Lost });
    assert_eq!(solo.cause(sender), Cause::WayLost);
    solo.run_for(SECOND * 13);
    assert_eq!(solo.released(session), [list(&[0])], "the fence has ended");
    connected(&mut solo, PeerId(1), WriteFence::Within(SECOND));
    solo.greet(1);
    solo.says(1, Body::Register(register(2, Room::Number(77), &[1])));
    let said = solo.frames();
    assert!(said.iter().any(|body| matches!(body, Body::Failed(_))), "{said:?}");
}

/// P5: a peer that answers everything but aborts keeps pages, and is named for it: its process may be in the
/// middle of a write, and whoever runs it can tell.
#[test]
fn quarantine_names_the_peer_that_never_acknowledges_an_abort() {
    let (mut solo, session, _) = receiving_over(WriteFence::Revocable);
    solo.init_receiver(session, &[1, 2], None);
    solo.abort(session);
    for _ in 0..600 {
        solo.run_for(SECOND);
        solo.says(1, sign_of_life());
    }
    let quarantine = solo.node().quarantine();
    assert!(matches!(&quarantine[..], [Quarantine { peer: Some(_), pages: 2, .. }]), "{quarantine:?}");
    assert_eq!(quarantine[0].reason, QuarantineReason::Unacknowledged);
    solo.says(1, Body::AbortAck(AbortAck { attempt: Attempt(1) }));
    assert_eq!(solo.released(session), [list(&[1, 2])]);
}

/// P5: one connection brings four peers. Of their posts one ends now and then, and so they hold the window of
/// all peers together.
#[test]
fn slow_peers_of_a_connection_do_not_slow_down_a_healthy_peer() {
    let mut solo = Solo::new(|config| config.limits.max_post_bytes = 64);
    let mut conversations = Vec::new();
    for incarnation in [1, 2, 3, 4] {
        let frame = Frame {
            conversation: ConversationId::NONE,
            body: Body::Hello(hello(incarnation, ConversationId::new(1, 1))),
        };
        from_elsewhere(&mut solo, 1, frame);
        conversations.push(solo.frames().into_iter().find_map(|body| match body {
            Body::Welcome(welcome) => Some(welcome.conversation),
            _ => None,
        }));
    }
    // Slow peer n gets pages 4n to 4n + 3, and the healthy one those from 16 on.
    let mut senders = Vec::new();
    let mut serve =
        |solo: &mut Solo, origin: u64, conversation: ConversationId, first: u32, attempt: u64, count: u32| {
            let room = Room::Number(u64::from(first) * 1000 + attempt);
            let sender = solo.open_sender(room.clone(), 1);
            let delivery = register(attempt, room, &(0..count).collect::<Vec<_>>());
            let delivery = with(delivery, |to| to.permit_ms = 3_600_000);
            from_elsewhere(solo, origin, Frame { conversation, body: Body::Register(delivery) });
            solo.send(sender, count as usize, &[&(first..first + count).collect::<Vec<_>>()]);
            senders.push(sender);
        };
    for (slow, conversation) in conversations.iter().enumerate() {
        for attempt in 1..=80 {
            serve(&mut solo, 1, conversation.unwrap(), 4 * slow as u32, attempt, 4);
        }
    }
    let mut slow = vec![std::collections::VecDeque::new(); 4];
    solo.greet(8);
    let conversation = solo.conversation(8);
    for attempt in 1..=8 {
        serve(&mut solo, 8, conversation, 16, attempt, 16);
    }
    let healthy = senders.split_off(320);
    let start = solo.now;
    let mut done = 0;
    while healthy.iter().any(|&sender| solo.poll(sender) != KvPoll::Success) && solo.now < start + SECOND * 60
    {
        loop {
            let posts = solo.take_posts();
            if posts.is_empty() {
                break;
            }
            for post in posts {
                match slow.get_mut((post.descriptors[0].local_offset / 64 / 4) as usize) {
                    Some(lane) => lane.push_back(post.id),
                    None => {
                        done += 1;
                        solo.posted(post.id, Ok(()));
                    }
                }
            }
        }
        solo.run_for(SECOND * 9 / 10);
        for lane in &mut slow {
            if let Some(post) = lane.pop_front() {
                solo.posted(post, Ok(()));
            }
        }
        // All of them answer whatever they are asked.
        solo.says(8, sign_of_life());
        for conversation in &conversations {
            from_elsewhere(&mut solo, 1, Frame { conversation: conversation.unwrap(), body: sign_of_life() });
        }
    }
    let took = solo.now - start;
    assert!(took < SECOND * 2, "the healthy peer, whose {done} posts take no time, needed {took:?}");
}

/// P5: a hello for a former life, on any connection, becomes the connection of a peer whose way is lost: what
/// the peer itself says is dropped from then on.
#[test]
fn a_refused_hello_does_not_move_a_peer_to_another_connection() {
    let (mut solo, session, peer) = receiving_over(WriteFence::AtDeath);
    solo.init_receiver(session, &[1, 2], None);
    solo.input(Input::PeerGone { peer, end: WayEnd::Lost });
    let mut forged = hello(1, ConversationId::new(9, 7));
    forged.to = kv_core::Incarnation::from_random(12345);
    from_elsewhere(&mut solo, 66, Frame { conversation: ConversationId::NONE, body: Body::Hello(forged) });
    solo.says(1, Body::AbortAck(AbortAck { attempt: Attempt(1) }));
    assert_eq!(solo.released(session), [list(&[1, 2])]);
}

/// P5: what a frame costs grows with its size, and what a welcome costs with the number of open requests, not
/// with its square.
#[test]
fn a_new_conversation_costs_in_proportion_to_the_open_requests() {
    let cost = |requests: u64| {
        let (mut solo, _, _) = receiving_over(WriteFence::AtDeath);
        for number in 0..requests {
            let session = solo.open_receiver(Room::Number(100 + number), None);
            if let Some((lookup, _)) = solo.lookups().first().cloned() {
                solo.found(lookup, vec![record(1)]);
            }
            solo.init_receiver(session, &[], None);
        }
        // The peer has forgotten the conversation.
        solo.says(1, asks_to_write(2));
        let mut said = solo.run_for(SECOND * 4);
        said.retain(|(_, body)| matches!(body, Body::Hello(_)));
        let hello = solo.last_hello(1);
        let before = kv_core::meter::steps();
        solo.says(
            1,
            Body::Welcome(Welcome {
                versions: VERSIONS,
                nonce: hello.nonce,
                conversation: ConversationId::new(77, 1),
                ask: 1,
            }),
        );
        let took = kv_core::meter::steps() - before;
        let registers = solo.frames().iter().filter(|body| matches!(body, Body::Register(_))).count();
        assert_eq!(registers as u64, requests);
        took
    };
    let (few, many) = (cost(250), cost(2000));
    assert!(many < few * 12, "eight times the requests cost {} times the steps: {few}, {many}", many / few);
}

/// P5: a scheduler that wants no deadline gives the longest one.
#[test]
fn the_longest_deadline_does_not_overflow() {
    let mut solo = Solo::new(|_| {});
    let options = SessionOptions::default().with(|options| options.deadline = Some(Duration::MAX));
    let session = solo.open_receiver_with(ROOM, options);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    solo.welcome(1, 1);
    solo.init_receiver(session, &[1], None);
    assert_eq!(solo.poll(session), KvPoll::Transferring);
}

/// P5: the same for what a server may be configured with.
#[test]
fn the_longest_times_do_not_overflow() {
    let longest: [fn(&mut kv_core::proto::Timing); 6] = [
        |timing| timing.keepalive = Duration::MAX,
        |timing| timing.retry_max = Duration::MAX,
        |timing| timing.retry_first = Duration::MAX,
        |timing| timing.write_permission = Duration::MAX,
        |timing| timing.peer_timeout = Duration::MAX,
        |timing| timing.session_deadline = Duration::MAX,
    ];
    let names =
        ["keepalive", "retry_max", "retry_first", "write_permission", "peer_timeout", "session_deadline"];
    let fails = |change: fn(&mut kv_core::proto::Timing)| {
        std::panic::catch_unwind(|| {
            let mut solo = Solo::new(|config| change(&mut config.timing));
            let session = solo.open_receiver(ROOM, None);
            let lookup = solo.lookups()[0].0;
            solo.found(lookup, vec![record(1)]);
            solo.welcome(1, 1);
            solo.init_receiver(session, &[1], None);
            solo.says(1, asks_to_write(u64::MAX));
            solo.abort(session);
            solo.run_for(SECOND * 20);
        })
        .is_err()
    };
    let failed: Vec<_> = std::iter::zip(names, longest).filter(|&(_, change)| fails(change)).collect();
    let failed: Vec<_> = failed.into_iter().map(|(name, _)| name).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

/// P5: rooms that peers say have failed are bounded for each connection, and not in all.
#[test]
fn failed_rooms_are_bounded_over_all_connections_of_a_worker() {
    let most = 64;
    let mut solo = Solo::new(|config| config.limits.max_failed_rooms = most);
    for incarnation in 100..200 {
        solo.greet(incarnation);
        for attempt in 1..=20 {
            solo.says(incarnation, abort(attempt, Room::Number(incarnation * 1000 + attempt)));
        }
    }
    let kept = solo.node().gauges().failed_rooms;
    assert!(kept <= 2 * most, "{kept} rooms are remembered");
}

/// P3: a sender finds two registrations that could be its own, and fails; their receivers are told nothing.
#[test]
fn ambiguous_receivers_are_told_by_their_sender_why_they_failed() {
    let mut solo = Solo::new(|config| {
        let region = kv_core::Region::dram(kv_core::RegionRole::Kv, 0x100_0000, 32 * 64, 64);
        let args = kv_core::KvArgs::builder("us", 0).pages(32, 16).region(region).suffixes_requests(true);
        config.args = args.build().unwrap();
    });
    let mut told = 0;
    for (incarnation, room) in [(1, "r-00000001"), (2, "r-00000002")] {
        solo.hello({
            let args = kv_core::KvArgs::builder("peer", incarnation as u32)
                .pages(16, 16)
                .region(kv_core::Region::dram(kv_core::RegionRole::Kv, 0x100_0000, 16 * 64, 64));
            let args = args.build().unwrap();
            let mut hello = hello(incarnation, ConversationId::new(1, 1));
            (hello.worker, hello.geometry) = (args.worker().clone(), Some(Box::new(args.geometry().clone())));
            hello.suffixed = true;
            hello
        });
        let Body::Welcome(welcome) = solo.answer() else { panic!("{:?}", solo.frames()) };
        let register = register(1, Room::request(room).unwrap(), &[1]);
        solo.frame_from(
            incarnation,
            Frame { conversation: welcome.conversation, body: Body::Register(register) },
        );
    }
    let sender = solo.open_sender(Room::request("r-0000000a").unwrap(), 1);
    assert!(matches!(solo.cause(sender), Cause::AmbiguousRoom { .. }), "{:?}", solo.cause(sender));
    let is_told = |body: &Body| matches!(body, Body::Failed(_));
    told += solo.frames().iter().filter(|&body| is_told(body)).count();
    told += solo.run_for(SECOND * 4).iter().filter(|(_, body)| is_told(body)).count();
    assert_eq!(told, 2, "both wait until their deadlines");
}

/// P5: whoever comes first under the incarnation of a decode worker keeps it out for as long as he stays,
/// although the two bring different metadata.
#[test]
fn an_early_impostor_does_not_keep_the_real_worker_out() {
    let mut solo = Solo::new(|_| {});
    let mut forged = hello(1, ConversationId::new(9, 7));
    forged.metadata = Bytes::from_static(b"impostor");
    from_elsewhere(&mut solo, 66, Frame { conversation: ConversationId::NONE, body: Body::Hello(forged) });
    let conversation = solo.frames().into_iter().find_map(|body| match body {
        Body::Welcome(welcome) => Some(welcome.conversation),
        _ => None,
    });
    let mut welcomed = false;
    for number in 0..60 {
        from_elsewhere(&mut solo, 66, Frame { conversation: conversation.unwrap(), body: sign_of_life() });
        solo.hello(hello(1, ConversationId::new(10 + number, 1)));
        welcomed |= solo.frames().iter().any(|body| matches!(body, Body::Welcome(_)));
        solo.run_for(SECOND);
    }
    assert!(welcomed, "the worker itself was not answered for a minute");
}

/// P3: the right of a peer was revoked, and the transport cannot say yet that no slice is under way. The peer
/// answers everything; a new request to it waits for its whole deadline, and nobody says for what.
#[test]
fn quarantine_reports_pages_that_wait_for_a_revocation() {
    let (mut solo, session, peer) = receiving_over(WriteFence::Revocable);
    solo.init_receiver(session, &[1, 2], None);
    solo.run_for(SECOND * 8);
    assert_eq!(solo.poll(session), KvPoll::Failed);
    // The peer goes on, and has stopped writing.
    solo.says(1, Body::AbortAck(AbortAck { attempt: Attempt(1) }));
    assert_eq!(solo.released(session), [list(&[1, 2])]);
    let options = SessionOptions::default().with(|options| options.deadline = Some(SECOND * 60));
    let next = solo.open_receiver_with(Room::Number(2), options);
    if let Some((lookup, _)) = solo.lookups().first().cloned() {
        solo.found(lookup, vec![record(1)]);
    }
    if solo.frames().iter().any(|body| matches!(body, Body::Hello(_))) {
        solo.welcome(1, 1);
    }
    for _ in 0..70 {
        solo.run_for(SECOND);
        solo.says(1, sign_of_life());
    }
    let _ = peer;
    let cause = solo.cause(next);
    assert!(!matches!(cause, Cause::DeadlineExceeded { last: None, .. }), "{cause:?}");
}

/// P3: over a way that was opened anew the transport knows of no permission. The peer may have revoked the right to write on
/// the connection that was lost: it is asked anew, at once, and no answer to a question of before counts.
#[test]
fn over_a_way_that_was_opened_anew_nothing_is_written_until_the_peer_permits_it_again() {
    let (mut solo, session, peer) = receiving_over(WriteFence::AtDeath);
    solo.init_receiver(session, &[1, 2], None);
    let permitted = |solo: &Solo| {
        let lasts =
            |output: &Output| matches!(output, Output::Permit { until, .. } if *until > kv_core::Time::ZERO);
        solo.said.iter().any(lasts)
    };
    let asked = |solo: &Solo| {
        let ask = |body| match body {
            Body::Heartbeat(asks) if asks.writes => Some(asks.number),
            _ => None,
        };
        solo.frames().into_iter().find_map(ask)
    };
    solo.says(1, Body::Register(register(1, Room::Number(7), &[3])));
    let before = asked(&solo).unwrap();
    solo.says(1, permits(before, 10_000));
    assert!(permitted(&solo));
    let sender = solo.open_sender(Room::Number(8), 1);
    solo.input(Input::PeerGone { peer, end: WayEnd::Lost });
    // The peer's own way stands.
    let again = with(register(2, Room::Number(8), &[4]), |to| (to.ask, to.permit_ms) = (before, 10_000));
    solo.says(1, Body::Register(again));
    solo.send(sender, 1, &[&[6]]);
    assert_eq!(solo.take_posts().len(), 0, "nothing leads to the peer");
    for _ in 0..10 {
        if connects(&solo).is_empty() {
            solo.run_until_said(SECOND * 3);
        }
    }
    connected(&mut solo, peer, WriteFence::AtDeath);
    assert!(!permitted(&solo), "the peer has not been heard since");
    let ask = asked(&solo).unwrap();
    // The peer has kept the conversation.
    let hello = solo.last_hello(1);
    let (versions, nonce, conversation) = (VERSIONS, hello.nonce, ConversationId::new(1, 1));
    solo.says(1, Body::Welcome(Welcome { versions, nonce, conversation, ask: 1 }));
    assert!(!permitted(&solo));
    assert_eq!(solo.take_posts().len(), 0);
    solo.says(1, permits(before, 20_000));
    assert!(!permitted(&solo), "an answer that was under way when the connection broke");
    solo.says(1, permits(ask, 10_000));
    assert!(permitted(&solo));
    assert_eq!(solo.take_posts().len(), 1);
}

/// P5: a few bytes of a prefill worker make the decode worker send a heartbeat a millisecond, each of them a walk
/// along all of its open requests there.
#[test]
fn a_lease_does_not_ask_for_a_heartbeat_every_millisecond() {
    let mut solo = Solo::new(|_| {});
    let options = SessionOptions::default().with(|options| options.mode = Some(TransferMode::Pull));
    solo.open_receiver_with(ROOM, options);
    let lookup = solo.lookups()[0].0;
    solo.found(lookup, vec![record(1)]);
    solo.welcome(1, 1);
    let granted = Granted {
        attempt: Attempt(1),
        number: 1,
        lease_id: SessionId(5),
        pages: list(&[1]),
        aux: None,
        lease_ms: 30_000,
        interval_ms: 1,
        groups: Default::default(),
    };
    solo.says(1, Body::Granted(granted));
    let said = solo.run_for(SECOND * 4);
    let numbers = said.iter().filter(|(_, body)| matches!(body, Body::Heartbeat(_))).count();
    assert!(numbers < 100, "{numbers} heartbeats in four seconds");
}

#[test]
fn a_peer_that_sends_unknown_messages_is_served_and_the_messages_counted() {
    let mut solo = Solo::serving(|_| {});
    let sender = solo.open_sender(ROOM, 1);
    let known = Frame { conversation: solo.conversation(1), body: sign_of_life() }.encode().unwrap();
    let mut unknown = known.to_vec();
    unknown[2] = 99;
    for count in 1..=3 {
        solo.input(Input::Frame { from: Origin(1), frame: unknown.clone().into() });
        assert_eq!((&solo.said[..], solo.node().gauges().dropped.total()), (&[][..], count));
    }
    solo.says(1, Body::Register(register(1, ROOM, &[5])));
    solo.send(sender, 1, &[&[3]]);
    let post = solo.take_posts().remove(0);
    solo.posted(post.id, Ok(()));
    assert_eq!((solo.poll(sender), solo.node().gauges().dropped.total()), (KvPoll::Success, 3));
}
