//! How loud each event is.

use std::time::Duration;

use kv_core::TransportError;
use kv_core::trace::KvWhat;
use tracing::Level;

use crate::recording::is_abort;

/// A quarantine that lasts so long was no mere exchange of an abort and its acknowledgement.
const LONG: Duration = Duration::from_secs(1);

/// The level of an event: one line at `info` for each request that succeeds or is aborted, and one at `warn` for
/// each that fails; what an operator may have to act on is a `warn`, too. A peer can cause neither without a
/// bound: see [`Budget`](crate::budget::Budget).
pub(crate) fn level(what: &KvWhat) -> Level {
    match what {
        KvWhat::Failed(failure) if !is_abort(&failure.cause) => Level::WARN,
        KvWhat::QuarantineEnded { lasted, .. } if *lasted >= LONG => Level::WARN,
        // A transport that does not lead to the peer, in the worker's list before one that does.
        KvWhat::WayFailed { pause: None, .. } | KvWhat::ConnectFailed(TransportError::Metadata(_)) => {
            Level::DEBUG
        }
        KvWhat::Failed(_) | KvWhat::Ended | KvWhat::PeerBack => Level::INFO,
        KvWhat::PeerRefuses(_)
        | KvWhat::ConnectFailed(_)
        | KvWhat::WayFailed { .. }
        | KvWhat::WayLost
        | KvWhat::PeerGivenUp { .. }
        | KvWhat::PeerDead { .. }
        | KvWhat::PeerRestarted => Level::WARN,
        KvWhat::Said(_) | KvWhat::Heard(_) | KvWhat::PagesBack { .. } | KvWhat::ItemsBack { .. } => {
            Level::TRACE
        }
        _ => Level::DEBUG,
    }
}
