//! Whatever ends a sender, in whatever phase: each decode rank hears one last word, and only when nothing writes any
//! more; the session ends once; all pages come back; and the room is free.

use super::sending::{DECODE, registration, request};
use super::*;
use crate::sglang::codec::Registration;
use kv_core::{ChunkId, ReadyEventError, TransportError};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    NobodyAsked,
    Asked,
    Writing,
    BetweenChunks,
    WritingTheLast,
    Succeeded,
}

const PHASES: [Phase; 6] = [
    Phase::NobodyAsked,
    Phase::Asked,
    Phase::Writing,
    Phase::BetweenChunks,
    Phase::WritingTheLast,
    Phase::Succeeded,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Abort,
    Deadline,
    Shutdown,
    ReadyEventFails,
    /// The decode rank aborts, says so twice, and once more when everything is over.
    TheirAbort,
    /// The way to the decode rank's agent is lost.
    WayLost,
    /// A post fails, and the others end well.
    PostFails,
    /// The name of the decode rank's agent is registered with other memory.
    OtherMemory,
    /// Messages of the other direction, of other rooms, repeated ones, and a stranger's claims on the room.
    Strays,
}

const EVENTS: [Event; 9] = [
    Event::Abort,
    Event::Deadline,
    Event::Shutdown,
    Event::ReadyEventFails,
    Event::TheirAbort,
    Event::WayLost,
    Event::PostFails,
    Event::OtherMemory,
    Event::Strays,
];

/// A sender of room 9 in a phase, with four pages in two chunks; the way to the agent of its decode rank.
fn in_phase(rig: &mut Rig, phase: Phase) -> (SessionId, Option<PeerId>) {
    rig.take(registration("d", DECODE.1).encode());
    rig.take(registration("stranger", 5002).encode());
    let session = rig.sender(1, 9);
    rig.announce(session, 4, 1);
    if phase == Phase::NobodyAsked {
        return (session, None);
    }
    rig.take(request("d", DECODE.1, 9, &[20, 21, 22, 23]).encode());
    let agent = Some(rig.agent_way().0);
    if phase >= Phase::Writing {
        rig.send(session, &[5, 6]);
    }
    if phase >= Phase::BetweenChunks {
        rig.end_posts(Ok(()));
    }
    if phase >= Phase::WritingTheLast {
        rig.send(session, &[7, 8]);
    }
    if phase == Phase::Succeeded {
        rig.end_posts(Ok(()));
        assert_eq!(rig.words(), ["KV_STATUS 9 4 0 "]);
    }
    (session, agent)
}

/// Lets the event happen. False if the event cannot happen in the phase.
fn happen(rig: &mut Rig, event: Event, (session, agent): (SessionId, Option<PeerId>)) -> bool {
    match event {
        Event::Abort => rig.abort(session),
        Event::Deadline => rig.wait(Duration::from_secs(300)),
        Event::Shutdown => rig.input(Input::Command(Command::Shutdown)),
        Event::ReadyEventFails => {
            let (chunk, error) = (ChunkId(0), ReadyEventError::Panicked);
            rig.input(Input::Command(Command::ReadyEventFailed { session, chunk, error }));
        }
        Event::TheirAbort => {
            rig.hear(&["ABORT", "9", DECODE.0, "5001", "77"]);
            rig.hear(&["ABORT", "9", DECODE.0, "5001", "77"]);
        }
        Event::WayLost => match agent {
            Some(agent) => rig.gone(agent, WayEnd::Lost),
            None => return false,
        },
        Event::PostFails if rig.posts.is_empty() => return false,
        Event::PostFails => {
            let (_, first) = rig.posts.remove(0);
            rig.input(Input::Posted { post: first.id, result: Err(TransportError::PeerGone) });
        }
        Event::OtherMemory if agent.is_none() => return false,
        Event::OtherMemory => rig.take(Registration { slots: 31, ..registration("d", DECODE.1) }.encode()),
        Event::Strays => {
            rig.hear(&["KV_STATUS", "9", "0", "0", "failed"]);
            rig.hear(&["KV_STATUS", "9", "4", "0", ""]);
            rig.hear(&["ABORT_ACK", "9", "0", "77"]);
            rig.hear(&["ABORT", "8", DECODE.0, "5001"]);
            rig.take(registration("d", DECODE.1).encode());
            // Of a room without a sender, every decode rank has its say.
            if agent.is_some() && !rig.states(session).ends_with("Success") {
                rig.take(request("d", DECODE.1, 9, &[1, 2, 3, 4]).encode());
                rig.take(request("stranger", 5002, 9, &[1, 2, 3, 4]).encode());
                rig.take(request("stranger", 5002, 9, &[99]).encode());
                rig.hear(&["ABORT", "9", DECODE.0, "5002"]);
            }
        }
    }
    true
}

