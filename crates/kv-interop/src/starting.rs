//! What the start of a worker has in common, whichever dialect the worker speaks.

use kv_core::KvArgs;
use kv_core::trace::KvWhat;
use kv_poll::worker::Setup;
use kv_poll::{Listener, StartError};

/// What the worker's thread is started with: the listener of the settings, and one for standard error if the
/// arguments are verbose.
pub(crate) fn setup(args: &KvArgs, listener: Option<Listener>) -> Setup<KvWhat> {
    let verbose = args.verbose().then(Listener::stderr);
    let listeners = verbose.into_iter().chain(listener).collect();
    Setup::new(args.worker().clone()).with(|setup| setup.listeners = listeners)
}

/// Random bits from the operating system.
pub(crate) fn random_bits() -> Result<u64, StartError> {
    Ok(u64::from_le_bytes(kv_host::random().map_err(StartError::Os)?))
}
