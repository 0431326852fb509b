//! All ranks of an engine behind one manager, for a server with one scheduler.
//!
//! A server whose ranks are processes or threads with schedulers of their own joins the ranks by a
//! [`consensus`](crate::consensus). A server that has one scheduler for several devices needs no agreement
//! among ranks: the scheduler opens a request on all ranks at once, gives all ranks the same page numbers,
//! and the state of the request is the state of the slowest rank. An [`EngineGroup`] does that. An engine
//! group is a [`KvManager`], so the [`queue`](crate::queue)s run on engine groups as well.
//!
//! No lock is held while code of the caller runs: neither during [`EngineGroup::drain`]'s closure, nor while
//! a [`ReadyEvent`](kv_core::ReadyEvent) is asked or dropped.
//!
//! ```
//! use kv_core::{KvManager, KvReceiver, Pages, Room, SessionOptions};
//! use kv_poll::{Change, EngineGroup, Worker};
//!
//! /// Receives a request on all ranks of a tensor-parallel engine, on each rank its heads of the same pages.
//! fn receive(workers: &[Worker], pages: Pages) -> Result<Vec<Change>, Box<dyn std::error::Error>> {
//!     let ranks = EngineGroup::new(workers.iter().map(Worker::manager).collect())?;
//!     let options = SessionOptions::default();
//!     let mut receiver = ranks.receiver("10.0.0.1:8998", Room::from(7), options)?;
//!     receiver.init(pages, None)?;
//!     // The request is reported once, when the last of the ranks has changed.
//!     let mut changes = Vec::new();
//!     ranks.drain(|change| changes.push(change));
//!     Ok(changes)
//! }
//! ```

mod changes;
mod deal;
mod draining;
mod members;
mod parts;
mod ready_event;
mod roster;
mod session;
mod shared;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use kv_core::{
    Geometry, KvArgs, KvManager, KvSender, OpenError, OsError, Pages, Quarantine, Reclaimed,
    RequestCacheGroups, Room, SessionOptions,
};
use rustix::event::{EventfdFlags, epoll, eventfd};

use crate::kv::{Change, Manager};
pub use changes::EngineChanges;
use deal::Deal;
pub use draining::EngineDraining;
use roster::Roster;
pub use session::{EngineReceiver, EngineSender, EngineSession};
use shared::Shared;

/// The managers of all ranks of one engine, as one manager. Clones are handles on the same group.
///
/// # Contract
///
/// * Page `i` of every rank's cache holds that rank's part of the same tokens. All caches have the same
///   number of pages and the same page size, and one allocator serves all ranks. The same holds for aux rows
///   and for the items of cache groups.
/// * Under decode context parallelism, pages are dealt to ranks in turn. Page `i` of all ranks together holds
///   [`Geometry::page_tokens`](kv_core::Geometry::page_tokens) consecutive tokens, and counts as one page.
///   The server says how many [`tokens`](SessionOptions::tokens) a request has, because only some of the
///   ranks may have a page for the end of the request.
/// * [`drain`](EngineGroup::drain) takes the place of the ranks' poll sets, which belong to the group from
///   now on. `drain` also hands on commands for which the ring of a rank had no room: a scheduler calls
///   `drain` once per step, whether or not the descriptor is readable. The stream of
///   [`changes`](EngineGroup::changes), and a task that awaits a session ([`AwaitSession`](crate::AwaitSession)), do
///   the same.
/// * The state of a session is the minimum of the states on its ranks. If the session fails on one rank, the
///   group aborts the session on the others, and the pages come back when no data operation of
///   any rank can touch them any more.
#[derive(Debug, Clone)]
pub struct EngineGroup {
    shared: Arc<Shared>,
}

/// Why workers cannot be the ranks of one group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineGroupError {
    /// The list of managers is empty.
    #[error("a group needs at least one rank")]
    Empty,
    /// Two ranks differ in a value that one scheduler needs to be the same on all ranks.
    #[error("{field} is {first} on the first rank, but {other} on rank number {index} of the group")]
    Differs {
        /// Name of the value.
        field: &'static str,
        /// The value on the first rank.
        first: String,
        /// The value on the other rank.
        other: String,
        /// Position of the other rank in the list of managers.
        index: usize,
    },
    /// Pages are dealt to another rank before the first rank of the list, so that the first rank has no page
    /// of some requests. Put the rank with `dcp_rank` 0 first.
    #[error("dcp_rank of the first rank is {got}, it must be 0")]
    FirstInContext {
        /// `dcp_rank` of the first rank.
        got: u32,
    },
    /// The operating system gives no descriptor.
    #[error(transparent)]
    Os(#[from] OsError),
}

