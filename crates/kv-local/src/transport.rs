//! [`LocalTransport`]: its parts, each of which owns its state, and how it is made. Other files work with the
//! parts, from the bottom up: [`links`](crate::links), `copying`, and `contract`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kv_core::Time;
use kv_host::wake::Announced;
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

/// Most bytes read from one socket in one call.
const READ_SCRATCH: usize = 64 << 10;

/// One worker's end of the transport of one host. The [crate's page](crate) says what it does, with an example.
#[derive(Debug)]
pub struct LocalTransport {
    pub(crate) config: LocalConfig,
    pub(crate) given: Given,
    pub(crate) posts: Posts,
    pub(crate) links: Links,
    pub(crate) revoking: Revoking,
    pub(crate) pacing: Pacing,
    pub(crate) watch: Watch,
    /// Links that may have complete messages in their buffers.
    pub(crate) backlog: VecDeque<LinkId>,
    /// Links with messages that are to be written together.
    pub(crate) unflushed: BTreeSet<LinkId>,
    /// Links that the kernel has no means to write to, each with the moment since when.
    pub(crate) starved: BTreeMap<LinkId, Time>,
    /// Links whose sockets the kernel does not watch: they will be ended.
    pub(crate) unwatched: Vec<LinkId>,
    /// Links whose peers' memory is made present, in turns, each from a moment on.
    pub(crate) populating: VecDeque<(Time, LinkId)>,
    /// Mappings that are being unmapped bit by bit.
    pub(crate) retired: Vec<Mapping>,

    /// Until when messages do not wake the owner.
    pub(crate) crowded_until: Time,
    /// The frame for which the owner does not sleep.
    pub(crate) announced: Announced<LinkId>,
    pub(crate) dial_at: Time,
    /// When starved links are written to again.
    pub(crate) flush_at: Time,
    pub(crate) sweep_at: Time,
    pub(crate) listen_at: Option<Time>,
    pub(crate) now: Time,
    pub(crate) scratch: Box<[u8]>,
    /// Where the messages of one write are gathered.
    pub(crate) outgoing: Vec<u8>,
    pub(crate) stats: LocalStats,
}

/// Counts since the transport was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LocalStats {
    /// Connections that were accepted, refused ones included.
    pub accepted: u64,
    /// Connections that were refused: of another user, above a limit, too slow, or with a hello that is not
    /// acceptable.
    pub refused: u64,
    /// Connections that were ended because the other side broke the framing of messages.
    pub broken: u64,
    /// Posts that have ended without an error: all bytes are in place, and the notify frame is queued.
    pub posts_completed: u64,
}

impl LocalTransport {
    /// A transport that listens under a random name in the abstract socket namespace.
    ///
    /// # Errors
    ///
    /// [`LocalError::Limit`] if a field of `config` is out of its range, [`LocalError::Os`] if the system
    /// refuses a socket.
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
            unflushed: BTreeSet::new(),
            starved: BTreeMap::new(),
            unwatched: Vec::new(),
            populating: VecDeque::new(),
            retired: Vec::new(),
            crowded_until: Time::ZERO,
            announced: Announced::NONE,
            dial_at: Time::ZERO,
            flush_at: Time::ZERO,
            sweep_at: Time::MAX,
            listen_at: None,
            now: Time::ZERO,
            scratch: vec![0; READ_SCRATCH].into(),
            outgoing: Vec::new(),
            stats: LocalStats::default(),
        })
    }

    /// Gives an arena to the transport: regions inside the arena can be registered, and peers may map it.
    ///
    /// # Errors
    ///
    /// [`LocalError::Arenas`] for too many arenas, [`LocalError::Memory`] if the transport's metadata has
    /// been asked for: peers may know the metadata, so the memory cannot change any more.
    pub fn add_arena(&mut self, arena: &Arena) -> Result<(), LocalError> {
        self.given.add_arena(arena)
    }

    /// The counts so far.
    pub fn stats(&self) -> LocalStats {
        LocalStats { posts_completed: self.posts.completed(), ..self.stats }
    }

    pub(crate) fn adopt_memory(&mut self, memory: Memory) -> Result<(), LocalError> {
        self.given.adopt(memory)?;
        if self.config.permit_tracing {
            // The call fails where there is no Yama, and is not needed there.
            let _ = set_ptracer(PTracer::Any);
        }
        Ok(())
    }
}
