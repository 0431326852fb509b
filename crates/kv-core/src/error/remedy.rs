//! What follows from each cause, row by row: the cause that the peer is told, advice for an
//! operator, and a decision about the request.

use super::bootstrap::BootstrapError;
use super::cause::{Cause, Obstacle};
use super::peer::PeerCause;
use crate::transport::TransportError;

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
const SLOW: &str = "retry; if it happens often, raise the deadline or add workers";
const RETRY: &str = "retry, or recompute";
const NEVER: &str = "recompute; each retry between these two workers ends so: change what the cause names";
const NEVER_THERE: &str =
    "recompute; each retry between these two workers ends so: change what the peer's own error names";
const UPGRADE: &str = "recompute, or retry on another peer; upgrade the older side";
const OF_SERVER: &str = "a bug in the server: both sides must agree on the request's pages";
const OF_CALLS: &str = "a bug in the server: correct the call that the cause names";
const LONGER: &str = "recompute; if it happens often, raise kv_lease_duration";
const RESTARTED: &str = "recompute: the pages went with the sender's worker, which was restarted";
const OF_ROUTER: &str = "a bug in the router: recompute, and check its transfer parameters";
const GONE: &str = "recompute: the lease has had all of its readers, or is over";
const SAME_VERSION: &str = "recompute; run the same version on both sides";
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
            Cause::WorkerStopped | Cause::Draining => (Told::WorkerStopped, ELSEWHERE, Recompute),
            Cause::DeadlineExceeded { last, .. } => {
                (Told::DeadlineExceeded, last.as_ref().map_or(SLOW, of_obstacle), Recompute)
            }
            Cause::Bootstrap(error) => {
                let (advice, recovery) = of_bootstrap(error);
                (Told::Internal, advice, recovery)
            }
            Cause::Connect(_) => {
                (Told::Internal, "check that both workers run and share a transport", Recompute)
            }
            Cause::TooManyPeers { .. } => {
                (Told::Overloaded, "raise the limit of peers, or retry on another worker", Recompute)
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
            | Cause::BadGroup { .. } => (Told::BadArguments, OF_CALLS, Fail),
            Cause::ReadyEvent { .. } => {
                (Told::Internal, "recompute; look for the error in the log of the device", Recompute)
            }
            Cause::Post(TransportError::Unsupported(_)) => (Told::DataRefused, NEVER, Recompute),
            Cause::Post(_) => (Told::DataOperation, RETRY, Recompute),
            Cause::LeaseExpired => (Told::LeaseExpired, LONGER, Recompute),
            Cause::StaleLease { .. } => (Told::BadArguments, RESTARTED, Recompute),
            Cause::LeasePages { .. } | Cause::LeaseOutOfRange(_) => {
                (Told::BadArguments, OF_ROUTER, Recompute)
            }
            Cause::AmbiguousRoom { room, other } => {
                (Told::AmbiguousRoom { room: room.clone(), other: other.clone() }, OTHER_ID, Fail)
            }
            Cause::Protocol(_) => (Told::Protocol, SAME_VERSION, Recompute),
        }
    }
}

fn of_bootstrap(error: &BootstrapError) -> (&'static str, Recovery) {
    match error {
        BootstrapError::Unreachable(_) => {
            ("check the bootstrap address, and that the bootstrap server runs", Recovery::Recompute)
        }
        BootstrapError::Busy => {
            ("retry; if it happens often, raise the limits of the bootstrap client", Recovery::Recompute)
        }
        BootstrapError::Address(_) => ("write the bootstrap address as host:port", Recovery::Fail),
        BootstrapError::NotReady { .. } => (
            "retry when all ranks of the engine run; look for a rank that does not start",
            Recovery::Recompute,
        ),
        BootstrapError::UnknownRank => (
            "check that the other engine runs, and which bootstrap server its ranks use",
            Recovery::Recompute,
        ),
        BootstrapError::Draining => ("route the request to another engine", Recovery::Recompute),
        BootstrapError::Unauthorized => {
            ("configure the bootstrap server's secret on this worker", Recovery::Fail)
        }
        BootstrapError::Status(500..) => {
            ("retry; look into the log of the bootstrap server", Recovery::Recompute)
        }
        BootstrapError::Status(_) => {
            ("check that the bootstrap address is that of a bootstrap server", Recovery::Recompute)
        }
        BootstrapError::Refused { .. } => {
            ("give each rank of an engine its own number, and all ranks the same sizes", Recovery::Recompute)
        }
        BootstrapError::Malformed(_) => {
            ("run the same version on the workers and the bootstrap server", Recovery::Recompute)
        }
        BootstrapError::Ambiguous { .. } => ("configure one offer for each service", Recovery::Fail),
        BootstrapError::TimedOut => {
            ("retry; if it happens often, check the load of the bootstrap server", Recovery::Recompute)
        }
    }
}

/// What helps against the obstacle that a session met until its deadline passed.
fn of_obstacle(obstacle: &Obstacle) -> &'static str {
    match obstacle {
        Obstacle::Bootstrap(error) => of_bootstrap(error).0,
        Obstacle::Behind { .. } | Obstacle::Stuck { .. } => {
            "retry on another peer; check the network and the peer"
        }
        Obstacle::NotPermitted { .. } => "retry on another peer; check that the peer runs and answers",
    }
}

