//! What the receiving half of a worker is started with.

use std::time::Duration;

use kv_core::KvArgs;

use super::super::config::{LONGEST_LEASE, VllmConfig};
use super::super::hash::Compatibility;

/// The shortest lease that counts: a sixth of a lease passes between two heartbeats.
const SHORTEST_LEASE: Duration = Duration::from_millis(60);

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
    /// How long the worker processes of a vLLM engine of several ranks may outlive the process with the side
    /// channel (default 60 s). The pages of push sessions are free this long after the death of that process.
    pub ranks_outlive: Duration,
}

impl Default for VllmReader {
    fn default() -> VllmReader {
        VllmReader {
            handshake_tries: 3,
            engine_ttl: Duration::from_secs(3600),
            max_engines: 1024,
            ranks_outlive: Duration::from_secs(60),
        }
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

/// Everything that the receiving half must know besides the worker's arguments.
#[derive(Debug, Clone)]
pub(crate) struct ConsumerConfig {
    pub(crate) compatibility: Compatibility,
    pub(crate) session_deadline: Duration,
    /// The lease of the vLLM engines (`kv_lease_duration`), which no message tells.
    pub(crate) kv_lease_duration: Duration,
    /// How long a vLLM engine may take to answer one question for metadata.
    pub(crate) handshake_timeout: Duration,
    pub(crate) reader: VllmReader,
    /// Needed in push mode only, where the vLLM engine asks for this worker's metadata.
    pub(crate) side_channel: Option<SideChannelAddr>,
    /// Most bytes of one post.
    pub(crate) post_bytes: u64,
    /// This worker's engine.
    pub(crate) engine_id: String,
    /// The beginning of the random numbers that make request ids unique.
    pub(crate) seed: u64,
}

impl ConsumerConfig {
    pub(crate) fn new(args: &KvArgs, config: &VllmConfig) -> ConsumerConfig {
        ConsumerConfig {
            compatibility: config.compatibility.clone(),
            session_deadline: config.timing.session_deadline,
            kv_lease_duration: config.timing.kv_lease_duration.clamp(SHORTEST_LEASE, LONGEST_LEASE),
            handshake_timeout: config.timing.handshake_timeout,
            reader: config.reader,
            side_channel: config.side_channel.clone(),
            post_bytes: config.limits.max_post_bytes,
            engine_id: args.worker().engine.as_str().to_owned(),
            seed: config.seed.unwrap_or_default(),
        }
    }
}
