//! What a server is refused for now: a place in a bounded queue, a session.

/// A bounded queue was full; the argument comes back untouched. Retry after the next poll.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the command queue is full; retry after the next poll")]
pub struct Backpressure<T>(pub T);

/// Why a session could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// As many sessions are open as the configuration allows. Retry when some have ended.
    #[error("{open} sessions are open, the limit is {max}")]
    TooManySessions {
        /// Open now.
        open: usize,
        /// The limit.
        max: usize,
    },
    /// The command queue is full. Retry after the next poll.
    #[error("the command queue is full; retry after the next poll")]
    Backpressure,
    /// The worker has stopped.
    #[error("the worker has stopped")]
    WorkerStopped,
}
