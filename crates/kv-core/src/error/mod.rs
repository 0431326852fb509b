//! Errors: one enum per concern, and what the caller can do about each.

mod args;
mod bootstrap;
mod cause;
mod id;
mod name;
mod open;
mod os;
mod pages;
pub(crate) mod peer;
mod remedy;
mod transfer;

pub use args::ArgsError;
pub use bootstrap::BootstrapError;
pub use cause::{Cause, Obstacle};
pub use id::IdError;
pub use open::{Backpressure, OpenError};
pub use os::OsError;
pub use pages::PagesError;
pub use peer::{Mismatch, PeerCause};
pub use remedy::Recovery;
pub use transfer::{Phase, TransferError};
