//! The books of the claims: who waits, who has room, and what becomes of those when room is gone.

use std::collections::{BTreeMap, BTreeSet};

use crate::machine::EcError;
use crate::request::FillError;
use crate::room::{Entries, Key, Room};

#[derive(Debug, Default)]
pub(super) struct Book {
    room: Room,
    opened: u64,
    waiting: BTreeMap<u64, Entries>,
    granted: BTreeMap<u64, Granted>,
    /// The entries of granted claims, each with the number of these claims.
    claimed: BTreeMap<Key, usize>,
    /// Blocks of the entries of granted claims.
    blocks: u64,
    /// Granted claims of requests that have a part of their entries, and take no more before room comes back.
    held_back: BTreeSet<u64>,
    /// Why claims that have no room and wait for none never will have any.
    ended: BTreeMap<u64, EcError>,
    /// Claims that may take room since, or have ended since, the machine looked last.
    decided: BTreeSet<u64>,
    /// True if room or a granted claim has changed since the granted claims were judged.
    changed: bool,
    /// How often anything was looked up for a claim.
    #[cfg(test)]
    pub(super) looks: u64,
}

#[derive(Debug)]
struct Granted {
    entries: Entries,
    /// Those that have not come and have not failed.
    open: BTreeSet<Key>,
    /// True once an entry is pinned for the request.
    holds: bool,
}

/// The entries of several claims, each entry counted once.
#[derive(Default)]
struct Sum<'a> {
    keys: BTreeSet<&'a Key>,
    blocks: u64,
}

impl Book {
    pub(super) fn claim(&mut self, entries: Entries, room: Room) -> u64 {
        self.set_room(room);
        let number = self.opened;
        self.opened += 1;
        self.waiting.insert(number, entries);
        self.grant();
        number
    }

    pub(super) fn look(&mut self, room: Room) -> BTreeSet<u64> {
        self.set_room(room);
        self.judge();
        std::mem::take(&mut self.decided)
    }

    pub(super) fn waits(&mut self, number: u64) -> Option<EcError> {
        self.count();
        if let Some(why) = self.ended.get(&number) {
            return Some(why.clone());
        }
        // One that lacks no entry any more waits for nothing, though nobody has judged the claims since.
        let is_held_back = |granted: &&Granted| self.held_back.contains(&number) && !granted.open.is_empty();
        let held_back = || self.granted.get(&number).filter(is_held_back);
        let entries = self.waiting.get(&number).or_else(|| held_back().map(|granted| &granted.entries))?;
        let (blocks, region) =
            (entries.values().sum(), self.room.lasting(|key| self.claimed.contains_key(key)));
        Some(EcError::NotInTurn { blocks, claimed: self.blocks, region })
    }

    pub(super) fn complete(&mut self, number: u64) {
        if let Some(entries) = self.waiting.remove(&number) {
            self.take(number, entries);
        }
        if let Some(granted) = self.granted.get_mut(&number) {
            granted.open.clear();
            granted.holds = true;
            self.changed = true;
        }
    }

    pub(super) fn hold(&mut self, number: u64, keys: impl IntoIterator<Item = Key>) -> bool {
        let Some(granted) = self.granted.get_mut(&number) else {
            return !self.waiting.contains_key(&number) && !self.ended.contains_key(&number);
        };
        if self.held_back.contains(&number) {
            return false;
        }
        for key in keys {
            granted.open.remove(&key);
            granted.holds = true;
            self.changed = true;
        }
        true
    }

    pub(super) fn fill(&mut self, number: u64, key: &Key) -> Result<(), FillError> {
        let waits = self.waits(number).filter(EcError::is_passing);
        waits.map_or(Ok(()), |why| Err(FillError::NotInTurn(Box::new(why))))?;
        let Some(granted) = self.granted.get_mut(&number) else { return Ok(()) };
        let to_come = granted.open.iter().filter_map(|key| granted.entries.get(key));
        if !granted.open.is_empty() && !granted.entries.contains_key(key) {
            return Err(FillError::NoRoom { blocks: to_come.sum() });
        }
        granted.holds = true;
        Ok(())
    }

    pub(super) fn give_up(&mut self, number: u64, key: &Key) {
        if let Some(granted) = self.granted.get_mut(&number) {
            self.changed |= granted.open.remove(key);
        }
        let Some(entries) = self.waiting.get_mut(&number) else { return };
        entries.remove(key);
        if entries.is_empty() {
            self.waiting.remove(&number);
        }
        self.grant();
    }

    pub(super) fn end(&mut self, number: u64) {
        self.waiting.remove(&number);
        self.ended.remove(&number);
        self.give_back(number);
        self.decided.remove(&number);
        self.judge();
    }

