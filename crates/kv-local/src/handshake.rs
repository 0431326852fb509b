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

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kv_core::PlaneError;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, SealFlags, Stat, fcntl_get_seals, fstat};
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};
use rustix::time::Timespec;

use crate::identity::{self, Proof};
use crate::metadata::{MAX_METADATA, Metadata, Token};
use crate::remote::PeerMemory;
use crate::right::{RIGHT_LEN, Right};
use crate::sys;

const MAGIC: [u8; 4] = *b"KVH\x02";
/// Bytes with which a hello for a plane begins: the magic bytes and the plane's token.
pub(crate) const OPENING: usize = MAGIC.len() + Token::LEN;
/// Longest hello.
pub(crate) const MAX_HELLO: usize = OPENING + MAX_METADATA;
/// Files with larger blocks are on reserved huge pages.
const SMALL_PAGE: i64 = 64 << 10;

/// A hello, as far as it can be checked by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The life of the plane that the sender wants to speak to.
    pub(crate) expected: Token,
    /// The sender's metadata.
    pub(crate) metadata: Bytes,
}

/// Why a hello is not accepted. The other side is not told: it may be anyone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("not a hello of this version")]
    Hello,
    #[error("from another plane than the one asked for, or it says something else of itself")]
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

/// How every hello for the plane with this token begins.
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
    pub(crate) right: OwnedFd,
    /// The arenas.
    pub(crate) arenas: Vec<OwnedFd>,
}

impl Lent {
    pub(crate) fn check(fds: Vec<OwnedFd>, metadata: &Metadata, sparse: u64) -> Result<Lent, Refusal> {
        let wrong = Refusal::DescriptorCount { got: metadata.arenas.len(), sent: fds.len() };
        let mut fds = fds.into_iter();
        let right = fds.next().ok_or(wrong)?;
        let arenas: Vec<OwnedFd> = fds.collect();
        if arenas.len() != metadata.arenas.len() {
            return Err(wrong);
        }
        let (page, _) = file(right.as_fd()).ok_or(Refusal::Right)?;
        if page.st_blksize > SMALL_PAGE || page.st_size < RIGHT_LEN as i64 {
            return Err(Refusal::Right);
        }
        for (fd, len) in arenas.iter().zip(&metadata.arenas) {
            check_arena(fd.as_fd(), *len)?;
        }
        let lent = Lent { right, arenas };
        lent.check_size(metadata, sparse)?;
        Ok(lent)
    }

    /// Maps what is registered, and our right to write to it.
    pub(crate) fn map(&self, metadata: &Metadata) -> io::Result<(PeerMemory, Right)> {
        Ok((PeerMemory::map(&self.arenas, metadata)?, Right::of(self.right.as_fd())?))
    }

    /// What we map of a peer is bounded by `sparse` bytes, or by what the peer has allocated itself.
    fn check_size(&self, metadata: &Metadata, sparse: u64) -> Result<(), Refusal> {
        let got: u64 = metadata.extents().iter().map(|extent| extent.end - extent.start).sum();
        let allocated = self.arenas.iter().map(|arena| allocated(arena.as_fd())).sum();
        if got > sparse.max(allocated) {
            return Err(Refusal::Memory { got, allocated, max: sparse });
        }
        Ok(())
    }
}

/// A memory file that cannot shrink, and the bytes that are allocated in it.
fn file(fd: BorrowedFd<'_>) -> Option<(Stat, u64)> {
    let seals = fcntl_get_seals(fd).ok()?;
    let stat = fstat(fd).ok()?;
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let allocated = allocated(fd);
    (seals.contains(SealFlags::SHRINK) && regular).then_some((stat, allocated))
}

fn allocated(fd: BorrowedFd<'_>) -> u64 {
    fstat(fd).map_or(0, |stat| u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512))
}

