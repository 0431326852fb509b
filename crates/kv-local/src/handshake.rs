//! The hello of a connection: which transport the sender is, which transport it takes the receiver for, and
//! the sender's arenas.
//!
//! Both sides send a hello. A side uses nothing of the other side before it has checked that
//!
//! - the other process belongs to the same user, and is the process that the metadata names;
//! - the other transport has the life that the metadata names (a token of 128 random bits), and names the
//!   life of this side;
//! - the metadata in the hello is the metadata that `connect` was given;
//! - every arena is a memory file that cannot shrink.
//!
//! So neither a restarted peer nor another process that took the peer's socket name or metadata is ever
//! written to.
//!
//! Descriptors come in a message of their own after the hello: first the page that stands for the right to
//! write (see [`right`](crate::right)), then one descriptor for each arena. The kernel closes descriptors
//! that come earlier, so that a stranger who does not know the token cannot make this process hold any.

use std::os::fd::OwnedFd;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kv_host::{MemoryFile, OsError, Token, metadata};

use crate::metadata::Metadata;
use crate::remote::PeerMemory;
use crate::right::{RIGHT_LEN, Right};

const MAGIC: [u8; 4] = *b"KVH\x02";
/// Length in bytes of the beginning of a hello: the magic bytes and the token of the transport it is for.
pub(crate) const OPENING: usize = MAGIC.len() + Token::LEN;
/// Longest hello, in bytes.
pub(crate) const MAX_HELLO: usize = OPENING + metadata::MAX;

/// A decoded hello. The metadata and the descriptors are not checked yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The token of the transport that the sender wants to speak to.
    pub(crate) expected: Token,
    /// The sender's metadata, encoded.
    pub(crate) metadata: Bytes,
}

/// Why a hello is not accepted. The other side is not told, because it may be any process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("the message is not a hello of this version")]
    Hello,
    #[error("the peer is another transport than the one asked for, or has other metadata than was given")]
    NotThem,
    #[error("the peer's metadata cannot be used")]
    Metadata,
    #[error(
        "the peer announced {got} arenas and sent {sent} descriptors; there must be one more than arenas"
    )]
    DescriptorCount { got: usize, sent: usize },
    #[error("an arena is not a memory file, can shrink, or is too short")]
    Arena,
    #[error("the page of the right to write is not a small memory file, can shrink, or is too short")]
    Right,
    #[error("the peer's process cannot be watched")]
    Process,
    #[error("the peer's process is not the one that its metadata names")]
    Impostor,
    #[error("the peer's process may still write through {got} ended connections; {max} are allowed")]
    Marked { got: usize, max: usize },
    #[error("{got} bytes of the peer would be mapped, of which {allocated} are allocated; {max} are allowed")]
    Memory { got: u64, allocated: u64, max: u64 },
    #[error("an arena on huge pages has {allocated} of {got} bytes allocated; all of them must be")]
    Holes { got: u64, allocated: u64 },
}

impl Hello {
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(MAGIC.len() + Token::LEN + self.metadata.len());
        out.put_slice(&MAGIC);
        out.put_slice(&self.expected.to_bytes());
        out.put_slice(&self.metadata);
        out.freeze()
    }

    pub(crate) fn decode(mut body: Bytes) -> Result<Hello, Refusal> {
        let magic = body.first_chunk::<{ MAGIC.len() }>();
        if magic != Some(&MAGIC) {
            return Err(Refusal::Hello);
        }
        body.advance(MAGIC.len());
        let expected = *body.first_chunk::<{ Token::LEN }>().ok_or(Refusal::Hello)?;
        body.advance(Token::LEN);
        Ok(Hello { expected: Token::from_bytes(expected), metadata: body })
    }
}

/// The bytes with which every hello for the transport with this token begins.
pub(crate) fn opening(token: Token) -> [u8; OPENING] {
    let mut out = [0; OPENING];
    let (magic, expected) = out.split_at_mut(MAGIC.len());
    magic.copy_from_slice(&MAGIC);
    expected.copy_from_slice(&token.to_bytes());
    out
}

/// The descriptors that came after a hello, checked against its metadata.
#[derive(Debug)]
pub(crate) struct Lent {
    /// The page that stands for this side's right to write.
    pub(crate) right: MemoryFile,
    /// The peer's arenas, in the order of their numbers.
    pub(crate) arenas: Vec<MemoryFile>,
}

