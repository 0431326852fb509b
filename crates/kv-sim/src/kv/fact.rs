//! The facts that the invariants of the KV service are told, and the state that they may look at.

use kv_core::proto::NodeGauges;
use kv_core::trace::{Event, KvWhat};
use kv_core::{KvPoll, SessionId, TransferError};

use crate::kv::ledger::{Ledger, LegId};
use crate::kv::memory::Memory;
use crate::kv::params::Params;
use crate::net::fact;
use crate::net::flight::Flight;
use crate::net::lives::{HoldId, LifeId, LifeRecord, is_drained};
use crate::net::way::Way;

/// Something that happened in a world of the KV service.
pub(crate) type Fact<'a> = fact::Fact<'a, NodeGauges, KvFact<'a>>;

/// Something that happened to sessions and their pages.
#[derive(Debug)]
pub(crate) enum KvFact<'a> {
    /// A session changed its state. The ledger still shows the state before the change.
    Status { leg: LegId, to: KvPoll, failure: Option<&'a TransferError> },
    /// A machine reported an event of its trace.
    Told { life: LifeId, event: &'a Event<KvWhat> },
    /// A machine reported the state of a session that no scheduler has opened.
    StrangeStatus { life: LifeId, session: SessionId, to: KvPoll },
    /// A session handed back pages, which the ledger still shows as held. `leg` is `None` if no such pages
    /// were out.
    Released { life: LifeId, session: SessionId, leg: Option<LegId>, hold: Option<HoldId>, pages: &'a [u32] },
    /// A session is about to hand back items of cache groups, and reports that the sender did not have the
    /// groups `skipped`.
    Skipped { leg: LegId, skipped: &'a [u16] },
    /// A machine granted a reader the pages of a session.
    Granted { leg: LegId },
    /// A host that drains awaits no peer any more.
    Left { life: LifeId },
    /// A receiver registers, or asks for a lease, at a host that drains. `known_at` is since when its own host
    /// knows that the server does not name that host any more; `None` if it may not know.
    Registers { leg: LegId, at: LifeId, known_at: Option<u64> },
    /// A moment has come for which a check was planned.
    Check(Check),
}

/// A moment at which an oracle wants to look.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Check {
    /// The deadline of a session, slack included, has passed.
    Deadline { leg: LegId },
    /// The failure of `origin` must have reached `leg` by now.
    Told { leg: LegId, origin: LegId },
    /// A host that drains must be empty by now, or must have died.
    Drained { life: LifeId },
    /// A receiver that waits for a host that drains, and in whose room no sender is open, must have been
    /// refused by now.
    Refused { leg: LegId },
    /// A request of the healed world must have been served by now.
    Served { leg: LegId },
}

/// The state of the world that invariants may look at.
pub(crate) struct View<'a> {
    pub(crate) now: u64,
    pub(crate) params: &'a Params,
    pub(crate) lives: &'a [LifeRecord],
    /// When a session last opened, ended, or gave pages back, in global time.
    pub(crate) last_change: u64,
    pub(crate) ledger: &'a Ledger,
    pub(crate) memories: &'a [Memory],
    pub(crate) flights: &'a [Flight],
    pub(crate) ways: &'a [Way],
    pub(crate) healed: bool,
}

impl View<'_> {
    /// True if a bootstrap server has told the host of an open session that an engine drains, since the session was opened; where
    /// the loop of a worker takes answers and commands later, also before.
    pub(crate) fn was_told_of_a_drain(&self, leg: LegId) -> bool {
        let known = &self.ledger.legs[leg];
        let told = known.life.and_then(|life| self.lives[life].told_of_a_drain);
        told.is_some_and(|at| at >= known.opened_at || self.params.physics.driven)
    }

    /// True if a half of this request was never opened, because its host drains or has drained.
    pub(crate) fn is_excused(&self, leg: LegId) -> bool {
        let request = self.ledger.legs[leg].request;
        let mut halves = self.ledger.legs.iter().filter(|leg| leg.request == request);
        halves.any(|half| half.life.is_none() && is_drained(self.lives, half.slot))
    }
}
