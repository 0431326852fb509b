//! Finding and loading NIXL, and the settings that UCX should have.

mod config_file;
pub(crate) mod discovery;
pub mod guards;
mod installed;
mod loader;
pub(crate) mod looked;
pub(crate) mod places;
mod settings;
mod ucx_files;
mod usable;
pub(crate) mod warnings;
