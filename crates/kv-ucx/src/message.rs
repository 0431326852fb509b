//! Messages between transports: UCX's active messages with a header of a fixed length and a body.
//!
//! | message | secret in the header | body |
//! |---|---|---|
//! | hello | the way: random, of the side that connects | who asks for whom ([`Hello`]) |
//! | welcome | the way, repeated | the session, and the keys of the regions ([`Welcome`]) |
//! | frame | the session | the frame |
//! | goodbye | the session | nothing |
//! | parted | the secret of the receiver's endpoint | nothing |
//! | farewell | the secret of the receiver's endpoint | nothing |
//!
//! A session is a random number that only the two sides know: the welcome goes to the address of the asking
//! transport's name, so a frame of the session comes from the transport of that name. In the same way the secret of an
//! endpoint is known only to the side to which it leads, which says so when the endpoint leads nowhere any more, or when that
//! side ends.

use bytes::Bytes;
use kv_core::wire::lengths_fit;
use kv_core::{MAX_FRAME, MAX_REGIONS};
use kv_host::{Host, ProcessIdentity, Token};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::metadata::{Hash, MAX_ADDRESS, Name};

/// Length of a header, in bytes.
pub(crate) const HEADER: usize = 4 + Token::LEN;
/// Longest key of one region, in bytes.
pub(crate) const MAX_KEY: usize = 1 << 10;
/// Longest body, in bytes: a frame, or a welcome with the keys of all regions.
pub(crate) const MAX_BODY: usize = MAX_KEY * MAX_REGIONS + (64 << 10);
const _: () = assert!(MAX_FRAME <= MAX_BODY);
/// "KV UCX message", version 2, and the kind of message in the last byte.
const MAGIC: [u8; 3] = *b"KU\x02";

/// What a message is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Hello = 1,
    Welcome = 2,
    Frame = 3,
    Goodbye = 4,
    Parted = 5,
    Farewell = 6,
}

const KINDS: [Kind; 6] =
    [Kind::Hello, Kind::Welcome, Kind::Frame, Kind::Goodbye, Kind::Parted, Kind::Farewell];

/// The header of a message.
pub(crate) fn header(kind: Kind, secret: Token) -> [u8; HEADER] {
    let mut out = [0; HEADER];
    let parts = MAGIC.into_iter().chain([kind as u8]).chain(secret.to_bytes());
    out.iter_mut().zip(parts).for_each(|(out, byte)| *out = byte);
    out
}

/// Reads a header; `None` of another version or an unknown kind.
pub(crate) fn read_header(bytes: &[u8; HEADER]) -> Option<(Kind, Token)> {
    let (head, secret) = bytes.split_first_chunk::<4>()?;
    let kind = match head {
        [b'K', b'U', 2, kind] => *kind,
        _ => return None,
    };
    let kind = KINDS.into_iter().find(|it| *it as u8 == kind)?;
    Some((kind, Token::from_bytes(secret.try_into().ok()?)))
}

/// The first message on a way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The incarnation that is asked for, and the hash of its metadata.
    pub(crate) to: Token,
    pub(crate) hash: Hash,
    /// The transport that asks, and its process.
    pub(crate) from: Name,
    pub(crate) host: Host,
    pub(crate) process: ProcessIdentity,
    /// The secret of the endpoint by which the hello comes.
    pub(crate) parting: Token,
}

/// The answer to a hello.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Welcome {
    pub(crate) session: Token,
    /// UCX's keys of the answering side's regions, in their order.
    pub(crate) keys: Vec<Bytes>,
    /// The secret of the endpoint by which the welcome comes.
    pub(crate) parting: Token,
}

impl Hello {
    pub(crate) fn encode(&self) -> Bytes {
        encode(self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Hello> {
        let hello: Hello = decode(bytes, MAX_ADDRESS + 1024)?;
        let address = &hello.from.address;
        (!address.is_empty() && address.len() <= MAX_ADDRESS).then_some(hello)
    }
}

impl Welcome {
    pub(crate) fn encode(&self) -> Bytes {
        encode(self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Welcome> {
        let welcome: Welcome = decode(bytes, MAX_BODY)?;
        let fits = |key: &Bytes| key.len() <= MAX_KEY;
        (welcome.keys.len() <= MAX_REGIONS && welcome.keys.iter().all(fits)).then_some(welcome)
    }
}

/// The body of a message. An empty one, which is no message, stands for what msgpack cannot say; there is no such.
fn encode(message: &impl Serialize) -> Bytes {
    rmp_serde::to_vec(message).unwrap_or_default().into()
}

fn decode<T: DeserializeOwned>(bytes: &[u8], most: usize) -> Option<T> {
    (bytes.len() <= most && lengths_fit(bytes)).then(|| rmp_serde::from_slice(bytes).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(address: usize) -> Hello {
        let token = Token::random().unwrap();
        Hello {
            to: token,
            hash: [255; 32],
            from: Name { token, address: vec![255; address].into() },
            host: Host { boot: (u64::MAX, u64::MAX), network: u64::MAX },
            process: ProcessIdentity::here().unwrap(),
            parting: token,
        }
    }

    #[test]
    fn headers_survive_the_trip_and_others_are_refused() {
        let secret = Token::random().unwrap();
        for kind in KINDS {
            let bytes = header(kind, secret);
            assert_eq!(read_header(&bytes), Some((kind, secret)));
            for at in 0..3 {
                let mut other = bytes;
                other[at] ^= 1;
                assert_eq!(read_header(&other), None);
            }
        }
        let mut other = header(Kind::Frame, secret);
        for kind in [0, 7, 255] {
            other[3] = kind;
            assert_eq!(read_header(&other), None);
        }
    }

    #[test]
    fn greetings_survive_the_trip_up_to_their_bounds_and_no_further() {
        for address in [1, MAX_ADDRESS] {
            let hello = hello(address);
            assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        }
        assert!(Hello::decode(&hello(0).encode()).is_none());
        assert!(Hello::decode(&hello(MAX_ADDRESS + 1).encode()).is_none());
        let welcome = |keys, len| Welcome {
            session: Token::from_bytes([9; 16]),
            keys: vec![vec![1; len].into(); keys],
            parting: Token::from_bytes([255; 16]),
        };
        for (keys, len) in [(0, 0), (1, 0), (MAX_REGIONS, MAX_KEY)] {
            let bytes = welcome(keys, len).encode();
            assert!(bytes.len() <= MAX_BODY);
            assert_eq!(Welcome::decode(&bytes), Some(welcome(keys, len)));
        }
        assert!(Welcome::decode(&welcome(1, MAX_KEY + 1).encode()).is_none());
        assert!(Welcome::decode(&welcome(MAX_REGIONS + 1, 1).encode()).is_none());
    }

    #[test]
    fn every_truncation_of_a_greeting_is_refused() {
        let token = Token::from_bytes([9; 16]);
        let welcome = Welcome { session: token, keys: vec![vec![1; 20].into(); 3], parting: token };
        for len in 0..welcome.encode().len() {
            assert!(Welcome::decode(&welcome.encode()[..len]).is_none(), "{len}");
        }
        let bytes = hello(30).encode();
        for len in 0..bytes.len() {
            assert!(Hello::decode(&bytes[..len]).is_none(), "{len}");
        }
    }
}
