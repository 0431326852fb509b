//! Entrances for fuzzing: what a stranger's bytes pass through before anything of them is believed.

use std::io::Write;
use std::os::unix::net::UnixStream;

use bytes::Bytes;

use crate::connection::Connection;
use crate::handshake::{Hello, OPENING};
use crate::inbound::Received;
use crate::metadata::Metadata;

/// The metadata of a transport: what is accepted encodes again to something that means the same.
pub fn metadata(bytes: &[u8]) {
    if let Ok(read) = Metadata::decode(bytes) {
        let again = read.encode().and_then(|bytes| Metadata::decode(&bytes));
        assert_eq!(again.as_ref(), Ok(&read));
    }
}

/// A hello, and the metadata in it.
pub fn hello(bytes: &[u8]) {
    if let Ok(read) = Hello::decode(Bytes::copy_from_slice(bytes)) {
        assert_eq!(Hello::decode(read.encode()).as_ref(), Ok(&read));
        metadata(&read.metadata);
    }
}

/// The stream of messages of a connection, cut into pieces as the first byte says.
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
