//! Everything unsafe: loading the library, the environment, mappings and raw copies, and what
//! `nixl-sys` leaves to its caller.
#![allow(unsafe_code)]

pub(crate) mod environment;
pub(crate) mod library;
pub(crate) mod memory;
pub(crate) mod owned;
mod promises;
