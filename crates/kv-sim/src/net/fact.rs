//! The facts that invariants are told, for the machines of any service.

use kv_core::{Post, Time};

use crate::net::cost::Cost;
use crate::net::flight::Piece;
use crate::net::lives::{HoldId, LifeId, Slot};

/// Something that happened in a world. `G` is what a machine reports that it holds, and `O` is a fact that
/// only one service knows.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for the types that describe them")]
pub enum Fact<'a, G, O> {
    /// A machine started a post. The fact has the number of its posts in flight, to the same peer and to all
    /// peers.
    Posted { life: LifeId, post: &'a Post, to_peer: usize, in_flight: usize },
    /// A node asked for an early end of a post.
    Cancelled { flight: usize },
    /// A machine posted a descriptor that leaves its region, or has no length.
    BadDescriptor { life: LifeId, what: &'static str },
    /// A post reads a piece of memory at its source.
    Read { flight: usize, piece: Piece, holder: HoldId },
    /// A post writes a piece into the memory of `life`.
    Written { flight: usize, piece: Piece, life: LifeId, holder: HoldId },
    /// A machine has handled a frame.
    Handled { at: LifeId, from: LifeId, addressed: LifeId, effects: Effects },
    /// A machine has handled an input.
    Stepped { life: LifeId, input: &'static str, now: Time, next: Option<Time>, gauges: G },
    /// The cost of one input of a machine.
    Cost { life: LifeId, input: &'static str, cost: Cost },
    /// A machine has panicked while it handled an input.
    Panicked { life: LifeId, message: &'a str },
    /// The timer of a machine was due, and a planted bug has kept it from ringing.
    Unheard { life: LifeId },
    /// A machine has sent a frame.
    Sent { life: LifeId, bytes: usize },
    /// A host has lost its last connection to a slot.
    CutOff { life: LifeId, from: Slot },
    /// The world has come to rest. `gently` is true if no host was given up by a peer, so that no machine has
    /// a reason to keep anything.
    Settled { gauges: &'a [(LifeId, G, Option<Time>)], gently: bool },
    /// Things still happen long after everything has ended.
    Restless,
    /// A fact that only this service knows.
    Own(O),
}

/// What the handling of one frame has changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Effects {
    /// The number of changed session states.
    pub statuses: u32,
    /// The number of posts that were started.
    pub posts: u32,
    /// The number of posts that were cancelled.
    pub cancels: u32,
    /// How many `Pages` were handed back.
    pub releases: u32,
}
