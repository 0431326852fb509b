//! Entry points for fuzzing: the functions that a stranger's bytes pass through first. Each returns true if the bytes
//! are accepted as a whole. Not a public API.

pub mod samples;

use std::io::Write;
use std::os::unix::net::UnixStream;

use bytes::Bytes;
use kv_host::Token;

use crate::connection::Connection;
use crate::framing::Message;
use crate::handshake::{Hello, opening};
use crate::inbound::Received;
use crate::metadata::Metadata;

/// Decodes a transport's metadata. Asserts that accepted metadata stays the same when encoded and decoded
/// again.
pub fn metadata(bytes: &[u8]) -> bool {
    let Ok(read) = Metadata::decode(bytes) else { return false };
    let again = read.encode().and_then(|bytes| Metadata::decode(&bytes));
    assert_eq!(again.as_ref(), Ok(&read));
    true
}

/// Decodes a hello, and the metadata in it.
pub fn hello(bytes: &[u8]) -> bool {
    let Ok(read) = Hello::decode(Bytes::copy_from_slice(bytes)) else { return false };
    assert_eq!(Hello::decode(read.encode()).as_ref(), Ok(&read));
    metadata(&read.metadata)
}

/// Reads the stream of messages of a connection, in pieces whose length the first byte gives. The stream is whole if
/// the last message is a goodbye.
pub fn messages(bytes: &[u8]) -> bool {
    let (Some((&cut, stream)), Ok((ours, mut theirs))) = (bytes.split_first(), UnixStream::pair()) else {
        return false;
    };
    let mut connection = Connection::new(ours.into(), 0, opening(Token::from_bytes([0; Token::LEN])));
    let mut scratch = vec![0; 1 + usize::from(cut)];
    let mut said_goodbye = false;
    // A piece fits into the buffer of any socket.
    for piece in stream.chunks(4096) {
        if theirs.write_all(piece).is_err() {
            return false;
        }
        while let Ok(Received::Bytes(_)) = connection.receive(&mut scratch) {
            loop {
                match connection.next_message() {
                    Ok(Some(message)) => said_goodbye = message == Message::Goodbye,
                    Ok(None) => break,
                    Err(_) => return false,
                }
            }
        }
    }
    said_goodbye
}
