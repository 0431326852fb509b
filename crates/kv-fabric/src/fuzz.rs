//! Entry points for fuzzing: the functions that a stranger's and a peer's bytes pass through first. Each returns true
//! if all of the bytes are accepted. Not a public API.

pub mod samples;

use kv_core::MAX_FRAME;

use crate::incoming::{ANNOUNCED, ANNOUNCED_BYTES, Incoming};
use crate::message::{BODY, HEADER, Header, Hello, Kind};
use crate::metadata::Metadata;

/// Decodes a transport's metadata. Asserts that accepted metadata stays the same when encoded and decoded again.
pub fn metadata(bytes: &[u8]) -> bool {
    let Ok(read) = Metadata::decode(bytes) else { return false };
    let again = read.encode().and_then(|bytes| Metadata::decode(&bytes));
    assert_eq!(again.as_ref(), Ok(&read));
    true
}

/// Reads the messages of a guest and the data of its writes: a byte says what comes next, a write with the number of the
/// following byte, or a message of as many bytes as the following two say. Asserts that accepted headers and greetings
/// stay the same when encoded and decoded again, that a frame has the length that was said, and that no more is held than
/// is allowed.
pub fn messages(bytes: &[u8]) -> bool {
    let mut incoming = Incoming::default();
    let (mut rest, mut accepted) = (bytes, !bytes.is_empty());
    while let Some((what, after)) = rest.split_first() {
        let Some((number, after)) = after.split_first() else { return false };
        if *what < 128 {
            incoming.arrived(u32::from(*number));
            rest = after;
        } else {
            let len = (usize::from(*what - 128) << 8 | usize::from(*number)).min(after.len());
            let (message, after) = after.split_at(len);
            accepted &= take(&mut incoming, message);
            rest = after;
        }
        let (bytes, counters) = incoming.held();
        assert!(bytes <= 2 * ANNOUNCED_BYTES + 2 * MAX_FRAME && counters <= 2 * ANNOUNCED);
    }
    accepted
}

fn take(incoming: &mut Incoming, message: &[u8]) -> bool {
    let Some((header, body)) = Header::decode(message) else { return false };
    assert!(body.len() <= BODY && body.len() + HEADER == message.len());
    let again = header.encode();
    assert_eq!(Header::decode(&again), Some((header, &[][..])));
    let hello = Hello::decode(body);
    if let Some(hello) = &hello {
        assert_eq!(Hello::decode(&hello.encode()).as_ref(), Some(hello));
    }
    let taken = incoming.take(header, body);
    if let Ok(Some(frame)) = &taken {
        assert!(frame.len() <= MAX_FRAME);
    }
    match header.kind {
        Kind::Hello => hello.is_some(),
        Kind::Frame | Kind::More | Kind::Withdraw => taken.is_ok(),
        _ => true,
    }
}
