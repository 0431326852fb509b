//! Which versions of the wire a worker speaks, and which one two workers speak with each other.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The versions that this library speaks.
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
    /// The oldest version.
    pub min: u8,
    /// The newest version.
    pub max: u8,
}

impl Versions {
    /// True if the version is one of these.
    pub const fn contains(self, version: u8) -> bool {
        self.min <= version && version <= self.max
    }

    /// The newest version that both ranges have; `None` if they have none in common.
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
