//! One accepted post, which is copied in slices, so that many posts can share one thread.

use bytes::Bytes;
use kv_core::{Descriptor, Op, Post, TransportError};
use kv_host::{Memory, OsError, Process};

use crate::link::LinkId;
use crate::remote::{PeerMemory, PeerRegion};
use crate::space::AddressSpace;
use crate::sys::ProcessBatch;

/// Bytes added to the length of each descriptor, so that a slice of many small descriptors takes no longer
/// than a slice of few large ones.
const DESC_COST: usize = 128;
/// Bytes added to the length of each descriptor in adopted memory, where the kernel looks up pages for each.
const PROCESS_DESC_COST: usize = 2048;
/// Bytes of a slice in the place of which one piece of the peer's memory is made present.
const PRESENCE_COST: usize = 64 << 10;
/// A rest of a descriptor of up to so many bytes is copied with the slice before it.
const SCRAP: usize = 64 << 10;

/// A post that was accepted and has not ended.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) link: LinkId,
    pub(crate) notify: Option<Bytes>,
    /// Bytes of the whole post.
    pub(crate) bytes: u64,
    /// True if the bytes go past the processor's caches.
    pub(crate) streams: bool,
    /// True once all bytes are in place: what is left is the way of the notify frame.
    pub(crate) is_in_place: bool,
    op: Op,
    descriptors: Vec<Descriptor>,
    /// Position of the next descriptor.
    next: usize,
    /// Bytes of the next descriptor that are copied already.
    done: usize,
}

/// The other side of a copy.
pub(crate) struct Peer<'a> {
    pub(crate) memory: &'a mut PeerMemory,
    pub(crate) process: &'a Process,
    /// Where the peer's adopted memory lies.
    pub(crate) space: Option<&'a AddressSpace>,
}

/// How far a post is after a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Bytes are still to be copied.
    More,
    /// All bytes of the post are in place.
    Complete,
}

impl Transfer {
    /// A transfer whose descriptors have been [checked](kv_host::check::descriptors).
    pub(crate) fn new(link: LinkId, post: Post) -> Transfer {
        let Post { op, descriptors, notify, .. } = post;
        let bytes = descriptors.iter().fold(0, |sum: u64, descriptor| sum.saturating_add(descriptor.len));
        Transfer {
            link,
            notify,
            bytes,
            streams: false,
            is_in_place: false,
            op,
            descriptors,
            next: 0,
            done: 0,
        }
    }

    /// The direction of the post: write or read.
    pub(crate) fn op(&self) -> Op {
        self.op
    }

    /// True before the first slice.
    pub(crate) fn is_untouched(&self) -> bool {
        (self.next, self.done) == (0, 0)
    }

    /// Copies one slice of about `quantum` bytes.
    pub(crate) fn step(
        &mut self,
        local: &[Memory],
        peer: Peer<'_>,
        quantum: usize,
    ) -> Result<Progress, TransportError> {
        let Peer { memory: remote, process, space } = peer;
        let mut left = quantum;
        while let Some(descriptor) = self.descriptors.get(self.next) {
            if left == 0 {
                return Ok(Progress::More);
            }
            let len = piece(descriptor.len as usize - self.done, left);
            let peer_at = descriptor.remote_offset as usize + self.done;
            let made = remote.make_present(descriptor.remote_region, peer_at, len);
            match remote.region(descriptor.remote_region).ok_or(UNREACHABLE)? {
                PeerRegion::Mapped { memory, .. } => {
                    let here = local.get(descriptor.local_region as usize).ok_or(UNREACHABLE)?;
                    let at = descriptor.local_offset as usize + self.done;
                    let (from, from_at, to, to_at) = match self.op {
                        Op::Write => (here, at, memory, peer_at),
                        Op::Read => (memory, peer_at, here, at),
                    };
                    let next = self.next_source(local, remote).unwrap_or((from, from_at, 0));
                    let copied = if self.streams {
                        from.stream_to(from_at, to, to_at, len, next)
                    } else {
                        next.0.fetch(next.1, next.2);
                        from.copy_to(from_at, to, to_at, len)
                    };
                    copied.map_err(|_| UNREACHABLE)?;
                    self.advance(len);
                    left = left.saturating_sub(len + DESC_COST + made * PRESENCE_COST);
                }
                PeerRegion::Adopted(_) => {
                    let space = space.ok_or(TransportError::PeerGone)?;
                    left = self.step_process(local, remote, (process, space), left)?;
                }
            }
        }
        Ok(Progress::Complete)
    }

