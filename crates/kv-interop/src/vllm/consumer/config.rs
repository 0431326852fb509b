//! What of the settings the receiving half of a worker needs.

use std::time::Duration;

use kv_core::KvArgs;

use super::super::config::{LONGEST_LEASE, SideChannelAddr, VllmConfig, VllmReader};
use super::super::hash::Compatibility;

/// The shortest lease that counts: a sixth of a lease passes between two heartbeats.
const SHORTEST_LEASE: Duration = Duration::from_millis(60);

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
    /// The id of this worker's own engine.
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
