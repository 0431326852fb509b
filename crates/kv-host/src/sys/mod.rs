//! All unsafe code of this crate: mappings, raw copies, and the calls that `rustix` does not wrap.
//!
//! The safe types of this module carry the proofs: a [`Mapping`] is mapped for as long as it lives,
//! a [`Memory`] is a range that this process may read and write. Shared memory is only copied through raw
//! pointers, never referenced, because another process may write to it at any moment. A copy that is made
//! during such a write has wrong bytes, and no worse effect.
#![allow(unsafe_code)]

mod mapping;
mod memory;
mod printed;
mod socket;
mod stream;

pub use mapping::Mapping;
pub use memory::Memory;
pub use printed::printed;
pub(crate) use socket::{Credentials, peer_credentials, peer_pidfd};

/// True if `offset..offset + len` lies inside `0..total`.
fn inside(total: usize, offset: usize, len: usize) -> bool {
    offset.checked_add(len).is_some_and(|end| end <= total)
}
