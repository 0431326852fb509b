//! A registration: what a receiver of a peer asks of this worker.

use crate::proto::rendezvous::Named;
use crate::transport::Origin;
use crate::wire::Delivery;

/// What a receiver has registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::proto) struct Registration {
    pub(in crate::proto) named: Named,
    /// The connection on which the registration came.
    pub(in crate::proto) origin: Option<Origin>,
    /// How many ranks of the receiver's engine this worker has to serve.
    pub(in crate::proto) ranks: u32,
    pub(in crate::proto) delivery: Delivery,
}

impl Registration {
    /// How many runs of pages the registration has, which is its cost in memory.
    pub(in crate::proto) fn runs(&self) -> usize {
        match &self.delivery {
            Delivery::Write(to) => to.pages.runs().len() + to.groups.runs(),
            Delivery::Read(_) => 1,
        }
    }
}
