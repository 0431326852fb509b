//! Answers and bytes that come too late: they are never taken for what is wanted now.

use kv_core::TransferMode;
use kv_core::wire::Body;
use kv_ec::EcPoll;

use crate::fleet::{BLOCK, Fate, Fleet, InFlight, MS, SECOND, content};

/// A producer whose leases are short, and a consumer.
fn short_leases(fleet: &mut Fleet) -> (usize, usize) {
    let producer = fleet.host_with(16, |plan| plan.machine.lease = 2 * SECOND);
    (producer, fleet.host(8))
}

/// After the lease, the producer's blocks have other bytes, and the entry stands elsewhere.
fn reuse(fleet: &mut Fleet, producer: usize) {
    fleet.replace(producer, 1);
    let Some(block) = fleet.at(producer).store.reserve(&crate::fleet::hash(9), BLOCK).ok() else { panic!() };
    fleet.at(producer).store.commit(block).unwrap();
    fleet.save(producer, 1, 4);
}

/// True for a session that has not ended.
fn goes_on(fleet: &Fleet, host: usize, session: u64) -> bool {
    matches!(fleet.poll(host, session), EcPoll::Waiting | EcPoll::Transferring)
}

/// Defect 2, its first half: a grant that was delayed until its lease was over led to a read of other bytes.
#[test]
fn a_grant_that_comes_after_its_lease_makes_no_entry_ready() {
    let mut fleet = Fleet::new();
    let (producer, consumer) = short_leases(&mut fleet);
    fleet.save(producer, 1, 4);
    fleet.fate =
        Box::new(move |frame| match frame.from == producer && !matches!(frame.body(), Body::Welcome(_)) {
            true => Fate::Waits,
            false => Fate::Arrives,
        });
    let session = fleet.fetch(consumer, fleet.want(1, 4, producer, TransferMode::Pull));
    fleet.run_for(3 * SECOND);
    reuse(&mut fleet, producer);
    // The read that the late grant allows runs at once, and finds other bytes.
    let (grants, others): (Vec<_>, Vec<_>) =
        fleet.take_held().into_iter().partition(|frame| matches!(frame.body(), Body::Granted(_)));
    assert!(!grants.is_empty());
    fleet.deliver(grants);
    fleet.run_for(MS);
    assert_ne!(fleet.poll(consumer, session), EcPoll::Ready);
    fleet.fate = Box::new(|_| Fate::Arrives);
    fleet.deliver(others);
    fleet.end_of(consumer, session, 20 * SECOND);
    assert_eq!(fleet.received(consumer, session), content(1, 4 * BLOCK));
}

/// Defect 2, its second half: a read that ended after its lease counted as good.
#[test]
fn a_read_that_ends_after_its_lease_makes_no_entry_ready() {
    let mut fleet = Fleet::new();
    fleet.by_hand = true;
    let (producer, consumer) = short_leases(&mut fleet);
    fleet.save(producer, 1, 4);
    let session = fleet.fetch(consumer, fleet.want(1, 4, producer, TransferMode::Pull));
    let mut reads = fleet.take_of(consumer);
    assert_eq!(reads.len(), 1);
    // From now on the two do not hear each other, so that the lease runs out.
    fleet.fate = Box::new(|_| Fate::Lost);
    fleet.run_for(3 * SECOND);
    reuse(&mut fleet, producer);
    fleet.carry_out(reads.pop().unwrap());
    fleet.run_for(MS);
    assert_ne!(fleet.poll(consumer, session), EcPoll::Ready);
    fleet.by_hand = false;
    fleet.fate = Box::new(|_| Fate::Arrives);
    fleet.end_of(consumer, session, 40 * SECOND);
    assert_eq!(fleet.received(consumer, session), content(1, 4 * BLOCK));
}

/// Defect 3: an answer named only the hash, so that the answer to a former try counted for the next one.
#[test]
fn a_late_answer_to_a_former_try_is_not_taken_for_the_new_one() {
    for mode in [TransferMode::Push, TransferMode::Pull] {
        let mut fleet = Fleet::new();
        let (producer, consumer) = (fleet.host(16), fleet.host(16));
        fleet.save(producer, 1, 4);
        let answers = move |body: &Body| {
            matches!(body, Body::Granted(_) | Body::Progress(_) | Body::Failed(_) | Body::Registered(_))
        };
        fleet.fate = Box::new(move |frame| match frame.from == producer && answers(&frame.body()) {
            true => Fate::Waits,
            false => Fate::Arrives,
        });
        // The first try is granted, or its bytes are written; nothing of that is heard, and the caller leaves.
        let first = fleet.fetch(consumer, fleet.want(1, 4, producer, mode));
        fleet.run_for(MS);
        fleet.give_up(consumer, first);
        fleet.run_for(MS);
        assert_eq!(fleet.poll(consumer, first), EcPoll::Failed);
        // Meanwhile the entry is gone; the second try meets it while it is being filled anew.
        reuse(&mut fleet, producer);
        fleet.replace(producer, 1);
        let bytes = content(1, 4 * BLOCK);
        let filling = fleet.at(producer).store.reserve(&crate::fleet::hash(1), 4 * BLOCK).unwrap();
        fleet.at(producer).region.write(filling.pages(), 0, &bytes).unwrap();
        let former = fleet.take_held();
        assert!(!former.is_empty(), "the first try had an answer");
        let second = fleet.fetch(consumer, fleet.want(1, 4, producer, mode));
        fleet.by_hand = true;
        fleet.deliver(former);
        assert!(fleet.taken.is_empty() && goes_on(&fleet, consumer, second), "{mode}");
        fleet.by_hand = false;
        // The refusal of the second try is heard, and the third try goes on while the refusal comes once more.
        let refusals = fleet.take_held();
        let copies = refusals.iter().map(InFlight::again).collect();
        fleet.deliver(refusals);
        fleet.run_for(300 * MS);
        fleet.deliver(copies);
        assert!(goes_on(&fleet, consumer, second), "{mode}");
        fleet.at(producer).store.commit(filling).unwrap();
        fleet.fate = Box::new(|_| Fate::Arrives);
        let held = fleet.take_held();
        fleet.deliver(held);
        fleet.end_of(consumer, second, 5 * SECOND);
        assert_eq!(fleet.received(consumer, second), bytes, "{mode}");
    }
}
