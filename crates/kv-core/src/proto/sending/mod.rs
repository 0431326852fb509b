//! Sessions of the sending side. The picture shows push; `holder.rs` describes what differs in
//! pull.
//!
//! ```text
//! open ─▶ Bootstrapping ─ every receiver has registered ─▶ WaitingForInput ─ send ─▶ Transferring
//!            (chunks given early wait)                                                  │ every part of
//!                                                                                       ▼ every target done
//!                                                                                    Success, pages back
//! any failure ─▶ Failed ─▶ Failed{quiet: false} to the targets that a post or a lease concerns, posts cancelled
//!                            └─ last post of a target ended ─▶ Failed{quiet: true} | AbortAck
//!                                 └─ of all targets ─▶ pages back
//! ```
//!
//! A *target* is a receiver that has registered, or has asked for a lease. `write.rs` writes its
//! pages; `holder.rs` grants, keeps and ends its lease.

mod asking;
mod attaching;
mod attempts;
mod chunks;
mod former_leases;
pub(in crate::proto) mod given;
mod groups;
mod holder;
mod letting_go;
mod opening;
mod over;
mod peers;
mod quarantine;
mod target;
#[cfg(test)]
mod tests;
mod write;

use std::collections::{BTreeMap, VecDeque};

use crate::asked::Asked;
use crate::few::Few;
use crate::groups::RequestCacheGroups;
use crate::id::{Incarnation, SessionId};
use crate::layout::{Geometry, HeldLayers};
use crate::lease::{Lease, TransferMode};
use crate::proto::ending::{Sessions, Standing};
use crate::proto::rendezvous::Named;
use crate::proto::sending::former_leases::FormerLeases;
use crate::proto::sending::given::Given;
use crate::proto::sending::target::Target;
use crate::time::Time;

/// All sending sessions of a worker.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
pub(in crate::proto) struct Sending {
    sessions: Sessions<SendSession>,
    held_layers: HeldLayers,
    ended_leases: FormerLeases,
    /// Requests by content that the service has not seen.
    asked: VecDeque<Asked>,
    pages_leased: usize,
}

impl Sending {
    pub(in crate::proto) fn new(geometry: &Geometry) -> Sending {
        Sending {
            sessions: Sessions::default(),
            held_layers: HeldLayers::new(geometry),
            ended_leases: FormerLeases::default(),
            asked: VecDeque::new(),
            pages_leased: 0,
        }
    }

    /// How many receivers the sessions have met.
    pub(in crate::proto) fn targets(&self) -> usize {
        self.sessions.iter().map(|(_, sender)| sender.targets.len()).sum()
    }

    /// How many complete pages are pinned for readers.
    pub(in crate::proto) fn pages_leased(&self) -> usize {
        self.pages_leased
    }

    /// How many ended leases are remembered for latecomers.
    pub(in crate::proto) fn ended_leases(&self) -> usize {
        self.ended_leases.len()
    }
}

/// One sending session, from its opening until its pages have come back.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
pub(in crate::proto) struct SendSession {
    standing: Standing,
    named: Named,
    /// How many ranks receive: told by the scheduler, or else by the first receiver.
    receivers: usize,
    /// How many receivers have ended without registering, and will never register.
    gone: usize,
    /// True if the scheduler has not told the number of receivers.
    learns: bool,
    mode: TransferMode,
    /// The lease on the pages once they are complete.
    lease: Lease,
    /// Until when the pages are pinned at least; `None` until they are complete.
    pinned_until: Option<Time>,
    /// The pages that the scheduler has given.
    given: Given,
    /// The items of cache groups, sent with the last chunk.
    groups: Option<RequestCacheGroups>,
    targets: Few<Target>,
    /// The receiver of the first target.
    first_receiver: Option<Incarnation>,
    /// The position of each receiver's last target, unless that is the first one.
    target_of: BTreeMap<Incarnation, usize>,
}

impl SendSession {
    /// How many receivers have registered.
    pub(in crate::proto) fn met(&self) -> usize {
        self.targets.len()
    }

    /// True if receivers are still to register.
    fn lacks_receivers(&self) -> bool {
        self.met() < self.receivers
    }

    /// The receivers that read, with their positions.
    fn readers(&self) -> impl Iterator<Item = (usize, &Target)> + Clone {
        self.targets.iter().enumerate().filter(|(_, target)| target.reads().is_some())
    }

    /// How many pages of the session are pinned for readers.
    fn pages_pinned(&self) -> usize {
        self.pinned_until.and(self.given.announced()).map_or(0, |(pages, _)| pages)
    }
}

impl Sending {
    /// The session's receiver at this position.
    fn target_mut(&mut self, session: SessionId, index: usize) -> Option<&mut Target> {
        self.sessions.get_mut(&session)?.targets.get_mut(index)
    }
}
