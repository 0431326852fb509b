//! File descriptors that travel in a message of a Unix socket.
//!
//! A receiver says how many descriptors it expects with a message. The kernel closes descriptors above that
//! number, and all descriptors of a message that is read by an ordinary `recv`.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::error::OsError;

/// Most descriptors in one message: the kernel's `SCM_MAX_FD`.
pub const MAX: usize = 253;
/// Bytes of ancillary data that [`MAX`] descriptors take.
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX));

/// Why [`receive`] returned no bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// More descriptors came than were expected. The kernel does not say how many; all of them are closed.
    #[error("more than the {max} descriptors expected came with a message; all of them were closed")]
    TooMany {
        /// Descriptors that the caller expected.
        max: usize,
    },
    /// The call failed; [`kind`](OsError::kind) is `WouldBlock` if there is nothing to read.
    #[error(transparent)]
    Os(#[from] OsError),
}

/// Writes as much of `pieces` to a socket as there is room for, without waiting, and sends the descriptors
/// with the first byte. Returns the number of bytes written.
///
/// # Errors
///
/// With more than [`MAX`] descriptors, nothing is written and the error is `EINVAL`; without room it is
/// `WouldBlock`.
pub fn send(
    socket: BorrowedFd<'_>,
    pieces: &[IoSlice<'_>],
    fds: &[BorrowedFd<'_>],
) -> Result<usize, OsError> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) || fds.len() > MAX {
        return Err(OsError::new("sendmsg", Errno::INVAL));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, pieces, &mut control, flags).map_err(|error| OsError::new("sendmsg", error))
}

/// Reads at most `buffer.len()` bytes from a socket without waiting, and appends the descriptors that came
/// with them to `fds`, which may then hold `max` descriptors at most. Returns the number of bytes read: zero
/// at the end of the stream.
pub fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    max: usize,
) -> Result<usize, ReceiveError> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let before = fds.len();
    let room = rustix::cmsg_space!(ScmRights(max.saturating_sub(before).min(MAX)));
    let mut control = RecvAncillaryBuffer::new(space.get_mut(..room).unwrap_or_default());
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)
        .map_err(|error| OsError::new("recvmsg", error))?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > max {
        fds.truncate(before);
        return Err(ReceiveError::TooMany { max });
    }
    Ok(received.bytes)
}

impl ReceiveError {
    /// True if there is nothing to read at the moment, and there may be something later.
    pub fn is_for_now(&self) -> bool {
        let kind = match self {
            ReceiveError::Os(error) => error.kind,
            ReceiveError::TooMany { .. } => return false,
        };
        matches!(kind, io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::MemoryFile;

    /// How many descriptors of this process are memory files with this name.
    fn open_files(name: &str) -> usize {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        all.filter(|fd| {
            let target = std::fs::read_link(fd.as_ref().unwrap().path());
            target.is_ok_and(|path| path.to_string_lossy().contains(name))
        })
        .count()
    }

    #[test]
    fn descriptors_come_with_their_bytes_and_are_the_same_files() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let files = [4096, 8192].map(|len| MemoryFile::create("passed", len, false).unwrap());
        let lent: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        assert_eq!(send(ours.as_fd(), &[IoSlice::new(b"two"), IoSlice::new(b"pieces")], &lent), Ok(9));
        let (mut buffer, mut fds) = ([0; 16], Vec::new());
        assert_eq!(receive(theirs.as_fd(), &mut buffer, &mut fds, 2), Ok(9));
        assert_eq!(&buffer[..9], b"twopieces");
        let lens = fds.into_iter().map(|fd| MemoryFile::received(fd).unwrap().len());
        assert_eq!(lens.collect::<Vec<_>>(), [4096, 8192]);
        let nothing = receive(theirs.as_fd(), &mut buffer, &mut Vec::new(), 2).unwrap_err();
        assert!(nothing.is_for_now(), "{nothing}");
        drop(ours);
        assert_eq!(receive(theirs.as_fd(), &mut buffer, &mut Vec::new(), 2), Ok(0));
    }

    #[test]
    fn descriptors_above_the_number_awaited_are_closed_and_an_error() {
        for max in [0, 1, 2] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let file = MemoryFile::create("too-many", 4096, false).unwrap();
            assert_eq!(send(ours.as_fd(), &[IoSlice::new(b"!")], &vec![file.as_fd(); 1 + max]), Ok(1));
            // Room for so many beside the one that is there.
            let mut fds = vec![OwnedFd::from(MemoryFile::create("kept", 4096, false).unwrap())];
            let error = receive(theirs.as_fd(), &mut [0; 4], &mut fds, 1 + max).unwrap_err();
            assert_eq!(error, ReceiveError::TooMany { max: 1 + max });
            assert!(!error.is_for_now());
            assert_eq!((fds.len(), open_files("too-many")), (1, 1), "{max}");
        }
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let many = vec![ours.as_fd(); MAX + 1];
        assert_eq!(
            send(ours.as_fd(), &[IoSlice::new(b"!")], &many),
            Err(OsError::new("sendmsg", Errno::INVAL))
        );
    }
}
