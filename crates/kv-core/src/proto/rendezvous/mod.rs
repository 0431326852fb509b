//! The meeting place of senders and registrations of one request, whichever comes first.
//!
//! Two equal rooms match. Otherwise two rooms match if they are equal after removing the suffixes
//! that engines say they append, and if exactly one waiting room qualifies. If two waiting rooms
//! qualify, all of them fail as ambiguous.

mod failed_rooms;
mod named;
mod waiters;

use std::collections::BTreeMap;

use self::failed_rooms::FailedRooms;
pub(super) use self::failed_rooms::Latecomers;
pub(super) use self::named::{Ambiguity, Named};
use self::waiters::Waiters;
use super::effects::Effects;
use super::io::{Limits, NodeConfig};
use super::timer::Timer;
use crate::error::PeerCause;
use crate::id::{Attempt, PeerId, Room, SessionId};
use crate::transport::Origin;

/// The meeting place of one worker.
#[derive(Debug, Clone, Default)]
pub(super) struct Rendezvous {
    /// Senders that lack receivers.
    senders: Waiters<SessionId>,
    /// Open receivers of this worker, if its engine appends suffixes to the ids of requests.
    receivers: Waiters<SessionId>,
    /// Registrations that lack a sender.
    registrations: Waiters<(PeerId, Attempt)>,
    /// The cost of the waiting registrations, in all.
    waiting: Cost,
    waiting_of: BTreeMap<Option<Origin>, Cost>,
    /// Rooms whose sender failed before all receivers registered.
    failed_senders: FailedRooms,
    /// Rooms whose receiver failed before it registered.
    failed_receivers: FailedRooms,
}

/// The cost of registrations that wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Cost {
    /// How many registrations wait.
    registrations: usize,
    /// How many runs of pages these registrations have.
    runs: usize,
}

impl Rendezvous {
    // ---- senders --------------------------------------------------------------------------------

    /// A sender begins to wait. Earlier failures in its room are forgotten.
    pub(super) fn await_receivers(&mut self, named: &Named, sender: SessionId) {
        self.failed_senders.clear(named);
        self.senders.insert(named, sender);
    }

    /// A sender stops waiting: all of its receivers have come, or it has ended.
    pub(super) fn await_no_more(&mut self, named: &Named, sender: SessionId) {
        self.senders.remove(named, sender);
    }

    /// How many senders wait.
    pub(super) fn senders(&self) -> usize {
        self.senders.len()
    }

    /// The sender that a registration meets.
    pub(super) fn sender_for(&self, named: &Named) -> Result<Option<SessionId>, Ambiguity> {
        self.senders.find(named)
    }

    /// A sender that waits in exactly this room.
    pub(super) fn sender_in(&self, room: &Room) -> Option<SessionId> {
        self.senders.find_exact(room)
    }

    // ---- registrations --------------------------------------------------------------------------

    /// True if one more registration may wait, by the limits of all connections and of this one.
    pub(super) fn has_room(&self, limits: &Limits, origin: Option<Origin>, runs: usize) -> bool {
        let fits = |cost: Cost, share: usize| {
            cost.registrations < limits.max_registrations / share
                && cost.runs + runs <= limits.max_waiting_runs / share
        };
        let of = self.waiting_of.get(&origin).copied().unwrap_or_default();
        fits(self.waiting, 1) && fits(of, limits.connections_share.max(1))
    }

    /// A registration begins to wait.
    pub(super) fn wait(
        &mut self,
        named: &Named,
        who: (PeerId, Attempt),
        origin: Option<Origin>,
        runs: usize,
    ) {
        self.registrations.insert(named, who);
        let of = self.waiting_of.entry(origin).or_default();
        for cost in [&mut self.waiting, of] {
            cost.registrations += 1;
            cost.runs += runs;
        }
    }

