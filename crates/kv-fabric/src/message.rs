//! The messages between two transports: a header of 24 bytes, and a body. Numbers are little-endian.
//!
//! ```text
//! 0        8      9    12      16       20        24
//! way key  kind   –    len     count    sequence  body …
//! ```
//!
//! Every message names the way that it belongs to, by the key that the side that has connected has drawn for it.
//!
//! | kind | from | body, and what the fields mean |
//! |---|---|---|
//! | `Hello` | the side that connects | whom it takes the other for, who it is, and the name of its endpoint |
//! | `Welcome` | the other side | who it is; `sequence` is the number by which writes name the guest, and `count` one that no other guest has |
//! | `Frame` | the side that has connected | the begin of a frame of `len` bytes; with a `count`, the frame waits for so many writes that carry `sequence` |
//! | `More` | the same | the next part of the frame |
//! | `Withdraw` | the same | the frame that waits for writes with `sequence` is void; `count` of them were begun, and have ended |
//! | `Ask` | the same | whether lane `sequence` leads here; on lane 0 also whether `count` announced frames have arrived |
//! | `Answer` | the other side | what was asked arrived |
//! | `Bye` | the same | the way is over |
//! | `Farewell` | the other side | this transport ends, and none of its writes and reads of the guest's memory is under way |

use kv_core::MAX_FRAME;
use kv_host::Token;

use crate::ffi::MESSAGE;
use crate::metadata::{Identity, MAX_NAME};

/// Bytes of a header.
pub(crate) const HEADER: usize = 24;
/// Most bytes of a body.
pub(crate) const BODY: usize = MESSAGE - HEADER;
/// Bits of the number that a counted post has in the data of its writes.
pub(crate) const SEQUENCE_BITS: u32 = 20;
/// Guests that data of writes can tell apart.
pub(crate) const SLOTS: usize = 1 << (32 - SEQUENCE_BITS);

/// What a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Hello,
    Welcome,
    Frame,
    More,
    Withdraw,
    Bye,
    Farewell,
    Ask,
    Answer,
}

impl Kind {
    const ALL: [Kind; 9] = [
        Kind::Hello,
        Kind::Welcome,
        Kind::Frame,
        Kind::More,
        Kind::Withdraw,
        Kind::Bye,
        Kind::Farewell,
        Kind::Ask,
        Kind::Answer,
    ];
}

/// The begin of every message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) key: u64,
    pub(crate) kind: Kind,
    pub(crate) len: u32,
    pub(crate) count: u32,
    pub(crate) sequence: u32,
}

impl Header {
    /// A header without numbers.
    pub(crate) fn new(key: u64, kind: Kind) -> Header {
        Header { key, kind, len: 0, count: 0, sequence: 0 }
    }

    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        let kind = Kind::ALL.iter().position(|kind| *kind == self.kind).unwrap_or(0) as u8 + 1;
        let numbers = [self.len, self.count, self.sequence].map(u32::to_le_bytes).concat();
        let bytes = self.key.to_le_bytes().into_iter().chain([kind, 0, 0, 0]).chain(numbers);
        for (place, byte) in out.iter_mut().zip(bytes) {
            *place = byte;
        }
        out
    }

    /// Splits a message into header and body; `None` if it is none of this version, or its numbers are impossible.
    pub(crate) fn decode(message: &[u8]) -> Option<(Header, &[u8])> {
        let (head, body) = message.split_at_checked(HEADER)?;
        let (key, rest) = head.split_first_chunk::<8>()?;
        let (kind, numbers) = rest.split_first_chunk::<4>()?;
        let kind = *Kind::ALL.get(usize::from(kind[0]).checked_sub(1)?)?;
        let mut numbers = numbers.as_chunks::<4>().0.iter().map(|number| u32::from_le_bytes(*number));
        let (len, count, sequence) = (numbers.next()?, numbers.next()?, numbers.next()?);
        let header = Header { key: u64::from_le_bytes(*key), kind, len, count, sequence };
        let fits = len as usize <= MAX_FRAME && sequence < 1 << SEQUENCE_BITS && body.len() <= BODY;
        fits.then_some((header, body))
    }
}

