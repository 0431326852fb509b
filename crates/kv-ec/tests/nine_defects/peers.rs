//! Peers that are lost: their blocks come back when no data operation can touch them, and nothing of them is
//! left.

use std::time::Duration;

use kv_core::proto::Limits;
use kv_core::wire::Body;
use kv_core::{Cause, TransferMode, TransportError};
use kv_ec::{CacheGauges, EcError, EcPoll, ReserveError};

use crate::fleet::{BLOCK, Fate, Fleet, MS, SECOND, Taken, content, hash, local_blocks};

/// All blocks of a host are free, but these.
fn books(fleet: &Fleet, host: usize, (filling, cached, pinned): (u32, u32, u32)) {
    let CacheGauges { blocks, free, filling: fills, cached: caches, pinned: pins, lost, .. } =
        fleet.at(host).store.gauges();
    let expected = (blocks - filling - cached - pinned, filling, cached, pinned, 0);
    assert_eq!((free, fills, caches, pins, lost), expected, "free, filling, cached, pinned, lost");
}

/// A consumer whose fetch of an entry from the first producer is in the middle of its bytes; another producer
/// has the entry, too. Returns the producers, the consumer, the session, and the first producer's write.
fn in_the_middle(fleet: &mut Fleet) -> (usize, usize, usize, u64, Taken) {
    (fleet.by_hand, fleet.quiet_after) = (true, 2 * SECOND);
    let (lost, other, consumer) = (fleet.host(8), fleet.host(8), fleet.host(8));
    fleet.save(lost, 1, 4);
    fleet.save(other, 1, 4);
    let session = fleet.fetch(consumer, fleet.want(1, 4, lost, TransferMode::Push));
    fleet.run_for(MS);
    let mut writes = fleet.take_of(lost);
    assert_eq!((writes.len(), fleet.poll(consumer, session)), (1, EcPoll::Transferring));
    (lost, other, consumer, session, writes.pop().unwrap())
}

/// The other producer's write takes place, and the session that wants its entry gets the right bytes.
fn served(fleet: &mut Fleet, other: usize, consumer: usize, session: u64, patience: Duration) {
    let begun = fleet.now;
    while fleet.take_of(other).into_iter().map(|write| fleet.carry_out(write)).count() == 0 {
        assert!(fleet.now - begun < patience, "the other producer was not asked within {patience:?}");
        fleet.run_for(MS);
    }
    fleet.end_of(consumer, session, SECOND);
}

/// Defect 1: blocks of a lost peer leaked, and every later request for their hash waited for its whole
/// budget.
#[test]
fn blocks_of_a_dead_peer_come_back_and_another_producer_serves_meanwhile() {
    let mut fleet = Fleet::new();
    let (lost, other, consumer, first, write) = in_the_middle(&mut fleet);
    fleet.kill(lost);
    assert_eq!(fleet.poll(consumer, first), EcPoll::Failed);
    let EcError::Transfer(error) = fleet.failure(consumer, first) else { panic!() };
    assert_eq!(error.cause, Cause::PeerLost);
    // The last writes of the dead producer may still arrive: nobody gets the blocks.
    books(&fleet, consumer, (4, 0, 0));
    assert_eq!(fleet.at(consumer).store.contains(&hash(1)), None);
    let full = ReserveError::Full { blocks: 5, free: 4, evictable: 0 };
    assert_eq!(fleet.at(consumer).store.reserve(&hash(2), 5 * BLOCK).err(), Some(full));
    let second = fleet.fetch(consumer, fleet.want(1, 4, other, TransferMode::Push));
    served(&mut fleet, other, consumer, second, 100 * MS);
    for part in &write.post.descriptors {
        let late = [0xee; 4 * BLOCK as usize];
        fleet.at(consumer).region.memory().write(part.remote_offset as usize, &late).unwrap();
    }
    assert_eq!(fleet.received(consumer, second), content(1, 4 * BLOCK));
    books(&fleet, consumer, (4, 4, 0));
    fleet.run_for(2 * SECOND);
    books(&fleet, consumer, (0, 4, 0));
}

