//! The commands to sessions of the KV cache, and the resources that commands lend to sessions.

use crate::announce::{FinalLayers, ReadyEvent, ReadyEventError};
use crate::groups::RequestCacheGroups;
use crate::id::{AuxIndex, ChunkId, Room, SessionId};
use crate::machine::{Amounts, SessionCommand, SessionResource};
use crate::pages::Pages;
use crate::session_options::SessionOptions;

/// A command of a scheduler, given through a session handle.
#[derive(Debug)]
pub enum Command {
    /// Opens a sending session.
    OpenSender {
        /// The new session's id, which was never used before on this worker.
        session: SessionId,
        /// The room of the request, the same on both sides.
        room: Room,
        /// How many receivers will register; 0 to take the number that the first receiver tells.
        receivers: u32,
        /// The deadline, the transfer mode and the lease of the session.
        options: Box<SessionOptions>,
    },
    /// Announces how many pages a sending session will be given.
    InitSender {
        /// A sending session of this worker.
        session: SessionId,
        /// The number of pages of the whole request, over all chunks.
        num_pages: usize,
        /// The aux row that goes with the last chunk, if the request has one.
        aux: Option<AuxIndex>,
    },
    /// The next pages of a sending session.
    Send {
        /// A sending session of this worker.
        session: SessionId,
        /// The pages of the chunk; they come back in
        /// [`Output::Release`](crate::machine::Output::Release).
        chunk: Pages,
    },
    /// The next pages of a sending session, of which no layer is final yet.
    BeginChunk {
        /// A sending session of this worker.
        session: SessionId,
        /// The pages of the chunk; they come back in
        /// [`Output::Release`](crate::machine::Output::Release).
        chunk: Pages,
    },
    /// Layers of a chunk of a sending session are final. The worker takes the ready event out of
    /// the announcement and waits for it; the machine sees the command only after the event has
    /// passed.
    LayersFinal {
        /// A sending session of this worker.
        session: SessionId,
        /// The chunk, the layers, and the ready event if there is one.
        layers: FinalLayers,
    },
    /// The ready event of an announcement has failed. The session fails.
    ReadyEventFailed {
        /// A sending session of this worker.
        session: SessionId,
        /// The chunk in the announcement.
        chunk: ChunkId,
        /// The error of the ready event.
        error: ReadyEventError,
    },
    /// Opens a receiving session.
    OpenReceiver {
        /// The new session's id, which was never used before on this worker.
        session: SessionId,
        /// The room of the request, the same on both sides.
        room: Room,
        /// The address (`host:port`) of the prefill engine's bootstrap server.
        bootstrap_addr: String,
        /// The deadline, the transfer mode, the replica and the lease of the session.
        options: Box<SessionOptions>,
    },
    /// The pages into which a receiving session gets the request's KV.
    InitReceiver {
        /// A receiving session of this worker.
        session: SessionId,
        /// The pages; they come back in [`Output::Release`](crate::machine::Output::Release).
        pages: Pages,
        /// The aux row to fill, if the request has one.
        aux: Option<AuxIndex>,
    },
    /// The items of a session's cache groups. A sender gives them before its last chunk, a receiver
    /// before `InitReceiver`.
    RequestCacheGroups {
        /// A session of this worker.
        session: SessionId,
        /// The items of all groups; they come back in
        /// [`Output::Release`](crate::machine::Output::Release).
        groups: RequestCacheGroups,
    },
    /// Ends a session before it is done.
    Abort {
        /// A session of this worker.
        session: SessionId,
    },
    /// The worker drains. The machine opens no session afterwards: such a session fails with
    /// [`Cause::Draining`](crate::Cause::Draining). Open sessions end as they would have; peers that ask for
    /// a room in which no sender is open are refused at once, and so are those that wait for such a sender.
    Drain,
    /// Ends all sessions and tells the peers. The machine opens no session afterwards.
    Shutdown,
}

