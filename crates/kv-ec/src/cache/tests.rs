use std::collections::{BTreeMap, BTreeSet};

use kv_core::{PageList, PagePool};
use proptest::prelude::*;

use super::*;

const BLOCK: u32 = 16;

fn hash(number: usize) -> ContentHash {
    ContentHash::new(&format!("image-{number}")).unwrap()
}

/// Bytes that take so many blocks, the last one in part.
fn bytes(blocks: u32) -> u64 {
    u64::from(blocks * BLOCK) - 3
}

fn cache(blocks: u32, eviction: Eviction) -> EncoderCache {
    EncoderCache::new(blocks, BLOCK, eviction)
}

/// A ready entry of so many blocks.
fn save(cache: &mut EncoderCache, number: usize, blocks: u32) {
    let reservation = cache.reserve(&hash(number), bytes(blocks)).unwrap();
    cache.commit(reservation).unwrap();
}

/// The numbers of the entries that are there, ready or not.
fn present(cache: &EncoderCache) -> Vec<usize> {
    (0..10).filter(|number| cache.contains(&hash(*number)).is_some()).collect()
}

#[test]
fn fifo_evicts_what_was_committed_first_whatever_was_used_since() {
    let mut cache = cache(40, Eviction::Fifo);
    (0..4).for_each(|number| save(&mut cache, number, 10));
    let pin = cache.pin(&hash(0)).unwrap();
    cache.unpin(pin);
    save(&mut cache, 4, 15);
    assert_eq!(present(&cache), [2, 3, 4]);
    assert_eq!((cache.gauges().evictions, cache.gauges().evicted_blocks), (2, 20));
}

#[test]
fn lru_evicts_what_was_used_longest_ago_and_asking_is_no_use() {
    let mut cache = cache(40, Eviction::Lru);
    (0..4).for_each(|number| save(&mut cache, number, 10));
    let pin = cache.pin(&hash(0)).unwrap();
    cache.unpin(pin);
    assert_eq!(cache.contains(&hash(1)), Some(true));
    save(&mut cache, 4, 15);
    assert_eq!(present(&cache), [0, 3, 4]);
}

#[test]
fn entries_that_are_filling_or_pinned_are_never_evicted() {
    for eviction in [Eviction::Fifo, Eviction::Lru] {
        let mut cache = cache(40, eviction);
        let filling = cache.reserve(&hash(0), bytes(10)).unwrap();
        (1..4).for_each(|number| save(&mut cache, number, 10));
        let (one, again) = (cache.pin(&hash(1)).unwrap(), cache.pin(&hash(1)).unwrap());
        cache.unpin(one);
        assert_eq!(
            cache.reserve(&hash(9), bytes(21)).unwrap_err(),
            ReserveError::Full { blocks: 21, free: 0, evictable: 20 }
        );
        // A reservation that cannot succeed evicts nothing.
        assert_eq!((present(&cache), cache.gauges().evictions), (vec![0, 1, 2, 3], 0));
        save(&mut cache, 9, 20);
        assert_eq!(present(&cache), [0, 1, 9]);
        assert_eq!(again.pages().len(), 10);
        cache.unpin(again);
        cache.commit(filling).unwrap();
        save(&mut cache, 8, 40);
        assert_eq!(present(&cache), [8]);
    }
}

#[test]
fn sizes_that_no_region_could_hold_are_refused_with_both_values() {
    let mut cache = cache(40, Eviction::Lru);
    let refused = |cache: &mut EncoderCache, bytes| cache.reserve(&hash(1), bytes).unwrap_err();
    assert_eq!(refused(&mut cache, 0), ReserveError::Empty);
    let error = refused(&mut cache, 40 * 16 + 1);
    assert_eq!(error, ReserveError::TooLarge { blocks: 41, region: 40 });
    assert_eq!(error.to_string(), "the entry needs 41 blocks, and the region has only 40");
    assert_eq!(refused(&mut cache, u64::MAX), ReserveError::TooLarge { blocks: 1 << 60, region: 40 });
    save(&mut cache, 1, 40);
    assert_eq!(refused(&mut cache, 1), ReserveError::Known { ready: true });
}