    /// The memory, the offset and the length of what is copied after the current descriptor.
    #[inline]
    fn next_source<'a>(
        &self,
        local: &'a [Memory],
        remote: &'a PeerMemory,
    ) -> Option<(&'a Memory, usize, usize)> {
        let next = self.descriptors.get(self.next + 1)?;
        let (memory, at) = match (self.op, remote.region(next.remote_region)?) {
            (Op::Write, _) => (local.get(next.local_region as usize)?, next.local_offset),
            (Op::Read, PeerRegion::Mapped { memory, .. }) => (memory, next.remote_offset),
            (Op::Read, PeerRegion::Adopted(_)) => return None,
        };
        Some((memory, at as usize, next.len as usize))
    }

    /// Copies one batch of consecutive descriptors in adopted memory of the peer. Returns how many bytes of
    /// the quantum are left.
    fn step_process(
        &mut self,
        local: &[Memory],
        remote: &PeerMemory,
        (process, space): (&Process, &AddressSpace),
        quantum: usize,
    ) -> Result<usize, TransportError> {
        let mut batch = ProcessBatch::new();
        let mut left = quantum;
        let mut done = self.done;
        for descriptor in self.descriptors.get(self.next..).unwrap_or_default() {
            let Some(PeerRegion::Adopted(base)) = remote.region(descriptor.remote_region) else {
                break;
            };
            if left == 0 || batch.is_full() {
                break;
            }
            let here = local.get(descriptor.local_region as usize).ok_or(UNREACHABLE)?;
            let len = piece(descriptor.len as usize - done, left);
            let peer_at = base + descriptor.remote_offset as usize + done;
            if !batch.push(here, descriptor.local_offset as usize + done, peer_at, len) {
                return Err(UNREACHABLE);
            }
            left = left.saturating_sub(len + PROCESS_DESC_COST);
            done = 0;
        }
        if batch.is_empty() {
            return Ok(0);
        }
        let copied = process_copy(&batch, self.op, process, space)?;
        self.advance(copied);
        Ok(left)
    }

    fn advance(&mut self, mut bytes: usize) {
        while let Some(descriptor) = self.descriptors.get(self.next) {
            let rest = descriptor.len as usize - self.done;
            if bytes < rest {
                self.done += bytes;
                return;
            }
            bytes -= rest;
            self.next += 1;
            self.done = 0;
        }
    }
}

/// An error that cannot happen with checked descriptors and memory that passed the handshake.
const UNREACHABLE: TransportError = TransportError::Unsupported("memory that overlaps or cannot be reached");

/// How many of the `rest` bytes of a descriptor to copy: as many as are `left` of the quantum, and up to
/// [`SCRAP`] more if that completes the descriptor.
fn piece(rest: usize, left: usize) -> usize {
    if rest <= left.saturating_add(SCRAP) { rest } else { left }
}

/// Copies a batch to or from the peer's process, which must be alive, with the address space of the connection, before
/// and after the copy. Then its process id was its own meanwhile, because an id is not used again before its process has
/// ended, and a read has the bytes of the peer. A write can still hit another program, if the peer executes that between
/// the check and the copy. Only writes through `/proc/PID/mem` cannot, and they take about twice as long.
fn process_copy(
    batch: &ProcessBatch<'_>,
    op: Op,
    process: &Process,
    space: &AddressSpace,
) -> Result<usize, TransportError> {
    let Some(pid) = process.pid() else {
        return Err(TransportError::Unsupported("adopted memory of a process in an unseen PID namespace"));
    };
    let is_itself = || process.is_alive() && space.is_in_use(batch.peer_at());
    if !is_itself() {
        return Err(TransportError::PeerGone);
    }
    let copied = match op {
        Op::Write => batch.write_to(pid),
        Op::Read => batch.read_from(pid),
    };
    if !is_itself() {
        return Err(TransportError::PeerGone);
    }
    match copied? {
        0 => Err(OsError::new("process_vm", std::io::ErrorKind::WriteZero).into()),
        count => Ok(count),
    }
}
