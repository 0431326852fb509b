//! What a receiver of a peer's asks of this worker.

use crate::groups::GroupLists;
use crate::id::AuxIndex;
use crate::pages::PageList;
use crate::plane::Origin;
use crate::proto::rendezvous::Named;

/// What a receiver registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proto) struct Registration {
    pub(in crate::proto) named: Named,
    /// The connection on which it came.
    pub(in crate::proto) origin: Option<Origin>,
    /// How many ranks of the receiver's engine this worker has to serve.
    pub(in crate::proto) ranks: u32,
    pub(in crate::proto) wish: Wish,
}

/// What a receiver wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proto) enum Wish {
    /// To have these pages and this row written.
    Write {
        /// From number `first` of the request on, which has `whole` pages at the receiver.
        pages: PageList,
        first: u32,
        whole: u32,
        aux: Option<AuxIndex>,
        /// The row is this worker's to write.
        aux_here: bool,
        groups: GroupLists,
    },
    /// To read the sender's pages. The number stands in the claim.
    Read { beat: u64 },
}

impl Registration {
    /// Runs of pages in it: what it costs.
    pub(in crate::proto) fn runs(&self) -> usize {
        match &self.wish {
            Wish::Write { pages, groups, .. } => pages.runs().len() + groups.runs(),
            Wish::Read { .. } => 1,
        }
    }
}
