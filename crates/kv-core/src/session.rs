//! The surface that schedulers program against (seed: SGLang's `KVManager`, `KVSender`,
//! `KVReceiver`).

use crate::announce::FinalLayers;
use crate::args::KvArgs;
use crate::command::{Command, Resource};
use crate::error::{Backpressure, OpenError, TransferError};
use crate::groups::RequestGroups;
use crate::id::{AuxIndex, ChunkId, Room, SessionId};
use crate::lease::LeaseRef;
use crate::machine::{SessionCommand, Submit};
use crate::pages::Pages;
use crate::poll::KvPoll;
use crate::quarantine::Quarantine;
use crate::session_options::SessionOptions;

/// Opens sessions of one worker. A handle: cheap to clone where the implementation is, and owned by
/// one scheduler thread.
pub trait KvManager {
    /// Its sessions that send.
    type Sender: KvSender;
    /// Its sessions that receive.
    type Receiver: KvReceiver;

    /// What the worker was started with.
    fn args(&self) -> &KvArgs;

    /// Opens the sending half of a request on a prefill worker. `bootstrap_addr` is where this
    /// worker is registered; `dest_ranks` are the decode ranks that will register for the room
    /// (empty: as many as [`KvArgs::num_receivers`], or if that was not told either, as many as the
    /// first of them says that its engine has for this rank).
    fn sender(
        &self,
        bootstrap_addr: &str,
        room: Room,
        dest_ranks: &[u32],
        options: SessionOptions,
    ) -> Result<Self::Sender, OpenError>;

    /// Opens the receiving half of a request on a decode worker. `bootstrap_addr` is the
    /// bootstrap server of the prefill engine.
    fn receiver(
        &self,
        bootstrap_addr: &str,
        room: Room,
        options: SessionOptions,
    ) -> Result<Self::Receiver, OpenError>;

    /// What the pages of ended sessions wait for that cannot be used again yet, by peer and reason: a
    /// recent picture for people and logs. A manager that has none says nothing.
    fn quarantine(&self) -> Vec<Quarantine> {
        Vec::new()
    }
}

/// One half of one request's transfer.
///
/// A session ends exactly once, in [`KvPoll::Success`] or [`KvPoll::Failed`], inside its deadline.
/// Pages given to it belong to it until [`reclaim`](KvSession::reclaim) hands them back.
///
/// All that a scheduler says to a session is a [`Command`] that the session [submits](Submit): the
/// methods here and in [`KvSender`] and [`KvReceiver`] that may be refused for want of room are short for
/// that. A command that came back may be submitted again as it is.
pub trait KvSession: Submit<Command> + Sized {
    /// The session's number within its worker, as `PollSet` reports it.
    fn id(&self) -> SessionId;

    /// The request.
    fn room(&self) -> &Room;

    /// The state now: one atomic load, no side effect, callable from any thread.
    fn poll(&self) -> KvPoll;

    /// Why it failed; `None` unless [`poll`](KvSession::poll) says `Failed`.
    fn failure(&self) -> Option<TransferError>;

    /// Asks for an end, at any stage; idempotent. A session that has ended stays as it is. The
    /// peer is told, and the pages come back once no wire can touch them.
    fn abort(&mut self);

    /// Gives the items of the request's cache groups, all at once: slots of recurrent layers, the last
    /// pages of a sliding window, the pages of a draft model. Once at most; a sender before the chunk
    /// that completes the request, with which their content must be final; a receiver before `init`.
    /// Success then means that their bytes are in place, too.
    ///
    /// Both sides name the same groups. Of a group that only one of them names, nothing is moved if it
    /// is [optional](crate::CacheGroup::optional); otherwise the session fails. The sender must have
    /// all items that the receiver wants, and may have earlier ones.
    fn give_groups(&mut self, groups: RequestGroups) -> Result<(), Backpressure<RequestGroups>> {
        let command = Command::RequestGroups { session: self.id(), groups };
        self.submit(command).map_err(|refused| match refused.into_resource() {
            Some(Resource::RequestGroups { groups, .. }) => Backpressure(groups),
            _ => Backpressure(RequestGroups::none()),
        })
    }

    /// Takes back every page the session was given, in the order given. The items of cache groups, if
    /// there are any, go to the manager: use [`reclaim_all`](KvSession::reclaim_all) for those.
    ///
    /// `Err(self)` while the session has not ended, or while any wire may still touch the pages:
    /// a failed session is not proof that they are quiet. Dropping the session instead aborts it
    /// and hands the pages to its manager later.
    fn reclaim(self) -> Result<Pages, Self>;