#[test]
fn an_entry_is_ready_only_when_all_of_its_blocks_are_back_in_order() {
    let (mut cache, other) = (cache(8, Eviction::Lru), PagePool::new(8));
    let mut reservation = cache.reserve(&hash(1), bytes(6)).unwrap();
    let mut head = reservation.take_pages();
    assert_eq!((reservation.take_pages().len(), reservation.pages().len()), (0, 6));
    let tail = head.split_off(4);
    let mut reservation = cache.commit(reservation).unwrap_err();
    reservation.put_back(tail).unwrap();
    reservation.put_back(head).unwrap();
    // The first row of the embedding would be read from the fifth block.
    assert!(!reservation.is_whole());
    let mut reservation = cache.commit(reservation).unwrap_err();
    let mut tail = reservation.take_pages();
    let head = tail.split_off(2);
    let stranger = || other.adopt(PageList::from_pages([1]).unwrap()).unwrap();
    // Neither while all blocks are out nor while some are does another cache's block come in.
    other.release(reservation.put_back(stranger()).unwrap_err()).unwrap();
    reservation.put_back(head).unwrap();
    other.release(reservation.put_back(stranger()).unwrap_err()).unwrap();
    reservation.put_back(tail).unwrap();
    assert_eq!(cache.pin(&hash(1)).unwrap_err(), Absent::NotReady);
    cache.commit(reservation).unwrap();
    assert_eq!(cache.contains(&hash(1)), Some(true));
}

#[test]
fn blocks_that_a_transfer_still_has_come_back_after_the_discard() {
    let mut cache = cache(8, Eviction::Lru);
    let mut reservation = cache.reserve(&hash(1), bytes(6)).unwrap();
    let pages = reservation.take_pages();
    cache.discard(reservation);
    // The wire may still write these blocks.
    let full = ReserveError::Full { blocks: 3, free: 2, evictable: 0 };
    assert_eq!((cache.contains(&hash(1)), cache.gauges().filling), (None, 6));
    assert_eq!(cache.reserve(&hash(1), bytes(3)).unwrap_err(), full);
    assert_eq!((cache.room().usable, cache.room().away), (8, 6));
    cache.give_back(pages).unwrap();
    assert_eq!((cache.room().usable, cache.room().away), (8, 0));
    save(&mut cache, 1, 8);
    assert_eq!(cache.gauges().cached, 8);
}

#[test]
fn what_belongs_to_another_cache_changes_nothing() {
    let (mut ours, mut theirs) = (cache(8, Eviction::Lru), cache(8, Eviction::Lru));
    save(&mut ours, 1, 4);
    save(&mut theirs, 1, 4);
    let (pin, reservation) = (theirs.pin(&hash(1)).unwrap(), theirs.reserve(&hash(2), 1).unwrap());
    let held = ours.pin(&hash(1)).unwrap();
    ours.unpin(pin);
    assert_eq!((ours.gauges().pinned, theirs.gauges().lost_pins), (4, 1));
    let mine = ours.reserve(&hash(2), 1).unwrap();
    let reservation = ours.commit(reservation).unwrap_err();
    ours.discard(reservation);
    assert_eq!((ours.contains(&hash(2)), theirs.gauges().lost), (Some(false), 1));
    ours.commit(mine).unwrap();
    ours.unpin(held);
    assert_eq!(ours.gauges().cached, 5);
}

#[test]
fn a_dropped_reservation_or_pin_is_counted_and_its_blocks_are_never_reused() {
    let mut cache = cache(10, Eviction::Lru);
    drop(cache.reserve(&hash(1), bytes(4)).unwrap());
    assert_eq!((cache.contains(&hash(1)), cache.gauges().lost, cache.gauges().entries), (None, 4, 0));
    assert_eq!(cache.pin(&hash(1)).unwrap_err(), Absent::Missing);
    // The hash is free, the blocks are not.
    save(&mut cache, 1, 3);
    drop(cache.pin(&hash(1)).unwrap());
    let full = ReserveError::Full { blocks: 4, free: 3, evictable: 0 };
    assert_eq!(cache.reserve(&hash(2), bytes(4)).unwrap_err(), full);
    let gauges = cache.gauges();
    assert_eq!((gauges.lost, gauges.lost_pins, gauges.pinned, gauges.free), (4, 1, 3, 3));
}

