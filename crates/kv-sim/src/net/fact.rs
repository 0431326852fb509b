//! What invariants are told.

use kv_core::{Post, Time};

use crate::net::cost::Cost;
use crate::net::flight::Piece;
use crate::net::lives::{HoldId, LifeId, Slot};

/// One thing that happened. `G` is what a machine says that it holds, and `O` what happens in the worlds of
/// one service only.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for the types that describe them")]
pub enum Fact<'a, G, O> {
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
    Stepped { life: LifeId, input: &'static str, now: Time, next: Option<Time>, gauges: G },
    /// What one input of a node has cost.
    Cost { life: LifeId, input: &'static str, cost: Cost },
    /// A node panicked.
    Panicked { life: LifeId, message: &'a str },
    /// The moment has come for which a node had set its timer, and with a planted bug it is not told.
    Unheard { life: LifeId },
    /// A node sent a frame.
    Sent { life: LifeId, bytes: usize },
    /// A host knows of no connection any more to a slot that it had one to.
    CutOff { life: LifeId, from: Slot },
    /// Nothing will ever happen again by itself; `gently`: nobody was given up, so that nothing is kept for
    /// anybody.
    Settled { gauges: &'a [(LifeId, G, Option<Time>)], gently: bool },
    /// Things still happen long after everything has ended.
    Restless,
    /// Something that only this service knows.
    Own(O),
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
