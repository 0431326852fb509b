//! Errors: one enum per concern, and what the caller can do about each.

mod args;
mod arguments;
mod bootstrap;
mod cause;
mod name;
mod open;
mod os;
pub(crate) mod peer;
mod remedy;
mod transfer;

pub use args::ArgsError;
pub use arguments::{IdError, PagesError};
pub use bootstrap::BootstrapError;
pub use cause::{Cause, Obstacle};
pub use open::{Backpressure, OpenError};
pub use os::OsError;
pub use peer::{Mismatch, PeerCause};
pub use remedy::Recovery;
pub use transfer::{Phase, TransferError};
