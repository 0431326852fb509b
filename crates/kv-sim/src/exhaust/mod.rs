//! An exhaustive check of the lease protocol at small scope.
//!
//! A simulated world draws one history from its seed. The exhaustive check goes through *all* histories of a very
//! small world, up to a number of steps: one prefill host and one or two decode hosts, each with the real machine
//! ([`kv_core::proto::Node`], cloned at every step), one lease, and one receiver on each decode host. A step is a
//! `Choice`:
//!
//! - any frame in flight is delivered, before or after any other, once or twice. A frame that is never delivered
//!   is a lost frame;
//! - the next timer of either host rings. The time jumps to that moment, and timers of the other host that were
//!   due before ring late. The clocks run at different rates, up to the full margin of a thirty-second part;
//! - a read copies its bytes, ends, or fails;
//! - the prefill scheduler completes the pages, the decode scheduler gives the pages to read into, or either of
//!   them aborts;
//! - the prefill host restarts with other pages for the same room and session number, a decode host dies, or a
//!   transport proves that a peer is gone. The [`Scope`] of a world says how many of these may happen.
//!
//! The prefill scheduler overwrites its pages in the moment in which they come back.
//!
//! The world is the same as the worlds of seeds: the same hosts, connections, reads, ledger and invariants. But
//! nothing in it is drawn at random, and what is in flight waits for its choice. Every invariant is checked after
//! every step of every history, and at rest: if nothing more goes wrong, all sessions end, all pages come back,
//! and the tables of the hosts are empty.
//!
//! Histories that lead to the same state are continued only once. A state is the fingerprint of every host, the
//! frames and reads in flight, the memories, and the faults that may still happen.
//! [`Planted`](crate::Planted) bugs prove that the invariants of leases can fail.
//!
//! `entries.rs` does the same with a small world of the encoder cache: one entry, several readers, and an encoder
//! that wants the entry's room ([`EntryScope`]). Both worlds stand on a `Stage`, and the search knows neither.

mod choice;
pub(crate) mod entries;
mod rest;
mod scope;
mod search;
mod small;
mod stage;

pub use entries::{EntryScope, explore_entries};
pub use scope::{Drift, Scope};
pub use search::{Counterexample, Outcome, explore, hunt};
