//! The names of planes' agents.

/// The name of the agent of a plane.
pub(crate) fn agent_name(token: u64) -> String {
    format!("kv-{token:016x}")
}
