//! The transport: its parts, each of which owns its state, and how it is made. What the files that use it do
//! with the parts follows from the bottom up: [`links`](crate::links), `copying`, and `contract`.

use std::collections::VecDeque;

use kv_core::Time;
use kv_host::{Arena, Mapping, Memory};
use rustix::process::{PTracer, set_ptracer};

use crate::config::LocalConfig;
use crate::error::LocalError;
use crate::given::Given;
use crate::link::LinkId;
use crate::metadata;
use crate::pacing::Pacing;
use crate::posts::Posts;
use crate::revoking::Revoking;
use crate::table::Links;
use crate::watch::Watch;

/// Bytes read from one socket at once.
const READ_SCRATCH: usize = 64 << 10;

/// The embedded transport: one worker's end of it. See the crate's header.
#[derive(Debug)]
pub struct LocalTransport {
    pub(crate) config: LocalConfig,
    pub(crate) given: Given,
    pub(crate) posts: Posts,
    pub(crate) links: Links,
    pub(crate) revoking: Revoking,
    pub(crate) pacing: Pacing,
    pub(crate) watch: Watch,
    /// Links that may have whole messages in their buffers.
    pub(crate) backlog: VecDeque<LinkId>,
    /// Links whose sockets the kernel does not watch: they are to be given up.
    pub(crate) unwatched: Vec<LinkId>,
    /// Links whose peers' memory is to be made present.
    pub(crate) populating: VecDeque<LinkId>,
    /// Mappings to be unmapped bit by bit.
    pub(crate) retired: Vec<Mapping>,

    pub(crate) dial_at: Time,
    pub(crate) sweep_at: Time,
    pub(crate) listen_at: Option<Time>,
    pub(crate) now: Time,
    pub(crate) scratch: Box<[u8]>,
    pub(crate) stats: LocalStats,
}

/// Counts since the transport was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LocalStats {
    /// Connections accepted.
    pub accepted: u64,
    /// Connections refused: of another user, above a limit, too slow, or with a wrong hello.
    pub refused: u64,
    /// Connections dropped because the other side broke the framing.
    pub broken: u64,
    /// Posts whose bytes, and whose notify frame, went out.
    pub posts_completed: u64,
}

impl LocalTransport {
    /// A transport that listens under a random name in the abstract socket namespace.
    pub fn new(config: LocalConfig) -> Result<LocalTransport, LocalError> {
        LocalTransport::with_socket_name(config, metadata::random_socket_name()?)
    }

    pub(crate) fn with_socket_name(
        config: LocalConfig,
        socket_name: String,
    ) -> Result<LocalTransport, LocalError> {
        config.check()?;
        Ok(LocalTransport {
            config,
            watch: Watch::new(&socket_name)?,
            given: Given::new(socket_name)?,
            posts: Posts::default(),
            links: Links::default(),
            revoking: Revoking::default(),
            pacing: Pacing::default(),
            backlog: VecDeque::new(),
            unwatched: Vec::new(),
            populating: VecDeque::new(),
            retired: Vec::new(),
            dial_at: Time::ZERO,
            sweep_at: Time::MAX,
            listen_at: None,
            now: Time::ZERO,
            scratch: vec![0; READ_SCRATCH].into(),
            stats: LocalStats::default(),
        })
    }

    /// Gives an arena to the transport: regions inside it can be registered, and peers may map it.
    pub fn add_arena(&mut self, arena: &Arena) -> Result<(), LocalError> {
        self.given.add_arena(arena)
    }

    /// What has happened so far.
    pub fn stats(&self) -> LocalStats {
        LocalStats { posts_completed: self.posts.completed(), ..self.stats }
    }

    pub(crate) fn adopt_memory(&mut self, memory: Memory) -> Result<(), LocalError> {
        self.given.adopt(memory)?;
        if self.config.permit_tracing {
            // Fails where there is no Yama, and then it is not needed.
            let _ = set_ptracer(PTracer::Any);
        }
        Ok(())
    }
}
