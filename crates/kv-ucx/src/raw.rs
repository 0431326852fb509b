//! UCX's functions and types as bindgen has made them, for the bench that compares the transport with plain calls. Not a
//! public API.

pub use crate::ffi::bindings::*;

/// The functions of the loaded library.
pub fn functions(ucx: crate::Ucx) -> &'static Ucp {
    &ucx.api.ucp
}
