//! The NIXL agent: what of `nixl-sys` is called, and the name by which peers know the agent.

pub(crate) mod engine;
pub(crate) mod name;