/// Defect 1, where nothing is known about the peer: only the way to it is lost.
#[test]
fn an_entry_of_an_unreachable_peer_comes_from_the_next_producer_that_is_named() {
    let mut fleet = Fleet::new();
    let (lost, other, consumer, first, write) = in_the_middle(&mut fleet);
    fleet.unreachable.insert(lost);
    fleet.lose_way(consumer, lost);
    fleet.fate = Box::new(move |frame| if frame.from == lost { Fate::Lost } else { Fate::Arrives });
    // The next try waits for the way; it does not wait for the whole budget.
    fleet.run_for(SECOND);
    // Both sessions want the same entry: the one that names the other producer is not left to the lost way.
    let second = fleet.fetch(consumer, fleet.want(1, 4, other, TransferMode::Push));
    served(&mut fleet, other, consumer, second, 11 * SECOND);
    books(&fleet, consumer, (4, 0, 4));
    // The lost producer's write arrives now, and its bytes are others by now.
    fleet.at(lost).region.memory().write(0, &[0xee; 8 * BLOCK as usize]).unwrap();
    fleet.copy(&write);
    for session in [first, second] {
        assert_eq!(fleet.received(consumer, session), content(1, 4 * BLOCK));
    }
    books(&fleet, consumer, (4, 4, 0));
    // The write has ended, and the way is there again: the producer says that it writes no more.
    fleet.ended(write, Ok(()));
    fleet.unreachable.clear();
    fleet.fate = Box::new(|_| Fate::Arrives);
    fleet.run_for(10 * SECOND);
    books(&fleet, consumer, (0, 4, 0));
    books(&fleet, lost, (0, 4, 0));
}

/// Defect 1, where the producer lives and never answers: one try does not take the budget of all.
#[test]
fn a_producer_that_never_answers_keeps_no_session_from_the_next_producer() {
    let mut fleet = Fleet::new();
    let (mute, other, consumer) = (fleet.host(8), fleet.host(8), fleet.host(8));
    fleet.save(mute, 1, 4);
    fleet.save(other, 1, 4);
    fleet.fate = Box::new(move |frame| match frame.body() {
        Body::Granted(_) if frame.from == mute => Fate::Lost,
        _ => Fate::Arrives,
    });
    let first = fleet.fetch(consumer, fleet.want(1, 4, mute, TransferMode::Pull));
    fleet.run_for(MS);
    let second = fleet.fetch(consumer, fleet.want(1, 4, other, TransferMode::Pull));
    assert!(fleet.end_of(consumer, second, 60 * SECOND) <= 10 * SECOND + 100 * MS);
    for session in [first, second] {
        assert_eq!(fleet.received(consumer, session), content(1, 4 * BLOCK));
    }
}

/// Defect 5: an operation that had failed freed its blocks, although the wire was not done with them.
#[test]
fn a_failed_read_frees_no_block_before_the_transport_says_that_it_is_quiet() {
    let mut fleet = Fleet::new();
    fleet.by_hand = true;
    let producer = fleet.host(8);
    let consumer = fleet.host_with(8, |plan| {
        plan.node = Box::new(|node| node.limits.max_post_bytes = 2 * BLOCK);
    });
    fleet.save(producer, 1, 4);
    let session = fleet.fetch(consumer, fleet.want(1, 4, producer, TransferMode::Pull));
    let mut reads = fleet.take_of(consumer);
    assert_eq!(reads.len(), 2);
    let late = reads.pop().unwrap();
    fleet.ended(reads.pop().unwrap(), Err(TransportError::PeerGone));
    // The other read has not ended. The next try takes other blocks, and there are no more.
    fleet.run_for(SECOND);
    let again = fleet.take_of(consumer);
    let mine = local_blocks(&late);
    for read in &again {
        let theirs = local_blocks(read);
        assert!(mine.iter().all(|block| theirs.iter().all(|other| other != block)), "{mine:?}, {theirs:?}");
    }
    books(&fleet, consumer, (8, 0, 0));
    let full = ReserveError::Full { blocks: 1, free: 0, evictable: 0 };
    assert_eq!(fleet.at(consumer).store.reserve(&hash(2), 1).err(), Some(full));
    for read in again {
        fleet.carry_out(read);
    }
    fleet.end_of(consumer, session, SECOND);
    fleet.at(producer).region.memory().write(0, &[0xee; 8 * BLOCK as usize]).unwrap();
    fleet.copy(&late);
    assert_eq!(fleet.received(consumer, session), content(1, 4 * BLOCK));
    books(&fleet, consumer, (4, 4, 0));
    fleet.ended(late, Err(TransportError::PeerGone));
    fleet.run_for(SECOND);
    books(&fleet, consumer, (0, 4, 0));
}

