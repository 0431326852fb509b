//! What is said on the wire: versions, lengths, and frames that nobody understands.

use bytes::Bytes;
use kv_core::proto::Spoken;
use kv_core::trace::Dropped;
use kv_core::wire::{Body, VERSIONS, Versions};
use kv_core::{Cause, PeerCause, TransferMode};
use kv_ec::{EcError, EcPoll, Pin, Want};

use crate::fleet::{BLOCK, Fate, Fleet, InFlight, MS, SECOND, content, hash};

/// Defect 8: the version was never on the wire, so that a mismatch could not be told.
#[test]
fn a_producer_of_another_version_is_named_with_the_versions_of_both() {
    let theirs = Versions { min: VERSIONS.max + 1, max: VERSIONS.max + 3 };
    for (ours, theirs) in [(VERSIONS, theirs), (theirs, VERSIONS)] {
        let mut fleet = Fleet::new();
        let speaking = |versions| {
            move |plan: &mut crate::fleet::Plan| {
                plan.node = Box::new(move |node| node.versions = Spoken::of_another_library(versions));
            }
        };
        let producer = fleet.host_with(8, speaking(theirs));
        let consumer = fleet.host_with(8, speaking(ours));
        fleet.save(producer, 1, 4);
        let session = fleet.fetch(consumer, fleet.want(1, 4, producer, TransferMode::Auto));
        assert!(fleet.end_of(consumer, session, SECOND) < 100 * MS);
        let EcError::Transfer(error) = fleet.failure(consumer, session) else { panic!() };
        let text = error.to_string();
        assert!(text.contains(&ours.to_string()) && text.contains(&theirs.to_string()), "{text}");
        assert!(
            matches!(error.cause, Cause::Versions { .. } | Cause::ByPeer(PeerCause::Versions { .. })),
            "{text}"
        );
        assert_eq!(fleet.at(consumer).store.gauges().filling, 0);
    }
}

/// An entry of 880 blocks of 5120 bytes, in neighbouring blocks or in every second one.
fn large(scattered: bool) -> (Fleet, usize, usize) {
    const BLOCKS: u32 = 880;
    let mut fleet = Fleet::new();
    let [producer, consumer] =
        [2 * BLOCKS, 2 * BLOCKS].map(|blocks| fleet.host_with(blocks, |plan| plan.block_bytes = 5120));
    if scattered {
        for host in [producer, consumer] {
            let store = &fleet.at(host).store;
            for seed in 0..u64::from(2 * BLOCKS) {
                store.commit(store.reserve(&hash(100 + seed), 5120).unwrap()).unwrap();
            }
            for seed in (0..u64::from(2 * BLOCKS)).step_by(2) {
                assert!(store.remove(&hash(100 + seed)));
            }
        }
    }
    fleet.save(producer, 1, BLOCKS.into());
    (fleet, producer, consumer)
}

/// Defect 8: every acknowledgement described the whole region, 5.47 MB for an entry of 4.5 MB.
#[test]
fn answers_for_a_large_entry_have_its_own_descriptors_and_less_than_a_kib_beside() {
    for (scattered, mode) in [
        (false, TransferMode::Push),
        (false, TransferMode::Pull),
        (true, TransferMode::Push),
        (true, TransferMode::Pull),
    ] {
        let (mut fleet, producer, consumer) = large(scattered);
        let bytes = 880 * 5120;
        let want = Want::new(hash(1), bytes, producer.to_string()).with(|want| want.mode = Some(mode));
        let session = fleet.fetch(consumer, want);
        fleet.end_of(consumer, session, SECOND);
        fleet.run_for(SECOND);
        assert!(fleet.received(consumer, session) == content(1, bytes));
        let sum = |from, to| -> usize {
            fleet.lengths.iter().filter(|frame| (frame.0, frame.1) == (from, to)).map(|frame| frame.2).sum()
        };
        let described = |host: usize| {
            let pin = fleet.at(host).store.pin_guard(&hash(1)).unwrap();
            assert_eq!(pin.pages().runs().len(), if scattered { 880 } else { 1 });
            encoded(&pin)
        };
        let (requests, answers) = (sum(consumer, producer), sum(producer, consumer));
        let (there, here) = (described(producer), described(consumer));
        println!(
            "{mode}, scattered {scattered}: requests {requests} B, answers {answers} B, greetings included; \
             descriptors {there} B there, {here} B here"
        );
        let (own_request, own_answer) = if mode == TransferMode::Pull { (0, there) } else { (here, 0) };
        assert!(answers < own_answer + 1024 && requests < own_request + 2048);
    }
}

/// How many bytes the list of an entry's blocks takes on the wire.
fn encoded(pin: &Pin) -> usize {
    rmp_serde::to_vec(pin.pages()).unwrap().len()
}

/// Defect 8: a message that could not be decoded had no answer, and the consumer waited for its whole budget.
#[test]
fn a_frame_that_cannot_be_decoded_costs_a_repetition_and_not_the_budget() {
    for (mode, damaged_by_producer) in [
        (TransferMode::Push, true),
        (TransferMode::Push, false),
        (TransferMode::Pull, true),
        (TransferMode::Pull, false),
    ] {
        let mut fleet = Fleet::new();
        let (producer, consumer) = (fleet.host(8), fleet.host(8));
        fleet.save(producer, 1, 4);
        let mut damaged = 0;
        fleet.fate = Box::new(move |frame: &InFlight| {
            // The first frame of each kind is damaged on its way: each conversation, request and answer.
            let by_producer = frame.from == producer;
            if by_producer != damaged_by_producer || damaged >= 3 {
                return Fate::Arrives;
            }
            damaged += 1;
            Fate::Becomes(Bytes::from(vec![0xc1; frame.frame.len()]))
        });
        let session = fleet.fetch(consumer, fleet.want(1, 4, producer, mode));
        let took = fleet.end_of(consumer, session, 20 * SECOND);
        assert_eq!(fleet.poll(consumer, session), EcPoll::Ready, "{mode} {took:?}");
        assert!(took > MS && took < 10 * SECOND, "{mode}: {took:?}");
        assert_eq!(fleet.received(consumer, session), content(1, 4 * BLOCK));
        let hearer = if damaged_by_producer { consumer } else { producer };
        assert_eq!(fleet.at(hearer).machine.gauges().node.dropped.of(Dropped::Damaged), 3);
    }
}

/// An answer of a newer library, which this one does not know, is no answer: the session ends in its budget.
#[test]
fn an_answer_that_never_comes_ends_the_session_in_its_budget() {
    let mut fleet = Fleet::new();
    let (producer, consumer) = (fleet.host(8), fleet.host(8));
    fleet.save(producer, 1, 4);
    fleet.fate = Box::new(move |frame| {
        if frame.from != producer || matches!(frame.body(), Body::Welcome(_) | Body::HeartbeatAck(_)) {
            return Fate::Arrives;
        }
        Fate::Becomes(Bytes::from_static(&[0xc1]))
    });
    let want = fleet.want(1, 4, producer, TransferMode::Pull).with(|want| want.budget = Some(3 * SECOND));
    let session = fleet.fetch(consumer, want);
    assert!(fleet.end_of(consumer, session, 4 * SECOND) <= 3 * SECOND + MS);
    let error = fleet.failure(consumer, session);
    assert!(matches!(error, EcError::Budget { after, .. } if *after == 3 * SECOND), "{error}");
    // The producer does not keep the entry for a reader that is gone.
    fleet.run_for(60 * SECOND);
    assert_eq!((fleet.at(producer).store.gauges().pinned, fleet.at(consumer).store.gauges().filling), (0, 0));
}
