//! All unsafe code of this crate: the library, and the objects that libfabric makes.
//!
//! Most functions of libfabric are inline functions of its headers, which call through tables in the objects. They
//! are written here as what they are: calls through those tables.
#![allow(unsafe_code)]
// A flag of libfabric has the type that its value needs, and is used as 64 bits.
#![allow(clippy::unnecessary_cast)]

pub(crate) mod adopt;
mod contexts;
mod endpoint;
mod fabric;
mod library;
pub(crate) mod numa;
mod posting;
mod sockets;

/// libfabric's types and constants, as its headers declare them.
#[allow(
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals
)]
pub(crate) mod sys {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}

pub(crate) use endpoint::{Attempt, Completion, Endpoint, Far, MESSAGE, MOVES, Near, SENDS, Settings};
pub(crate) use fabric::{Address, Promises, Usable, usable};
pub(crate) use library::Library;
#[cfg(feature = "raw")]
pub(crate) use library::{DupInfo, Fabric, FreeInfo, GetInfo};
pub(crate) use posting::RANGES;

/// Calls a function of an object's table, which lacks the function if the provider does not have it: then the call
/// has the result `-ENOSYS`.
macro_rules! call {
    ($object:expr => $($table:ident).+, $function:ident($($argument:expr),*)) => {{
        let table = (*$object).$($table).+;
        match if table.is_null() { None } else { (*table).$function } {
            Some(function) => function($($argument),*),
            None => -(libc::ENOSYS as i32) as _,
        }
    }};
}
pub(crate) use call;
