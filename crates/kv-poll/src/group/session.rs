//! The handle on the sessions of one request on all ranks.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use kv_core::machine::Submit;
use kv_core::proto::Command;
use kv_core::{
    ChunkId, KvPoll, KvReceiver, KvSender, KvSession, LeaseRef, OpenError, Reclaimed, Room, SessionId,
    TransferError,
};

use super::deal::Deal;
use super::members::Members;
use super::shared::{Rank, Shared};
use crate::awaiting::Hidden;
use crate::kv::{KvMachine, Manager, Receiving, Sending, Session};
use crate::worker::Watch;
use crate::worker::waiters::Waiting;

/// The sending half of a transfer, on all ranks of a prefill engine.
pub type EngineSender = EngineSession<Sending>;
/// The receiving half of a transfer, on all ranks of a decode engine.
pub type EngineReceiver = EngineSession<Receiving>;

/// One half of one transfer on all ranks of an engine, with the methods of a single rank's
/// [`Session`](crate::Session). The number of the session is the number that the first rank has given.
///
/// [`poll`](KvSession::poll) is one atomic load for each rank. The other calls take the lock of the group,
/// which is held for moments only, and never while code of the caller runs.
///
/// Dropping a session that was not reclaimed aborts the session. The pages then go to
/// [`EngineGroup::orphans`](super::EngineGroup::orphans), items of cache groups to
/// [`EngineGroup::orphan_groups`](super::EngineGroup::orphan_groups).
#[must_use = "dropping a session aborts it"]
pub struct EngineSession<Role> {
    shared: Arc<Shared>,
    id: SessionId,
    room: Room,
    /// The state of the session on each rank, in the order of ranks.
    ranks: Vec<Watch<KvMachine>>,
    /// On a sender, what a router carries to the receiver, in the order of ranks.
    lease_refs: Vec<LeaseRef>,
    /// Everything is back, and the group has forgotten the session.
    closed: bool,
    /// What it had failed of by then.
    failure: Option<Box<TransferError>>,
    role: PhantomData<fn() -> Role>,
}

impl<Role> EngineSession<Role> {
    /// Opens the sessions of one request on all ranks: `open` opens the session of one rank, which is named
    /// by its position. There is at least one rank: see [`EngineGroup::new`](super::EngineGroup::new).
    pub(super) fn open(
        shared: &Arc<Shared>,
        room: Room,
        deal: Deal,
        open: impl Fn(usize, &Manager) -> Result<Session<Role>, OpenError>,
        lease_ref: fn(&Session<Role>) -> Option<LeaseRef>,
    ) -> Result<EngineSession<Role>, OpenError> {
        // The group stays locked until it knows the sessions: a drain on another thread that came in between
        // would not know whose the first change of a rank is. No code of the caller runs meanwhile.
        let mut roster = shared.lock();
        // Before any rank opens its session: the peers of a rank that had opened it would be told its end, and the
        // room could not be opened again.
        if !shared.managers.iter().all(Manager::has_room) {
            return Err(OpenError::Backpressure);
        }
        let open = shared.managers.iter().enumerate().map(|(rank, manager)| open(rank, manager));
        let sessions = open.collect::<Result<Vec<_>, _>>()?;
        let id = sessions.first().map_or(SessionId(0), KvSession::id);
        let lease_refs = sessions.iter().filter_map(lease_ref).collect();
        let ranks = sessions.iter().map(Session::watch).collect();
        roster.enter(id, sessions.into_iter().map(Session::cast::<Rank>).collect(), deal);
        drop(roster);
        let shared = Arc::clone(shared);
        Ok(EngineSession {
            shared,
            id,
            room,
            ranks,
            lease_refs,
            closed: false,
            failure: None,
            role: PhantomData,
        })
    }
}

impl<Role> KvSession for EngineSession<Role> {
    fn id(&self) -> SessionId {
        self.id
    }

    fn room(&self) -> &Room {
        &self.room
    }

    fn poll(&self) -> KvPoll {
        self.ranks.iter().map(Watch::poll).min().unwrap_or(KvPoll::Failed)
    }

    fn failure(&self) -> Option<TransferError> {
        match self.closed {
            true => self.failure.as_deref().cloned(),
            false => self.shared.lock().get(self.id)?.failure(),
        }
    }

