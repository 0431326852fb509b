//! The messages between a rank and the server, each in one packet of the socket.
//!
//! The first message is the server's: `kvec`, the version as 32 bits (little-endian), and then, in the form of
//! that version, a [`Greeting`]. The descriptor of the memory file comes with it. All other messages are
//! msgpack: [`Request`]s from the rank, and one [`Reply`] to each.

use kv_core::{ContentHash, PageList, PageRun};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::{HostError, Refusal};

/// Version of the protocol.
pub(super) const VERSION: u32 = 1;
const MAGIC: [u8; 4] = *b"kvec";
/// Longest message of a rank, in bytes: a request with the longest hash.
pub(super) const MAX_REQUEST: usize = 1 << 10;
/// Longest message of the server, in bytes: a reply with the most runs.
pub(super) const MAX_REPLY: usize = 36 << 10;
/// Most runs of blocks in one reply. A rank asks for the others.
pub(super) const MAX_RUNS: usize = 4096;
/// Longest compatibility hash, in bytes.
pub(super) const MAX_COMPATIBILITY: usize = 1 << 10;

/// Whether the rank is accepted.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Greeting {
    Welcome(Welcome),
    Refused(Refusal),
}

/// What a rank must know of the region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Welcome {
    pub(super) blocks: u32,
    pub(super) block_bytes: u32,
    pub(super) compatibility: String,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Request {
    /// Drawn by the rank, and repeated in the reply.
    pub(super) number: u64,
    pub(super) ask: Ask,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Ask {
    Reserve {
        hash: ContentHash,
        bytes: u64,
    },
    /// Makes the entry of the reservation with this number ready.
    Commit(u64),
    Discard(u64),
    Pin(ContentHash),
    Unpin(u64),
    /// The runs of a reservation or pin from position `from` on.
    Runs {
        handle: u64,
        from: u32,
    },
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Reply {
    pub(super) number: u64,
    pub(super) answer: Result<Answer, Refusal>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    /// A reservation or pin, whose list of blocks has `total` runs, of which the first are here.
    Held {
        handle: u64,
        bytes: u64,
        total: u32,
        runs: PageList,
    },
    /// Further runs of the list.
    Runs(PageList),
    Done,
}

/// Encodes a request or reply.
pub(super) fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, HostError> {
    rmp_serde::to_vec(message).map_err(|_| HostError::Protocol("a message that cannot be encoded"))
}

/// Decodes a request or reply, of which no byte may be left over.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, HostError> {
    let mut rest = bytes;
    let message = T::deserialize(&mut rmp_serde::Deserializer::new(&mut rest));
    message.ok().filter(|_| rest.is_empty()).ok_or(HostError::Protocol("a message that cannot be decoded"))
}

pub(super) fn encode_greeting(greeting: &Greeting) -> Result<Vec<u8>, HostError> {
    Ok([&MAGIC[..], &VERSION.to_le_bytes(), &encode(greeting)?].concat())
}

pub(super) fn decode_greeting(bytes: &[u8]) -> Result<Greeting, HostError> {
    let no_server = HostError::Protocol("the first message is not that of a server of encoder caches");
    let (magic, rest) = bytes.split_first_chunk().ok_or(no_server.clone())?;
    let (version, rest) = rest.split_first_chunk().ok_or(no_server.clone())?;
    if *magic != MAGIC {
        return Err(no_server);
    }
    match u32::from_le_bytes(*version) {
        VERSION => decode(rest),
        theirs => Err(HostError::Version { ours: VERSION, theirs }),
    }
}

/// As many runs of a list as fit in a reply, from position `from` on.
pub(super) fn some_runs(list: &PageList, from: u32) -> PageList {
    let runs = list.runs().iter().skip(from as usize).take(MAX_RUNS).copied();
    PageList::from_runs(runs).unwrap_or_default()
}

/// Appends the runs of `more` to a list.
pub(super) fn append(list: &mut PageList, more: &PageList) -> Result<(), HostError> {
    let mut push = |run: &PageRun| list.push(*run);
    more.runs().iter().try_for_each(&mut push).map_err(|error| HostError::Region(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_messages_fit_into_their_bounds() {
        let hash = ContentHash::new(&"x".repeat(kv_core::MAX_CONTENT_HASH)).unwrap();
        let ask = Ask::Reserve { hash, bytes: u64::MAX };
        let request = Request { number: u64::MAX, ask };
        let bytes = encode(&request).unwrap();
        assert!(bytes.len() <= MAX_REQUEST, "{}", bytes.len());
        assert_eq!(decode::<Request>(&bytes).unwrap(), request);
        let scattered = PageList::from_pages((0..20_000).map(|block| block * 2 + (1 << 23))).unwrap();
        let runs = some_runs(&scattered, 0);
        let answer = Answer::Held { handle: u64::MAX, bytes: u64::MAX, total: u32::MAX, runs };
        let reply = Reply { number: u64::MAX, answer: Ok(answer) };
        let bytes = encode(&reply).unwrap();
        assert!(bytes.len() <= MAX_REPLY, "{}", bytes.len());
        assert_eq!(decode::<Reply>(&bytes).unwrap(), reply);
        let compatibility = "x".repeat(MAX_COMPATIBILITY);
        let welcome = Welcome { blocks: u32::MAX, block_bytes: u32::MAX, compatibility };
        let greeting = Greeting::Welcome(welcome);
        let bytes = encode_greeting(&greeting).unwrap();
        assert!(bytes.len() <= MAX_REPLY);
        assert_eq!(decode_greeting(&bytes).unwrap(), greeting);
    }

    #[test]
    fn a_list_of_blocks_is_whole_again_after_it_came_in_parts() {
        let scattered = PageList::from_pages((0..10_000).rev().map(|block| block * 3)).unwrap();
        let mut list = PageList::default();
        let mut parts = 0;
        while list.runs().len() < scattered.runs().len() {
            let more = some_runs(&scattered, list.runs().len() as u32);
            append(&mut list, &more).unwrap();
            parts += 1;
        }
        assert_eq!((list, parts), (scattered, 3));
    }

    #[test]
    fn a_server_of_another_version_or_kind_is_told_apart() {
        let refused = Greeting::Refused(Refusal::TooManyConnections { max: 3 });
        let mut bytes = encode_greeting(&refused).unwrap();
        assert_eq!(decode_greeting(&bytes), Ok(refused));
        bytes[4] = 9;
        assert_eq!(decode_greeting(&bytes), Err(HostError::Version { ours: 1, theirs: 9 }));
        bytes[0] = b'!';
        assert!(matches!(decode_greeting(&bytes), Err(HostError::Protocol(_))));
        assert!(matches!(decode_greeting(b"kvec"), Err(HostError::Protocol(_))));
        let request = Request { number: 1, ask: Ask::Commit(2) };
        let longer = [&encode(&request).unwrap()[..], &[0]].concat();
        assert!(matches!(decode::<Request>(&longer), Err(HostError::Protocol(_))));
    }
}
