//! The traits that schedulers program against, named after SGLang's `KVManager`, `KVSender` and
//! `KVReceiver`.
//!
//! This file contains no implementation: `kv-poll` implements the traits for one rank, and for all
//! ranks of an engine in one process.

use crate::announce::FinalLayers;
use crate::args::KvArgs;
use crate::command::{Command, Resource};
use crate::error::{Backpressure, OpenError, TransferError};
use crate::groups::RequestCacheGroups;
use crate::id::{AuxIndex, ChunkId, Room, SessionId};
use crate::lease::LeaseRef;
use crate::machine::{SessionCommand, Submit};
use crate::pages::Pages;
use crate::poll::KvPoll;
use crate::quarantine::Quarantine;
use crate::session_options::SessionOptions;

/// Opens the sessions of one worker. A manager is a handle: all its clones share one poll set, which one
/// thread should drain.
pub trait KvManager {
    /// The type of sessions that send.
    type Sender: KvSender;
    /// The type of sessions that receive.
    type Receiver: KvReceiver;

    /// The arguments with which the worker was started.
    fn args(&self) -> &KvArgs;

    /// Opens the sending session of a request on a prefill worker. `bootstrap_addr` is the address
    /// of the bootstrap server at which this worker is registered. The length of `dest_ranks` says how
    /// many decode ranks register for the room; which ranks register is not checked. If the list is
    /// empty, [`KvArgs::num_receivers`] ranks register; if that is 0, too, the first receiver tells how
    /// many ranks its engine has for this rank.
    fn sender(
        &self,
        bootstrap_addr: &str,
        room: Room,
        dest_ranks: &[u32],
        options: SessionOptions,
    ) -> Result<Self::Sender, OpenError>;

    /// Opens the receiving session of a request on a decode worker. `bootstrap_addr` is the address
    /// of the prefill engine's bootstrap server.
    fn receiver(
        &self,
        bootstrap_addr: &str,
        room: Room,
        options: SessionOptions,
    ) -> Result<Self::Receiver, OpenError>;

    /// The pages of ended sessions that cannot be used again yet: for each peer and reason, how many
    /// pages, and what would release them. For people and logs; the list may be a little old. Empty
    /// if the manager keeps no list.
    fn quarantine(&self) -> Vec<Quarantine> {
        Vec::new()
    }

    /// Gives the manager pages and items that no data operation touches and that their owner cannot free,
    /// because the owner is about to be dropped. The manager keeps them beside those of dropped sessions until
    /// the server takes them. A manager that keeps nothing drops them: then the pages are lost to their pool.
    fn leave_behind(&self, left: Reclaimed) {
        drop(left);
    }
}

/// One side of the transfer of one request.
///
/// A session ends exactly once, in [`KvPoll::Success`] or [`KvPoll::Failed`], before its deadline.
/// Pages that the session is given belong to the session until [`reclaim`](KvSession::reclaim)
/// hands them back.
///
/// Everything that a scheduler tells a session is a [`Command`] that the session [submits](Submit).
/// Methods that return [`Backpressure`], here and in [`KvSender`] and [`KvReceiver`], are
/// shorthands for that. A command that came back may be submitted again as it is,
/// unless the session was reclaimed: such a session refuses every command.
///
/// Sessions are usable as trait objects, boxed ones wherever a session is:
///
/// ```
/// use kv_core::{KvSession, Reclaimed};
///
/// /// Takes back what the ended sessions of a table hold, and leaves the others in the table.
/// fn sweep(open: &mut Vec<Box<dyn KvSession>>) -> Vec<Reclaimed> {
///     let mut back = Vec::new();
///     open.retain_mut(|session| match session.reclaim() {
///         Some(reclaimed) => {
///             back.push(reclaimed);
///             false
///         }
///         None => true,
///     });
///     back
/// }
/// # assert!(sweep(&mut Vec::new()).is_empty());
/// ```
pub trait KvSession: Submit<Command> {
    /// The session's id within its worker, as `PollSet` reports it.
    fn id(&self) -> SessionId;

    /// The room of the request.
    fn room(&self) -> &Room;

    /// The state now. The call is one atomic load without side effects, from any thread.
    fn poll(&self) -> KvPoll;

    /// Why the session failed; `None` unless [`poll`](KvSession::poll) says `Failed`.
    fn failure(&self) -> Option<TransferError>;

