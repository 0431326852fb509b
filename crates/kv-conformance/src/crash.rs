//! Checks with workers elsewhere that are killed (before, during and after posts), and that come back.

use std::time::Duration;

use bytes::Bytes;
use kv_core::{Op, PeerId, Transport, TransportError, TransportEvent, WayEnd};

use crate::here::{Here, gone, ops};
use crate::other::whole;
use crate::pair::ended;
use crate::{Harness, Job, Other, connect, heard, pattern, snapshot};

const PEER: PeerId = PeerId(1);

pub(crate) fn a_peer_killed_during_our_posts_ends_them_and_is_reported<H: Harness>(harness: &H) {
    for op in ops(harness) {
        let mut here = Here::new(harness);
        let mut other = here.other(Job::Serve);
        connect(&mut here.side.transport, PEER, other.metadata()).unwrap();
        here.run(&mut [&mut other], PEER, 0, op);
        if op == Op::Read {
            assert!(snapshot(&here.side)[0] == pattern(H::FAR_LEN), "READ");
        }
        let posts = 100;
        for id in 1..=posts {
            here.side.transport.post(PEER, whole(id, op, H::FAR_LEN)).unwrap();
        }
        for _ in 0..5 {
            here.turn(&mut [&mut other]);
        }
        other.kill();
        here.until(&mut [], "all ends", |events, _| {
            let ends = events.iter().filter(|event| matches!(event, TransportEvent::Posted { .. })).count();
            ends as u64 > posts && gone(events, PEER).is_some()
        });
        // Nothing comes late.
        here.pass(&mut [], Duration::from_millis(50));
        let (mut failed, mut reports, mut ids) = (0, 0, Vec::new());
        for event in &here.events {
            match event {
                TransportEvent::Posted { post, result } => {
                    ids.push(post.0);
                    failed += u32::from(*result == Err(TransportError::PeerGone));
                    assert!(matches!(result, Ok(()) | Err(TransportError::PeerGone)), "{result:?}");
                }
                TransportEvent::PeerGone { end: WayEnd::Dead { .. }, .. } => reports += 1,
                // The connection may end a moment before the process.
                TransportEvent::PeerGone { end: WayEnd::Lost, .. } => {}
                event => panic!("{event:?}"),
            }
        }
        ids.sort_unstable();
        assert_eq!(ids, (0..=posts).collect::<Vec<u64>>(), "{op:?}");
        assert_eq!(reports, 1, "{op:?}");
        assert!(failed > 0, "it was killed too late to show anything");
        assert_eq!(here.side.transport.send(PEER, Bytes::new()), Err(TransportError::PeerGone));
        let late = here.side.transport.post(PEER, whole(1000, op, 1));
        assert_eq!(late, Err(TransportError::PeerGone));
    }
}

pub(crate) fn an_idle_peer_that_is_killed_is_reported<H: Harness>(harness: &H) {
    let mut here = Here::new(harness);
    let mut other = here.other(Job::Serve);
    connect(&mut here.side.transport, PEER, other.metadata()).unwrap();
    here.side.transport.send(PEER, Bytes::from_static(b"echo")).unwrap();
    here.until(&mut [&mut other], "an echo", |events, _| heard(events, b"echo"));
    other.kill();
    here.until_gone(&mut [], PEER);
    // Frames may come twice; the peer's death may be reported only once.
    here.pass(&mut [], Duration::from_millis(50));
    here.events.retain(|event| !heard(std::slice::from_ref(event), b"echo"));
    here.events.retain(|event| *event != TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost });
    assert!(matches!(here.events[..], [TransportEvent::PeerGone { .. }]), "{:?}", here.events);
}

pub(crate) fn a_killed_writer_is_quiet_once_that_was_promised<H: Harness>(harness: &H) {
    // Several times, because writes may be on their way or not when the peer is killed.
    for _ in 0..4 {
        let mut here = Here::new(harness);
        let mut other = here.other(Job::Write);
        connect(&mut here.side.transport, PEER, other.metadata()).unwrap();
        here.until_written_to(&mut other);
        other.kill();
        let quiet_after = here.until_gone(&mut [], PEER);
        here.stays_quiet(quiet_after);
    }
}

