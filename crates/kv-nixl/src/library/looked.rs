//! Where NIXL was looked for, and what was found there.

use std::fmt;
use std::path::PathBuf;

/// A place where NIXL was looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Looked {
    /// The path at which the library was expected.
    pub path: PathBuf,
    /// Why the search looks there: a variable, a script, or a habit of the system.
    pub because: &'static str,
    /// What the search found at the path.
    pub outcome: Outcome,
}

/// What the search found at a place.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// There is no file.
    Absent,
    /// There is a file that cannot be used, for this reason.
    Unusable(String),
    /// There is a library that can be used, or a file that was not tried.
    Usable,
}

impl fmt::Display for Looked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): ", self.path.display(), self.because)?;
        match &self.outcome {
            Outcome::Absent => f.write_str("not there"),
            Outcome::Unusable(reason) => f.write_str(reason),
            Outcome::Usable => f.write_str("usable"),
        }
    }
}