#[test]
fn generations_distinguish_two_lives_of_one_hash() {
    let mut cache = cache(4, Eviction::Lru);
    save(&mut cache, 1, 4);
    let (first, again) = (cache.pin(&hash(1)).unwrap(), cache.pin(&hash(1)).unwrap());
    assert_eq!((first.generation(), first.mirror().list()), (again.generation(), again.pages()));
    assert!(!cache.remove(&hash(1)));
    let before = first.generation();
    cache.unpin(first);
    cache.unpin(again);
    assert!(cache.remove(&hash(1)) && !cache.remove(&hash(1)));
    save(&mut cache, 1, 4);
    let second = cache.pin(&hash(1)).unwrap();
    assert_ne!(second.generation(), before);
    cache.unpin(second);
    assert_eq!((cache.gauges().hits, cache.gauges().misses, cache.gauges().evictions), (3, 0, 0));
}

/// What a user of the cache does next. Numbers choose among what there is.
#[derive(Debug, Clone)]
enum Step {
    Reserve(usize, u32),
    Commit(usize),
    Discard(usize),
    /// Takes the blocks of a reservation out, discards it, and gives the blocks back.
    DiscardTaken(usize),
    Lose(usize),
    Pin(usize),
    Unpin(usize),
    Remove(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (0..8usize, 1..18u32).prop_map(|(hash, blocks)| Step::Reserve(hash, blocks)),
        5 => (0..9usize).prop_map(Step::Commit),
        1 => (0..9usize).prop_map(Step::Discard),
        1 => (0..9usize).prop_map(Step::DiscardTaken),
        1 => (0..60usize).prop_map(Step::Lose),
        4 => (0..8usize).prop_map(Step::Pin),
        4 => (0..9usize).prop_map(Step::Unpin),
        1 => (0..8usize).prop_map(Step::Remove),
    ];
    prop::collection::vec(step, 1..120)
}

/// An entry that the plain model knows to be ready.
#[derive(Debug)]
struct Known {
    blocks: BTreeSet<u32>,
    pins: usize,
    /// When the entry was committed or, with LRU, last used.
    place: usize,
}

/// The cache beside a model of it that searches everything.
struct Rig {
    cache: EncoderCache,
    eviction: Eviction,
    reservations: Vec<Reservation>,
    pins: Vec<Pin>,
    ready: BTreeMap<usize, Known>,
    lost: BTreeSet<u32>,
    clock: usize,
}

const REGION: u32 = 40;

impl Rig {
    fn new(eviction: Eviction) -> Rig {
        let cache = cache(REGION, eviction);
        let (reservations, pins, ready) = (Vec::new(), Vec::new(), BTreeMap::new());
        Rig { cache, eviction, reservations, pins, ready, lost: BTreeSet::new(), clock: 0 }
    }

    /// Blocks in use, after a check that no block is in two hands.
    fn used(&self) -> u32 {
        let mut hands: BTreeSet<u32> = self.lost.clone();
        let mut take = |block| assert!(hands.insert(block), "block {block} is in two hands");
        self.ready.values().flat_map(|entry| &entry.blocks).for_each(|block| take(*block));
        self.reservations.iter().flat_map(|one| one.pages().iter()).for_each(take);
        hands.len() as u32
    }

    fn unpinned(&self) -> u32 {
        self.ready.values().filter(|entry| entry.pins == 0).map(|entry| entry.blocks.len() as u32).sum()
    }

    fn reserve(&mut self, number: usize, blocks: u32) {
        let (free, evictable) = (REGION - self.used(), self.unpinned());
        let filling = self.reservations.iter().any(|one| *one.hash() == hash(number));
        let ready = self.ready.contains_key(&number);
        let reserved = self.cache.reserve(&hash(number), bytes(blocks));
        if filling || ready {
            assert_eq!(reserved.unwrap_err(), ReserveError::Known { ready });
        } else if blocks > free + evictable {
            assert_eq!(reserved.unwrap_err(), ReserveError::Full { blocks, free, evictable });
        } else {
            while REGION - self.used() < blocks {
                let unpinned = self.ready.iter().filter(|(_, entry)| entry.pins == 0);
                let first = *unpinned.min_by_key(|(_, entry)| entry.place).unwrap().0;
                self.ready.remove(&first);
            }
            self.reservations.push(reserved.unwrap());
            assert_eq!(self.reservations.last().unwrap().pages().len(), blocks as usize);
        }
    }

