//! Copies, in slices of a fraction of a millisecond: posts take turns.

use std::mem;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use kv_core::{Op, PostId, Time, TransportError};
use kv_host::{Memory, clock, wake};

use crate::link::{LinkId, Stage};
use crate::right::Right;
use crate::transfer::{Peer, Progress, Transfer};
use crate::transport::LocalTransport;

/// Bytes of one post that are copied before the next post has its turn.
const QUANTUM: usize = 256 << 10;
/// How long one call of `poll` copies: half of the time that a call may take.
const COPY_TIME: Duration = Duration::from_micros(500);
/// How often waiting messages are written while copies go on, among them the notify frames of posts that have
/// ended. A write wakes the peer, which costs both sides as much as copying some 64 KiB.
const FLUSH_AFTER: Duration = Duration::from_micros(150);
/// With more posts than this in line at the beginning, messages wait until the end of the call: they are late by less
/// than the posts behind them, and a peer that is woken for each few of them takes the processor from the copies.
const LINE: usize = 16;
/// Longest time that a slice of a write is assumed to take, with much to spare. No slice begins this close to
/// the end of the permission.
const SLICE_TIME: Duration = Duration::from_millis(10);
/// How long after its connection a peer's memory begins to be made present: the first request, whose copies make
/// their own pages present, is not to wait for this.
const POPULATE_AFTER: Duration = Duration::from_millis(5);
/// How long one call of `poll` makes memory of new peers present.
const POPULATE_TIME: Duration = Duration::from_micros(200);

impl LocalTransport {
    /// Copies for a while, one quantum of each post after the other.
    pub(crate) fn copy_some(&mut self) {
        let mut start = None;
        let mut flush_at = None;
        let is_long = self.posts.in_line() > LINE;
        while let Some((id, transfer)) = self.posts.next() {
            let start = *start.get_or_insert_with(Instant::now);
            let Some(link) = self.links.get_mut(transfer.link) else {
                continue;
            };
            let (Some((memory, right)), Some(process)) = (&mut link.memory, &link.process) else {
                continue;
            };
            let peer = Peer { memory, process, space: link.space.as_ref() };
            match slice(transfer, self.given.regions(), peer, right, link.permitted) {
                None => {
                    link.held.insert(id);
                    continue;
                }
                Some(Ok(Progress::More)) => self.posts.run([id]),
                Some(Ok(Progress::Complete)) => self.bytes_in_place(id),
                Some(Err(error)) => self.posts.end(id, Err(error)),
            }
            if !self.posts.is_copying() {
                break;
            }
            let now = Instant::now();
            if now - start >= COPY_TIME {
                break;
            }
            // What waited before the first slice goes with what that slice has ended.
            if !is_long && flush_at.is_none_or(|at| at <= now) {
                self.flush_all();
                flush_at = Some(now + FLUSH_AFTER);
            }
        }
        self.flush_all();
    }

    /// Wakes the peer of a short write that is all there is to do: the peer's processor wakes while the bytes are copied.
    pub(crate) fn wake_first(&mut self) {
        let Some(id) = self.posts.lone_write(wake::LENGTHS) else { return };
        if self.links.get(id).is_some_and(|link| may_begin(link.permitted)) {
            self.wake(id);
        }
    }

    /// Wakes the peer of an open link, unless it was woken before and has said nothing since.
    pub(crate) fn wake(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id) else { return };
        if link.stage == Stage::Open && mem::take(&mut link.may_wake) {
            link.connection.outbound.queue_wake();
            self.flush(id);
        }
    }

    /// Ends a post whose bytes are all copied, after its notify frame has found room.
    fn bytes_in_place(&mut self, id: PostId) {
        // The kernel orders the copies before the frame for the process that reads the socket; this fence
        // orders them before the event for other threads of this process.
        fence(Ordering::SeqCst);
        let Some(transfer) = self.posts.get_mut(id) else {
            return;
        };
        transfer.is_in_place = true;
        let link_id = transfer.link;
        match (transfer.notify.take(), self.links.get_mut(link_id)) {
            (Some(notify), Some(link)) => {
                link.parked.push(id, notify);
                self.unpark(link_id);
                self.flush_soon(link_id);
            }
            (None, _) => self.posts.end(id, Ok(())),
            (Some(_), None) => {}
        }
    }

    /// Begins to make the memory of a new peer present, in a moment.
    pub(crate) fn populate(&mut self, id: LinkId) {
        self.populating.push_back((self.now + POPULATE_AFTER, id));
    }

    /// When more memory of new peers is to be made present.
    pub(crate) fn populate_at(&self) -> Option<Time> {
        self.populating.front().map(|(at, _)| *at)
    }

    /// Makes memory of new peers present, so that later copies need not wait for page faults. Copies that wait
    /// now go first: each makes its own pages present.
    pub(crate) fn populate_some(&mut self) {
        let mut start = None;
        while !self.posts.is_copying()
            && let Some((_, id)) = self.populating.front().copied().filter(|(at, _)| *at <= self.now)
        {
            let start = *start.get_or_insert_with(Instant::now);
            self.populating.pop_front();
            let memory = self.links.get_mut(id).and_then(|link| link.memory.as_mut());
            if memory.is_some_and(|(memory, _)| memory.populate_some()) {
                self.populating.push_back((self.now, id));
            }
            if start.elapsed() >= POPULATE_TIME {
                return;
            }
        }
    }
}

/// Copies one slice, and counts it in the page that stands for the right to write; `None` if a write has to
/// wait for its permission.
fn slice(
    transfer: &mut Transfer,
    regions: &[Memory],
    peer: Peer<'_>,
    right: &Right,
    permitted: Time,
) -> Option<Result<Progress, TransportError>> {
    let slice = if transfer.op() == Op::Read {
        transfer.step(regions, peer, QUANTUM)
    } else if !right.mark() {
        Err(TransportError::Revoked)
    } else {
        // The clock is read while the right is marked: an owner that finds the right unmarked after the
        // permission has ended knows that no slice begins any more.
        let slice = may_begin(permitted).then(|| transfer.step(regions, peer, QUANTUM));
        right.clear();
        slice?
    };
    if slice.is_ok() {
        right.count();
    }
    Some(slice)
}

/// True if a slice of a write may begin now.
fn may_begin(permitted: Time) -> bool {
    clock::now() + SLICE_TIME < permitted
}
