//! Inputs that the readers accept, written by this crate's own encoders.

use bytes::Bytes;
use kv_core::TransportError;
use kv_host::{Host, ProcessIdentity, Token};

use crate::message::{Header, Hello, Kind};
use crate::metadata::{Identity, Metadata, Place, Port};

fn token(byte: u8) -> Token {
    Token::from_bytes([byte; Token::LEN])
}

/// Metadata without regions, and with two: one has a key for both endpoints, the other one for each.
pub fn metadata() -> Result<Vec<Vec<u8>>, TransportError> {
    let name = Bytes::from_static(b"\x02\0\x1f\x90\x7f\0\0\x01\0\0\0\0\0\0\0\0");
    let place = |keys: &[u64]| Place::new(0, 1 << 20, keys.to_vec(), Some(0));
    let of = |regions| Metadata {
        token: token(8),
        provider: "tcp;ofi_rxm".to_owned(),
        host: Host { boot: (1, 2), network: 3 },
        process: ProcessIdentity { inode: 4, namespace: 5, pid: 6, started: 7 },
        ports: vec![Port { name: name.clone(), node: None }, Port { name: name.clone(), node: Some(1) }],
        immediate: 8,
        regions,
    };
    let all = [of(Vec::new()), of(vec![place(&[0xfeed]), place(&[0xfeed, 0xbeef])])];
    all.iter().map(|metadata| Ok(metadata.encode()?.to_vec())).collect()
}

/// A step of a guest: a message, after a mark and its length.
fn step(kind: Kind, [len, count, sequence]: [u32; 3], body: &[u8]) -> Vec<u8> {
    let message = [&Header { key: 7, kind, len, count, sequence }.encode(), body].concat();
    [&[128 | (message.len() >> 8) as u8, message.len() as u8], &message[..]].concat()
}

/// Steps of a guest: a hello, frames in one part and in two, frames that wait for writes, and questions.
pub fn messages() -> Vec<Vec<u8>> {
    let from = Identity { token: token(5), hash: [5; Identity::HASH] };
    let hello = Hello { to: token(5), from, name: vec![5; 16] };
    let frames = [
        step(Kind::Frame, [4, 0, 0], b"done"),
        step(Kind::Frame, [8, 0, 0], b"two "),
        step(Kind::More, [0; 3], b"part"),
    ];
    let announced = |count| step(Kind::Frame, [4, count, 9], b"done");
    let withdrawn = |count| step(Kind::Withdraw, [0, count, 9], b"");
    let counted = [announced(2), vec![0, 9, 0, 9], withdrawn(0)];
    let void = [announced(3), vec![0, 9], withdrawn(2), vec![0, 9]];
    let questions = [
        step(Kind::Ask, [0, 128, 0], b""),
        step(Kind::Ask, [0, 0, 1], b""),
        step(Kind::Answer, [0, 0, 1], b""),
    ];
    vec![
        step(Kind::Hello, [0; 3], &hello.encode()),
        frames.concat(),
        counted.concat(),
        void.concat(),
        questions.concat(),
    ]
}
