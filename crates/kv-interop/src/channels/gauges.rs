//! What side channels have counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::connection::Over;

/// Counts of a worker's side channels and of its agents' notifications, since the worker's transport was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ChannelGauges {
    /// Messages of peers that were passed to the worker.
    pub messages: u64,
    /// Messages that were not expected, and notifications without room: dropped.
    pub dropped: u64,
    /// Connections that were closed because the peer does not speak ZMTP 3, or passed a bound.
    pub violated: u64,
    /// Connections to the listening socket that were closed for others: there was no place, the handshake took
    /// too long, or unfinished messages took too much memory.
    pub refused: u64,
}

/// A handle that reads the counts while the worker runs.
#[derive(Debug, Clone, Default)]
pub struct ChannelCounts(pub(crate) Arc<Counters>);

impl ChannelCounts {
    /// Reads the counts, each at its own moment.
    pub fn gauges(&self) -> ChannelGauges {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Counters { messages, dropped, violated, refused } = &*self.0;
        ChannelGauges {
            messages: read(messages),
            dropped: read(dropped),
            violated: read(violated),
            refused: read(refused),
        }
    }
}

/// The counts that [`ChannelGauges`] describes.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    messages: AtomicU64,
    dropped: AtomicU64,
    violated: AtomicU64,
    refused: AtomicU64,
}

impl Counters {
    pub(crate) fn message(&self) {
        self.messages.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn dropped(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of a connection, if the peer's bytes are the reason.
    pub(crate) fn violated(&self, over: &Over) {
        if let Over::Violated = over {
            self.violated.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }
}