    /// Asks the session to end, at any stage. A second call has no effect, and a session that has
    /// ended stays as it is. The peer is told, and the pages come back once no data operation can touch them.
    fn abort(&mut self);

    /// Gives the items of all cache groups of the request at once: slots of recurrent layers, the
    /// last pages of a sliding window, the pages of a draft model. May be called once. A sender
    /// calls it before the chunk that completes the request; when that chunk is final, the items
    /// must be final, too. A receiver calls it before `init`. `Success` then means that the bytes
    /// of the items are in place, too.
    ///
    /// Both sides name the same groups. If only one side names a group, nothing of the group is
    /// moved if it is [optional](crate::CacheGroup::optional); otherwise the session fails. The
    /// sender must have all items that the receiver wants, and may have earlier items besides.
    fn give_groups(&mut self, groups: RequestCacheGroups) -> Result<(), Backpressure<RequestCacheGroups>> {
        let command = Command::RequestCacheGroups { session: self.id(), groups };
        self.submit(command).map_err(|refused| match refused.into_resource() {
            Some(Resource::RequestCacheGroups { groups, .. }) => Backpressure(groups),
            _ => Backpressure(RequestCacheGroups::none()),
        })
    }

    /// Takes back everything that the session was given: the pages, in the order given, and the items of
    /// its cache groups.
    ///
    /// `None` while the session has not ended, or while any data operation may still touch the pages: a
    /// failed session is not proof that they are quiet. `None` again once the session has given everything
    /// back; such a session takes no command, and is there to be dropped. Dropping a session without
    /// reclaiming it aborts it and hands the pages to its manager later.
    ///
    /// All pages of a session are of one [`PagePool`](crate::PagePool). Pages of another pool than the
    /// first ones cannot be joined with those: they go to the manager, like those of a dropped session.
    #[must_use = "dropping what comes back leaks its pages: give them back to their allocators"]
    fn reclaim(&mut self) -> Option<Reclaimed>;
}

/// Everything that a session hands back at its end.
#[must_use = "dropping pages leaks them: give them back to their allocators"]
#[derive(Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Reclaimed {
    /// The pages, in the order given.
    pub pages: Pages,
    /// The items of the cache groups.
    pub groups: RequestCacheGroups,
    /// On a receiver that ended in success: the optional groups that the sender did not name, so
    /// that their items were not written.
    pub skipped: Vec<u16>,
}

impl Reclaimed {
    /// What a session hands back that has nothing but pages: the other fields are empty, and may be assigned.
    pub fn new(pages: Pages) -> Reclaimed {
        Reclaimed { pages, ..Reclaimed::default() }
    }
}

/// The sending session of a request, on a prefill worker.
pub trait KvSender: KvSession {
    /// The reference that a router carries to a receiver that is to read this session's pages.
    fn lease_ref(&self) -> LeaseRef;

    /// The references of every rank of the engine, in the order of ranks. Several only where one
    /// handle stands for all ranks.
    fn lease_refs(&self) -> Vec<LeaseRef> {
        vec![self.lease_ref()]
    }

    /// Announces the request: how many pages will be sent in all, and the aux row that goes with
    /// the last page. Called once, before the first `send`; a second call fails the session. A full queue
    /// returns [`Backpressure`], and counts as no call.
    fn init(&mut self, num_pages: usize, aux: Option<AuxIndex>) -> Result<(), Backpressure<()>> {
        let command = Command::InitSender { session: self.id(), num_pages, aux };
        self.submit(command).map_err(|_| Backpressure(()))
    }

    /// Gives the next pages, in the order of the request. Their content must be final. The chunk
    /// that completes the announced number of pages carries the aux row, which must be final by
    /// then. That chunk may be empty: a request of no pages is completed by one empty chunk.
    fn send(&mut self, chunk: Pages) -> Result<(), Backpressure<Pages>> {
        let command = Command::Send { session: self.id(), chunk };
        self.submit(command).map_err(pages_in)
    }

    /// The number of the next chunk, whether it is given with `send` or with `begin_chunk`.
    fn next_chunk(&self) -> ChunkId;

    /// Gives the next pages, in the order of the request, before they have been computed. The pages
    /// are moved as [`layers_final`](KvSender::layers_final) announces their layers. Several chunks
    /// may be under way at once. The result is the number of the chunk; chunks given with `send`
    /// count, too.
    ///
    /// If the session fails, the pages come back once no data operation can touch them. The server itself
    /// must wait for kernels that still write the pages.
    fn begin_chunk(&mut self, chunk: Pages) -> Result<ChunkId, Backpressure<Pages>> {
        let (number, command) = (self.next_chunk(), Command::BeginChunk { session: self.id(), chunk });
        self.submit(command).map(|()| number).map_err(pages_in)
    }

