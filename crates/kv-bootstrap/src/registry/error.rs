//! Why a registration, a renewal or a lookup was refused.

use kv_core::{Incarnation, WorkerId};

/// Why a registration was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// It contradicts what is registered. Restart the engine with one configuration; ranks of a
    /// former life leave when their leases end.
    #[error("{worker}: {field} is {claimed}, but {registered} is registered")]
    Conflict {
        /// Who wanted to register.
        worker: WorkerId,
        /// The field in question.
        field: &'static str,
        /// What is registered.
        registered: String,
        /// What was claimed.
        claimed: String,
    },
    /// This client has no room left. Withdraw ranks that have gone, or raise the server's bound.
    #[error("the client's share is full: {field} would be {would_be}, the limit is {max}")]
    ClientFull {
        /// Which bound.
        field: &'static str,
        /// What it would have come to.
        would_be: usize,
        /// The bound.
        max: usize,
    },
    /// No room. Retry later, or raise the server's bounds.
    #[error("the registry is full: {field} would be {would_be}, the limit is {max}")]
    Full {
        /// Which bound.
        field: &'static str,
        /// What it would have come to.
        would_be: usize,
        /// The bound.
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
    /// The worker is not registered (any more). Register it again.
    #[error("{0} is not registered")]
    Unknown(WorkerId),
    /// Another life of the worker is registered.
    #[error("{worker}: incarnation is {claimed}, but {registered} is registered")]
    OtherIncarnation {
        /// The worker.
        worker: WorkerId,
        /// The life that is registered.
        registered: Incarnation,
        /// The life that asked.
        claimed: Incarnation,
    },
}

/// Why no replica can be handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LookupError {
    /// No engine with this role, service and replica is registered.
    #[error("no engine with this role, service and replica is registered")]
    Unknown,
    /// Some ranks are missing. Ask again later.
    #[error("{registered} of {expected} ranks of the replica have registered")]
    NotReady {
        /// Ranks of the replica that have registered.
        registered: u32,
        /// Ranks of the replica.
        expected: u32,
    },
}
