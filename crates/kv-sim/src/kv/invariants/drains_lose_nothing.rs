//! A host that drains ends its sessions as if it did not drain; leaves its bootstrap server only when no open
//! session of its own awaits a peer; lets no request of a peer wait for a session that will never be opened; and
//! is empty in bounded time. Who has been refused, and cannot find the host any more, asks it for nothing new.
//! Stopping an empty host fails no request that was served.

use kv_core::{Cause, KvPoll, PeerCause};

use crate::kv::fact::{Check, Fact, KvFact, View};
use crate::kv::invariant::{Invariant, Verdict};
use crate::kv::ledger::{Leg, LegId, Side};
use crate::kv::params::Faults;

#[derive(Default, Clone)]
pub(crate) struct DrainsLoseNothing;

impl Invariant for DrainsLoseNothing {
    fn observe(&mut self, view: &View<'_>, fact: &Fact<'_>) -> Verdict {
        match *fact {
            Fact::Own(KvFact::Status { leg, failure: Some(failure), .. }) => fails(view, leg, &failure.cause),
            Fact::Own(KvFact::Left { life }) => {
                // The loop of a worker may not have taken every command yet.
                let awaits = |leg: &Leg| {
                    !view.params.physics.driven
                        && leg.life == Some(life)
                        && leg.side == Side::Sender
                        && leg.is_open()
                        && leg.poll == KvPoll::Bootstrapping
                };
                match view.ledger.legs.iter().position(awaits) {
                    Some(leg) => Err(format!("life {life} leaves while leg {leg} awaits its receivers")),
                    None => Ok(()),
                }
            }
            Fact::Own(KvFact::Registers { leg, at, known_at: Some(known_at) }) => {
                let opened_at = view.ledger.legs[leg].opened_at;
                if opened_at > known_at {
                    return Err(format!(
                        "leg {leg}, opened {} us after its host knew that life {at} has left, goes there",
                        (opened_at - known_at) / 1000
                    ));
                }
                Ok(())
            }
            Fact::Stepped { life, gauges, .. } => {
                let drains = view.lives[life].draining.is_some_and(|since| since < view.now);
                // The loop of a worker may not have taken the command yet.
                if drains && !view.params.physics.driven && gauges.registrations > 0 {
                    return Err(format!(
                        "{} registrations wait at life {life}, which drains and opens no session",
                        gauges.registrations
                    ));
                }
                Ok(())
            }
            Fact::Own(KvFact::Check(Check::Drained { life })) => {
                let record = &view.lives[life];
                if record.alive && record.emptied.is_none() {
                    return Err(format!(
                        "life {life} drains and is not empty in time: {} sessions, {} `Pages`, left: {}",
                        record.open_sessions,
                        record.holds_out,
                        record.left.is_some()
                    ));
                }
                Ok(())
            }
            Fact::Own(KvFact::Check(Check::Refused { leg })) => {
                let known = &view.ledger.legs[leg];
                let alive = known.life.is_some_and(|life| view.lives[life].alive);
                if alive && !known.poll.is_terminal() {
                    return Err(format!(
                        "leg {leg} (room {}) is still {} though the host that it asked drains",
                        known.room, known.poll
                    ));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Checks that a session does not fail because a host drains on which all its halves were open, and that no
/// served receiver fails because its server was stopped when it was empty.
fn fails(view: &View<'_>, leg: LegId, cause: &Cause) -> Verdict {
    let known = &view.ledger.legs[leg];
    let Some(life) = known.life else { return Ok(()) };
    let opened_before = |leg: &Leg| {
        let drains = |life: usize| view.lives[life].draining;
        leg.life.and_then(drains).is_none_or(|since| leg.opened_at < since)
    };
    let drains = view.lives[life].draining;
    let of_the_drain = match cause {
        Cause::Aborted => drains == Some(view.now) && !known.aborted,
        Cause::Draining => drains.is_some() && opened_before(known),
        _ => false,
    };
    if of_the_drain {
        return Err(format!("leg {leg} was open when life {life} began to drain, and fails: {cause}"));
    }
    let halves = view.ledger.legs.iter().filter(|half| half.is_of(known) && half.meets(known));
    let halves: Vec<&Leg> = halves.collect();
    // Where no host fails by itself.
    let gentle = view.params.is_gentle();
    let refused = matches!(cause, Cause::ByPeer(PeerCause::WorkerStopped));
    if gentle && refused && !halves.is_empty() && halves.iter().all(|half| half.is_open()) {
        return Err(format!("leg {leg} is refused though its other halves are open"));
    }
    let lost = matches!(
        cause,
        Cause::PeerLost | Cause::WayLost | Cause::PeerRestarted | Cause::PeerUnresponsive { .. }
    );
    let served = |half: &&Leg| {
        half.poll == KvPoll::Success && half.life.is_some_and(|life| view.lives[life].emptied.is_some())
    };
    // A receiver whose own way breaks does not wait for what its server may yet tell.
    let told = gentle || view.params.faults == Faults::Breaks && *cause == Cause::PeerLost;
    if told && lost && known.side == Side::Receiver && !halves.is_empty() && halves.iter().all(served) {
        return Err(format!("leg {leg} was served, and fails when its server is stopped empty: {cause}"));
    }
    Ok(())
}
