//! Inputs that the readers accept, written by this crate's own encoders.

use bytes::Bytes;
use kv_core::{MemoryKind, TransportError};
use kv_host::{Host, ProcessIdentity, Token};

use crate::message::{self, Hello, Kind, Welcome};
use crate::metadata::{Metadata, Name, Place};

const HOST: Host = Host { boot: (1, 2), network: 3 };
const PROCESS: ProcessIdentity = ProcessIdentity { inode: 4, namespace: 5, pid: 6, started: 7 };

fn token(byte: u8) -> Token {
    Token::from_bytes([byte; Token::LEN])
}

fn name() -> Name {
    Name { token: token(8), address: Bytes::from_static(b"a worker's address") }
}

/// Metadata without regions and with two.
pub fn metadata() -> Result<Vec<Vec<u8>>, TransportError> {
    let regions = |count| vec![Place { kind: MemoryKind::Dram, addr: 0xfeed, len: 1 << 20 }; count];
    let of = |count| Metadata { name: name(), host: HOST, process: PROCESS, regions: regions(count) };
    [of(0), of(2)].iter().map(|metadata| Ok(metadata.encode()?.to_vec())).collect()
}

/// A header, a hello, and welcomes with the keys of no region and of two.
pub fn messages() -> Vec<Vec<u8>> {
    let header = message::header(Kind::Frame, token(7));
    let hello =
        Hello { to: token(9), hash: [5; 32], from: name(), host: HOST, process: PROCESS, parting: token(10) };
    let keys = |count| vec![Bytes::from_static(b"a region's key"); count];
    let welcome = |count| Welcome { session: token(6), keys: keys(count), parting: token(10) };
    let bodies = [hello.encode(), welcome(0).encode(), welcome(2).encode()];
    [header.to_vec()].into_iter().chain(bodies.map(Vec::from)).collect()
}
