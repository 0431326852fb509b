//! One post on its way: copied in slices, so that many can share one thread.

use bytes::Bytes;
use kv_core::{Desc, Op, Post, TransportError};
use kv_host::{Memory, Process};

use crate::link::LinkId;
use crate::remote::{PeerMemory, PeerRegion};
use crate::sys::ProcessBatch;

/// What one descriptor costs besides its bytes, in bytes of copying, so that a slice of many small
/// ones takes no longer than one of few large ones.
const DESC_COST: usize = 128;
/// The same for memory of another process, where the kernel looks up pages for each.
const PROCESS_DESC_COST: usize = 2048;
/// Ends of descriptors that are not worth a slice of their own.
const SCRAP: usize = 64 << 10;

/// A post that was accepted and has not ended.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) link: LinkId,
    pub(crate) notify: Option<Bytes>,
    op: Op,
    descs: Vec<Desc>,
    /// Next descriptor, and how much of it is done.
    next: usize,
    done: usize,
}

/// How far a slice got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// There is more to copy.
    More,
    /// All bytes are in place.
    Complete,
}

impl Transfer {
    /// A transfer whose descriptors have been [checked](kv_host::check::descriptors).
    pub(crate) fn new(link: LinkId, post: Post) -> Transfer {
        Transfer { link, notify: post.notify, op: post.op, descs: post.descs, next: 0, done: 0 }
    }

    /// Which way its bytes go.
    pub(crate) fn op(&self) -> Op {
        self.op
    }

    /// Copies about `quantum` bytes.
    pub(crate) fn step(
        &mut self,
        local: &[Memory],
        remote: &PeerMemory,
        process: &Process,
        quantum: usize,
    ) -> Result<Progress, TransportError> {
        let mut left = quantum;
        while let Some(desc) = self.descs.get(self.next) {
            if left == 0 {
                return Ok(Progress::More);
            }
            match remote.region(desc.remote_region).ok_or(UNREACHABLE)? {
                PeerRegion::Mapped(memory) => {
                    let here = local.get(desc.local_region as usize).ok_or(UNREACHABLE)?;
                    let len = piece(desc.len as usize - self.done, left);
                    let at = desc.local_offset as usize + self.done;
                    let peer_at = desc.remote_offset as usize + self.done;
                    let copied = match self.op {
                        Op::Write => here.copy_to(at, memory, peer_at, len),
                        Op::Read => memory.copy_to(peer_at, here, at, len),
                    };
                    copied.map_err(|_| UNREACHABLE)?;
                    self.advance(len);
                    left = left.saturating_sub(len + DESC_COST);
                }
                PeerRegion::Adopted(_) => left = self.step_process(local, remote, process, left)?,
            }
        }
        Ok(Progress::Complete)
    }

    /// Copies one batch of consecutive descriptors in adopted memory of the peer. Returns what is
    /// left of the quantum.
    fn step_process(
        &mut self,
        local: &[Memory],
        remote: &PeerMemory,
        process: &Process,
        quantum: usize,
    ) -> Result<usize, TransportError> {
        let mut batch = ProcessBatch::new();
        let mut left = quantum;
        let mut done = self.done;
        for desc in self.descs.get(self.next..).unwrap_or_default() {
            let Some(PeerRegion::Adopted(base)) = remote.region(desc.remote_region) else {
                break;
            };
            if left == 0 || batch.is_full() {
                break;
            }
            let here = local.get(desc.local_region as usize).ok_or(UNREACHABLE)?;
            let len = piece(desc.len as usize - done, left);
            let peer_at = base + desc.remote_offset as usize + done;
            if !batch.push(here, desc.local_offset as usize + done, peer_at, len) {
                return Err(UNREACHABLE);
            }
            left = left.saturating_sub(len + PROCESS_DESC_COST);
            done = 0;
        }
        if batch.is_empty() {
            return Ok(0);
        }
        let copied = process_copy(&batch, self.op, process)?;
        self.advance(copied);
        Ok(left)
    }

    fn advance(&mut self, mut bytes: usize) {
        while let Some(desc) = self.descs.get(self.next) {
            let rest = desc.len as usize - self.done;
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

/// Cannot happen to descriptors that were checked and memory that passed the handshake.
const UNREACHABLE: TransportError = TransportError::Unsupported("memory that overlaps or cannot be reached");

/// How much of the `rest` of a descriptor to copy: all that is left of the quantum, and a little more
/// where that avoids cutting off a scrap.
fn piece(rest: usize, left: usize) -> usize {
    if rest <= left.saturating_add(SCRAP) { rest } else { left }
}

/// The process must be alive before and after: then its number was its own, because a number is
/// not given away before its process is dead.
fn process_copy(batch: &ProcessBatch<'_>, op: Op, process: &Process) -> Result<usize, TransportError> {
    let Some(pid) = process.pid() else {
        return Err(TransportError::Unsupported("adopted memory in a PID namespace that cannot be seen"));
    };
    if !process.is_alive() {
        return Err(TransportError::PeerGone);
    }
    let copied = match op {
        Op::Write => batch.write_to(pid),
        Op::Read => batch.read_from(pid),
    };
    if !process.is_alive() {
        return Err(TransportError::PeerGone);
    }
    match copied? {
        0 => Err(TransportError::Os { call: "process_vm", kind: std::io::ErrorKind::WriteZero }),
        count => Ok(count),
    }
}
