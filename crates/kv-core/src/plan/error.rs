//! Why a transfer cannot be planned, and whose fault it is.

use crate::error::{Mismatch, PagesError};
use crate::layout::GeometryError;

/// Which side of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// This worker.
    Local,
    /// The peer.
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
    /// A geometry that no worker can have. Do not talk to such a peer.
    #[error("the {side} geometry is not valid: {error}")]
    Invalid {
        /// Whose.
        side: Side,
        /// What is wrong with it.
        error: GeometryError,
    },
    /// The geometries do not fit. Configure both engines alike.
    #[error(transparent)]
    Incompatible(#[from] Mismatch),
    /// The lists of pages differ in length: one of the sides counts its pages wrongly.
    #[error("{local} local pages cannot be matched with {remote} remote pages")]
    PageCount {
        /// Pages here.
        local: usize,
        /// Pages at the peer.
        remote: usize,
    },
    /// A page that the cache of that side does not have.
    #[error("{side} pages: {error}")]
    Pages {
        /// Whose.
        side: Side,
        /// Which page, and how many there are.
        error: PagesError,
    },
    /// An aux row that not all aux regions of that side have.
    #[error("{side} aux row {row} is out of range: there are {rows} rows")]
    Row {
        /// Whose.
        side: Side,
        /// The row.
        row: u32,
        /// How many there are; none if there is no aux region.
        rows: u32,
    },
    /// More bytes than a number can count: the list names pages many times.
    #[error("{items} pages of {item_bytes} bytes are more than one transfer can be")]
    TooLarge {
        /// How many pages.
        items: u32,
        /// Bytes of each, in all regions.
        item_bytes: u64,
    },
    /// The two sides count pages of different sizes: use [`Plan::chunk`](super::Plan::chunk).
    #[error("pages of {local} tokens here and of {remote} tokens at the peer do not go one with one")]
    PageSize {
        /// Tokens of a page here.
        local: u32,
        /// Tokens of a page at the peer.
        remote: u32,
    },
    /// A cache group that one of the sides does not have.
    #[error("there is no cache group {group}: the peers have {groups}")]
    Group {
        /// The group asked for.
        group: u16,
        /// How many there are.
        groups: usize,
    },
}
