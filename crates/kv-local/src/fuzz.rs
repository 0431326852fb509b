//! Entry points for fuzzing: the functions that a stranger's bytes pass through first. Not a public API.

use std::io::Write;
use std::os::unix::net::UnixStream;

use bytes::Bytes;

use crate::connection::Connection;
use crate::handshake::{Hello, OPENING};
use crate::inbound::Received;
use crate::metadata::Metadata;

/// Decodes a transport's metadata. Asserts that accepted metadata stays the same when encoded and decoded
/// again.
pub fn metadata(bytes: &[u8]) {
    if let Ok(read) = Metadata::decode(bytes) {
        let again = read.encode().and_then(|bytes| Metadata::decode(&bytes));
        assert_eq!(again.as_ref(), Ok(&read));
    }
}

/// Decodes a hello, and the metadata in it.
pub fn hello(bytes: &[u8]) {
    if let Ok(read) = Hello::decode(Bytes::copy_from_slice(bytes)) {
        assert_eq!(Hello::decode(read.encode()).as_ref(), Ok(&read));
        metadata(&read.metadata);
    }
}

/// Reads the stream of messages of a connection, in pieces whose length the first byte gives.
pub fn messages(bytes: &[u8]) {
    let (Some((&cut, stream)), Ok((ours, mut theirs))) = (bytes.split_first(), UnixStream::pair()) else {
        return;
    };
    let mut connection = Connection::new(ours.into(), 0, [0; OPENING]);
    let mut scratch = vec![0; 1 + usize::from(cut)];
    // A piece fits into the buffer of any socket.
    for piece in stream.chunks(4096) {
        if theirs.write_all(piece).is_err() {
            return;
        }
        while let Ok(Received::Bytes(_)) = connection.receive(&mut scratch) {
            loop {
                match connection.next_message() {
                    Ok(Some(_)) => {}
                    Ok(None) => break,
                    Err(_) => return,
                }
            }
        }
    }
}