    fn step(&mut self, step: Step) {
        self.clock += 1;
        match step {
            Step::Reserve(number, blocks) => self.reserve(number, blocks),
            Step::Commit(at) if at < self.reservations.len() => {
                let reservation = self.reservations.swap_remove(at);
                let blocks = reservation.pages().iter().collect();
                let number = (0..8).find(|number| hash(*number) == *reservation.hash()).unwrap();
                self.cache.commit(reservation).unwrap();
                self.ready.insert(number, Known { blocks, pins: 0, place: self.clock });
            }
            Step::Discard(at) if at < self.reservations.len() => {
                self.cache.discard(self.reservations.swap_remove(at));
            }
            Step::DiscardTaken(at) if at < self.reservations.len() => {
                let mut reservation = self.reservations.swap_remove(at);
                let pages = reservation.take_pages();
                self.cache.discard(reservation);
                self.cache.give_back(pages).unwrap();
            }
            Step::Lose(at) if at < self.reservations.len() => {
                self.lost.extend(self.reservations.swap_remove(at).pages().iter());
            }
            Step::Pin(number) => match (self.cache.pin(&hash(number)), self.ready.get_mut(&number)) {
                (Ok(pin), Some(entry)) => {
                    assert_eq!(pin.pages().iter().collect::<BTreeSet<_>>(), entry.blocks);
                    entry.pins += 1;
                    self.pins.push(pin);
                }
                (Err(_), None) => {}
                other => panic!("{other:?}"),
            },
            Step::Unpin(at) if at < self.pins.len() => {
                let pin = self.pins.swap_remove(at);
                let number = (0..8).find(|number| hash(*number) == *pin.hash()).unwrap();
                self.cache.unpin(pin);
                let entry = self.ready.get_mut(&number).unwrap();
                entry.pins -= 1;
                if entry.pins == 0 && self.eviction == Eviction::Lru {
                    entry.place = self.clock;
                }
            }
            Step::Remove(number) => {
                let gone = self.ready.get(&number).is_some_and(|entry| entry.pins == 0);
                assert_eq!(self.cache.remove(&hash(number)), gone);
                if gone {
                    self.ready.remove(&number);
                }
            }
            _ => {}
        }
    }

    fn check(&self) {
        let gauges = self.cache.gauges();
        let (used, cached) = (self.used(), self.unpinned());
        let filling = self.reservations.iter().map(|one| one.pages().len() as u32).sum();
        let lost = self.lost.len() as u32;
        let pinned = used - cached - filling - lost;
        let seen = (gauges.free, gauges.filling, gauges.cached, gauges.pinned, gauges.lost);
        assert_eq!(seen, (REGION - used, filling, cached, pinned, lost));
        assert_eq!(gauges.free + gauges.filling + gauges.cached + gauges.pinned + gauges.lost, gauges.blocks);
        assert_eq!(gauges.entries, self.ready.len() + self.reservations.len());
        for number in 0..8 {
            let filling = self.reservations.iter().any(|one| *one.hash() == hash(number));
            let known = if self.ready.contains_key(&number) { Some(true) } else { filling.then_some(false) };
            assert_eq!(self.cache.contains(&hash(number)), known);
        }
    }

    /// Everybody gives back what they have: all blocks that were not lost are free.
    fn end(mut self) {
        self.pins.drain(..).for_each(|pin| self.cache.unpin(pin));
        self.reservations.drain(..).for_each(|one| self.cache.discard(one));
        self.ready.keys().for_each(|number| assert!(self.cache.remove(&hash(*number))));
        let gauges = self.cache.gauges();
        assert_eq!((gauges.free + gauges.lost, gauges.entries, gauges.lost_pins), (REGION, 0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_block_is_in_two_hands_and_gauges_and_evictions_are_those_of_a_plain_model(
        steps in steps(),
        lru in any::<bool>(),
    ) {
        let mut rig = Rig::new(if lru { Eviction::Lru } else { Eviction::Fifo });
        for step in steps {
            rig.step(step);
            rig.check();
        }
        rig.end();
    }
}