fn of_peer(cause: &PeerCause) -> (&'static str, Recovery) {
    match cause {
        PeerCause::WorkerStopped => (ELSEWHERE, Recovery::Recompute),
        PeerCause::Versions { .. } => (UPGRADE, Recovery::Recompute),
        PeerCause::Aborted => (NOTHING, Recovery::Fail),
        PeerCause::DataRefused => (NEVER_THERE, Recovery::Recompute),
        PeerCause::EntryMissing => {
            ("encode the input again, here or on another encode worker", Recovery::Recompute)
        }
        PeerCause::EntryNotReady => ("ask again in a moment", Recovery::Recompute),
        PeerCause::EntrySize { .. } => (OF_ROUTER, Recovery::Recompute),
        PeerCause::Incompatible(_) => (ALIKE, Recovery::Fail),
        PeerCause::Mode { .. } => ("configure one transfer mode for both sides", Recovery::Fail),
        PeerCause::AmbiguousRoom { .. } => (OTHER_ID, Recovery::Fail),
        PeerCause::LeaseExpired => (LONGER, Recovery::Recompute),
        PeerCause::UnknownLease { .. } | PeerCause::LeaseConsumed { .. } => (GONE, Recovery::Recompute),
        PeerCause::Overloaded => (
            "retry; if it happens often, raise the limits of the worker, or add workers",
            Recovery::Recompute,
        ),
        PeerCause::ReceiverCount { .. } => (
            "recompute; a bug in the server: the sender must be opened for all of its receivers",
            Recovery::Recompute,
        ),
        PeerCause::Protocol => (SAME_VERSION, Recovery::Recompute),
        PeerCause::PageCount { .. } | PeerCause::AuxOneSided { .. } | PeerCause::GroupItems { .. } => {
            (OF_SERVER, Recovery::Fail)
        }
        _ => (RETRY, Recovery::Recompute),
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::time::Duration;

    use super::*;
    use crate::error::OsError;
    use crate::id::{EngineId, WorkerId};

    /// Every bootstrap error, with words that its advice must have, and whether another try may help.
    fn bootstrap_errors() -> Vec<(BootstrapError, &'static [&'static str], Recovery)> {
        use Recovery::{Fail, Recompute};
        let refused = OsError::new("connect", ErrorKind::ConnectionRefused);
        let worker = WorkerId { engine: EngineId::new("p").unwrap(), rank: 0 };
        let (first, second) = ("kv 1".to_owned(), "kv 2".to_owned());
        vec![
            (BootstrapError::Unreachable(refused), &["bootstrap address", "server runs"], Recompute),
            (BootstrapError::Busy, &["limits of the bootstrap client"], Recompute),
            (BootstrapError::Address("x".to_owned()), &["host:port"], Fail),
            (
                BootstrapError::NotReady { registered: 1, expected: 2 },
                &["all ranks of the engine"],
                Recompute,
            ),
            (BootstrapError::UnknownRank, &["other engine runs", "which bootstrap server"], Recompute),
            (BootstrapError::Draining, &["another engine"], Recompute),
            (BootstrapError::Unauthorized, &["secret on this worker"], Fail),
            (BootstrapError::Status(500), &["retry", "log of the bootstrap server"], Recompute),
            (BootstrapError::Status(302), &["address is that of a bootstrap server"], Recompute),
            (
                BootstrapError::Refused { status: 409, reason: String::new() },
                &["its own number", "same sizes"],
                Recompute,
            ),
            (BootstrapError::Malformed("cut"), &["same version"], Recompute),
            (BootstrapError::Ambiguous { worker, first, second }, &["one offer"], Fail),
            (BootstrapError::TimedOut, &["retry", "load of the bootstrap server"], Recompute),
        ]
    }

    #[test]
    fn each_bootstrap_error_has_advice_that_fits_that_error_and_no_other() {
        let errors = bootstrap_errors();
        for (error, words, recovery) in &errors {
            let cause = Cause::Bootstrap(error.clone());
            let advice = cause.advice();
            assert!(words.iter().all(|word| advice.contains(word)), "{error}: {advice}");
            assert_eq!(cause.recovery(), *recovery, "{error}");
            let alike = errors.iter().filter(|(other, ..)| of_bootstrap(other).0 == advice).count();
            assert_eq!(alike, 1, "{error}: {advice}");
            // A question that no retry answers is not worth a second try of the request, unless the try goes
            // to another engine.
            let elsewhere = *error == BootstrapError::Draining;
            assert_eq!(error.is_retryable() || elsewhere, *recovery == Recovery::Recompute, "{error}");
        }
    }

    #[test]
    fn what_a_transport_never_does_is_not_to_be_retried() {
        let advice = |error| Cause::Post(error).advice();
        let never = advice(TransportError::Unsupported("WRITE over a route that the owner has not allowed"));
        assert!(never.contains("change what the cause names") && !never.starts_with("retry"));
        assert!(advice(TransportError::PeerGone).starts_with("retry"));
        // Nor by the side that decides about a retry, which hears of the post from its peer.
        let told = Cause::Post(TransportError::Unsupported("READ")).for_peer();
        assert_eq!(told, PeerCause::DataRefused);
        let there = Cause::ByPeer(told).advice();
        assert!(there.contains("each retry") && !there.starts_with("retry"), "{there}");
    }

    #[test]
    fn a_deadline_that_passed_before_an_obstacle_has_the_advice_for_the_obstacle() {
        let after = Duration::from_secs(1);
        let advice = |last| Cause::DeadlineExceeded { after, last }.advice();
        for (error, ..) in bootstrap_errors() {
            let expected = Cause::Bootstrap(error.clone()).advice();
            assert_eq!(advice(Some(Obstacle::Bootstrap(error))), expected);
        }
        let peer = WorkerId { engine: EngineId::new("d").unwrap(), rank: 3 };
        assert!(advice(Some(Obstacle::Stuck { peer: peer.clone(), posts: 2 })).contains("check the network"));
        assert!(advice(Some(Obstacle::NotPermitted { peer })).contains("check that the peer runs"));
        assert!(advice(None).contains("raise the deadline"));
    }
}
