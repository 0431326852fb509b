//! Entry points for fuzzing: the functions that a stranger's and a peer's bytes pass through first. Each returns true
//! if the bytes are accepted. Not a public API.

pub mod samples;

use crate::message::{self, HEADER, Hello, Welcome};
use crate::metadata::Metadata;

/// Decodes a transport's metadata. Asserts that accepted metadata stays the same when encoded and decoded again.
pub fn metadata(bytes: &[u8]) -> bool {
    let Ok(read) = Metadata::decode(bytes) else { return false };
    let again = read.encode().and_then(|bytes| Metadata::decode(&bytes));
    assert_eq!(again.as_ref(), Ok(&read));
    true
}

/// Decodes a message's header, and both greetings. Asserts that what is accepted stays the same when encoded and
/// decoded again.
pub fn messages(bytes: &[u8]) -> bool {
    let header = bytes.first_chunk::<HEADER>().and_then(message::read_header);
    if let Some((kind, secret)) = header {
        assert_eq!(message::read_header(&message::header(kind, secret)), Some((kind, secret)));
    }
    let (hello, welcome) = (Hello::decode(bytes), Welcome::decode(bytes));
    if let Some(hello) = &hello {
        assert_eq!(Hello::decode(&hello.encode()).as_ref(), Some(hello));
    }
    if let Some(welcome) = &welcome {
        assert_eq!(Welcome::decode(&welcome.encode()).as_ref(), Some(welcome));
    }
    header.is_some() || hello.is_some() || welcome.is_some()
}
