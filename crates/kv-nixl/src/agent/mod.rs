//! The NIXL agent: the calls of `nixl-sys` that are made, and the name by which peers know the agent.

pub(crate) mod engine;
pub(crate) mod name;
