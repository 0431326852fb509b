//! Which cache groups the simulated requests have, and what one half has of them.

use crate::net::lives::HoldId;

/// How many groups there are, in worlds that have state.
pub(crate) const GROUPS: usize = 2;
/// The group of slots.
pub(crate) const SLOTS: usize = 0;
/// The group of pages: a receiver may want the last ones only.
pub(crate) const DRAFTS: usize = 1;

/// What one half of a request has of the cache groups.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// How many items it names of each group.
    pub wants: [usize; GROUPS],
    /// The number of the first of them in the request.
    pub first: [u32; GROUPS],
    /// The items, once it has them.
    pub items: [Vec<u32>; GROUPS],
    /// The token that holds them, until it has come back; zero if there is none.
    pub hold: HoldId,
}