    fn set_room(&mut self, room: Room) {
        self.changed |= room != self.room;
        self.room = room;
    }

    fn judge(&mut self) {
        if std::mem::take(&mut self.changed) {
            self.fit_granted();
        }
        self.grant();
    }

    /// Grants waiting claims in order of age, up to the first that does not fit yet. Ends those that never will.
    fn grant(&mut self) {
        while let Some((number, entries)) = self.waiting.pop_first() {
            self.count();
            if let Some(never) = self.room.never(&entries) {
                self.ended.insert(number, never);
                self.decided.insert(number);
                continue;
            }
            let further = entries.iter().filter(|(key, _)| !self.claimed.contains_key(key));
            let blocks = self.blocks + further.map(|(_, blocks)| blocks).sum::<u64>();
            let room = self.room.now(|key| self.claimed.contains_key(key) || entries.contains_key(key));
            if blocks > u64::from(room) {
                self.waiting.insert(number, entries);
                return;
            }
            self.take(number, entries);
            self.decided.insert(number);
        }
    }

    /// Judges the granted claims again where they have more than there is now. Of those that lack an entry, the
    /// oldest goes on, and so do the others that fit beside the ones before them. A claim that does not fit waits
    /// again if its request has no entry. Otherwise the claim takes no more until room comes back; or ends, if the
    /// room is gone for good, because the older ones would wait for its entries.
    fn fit_granted(&mut self) {
        let (mut kept, mut held_back) = (Sum::default(), BTreeSet::new());
        let (mut again, mut ended) = (Vec::new(), Vec::new());
        if self.blocks > u64::from(self.room.now(|key| self.claimed.contains_key(key))) {
            for (number, granted) in self.granted.iter().filter(|(_, granted)| !granted.open.is_empty()) {
                let with = kept.with(&granted.entries);
                let has = |key: &Key| kept.keys.contains(key) || granted.entries.contains_key(key);
                let (now, region) = (self.room.now(has), self.room.lasting(has));
                if let Some(never) = self.room.never(&granted.entries) {
                    ended.push((*number, never));
                    continue;
                }
                if !kept.keys.is_empty() && with > u64::from(now) {
                    if !granted.holds {
                        again.push(*number);
                        continue;
                    }
                    if with > u64::from(region) {
                        let blocks = granted.entries.values().sum();
                        ended.push((*number, EcError::RoomLost { blocks, region }));
                        continue;
                    }
                    held_back.insert(*number);
                }
                kept.blocks = with;
                kept.keys.extend(granted.entries.keys());
            }
        }
        self.decided.extend(self.held_back.difference(&held_back));
        for number in again {
            if let Some(Granted { mut entries, open, .. }) = self.give_back(number) {
                entries.retain(|key, _| open.contains(key));
                self.waiting.insert(number, entries);
            }
        }
        for (number, why) in ended {
            self.give_back(number);
            self.ended.insert(number, why);
            self.decided.insert(number);
        }
        self.held_back = held_back;
    }

    fn take(&mut self, number: u64, entries: Entries) {
        for (key, blocks) in &entries {
            let claims = self.claimed.entry(key.clone()).or_default();
            self.blocks += if *claims == 0 { *blocks } else { 0 };
            *claims += 1;
        }
        let open = entries.keys().cloned().collect();
        self.granted.insert(number, Granted { entries, open, holds: false });
        self.changed = true;
    }

    fn give_back(&mut self, number: u64) -> Option<Granted> {
        self.held_back.remove(&number);
        let granted = self.granted.remove(&number)?;
        self.changed = true;
        for (key, blocks) in &granted.entries {
            let Some(claims) = self.claimed.get_mut(key) else { continue };
            *claims -= 1;
            if *claims == 0 {
                self.claimed.remove(key);
                self.blocks -= blocks;
            }
        }
        Some(granted)
    }

    /// Counts a look at a claim, for tests of how many there are.
    fn count(&mut self) {
        #[cfg(test)]
        {
            self.looks += 1;
        }
    }
}

impl Sum<'_> {
    /// Blocks of these entries together with those that are counted.
    fn with(&self, entries: &Entries) -> u64 {
        let further = entries.iter().filter(|(key, _)| !self.keys.contains(key));
        self.blocks + further.map(|(_, blocks)| blocks).sum::<u64>()
    }
}

impl Room {
    /// Why these entries never can be in the region together.
    fn never(&self, entries: &Entries) -> Option<EcError> {
        let (blocks, region) = (entries.values().sum(), self.lasting(|key| entries.contains_key(key)));
        (blocks > u64::from(region)).then_some(EcError::TooLargeTogether { blocks, region })
    }
}