/// The body of a `Hello`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The transport that the sender wants to reach.
    pub(crate) to: Token,
    pub(crate) from: Identity,
    /// The name of the sender's first endpoint.
    pub(crate) name: Vec<u8>,
}

impl Hello {
    pub(crate) fn encode(&self) -> Vec<u8> {
        [&self.to.to_bytes()[..], &self.from.token.to_bytes(), &self.from.hash, &self.name].concat()
    }

    pub(crate) fn decode(body: &[u8]) -> Option<Hello> {
        let (to, rest) = body.split_first_chunk::<{ Token::LEN }>()?;
        let (token, rest) = rest.split_first_chunk::<{ Token::LEN }>()?;
        let (hash, name) = rest.split_first_chunk::<{ Identity::HASH }>()?;
        let from = Identity { token: Token::from_bytes(*token), hash: *hash };
        (name.len() <= MAX_NAME).then(|| Hello { to: Token::from_bytes(*to), from, name: name.to_vec() })
    }
}

/// What a write tells the peer's completion queue: the guest that writes, the counted post, and the upper half of the way's
/// key, by which data of an earlier way are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Immediate {
    pub(crate) key: u64,
    pub(crate) slot: u32,
    pub(crate) sequence: u32,
}

impl Immediate {
    /// Bytes of data by which a write is surely known as one of its way. With fewer, a write of an earlier way that is late
    /// could be counted for the next guest of the slot.
    pub(crate) const SURE: usize = 8;
    const LOW: u64 = u32::MAX as u64;

    /// The data for a queue that takes [`Immediate::SURE`] bytes of them.
    pub(crate) fn encode(&self) -> u64 {
        self.key & !Immediate::LOW | u64::from(self.slot << SEQUENCE_BITS | self.sequence)
    }

    /// The slot and the number of the post.
    pub(crate) fn parts(data: u64) -> (usize, u32) {
        let low = (data & Immediate::LOW) as u32;
        ((low >> SEQUENCE_BITS) as usize, low & ((1 << SEQUENCE_BITS) - 1))
    }

    /// True if the data belong to the way with this key.
    pub(crate) fn is_of(data: u64, key: u64) -> bool {
        (data ^ key) & !Immediate::LOW == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_the_trip_and_impossible_ones_are_refused() {
        for kind in Kind::ALL {
            let header = Header {
                key: u64::MAX - 7,
                kind,
                len: MAX_FRAME as u32,
                count: u32::MAX,
                sequence: (1 << 20) - 1,
            };
            let message = [&header.encode()[..], b"body"].concat();
            assert_eq!(Header::decode(&message), Some((header, &b"body"[..])));
            for len in 0..HEADER {
                assert_eq!(Header::decode(&message[..len]), None);
            }
        }
        let refused = |header: Header| Header::decode(&header.encode()).is_none();
        let good = Header::new(1, Kind::Frame);
        assert!(!refused(good));
        assert!(refused(Header { len: MAX_FRAME as u32 + 1, ..good }));
        assert!(refused(Header { sequence: 1 << 20, ..good }));
        for kind in [0, 10, 255] {
            let mut bytes = good.encode();
            bytes[8] = kind;
            assert_eq!(Header::decode(&bytes), None, "{kind}");
        }
    }

    #[test]
    fn a_hello_survives_the_trip_and_truncated_ones_are_refused() {
        let token = || Token::random().unwrap();
        let hello = Hello { to: token(), from: Identity::of(token(), b"metadata"), name: vec![9; 28] };
        let bytes = hello.encode();
        assert_eq!(Hello::decode(&bytes).as_ref(), Some(&hello));
        for len in 0..bytes.len() - 28 {
            assert_eq!(Hello::decode(&bytes[..len]), None);
        }
        assert_eq!(Hello::decode(&[0; 400]), None, "the name is too long");
    }

    #[test]
    fn data_of_writes_name_the_guest_the_post_and_the_way() {
        let (key, other) = (0x1234_5678_0000_0001, 0x9234_5678_0000_0001);
        let immediate = Immediate { key, slot: 4095, sequence: (1 << 20) - 1 };
        let data = immediate.encode();
        assert_eq!(Immediate::parts(data), (4095, (1 << 20) - 1));
        assert!(Immediate::is_of(data, key) && !Immediate::is_of(data, other));
    }
}
