//! The bytes that come on a connection: messages are kept until they are complete, and pages go straight into
//! the ranges that await them.

use std::io;
use std::os::fd::BorrowedFd;

use bytes::{Buf, BytesMut};
use kv_host::{Memory, OsError};

use crate::message::{Broken, Range};
use crate::sys::Scatter;

/// Where the pages go that come next on a connection.
#[derive(Debug)]
pub(crate) struct Landing {
    ranges: Vec<Range>,
    /// Position of the range that is being filled, and bytes of it that are in place.
    at: usize,
    done: usize,
    /// Bytes that have not come yet.
    left: u64,
    /// True if what comes is thrown away.
    discard: bool,
}

impl Landing {
    /// Ranges that have been checked, and the number of bytes in them.
    pub(crate) fn new(ranges: Vec<Range>, bytes: u64) -> Landing {
        Landing { ranges, at: 0, done: 0, left: bytes, discard: false }
    }

    /// Throws away what comes from now on.
    pub(crate) fn discard(&mut self) {
        self.discard = true;
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.left == 0
    }

    /// Adds the next bytes of the ranges, about `most` at most.
    fn scatter<'a>(&self, regions: &'a [Memory], into: &mut Scatter<'a>, most: usize) -> Result<(), Broken> {
        let mut done = self.done;
        for range in self.ranges.get(self.at..).unwrap_or_default() {
            if into.is_full() || into.bytes() >= most {
                break;
            }
            let memory = regions.get(range.region as usize).ok_or(Broken::End)?;
            let len = (range.len as usize - done).min(most - into.bytes());
            if !into.memory(memory, range.offset as usize + done, len) {
                return Err(Broken::End);
            }
            done = 0;
        }
        Ok(())
    }

    /// Takes the next bytes out of `bytes`.
    fn take(&mut self, bytes: &mut BytesMut, regions: &[Memory]) -> Result<(), Broken> {
        let taken = self.copy(bytes, regions)?;
        bytes.advance(taken);
        Ok(())
    }

    /// Copies the first of these bytes to their places, or throws them away. Returns how many.
    fn copy(&mut self, bytes: &[u8], regions: &[Memory]) -> Result<usize, Broken> {
        let mut taken = 0;
        while let Some(rest) = bytes.get(taken..).filter(|rest| !rest.is_empty() && self.left > 0) {
            let len = if self.discard {
                rest.len().min(to_usize(self.left))
            } else {
                let range = self.ranges.get(self.at).ok_or(Broken::End)?;
                let len = rest.len().min(range.len as usize - self.done);
                let memory = regions.get(range.region as usize).ok_or(Broken::End)?;
                let (at, piece) = (range.offset as usize + self.done, rest.get(..len).unwrap_or_default());
                memory.write(at, piece).map_err(|_| Broken::End)?;
                len
            };
            self.advance(len);
            taken += len;
        }
        Ok(taken)
    }

    fn advance(&mut self, mut bytes: usize) {
        self.left -= bytes as u64;
        while let Some(range) = self.ranges.get(self.at) {
            let rest = range.len as usize - self.done;
            if bytes < rest {
                self.done += bytes;
                return;
            }
            bytes -= rest;
            self.at += 1;
            self.done = 0;
        }
    }
}

/// The result of reading once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Received {
    /// So many bytes were read, and more may have come.
    Bytes(usize),
    /// So many bytes were read, and no more have come yet.
    Last(usize),
    /// There is nothing to read at the moment.
    Nothing,
    /// The stream has ended and all its bytes have been read.
    End,
}

/// Bytes that do not make a complete message yet, and where pages go.
#[derive(Debug, Default)]
pub(crate) struct Inbound {
    /// Bytes of messages that have come and are not taken yet.
    pub(crate) bytes: BytesMut,
    /// Where the next bytes go, if they are pages.
    pub(crate) landing: Option<Landing>,
}