impl EngineGroup {
    /// A group of the workers of one engine (of one data-parallel replica), which are given in the order of
    /// ranks.
    pub fn new(managers: Vec<Manager>) -> Result<EngineGroup, EngineGroupError> {
        let first = managers.first().ok_or(EngineGroupError::Empty)?;
        let context = first.args().geometry().layout.dcp_rank;
        if context > 0 {
            return Err(EngineGroupError::FirstInContext { got: context });
        }
        for (index, other) in managers.iter().enumerate().skip(1) {
            check(first.args(), other.args(), index)?;
        }
        let os = |call| move |error: rustix::io::Errno| OsError::new(call, error);
        let wake = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(os("epoll_create"))?;
        for (rank, manager) in (0..).zip(&managers) {
            let data = epoll::EventData::new_u64(rank);
            epoll::add(&wake, manager.poll_set(), data, epoll::EventFlags::IN).map_err(os("epoll_ctl"))?;
        }
        let untold = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(os("eventfd"))?;
        let data = epoll::EventData::new_u64(managers.len() as u64);
        epoll::add(&wake, &untold, data, epoll::EventFlags::IN).map_err(os("epoll_ctl"))?;
        let (args, roster) = (first.args().clone(), Mutex::new(Roster::new(managers.len())));
        let layers = managers.iter().map(|manager| manager.args().geometry().kv_layers()).collect();
        Ok(EngineGroup { shared: Arc::new(Shared { args, managers, layers, wake, untold, roster }) })
    }

    /// The managers of the ranks, in the order of ranks: for gauges and registrations.
    pub fn managers(&self) -> &[Manager] {
        &self.shared.managers
    }

    /// Resolves when the worker of every rank has had room for a command, or has stopped, since the call: after
    /// [`Backpressure`](kv_core::Backpressure), and after an opening that was refused. Room is not reserved.
    pub fn command_room(&self) -> impl Future<Output = ()> + Send + use<> {
        let rooms: Vec<_> = self.managers().iter().map(Manager::command_room).collect();
        async move {
            for room in rooms {
                room.await;
            }
        }
    }

    /// Tells all ranks to take no new requests and to serve those that they have, and returns at once.
    /// [`worker::Draining`](crate::worker::Draining) says what holds meanwhile.
    pub fn begin_drain(&self) -> EngineDraining {
        EngineDraining::new(self.shared.managers.iter().map(Manager::begin_drain).collect())
    }

    /// Hands every session that has changed since the last call to `f`, and returns the number of calls of
    /// `f`. The group is not locked while `f` runs. Should `f` panic, the next call hands on the changes that
    /// `f` was not called with, and the descriptor wakes for them.
    pub fn drain(&self, mut f: impl FnMut(Change)) -> usize {
        let mut untold = self.gather();
        let _telling = Telling(&self.shared);
        let mut told = 0;
        while untold > 0 {
            // Taken out on its own, because the lock must not be held while `f` runs.
            let Some(change) = self.shared.lock().next_change() else { break };
            (untold, told) = (untold - 1, told + 1);
            f(change);
        }
        told
    }

    /// The changes as a stream, for servers that await them instead of draining the group.
    pub fn changes(&self) -> EngineChanges {
        EngineChanges::new(self.clone())
    }

    /// The next change; what is left then makes the descriptor of the group readable.
    fn next_change(&self) -> Option<Change> {
        self.gather();
        let _telling = Telling(&self.shared);
        self.shared.lock().next_change()
    }

    /// Takes note of what has changed on the ranks; the number of requests of which the scheduler has yet to be told.
    fn gather(&self) -> usize {
        let (over, untold) = {
            let mut roster = self.shared.lock();
            let _ = rustix::io::read(&self.shared.untold, &mut [0_u8; 8]);
            for (rank, manager) in self.shared.managers.iter().enumerate() {
                manager.poll_set().drain(|change| {
                    let known = roster.note(rank, change);
                    debug_assert!(known, "a session of a rank that was not opened by its group");
                });
            }
            (roster.settle(), roster.num_untold())
        };
        // After the lock: ready events of the caller may be dropped with the requests.
        drop(over);
        untold
    }

