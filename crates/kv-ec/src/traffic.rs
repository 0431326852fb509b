//! Counts of what the handles of a worker wanted, and of what the worker fetched and gave.

use std::sync::atomic::{AtomicU64, Ordering};

/// Declares the counters once for both forms: atomics for the threads that count, and plain numbers for the
/// caller.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// Counts of what the handles of a worker wanted, and of what the worker fetched and gave, since the
        /// worker was started. Each count is exact, but the counts are not read in one instant.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Traffic {
            $($(#[$doc])* pub $name: u64,)+
        }

        /// The counters, for counting from any thread.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)+
        }

        impl Counters {
            pub(crate) fn read(&self) -> Traffic {
                Traffic { $($name: self.$name.0.load(Ordering::Relaxed),)+ }
            }
        }
    };
}

counters! {
    /// Wanted entries that the cache had.
    here,
    /// Wanted entries for which a session was opened: the cache did not have them, or their request waits for room.
    deferred,
    /// Sessions that ended without their entry, whatever the reason, aborts included.
    failed,
    /// Tries that failed. A try that failed for a reason that may pass is repeated within the budget.
    failed_tries,
    /// Entries that came from producers: one for each transfer, however many sessions wanted the entry.
    fetched,
    /// Bytes of the entries that came from producers.
    fetched_bytes,
    /// Requests of peers that ended with all bytes written or read.
    served,
    /// Requests of peers that were refused.
    refused,
}

/// A number that only rises.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }
}
