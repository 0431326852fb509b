//! What a receiver of a peer's asks of this worker.

use crate::proto::rendezvous::Named;
use crate::transport::Origin;
use crate::wire::Delivery;

/// What a receiver registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proto) struct Registration {
    pub(in crate::proto) named: Named,
    /// The connection on which it came.
    pub(in crate::proto) origin: Option<Origin>,
    /// How many ranks of the receiver's engine this worker has to serve.
    pub(in crate::proto) ranks: u32,
    pub(in crate::proto) delivery: Delivery,
}

impl Registration {
    /// Runs of pages in it: what it costs.
    pub(in crate::proto) fn runs(&self) -> usize {
        match &self.delivery {
            Delivery::Write(to) => to.pages.runs().len() + to.groups.runs(),
            Delivery::Read(_) => 1,
        }
    }
}
