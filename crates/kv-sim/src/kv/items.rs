//! The cache groups of the simulated requests, and the items of one half of a request in each group.

use crate::net::lives::HoldId;

/// How many groups there are, in worlds that have state.
pub(crate) const GROUPS: usize = 2;
/// The number of the group of slots.
pub(crate) const SLOTS: usize = 0;
/// The number of the group of draft or window pages, of which a receiver may want only the last ones.
pub(crate) const DRAFTS: usize = 1;

/// The items of one half of a request, in each cache group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// The number of items of each group that the half names.
    pub wants: [usize; GROUPS],
    /// The position in the request of the first of these items, for each group.
    pub first: [u32; GROUPS],
    /// The items of each group, once the half has been given them.
    pub items: [Vec<u32>; GROUPS],
    /// The hold on the items until they come back; zero if there is none.
    pub hold: HoldId,
}