impl Inbound {
    /// Reads pages into their places, about `most` bytes, and what follows them by way of `scratch`.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        regions: &[Memory],
        scratch: &mut [u8],
        most: usize,
    ) -> Result<Received, ReceiveError> {
        let mut scatter = Scatter::new();
        let (mut pages, mut room) = (0, scratch.len());
        // A landing that is complete waits for the frame that follows it.
        let mut landing = self.landing.as_mut().filter(|landing| landing.left > 0);
        match &landing {
            Some(landing) if landing.discard => room = room.min(to_usize(landing.left)),
            Some(landing) => {
                landing.scatter(regions, &mut scatter, most)?;
                pages = scatter.bytes();
                // What follows the pages is read only together with the last of them.
                if pages as u64 != landing.left {
                    room = 0;
                }
            }
            None => {}
        }
        let scratch = scratch.get_mut(..room).unwrap_or_default();
        if room > 0 {
            scatter.slice(scratch);
        }
        let asked = scatter.bytes();
        if asked == 0 {
            return Ok(Received::Nothing);
        }
        let got = match scatter.receive(socket) {
            Ok(0) => return Ok(Received::End),
            Ok(got) => got,
            Err(error) if matches!(error.kind, io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(Received::Nothing);
            }
            Err(error) => return Err(error.into()),
        };
        match &mut landing {
            Some(landing) if landing.discard => landing.advance(got),
            landing => {
                if let Some(landing) = landing {
                    landing.advance(got.min(pages));
                }
                let rest = scratch.get(..got.saturating_sub(pages));
                self.bytes.extend_from_slice(rest.unwrap_or_default());
            }
        }
        Ok(if got == asked { Received::Bytes(got) } else { Received::Last(got) })
    }

    /// Takes bytes that have come in another way than by [`receive`](Inbound::receive): pages to their places, and
    /// at most `room` of other bytes. Returns how many were taken, which is none only for no bytes or no room.
    #[cfg_attr(not(feature = "tls"), allow(dead_code))]
    pub(crate) fn accept(&mut self, bytes: &[u8], regions: &[Memory], room: usize) -> Result<usize, Broken> {
        match &mut self.landing {
            Some(landing) if landing.left > 0 && self.bytes.is_empty() => landing.copy(bytes, regions),
            _ => {
                let piece = bytes.get(..bytes.len().min(room)).unwrap_or_default();
                self.bytes.extend_from_slice(piece);
                Ok(piece.len())
            }
        }
    }

    /// Moves pages that have come with other bytes to their places. True if no pages are awaited any more.
    pub(crate) fn settle(&mut self, regions: &[Memory]) -> Result<bool, Broken> {
        match &mut self.landing {
            None => Ok(true),
            Some(landing) => {
                landing.take(&mut self.bytes, regions)?;
                Ok(landing.is_complete())
            }
        }
    }

    /// Frees the buffer if it is empty.
    pub(crate) fn tidy(&mut self) {
        if self.bytes.is_empty() {
            self.bytes = BytesMut::new();
        }
    }
}

/// Why nothing more can be read from a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReceiveError {
    #[error(transparent)]
    Os(#[from] OsError),
    #[error(transparent)]
    Broken(#[from] Broken),
    /// The other side is not the one that a certificate was to show, or the encryption has failed.
    #[cfg_attr(not(feature = "tls"), allow(dead_code))]
    #[error("{0}")]
    Untrusted(&'static str),
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use kv_host::Arena;

    use super::*;

    const RANGES: [Range; 3] = [
        Range { region: 0, len: 1000, offset: 3 },
        Range { region: 1, len: 1, offset: 0 },
        Range { region: 0, len: 5000, offset: 2000 },
    ];

    #[test]
    fn pages_land_in_their_ranges_and_what_follows_them_is_kept_whatever_the_pieces() {
        let pages: Vec<u8> = (0..6001).map(|at| at as u8 | 1).collect();
        for (early, most, discard) in
            [(0, 1 << 20, false), (700, 10, false), (1003, 4000, false), (5, 100, true)]
        {
            let arenas = [Arena::new(10_000).unwrap(), Arena::new(10).unwrap()];
            let regions = arenas.each_ref().map(|arena| arena.memory().clone());
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let mut inbound = Inbound::default();
            inbound.bytes.extend_from_slice(&pages[..early]);
            let mut landing = Landing::new(RANGES.to_vec(), 6001);
            if discard {
                landing.discard();
            }
            inbound.landing = Some(landing);
            theirs.write_all(&pages[early..]).unwrap();
            theirs.write_all(b"what follows").unwrap();
            let mut scratch = [0; 64];
            while !inbound.settle(&regions).unwrap() {
                let got = inbound.receive(ours.as_fd(), &regions, &mut scratch, most).unwrap();
                assert!(matches!(got, Received::Bytes(_) | Received::Last(_)));
                let left = inbound.landing.as_ref().map_or(0, |landing| landing.left);
                assert!(
                    left == 0 || inbound.bytes.is_empty(),
                    "pages take the way of messages, with {left} left"
                );
            }
            inbound.landing = None;
            while inbound.bytes.len() < 12 {
                inbound.receive(ours.as_fd(), &regions, &mut scratch, most).unwrap();
            }
            assert_eq!(&inbound.bytes[..], b"what follows");
            let mut wanted = [vec![0; 10_000], vec![0; 10]];
            if !discard {
                wanted[0][3..1003].copy_from_slice(&pages[..1000]);
                wanted[1][0] = pages[1000];
                wanted[0][2000..7000].copy_from_slice(&pages[1001..]);
            }
            for (arena, wanted) in arenas.iter().zip(wanted) {
                let mut bytes = vec![0; wanted.len()];
                arena.read(0, &mut bytes).unwrap();
                assert!(bytes == wanted, "{early} {most} {discard}");
            }
            drop(theirs);
            let end = inbound.receive(ours.as_fd(), &regions, &mut scratch, most);
            assert_eq!(end, Ok(Received::End));
        }
    }
}
