//! Which side moves the bytes, and for how long a sender's pages stay put for a side that reads
//! them.
//!
//! With [`TransferMode::Push`] the prefill side writes, as in SGLang. With [`TransferMode::Pull`]
//! the decode side reads, as in vLLM, and the prefill side pins its pages under a *lease* until
//! they have been read. Schedulers use the same traits in both modes.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::id::{Incarnation, SessionId};
use crate::page_list::PageList;

/// The default duration of a lease: how long complete pages wait for their first reader (vLLM:
/// `kv_lease_duration`).
pub const KV_LEASE_DURATION: Duration = Duration::from_secs(30);
/// How long a decode worker keeps pages for the next turn of a chat (vLLM:
/// `decoder_kv_blocks_ttl`). The deadline of the session that keeps the pages must be longer.
pub const DECODER_KV_BLOCKS_TTL: Duration = Duration::from_secs(480);

/// Which side moves the bytes.
///
/// A receiver acts by its own mode. A sender's mode says what the sender accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransferMode {
    /// The sender writes into pages that the receiver registered. A sender waits for its receivers
    /// before it asks the scheduler for pages.
    #[default]
    Push,
    /// The receiver reads from pages that the sender has leased to it. A sender waits for no
    /// receiver: the router may choose the receiver when the pages are complete.
    Pull,
    /// On a sender: whatever its receivers do. On a receiver: the direction that the transport
    /// recommends for the peer ([`Directions`](crate::Directions)). Where the transport recommends
    /// both, the receiver pulls if the router carried a [`LeaseRef`], and else pushes. On NIXL's
    /// route over TCP that is push: reads are slow there, and a reader that dies may take its source
    /// down.
    Auto,
}

impl std::fmt::Display for TransferMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            TransferMode::Push => "push",
            TransferMode::Pull => "pull",
            TransferMode::Auto => "auto",
        })
    }
}

impl std::str::FromStr for TransferMode {
    type Err = UnknownMode;

    fn from_str(text: &str) -> Result<TransferMode, UnknownMode> {
        match text {
            "push" => Ok(TransferMode::Push),
            "pull" => Ok(TransferMode::Pull),
            "auto" => Ok(TransferMode::Auto),
            other => Err(UnknownMode(other.chars().take(32).collect())),
        }
    }
}

/// The error for a text that names no [`TransferMode`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("transfer_mode is {0:?}; it must be push, pull or auto")]
pub struct UnknownMode(String);

/// How long a sender's complete pages stay pinned for readers. The pages are free at once when
/// every reader has released them, and at the latest when the lease has run out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Lease {
    /// Pinned for this duration at first. Every heartbeat extends the lease to two thirds of the
    /// duration from then on, and never shortens it. Readers send a heartbeat every sixth of the
    /// duration.
    Renewable(Duration),
    /// Pinned for this duration, which nothing extends: for a reader that may or may not come, such
    /// as the next turn of a chat.
    Fixed(Duration),
}

impl Lease {
    /// The duration of the lease when it begins.
    pub fn duration(self) -> Duration {
        match self {
            Lease::Renewable(duration) | Lease::Fixed(duration) => duration,
        }
    }

    /// The time from the arrival of a heartbeat to which the heartbeat extends the lease; `None` if
    /// heartbeats extend nothing.
    pub fn extension(self) -> Option<Duration> {
        match self {
            Lease::Renewable(duration) => Some(duration * 2 / 3),
            Lease::Fixed(_) => None,
        }
    }

    /// How often readers should send heartbeats; `None` if they need not.
    pub fn heartbeat_interval(self) -> Option<Duration> {
        match self {
            Lease::Renewable(duration) => Some((duration / 6).max(Duration::from_millis(1))),
            Lease::Fixed(_) => None,
        }
    }
}

/// The name of one sender's pages under a lease: what a router carries from the sender to the
/// reader.
///
/// No sender reuses the pair of incarnation and lease id, so a reference to pages that were
/// consumed, that expired, or that belonged to an earlier incarnation of the worker is never taken
/// for a reference to other pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LeaseRef {
    /// The incarnation of the sender's worker.
    pub incarnation: Incarnation,
    /// The lease id: the sender's session within that incarnation.
    pub lease_id: SessionId,
    /// The pages, as the sender told them to the router. If given, the sender must hold exactly
    /// these pages. The references to the leases of several ranks share one list, which a router may have made long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pages: Option<Arc<PageList>>,
}

impl LeaseRef {
    /// The lease of a sender's session, whatever the pages under the lease.
    pub fn new(incarnation: Incarnation, lease_id: SessionId) -> LeaseRef {
        LeaseRef { incarnation, lease_id, pages: None }
    }

    /// The same lease, of exactly these pages.
    pub fn of_pages(self, pages: impl Into<Arc<PageList>>) -> LeaseRef {
        LeaseRef { pages: Some(pages.into()), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_divided_as_in_vllm() {
        let lease = Lease::Renewable(KV_LEASE_DURATION);
        assert_eq!(lease.extension(), Some(Duration::from_secs(20)));
        assert_eq!(lease.heartbeat_interval(), Some(Duration::from_secs(5)));
        let fixed = Lease::Fixed(DECODER_KV_BLOCKS_TTL);
        assert_eq!((fixed.duration(), fixed.extension()), (Duration::from_secs(480), None));
        assert_eq!(fixed.heartbeat_interval(), None);
    }

    #[test]
    fn a_transfer_mode_parses_from_the_text_it_prints() {
        for mode in [TransferMode::Push, TransferMode::Pull, TransferMode::Auto] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        let error = "PULL".parse::<TransferMode>().unwrap_err();
        assert_eq!(error.to_string(), "transfer_mode is \"PULL\"; it must be push, pull or auto");
    }
}