    /// As [`reclaim`](KvSession::reclaim), with the items of the cache groups.
    fn reclaim_all(self) -> Result<Reclaimed, Self>;
}

/// What a session hands back at its end.
#[must_use = "dropping pages leaks them: give them back to their allocators"]
#[derive(Debug, PartialEq, Eq, Default)]
pub struct Reclaimed {
    /// The pages, in the order given.
    pub pages: Pages,
    /// The items of the cache groups.
    pub groups: RequestGroups,
    /// On a receiver that ended in success: those of its groups that are optional and that the sender
    /// did not name. Their items were not written.
    pub skipped: Vec<u16>,
}

/// The sending half, on a prefill worker.
pub trait KvSender: KvSession {
    /// What a router carries to a receiver that is to read this session's pages.
    fn lease_ref(&self) -> LeaseRef;

    /// The same of every rank of the engine, in the order of ranks, where one handle stands for all.
    fn lease_refs(&self) -> Vec<LeaseRef> {
        vec![self.lease_ref()]
    }

    /// Announces the request: how many pages will be sent in all, and the aux row that goes with
    /// the last of them. Once, before the first `send`; full queues return [`Backpressure`].
    fn init(&mut self, num_pages: usize, aux: Option<AuxIndex>) -> Result<(), Backpressure<()>> {
        let command = Command::InitSender { session: self.id(), num_pages, aux };
        self.submit(command).map_err(|_| Backpressure(()))
    }

    /// Gives the next pages, in request order. Their content must be final. The chunk that
    /// completes the announced number carries the aux row, which must be final by then; it may be
    /// empty. A request of no pages is completed by one empty chunk.
    fn send(&mut self, chunk: Pages) -> Result<(), Backpressure<Pages>> {
        let command = Command::Send { session: self.id(), chunk };
        self.submit(command).map_err(pages_in)
    }

    /// The number of the chunk that is given next, whether with `send` or with `begin_chunk`.
    fn next_chunk(&self) -> ChunkId;

    /// Gives the next pages, in request order, before they have been computed: they are moved as
    /// [`layers_final`](KvSender::layers_final) says. Several chunks may be under way at once. The
    /// number of the chunk counts those given with `send` too.
    ///
    /// If the session fails, the pages come back once no wire can touch them; kernels of the server
    /// that still compute them are the server's to wait for.
    fn begin_chunk(&mut self, chunk: Pages) -> Result<ChunkId, Backpressure<Pages>> {
        let (number, command) = (self.next_chunk(), Command::BeginChunk { session: self.id(), chunk });
        self.submit(command).map(|()| number).map_err(pages_in)
    }

    /// Says that layers of a chunk are final, now or once a ready event has passed. Writing them starts at
    /// once; pages are granted to readers when every chunk is final in all layers. The last
    /// announcement of the request takes the place of its last `send`: with it goes the aux row.
    ///
    /// What is given and announced after a ready event waits for it too; an abort does not. Layers that
    /// this rank does not have, or that were announced before, fail the session with
    /// [`Cause::Layers`](crate::Cause::Layers).
    fn layers_final(&mut self, layers: FinalLayers) -> Result<(), Backpressure<FinalLayers>> {
        let (chunk, command) = (layers.chunk, Command::LayersFinal { session: self.id(), layers });
        self.submit(command).map_err(|refused| match refused {
            Command::LayersFinal { layers, .. } => Backpressure(layers),
            _ => Backpressure(FinalLayers::all(chunk)),
        })
    }
}

/// The receiving half, on a decode worker.
///
/// If it fails, the content of every page that it was given is unspecified: none of them may be
/// used, whatever [`Cause::recovery`](crate::Cause::recovery) advises.
pub trait KvReceiver: KvSession {
    /// Gives the pages, in request order, and the aux row that the prefill side is to fill.
    ///
    /// In pull mode fewer pages than the sender holds are the last ones of the request (the first
    /// ones are in the prefix cache), and none at all, nor items of
    /// [cache groups](KvSession::give_groups), releases the sender's without reading any.
    fn init(&mut self, pages: Pages, aux: Option<AuxIndex>) -> Result<(), Backpressure<Pages>> {
        let command = Command::InitReceiver { session: self.id(), pages, aux };
        self.submit(command).map_err(pages_in)
    }
}

/// The pages of a command that was refused.
fn pages_in(refused: Command) -> Backpressure<Pages> {
    match refused.into_resource() {
        Some(Resource::Pages(pages)) => Backpressure(pages),
        _ => Backpressure(Pages::none()),
    }
}
