//! The report of a broken promise.

/// A promise that a world has broken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{invariant}: {what}")]
pub struct Violation {
    /// The name of the invariant.
    pub invariant: &'static str,
    /// What was seen that the invariant does not allow.
    pub what: String,
}
