//! The entry point for fuzzing: what a stranger's packet passes through first. Not a public API.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::message::{self, Reply, Request};

/// Decodes a packet as each of the messages that it may be. Asserts that an accepted message stays the same
/// when it is encoded and decoded again.
pub fn messages(bytes: &[u8]) {
    stays_the_same::<Request>(bytes);
    stays_the_same::<Reply>(bytes);
    if let Ok(greeting) = message::decode_greeting(bytes) {
        let again = message::encode_greeting(&greeting).and_then(|bytes| message::decode_greeting(&bytes));
        assert_eq!(again.as_ref(), Ok(&greeting));
    }
}

fn stays_the_same<T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    if let Ok(read) = message::decode::<T>(bytes) {
        let again = message::encode(&read).and_then(|bytes| message::decode::<T>(&bytes));
        assert_eq!(again.as_ref(), Ok(&read));
    }
}
