//! Which side moves the bytes, and for how long pages stay put for a side that reads them.
//!
//! With [`TransferMode::Push`] the prefill side writes (seeds/000). With [`TransferMode::Pull`] the
//! decode side reads, and the prefill side pins its pages under a *lease* until they were read
//! (seeds/001). A scheduler programs against the same traits in both.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::id::{Incarnation, SessionId};
use crate::pages::PageList;

/// How long pages wait for their first reader, and after the last heartbeat (vLLM's
/// `kv_lease_duration`).
pub const KV_LEASE_DURATION: Duration = Duration::from_secs(30);
/// How long a decode worker keeps pages for the next turn of a conversation (vLLM's
/// `decoder_kv_blocks_ttl`).
pub const DECODER_KV_BLOCKS_TTL: Duration = Duration::from_secs(480);

/// Which side moves the bytes.
///
/// A receiver acts by its own mode; a sender's mode says what it accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransferMode {
    /// The sender writes into pages that the receiver registered. The sender waits for its
    /// receivers before it asks for pages.
    #[default]
    Push,
    /// The receiver reads from pages that the sender granted. The sender waits for nobody: the
    /// receiver may be chosen when the pages are complete.
    Pull,
    /// On a sender: whatever its receivers do. On a receiver: what the transport is good for with the
    /// peer ([`Directions`](crate::Directions)); where it is good for both, pull if the router carried
    /// a [`LeaseRef`], else push. Over UCX and TCP that is push: reads are slow there, and a reader
    /// that dies takes its source down.
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

/// A text that names no [`TransferMode`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("transfer_mode is {0:?}; it must be push, pull or auto")]
pub struct UnknownMode(String);

/// How long a sender's complete pages stay pinned for readers. They are free at once when every
/// reader has released them, and otherwise when the lease has run out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lease {
    /// For this long, and after every heartbeat for two thirds of it; a heartbeat never shortens
    /// it. Readers send heartbeats six times in this duration.
    Renewable(Duration),
    /// For this long, whatever happens: for a reader that may or may not come, such as the next
    /// turn of a conversation.
    Fixed(Duration),
}

impl Lease {
    /// How long it is granted for at first.
    pub fn duration(self) -> Duration {
        match self {
            Lease::Renewable(duration) | Lease::Fixed(duration) => duration,
        }
    }

    /// How long a heartbeat extends it to, from its arrival; `None` if it does not.
    pub fn extension(self) -> Option<Duration> {
        match self {
            Lease::Renewable(duration) => Some(duration * 2 / 3),
            Lease::Fixed(_) => None,
        }
    }

    /// How often readers should send heartbeats; `None` if they should not.
    pub fn heartbeat_interval(self) -> Option<Duration> {
        match self {
            Lease::Renewable(duration) => Some((duration / 6).max(Duration::from_millis(1))),
            Lease::Fixed(_) => None,
        }
    }
}

/// Names one sender's pages for ever: what a router carries to the reader.
///
/// Neither half is ever used again, so a reference to pages that were consumed, that expired, or
/// that belonged to an earlier life of the worker can not be mistaken for one to others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRef {
    /// Which life of the sender's worker.
    pub incarnation: Incarnation,
    /// The sender's session in it: the lease_id of the lease.
    pub lease_id: SessionId,
    /// The pages, as the router was told them. If given, they must be those that the sender holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pages: Option<PageList>,
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
    fn a_mode_is_read_as_it_is_written() {
        for mode in [TransferMode::Push, TransferMode::Pull, TransferMode::Auto] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        let error = "PULL".parse::<TransferMode>().unwrap_err();
        assert_eq!(error.to_string(), "transfer_mode is \"PULL\"; it must be push, pull or auto");
    }
}
