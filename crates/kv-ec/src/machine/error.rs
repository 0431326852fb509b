//! Why an entry did not become available, and after which reasons the machine tries again.

use std::time::Duration;

use kv_core::{Cause, PeerCause, ReadyEventError, TransferError, TransportError};

use crate::cache::ReserveError;

/// Why a session that fetches or saves an entry failed. After a failed fetch, the caller may encode the item
/// locally, whatever the reason.
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
    /// The transfer from the producer failed, and another try would fail in the same way.
    #[error(transparent)]
    Transfer(Box<TransferError>),
    /// A producer had not given the entry when sessions that name another producer could not wait longer for
    /// that one.
    #[error("the producer had not given the entry when it was the next producer's turn")]
    Turn,
    /// The region of this worker can never hold the entry: the entry is empty or larger than the region. (While
    /// the region is only full, the machine tries again.)
    #[error(transparent)]
    Room(#[from] ReserveError),
    /// The region of this worker can never hold all entries of the [`Request`](crate::Request): this entry does not
    /// fit beside those that come before it. If the region has lost too many blocks since the request was made, all
    /// entries of the request end so, and those that the request had are given back. Encode this item locally, and
    /// [fill](crate::Request::fill) it in once the other fetches have ended, or ask for fewer entries at once.
    #[error("the entries of the request need {blocks} blocks together, and the region has only {region}")]
    TooLargeTogether {
        /// Blocks of all entries of the request, each entry counted once.
        blocks: u64,
        /// Blocks of the region that the entries can have: neither [lost](crate::CacheGauges::lost) nor of other
        /// entries that are [pinned for good](crate::CacheGauges::lost_pins).
        region: u32,
    },
    /// After the [`Request`](crate::Request) had room for its entries, the region has lost so many blocks that the
    /// request does not fit beside earlier ones, which would wait for the entries that this one had. All entries
    /// of the request are given back then, those that were filled too. Ask again, or encode the items locally and
    /// [fill](crate::Request::fill) them in.
    #[error(
        "the region has lost blocks since the request had room for its entries, which need {blocks} blocks \
         together: earlier requests come first, and {region} blocks are left for all"
    )]
    RoomLost {
        /// Blocks of all entries of the request.
        blocks: u64,
        /// Blocks of the region that entries can still have.
        region: u32,
    },
    /// The entries of the [`Request`](crate::Request) do not fit beside those of earlier requests, which keep their
    /// room until they are dropped. The reason of a [`Budget`](EcError::Budget) only: the machine tries again.
    #[error(
        "the entries of the request need {blocks} blocks together, and earlier requests come first, which have \
         claimed {claimed} of {region} blocks"
    )]
    NotInTurn {
        /// Blocks of all entries of the request.
        blocks: u64,
        /// Blocks that requests have claimed, whether their entries have come or not.
        claimed: u64,
        /// Blocks of the region that are neither [lost](crate::CacheGauges::lost) nor of unclaimed entries that are
        /// [pinned for good](crate::CacheGauges::lost_pins).
        region: u32,
    },
    /// The cache of this host has an entry with the same hash and another length.
    #[error(
        "the cache has the entry with {held} bytes, and {asked} bytes are wanted: the two were computed with \
         different settings"
    )]
    OtherLength {
        /// Bytes of the entry in the cache.
        held: u64,
        /// Bytes that the session wanted.
        asked: u64,
    },
    /// The ready event of an entry that was to be saved has failed.
    #[error("the entry was not saved: {0}")]
    NotReady(ReadyEventError),
    /// A transfer still has blocks of the reservation that was to be saved, or another cache made the
    /// reservation.
    #[error(
        "the entry was not saved: blocks of its reservation were taken out, or another cache made the reservation"
    )]
    NotWhole,
    /// The caller ended the session, or dropped the session's handle.
    #[error("the caller ended the session")]
    Aborted,
    /// The worker drains, and the session was opened after it had begun to drain.
    #[error("the worker drains, and takes no new requests")]
    Draining,
    /// The worker has stopped.
    #[error("the worker is stopping")]
    WorkerStopped,
}

impl EcError {
    /// True if another try at the same producer may succeed within the session's budget.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            EcError::Transfer(error) => is_passing(&error.cause),
            EcError::Room(error) => matches!(error, ReserveError::Full { .. }),
            EcError::Turn | EcError::NotInTurn { .. } => true,
            _ => false,
        }
    }

    /// True if a try in which the other side moves the bytes may succeed where this one has failed for good.
    pub(crate) fn is_of_mode(&self) -> bool {
        let EcError::Transfer(error) = self else { return false };
        matches!(
            error.cause,
            Cause::Post(TransportError::Unsupported(_))
                | Cause::ByPeer(PeerCause::DataRefused | PeerCause::Mode { .. })
        )
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
                // The producer has lost its own way to this worker: a producer has one rank.
                | PeerCause::OtherRankLost
                | PeerCause::LeaseExpired
                | PeerCause::LeaseConsumed { .. }
                | PeerCause::UnknownLease { .. }
                | PeerCause::Unknown
        ),
        // What a transport never does, another try does not do, either.
        Cause::Post(TransportError::Unsupported(_)) => false,
        Cause::DeadlineExceeded { .. } | Cause::Post(_) | Cause::LeaseExpired | Cause::WayLost => true,
        _ => false,
    }
}

fn last_reason(last: &Option<Box<EcError>>) -> String {
    last.as_ref().map(|last| format!(" (last try: {last})")).unwrap_or_default()
}
