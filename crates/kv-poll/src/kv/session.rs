//! Session handles: a scheduler holds one for each request in transfer.

use std::fmt;
use std::marker::PhantomData;

use kv_core::machine::Submit;
use kv_core::proto::{Command, Resource};
use kv_core::{
    Cause, ChunkId, Incarnation, KvPoll, KvReceiver, KvSender, KvSession, LeaseRef, Pages, Phase, Reclaimed,
    RequestCacheGroups, Room, SessionId, TransferError,
};

use super::words::KvMachine;
use crate::awaiting::Hidden;
use crate::worker::waiters::Waiting;
use crate::worker::{Failure, Handle, Watch};

/// The sending half of a transfer, on a prefill worker.
pub type Sender = Session<Sending>;
/// The receiving half of a transfer, on a decode worker.
pub type Receiver = Session<Receiving>;

/// The role of a [`Sender`], as a type.
#[derive(Debug)]
pub enum Sending {}
/// The role of a [`Receiver`], as a type.
#[derive(Debug)]
pub enum Receiving {}

/// One half of one transfer. No method blocks, and [`poll`](KvSession::poll) is one atomic load.
///
/// Dropping a session that was not reclaimed aborts the session. The pages then go to
/// [`Manager::orphans`](crate::Manager::orphans) as they come back, items of cache groups to
/// [`Manager::orphan_groups`](crate::Manager::orphan_groups).
#[must_use = "dropping a session aborts it"]
pub struct Session<Role> {
    handle: Handle<KvMachine>,
    /// In a box, so that a scheduler that polls many sessions walks over little memory.
    own: Box<Own>,
    role: PhantomData<fn() -> Role>,
}

/// What only the handle of a session needs.
struct Own {
    room: Room,
    /// The incarnation of the worker.
    incarnation: Incarnation,
    /// `Pages` without a page, of the pool of the first pages given; `None` before them.
    pool: Option<Pages>,
    /// The first page of each chunk of that pool, by which the place of the chunk is known when the chunk
    /// comes back.
    given: Vec<u32>,
    /// Number of chunks given.
    chunks: u32,
}

impl<Role> Session<Role> {
    pub(super) fn new(handle: Handle<KvMachine>, room: Room, incarnation: Incarnation) -> Session<Role> {
        let own = Box::new(Own { room, incarnation, pool: None, given: Vec::new(), chunks: 0 });
        Session { handle, own, role: PhantomData }
    }

    /// The same session under another role: for an owner that knows the role from elsewhere.
    pub(crate) fn cast<To>(self) -> Session<To> {
        let Session { handle, own, role: _ } = self;
        Session { handle, own, role: PhantomData }
    }

    pub(crate) fn watch(&self) -> Watch<KvMachine> {
        self.handle.watch()
    }
}

impl<Role> KvSession for Session<Role> {
    fn id(&self) -> SessionId {
        self.handle.id()
    }

    fn room(&self) -> &Room {
        &self.own.room
    }

    fn poll(&self) -> KvPoll {
        self.handle.poll()
    }

    fn failure(&self) -> Option<TransferError> {
        Some(match self.handle.failure()? {
            Failure::Machine(error) => *error,
            Failure::WorkerStopped { at } => {
                let phase = match at {
                    KvPoll::Bootstrapping => Phase::Bootstrap,
                    KvPoll::WaitingForInput => Phase::Rendezvous,
                    _ => Phase::Transfer,
                };
                TransferError::new(self.own.room.clone(), phase, Cause::WorkerStopped)
            }
        })
    }

    fn abort(&mut self) {
        self.handle.abort();
    }

    fn reclaim(&mut self) -> Option<Reclaimed> {
        let mut reclaimed = Reclaimed::default();
        let mut released = Vec::new();
        for resource in self.handle.reclaim()? {
            match resource {
                Resource::Pages(pages) => released.push(pages),
                Resource::RequestCacheGroups { groups, skipped } => {
                    // Of several, the machine has refused all but the first.
                    reclaimed.skipped.extend(skipped);
                    for items in groups {
                        if let Err(refused) = reclaimed.groups.push(items) {
                            let mut rest = RequestCacheGroups::none();
                            // The first of an empty list always gets in.
                            let _ = rest.push(refused.items);
                            self.handle.leave_behind(rest.into());
                        }
                    }
                }
            }
        }
        // Tokens of another pool than the first pages, against the session's contract.
        let pool = self.own.pool.take().unwrap_or_default();
        let strange = |pages: &mut Pages| !pages.is_empty() && !pages.is_of_same_pool(&pool);
        for pages in released.extract_if(.., strange) {
            self.handle.leave_behind(pages.into());
        }
        for pages in in_order(released, &self.own.given) {
            if let Err(pages) = reclaimed.pages.append(pages) {
                // More than one `Pages` can own.
                self.handle.leave_behind(pages.into());
            }
        }
        Some(reclaimed)
    }
}

