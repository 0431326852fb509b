//! What invariants are told.

use kv_core::proto::NodeGauges;
use kv_core::{KvPoll, Post, SessionId, Time, TransferError};

use crate::calendar::Check;
use crate::cost::Cost;
use crate::flight::{Flight, Piece};
use crate::ledger::{HoldId, Ledger, LegId, LifeId, Slot};
use crate::memory::Memory;
use crate::params::Params;
use crate::ways::Way;

/// One thing that happened.
#[derive(Debug)]
pub(crate) enum Fact<'a> {
    /// A session changed its state. The leg still shows the one before.
    Status { leg: LegId, to: KvPoll, failure: Option<&'a TransferError> },
    /// A status of a session that nobody opened.
    StrangeStatus { life: LifeId, session: SessionId, to: KvPoll },
    /// A token came back. The ledger still shows it as held; `None` if no such token was out.
    Released { life: LifeId, session: SessionId, leg: Option<LegId>, hold: Option<HoldId>, pages: &'a [u32] },
    /// Items of state groups are about to come back; of these groups it is said that the sender had none.
    Skipped { leg: LegId, skipped: &'a [u16] },
    /// A node asked for a post; so many are in flight with it, to the same peer and to all.
    Posted { life: LifeId, post: &'a Post, to_peer: usize, in_flight: usize },
    /// A node asked for an early end of a post.
    Cancelled { flight: usize },
    /// A descriptor that leaves its region, or has no length.
    BadDescriptor { life: LifeId, what: &'static str },
    /// A piece of a post is read at its source.
    Read { flight: usize, piece: Piece, holder: HoldId },
    /// A piece of a post lands in the memory of `life`.
    Written { flight: usize, piece: Piece, life: LifeId, holder: HoldId },
    /// A node handled a frame.
    Handled { at: LifeId, from: LifeId, addressed: LifeId, effects: Effects },
    /// A node handled an input.
    Stepped { life: LifeId, input: &'static str, now: Time, next: Option<Time>, gauges: NodeGauges },
    /// What one input of a node has cost.
    Cost { life: LifeId, input: &'static str, cost: Cost },
    /// A node panicked.
    Panicked { life: LifeId, message: &'a str },
    /// The moment has come for which a node had set its timer; it was told, if it listens.
    Due { life: LifeId },
    /// A node told a reader that it may read the pages of a session.
    Granted { leg: LegId },
    /// A node sent a frame.
    Sent { life: LifeId, bytes: usize },
    /// A moment has come.
    Check(Check),
    /// A host knows of no connection any more to a slot that it had one to.
    CutOff { life: LifeId, from: Slot },
    /// Nothing will ever happen again by itself; `gently`: nobody was given up, so that nothing is kept for
    /// anybody.
    Settled { gauges: &'a [(LifeId, NodeGauges, Option<Time>)], gently: bool },
    /// Things still happen long after everything has ended.
    Restless,
}

/// What the handling of one frame changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Effects {
    /// States of sessions.
    pub statuses: u32,
    /// Posts started.
    pub posts: u32,
    /// Posts cancelled.
    pub cancels: u32,
    /// Tokens released.
    pub releases: u32,
}

/// What invariants may look at.
pub(crate) struct View<'a> {
    pub(crate) now: u64,
    pub(crate) params: &'a Params,
    pub(crate) ledger: &'a Ledger,
    pub(crate) memories: &'a [Memory],
    pub(crate) flights: &'a [Flight],
    pub(crate) ways: &'a [Way],
    pub(crate) healed: bool,
}
