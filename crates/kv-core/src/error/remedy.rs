//! What follows from each cause, row by row: the cause that the peer is told, advice for an
//! operator, and a decision about the request.

use super::bootstrap::BootstrapError;
use super::cause::Cause;
use super::peer::PeerCause;

/// What to do with a request whose pages did not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Recovery {
    /// Compute the prompt again, here or on another prefill worker: nothing is wrong with the
    /// request.
    Recompute,
    /// Answer the client with an error: another try would end in the same way, or nobody waits for
    /// the request any more.
    Fail,
}

const ELSEWHERE: &str = "retry on another worker";
const RETRY: &str = "retry, or recompute";
const UPGRADE: &str = "recompute, or retry on another peer; upgrade the older side";
const OF_SERVER: &str = "a bug in the server: both sides must agree on the request's pages";
const LONGER: &str = "recompute; if it happens often, raise kv_lease_duration";
const OF_ROUTER: &str = "a bug in the router: recompute, and check its transfer parameters";
const ALIKE: &str = "configure both engines alike";
const NOTHING: &str = "nothing to do";
const OTHER_ID: &str =
    "use a different request id, before the engine's suffix, for each request that is open at the same time";

impl Cause {
    /// The cause in the form in which the peer is told it.
    pub fn for_peer(&self) -> PeerCause {
        self.row().0
    }

    /// What an operator or a server can do about the cause, in half a sentence of plain English.
    pub fn advice(&self) -> &'static str {
        self.row().1
    }

    /// What a server that lost the request's pages in this way should do with the request (vLLM:
    /// `kv_load_failure_policy`).
    pub fn recovery(&self) -> Recovery {
        self.row().2
    }

    fn row(&self) -> (PeerCause, &'static str, Recovery) {
        use PeerCause as Told;
        use Recovery::{Fail, Recompute};
        match self {
            Cause::Aborted => (Told::Aborted, NOTHING, Fail),
            Cause::WorkerStopped => (Told::WorkerStopped, ELSEWHERE, Recompute),
            Cause::DeadlineExceeded { .. } => {
                let advice = "retry; if it happens often, raise the deadline or add workers";
                (Told::DeadlineExceeded, advice, Recompute)
            }
            Cause::Bootstrap(error) => {
                let (advice, recovery) = of_bootstrap(error);
                (Told::Internal, advice, recovery)
            }
            Cause::Connect(_) => {
                (Told::Internal, "check that both workers run and share a transport", Recompute)
            }
            Cause::Incompatible(mismatch) => (Told::Incompatible(mismatch.clone()), ALIKE, Fail),
            &Cause::Versions { ours, theirs } => (Told::Versions { ours, theirs }, UPGRADE, Recompute),
            Cause::PeerLost | Cause::WayLost | Cause::PeerRestarted | Cause::PeerUnresponsive { .. } => {
                (Told::OtherRankLost, "retry on another peer, or recompute", Recompute)
            }
            Cause::ByPeer(cause) => {
                let (advice, recovery) = of_peer(cause);
                (cause.passed_on(), advice, recovery)
            }
            &Cause::PageCount { sent, registered } => {
                (Told::PageCount { sent: sent as u64, registered: registered as u64 }, OF_SERVER, Fail)
            }
            &Cause::AuxOneSided { sender, receiver } => {
                (Told::AuxOneSided { sender, receiver }, OF_SERVER, Fail)
            }
            &Cause::GroupItems { group, sent, wanted } => {
                (Told::GroupItems { group, sent, wanted }, OF_SERVER, Fail)
            }
            Cause::TooManyPages { .. }
            | Cause::InitOrder
            | Cause::BadPages(_)
            | Cause::Layers(_)
            | Cause::BadAux { .. }
            | Cause::UnknownGroup { .. }
            | Cause::BadGroup { .. } => (Told::BadArguments, OF_SERVER, Fail),
            Cause::ReadyEvent { .. } => {
                (Told::Internal, "recompute; look for the error in the log of the device", Recompute)
            }
            Cause::Post(_) => (Told::DataOperation, RETRY, Recompute),
            Cause::LeaseExpired => (Told::LeaseExpired, LONGER, Recompute),
            Cause::StaleLease { .. } => (Told::BadArguments, LONGER, Recompute),
            Cause::LeasePages { .. } | Cause::LeaseOutOfRange(_) => {
                (Told::BadArguments, OF_ROUTER, Recompute)
            }
            Cause::AmbiguousRoom { room, other } => {
                (Told::AmbiguousRoom { room: room.clone(), other: other.clone() }, OTHER_ID, Fail)
            }
            Cause::Protocol(_) => (Told::Protocol, "run the same version on both sides", Recompute),
        }
    }
}

fn of_bootstrap(error: &BootstrapError) -> (&'static str, Recovery) {
    match error {
        BootstrapError::Unauthorized => ("configure the bootstrap server's secret", Recovery::Fail),
        BootstrapError::Ambiguous { .. } => ("configure one offer for each service", Recovery::Fail),
        BootstrapError::Address(_) => ("check the bootstrap address", Recovery::Fail),
        _ => ("check the bootstrap address", Recovery::Recompute),
    }
}

fn of_peer(cause: &PeerCause) -> (&'static str, Recovery) {
    match cause {
        PeerCause::WorkerStopped => (ELSEWHERE, Recovery::Recompute),
        PeerCause::Versions { .. } => (UPGRADE, Recovery::Recompute),
        PeerCause::Aborted => (NOTHING, Recovery::Fail),
        PeerCause::EntryMissing => {
            ("encode the input again, here or on another encode worker", Recovery::Recompute)
        }
        PeerCause::EntryNotReady => ("ask again in a moment", Recovery::Recompute),
        PeerCause::EntrySize { .. } => (OF_ROUTER, Recovery::Recompute),
        PeerCause::Incompatible(_) => (ALIKE, Recovery::Fail),
        PeerCause::Mode { .. } => ("configure one transfer mode for both sides", Recovery::Fail),
        PeerCause::AmbiguousRoom { .. } => (OTHER_ID, Recovery::Fail),
        PeerCause::PageCount { .. } | PeerCause::AuxOneSided { .. } | PeerCause::GroupItems { .. } => {
            (OF_SERVER, Recovery::Fail)
        }
        _ => (RETRY, Recovery::Recompute),
    }
}
