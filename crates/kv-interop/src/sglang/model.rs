//! The machine without a worker and without a transport: what a simulator drives.

use kv_core::KvArgs;
use kv_poll::KvMachine;

pub use super::config::SglangAgent;
use super::config::{SglangConfig, SglangConfigError};
use super::machine::SglangMachine;

/// The machine of SGLang's protocol, as every worker of this dialect runs the machine.
pub fn machine(
    args: &KvArgs,
    config: SglangConfig,
    agent: SglangAgent,
) -> Result<KvMachine, SglangConfigError> {
    Ok(Box::new(SglangMachine::new(args, config, agent)?))
}