    /// Announces that layers of a chunk are final, now or once a ready event has passed. Writes of
    /// these layers start at once. Readers are granted the pages when every chunk is final in all
    /// layers. The last announcement of a request takes the place of the last `send`: the aux row
    /// goes with it.
    ///
    /// Chunks and announcements that follow a ready event wait for it, too; an abort does not wait.
    /// Layers that this rank does not have, or that were announced before, fail the session with
    /// [`Cause::Layers`](crate::Cause::Layers).
    fn layers_final(&mut self, layers: FinalLayers) -> Result<(), Backpressure<FinalLayers>> {
        let (chunk, command) = (layers.chunk, Command::LayersFinal { session: self.id(), layers });
        self.submit(command).map_err(|refused| match refused {
            Command::LayersFinal { layers, .. } => Backpressure(layers),
            _ => Backpressure(FinalLayers::all(chunk)),
        })
    }
}

/// The receiving session of a request, on a decode worker.
///
/// If the session fails, the content of every page that it was given is unspecified: none of these
/// pages may be used, whatever [`Cause::recovery`](crate::Cause::recovery) advises.
pub trait KvReceiver: KvSession {
    /// Gives the pages, in the order of the request, and the aux row that the prefill side is to
    /// fill.
    ///
    /// A receiver whose prefix cache has the first pages of the request gives only the pages after them:
    /// [`SessionOptions::prefix_pages`] says when the receiver must tell how many pages it has. A receiver
    /// that gives no pages and no items of [cache groups](KvSession::give_groups) releases the
    /// sender's pages without reading any.
    fn init(&mut self, pages: Pages, aux: Option<AuxIndex>) -> Result<(), Backpressure<Pages>> {
        let command = Command::InitReceiver { session: self.id(), pages, aux };
        self.submit(command).map_err(pages_in)
    }
}

/// A boxed session is a session: a manager may open `Box<dyn KvSender>`s.
impl<S: KvSession + ?Sized> KvSession for Box<S> {
    fn id(&self) -> SessionId {
        (**self).id()
    }

    fn room(&self) -> &Room {
        (**self).room()
    }

    fn poll(&self) -> KvPoll {
        (**self).poll()
    }

    fn failure(&self) -> Option<TransferError> {
        (**self).failure()
    }

    fn abort(&mut self) {
        (**self).abort();
    }

    fn give_groups(&mut self, groups: RequestCacheGroups) -> Result<(), Backpressure<RequestCacheGroups>> {
        (**self).give_groups(groups)
    }

    fn reclaim(&mut self) -> Option<Reclaimed> {
        (**self).reclaim()
    }
}

impl<S: KvSender + ?Sized> KvSender for Box<S> {
    fn lease_ref(&self) -> LeaseRef {
        (**self).lease_ref()
    }

    fn lease_refs(&self) -> Vec<LeaseRef> {
        (**self).lease_refs()
    }

    fn init(&mut self, num_pages: usize, aux: Option<AuxIndex>) -> Result<(), Backpressure<()>> {
        (**self).init(num_pages, aux)
    }

    fn send(&mut self, chunk: Pages) -> Result<(), Backpressure<Pages>> {
        (**self).send(chunk)
    }

    fn next_chunk(&self) -> ChunkId {
        (**self).next_chunk()
    }

    fn begin_chunk(&mut self, chunk: Pages) -> Result<ChunkId, Backpressure<Pages>> {
        (**self).begin_chunk(chunk)
    }

    fn layers_final(&mut self, layers: FinalLayers) -> Result<(), Backpressure<FinalLayers>> {
        (**self).layers_final(layers)
    }
}

impl<S: KvReceiver + ?Sized> KvReceiver for Box<S> {
    fn init(&mut self, pages: Pages, aux: Option<AuxIndex>) -> Result<(), Backpressure<Pages>> {
        (**self).init(pages, aux)
    }
}

/// The pages of a command that was refused.
fn pages_in(refused: Command) -> Backpressure<Pages> {
    match refused.into_resource() {
        Some(Resource::Pages(pages)) => Backpressure(pages),
        _ => Backpressure(Pages::none()),
    }
}
