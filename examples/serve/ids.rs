//! Names of requests, which are never used again.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A new name of 128 random bits. A letter comes first, so that no engine takes it for a number.
pub fn new() -> String {
    // The standard library's only source of random bits.
    let bits = || RandomState::new().build_hasher().finish();
    format!("r{:016x}{:016x}", bits(), bits())
}
