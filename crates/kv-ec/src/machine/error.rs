//! Why an entry did not become available, and which of the reasons are worth another try.

use std::time::Duration;

use kv_core::{Cause, PeerCause, ReadyEventError, TransferError};

use crate::cache::ReserveError;

/// Why a session failed. Whatever the reason, the caller may encode the item locally.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EcError {
    /// The entry did not come within its budget.
    #[error("not available within {after:?}{}; encode the item locally", last_reason(.last))]
    Budget {
        /// The budget, from the opening of the session.
        after: Duration,
        /// Why the last try failed, if there was one.
        last: Option<Box<EcError>>,
    },
    /// The transfer failed, and another try would fail in the same way.
    #[error(transparent)]
    Transfer(Box<TransferError>),
    /// The region of this worker has no room for the entry.
    #[error(transparent)]
    Room(#[from] ReserveError),
    /// An entry with the same hash is here, and has another length.
    #[error(
        "the entry here has {held} bytes, and {asked} bytes are wanted: one of the two was computed otherwise"
    )]
    OtherLength {
        /// Bytes of the entry that is here.
        held: u64,
        /// Bytes that the session wanted.
        asked: u64,
    },
    /// The ready event of an entry that was to be saved has failed.
    #[error("the entry was not saved: {0}")]
    NotReady(ReadyEventError),
    /// The reservation of an entry that was to be saved lacks blocks, or is of another cache.
    #[error("the entry was not saved: its reservation lacks blocks, or is of another cache")]
    NotWhole,
    /// The caller ended the session, or dropped its handle.
    #[error("the caller ended the session")]
    Aborted,
    /// The worker has stopped.
    #[error("the worker is stopping")]
    WorkerStopped,
}

impl EcError {
    /// True if another try may succeed, at the same producer and within the session's budget.
    pub(super) fn is_passing(&self) -> bool {
        match self {
            EcError::Transfer(error) => is_passing(&error.cause),
            EcError::Room(error) => matches!(error, ReserveError::Full { .. }),
            _ => false,
        }
    }
}

fn is_passing(cause: &Cause) -> bool {
    match cause {
        Cause::ByPeer(cause) => matches!(
            cause,
            PeerCause::EntryNotReady
                | PeerCause::Overloaded
                | PeerCause::DeadlineExceeded
                | PeerCause::DataOperation
                | PeerCause::LeaseExpired
                | PeerCause::LeaseConsumed { .. }
                | PeerCause::UnknownLease { .. }
                | PeerCause::Unknown
        ),
        Cause::DeadlineExceeded { .. } | Cause::Post(_) | Cause::LeaseExpired | Cause::WayLost => true,
        _ => false,
    }
}

fn last_reason(last: &Option<Box<EcError>>) -> String {
    last.as_ref().map(|last| format!(" (last try: {last})")).unwrap_or_default()
}
