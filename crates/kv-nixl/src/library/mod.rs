//! Finding and loading NIXL, and the settings that UCX should have.

mod config_file;
pub(crate) mod discovery;
pub mod guards;
pub(crate) mod looked;
mod settings;
pub(crate) mod warnings;