impl<Role> Hidden for Session<Role> {
    fn waiting(&self) -> Waiting {
        self.handle.waiting()
    }

    fn is_beyond_reclaim(&self) -> bool {
        self.handle.is_beyond_reclaim()
    }
}

impl KvSender for Session<Sending> {
    fn lease_ref(&self) -> LeaseRef {
        LeaseRef::new(self.own.incarnation, self.handle.id())
    }

    fn next_chunk(&self) -> ChunkId {
        ChunkId(self.own.chunks)
    }
}

impl KvReceiver for Session<Receiving> {}

impl<Role> Submit<Command> for Session<Role> {
    fn submit(&mut self, command: Command) -> Result<(), Command> {
        let first = command.pages().map(|pages| {
            let first = pages.list().runs().first().map(|run| run.start);
            first.map(|first| (first, pages.none_of_pool()))
        });
        self.handle.submit(command)?;
        if let Some(first) = first {
            self.own.chunks = self.own.chunks.saturating_add(1);
            if let Some((first, pool)) = first
                && self.own.pool.get_or_insert_with(|| pool.none_of_pool()).is_of_same_pool(&pool)
            {
                self.own.given.push(first);
            }
        }
        Ok(())
    }
}

impl<Role> fmt::Debug for Session<Role> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (id, room, poll) = (self.id(), self.room(), self.poll());
        f.debug_struct("Session").field("id", &id).field("room", room).field("poll", &poll).finish()
    }
}