    /// Takes the pages that came back from all ranks after the handle of their session was dropped. Also a server that
    /// awaits its sessions, and drains nothing, gets them.
    pub fn orphans(&self) -> Vec<Pages> {
        self.gather_and_tell();
        self.shared.lock().take_orphans()
    }

    /// Takes the items of cache groups that came back from all ranks after their session's handle was
    /// dropped.
    pub fn orphan_groups(&self) -> Vec<RequestCacheGroups> {
        self.gather_and_tell();
        self.shared.lock().take_orphan_groups()
    }

    /// Takes note of what has changed; what the scheduler is to be told makes the descriptor of the group readable.
    fn gather_and_tell(&self) {
        let _telling = Telling(&self.shared);
        self.gather();
    }

    fn geometries(&self) -> impl Iterator<Item = &Geometry> {
        self.shared.managers.iter().map(|manager| manager.args().geometry())
    }
}

/// Readable while there is something to drain.
impl AsFd for EngineGroup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }
}

impl KvManager for EngineGroup {
    type Sender = EngineSender;
    type Receiver = EngineReceiver;

    /// The arguments of the first rank.
    fn args(&self) -> &KvArgs {
        &self.shared.args
    }

    fn sender(
        &self,
        bootstrap_addr: &str,
        room: Room,
        dest_ranks: &[u32],
        options: SessionOptions,
    ) -> Result<EngineSender, OpenError> {
        let deal = Deal::new(self.geometries(), options.tokens, 0);
        let open =
            |_, manager: &Manager| manager.sender(bootstrap_addr, room.clone(), dest_ranks, options.clone());
        EngineSession::open(&self.shared, room.clone(), deal, open, |sender| Some(sender.lease_ref()))
    }

    fn receiver(
        &self,
        bootstrap_addr: &str,
        room: Room,
        options: SessionOptions,
    ) -> Result<EngineReceiver, OpenError> {
        let deal = Deal::new(self.geometries(), options.tokens, options.prefix_pages);
        let prefixes: Vec<usize> = (0..self.shared.managers.len()).map(|rank| deal.prefix(rank)).collect();
        let open = |rank: usize, manager: &Manager| {
            let prefix_pages = prefixes.get(rank).copied().unwrap_or_default();
            let options = options.clone().with(|options| options.prefix_pages = prefix_pages);
            manager.receiver(bootstrap_addr, room.clone(), options)
        };
        EngineSession::open(&self.shared, room.clone(), deal, open, |_| None)
    }

    /// A page counts once for each peer and reason, however many ranks wait for the page: the numbers for a
    /// peer and a reason are the numbers of the rank that waits for most.
    fn quarantine(&self) -> Vec<Quarantine> {
        let ranks = self.shared.managers.iter().flat_map(Manager::quarantine);
        Quarantine::gather(ranks, usize::max)
    }

    fn leave_behind(&self, left: Reclaimed) {
        self.shared.lock().keep(left);
    }
}

/// A drain that tells the scheduler, until this is dropped. What is untold then, because `f` has panicked,
/// makes the descriptor of the group readable.
struct Telling<'a>(&'a Shared);

impl Drop for Telling<'_> {
    fn drop(&mut self) {
        let Telling(shared) = self;
        if shared.lock().num_untold() > 0 {
            let _ = rustix::io::write(&shared.untold, &1_u64.to_ne_bytes());
        }
    }
}

/// Refuses a rank that differs from the first rank in a value that all ranks must have in common.
fn check(first: &KvArgs, other: &KvArgs, index: usize) -> Result<(), EngineGroupError> {
    let same = |field, first: String, other: String| match first == other {
        true => Ok(()),
        false => Err(EngineGroupError::Differs { field, first, other, index }),
    };
    let (a, b) = (first.geometry(), other.geometry());
    same("engine", first.worker().engine.to_string(), other.worker().engine.to_string())?;
    same("num_pages", a.num_pages.to_string(), b.num_pages.to_string())?;
    same("page_size", a.page_size.to_string(), b.page_size.to_string())?;
    let dealt = |geometry: &Geometry| geometry.layout.dcp_size.to_string();
    same("dcp_size", dealt(a), dealt(b))?;
    let rows = |rows: Option<u32>| rows.map_or_else(|| "none".to_owned(), |rows| rows.to_string());
    same("aux rows", rows(a.aux_rows()), rows(b.aux_rows()))?;
    same("dp_rank", a.parallel.dp_rank.to_string(), b.parallel.dp_rank.to_string())
}

#[cfg(test)]
mod tests;