/// What a command lends to a session. The machine hands it back when the session has ended.
#[derive(Debug, PartialEq, Eq)]
#[cfg_attr(feature = "model", derive(Clone))]
pub enum Resource {
    /// The pages of one `Send`, `BeginChunk` or `InitReceiver`.
    Pages(Pages),
    /// The items of the cache groups of a request.
    RequestCacheGroups {
        /// The items, as they were given.
        groups: RequestCacheGroups,
        /// The optional groups that the sender did not name. Empty except on a receiver that
        /// succeeded.
        skipped: Vec<u16>,
    },
}

impl Resource {
    /// The position of pages in [`Amounts`].
    pub const PAGES: usize = 0;
    /// The position of items of cache groups in [`Amounts`].
    pub const ITEMS: usize = 1;
}

impl SessionResource for Resource {
    const KINDS: &'static [&'static str] = &["pages", "items of cache groups"];

    fn amounts(&self) -> Amounts {
        match self {
            Resource::Pages(pages) => Amounts::of(Resource::PAGES, pages.len()),
            Resource::RequestCacheGroups { groups, .. } => Amounts::of(Resource::ITEMS, groups.len()),
        }
    }
}

impl From<Pages> for Resource {
    fn from(pages: Pages) -> Resource {
        Resource::Pages(pages)
    }
}

impl From<RequestCacheGroups> for Resource {
    fn from(groups: RequestCacheGroups) -> Resource {
        Resource::RequestCacheGroups { groups, skipped: Vec::new() }
    }
}

impl Command {
    /// The pages that the command lends to its session; `None` if the command lends none.
    pub fn pages(&self) -> Option<&Pages> {
        match self {
            Command::Send { chunk: pages, .. }
            | Command::BeginChunk { chunk: pages, .. }
            | Command::InitReceiver { pages, .. } => Some(pages),
            _ => None,
        }
    }
}

impl SessionCommand for Command {
    type Resource = Resource;

    fn abort(session: SessionId) -> Command {
        Command::Abort { session }
    }

    fn shutdown() -> Command {
        Command::Shutdown
    }

    fn drain() -> Option<Command> {
        Some(Command::Drain)
    }

    fn address(&mut self, to: SessionId) -> bool {
        match self {
            Command::InitSender { session, .. }
            | Command::Send { session, .. }
            | Command::BeginChunk { session, .. }
            | Command::LayersFinal { session, .. }
            | Command::ReadyEventFailed { session, .. }
            | Command::InitReceiver { session, .. }
            | Command::RequestCacheGroups { session, .. }
            | Command::Abort { session } => {
                *session = to;
                true
            }
            Command::OpenSender { .. }
            | Command::OpenReceiver { .. }
            | Command::Drain
            | Command::Shutdown => false,
        }
    }

    fn lends(&self) -> Option<Amounts> {
        match self {
            Command::RequestCacheGroups { groups, .. } => Some(Amounts::of(Resource::ITEMS, groups.len())),
            command => command.pages().map(|pages| Amounts::of(Resource::PAGES, pages.len())),
        }
    }

    fn into_resource(self) -> Option<Resource> {
        match self {
            Command::Send { chunk: pages, .. }
            | Command::BeginChunk { chunk: pages, .. }
            | Command::InitReceiver { pages, .. } => Some(pages.into()),
            Command::RequestCacheGroups { groups, .. } => Some(groups.into()),
            _ => None,
        }
    }

    fn take_ready(&mut self) -> Option<Box<dyn ReadyEvent>> {
        match self {
            Command::LayersFinal { layers, .. } => layers.ready_event.take(),
            _ => None,
        }
    }

    fn not_ready(self, error: ReadyEventError) -> Command {
        match self {
            Command::LayersFinal { session, layers } => {
                Command::ReadyEventFailed { session, chunk: layers.chunk, error }
            }
            command => command,
        }
    }
}
