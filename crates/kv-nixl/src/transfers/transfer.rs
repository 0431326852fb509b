//! One post that was accepted: the post is cut into requests, so that many posts can share one thread and one
//! connection.

use std::collections::VecDeque;

use bytes::Bytes;
use kv_core::{Descriptor, MemoryKind, Op, PeerId, Post, TransportError};
use nixl_sys::XferRequest;

use crate::agent::engine::{CallError, Piece};
use crate::connections::id::RemoteId;
use crate::ffi::memory::Memory;
use crate::regions::place::Place;
use crate::regions::prepared::{self, Grid};

/// Bytes that a descriptor counts beside its own: UCX takes 2 µs (shared memory) to 7 µs (TCP) for each
/// descriptor, in which UCX would copy some 8 KiB.
pub(crate) const DESC_COST: u64 = 8 << 10;

/// A post that was accepted and has not ended.
pub(crate) struct Transfer {
    pub(crate) remote: RemoteId,
    pub(crate) peer: PeerId,
    pub(crate) notify: Option<Bytes>,
    /// How many of the post's requests are on their way.
    pub(crate) in_flight: u32,
    /// Why nothing more of the post is sent; `None` while the post goes on.
    pub(crate) stopped: Option<TransportError>,
    /// Requests of the next slices, made and not started.
    pub(crate) ready: VecDeque<Made>,
    pub(crate) op: Op,
    /// Bytes of the whole post.
    pub(crate) bytes: u64,
    descriptors: Vec<Descriptor>,
    /// The number of the next descriptor, and how many of its bytes are cut off.
    next: usize,
    done: u64,
    /// The same two before the last part was cut off.
    before: (usize, u64),
}

/// A request that was made, or NIXL's error.
pub(crate) struct Made {
    pub(crate) request: Result<XferRequest, CallError>,
    /// The request names prepared items by their numbers.
    pub(crate) by_number: bool,
    pub(crate) descriptors: u64,
    pub(crate) bytes: u64,
    /// Bytes of the request, and the cost of its descriptors in bytes.
    pub(crate) weight: u64,
}

/// The content of one request: a part of a post, or several short posts.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// The direction, and the kinds of memory here and there; `None` while the batch is empty.
    pub(crate) kind: Option<(Op, MemoryKind, MemoryKind)>,
    pub(crate) pieces: Vec<Piece>,
    /// Numbers of all items in the prepared lists, here and there, as long as every descriptor has numbers.
    pub(crate) numbers: Option<[Vec<i32>; 2]>,
    /// Bytes of the batch, and the cost of its descriptors in bytes.
    pub(crate) weight: u64,
}

impl Batch {
    pub(crate) fn clear(&mut self) {
        self.kind = None;
        self.pieces.clear();
        let numbers = self.numbers.get_or_insert_default();
        numbers.iter_mut().for_each(Vec::clear);
        self.weight = 0;
    }
}

impl Batch {
    /// Adds the numbers of a descriptor's items. If the descriptor has none, the request goes without
    /// numbers.
    fn number(&mut self, items: Option<(u64, u64, u64)>) {
        match (items, &mut self.numbers) {
            (Some((ours, theirs, count)), Some([here, there])) => {
                // Lists have at most `i32::MAX` items.
                here.extend((ours..ours + count).map(|item| item as i32));
                there.extend((theirs..theirs + count).map(|item| item as i32));
            }
            _ => self.numbers = None,
        }
    }
}

impl Transfer {
    /// A transfer whose descriptors have been checked by [`check`].
    pub(crate) fn new(remote: RemoteId, peer: PeerId, post: Post) -> Transfer {
        let add = |sum: u64, descriptor: &Descriptor| sum.saturating_add(descriptor.len);
        Transfer {
            bytes: post.descriptors.iter().fold(0, add),
            remote,
            peer,
            notify: post.notify,
            in_flight: 0,
            stopped: None,
            ready: VecDeque::new(),
            op: post.op,
            descriptors: post.descriptors,
            next: 0,
            done: 0,
            before: (0, 0),
        }
    }

    /// True if the part that is not cut off yet weighs at most this much.
    pub(crate) fn is_shorter_than(&self, most: u64) -> bool {
        let rest = self.descriptors.get(self.next..).unwrap_or_default();
        // Long posts need not be summed up to their end.
        let mut sum = 0_u64;
        rest.iter().all(|descriptor| {
            sum = sum.saturating_add(descriptor.len).saturating_add(DESC_COST);
            sum.saturating_sub(self.done) <= most
        })
    }

    /// True if some of the post is not cut off yet.
    pub(crate) fn has_more(&self) -> bool {
        self.stopped.is_none() && (self.next < self.descriptors.len() || !self.ready.is_empty())
    }

    /// Sends nothing more of the post. The first reason stays.
    pub(crate) fn stop(&mut self, error: TransportError) {
        self.stopped.get_or_insert(error);
        self.ready.clear();
    }

    /// Puts the part that was cut off last back.
    pub(crate) fn rewind(&mut self) {
        (self.next, self.done) = self.before;
    }

