//! What a worker of vLLM's dialect is started with.

use std::time::Duration;

use kv_poll::Listener;

use super::hash::Compatibility;
use crate::gauges::IgnoredGauges;

/// The longest lease that counts; longer ones are cut, so that multiples do not overflow.
pub(super) const LONGEST_LEASE: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The settings of a worker that speaks vLLM's dialect. A field whose default does not fit is assigned:
/// `config.compatibility = Compatibility::Hash(hash)`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct VllmConfig {
    /// What the worker shows to vLLM engines as its hash, and expects of them (default: no comparison).
    pub compatibility: Compatibility,
    /// Deadlines, leases and retries.
    pub timing: VllmTiming,
    /// Bounds on what foreign engines can make the worker remember or do.
    pub limits: VllmLimits,
    /// How the worker deals with the engines whose KV the worker takes.
    pub reader: VllmReader,
    /// Where vLLM engines find this worker's side channel; `None` (default) for the address to which the side channel
    /// given to [`start`](super::start) is bound, if that is the address of one host. A receiver in push mode needs
    /// a side channel, because the engine that writes asks there for the worker's memory.
    pub side_channel: Option<SideChannelAddr>,
    /// Counts what the worker ignores. Keep a clone to read the numbers.
    pub gauges: IgnoredGauges,
    /// Seed of the machine's random numbers; `None` draws a seed.
    pub seed: Option<u64>,
    /// Most sessions open at once (default 131 072).
    pub max_sessions: usize,
    /// Commands that wait for the worker before session handles see backpressure (default 4096).
    pub command_queue: usize,
    /// The listener to which the worker's thread gives each event; see [`kv_poll::worker::Listener`].
    pub listener: Option<Listener>,
}

impl Default for VllmConfig {
    fn default() -> VllmConfig {
        VllmConfig {
            compatibility: Compatibility::Unchecked,
            timing: VllmTiming::default(),
            limits: VllmLimits::default(),
            reader: VllmReader::default(),
            side_channel: None,
            gauges: IgnoredGauges::default(),
            seed: None,
            max_sessions: 131_072,
            command_queue: 4096,
            listener: None,
        }
    }
}

impl VllmConfig {
    /// The same with some fields changed: `VllmConfig::default().with(|config| config.max_sessions = 64)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Bounds on what foreign engines can make a worker remember or do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct VllmLimits {
    /// Most bytes of one data operation, unless one descriptor alone is longer (default 64 MiB).
    pub max_post_bytes: u64,
    /// Most registrations of vLLM receivers that wait for a sender (default 16 384). The oldest one goes first.
    pub max_registrations: usize,
    /// Most ranks of vLLM receivers to which the worker keeps a way open (default 4096).
    pub max_engines: usize,
}

impl Default for VllmLimits {
    fn default() -> VllmLimits {
        VllmLimits { max_post_bytes: 64 << 20, max_registrations: 16_384, max_engines: 4096 }
    }
}

impl VllmLimits {
    /// The same with some fields changed.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// How long things may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct VllmTiming {
    /// How long a session may take, unless its options say otherwise (default 300 s).
    pub session_deadline: Duration,
    /// The duration of the lease on pages that wait for a vLLM reader, unless the session's options say otherwise
    /// (default 30 s; vLLM: `kv_lease_duration`). A heartbeat extends the lease to two thirds of this from then.
    pub kv_lease_duration: Duration,
    /// How long after the end of a lease a read of a vLLM engine may still touch the pages (default 30 s). The
    /// pages of a session that failed under a lease come back after this time, because vLLM's readers cannot be
    /// told to stop.
    pub read_bound: Duration,
    /// How long a registration of a vLLM receiver waits for a sender, from its arrival or from the receiver's last
    /// heartbeat (default 60 s).
    pub registration_ttl: Duration,
    /// How long a side channel may take for one answer (default 5 s, as in vLLM).
    pub handshake_timeout: Duration,
}

impl Default for VllmTiming {
    fn default() -> VllmTiming {
        VllmTiming {
            session_deadline: Duration::from_secs(300),
            kv_lease_duration: kv_core::KV_LEASE_DURATION,
            read_bound: Duration::from_secs(30),
            registration_ttl: Duration::from_secs(60),
            handshake_timeout: Duration::from_secs(5),
        }
    }
}

impl VllmTiming {
    /// The same with some fields changed: `VllmTiming::default().with(|timing| timing.read_bound = MINUTE)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// How a worker deals with the vLLM engines whose KV the worker takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct VllmReader {
    /// How often a handshake is tried before the sessions that wait for it fail (default 3).
    pub handshake_tries: u32,
    /// How long an engine is remembered that no session needs (default 3600 s; vLLM: `engine_ttl`).
    pub engine_ttl: Duration,
    /// Most engines that are remembered at once (default 1024).
    pub max_engines: usize,
}

impl Default for VllmReader {
    fn default() -> VllmReader {
        VllmReader { handshake_tries: 3, engine_ttl: Duration::from_secs(3600), max_engines: 1024 }
    }
}

impl VllmReader {
    /// The same with some fields changed: `VllmReader::default().with(|reader| reader.handshake_tries = 1)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Where vLLM engines find this worker's side channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SideChannelAddr {
    /// The host, as the engines can resolve it.
    pub host: String,
    /// The port on which the side channel listens.
    pub port: u16,
}
