//! The hello: who I am, whom I take you for, and my arenas.
//!
//! Both sides send one. Neither uses anything of the other before it has checked that the process
//! belongs to the same user, that it is the process and the life of the peer that the metadata names (a
//! token of 128 random bits), that it names this life of ours, that its own word about its regions is the
//! metadata we were given, and that every arena is a memory file that cannot shrink. So a restarted
//! peer, or another process that took its socket name or its metadata, is never written to.
//!
//! Descriptors come in a message of their own after the hello: first the one of the page that stands for
//! the right to write (see [`right`](crate::right)), then one for each arena. The kernel closes what
//! comes earlier, so that somebody who does not know the token lends nothing.

use std::os::fd::OwnedFd;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kv_host::{MemoryFile, OsError};

use crate::metadata::{MAX_METADATA, Metadata, Token};
use crate::remote::PeerMemory;
use crate::right::{RIGHT_LEN, Right};

const MAGIC: [u8; 4] = *b"KVH\x02";
/// Bytes with which a hello for a transport begins: the magic bytes and the transport's token.
pub(crate) const OPENING: usize = MAGIC.len() + Token::LEN;
/// Longest hello.
pub(crate) const MAX_HELLO: usize = OPENING + MAX_METADATA;

/// A hello, as far as it can be checked by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The life of the transport that the sender wants to speak to.
    pub(crate) expected: Token,
    /// The sender's metadata.
    pub(crate) metadata: Bytes,
}

/// Why a hello is not accepted. The other side is not told: it may be anyone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("not a hello of this version")]
    Hello,
    #[error("from another transport than the one asked for, or it says something else of itself")]
    NotThem,
    #[error("its metadata is unusable")]
    Metadata,
    #[error("{got} arenas announced, {sent} descriptors sent; there must be one more for the right to write")]
    DescriptorCount { got: usize, sent: usize },
    #[error("an arena is no memory file, can shrink, or is too short")]
    Arena,
    #[error("the page of the right to write is no small memory file, can shrink, or is too short")]
    Right,
    #[error("its process cannot be watched")]
    Process,
    #[error("its process is not the one that the metadata names")]
    Impostor,
    #[error("its process still has {got} marked rights of connections that have ended; {max} are allowed")]
    Marked { got: usize, max: usize },
    #[error("{got} bytes of its memory would be mapped, of which it has {allocated}; {max} are allowed")]
    Memory { got: u64, allocated: u64, max: u64 },
    #[error("an arena on huge pages has {allocated} of {got} bytes")]
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

/// How every hello for the transport with this token begins.
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
    /// The page of our right to write.
    pub(crate) right: MemoryFile,
    /// The arenas.
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

    /// Maps what is registered, and our right to write to it.
    pub(crate) fn map(&self, metadata: &Metadata) -> Result<(PeerMemory, Right), OsError> {
        Ok((PeerMemory::map(&self.arenas, metadata)?, Right::of(&self.right)?))
    }

    /// What we map of a peer is bounded by `sparse` bytes, or by what the peer has allocated itself.
    fn check_size(&self, metadata: &Metadata, sparse: u64) -> Result<(), Refusal> {
        let got: u64 = metadata.extents().iter().map(|extent| extent.end - extent.start).sum();
        let allocated = self.arenas.iter().map(MemoryFile::allocated).sum();
        if got > sparse.max(allocated) {
            return Err(Refusal::Memory { got, allocated, max: sparse });
        }
        Ok(())
    }
}

/// Whether an arena has the bytes that its owner says it has.
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
}
