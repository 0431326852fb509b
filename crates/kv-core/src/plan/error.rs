//! Why a transfer cannot be planned, and which side caused that.

use crate::error::{Mismatch, PagesError};
use crate::layout::GeometryError;

/// One of the two sides of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// This worker, which makes the plan.
    Local,
    /// The peer of the transfer.
    Remote,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Side::Local => "local",
            Side::Remote => "remote",
        })
    }
}

/// Why a transfer cannot be planned. Nothing was planned, and nothing needs to be undone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A geometry breaks a rule that every cache keeps. Do not talk to a peer with such a geometry.
    #[error("the {side} geometry is not valid: {error}")]
    Invalid {
        /// The side whose geometry is not valid.
        side: Side,
        /// The rule that the geometry breaks.
        error: GeometryError,
    },
    /// The two geometries do not fit. Configure both engines alike.
    #[error(transparent)]
    Incompatible(#[from] Mismatch),
    /// The lists of pages differ in length: one of the sides counts its pages wrongly.
    #[error("{local} local pages cannot be matched with {remote} remote pages")]
    PageCount {
        /// How many pages the list of this worker has.
        local: usize,
        /// How many pages the list of the peer has.
        remote: usize,
    },
    /// A list names a page that the cache of that side does not have.
    #[error("{side} pages: {error}")]
    Pages {
        /// The side whose list is wrong.
        side: Side,
        /// The page that is wrong, and how many pages there are.
        error: PagesError,
    },
    /// An aux region of that side does not have the aux row.
    #[error("{side} aux row {row} is out of range: there are {rows} rows")]
    Row {
        /// The side that lacks the row.
        side: Side,
        /// The number of the aux row.
        row: u32,
        /// How many rows that side has; 0 if it has no aux region.
        rows: u32,
    },
    /// The transfer has more bytes than 64 bits can count: the list names pages very often.
    #[error("{items} pages of {item_bytes} bytes each are too many bytes for one transfer")]
    TooLarge {
        /// How many pages the list names.
        items: u32,
        /// How many bytes each page has, in all regions together.
        item_bytes: u64,
    },
    /// The two sides have pages of different sizes. Use [`Plan::chunk`](super::Plan::chunk).
    #[error(
        "pages of {local} tokens here cannot be matched one to one with pages of {remote} tokens at the peer"
    )]
    PageSize {
        /// Tokens of a page here.
        local: u32,
        /// Tokens of a page at the peer.
        remote: u32,
    },
    /// One of the sides does not have the cache group.
    #[error("there is no cache group {group}: the two sides have {groups} groups")]
    Group {
        /// The number of the group that was asked for.
        group: u16,
        /// The larger number of groups that one of the two sides has.
        groups: usize,
    },
}