pub(crate) fn a_killed_reader_leaves_its_source_in_service<H: Harness>(harness: &H) {
    if !harness.reads() {
        return;
    }
    let mut here = Here::new(harness);
    // The source is another process, because a crash of the source would end this check, too.
    let mut source = here.other(Job::Serve);
    for round in 0..4 {
        let mut reader = harness.other(Job::Read, source.metadata());
        here.pass(&mut [&mut source, &mut reader], Duration::from_millis(30 + 20 * round));
        assert!(reader.is_alive());
        reader.kill();
        here.pass(&mut [&mut source], Duration::from_millis(50));
        assert!(source.is_alive(), "round {round}: the source died with its reader");
    }
    connect(&mut here.side.transport, PEER, source.metadata()).unwrap();
    here.run(&mut [&mut source], PEER, 1, Op::Read);
    assert!(snapshot(&here.side)[0] == pattern(H::FAR_LEN), "the source's bytes");
    here.side.transport.send(PEER, Bytes::from_static(b"echo")).unwrap();
    here.until(&mut [&mut source], "an echo", |events, _| heard(events, b"echo"));
}

/// The owner of a transport connects a lost peer again and again until the peer's end is told: the pages that the peer
/// may write wait for that. A peer that has died in the meantime must not be refused for ever.
pub(crate) fn a_peer_that_died_before_the_connect_is_told_dead_and_quiet<H: Harness>(harness: &H) {
    for round in 0..4 {
        let mut here = Here::new(harness);
        let writes = round % 2 == 1;
        let mut other = here.other(if writes { Job::Write } else { Job::Serve });
        if writes {
            here.until_written_to(&mut other);
        }
        other.kill();
        connect(&mut here.side.transport, PEER, other.metadata()).unwrap();
        let post = whole(1, Op::Write, H::FAR_LEN);
        let (id, taken) = (post.id, here.side.transport.post(PEER, post));
        let quiet_after = here.until_gone(&mut [], PEER);
        if taken.is_ok() {
            here.until(&mut [], "the post's end", |events, _| ended(events, id).is_some());
            assert!(ended(&here.events, id).is_some_and(|result| result.is_err()));
        } else {
            assert_eq!(taken, Err(TransportError::PeerGone));
        }
        here.stays_quiet(quiet_after);
    }
}

pub(crate) fn a_peer_that_comes_back_under_its_id_serves_its_new_bytes<H: Harness>(harness: &H) {
    let mut here = Here::new(harness);
    for life in 0..3 {
        // The worker of an earlier round, and everything that it was given, is gone.
        let mut other = here.other(Job::Serve);
        connect(&mut here.side.transport, PEER, other.metadata()).unwrap();
        here.events.clear();
        here.side.memory.write(0, 0, &vec![life as u8 + 1; H::FAR_LEN]);
        if harness.reads() {
            here.run(&mut [&mut other], PEER, 10 * life, Op::Read);
            assert!(snapshot(&here.side)[0] == pattern(H::FAR_LEN), "life {life}");
            here.side.memory.write(0, 0, &vec![life as u8 + 1; H::FAR_LEN]);
            here.run(&mut [&mut other], PEER, 10 * life + 1, Op::Write);
            here.side.memory.write(0, 0, &vec![0; H::FAR_LEN]);
            here.run(&mut [&mut other], PEER, 10 * life + 2, Op::Read);
            let memory = snapshot(&here.side);
            assert!(memory[0].iter().all(|byte| *byte == life as u8 + 1), "life {life}");
        } else {
            here.run(&mut [&mut other], PEER, 10 * life, Op::Write);
        }
        here.side.transport.send(PEER, Bytes::from_static(b"echo")).unwrap();
        here.until(&mut [&mut other], "an echo", |events, _| heard(events, b"echo"));
        other.kill();
        here.until_gone(&mut [], PEER);
    }
}

pub(crate) fn death_is_told_of_the_dead_only<H: Harness>(harness: &H) {
    let survivor_id = PeerId(2);
    let mut here = Here::new(harness);
    let (mut victim, mut survivor) = (here.other(Job::Serve), here.other(Job::Write));
    connect(&mut here.side.transport, PEER, victim.metadata()).unwrap();
    connect(&mut here.side.transport, survivor_id, survivor.metadata()).unwrap();
    here.run(&mut [&mut victim, &mut survivor], PEER, 1, Op::Write);
    here.run(&mut [&mut victim, &mut survivor], survivor_id, 2, Op::Write);
    victim.kill();
    here.until_gone(&mut [&mut survivor], PEER);
    here.pass(&mut [&mut survivor], Duration::from_millis(200));
    let ends = here
        .events
        .iter()
        .filter(|event| matches!(event, TransportEvent::PeerGone { peer, .. } if *peer == survivor_id));
    assert_eq!(ends.count(), 0, "{:?}", here.events);
    here.run(&mut [&mut survivor], survivor_id, 3, Op::Write);
    survivor.kill();
    here.until_gone(&mut [], survivor_id);
}
