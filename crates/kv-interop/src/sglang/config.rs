//! What a worker among SGLang's workers is started with, and what SGLang's protocol cannot express.

use std::time::Duration;

use bytes::Bytes;
use kv_core::{Geometry, KvArgs, WorkerRole};
use kv_poll::Listener;

use super::aux_rows::{AuxBuffers, AuxRooms};
use super::cache::OurCache;
use super::codec::MAX_HOST;
use crate::gauges::IgnoredGauges;

/// The settings of a worker that speaks SGLang's protocol. A field whose default does not fit is assigned:
/// `config.bootstrap = Some(addr)`.
#[non_exhaustive]
pub struct SglangConfig {
    /// Prefill for a worker that sends to SGLang's decode workers, decode for one that receives from SGLang's
    /// prefill workers.
    pub role: WorkerRole,
    /// The bootstrap server (`host:port`) at which a prefill worker registers, so that SGLang's decode workers find
    /// the worker; `None` for a worker that does not register.
    pub bootstrap: Option<String>,
    /// The host name or address by which peers reach this worker's PULL socket; `None` for the address to which
    /// the socket is bound.
    pub host: Option<String>,
    /// The type of the cache by SGLang's name (`torch.bfloat16`); `None` derives the name from
    /// [`dtype`](kv_core::KvArgsBuilder::dtype).
    pub kv_cache_dtype: Option<String>,
    /// SGLang's `kv_layout`, for models that have one; compared only if both sides name a layout.
    pub kv_layout: Option<String>,
    /// The aux buffers of SGLang's engines.
    pub aux: AuxBuffers,
    /// The reader of this worker's own aux rows. `None` only for a prefill worker, which reads no row.
    pub aux_rooms: Option<Box<dyn AuxRooms>>,
    /// Deadlines and intervals of the protocol.
    pub timing: SglangTiming,
    /// Bounds on what peers can make the worker remember.
    pub limits: SglangLimits,
    /// Counts what the worker ignores. Keep a clone to read the numbers.
    pub gauges: IgnoredGauges,
    /// Seed of the numbers by which peers acknowledge this worker's aborts; `None` draws a seed. Each life of a
    /// worker needs another seed.
    pub seed: Option<u64>,
    /// Most sessions open at once (default 131 072).
    pub max_sessions: usize,
    /// Commands that wait for the worker before session handles see backpressure (default 4096).
    pub command_queue: usize,
    /// The listener to which the worker's thread gives each event; see [`kv_poll::worker::Listener`].
    pub listener: Option<Listener>,
}

/// How SGLang's workers reach a worker of ours: what the worker's registration says of its NIXL agent and socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SglangAgent {
    /// The name of the NIXL agent: 1 to 128 printable ASCII characters. A restarted worker must have another name:
    /// SGLang ignores the registration of a name that SGLang knows.
    pub name: String,
    /// The metadata of the agent, as NIXL writes them.
    pub metadata: Bytes,
    /// The host name or address, and the port, by which peers reach the worker's PULL socket.
    pub pull: (String, u16),
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
    /// The default settings for a worker in this role.
    pub fn new(role: WorkerRole) -> SglangConfig {
        SglangConfig {
            role,
            bootstrap: None,
            host: None,
            kv_cache_dtype: None,
            kv_layout: None,
            aux: AuxBuffers::default(),
            aux_rooms: None,
            timing: SglangTiming::default(),
            limits: SglangLimits::default(),
            gauges: IgnoredGauges::default(),
            seed: None,
            max_sessions: 131_072,
            command_queue: 4096,
            listener: None,
        }
    }

    /// The same with some fields changed: `config.with(|config| config.limits.agents = 8)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// The type of the cache by SGLang's name.
    pub(super) fn dtype(&self, geometry: &Geometry) -> String {
        self.kv_cache_dtype.clone().unwrap_or_else(|| torch_name(&geometry.dtype))
    }

    /// Checks that SGLang's protocol can express this worker, and describes the worker's cache in its words.
    pub(super) fn check(&self, args: &KvArgs) -> Result<OurCache, SglangConfigError> {
        if !matches!(self.role, WorkerRole::Prefill | WorkerRole::Decode) {
            return Err(SglangConfigError::new("role", self.role.name(), "prefill or decode"));
        }
        if self.role == WorkerRole::Decode && self.aux_rooms.is_none() {
            return Err(SglangConfigError::new("aux_rooms", "none", "a reader of the aux rows"));
        }
        OurCache::new(args, self)
    }
}

impl SglangAgent {
    /// Checks that SGLang's ranks can decode the name and the host: the thread of a prefill rank that takes
    /// registrations ends with one that is not ASCII.
    pub(super) fn check(&self) -> Result<(), SglangConfigError> {
        let (host, port) = &self.pull;
        if host.is_empty() || host.len() > MAX_HOST || !host.bytes().all(|byte| byte.is_ascii_graphic()) {
            let needed = format!("a host of 1 to {MAX_HOST} printable ASCII characters");
            return Err(SglangConfigError::new("host", host, needed));
        }
        if *port == 0 {
            return Err(SglangConfigError::new("port of the PULL socket", port, "a port above 0"));
        }
        let name = &self.name;
        if name.is_empty() || name.len() > 128 || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(SglangConfigError::new("agent", name, "1 to 128 printable ASCII characters"));
        }
        Ok(())
    }
}

impl std::fmt::Debug for SglangConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let SglangConfig { role, bootstrap, host, .. } = self;
        let mut text = f.debug_struct("SglangConfig");
        text.field("role", role).field("bootstrap", bootstrap).field("host", host).finish_non_exhaustive()
    }
}

/// The name of an element type in SGLang.
fn torch_name(dtype: &str) -> String {
    let name = match dtype {
        "bf16" => "torch.bfloat16",
        "f16" => "torch.float16",
        "f32" => "torch.float32",
        "fp8_e4m3" => "torch.float8_e4m3fn",
        "fp8_e5m2" => "torch.float8_e5m2",
        other => other,
    };
    name.to_owned()
}