    /// Cuts off a part, and adds the part to a batch until the batch weighs about `most`. Adds nothing if the
    /// next descriptor is of other kinds of memory than the batch, or of a region that does not exist. With
    /// lists, descriptors of a few items get numbers.
    pub(crate) fn cut(
        &mut self,
        local: &[Memory],
        remote: &[Place],
        lists: Option<(&Grid, &Grid)>,
        most: u64,
        batch: &mut Batch,
    ) {
        self.before = (self.next, self.done);
        while let Some(descriptor) = self.descriptors.get(self.next) {
            let (Some(here), Some(there)) =
                (local.get(descriptor.local_region as usize), remote.get(descriptor.remote_region as usize))
            else {
                return;
            };
            let kind = (self.op, here.kind(), there.kind);
            // A request of NIXL has one kind of memory on each side.
            if *batch.kind.get_or_insert(kind) != kind || batch.weight >= most {
                return;
            }
            let rest = descriptor.len - self.done;
            let room = most - batch.weight;
            // Nothing shorter than what a descriptor costs is left over.
            let len =
                if rest <= room.saturating_add(DESC_COST) { rest } else { room.max(DESC_COST).min(rest) };
            let from = (descriptor.local_region, descriptor.local_offset + self.done);
            let to = (descriptor.remote_region, descriptor.remote_offset + self.done);
            batch.number(lists.and_then(|grids| prepared::numbers(grids, from, to, len)));
            batch.pieces.push(Piece {
                local: (here.addr() + descriptor.local_offset + self.done, here.device()),
                remote: (there.addr + descriptor.remote_offset + self.done, there.device),
                len,
            });
            batch.weight += len + DESC_COST;
            self.done += len;
            if self.done == descriptor.len {
                self.next += 1;
                self.done = 0;
            }
        }
    }
}

/// Checks every descriptor against the regions of both sides.
pub(crate) fn check(
    descriptors: &[Descriptor],
    local: &[Memory],
    remote: &[Place],
) -> Result<(), TransportError> {
    let ours = |region| local.get(region as usize).map(Memory::len);
    let theirs = |region| remote.get(region as usize).map(|place| place.len);
    kv_host::check::descriptors(descriptors, ours, theirs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::PostId;
    use kv_host::HostMemory;

    fn descriptor(local_offset: u64, remote_region: u32, remote_offset: u64, len: u64) -> Descriptor {
        Descriptor { local_region: 0, remote_region, local_offset, remote_offset, len }
    }

    fn cuts(descriptors: Vec<Descriptor>, most: u64) -> Vec<Batch> {
        let pool = HostMemory::new(64 << 20).unwrap();
        let local = [Memory::whole(&pool)];
        let place = |kind, addr| Place { addr, len: 64 << 20, item_len: 1, kind, device: 3 };
        let remote = [place(MemoryKind::Dram, 1 << 40), place(MemoryKind::Vram, 1 << 41)];
        check(&descriptors, &local, &remote).unwrap();
        let post = Post { id: PostId(1), op: Op::Write, descriptors, notify: None };
        let mut transfer = Transfer::new(RemoteId(1), PeerId(1), post);
        let mut all = Vec::new();
        while transfer.has_more() {
            let mut batch = Batch::default();
            transfer.cut(&local, &remote, None, most, &mut batch);
            assert!(!batch.pieces.is_empty());
            for piece in &mut batch.pieces {
                piece.local.0 -= pool.addr();
            }
            all.push(batch);
        }
        all
    }

    #[test]
    fn parts_cover_every_byte_once_and_in_order() {
        let descriptors = vec![
            descriptor(0, 0, 100, 5),
            descriptor(1000, 0, 9000, 10 << 20),
            descriptor(20 << 20, 0, 20 << 20, (1 << 20) + 7),
        ];
        let most = 1 << 20;
        let cuts = cuts(descriptors.clone(), most);
        let mut at = 0;
        let mut done = 0;
        for cut in &cuts {
            assert!(cut.weight <= most + 2 * DESC_COST, "{cut:?}");
            for piece in &cut.pieces {
                let descriptor = descriptors[at];
                assert_eq!(piece.local.0, descriptor.local_offset + done);
                assert_eq!(piece.remote, ((1 << 40) + descriptor.remote_offset + done, 3));
                done += piece.len;
                assert!(piece.len > 0 && done <= descriptor.len);
                if done == descriptor.len {
                    (at, done) = (at + 1, 0);
                }
            }
        }
        assert_eq!(at, descriptors.len());
        assert!(cuts.len() >= 11 && cuts.len() <= 14, "{}", cuts.len());
    }

    #[test]
    fn small_descriptors_count_more_than_their_bytes() {
        let descriptors: Vec<Descriptor> = (0..1000).map(|at| descriptor(at * 64, 0, at * 64, 64)).collect();
        let cuts = cuts(descriptors, 1 << 20);
        assert_eq!(cuts.iter().map(|cut| cut.pieces.len()).sum::<usize>(), 1000);
        assert!(cuts.iter().all(|cut| cut.pieces.len() as u64 <= (1 << 20) / DESC_COST));
    }

    #[test]
    fn kinds_of_memory_are_not_mixed_in_one_request() {
        let cuts = cuts(
            vec![
                descriptor(0, 0, 0, 10),
                descriptor(10, 1, 0, 10),
                descriptor(20, 1, 10, 10),
                descriptor(30, 0, 50, 10),
            ],
            1 << 20,
        );
        let lens: Vec<usize> = cuts.iter().map(|cut| cut.pieces.len()).collect();
        assert_eq!(lens, [1, 2, 1]);
        assert_eq!(cuts[1].kind, Some((Op::Write, MemoryKind::Dram, MemoryKind::Vram)));
    }
}
