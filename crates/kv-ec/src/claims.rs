//! Which requests may take room of the cache, so that no two of them wait for room that the other one has.
//!
//! ```text
//!             ┌────────────────── room is gone, and the request has no entry ──────────────────┐
//!             ▼                                                                                │
//! claim ─▶ waiting ─ nobody older waits, and its entries fit beside those of all granted claims ─▶ granted
//!             ├─────────────────────── all of its entries are here and pinned ──────────────────▲  │
//!             └─ nobody older waits, and the region is too small for its entries alone ─▶ ended ◀──┘
//!                                                                     room is gone for good
//! ```
//!
//! A request claims room for all of its entries before any of them is pinned or fetched, and has nothing while its
//! claim waits. The claim ends with the request. So a request that has a part of its entries waits only for users
//! of the cache that wait for no request: encoders, readers, and requests that have all of their entries.
//!
//! Room may go after claims were granted (`book.rs`): blocks are lost, entries are pinned for good, and transfers
//! that were given up keep blocks for a while. Then the oldest request that lacks an entry goes on, and the others
//! go on as far as they fit beside it.

mod book;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::book::Book;
use crate::machine::EcError;
use crate::request::FillError;
use crate::room::{Entries, Key, Room};

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

impl Claims {
    /// Claims room for these entries, which together fit the region, of which requests can have so much now.
    pub(crate) fn claim(&self, entries: Entries, room: Room) -> Claim {
        let number = self.lock().claim(entries, room);
        Claim(Arc::new(Held { claims: self.clone(), number }))
    }

    /// Judges the claims by the room that there is now. Returns the numbers of those that were granted or have
    /// ended since the last call, for the one machine that fetches the entries of requests. Costs nothing for
    /// claims that wait behind others.
    pub(crate) fn look(&self, room: Room) -> BTreeSet<u64> {
        self.lock().look(room)
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
        self.0.claims.lock().waits(self.0.number)
    }

    /// Why the request never may take room; `None` if it may, or waits.
    pub(crate) fn has_ended(&self) -> Option<EcError> {
        self.waits().filter(|why| !why.is_passing())
    }

    /// Grants the claim of a request that has all of its entries, and so waits for nothing.
    pub(crate) fn grant(&self) {
        self.0.claims.lock().complete(self.0.number);
    }

    /// Lets the request have these entries, which are pinned. False, and they must be given back, if the request
    /// may not take room.
    pub(crate) fn hold(&self, keys: impl IntoIterator<Item = Key>) -> bool {
        self.0.claims.lock().hold(self.0.number, keys)
    }

    /// Lets the request have an entry that was encoded locally, unless others may wait for the room.
    pub(crate) fn fill(&self, key: &Key) -> Result<(), FillError> {
        self.0.claims.lock().fill(self.0.number, key)
    }

    /// Takes an entry that will not come out of a claim that waits: neither this request nor those behind it wait
    /// for room that nobody needs. A granted claim keeps the room, in which the entry may be encoded.
    pub(crate) fn give_up(&self, key: &Key) {
        self.0.claims.lock().give_up(self.0.number, key);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.claims.lock().end(self.number);
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
