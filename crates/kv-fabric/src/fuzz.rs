//! Entry points for fuzzing: the functions that a stranger's and a peer's bytes pass through first. Not a public API.

use kv_core::MAX_FRAME;

use crate::incoming::{ANNOUNCED, ANNOUNCED_BYTES, Incoming};
use crate::message::{BODY, HEADER, Header, Hello};
use crate::metadata::Metadata;

/// Decodes a transport's metadata. Asserts that accepted metadata stays the same when encoded and decoded again.
pub fn metadata(bytes: &[u8]) {
    if let Ok(read) = Metadata::decode(bytes) {
        let again = read.encode().and_then(|bytes| Metadata::decode(&bytes));
        assert_eq!(again.as_ref(), Ok(&read));
    }
}

/// Reads the messages of a guest and the data of its writes: a byte says what comes next, a write with the number of the
/// following byte, or a message of as many bytes as the following two say. Asserts that accepted headers and greetings
/// stay the same when encoded and decoded again, that a frame has the length that was said, and that no more is held than
/// is allowed.
pub fn messages(bytes: &[u8]) {
    let mut incoming = Incoming::default();
    let mut rest = bytes;
    while let Some((what, after)) = rest.split_first() {
        let Some((number, after)) = after.split_first() else { return };
        if *what < 128 {
            incoming.arrived(u32::from(*number));
            rest = after;
        } else {
            let len = (usize::from(*what - 128) << 8 | usize::from(*number)).min(after.len());
            let (message, after) = after.split_at(len);
            take(&mut incoming, message);
            rest = after;
        }
        let (bytes, counters) = incoming.held();
        assert!(bytes <= 2 * ANNOUNCED_BYTES + 2 * MAX_FRAME && counters <= 2 * ANNOUNCED);
    }
}

fn take(incoming: &mut Incoming, message: &[u8]) {
    let Some((header, body)) = Header::decode(message) else { return };
    assert!(body.len() <= BODY && body.len() + HEADER == message.len());
    let again = header.encode();
    assert_eq!(Header::decode(&again), Some((header, &[][..])));
    if let Some(hello) = Hello::decode(body) {
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
    }
    if let Ok(Some(frame)) = incoming.take(header, body) {
        assert!(frame.len() <= MAX_FRAME);
    }
}