    fn abort(&mut self) {
        if let Some(members) = self.shared.lock().touch(self.id) {
            members.abort();
        }
    }

    fn reclaim(&mut self) -> Option<Reclaimed> {
        let (reclaimed, over) = {
            let mut roster = self.shared.lock();
            let members = roster.touch(self.id)?;
            let reclaimed = members.reclaim()?;
            self.failure = members.failure().map(Box::new);
            (reclaimed, roster.forget(self.id))
        };
        // After the lock: a ready event of the caller may be dropped with the members.
        drop(over);
        self.closed = true;
        Some(reclaimed)
    }
}

impl<Role> Hidden for EngineSession<Role> {
    fn waiting(&self) -> Waiting {
        Waiting::on(self.ranks.iter().map(Watch::awaited))
    }

    fn rings(&self) -> Option<Waiting> {
        let behind = self.shared.lock().get(self.id).is_some_and(Members::is_behind);
        behind.then(|| Waiting::on(self.shared.managers.iter().map(Manager::awaited)))
    }

    /// Hands on what waits for room in the ring of a rank, and ends the request on all ranks if the request has
    /// failed on one.
    fn attend(&self) {
        let over = {
            let mut roster = self.shared.lock();
            roster.touch(self.id);
            roster.settle()
        };
        // After the lock: ready events of the caller may be dropped with the members.
        drop(over);
    }

    fn is_beyond_reclaim(&self) -> bool {
        // No rank gives its pages to the scheduler while another rank's may still be touched.
        let lost = |members: &Members<_>| members.sessions().any(Hidden::is_beyond_reclaim);
        self.closed || self.shared.lock().get(self.id).is_none_or(lost)
    }
}

/// Each rank gets its part of the command, and of an announcement the layers that the rank has.
impl<Role> Submit<Command> for EngineSession<Role> {
    fn submit(&mut self, command: Command) -> Result<(), Command> {
        match self.shared.lock().touch(self.id) {
            Some(members) => members.submit(command, &self.shared.layers),
            None => Err(command),
        }
    }
}

impl KvSender for EngineSession<Sending> {
    /// The reference to the lease of the first rank; [`lease_refs`](KvSender::lease_refs) has those of all
    /// ranks.
    fn lease_ref(&self) -> LeaseRef {
        // A sender has a reference for each rank, and a group has at least one rank.
        self.lease_refs[0].clone()
    }

    fn lease_refs(&self) -> Vec<LeaseRef> {
        self.lease_refs.clone()
    }

    fn next_chunk(&self) -> ChunkId {
        self.shared.lock().get(self.id).map_or(ChunkId(0), Members::next_chunk)
    }
}

impl KvReceiver for EngineSession<Receiving> {}

impl<Role> Drop for EngineSession<Role> {
    fn drop(&mut self) {
        if self.closed {
            return;
        }
        if let Some(members) = self.shared.lock().touch(self.id) {
            members.abandoned = true;
            members.abort();
        }
    }
}

impl<Role> fmt::Debug for EngineSession<Role> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineSession")
            .field("id", &self.id)
            .field("room", &self.room)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use kv_core::{KvManager, SessionOptions};

    use crate::EngineGroup;
    use crate::worker::tests::{idle, pages};

    use super::*;

    #[test]
    fn the_state_is_read_while_another_thread_holds_the_lock_of_the_group() {
        let (ranks, managers): (Vec<_>, Vec<_>) = (0..2).map(|_| idle()).unzip();
        let group = EngineGroup::new(managers).unwrap();
        let mut sender = group.sender("", Room::from(1), &[], SessionOptions::default()).unwrap();
        sender.send(pages(&[1, 2])).unwrap();
        let shared = Arc::clone(&sender.shared);
        let roster = shared.lock();
        assert_eq!(sender.poll(), KvPoll::Bootstrapping);
        let cells: Vec<_> = ranks.iter().map(|link| link.next_command().unwrap().cell).collect();
        cells[0].set(KvPoll::Success, None);
        cells[1].set(KvPoll::Transferring, None);
        assert_eq!(sender.poll(), KvPoll::Transferring, "the slowest rank counts");
        cells[1].set(KvPoll::Failed, None);
        assert_eq!(sender.poll(), KvPoll::Failed);
        drop(roster);
    }
}
