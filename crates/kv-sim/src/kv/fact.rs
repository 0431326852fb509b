//! What the invariants of the KV service are told, and what they may look at.

use kv_core::proto::NodeGauges;
use kv_core::trace::{Event, KvWhat};
use kv_core::{KvPoll, SessionId, TransferError};

use crate::kv::ledger::{Ledger, LegId};
use crate::kv::memory::Memory;
use crate::kv::params::Params;
use crate::net::fact;
use crate::net::flight::Flight;
use crate::net::lives::{HoldId, LifeId, LifeRecord};
use crate::net::way::Way;

/// One thing that happened.
pub(crate) type Fact<'a> = fact::Fact<'a, NodeGauges, KvFact<'a>>;

/// What happens to sessions and their pages.
#[derive(Debug)]
pub(crate) enum KvFact<'a> {
    /// A session changed its state. The leg still shows the one before.
    Status { leg: LegId, to: KvPoll, failure: Option<&'a TransferError> },
    /// A node told what happens in it.
    Told { life: LifeId, event: &'a Event<KvWhat> },
    /// A status of a session that nobody opened.
    StrangeStatus { life: LifeId, session: SessionId, to: KvPoll },
    /// A token came back. The ledger still shows it as held; `None` if no such token was out.
    Released { life: LifeId, session: SessionId, leg: Option<LegId>, hold: Option<HoldId>, pages: &'a [u32] },
    /// Items of cache groups are about to come back; of these groups it is said that the sender had none.
    Skipped { leg: LegId, skipped: &'a [u16] },
    /// A node told a reader that it may read the pages of a session.
    Granted { leg: LegId },
    /// A moment has come.
    Check(Check),
}

/// A moment at which an oracle wants to look.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Check {
    /// The deadline of a session, slack included, has passed.
    Deadline { leg: LegId },
    /// The failure of `origin` must have reached `leg` by now.
    Told { leg: LegId, origin: LegId },
    /// A request of the healed world must have been served by now.
    Served { leg: LegId },
}

/// What invariants may look at.
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
