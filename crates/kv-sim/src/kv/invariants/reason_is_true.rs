//! The reason of a failure names what has happened: an abort if a side has aborted, a deadline if it has
//! passed, a lost peer if the peer was lost.

use kv_core::{BootstrapError, Cause, PeerCause, TransferError};

use crate::kv::fact::{Fact, KvFact, View};
use crate::kv::invariant::{Invariant, Verdict};
use crate::kv::ledger::{Leg, LegId, Side};
use crate::kv::params::Faults;

#[derive(Default, Clone)]
pub(crate) struct ReasonIsTrue;

impl Invariant for ReasonIsTrue {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        match *fact {
            Fact::Own(KvFact::Status { leg, failure: Some(failure), .. }) => match lie(view, leg, failure) {
                Some(why) => Err(format!("leg {leg} fails with {:?}, but {why}", failure.cause)),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }
}

/// Why the reason of a failure cannot be true; `None` if it can.
fn lie(view: &View<'_>, leg: LegId, failure: &TransferError) -> Option<&'static str> {
    let known = &view.ledger.legs[leg];
    let life = &view.lives[known.life?];
    let params = view.params;
    let misfit = params.misfit.is_some();
    // A host that has drained is stopped, and started anew.
    let quiet = params.is_gentle() && params.physics.chaos.drains == 0;
    let (untrue, why) = match &failure.cause {
        Cause::Aborted => (!known.aborted, "its scheduler did not abort it"),
        Cause::WorkerStopped => (!life.shut_down, "its host was not shut down"),
        Cause::Draining => (life.draining.is_none(), "its host does not drain"),
        Cause::Bootstrap(BootstrapError::Draining) => {
            (!view.was_told_of_a_drain(leg), "no bootstrap server has said so")
        }
        Cause::DeadlineExceeded { last: None, .. } if is_held_up(view, leg) => {
            (true, "it waited for a post of its own that has not ended")
        }
        Cause::DeadlineExceeded { .. } => {
            (life.clock.local(view.now) < known.deadline, "its deadline has not passed")
        }
        Cause::Connect(_) => (quiet, "every connect succeeds"),
        Cause::Incompatible(_) => (!misfit, "all caches fit"),
        Cause::AmbiguousRoom { .. } => (!params.suffixed, "ids have no suffixes here"),
        Cause::PeerLost | Cause::WayLost | Cause::PeerRestarted | Cause::PeerUnresponsive { .. } => {
            (quiet, "no host or connection fails")
        }
        Cause::PageCount { .. } if params.unequal.is_some() => {
            (!view.ledger.is_miscounted(known), "the tokens are the same")
        }
        Cause::PageCount { sent, registered } => (sent == registered, "the counts are equal"),
        Cause::AuxOneSided { sender, receiver } => (sender == receiver, "both sides say the same"),
        Cause::GroupItems { sent, wanted, .. } => (sent == wanted, "both sides say the same"),
        Cause::Post(_) => (life.posts_failed == 0, "none of its host's posts failed"),
        Cause::TooManyPages { .. } | Cause::InitOrder | Cause::BadPages(_) | Cause::BadAux { .. } => {
            (!known.misused, "its scheduler made no mistake")
        }
        Cause::LeaseExpired => (!lease_may_be_over(view, leg), "no lease has run out"),
        Cause::StaleLease { .. } => (quiet, "no host was restarted"),
        Cause::LeasePages { .. } | Cause::LeaseOutOfRange(_) => (true, "references are right"),
        Cause::Protocol(_) => (true, "nobody breaks the protocol"),
        Cause::ByPeer(cause) => (!peer_said(view, leg, cause), "its peer cannot have said so"),
        _ => (false, ""),
    };
    untrue.then_some(why)
}

/// True if a post of a sender does not end, although the receiver still waits for its bytes.
fn is_held_up(view: &View<'_>, leg: LegId) -> bool {
    let of = |hold: u32| view.ledger.holds[hold as usize].leg;
    view.flights.iter().any(|flight| {
        !flight.over
            && flight.stuck
            && flight.pieces.iter().all(|piece| {
                piece.local_hold != 0
                    && piece.remote_hold != 0
                    && of(piece.local_hold) == leg
                    && view.ledger.legs[of(piece.remote_hold)].is_open()
            })
    })
}

/// A lease runs from the moment at which the last page was given.
fn lease_may_be_over(view: &View<'_>, leg: LegId) -> bool {
    let known = &view.ledger.legs[leg];
    if known.side == Side::Receiver {
        return peer_said(view, leg, &PeerCause::LeaseExpired);
    }
    // A scheduler that has given too many may hear of the lease first, if its host was stopped.
    let whole = known.pages.len() >= known.num_pages && known.inited_at.is_some();
    whole && !known.must_succeed
}

/// True if the deadline of a half is over by a clock that runs a tenth faster than the half's own.
fn is_almost_due(view: &View<'_>, leg: &Leg) -> bool {
    let Some(life) = leg.life else { return false };
    let left = leg.deadline.since(view.lives[life].clock.local(view.now));
    left.as_nanos() * 10 <= u128::from(view.now.saturating_sub(leg.opened_at))
}

fn peer_said(view: &View<'_>, leg: LegId, cause: &PeerCause) -> bool {
    let known = &view.ledger.legs[leg];
    let mut others = view.ledger.legs.iter().filter(|other| known.meets(other) && other.is_of(known));
    let params = view.params;
    match cause {
        PeerCause::Aborted
        | PeerCause::DataOperation
        | PeerCause::DataRefused
        | PeerCause::BadArguments
        | PeerCause::Internal => others.any(|other| other.told.as_ref() == Some(cause)),
        PeerCause::PageCount { .. } if params.unequal.is_some() => view.ledger.is_miscounted(known),
        PeerCause::PageCount { sent, registered } => sent != registered,
        PeerCause::ReceiverCount { .. } => false,
        PeerCause::AuxOneSided { sender, receiver } => sender != receiver,
        PeerCause::GroupItems { sent, wanted, .. } => sent != wanted,
        PeerCause::LeaseExpired => others.any(|other| other.told.as_ref() == Some(cause)),
        // Few are remembered in a tiny world.
        PeerCause::UnknownLease { .. } => params.limits.max_ended_leases < 10,
        PeerCause::AmbiguousRoom { .. } => params.suffixed,
        PeerCause::Mode { .. } => false,
        PeerCause::WorkerStopped => params.physics.chaos.shutdowns + params.physics.chaos.drains > 0,
        PeerCause::Incompatible(_) => params.misfit.is_some(),
        PeerCause::Protocol => false,
        PeerCause::OutOfRange => known.misused || others.any(|other| other.misused),
        PeerCause::Overloaded | PeerCause::Unknown | PeerCause::OtherRankLost => {
            !params.is_gentle() || params.physics.chaos.drains > 0
        }
        // A sender's host gives up a registration whose sender does not come.
        PeerCause::DeadlineExceeded => {
            known.side == Side::Receiver
                || others.any(|other| other.told.as_ref() == Some(cause) || is_almost_due(view, other))
                || params.faults != Faults::None
        }
        _ => true,
    }
}