/// Defect 6: handles of peers that were removed were left to a garbage collector.
#[test]
fn nothing_is_left_of_thousands_of_peers_that_came_and_went() {
    const PEERS: u64 = 2000;
    let mut fleet = Fleet::new();
    let worker = fleet.host(64);
    fleet.save(worker, 0, 4);
    for number in 0..PEERS {
        let mode = if number % 2 == 0 { TransferMode::Push } else { TransferMode::Pull };
        let peer = fleet.host(8);
        fleet.save(peer, 1, 4);
        // The peer fetches from the worker, and the worker from the peer; of some, nothing ends.
        fleet.by_hand = number % 3 == 0;
        let theirs = fleet.fetch(peer, fleet.want(0, 4, worker, mode));
        let ours = fleet.fetch(worker, fleet.want(1, 4, peer, mode));
        if !fleet.by_hand {
            assert_eq!((fleet.poll(peer, theirs), fleet.poll(worker, ours)), (EcPoll::Ready, EcPoll::Ready));
            assert_eq!(fleet.received(worker, ours), content(1, 4 * BLOCK));
            assert!(fleet.at(worker).store.remove(&hash(1)));
        }
        fleet.kill(peer);
        // What the dead peer was to get or to give ends at the transport.
        for taken in fleet.take_of(worker) {
            fleet.ended(taken, Err(TransportError::PeerGone));
        }
        fleet.run_for(SECOND);
        assert_ne!(fleet.poll(worker, ours), EcPoll::Transferring);
    }
    fleet.run_for(400 * SECOND);
    books(&fleet, worker, (0, 4, 0));
    let gauges = fleet.at(worker).machine.gauges();
    assert_eq!((gauges.waiting, gauges.transfers, gauges.answers), (0, 0, 0));
    let node = gauges.node;
    let left = [node.peers, node.senders, node.receivers, node.registrations, node.incoming, node.targets];
    assert_eq!(
        (left, node.sources, node.numbers, node.posts, node.draining),
        ([0; 6], 0, 0, 0, 0),
        "{node:?}"
    );
    assert_eq!((node.timers, node.lookups, node.ended_leases, node.failed_rooms), (0, 0, 0, 0), "{node:?}");
    assert!(node.addresses <= Limits::default().max_addresses, "{node:?}");
    assert_eq!(fleet.ways, 0, "every way that was opened is closed");
}

/// A peer whose answers are lost is no reason to keep its blocks, or the sessions that want its entries.
#[test]
fn a_peer_that_falls_silent_ends_every_session_in_its_budget() {
    for mode in [TransferMode::Push, TransferMode::Pull] {
        let mut fleet = Fleet::new();
        let (producer, consumer) = (fleet.host(8), fleet.host(8));
        fleet.save(producer, 1, 4);
        fleet.fate = Box::new(move |frame| match frame.from == producer {
            true => Fate::Lost,
            false => Fate::Arrives,
        });
        let want = fleet.want(1, 4, producer, mode).with(|want| want.budget = Some(5 * SECOND));
        let session = fleet.fetch(consumer, want);
        assert!(fleet.end_of(consumer, session, 6 * SECOND) <= 5 * SECOND + MS);
        let error = fleet.failure(consumer, session);
        assert!(matches!(error, EcError::Budget { .. } | EcError::Transfer(_)), "{error}");
        fleet.kill(producer);
        fleet.run_for(60 * SECOND);
        books(&fleet, consumer, (0, 0, 0));
    }
}
