//! The versions of the wire that a worker speaks, and the version that two workers speak with each
//! other.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The versions of the wire that this library speaks.
pub const VERSIONS: Versions = Versions { min: 5, max: 5 };

/// A range of versions of the wire, both ends included. Versions are numbered from 1 to 127.
///
/// ```
/// use kv_core::wire::Versions;
/// let (old, new) = (Versions { min: 4, max: 5 }, Versions { min: 5, max: 7 });
/// assert_eq!(old.common(new), Some(5));
/// assert_eq!(old.common(Versions { min: 6, max: 7 }), None);
/// assert_eq!((old.to_string(), Versions { min: 4, max: 4 }.to_string()), ("4 to 5".into(), "4".into()));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Versions {
    /// The oldest version in the range, 1 to 127.
    pub min: u8,
    /// The newest version in the range. A range with `max` below `min` is empty.
    pub max: u8,
}

impl Versions {
    /// True if the version is in the range.
    pub const fn contains(self, version: u8) -> bool {
        self.min <= version && version <= self.max
    }

    /// The newest version that is in both ranges; `None` if no version is.
    pub fn common(self, theirs: Versions) -> Option<u8> {
        let newest = self.max.min(theirs.max);
        (self.contains(newest) && theirs.contains(newest)).then_some(newest)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.min, self.max) {
            (min, max) if min == max => write!(out, "{max}"),
            (min, max) => write!(out, "{min} to {max}"),
        }
    }
}
