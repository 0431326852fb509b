//! Finding and loading NIXL, and the settings that UCX should have before it starts.

pub(crate) mod discovery;
pub mod guards;
pub(crate) mod looked;