#[test]
fn whatever_ends_a_sender_in_whatever_phase_tells_its_decode_rank_once_and_frees_everything() {
    for phase in PHASES {
        for event in EVENTS {
            let case = format!("{event:?} in {phase:?}");
            let mut rig = Rig::prefill();
            let (session, agent) = in_phase(&mut rig, phase);
            if !happen(&mut rig, event, (session, agent)) {
                continue;
            }
            let for_us = |words: Vec<String>| -> Vec<String> {
                words.into_iter().filter(|word| !word.contains("page 99")).collect()
            };
            let mut words = for_us(rig.words());
            // A word goes out before the last post has ended only about what was over before.
            let writing = !rig.posts.is_empty() && phase != Phase::Succeeded;
            assert!(!writing || words.is_empty(), "{case}: {words:?} while a post is in flight");
            let harmless = matches!(event, Event::Strays) || phase == Phase::Succeeded;
            let over = rig.states(session).ends_with("Failed") || phase == Phase::Succeeded;
            assert_eq!(over, !harmless || phase == Phase::Succeeded, "{case}: {}", rig.states(session));
            if !harmless {
                assert_eq!(rig.quarantine().len(), usize::from(!rig.posts.is_empty()), "{case}");
                rig.end_posts(Ok(()));
                assert_eq!(rig.posts.len(), 0, "{case}: nothing is written for a session that has failed");
                words.extend(for_us(rig.words()));
                let failures = words.iter().filter(|word| word.starts_with("KV_STATUS 9 0 0 ")).count();
                let told = agent.is_some() && event != Event::TheirAbort;
                assert_eq!(failures, usize::from(told), "{case}: {words:?}");
            } else if phase < Phase::Succeeded {
                finish(&mut rig, (session, phase));
                words.extend(for_us(rig.words()));
                assert_eq!(words, ["KV_STATUS 9 4 0 "], "{case}");
            }
            if event == Event::TheirAbort {
                rig.hear(&["ABORT", "9", DECODE.0, "5001", "78"]);
                words.extend(rig.words());
                let acks = |ack: &str| words.iter().filter(|word| *word == ack).count();
                assert!(acks("ABORT_ACK 9 0 77") > 0, "{case}: {words:?}");
                assert_eq!(acks("ABORT_ACK 9 0 78"), 1, "{case}: {words:?}");
            }
            assert_eq!((rig.quarantine().len(), rig.pool.num_out()), (0, 0), "{case}");
            assert_eq!(rig.machine.remembered().1, [0; 4], "{case}");
            let next = rig.sender(2, 9);
            assert_eq!(rig.cause(next).is_empty(), event != Event::Shutdown, "the room is free: {case}");
        }
    }
}

/// Gives what is left of the request, and ends all posts well.
fn finish(rig: &mut Rig, (session, phase): (SessionId, Phase)) {
    if phase == Phase::NobodyAsked {
        rig.take(request("d", DECODE.1, 9, &[20, 21, 22, 23]).encode());
    }
    if phase < Phase::Writing {
        rig.send(session, &[5, 6]);
    }
    if phase < Phase::WritingTheLast {
        rig.send(session, &[7, 8]);
    }
    rig.end_posts(Ok(()));
    assert!(rig.states(session).ends_with("Success"), "{}", rig.cause(session));
    let theirs: Vec<_> = (20..24).collect();
    assert_eq!(rig.back(session), Some(theirs.len()));
}
