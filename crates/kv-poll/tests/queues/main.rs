//! The decode and the prefill queues, with sessions that do what the test says.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod decode;
#[path = "../fake/mod.rs"]
mod fake;
mod prefill;
mod ranks;

use kv_core::Cause;
use kv_poll::queue::RequestError;

pub(crate) fn is_cause(error: &RequestError, cause: &Cause) -> bool {
    matches!(error, RequestError::Transfer(error) if error.cause == *cause)
}
