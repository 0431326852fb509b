//! The machine without a worker and without a transport: what a simulator drives.

use std::time::Duration;

use bytes::Bytes;
use kv_core::KvArgs;
use kv_poll::KvMachine;

use super::config::VllmConfig;
use super::geometry::{CacheError, own_metadata};
use super::machine::VllmMachine;
use super::metadata::{NixlHandshakePayload, asked, clock};

/// The machine of vLLM's dialect, as every worker of this dialect runs the machine.
pub fn machine(args: &KvArgs, config: &VllmConfig) -> Result<KvMachine, CacheError> {
    Ok(Box::new(VllmMachine::new(args, config)?))
}

/// The pipeline stage and the tensor-parallel rank for whose metadata a message asks.
pub fn question(part: &[u8]) -> Option<(u32, u32)> {
    asked(part)
}

/// What the side channel answers for a rank of these arguments, whose agent has these metadata, when the clock of
/// the engine's process shows `shown`.
pub fn answer(args: &KvArgs, agent: Bytes, hash: &str, shown: Duration) -> Result<Vec<Bytes>, CacheError> {
    let metadata = own_metadata(args, agent, "FLASH_ATTN")?;
    let (compatibility_hash, agent_metadata_bytes) = (hash.to_owned(), metadata.encode());
    Ok(vec![NixlHandshakePayload { compatibility_hash, agent_metadata_bytes }.encode(), clock(shown)])
}