    /// A registration stops waiting.
    pub(super) fn leave(
        &mut self,
        named: &Named,
        who: (PeerId, Attempt),
        origin: Option<Origin>,
        runs: usize,
    ) {
        self.registrations.remove(named, who);
        let Some(of) = self.waiting_of.get_mut(&origin) else { return };
        for cost in [&mut self.waiting, &mut *of] {
            cost.registrations -= 1;
            cost.runs -= runs;
        }
        if of.registrations == 0 {
            self.waiting_of.remove(&origin);
        }
    }

    /// The registration that a sender meets.
    pub(super) fn registration_for(&self, named: &Named) -> Result<Option<(PeerId, Attempt)>, Ambiguity> {
        self.registrations.find(named)
    }

    /// A registration that waits in exactly this room.
    pub(super) fn registration_in(&self, room: &Room) -> Option<(PeerId, Attempt)> {
        self.registrations.find_exact(room)
    }

    // ---- receivers of this worker ---------------------------------------------------------------

    /// Notes a receiver of this worker. Returns an open receiver whose room could be mistaken for
    /// the new one's room, or an error with one of two such rooms.
    pub(super) fn note_receiver(
        &mut self,
        named: &Named,
        receiver: SessionId,
    ) -> Result<Option<SessionId>, Room> {
        let other = self.receivers.find(named).map_err(|(one, _)| one);
        self.receivers.insert(named, receiver);
        other
    }

    /// A receiver of this worker has ended.
    pub(super) fn forget_receiver(&mut self, named: &Named, receiver: SessionId) {
        self.receivers.remove(named, receiver);
    }

    // ---- sides that have failed -----------------------------------------------------------------

    /// A sender has failed. Receivers that register later are told the cause.
    pub(super) fn sender_failed(
        &mut self,
        (fx, config): (&mut Effects, &NodeConfig),
        named: Named,
        cause: PeerCause,
        latecomers: Latecomers,
    ) {
        if matches!(latecomers, Latecomers::Left(0)) {
            return;
        }
        let until = fx.now() + config.timing.failed_room_ttl;
        let max = config.limits.max_failed_rooms;
        self.failed_senders.insert((named, cause), latecomers, until, (None, max, max));
        fx.arm_once(Timer::Rooms, until);
    }

    /// Why the sender has failed that this registration would have met. The newcomer is one of
    /// `ranks`.
    pub(super) fn failed_sender_for(&mut self, named: &Named, ranks: u32) -> Option<PeerCause> {
        self.failed_senders.take(named, ranks)
    }

    /// A receiver will never register. Its sender is told the cause when it comes.
    pub(super) fn receiver_failed(
        &mut self,
        (fx, config): (&mut Effects, &NodeConfig),
        named: Named,
        cause: PeerCause,
        origin: Option<Origin>,
    ) {
        let until = fx.now() + config.timing.failed_room_ttl;
        let (share, most) = (config.limits.connections_share.max(1), config.limits.max_failed_rooms);
        let bounds = (origin, most / share, most);
        self.failed_receivers.insert((named, cause), Latecomers::Left(1), until, bounds);
        fx.arm_once(Timer::Rooms, until);
    }

    /// Why a receiver that this sender would have met will never come.
    pub(super) fn failed_receiver_for(&mut self, named: &Named) -> Option<PeerCause> {
        self.failed_receivers.take(named, 1)
    }

    /// Forgets failed rooms whose time is over.
    pub(super) fn expire(&mut self, fx: &mut Effects) {
        self.failed_senders.expire(fx.now());
        self.failed_receivers.expire(fx.now());
        let next = [self.failed_senders.next_expiry(), self.failed_receivers.next_expiry()];
        if let Some(next) = next.into_iter().flatten().min() {
            fx.arm(Timer::Rooms, next);
        }
    }

    // ---- how many -------------------------------------------------------------------------------

    /// How many registrations wait.
    pub(super) fn registrations(&self) -> usize {
        self.registrations.len()
    }

    /// How many runs of pages the waiting registrations have.
    pub(super) fn waiting_runs(&self) -> usize {
        self.waiting.runs
    }

    /// How many failed rooms are remembered.
    pub(super) fn failed_rooms(&self) -> usize {
        self.failed_senders.len() + self.failed_receivers.len()
    }
}
