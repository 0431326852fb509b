//! An exhaustive check of the lease protocol at small scope.
//!
//! Where a simulated world draws one history from its seed, this goes through *all* histories of a
//! very small world, up to a number of steps: one prefill host and one or two decode hosts, each
//! with the real machine ([`kv_core::proto::Node`], cloned at every step), one lease, one receiver
//! per decode host. A step is a `Choice`:
//!
//! - a frame in flight is delivered, whichever, now or after any other, once or twice. One that is
//!   never delivered is a lost one;
//! - the next timer of either host rings: time jumps there, and the other host's timers that were
//!   due before are late. Clocks run at different rates, up to the full margin of a thirty-second part;
//! - a read copies its bytes; a read that has copied ends; a read fails;
//! - the prefill scheduler completes the pages; the decode scheduler brings its own; either aborts;
//! - the prefill host restarts with other pages for the same room and session number, a decode host
//!   dies, a transport proves a peer gone. How many of these a world has is its [`Scope`].
//!
//! The prefill scheduler overwrites its pages in the moment in which they come back.
//!
//! The world is the one that seeds draw: the same hosts, connections, reads, ledger and invariants. Only
//! nothing is drawn in it, and what is under way waits for its choice. Every invariant is looked at after
//! every step, in every history, and at rest: if nothing more goes wrong, all sessions end, all pages come
//! back, and nothing is left.
//!
//! Histories that lead to the same state are continued once: a state is the fingerprint of every
//! host, the frames and reads in flight, the memories, and what a scope still allows.
//! [`Planted`](crate::Planted) bugs prove that the invariants of leases can fail.

mod choice;
mod rest;
mod scope;
mod search;
mod small;

pub use scope::{Drift, Scope};
pub use search::{Counterexample, Outcome, explore, hunt};