/// Reading past the end of a mapped file is deadly (SIGBUS). So the file must have the bytes and
/// must not be able to lose them: only memory files can be sealed, and a seal cannot be removed.
fn check_arena(fd: BorrowedFd<'_>, len: u64) -> Result<(), Refusal> {
    let (stat, allocated) = file(fd).ok_or(Refusal::Arena)?;
    if u64::try_from(stat.st_size).map_err(|_| Refusal::Arena)? < len {
        return Err(Refusal::Arena);
    }
    // A huge page that is missing can be had from nowhere when the host's are used up.
    if stat.st_blksize > SMALL_PAGE && allocated < len {
        return Err(Refusal::Holes { got: len, allocated });
    }
    Ok(())
}

/// The process at the other end of a connection, held by a descriptor that stays its own even when
/// its number is used again.
#[derive(Debug)]
pub(crate) struct Process {
    pid: i32,
    pidfd: OwnedFd,
}

impl Process {
    /// The process that connected, or that listens, as the kernel says: never what it claims.
    pub(crate) fn of(socket: BorrowedFd<'_>) -> Result<Process, PlaneError> {
        let credentials = credentials(socket)?;
        let pidfd = match sys::peer_pidfd(socket) {
            Ok(pidfd) => pidfd,
            Err(_) => {
                // Before Linux 6.5. The number cannot have been used again if the stream turns out
                // to be alive after this: its other end belongs to the process.
                let pid = Pid::from_raw(credentials.pid)
                    .ok_or(PlaneError::Unsupported("the peer is in a PID namespace that cannot be seen"))?;
                pidfd_open(pid, PidfdFlags::empty()).map_err(|error| match error {
                    rustix::io::Errno::SRCH => PlaneError::PeerGone,
                    error => PlaneError::Os { call: "pidfd_open", kind: error.kind() },
                })?
            }
        };
        Ok(Process { pid: credentials.pid, pidfd })
    }

    /// Readable once every thread of the process has ended.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Its number, if it is in a PID namespace that we can see.
    pub(crate) fn pid(&self) -> Option<i32> {
        (self.pid > 0).then_some(self.pid)
    }

    /// Whether it is the same process as another one.
    pub(crate) fn is(&self, other: &Process) -> bool {
        let (ours, theirs) = (identity::inode(self.pidfd()), identity::inode(other.pidfd()));
        if ours != 0 && theirs != 0 { ours == theirs } else { self.pid > 0 && self.pid == other.pid }
    }

    /// Whether it is the process that this metadata names.
    pub(crate) fn check(&self, metadata: &Metadata) -> Proof {
        metadata.process.check(self.pidfd(), self.pid())
    }

    /// False once every thread of the process has ended.
    pub(crate) fn is_alive(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        !matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(count) if count > 0)
    }
}

/// Refuses processes of other users: what a peer of the same user could do with our memory, it
/// could do anyway.
pub(crate) fn check_user(socket: BorrowedFd<'_>) -> Result<(), PlaneError> {
    credentials(socket).map(|_| ())
}

fn credentials(socket: BorrowedFd<'_>) -> Result<sys::Credentials, PlaneError> {
    let credentials = sys::peer_credentials(socket)
        .map_err(|error| PlaneError::Os { call: "getsockopt", kind: error.kind() })?;
    if credentials.uid != geteuid().as_raw() {
        return Err(PlaneError::Metadata("the peer belongs to another user"));
    }
    Ok(credentials)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

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
    fn only_memory_files_that_cannot_shrink_and_are_long_enough_are_arenas() {
        let file = |seals: SealFlags| {
            let fd = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&fd, 8192).unwrap();
            fcntl_add_seals(&fd, seals).unwrap();
            fd
        };
        let sealed = file(SealFlags::SHRINK);
        assert_eq!(check_arena(sealed.as_fd(), 8192), Ok(()));
        assert_eq!(check_arena(sealed.as_fd(), 8193), Err(Refusal::Arena));
        assert_eq!(check_arena(file(SealFlags::GROW).as_fd(), 8192), Err(Refusal::Arena));
        let disk = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(check_arena(disk.as_fd(), 1), Err(Refusal::Arena));
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(check_arena(socket.as_fd(), 1), Err(Refusal::Arena));
    }

    #[test]
    fn the_process_behind_a_socket_is_alive() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let process = Process::of(socket.as_fd()).unwrap();
        assert_eq!(process.pid(), i32::try_from(std::process::id()).ok());
        assert!(process.is_alive());
    }
}
