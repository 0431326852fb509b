//! Which requests may take room of the cache, so that no two of them wait for room that the other one has.
//!
//! ```text
//! claim ─▶ waiting ─ nobody older waits, and its entries fit beside those of all granted claims ─▶ granted
//!             ├─────────────────────── all of its entries are here and pinned ───────────────────────▲
//!             └─ nobody older waits, and the region is too small for its entries alone ─▶ ended
//! ```
//!
//! A request claims room for all of its entries before any of them is pinned or fetched, and has nothing while its
//! claim waits. The claim ends with the request. So a request that has a part of its entries waits only for users
//! of the cache that wait for no request: encoders, readers, and requests that have all of their entries.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::ContentHash;

use crate::machine::EcError;

/// An entry, by the hash of its content and its length in bytes.
pub(crate) type Key = (ContentHash, u64);

/// Entries, each with its blocks.
pub(crate) type Entries = BTreeMap<Key, u64>;

/// The claims of the requests of one cache. Clones share the claims.
#[derive(Debug, Clone, Default)]
pub(crate) struct Claims(Arc<Mutex<Book>>);

/// The room of one request, until the last clone is dropped.
#[derive(Clone)]
pub(crate) struct Claim(Arc<Held>);

struct Held {
    claims: Claims,
    /// The age: older claims have lower numbers.
    number: u64,
}

#[derive(Debug, Default)]
struct Book {
    /// Blocks that entries can have.
    region: u32,
    opened: u64,
    waiting: BTreeMap<u64, Entries>,
    granted: BTreeMap<u64, Entries>,
    /// The entries of granted claims, each with the number of these claims.
    claimed: BTreeMap<Key, usize>,
    /// Blocks of the entries of granted claims.
    blocks: u64,
    /// Why claims that have no room and wait for none never will have any.
    ended: BTreeMap<u64, EcError>,
    /// Claims that were granted in turn, or have ended, since the machine looked last.
    decided: BTreeSet<u64>,
    /// How often anything was looked up for a claim.
    #[cfg(test)]
    looks: u64,
}

impl Claims {
    /// Claims room for these entries, which together fit the region, of which entries can have so many blocks now.
    pub(crate) fn claim(&self, entries: Entries, region: u32) -> Claim {
        let mut book = self.lock();
        book.region = region;
        let number = book.opened;
        book.opened += 1;
        book.waiting.insert(number, entries);
        book.grant();
        Claim(Arc::new(Held { claims: self.clone(), number }))
    }

    /// Judges the claims by the blocks that entries can have now. Returns the numbers of those that were granted or
    /// have ended since the last call, for the one machine that fetches the entries of requests. Costs nothing for
    /// claims that wait behind others.
    pub(crate) fn look(&self, region: u32) -> BTreeSet<u64> {
        let mut book = self.lock();
        book.region = region;
        book.grant();
        std::mem::take(&mut book.decided)
    }

    /// How often anything was looked up for a claim so far.
    #[cfg(test)]
    pub(crate) fn looks(&self) -> u64 {
        self.lock().looks
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Claim {
    /// The number that no other claim has.
    pub(crate) fn number(&self) -> u64 {
        self.0.number
    }

    /// Why the request may not take room yet, or never may; `None` once it may.
    pub(crate) fn waits(&self) -> Option<EcError> {
        let mut book = self.0.claims.lock();
        book.count();
        if let Some(why) = book.ended.get(&self.0.number) {
            return Some(why.clone());
        }
        let blocks = book.waiting.get(&self.0.number)?.values().sum();
        Some(EcError::NotInTurn { blocks, claimed: book.blocks, region: book.region })
    }

    /// Grants the claim of a request that has all of its entries, and so waits for nothing.
    pub(crate) fn grant(&self) {
        let mut book = self.0.claims.lock();
        if let Some(entries) = book.waiting.remove(&self.0.number) {
            book.take(self.0.number, entries);
        }
    }

    /// Takes an entry that will not come out of a claim that waits: neither this request nor those behind it wait
    /// for room that nobody needs. A granted claim keeps the room, in which the entry may be encoded.
    pub(crate) fn give_up(&self, key: &Key) {
        let mut book = self.0.claims.lock();
        let Some(entries) = book.waiting.get_mut(&self.0.number) else { return };
        entries.remove(key);
        if entries.is_empty() {
            book.waiting.remove(&self.0.number);
        }
        book.grant();
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut book = self.claims.lock();
        book.waiting.remove(&self.number);
        book.ended.remove(&self.number);
        book.decided.remove(&self.number);
        if let Some(entries) = book.granted.remove(&self.number) {
            book.give_back(&entries);
        }
        book.grant();
    }
}

impl Book {
    /// Grants waiting claims in order of age, up to the first that does not fit yet. Ends those that never will.
    fn grant(&mut self) {
        while let Some((number, entries)) = self.waiting.pop_first() {
            self.count();
            let (blocks, region) = (entries.values().sum(), self.region);
            if blocks > u64::from(region) {
                self.ended.insert(number, EcError::TooLargeTogether { blocks, region });
                self.decided.insert(number);
                continue;
            }
            let further = entries.iter().filter(|(key, _)| !self.claimed.contains_key(key));
            if self.blocks + further.map(|(_, blocks)| blocks).sum::<u64>() > u64::from(self.region) {
                self.waiting.insert(number, entries);
                return;
            }
            self.take(number, entries);
            self.decided.insert(number);
        }
    }

    /// Counts a look at a claim, for tests of how many there are.
    fn count(&mut self) {
        #[cfg(test)]
        {
            self.looks += 1;
        }
    }

    fn take(&mut self, number: u64, entries: Entries) {
        for (key, blocks) in &entries {
            let claims = self.claimed.entry(key.clone()).or_default();
            self.blocks += if *claims == 0 { *blocks } else { 0 };
            *claims += 1;
        }
        self.granted.insert(number, entries);
    }

    fn give_back(&mut self, entries: &Entries) {
        for (key, blocks) in entries {
            let Some(claims) = self.claimed.get_mut(key) else { continue };
            *claims -= 1;
            if *claims == 0 {
                self.claimed.remove(key);
                self.blocks -= blocks;
            }
        }
    }
}

impl PartialEq for Claim {
    fn eq(&self, other: &Claim) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Claim {}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Claim({})", self.0.number)
    }
}
