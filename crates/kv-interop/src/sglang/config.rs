//! What the machine is made with, and what SGLang's protocol cannot express.

use std::time::Duration;

use bytes::Bytes;
use kv_core::WorkerRole;

use super::aux_rows::{AuxBuffers, AuxRooms};
use super::cache::OurCache;
use kv_core::KvArgs;

/// What a worker that speaks SGLang's protocol tells its machine, beside the `KvArgs`.
#[non_exhaustive]
pub struct SglangConfig {
    /// Prefill for a worker that sends to SGLang's decode workers, decode for one that receives from SGLang's
    /// prefill workers.
    pub role: WorkerRole,
    /// The name of this worker's NIXL agent. A restarted worker must have another name: SGLang ignores the
    /// registration of a name that SGLang knows.
    pub agent: String,
    /// The metadata of this worker's NIXL agent, as NIXL writes them.
    pub metadata: Bytes,
    /// The address and port of this worker's PULL socket, as peers reach the socket.
    pub pull: (String, u16),
    /// The type of the cache by SGLang's name (`torch.bfloat16`); `None` derives the name from
    /// [`dtype`](kv_core::KvArgsBuilder::dtype).
    pub kv_cache_dtype: Option<String>,
    /// SGLang's `kv_layout`, for models that have one; compared only if both sides name a layout.
    pub kv_layout: Option<String>,
    /// The aux buffers of SGLang's engines.
    pub aux: AuxBuffers,
    /// The reader of this worker's own aux rows. `None` only for a prefill worker, which reads no row.
    pub aux_rooms: Option<Box<dyn AuxRooms>>,
    /// Deadlines and intervals.
    pub timing: SglangTiming,
    /// Bounds on what peers can make the worker remember.
    pub limits: SglangLimits,
    /// Random bits, from which the numbers of aborts begin. Each life of a worker needs other bits.
    pub seed: u64,
}

/// Deadlines and intervals of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SglangTiming {
    /// How long a session may take whose options name no deadline (default 300 s, as SGLang's).
    pub session_deadline: Duration,
    /// How long a lookup's answer is used for further requests to the same address (default 10 s). The loss of
    /// a rank ends the time at once.
    pub lookup_lifetime: Duration,
    /// How long after a failed lookup the next one follows (default 1 s).
    pub lookup_retry: Duration,
    /// How long after the loss of a way the way is opened again, if pages in quarantine need the way (default
    /// 1 s).
    pub reconnect: Duration,
    /// How long a decode worker waits for the acknowledgement of an abort before the abort is said again (default
    /// 10 s). The acknowledgement may be lost with its connection, and the pages wait for the acknowledgement.
    pub abort_repeat: Duration,
    /// How long a prefill worker keeps what decode ranks have said of a room that no sender has opened, and that
    /// a room without a sender was aborted (default 300 s).
    pub unclaimed: Duration,
}

impl Default for SglangTiming {
    fn default() -> SglangTiming {
        let seconds = Duration::from_secs;
        SglangTiming {
            session_deadline: seconds(300),
            lookup_lifetime: seconds(10),
            lookup_retry: seconds(1),
            reconnect: seconds(1),
            abort_repeat: seconds(10),
            unclaimed: seconds(300),
        }
    }
}

/// Bounds on what peers can make the machine remember.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SglangLimits {
    /// Most decode agents that are registered at once (default 1024).
    pub agents: usize,
    /// Most rooms without a sender of which something is known (default 65 536).
    pub unclaimed_rooms: usize,
    /// Most pages that requests of rooms without a sender may name together (default 16 777 216).
    pub unclaimed_pages: usize,
    /// Most prefill ranks that are known at once (default 4096).
    pub prefill_ranks: usize,
    /// Most bytes of one post, unless one descriptor alone is longer (default 64 MiB).
    pub post_bytes: u64,
}

impl Default for SglangLimits {
    fn default() -> SglangLimits {
        SglangLimits {
            agents: 1024,
            unclaimed_rooms: 1 << 16,
            unclaimed_pages: 1 << 24,
            prefill_ranks: 4096,
            post_bytes: 64 << 20,
        }
    }
}

/// Why a worker cannot speak SGLang's protocol with these settings.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {ours}; SGLang's peers need {needed}")]
pub struct SglangConfigError {
    /// The setting of this worker.
    pub field: String,
    /// The value of the setting here.
    pub ours: String,
    /// What the value must be.
    pub needed: String,
}

impl SglangConfigError {
    pub(crate) fn new(field: &str, ours: impl ToString, needed: impl ToString) -> SglangConfigError {
        SglangConfigError { field: field.to_owned(), ours: ours.to_string(), needed: needed.to_string() }
    }
}

impl SglangConfig {
    /// A configuration with the defaults: the role, the agent's name and metadata, and the address of the PULL
    /// socket.
    pub fn new(
        role: WorkerRole,
        (agent, metadata): (String, Bytes),
        pull: (String, u16),
        seed: u64,
    ) -> SglangConfig {
        SglangConfig {
            role,
            agent,
            metadata,
            pull,
            kv_cache_dtype: None,
            kv_layout: None,
            aux: AuxBuffers::default(),
            aux_rooms: None,
            timing: SglangTiming::default(),
            limits: SglangLimits::default(),
            seed,
        }
    }

    /// The same with some fields changed: `config.with(|config| config.limits.agents = 8)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Checks that SGLang's protocol can express this worker, and describes the worker's cache in its words.
    pub(crate) fn check(&self, args: &KvArgs) -> Result<OurCache, SglangConfigError> {
        if !matches!(self.role, WorkerRole::Prefill | WorkerRole::Decode) {
            return Err(SglangConfigError::new("role", self.role.name(), "prefill or decode"));
        }
        if self.role == WorkerRole::Decode && self.aux_rooms.is_none() {
            return Err(SglangConfigError::new("aux_rooms", "none", "a reader of the aux rows"));
        }
        let name = &self.agent;
        if name.is_empty() || name.len() > 128 || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(SglangConfigError::new("agent", name, "1 to 128 printable ASCII characters"));
        }
        OurCache::new(args, self)
    }
}

impl std::fmt::Debug for SglangConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let SglangConfig { role, agent, pull, .. } = self;
        f.debug_struct("SglangConfig")
            .field("role", role)
            .field("agent", agent)
            .field("pull", pull)
            .finish_non_exhaustive()
    }
}
