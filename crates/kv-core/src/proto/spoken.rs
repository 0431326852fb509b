//! The versions of the wire that a machine offers to its peers.

use crate::wire::{VERSIONS, Versions};

/// Versions of the wire that this library speaks: all of [`VERSIONS`], or a part of them.
///
/// ```
/// use kv_core::proto::{Spoken, SpokenError};
/// use kv_core::wire::{VERSIONS, Versions};
///
/// assert_eq!(Spoken::new(VERSIONS), Ok(Spoken::ALL));
/// let future = Spoken::new(Versions { min: VERSIONS.min, max: 200 });
/// assert_eq!(future, Err(SpokenError::Unknown { field: "versions.max", got: 200, spoken: VERSIONS }));
/// let told = format!("versions.max is 200; this library speaks versions {VERSIONS}");
/// assert_eq!(future.unwrap_err().to_string(), told);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spoken(Versions);

/// Why versions cannot be offered by a machine of this library. Change the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpokenError {
    /// The oldest version is newer than the newest version.
    #[error("versions.min is {min}, and versions.max is {max}: the first must not be above the second")]
    Reversed {
        /// The oldest version that was configured.
        min: u8,
        /// The newest version that was configured.
        max: u8,
    },
    /// The range contains a version that this library does not speak.
    #[error("{field} is {got}; this library speaks versions {spoken}")]
    Unknown {
        /// The end of the range that is not spoken: `versions.min` or `versions.max`.
        field: &'static str,
        /// The version at that end.
        got: u8,
        /// The versions that this library speaks.
        spoken: Versions,
    },
}

impl Spoken {
    /// All versions that this library speaks.
    pub const ALL: Spoken = Spoken(VERSIONS);

    /// These versions, if this library speaks every one of them.
    pub fn new(versions: Versions) -> Result<Spoken, SpokenError> {
        let Versions { min, max } = versions;
        if min > max {
            return Err(SpokenError::Reversed { min, max });
        }
        for (field, got) in [("versions.min", min), ("versions.max", max)] {
            if !VERSIONS.contains(got) {
                return Err(SpokenError::Unknown { field, got, spoken: VERSIONS });
            }
        }
        Ok(Spoken(versions))
    }

    /// The versions of an older or newer library, for tests of upgrades. Nothing is checked.
    #[doc(hidden)]
    pub const fn of_another_library(versions: Versions) -> Spoken {
        Spoken(versions)
    }

    /// The range of versions.
    pub const fn get(self) -> Versions {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_is_reversed_or_not_spoken_is_refused_by_field_with_both_values() {
        let reversed = Spoken::new(Versions { min: 5, max: 4 });
        assert_eq!(reversed, Err(SpokenError::Reversed { min: 5, max: 4 }));
        let (older, newer) = (VERSIONS.min - 1, VERSIONS.max + 1);
        for (versions, field, got) in [
            (Versions { min: older, max: VERSIONS.max }, "versions.min", older),
            (Versions { min: VERSIONS.min, max: newer }, "versions.max", newer),
            (Versions { min: newer, max: newer }, "versions.min", newer),
        ] {
            let unknown = SpokenError::Unknown { field, got, spoken: VERSIONS };
            assert_eq!(Spoken::new(versions), Err(unknown), "{versions}");
        }
        assert_eq!(Spoken::new(VERSIONS).map(Spoken::get), Ok(VERSIONS));
    }
}
