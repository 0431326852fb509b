//! Inputs that the readers accept, written by this crate's own encoders.

use bytes::Bytes;
use kv_core::{Time, TransportError};
use kv_host::Token;

use crate::hello::{Hello, Welcome};
use crate::message::{self, Asked, Range, Reply, Verdict, WHOLE, ZEROED};
use crate::metadata::{Identity, Metadata};

fn token(byte: u8) -> Token {
    Token::from_bytes([byte; Token::LEN])
}

/// Metadata with and without regions, of a transport that encrypts and of one that does not.
pub fn metadata() -> Result<Vec<Vec<u8>>, TransportError> {
    let addresses = [([10, 0, 0, 1], 9000).into(), ([0xfd00, 0, 0, 0, 0, 0, 0, 1], 9001).into()];
    let of = |regions, tls| Metadata {
        token: token(4),
        addresses: addresses.to_vec(),
        regions: vec![4096; regions],
        tls,
    };
    [of(0, false), of(2, true)].iter().map(|metadata| Ok(metadata.encode()?.to_vec())).collect()
}

/// A hello and a welcome.
pub fn greetings() -> Vec<Vec<u8>> {
    let identity = |byte| Identity { token: token(byte), hash: [byte; Identity::HASH] };
    let hello = Hello { number: 1, to: identity(7), from: identity(8), way: token(9) };
    let welcome = Welcome { from: identity(7), way: token(9), clock: Time::from_nanos(77) };
    vec![hello.encode().to_vec(), welcome.encode().to_vec()]
}

fn asked(number: u32, ranges: &[(u32, u32, u64)]) -> Asked {
    let range = |&(region, len, offset): &(u32, u32, u64)| Range { region, len, offset };
    let bytes = ranges.iter().map(|(_, len, _)| u64::from(*len)).sum();
    Asked { number, until: Time::from_nanos(1 << 60), ranges: ranges.iter().map(range).collect(), bytes }
}

/// Streams of frames, writes and reads, in pieces of several lengths. The ranges are in the regions of the target.
pub fn requests() -> Vec<Vec<u8>> {
    let write = |number, ending, notify: &[u8]| {
        let asked = asked(number, &[(0, 100, 900), (1, 200, 69_000)]);
        [&message::write(&asked, notify.len()), &[8; 300][..], &[ending], notify].concat()
    };
    let frame = [&message::frame(5), &b"frame"[..]].concat();
    let read = message::read(&asked(2, &[(1, 70_000, 0)]));
    let all = [&frame, &write(1, WHOLE, b"notify"), &read[..], &write(3, ZEROED, b""), &frame].concat();
    let writes = [write(1, WHOLE, b"notify"), write(2, WHOLE, b"")].concat();
    vec![[&[255], &all[..]].concat(), [&[5], &writes[..]].concat(), [&[0], &frame[..], &frame].concat()]
}

/// A stream of answers with every verdict, and the begin of a read's bytes.
pub fn replies() -> Vec<Vec<u8>> {
    let answer = |verdict| Reply::Answer { number: 3, verdict, clock: Time::from_nanos(1 << 60) };
    let all = [
        answer(Verdict::Done),
        answer(Verdict::Late),
        answer(Verdict::Revoked),
        Reply::Bytes { number: 4, bytes: 1000 },
    ];
    vec![all.iter().map(Reply::encode).collect::<Vec<Bytes>>().concat()]
}
