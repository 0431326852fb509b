//! UCX's functions and types, made by bindgen.
#![allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unused_qualifications,
    unsafe_op_in_unsafe_fn,
    dead_code,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    clippy::expect_used,
    clippy::unwrap_used
)]

include!(concat!(env!("OUT_DIR"), "/ucp.rs"));
