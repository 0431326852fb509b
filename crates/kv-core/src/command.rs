//! What schedulers ask of a session of the KV cache, and what sessions are lent.

use crate::announce::{FinalLayers, ReadyEvent, ReadyEventError};
use crate::groups::RequestGroups;
use crate::id::{AuxIndex, ChunkId, Room, SessionId};
use crate::machine::{Amounts, SessionCommand, SessionResource};
use crate::pages::Pages;
use crate::session_options::SessionOptions;

/// What a scheduler asks for through a session handle.
#[derive(Debug)]
pub enum Command {
    /// Opens a sending session.
    OpenSender {
        /// Its id, never used before.
        session: SessionId,
        /// The request.
        room: Room,
        /// How many receivers will register; 0 for as many as the first of them says.
        receivers: u32,
        /// Deadline, mode, lease.
        options: Box<SessionOptions>,
    },
    /// Announces a sending session's pages.
    InitSender {
        /// Which.
        session: SessionId,
        /// How many pages in all.
        num_pages: usize,
        /// The aux row that goes with the last chunk.
        aux: Option<AuxIndex>,
    },
    /// The next pages of a sending session.
    Send {
        /// Which.
        session: SessionId,
        /// The pages; they come back in [`Output::Release`](crate::machine::Output::Release).
        chunk: Pages,
    },
    /// The next pages of a sending session, of which nothing is final yet.
    BeginChunk {
        /// Which.
        session: SessionId,
        /// The pages; they come back in [`Output::Release`](crate::machine::Output::Release).
        chunk: Pages,
    },
    /// Layers of a chunk of a sending session are final. The event in them is the worker's to wait for.
    LayersFinal {
        /// Which.
        session: SessionId,
        /// The chunk and its layers.
        layers: FinalLayers,
    },
    /// What an announcement waited for will never be: ends the session.
    ReadyEventFailed {
        /// Which.
        session: SessionId,
        /// The chunk that was to be announced.
        chunk: ChunkId,
        /// What the ready event said.
        error: ReadyEventError,
    },
    /// Opens a receiving session.
    OpenReceiver {
        /// Its id, never used before.
        session: SessionId,
        /// The request.
        room: Room,
        /// The bootstrap server of the prefill engine.
        bootstrap_addr: String,
        /// Deadline, mode, replica, lease.
        options: Box<SessionOptions>,
    },
    /// The pages of a receiving session.
    InitReceiver {
        /// Which.
        session: SessionId,
        /// The pages; they come back in [`Output::Release`](crate::machine::Output::Release).
        pages: Pages,
        /// The aux row to fill.
        aux: Option<AuxIndex>,
    },
    /// The items of a session's cache groups, before the last chunk, or before `InitReceiver`.
    RequestGroups {
        /// Which.
        session: SessionId,
        /// The items; they come back in [`Output::Release`](crate::machine::Output::Release).
        groups: RequestGroups,
    },
    /// Ends a session.
    Abort {
        /// Which.
        session: SessionId,
    },
    /// Ends all sessions and tells the peers; the machine takes no new ones.
    Shutdown,
}

/// What a session is lent, and hands back at its end.
#[derive(Debug, PartialEq, Eq)]
#[cfg_attr(feature = "model", derive(Clone))]
pub enum Resource {
    /// Pages: one for each `Send`, `BeginChunk` and `InitReceiver`.
    Pages(Pages),
    /// Items of cache groups.
    RequestGroups {
        /// The items.
        groups: RequestGroups,
        /// On a receiver that succeeded: its optional groups that the sender did not name.
        skipped: Vec<u16>,
    },
}

impl Resource {
    /// The kind of pages in [`Amounts`].
    pub const PAGES: usize = 0;
    /// The kind of items of cache groups in [`Amounts`].
    pub const ITEMS: usize = 1;
}

impl SessionResource for Resource {
    const KINDS: &'static [&'static str] = &["pages", "items of cache groups"];

    fn amounts(&self) -> Amounts {
        match self {
            Resource::Pages(pages) => Amounts::of(Resource::PAGES, pages.len()),
            Resource::RequestGroups { groups, .. } => Amounts::of(Resource::ITEMS, groups.len()),
        }
    }
}

impl From<Pages> for Resource {
    fn from(pages: Pages) -> Resource {
        Resource::Pages(pages)
    }
}

impl From<RequestGroups> for Resource {
    fn from(groups: RequestGroups) -> Resource {
        Resource::RequestGroups { groups, skipped: Vec::new() }
    }
}

impl Command {
    /// The pages that the command lends to its session.
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

    fn address(&mut self, to: SessionId) -> bool {
        match self {
            Command::InitSender { session, .. }
            | Command::Send { session, .. }
            | Command::BeginChunk { session, .. }
            | Command::LayersFinal { session, .. }
            | Command::ReadyEventFailed { session, .. }
            | Command::InitReceiver { session, .. }
            | Command::RequestGroups { session, .. }
            | Command::Abort { session } => {
                *session = to;
                true
            }
            Command::OpenSender { .. } | Command::OpenReceiver { .. } | Command::Shutdown => false,
        }
    }

    fn lends(&self) -> Option<Amounts> {
        match self {
            Command::RequestGroups { groups, .. } => Some(Amounts::of(Resource::ITEMS, groups.len())),
            command => command.pages().map(|pages| Amounts::of(Resource::PAGES, pages.len())),
        }
    }

    fn into_resource(self) -> Option<Resource> {
        match self {
            Command::Send { chunk: pages, .. }
            | Command::BeginChunk { chunk: pages, .. }
            | Command::InitReceiver { pages, .. } => Some(pages.into()),
            Command::RequestGroups { groups, .. } => Some(groups.into()),
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
