//! Why a call is refused for now: the command queue is full, or too many sessions are open.

/// The command queue is full: the argument comes back untouched; retry after the next poll. A session that was
/// reclaimed refuses every command for good.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the command queue is full; retry after the next poll")]
pub struct Backpressure<T>(pub T);

/// Why a session could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// As many sessions are open as the configuration allows. Retry when some of them have ended.
    #[error("{open} sessions are open, the limit is {max}")]
    TooManySessions {
        /// How many sessions are open now.
        open: usize,
        /// The most sessions that may be open.
        max: usize,
    },
    /// The command queue is full. Retry after the next poll.
    #[error("the command queue is full; retry after the next poll")]
    Backpressure,
    /// The worker drains: it opens no session, and serves those that are open. Route the request to another
    /// worker.
    #[error("the worker drains, and takes no new requests")]
    Draining,
    /// The worker has stopped.
    #[error("the worker has stopped")]
    WorkerStopped,
}
