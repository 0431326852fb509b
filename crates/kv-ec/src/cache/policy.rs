//! Which entries are evicted to make room for others, and in which order.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use kv_core::ContentHash;

/// Which entry is evicted first when a reservation needs blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Eviction {
    /// The entry that was committed first.
    Fifo,
    /// The entry whose last use is longest ago. A use is the commit, and the end of a pin after which the entry
    /// is no longer pinned.
    #[default]
    Lru,
}

/// A text that names no [`Eviction`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the eviction policy is {got:?}; it must be fifo or lru")]
pub struct UnknownEviction {
    /// The first 64 characters of the text.
    pub got: String,
}

impl FromStr for Eviction {
    type Err = UnknownEviction;

    fn from_str(text: &str) -> Result<Eviction, UnknownEviction> {
        match text {
            "fifo" => Ok(Eviction::Fifo),
            "lru" => Ok(Eviction::Lru),
            _ => Err(UnknownEviction { got: text.chars().take(64).collect() }),
        }
    }
}

impl fmt::Display for Eviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Eviction::Fifo => "fifo",
            Eviction::Lru => "lru",
        })
    }
}

/// The entries that may be evicted now, in the order in which they make room. An entry's place is drawn when
/// the entry is committed; with LRU, also after each use.
#[derive(Debug)]
pub(super) struct Order {
    eviction: Eviction,
    drawn: u64,
    places: BTreeMap<u64, ContentHash>,
}

impl Order {
    pub(super) fn new(eviction: Eviction) -> Order {
        Order { eviction, drawn: 0, places: BTreeMap::new() }
    }

    /// Puts an entry last that was just committed, and returns its place.
    pub(super) fn add_committed(&mut self, hash: ContentHash) -> u64 {
        self.drawn += 1;
        self.places.insert(self.drawn, hash);
        self.drawn
    }

    /// Puts an entry back whose use has ended, and returns its place: with FIFO the place that it had.
    pub(super) fn add_used(&mut self, hash: ContentHash, place: u64) -> u64 {
        match self.eviction {
            Eviction::Lru => self.add_committed(hash),
            Eviction::Fifo => {
                self.places.insert(place, hash);
                place
            }
        }
    }

    pub(super) fn remove(&mut self, place: u64) {
        self.places.remove(&place);
    }

    /// Takes out the entry that makes room first.
    pub(super) fn pop(&mut self) -> Option<ContentHash> {
        self.places.pop_first().map(|(_, hash)| hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_named_as_they_are_printed_and_other_names_are_refused() {
        for eviction in [Eviction::Fifo, Eviction::Lru] {
            assert_eq!(eviction.to_string().parse(), Ok(eviction));
        }
        let error = "LRU".parse::<Eviction>().unwrap_err();
        assert_eq!(error.to_string(), "the eviction policy is \"LRU\"; it must be fifo or lru");
        assert_eq!("x".repeat(100).parse::<Eviction>().unwrap_err().got.len(), 64);
    }
}
