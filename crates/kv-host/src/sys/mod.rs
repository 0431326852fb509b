//! Everything unsafe: mappings, raw copies, and the calls that `rustix` does not wrap.
//!
//! The safe types of this module carry the proofs: a [`Mapping`] is mapped for as long as it lives,
//! a [`Memory`] is a range that this process may read and write. Shared memory is only ever copied
//! through raw pointers, never referenced, because another process may write to it at any moment;
//! the bytes of a torn copy are wrong, and nothing else is.
#![allow(unsafe_code)]

mod mapping;
mod memory;
mod socket;

pub use mapping::Mapping;
pub use memory::Memory;
pub(crate) use socket::{Credentials, peer_credentials, peer_pidfd};

/// Whether `offset..offset + len` lies inside `0..total`.
fn inside(total: usize, offset: usize, len: usize) -> bool {
    offset.checked_add(len).is_some_and(|end| end <= total)
}
