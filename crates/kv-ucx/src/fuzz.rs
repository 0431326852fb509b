//! Entry points for fuzzing: the functions that a stranger's and a peer's bytes pass through first. Not a public API.

use crate::message::{self, HEADER, Hello, Welcome};
use crate::metadata::Metadata;

/// Decodes a transport's metadata. Asserts that accepted metadata stays the same when encoded and decoded again.
pub fn metadata(bytes: &[u8]) {
    if let Ok(read) = Metadata::decode(bytes) {
        let again = read.encode().and_then(|bytes| Metadata::decode(&bytes));
        assert_eq!(again.as_ref(), Ok(&read));
    }
}

/// Decodes a message's header, and both greetings. Asserts that what is accepted stays the same when encoded and
/// decoded again.
pub fn messages(bytes: &[u8]) {
    if let Some((kind, secret)) = bytes.first_chunk::<HEADER>().and_then(message::read_header) {
        assert_eq!(message::read_header(&message::header(kind, secret)), Some((kind, secret)));
    }
    if let Some(hello) = Hello::decode(bytes) {
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
    }
    if let Some(welcome) = Welcome::decode(bytes) {
        assert_eq!(Welcome::decode(&welcome.encode()), Some(welcome));
    }
}
