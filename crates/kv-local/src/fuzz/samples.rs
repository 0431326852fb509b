//! Inputs that the readers accept, written by this crate's own encoders.

use bytes::Bytes;
use kv_core::TransportError;
use kv_host::{Host, ProcessIdentity, Token};

use crate::framing::{Kind, header};
use crate::handshake::Hello;
use crate::metadata::{Metadata, Place};

fn of_a_transport(regions: &[Place], arenas: &[u64]) -> Result<Bytes, TransportError> {
    let metadata = Metadata {
        host: Host { boot: (1, 2), network: 3 },
        token: Token::from_bytes([4; Token::LEN]),
        process: ProcessIdentity { inode: 5, namespace: 6, pid: 7, started: 8 },
        socket: "kv-local-0a".to_owned(),
        arenas: arenas.to_vec(),
        regions: regions.to_vec(),
    };
    metadata.encode()
}

/// Metadata without memory, with regions in an arena, and with adopted memory.
pub fn metadata() -> Result<Vec<Vec<u8>>, TransportError> {
    let lent = Place { arena: Some(1), start: 64, len: 128 };
    let adopted = Place { arena: None, start: 1 << 40, len: 1 << 20 };
    let all = [
        of_a_transport(&[], &[]),
        of_a_transport(&[lent; 3], &[4096, 8192]),
        of_a_transport(&[adopted, lent], &[1 << 32; 2]),
    ];
    all.into_iter().map(|bytes| Ok(bytes?.to_vec())).collect()
}

/// A hello with each of the metadata, for the transport whose token is zeros.
pub fn hello() -> Result<Vec<Vec<u8>>, TransportError> {
    let hello =
        |metadata: Vec<u8>| Hello { expected: Token::from_bytes([0; Token::LEN]), metadata: metadata.into() };
    Ok(metadata()?.into_iter().map(|metadata| hello(metadata).encode().to_vec()).collect())
}

/// A whole conversation, in pieces of 256 bytes and of one byte, and one that ends at once.
pub fn messages() -> Result<Vec<Vec<u8>>, TransportError> {
    let message = |kind, body: &[u8]| [&header(kind, body.len()), body].concat();
    let (long, goodbye) = (message(Kind::Frame, &[9; 5000]), message(Kind::Goodbye, b""));
    let talk =
        [message(Kind::Frame, b"frame"), message(Kind::Wake, b""), message(Kind::Frame, b""), long].concat();
    let mut all = Vec::new();
    for hello in hello()? {
        let greeting = [message(Kind::Hello, &hello), message(Kind::Descriptors, b"")].concat();
        all.push([&[255], &greeting[..], &talk, &goodbye].concat());
        all.push([&[0], &greeting[..], &goodbye].concat());
    }
    Ok(all)
}
