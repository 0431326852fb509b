//! Names of requests, which are never used again, and names of prompts.

use std::hash::{BuildHasher, Hasher, RandomState};

use kv_transfer::queue::aux_tag;
use kv_transfer::{IdError, Room};
use sha2::{Digest, Sha256};

/// A new name of 128 random bits. A letter comes first, so that no engine takes it for a number.
pub fn new() -> String {
    // The standard library's only source of random bits.
    let bits = || RandomState::new().build_hasher().finish();
    format!("r{:016x}{:016x}", bits(), bits())
}

/// A name of these tokens: two prompts have different ones.
pub fn of_tokens(tokens: &[u32]) -> String {
    let mut hash = Sha256::new();
    tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// The name of an aux row: that of the request and of its prompt. A decode engine that finds another name has got the KV
/// of another prompt, and must not use the KV.
pub fn of_row(room: &Room, tokens: &[u32]) -> Result<Room, IdError> {
    Room::request(&format!("{:016x}-{}", aux_tag(room), of_tokens(tokens)))
}

/// A new name of an offer of the KV of these tokens.
pub fn of_offer(tokens: &[u32]) -> Result<Room, IdError> {
    Room::request(&format!("{}-{}", new(), of_tokens(tokens)))
}

/// True if the room is that of an offer of the KV of these tokens.
pub fn is_of_offer(room: &Room, tokens: &[u32]) -> bool {
    matches!(room, Room::Request(id) if id.as_str().ends_with(&of_tokens(tokens)))
}