impl Lent {
    pub(crate) fn check(fds: Vec<OwnedFd>, metadata: &Metadata, sparse: u64) -> Result<Lent, Refusal> {
        let wrong = Refusal::DescriptorCount { got: metadata.arenas.len(), sent: fds.len() };
        if fds.len() != 1 + metadata.arenas.len() {
            return Err(wrong);
        }
        let mut fds = fds.into_iter();
        let right = fds.next().and_then(MemoryFile::received).ok_or(Refusal::Right)?;
        if right.on_huge_pages() || right.len() < RIGHT_LEN as u64 {
            return Err(Refusal::Right);
        }
        let arenas: Option<Vec<MemoryFile>> = fds.map(MemoryFile::received).collect();
        let arenas = arenas.ok_or(Refusal::Arena)?;
        for (file, len) in arenas.iter().zip(&metadata.arenas) {
            check_arena(file, *len)?;
        }
        let lent = Lent { right, arenas };
        lent.check_size(metadata, sparse)?;
        Ok(lent)
    }

    /// Maps the registered parts of the peer's arenas, and the page of this side's right to write.
    pub(crate) fn map(&self, metadata: &Metadata) -> Result<(PeerMemory, Right), OsError> {
        Ok((PeerMemory::map(&self.arenas, metadata)?, Right::of(&self.right)?))
    }

    /// Refuses a peer of whose memory more bytes would be mapped than `sparse`, and more than the peer has
    /// allocated.
    fn check_size(&self, metadata: &Metadata, sparse: u64) -> Result<(), Refusal> {
        let got: u64 = metadata.extents().iter().map(|extent| extent.end - extent.start).sum();
        let allocated = self.arenas.iter().map(MemoryFile::allocated).sum();
        if got > sparse.max(allocated) {
            return Err(Refusal::Memory { got, allocated, max: sparse });
        }
        Ok(())
    }
}

/// Refuses an arena that does not have the bytes that its owner announced.
fn check_arena(file: &MemoryFile, len: u64) -> Result<(), Refusal> {
    if file.len() < len {
        return Err(Refusal::Arena);
    }
    let allocated = file.allocated();
    if file.on_huge_pages() && allocated < len {
        return Err(Refusal::Holes { got: len, allocated });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hello_survives_the_trip_and_truncations_are_refused() {
        let hello = Hello { expected: Token::random().unwrap(), metadata: Bytes::from_static(b"metadata") };
        let bytes = hello.encode();
        assert_eq!(Hello::decode(bytes.clone()), Ok(hello));
        for len in 0..MAGIC.len() + Token::LEN {
            assert_eq!(Hello::decode(bytes.slice(..len)), Err(Refusal::Hello));
        }
    }

    #[test]
    fn files_too_short_for_an_arena_are_refused() {
        let file = MemoryFile::create("test", 8192, false).unwrap();
        assert_eq!(check_arena(&file, 8192), Ok(()));
        assert_eq!(check_arena(&file, 8193), Err(Refusal::Arena));
    }

    #[test]
    fn files_on_huge_pages_are_no_rights_and_no_arenas_with_holes() {
        let len = 2 << 20;
        // No page is taken from those that the host has reserved.
        let huge = || MemoryFile::create("test", len, true).unwrap();
        assert_eq!(check_arena(&huge(), len), Err(Refusal::Holes { got: len, allocated: 0 }));
        let metadata = Metadata {
            host: kv_host::Host::here().unwrap(),
            token: Token::random().unwrap(),
            process: kv_host::ProcessIdentity::here().unwrap(),
            socket: String::new(),
            arenas: Vec::new(),
            regions: Vec::new(),
        };
        let small = |len| MemoryFile::create("test", len, false).unwrap();
        let check = |right: MemoryFile| Lent::check(vec![right.into()], &metadata, 0).err();
        assert_eq!(check(small(RIGHT_LEN as u64)), None);
        assert_eq!(check(small(RIGHT_LEN as u64 - 1)), Some(Refusal::Right));
        assert_eq!(check(huge()), Some(Refusal::Right));
    }
}
