//! What a server can do about a cause: an advice for people, and a decision about the request.

use super::bootstrap::BootstrapError;
use super::cause::Cause;
use super::peer::PeerCause;

/// What to do with a request whose pages did not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recovery {
    /// Compute the prompt again, here or on another prefill worker: nothing is wrong with the
    /// request.
    Recompute,
    /// Answer the client with an error: another try would end the same way, or nobody waits for it.
    Fail,
}

impl Cause {
    /// What a server can do about it.
    pub fn advice(&self) -> &'static str {
        match self {
            Cause::Aborted => "nothing to do",
            Cause::WorkerStopped | Cause::ByPeer(PeerCause::WorkerStopped) => "retry on another worker",
            Cause::DeadlineExceeded { .. } => "retry; if it happens often, raise the deadline or add workers",
            Cause::Bootstrap(BootstrapError::Unauthorized) => "configure the bootstrap server's secret",
            Cause::Bootstrap(BootstrapError::Ambiguous { .. }) => "configure one offer for each service",
            Cause::Bootstrap(_) => "check the bootstrap address",
            Cause::Connect(_) => "check that both workers run and share a plane",
            Cause::Incompatible(_) => "configure both engines alike",
            Cause::Versions { .. } | Cause::ByPeer(PeerCause::Versions { .. }) => {
                "recompute, or retry on another peer; upgrade the older side"
            }
            Cause::PeerLost | Cause::WayLost | Cause::PeerRestarted | Cause::PeerUnresponsive { .. } => {
                "retry on another peer, or recompute"
            }
            Cause::ByPeer(_) | Cause::Post(_) => "retry, or recompute",
            Cause::Fence { .. } => "recompute; look into what the device says",
            Cause::LeaseExpired | Cause::StaleGrant { .. } => {
                "recompute; if it happens often, raise kv_lease_duration"
            }
            Cause::GrantPages { .. } | Cause::GrantOutOfRange(_) => {
                "a bug in the router: recompute, and check its transfer parameters"
            }
            Cause::PageCount { .. }
            | Cause::TooManyPages { .. }
            | Cause::InitOrder
            | Cause::BadPages(_)
            | Cause::Layers(_)
            | Cause::BadAux { .. }
            | Cause::AuxOneSided { .. }
            | Cause::UnknownGroup { .. }
            | Cause::BadGroup { .. }
            | Cause::GroupItems { .. } => "a bug in the server: both sides must agree on the request's pages",
            Cause::AmbiguousRoom { .. } => {
                "use a different request id, before the engine's suffix, for each request that is open at the same time"
            }
            Cause::Protocol(_) => "run the same version on both sides",
        }
    }

    /// What a server that lost the request's pages this way should do with the request (vLLM's
    /// `kv_load_failure_policy`).
    pub fn recovery(&self) -> Recovery {
        match self {
            Cause::Aborted | Cause::ByPeer(PeerCause::Aborted) => Recovery::Fail,
            Cause::Incompatible(_)
            | Cause::ByPeer(
                PeerCause::Incompatible(_) | PeerCause::Mode { .. } | PeerCause::AmbiguousRoom { .. },
            )
            | Cause::AmbiguousRoom { .. }
            | Cause::Bootstrap(
                BootstrapError::Address(_) | BootstrapError::Unauthorized | BootstrapError::Ambiguous { .. },
            )
            | Cause::PageCount { .. }
            | Cause::TooManyPages { .. }
            | Cause::InitOrder
            | Cause::BadPages(_)
            | Cause::Layers(_)
            | Cause::BadAux { .. }
            | Cause::AuxOneSided { .. }
            | Cause::UnknownGroup { .. }
            | Cause::BadGroup { .. }
            | Cause::GroupItems { .. } => Recovery::Fail,
            Cause::WorkerStopped
            | Cause::DeadlineExceeded { .. }
            | Cause::Bootstrap(_)
            | Cause::Connect(_)
            | Cause::Versions { .. }
            | Cause::PeerLost
            | Cause::WayLost
            | Cause::PeerRestarted
            | Cause::PeerUnresponsive { .. }
            | Cause::ByPeer(_)
            | Cause::Post(_)
            | Cause::Fence { .. }
            | Cause::LeaseExpired
            | Cause::GrantPages { .. }
            | Cause::GrantOutOfRange(_)
            | Cause::StaleGrant { .. }
            | Cause::Protocol(_) => Recovery::Recompute,
        }
    }
}
