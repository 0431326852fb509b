//! The errors of [`Registry`](crate::Registry): why a registration, a renewal or a lookup was refused.

use kv_core::{Incarnation, WorkerId};

/// Why a registration was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The record contradicts the engine's ranks that are registered, or an incarnation that has been
    /// replaced registers again. Start all ranks of the engine with one configuration; ranks of an earlier
    /// start leave when their leases end.
    #[error("{worker}: {field} is {claimed}, but {registered} is registered")]
    Conflict {
        /// The worker that was to be registered.
        worker: WorkerId,
        /// The field in which the records differ: `role`, `tp_size`, `services`, `place`, `incarnation` …
        field: &'static str,
        /// The value that is registered.
        registered: String,
        /// The value of the refused record.
        claimed: String,
    },
    /// The records of this client address have reached their bound. Withdraw ranks that are gone, or raise
    /// [`RegistryConfig::max_bytes_per_client`](crate::RegistryConfig::max_bytes_per_client).
    #[error("the client's share is full: {field} would be {would_be}, the limit is {max}")]
    ClientFull {
        /// What is bounded: `bytes`.
        field: &'static str,
        /// The value that the registration would have led to.
        would_be: usize,
        /// Largest value that is allowed.
        max: usize,
    },
    /// The registry has reached a bound. Retry later, or raise the bound in
    /// [`RegistryConfig`](crate::RegistryConfig).
    #[error("the registry is full: {field} would be {would_be}, the limit is {max}")]
    Full {
        /// What is bounded: `ranks` or `bytes`.
        field: &'static str,
        /// The value that the registration would have led to.
        would_be: usize,
        /// Largest value that is allowed.
        max: usize,
    },
    /// The record cannot be written as JSON.
    #[error("the record cannot be written as JSON")]
    Encoding,
}

/// Why a registration was not renewed or removed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The worker is not registered, or not any more. Register the worker again.
    #[error("{0} is not registered")]
    Unknown(WorkerId),
    /// Another incarnation of the worker is registered: the worker has been restarted.
    #[error("{worker}: incarnation is {claimed}, but {registered} is registered")]
    OtherIncarnation {
        /// The worker that the request names.
        worker: WorkerId,
        /// The incarnation that is registered.
        registered: Incarnation,
        /// The incarnation that the request names.
        claimed: Incarnation,
    },
}

/// Why a lookup has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LookupError {
    /// No engine with this role, service and replica is registered.
    #[error("no engine with this role, service and replica is registered")]
    Unknown,
    /// All ranks of the replica have left: they drain. Ask for another replica or engine.
    #[error("all ranks of the replica drain, and take no new requests")]
    Left,
    /// Ranks of the replica are missing. Ask again later.
    #[error("{registered} of {expected} ranks of the replica have registered")]
    NotReady {
        /// Ranks of the replica that have registered.
        registered: u32,
        /// Ranks that the replica has when complete.
        expected: u32,
    },
}

impl LookupError {
    /// True if this says more about when there may be an answer than another error does.
    pub(super) fn is_better_than(self, other: &LookupError) -> bool {
        let rank = |error: &LookupError| match error {
            LookupError::Unknown => 0,
            LookupError::Left => 1,
            LookupError::NotReady { .. } => 2,
        };
        rank(&self) > rank(other)
    }
}