/// Puts chunks, which come back in any order, into the order in which they were given. Chunks of one pool
/// own distinct pages, so the first page names the chunk. Empty chunks come first.
fn in_order(mut released: Vec<Pages>, given: &[u32]) -> Vec<Pages> {
    if released.len() > 1 {
        let mut places: Vec<(u32, usize)> =
            given.iter().enumerate().map(|(place, page)| (*page, place)).collect();
        places.sort_unstable();
        released.sort_by_cached_key(|pages| {
            let first = pages.list().runs().first()?.start;
            let at = places.binary_search_by_key(&first, |(page, _)| *page).ok()?;
            places.get(at).map(|(_, place)| *place)
        });
    }
    released
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::EngineGroup;
    use crate::kv::Manager;
    use crate::worker::cell::{Cell, Side};
    use crate::worker::shared::Shared;
    use crate::worker::tests::{pages, queues};
    use kv_core::machine::SessionCommand;
    use kv_core::{Backpressure, CacheGroupItems, KvManager, OpenError, PageList, PagePool, SessionOptions};

    fn open(manager: &Manager) -> Result<Sender, OpenError> {
        manager.sender("", Room::from(3), &[], SessionOptions::default())
    }

    /// Plays the worker for one command.
    fn take(shared: &Shared<KvMachine>) -> (Arc<Cell<KvMachine>>, Command) {
        let message = shared.next_command().unwrap();
        (message.cell, message.command)
    }

    #[test]
    fn a_full_ring_returns_the_pages_and_counts_nothing_as_out() {
        let (shared, manager) = queues(8, 2);
        let mut sender = open(&manager).unwrap();
        sender.init(3, None).unwrap();
        assert_eq!(sender.send(pages(&[1, 2, 3])), Err(Backpressure(pages(&[1, 2, 3]))));
        assert_eq!(sender.init(3, None), Err(Backpressure(())));
        assert_eq!(open(&manager).map(drop), Err(OpenError::Backpressure));
        let (cell, command) = take(&shared);
        assert!(matches!(command, Command::OpenSender { .. }));
        assert!(matches!(take(&shared).1, Command::InitSender { num_pages: 3, .. }));
        cell.set(KvPoll::Success, None);
        assert_eq!(sender.reclaim(), Some(Reclaimed::default()));
    }

    #[test]
    fn a_refused_send_does_not_hide_that_the_session_is_reclaimable() {
        let (shared, manager) = queues(8, 1);
        let mut sender = open(&manager).unwrap();
        sender.handle.cell().set(KvPoll::Success, None);
        let refused = sender.send(pages(&[1]));
        assert!(refused.is_err());
        let mut changes = Vec::new();
        shared.poll_set.drain(|change: crate::Change| changes.push(change.reclaimable));
        assert_eq!(changes, [true]);
    }

    #[test]
    fn aborting_works_with_a_full_ring_and_is_queued_once() {
        let (shared, manager) = queues(8, 1);
        let mut sender = open(&manager).unwrap();
        for _ in 0..3 {
            sender.abort();
        }
        drop(sender);
        assert_eq!(shared.aborts_waiting(), 1);
        assert!(shared.next_abort().is_some_and(|cell| cell.is_abort_wanted()));
    }

    #[test]
    fn pages_come_back_in_the_order_given_whatever_the_order_of_release() {
        let (shared, manager) = queues(8, 8);
        let mut sender = open(&manager).unwrap();
        let chunks: [&[u32]; 4] = [&[9, 10], &[1, 2], &[], &[5]];
        for chunk in chunks {
            sender.send(pages(chunk)).unwrap();
        }
        let (cell, _) = take(&shared);
        let mut tokens: Vec<_> = (0..4).filter_map(|_| take(&shared).1.into_resource()).collect();
        assert_eq!(tokens.len(), 4);
        cell.set(KvPoll::Success, None);
        while let Some(token) = tokens.pop() {
            assert_eq!(sender.reclaim(), None, "pages are out");
            shared.give_back(&cell, token);
        }
        assert_eq!(sender.reclaim().map(|back| back.pages), Some(pages(&[9, 10, 1, 2, 5])));
        assert_eq!(manager.orphans(), []);
    }

    #[test]
    fn pages_of_a_second_pool_come_back_to_the_manager_and_none_is_lost() {
        let (shared, manager) = queues(8, 8);
        let pools = [4, 4].map(PagePool::new);
        let mut sender = open(&manager).unwrap();
        for pool in &pools {
            sender.send(pool.adopt(PageList::from_pages([3, 1]).unwrap()).unwrap()).unwrap();
        }
        let (cell, _) = take(&shared);
        cell.set(KvPoll::Success, None);
        for _ in &pools {
            shared.give_back(&cell, take(&shared).1.into_resource().unwrap());
        }
        pools[0].release(sender.reclaim().unwrap().pages).unwrap();
        let mut orphans = manager.orphans();
        pools[1].release(orphans.pop().unwrap()).unwrap();
        assert!(orphans.is_empty() && pools.iter().all(|pool| pool.num_out() == 0));
    }

    #[test]
    fn pages_of_another_pool_with_the_same_numbers_take_no_place_of_the_first_ones() {
        // Whatever the order in which the chunks come back.
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1], [1, 3, 2, 0]] {
            let (shared, manager) = queues(8, 8);
            let pools = [8, 8].map(PagePool::new);
            let mut sender = open(&manager).unwrap();
            for (pool, page) in [(0, 3), (0, 5), (1, 3), (1, 5)] {
                let list = PageList::from_pages([page, page + 1]).unwrap();
                sender.send(pools[pool].adopt(list).unwrap()).unwrap();
            }
            let (cell, _) = take(&shared);
            cell.set(KvPoll::Success, None);
            let mut tokens: Vec<_> = (0..4).map(|_| take(&shared).1.into_resource()).collect();
            for at in order {
                shared.give_back(&cell, tokens[at].take().unwrap());
            }
            let back = pools[0].release(sender.reclaim().unwrap().pages);
            assert_eq!(back, Ok(PageList::from_pages([3, 4, 5, 6]).unwrap()), "{order:?}");
            manager.orphans().into_iter().for_each(|orphan| drop(pools[1].release(orphan).unwrap()));
            assert_eq!(pools.each_ref().map(PagePool::num_out), [0, 0]);
        }
    }

    #[test]
    fn what_an_owner_leaves_behind_is_taken_from_the_manager_or_the_group() {
        let left = || {
            let mut left = Reclaimed::new(pages(&[1, 2]));
            left.groups = groups(&[3]);
            left
        };
        let (_shared, manager) = queues(8, 8);
        manager.leave_behind(left());
        manager.leave_behind(Reclaimed::default());
        assert_eq!((manager.gauges().pages_orphaned(), manager.gauges().items_orphaned()), (2, 1));
        let group = EngineGroup::new(vec![manager.clone()]).unwrap();
        group.leave_behind(left());
        group.leave_behind(Reclaimed::default());
        for (orphans, items) in
            [(manager.orphans(), manager.orphan_groups()), (group.orphans(), group.orphan_groups())]
        {
            assert_eq!((orphans, items), (vec![pages(&[1, 2])], vec![groups(&[3])]));
        }
    }

    #[test]
    fn a_dropped_session_is_aborted_and_loses_no_page() {
        let (shared, manager) = queues(8, 8);
        let mut sender = open(&manager).unwrap();
        sender.send(pages(&[1])).unwrap();
        sender.send(pages(&[2])).unwrap();
        let (cell, _) = take(&shared);
        shared.give_back(&cell, take(&shared).1.into_resource().unwrap());
        drop(sender);
        assert!(cell.is_abort_wanted());
        assert_eq!((manager.gauges().pages_orphaned(), manager.orphans()), (1, vec![pages(&[1])]));
        shared.give_back(&cell, take(&shared).1.into_resource().unwrap());
        assert_eq!((manager.gauges().pages_orphaned(), manager.orphans()), (1, vec![pages(&[2])]));
        assert_eq!(manager.gauges().pages_orphaned(), 0);
    }

    fn groups(items: &[u32]) -> RequestCacheGroups {
        let mut groups = RequestCacheGroups::none();
        groups.push(CacheGroupItems::new(2, pages(items))).unwrap();
        groups
    }

    #[test]
    fn items_of_cache_groups_come_back_with_the_pages_or_to_the_manager() {
        for taken in [true, false] {
            let (shared, manager) = queues(8, 8);
            let mut sender = open(&manager).unwrap();
            sender.give_groups(groups(&[3, 4])).unwrap();
            sender.send(pages(&[1])).unwrap();
            let (cell, _) = take(&shared);
            let tokens: Vec<_> = (0..2).filter_map(|_| take(&shared).1.into_resource()).collect();
            cell.set(KvPoll::Success, None);
            for token in tokens.into_iter().rev() {
                assert_eq!(sender.reclaim(), None, "pages are out");
                shared.give_back(&cell, token);
            }
            if taken {
                let mut back = Reclaimed::new(pages(&[1]));
                back.groups = groups(&[3, 4]);
                assert_eq!((sender.reclaim(), manager.orphan_groups()), (Some(back), vec![]));
                assert_eq!(sender.reclaim(), None, "everything is back");
            } else {
                drop(sender);
                assert_eq!(manager.orphans(), [pages(&[1])]);
                assert_eq!(manager.gauges().items_orphaned(), 2);
                assert_eq!(manager.orphan_groups(), [groups(&[3, 4])]);
            }
            assert_eq!(manager.gauges().items_orphaned(), 0);
        }
    }

    #[test]
    fn items_of_a_dropped_session_are_orphans_and_a_full_ring_returns_them() {
        let (shared, manager) = queues(8, 2);
        let mut sender = open(&manager).unwrap();
        sender.give_groups(groups(&[3])).unwrap();
        assert_eq!(sender.give_groups(groups(&[5])), Err(Backpressure(groups(&[5]))));
        let (cell, _) = take(&shared);
        let token = take(&shared).1.into_resource().unwrap();
        drop(sender);
        assert_eq!(manager.orphan_groups(), []);
        shared.give_back(&cell, token);
        assert_eq!(manager.orphan_groups(), [groups(&[3])]);
    }

    #[test]
    fn a_session_counts_until_both_handle_and_worker_are_done() {
        let (shared, manager) = queues(2, 8);
        let (first, _second) = (open(&manager).unwrap(), open(&manager).unwrap());
        assert_eq!(open(&manager).map(drop), Err(OpenError::TooManySessions { open: 2, max: 2 }));
        let (cell, _) = take(&shared);
        drop(first);
        assert_eq!(manager.gauges().sessions_open, 2);
        shared.leave(&cell, Side::Worker);
        assert_eq!(manager.gauges().sessions_open, 1);
        assert!(open(&manager).is_ok());
    }

    #[test]
    fn commands_that_meet_a_stopped_worker_fail_and_their_pages_are_free() {
        let (shared, manager) = queues(8, 8);
        let mut sender = open(&manager).unwrap();
        sender.send(pages(&[1])).unwrap();
        shared.close();
        sender.send(pages(&[2])).unwrap();
        assert_eq!(sender.failure().map(|error| error.cause), Some(Cause::WorkerStopped));
        assert_eq!(sender.reclaim().map(|back| back.pages), Some(pages(&[1, 2])));
        assert_eq!(open(&manager).map(drop), Err(OpenError::WorkerStopped));
        assert_eq!(manager.gauges().sessions_open, 0);
    }
}
