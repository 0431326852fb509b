//! Everything unsafe: loading the library, the environment, promises about memory, and what `nixl-sys`
//! leaves to its caller.
#![allow(unsafe_code)]

pub(crate) mod directory;
pub(crate) mod environment;
pub(crate) mod library;
pub(crate) mod memory;
pub(crate) mod owned;
mod promises;
pub(crate) mod ucx;
