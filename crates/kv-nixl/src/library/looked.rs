//! Where NIXL was looked for, and what was found there.

use std::fmt;
use std::path::PathBuf;

/// A place that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Looked {
    /// The file that was expected.
    pub path: PathBuf,
    /// Why there.
    pub because: &'static str,
    /// What was found.
    pub outcome: Outcome,
}

/// What was found at a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing.
    Absent,
    /// A file that is of no use, and why.
    Unusable(String),
    /// The library.
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
