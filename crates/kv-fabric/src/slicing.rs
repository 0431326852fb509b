//! Slices of this side's posts: which is begun next, and when.

use std::mem;
use std::ops::Bound;

use kv_core::Op;
use kv_host::{Posts, TransferId, clock};

use crate::completing::Flight;
use crate::ffi::{Attempt, Far, MOVES, Near, RANGES};
use crate::incoming::{ANNOUNCED, ANNOUNCED_BYTES};
use crate::message::{Header, Immediate, Kind, SEQUENCE_BITS};
use crate::transfer::{Cut, Notify, Transfer};
use crate::transport::FabricTransport;
use crate::way::{Stage, Way, WayId};

/// Most slices under way to one peer.
const SLICES: usize = 64;

impl FabricTransport {
    /// Sends what is to be sent on the ways where something has changed, until the time is over. The ways take turns.
    pub(crate) fn fill_stirred(&mut self, is_over: impl Fn() -> bool) {
        let stirred = mem::take(&mut self.stirred);
        let last = self.filled;
        let after = (Bound::Excluded(last), Bound::Unbounded);
        let ids = stirred.range(after).chain(stirred.range(..=last)).copied();
        for (number, id) in ids.enumerate() {
            if number > 0 && is_over() {
                self.stirred.insert(id);
                continue;
            }
            self.filled = id;
            if !self.send_outgoing(id) || !self.begin_slices(id) || !self.send_outgoing(id) {
                self.blocked.insert(id);
            }
        }
    }

    /// Begins slices of posts to a peer, as far as there is room. False if libfabric has no room.
    fn begin_slices(&mut self, id: WayId) -> bool {
        let share = (MOVES / (self.ways.len() + 1)).clamp(4, SLICES);
        let cut = self.cut();
        let Some(way) = self.ways.get_mut(&id).filter(|way| way.stage == Stage::Open) else { return true };
        let mut may_announce = true;
        while way.writing + way.reading < share && way.bytes < self.config.window_bytes as u64 {
            let now = clock::now();
            let may_write = may_announce && now + way.latency.expected(now) < way.permitted;
            let Some(transfer_id) = way.next(&mut self.posts, may_write) else { return true };
            let Some(transfer) = self.posts.get_mut(transfer_id) else { continue };
            let Some(slice) = transfer.peek(cut) else { continue };
            if let Notify::Counted(frame) = &transfer.notify {
                let fits = way.announced < ANNOUNCED && way.announced_bytes + frame.len() <= ANNOUNCED_BYTES;
                if !fits && way.announced > 0 {
                    // The end of another counted post makes room.
                    may_announce = false;
                    way.writes.push_front(transfer_id);
                    continue;
                }
                let count = transfer.slices(cut);
                transfer.notify = way.announce(frame.clone(), count);
            }
            let data = match transfer.notify {
                Notify::Announced { sequence, .. } => {
                    Some(Immediate { key: way.key, slot: way.slot, sequence }.encode(way.immediate))
                }
                _ => None,
            };
            let mut ranges = [(Near { region: 0, offset: 0, len: 0 }, Far { addr: 0, key: 0 }); RANGES];
            let mut count = 0;
            for (place, range) in ranges.iter_mut().zip(transfer.ranges(slice)) {
                let (region, offset) = range.here;
                let near = Near { region: region as usize, offset: offset as usize, len: range.len as usize };
                let (region, offset) = range.there;
                let Some(there) = way.regions.get(region as usize) else { continue };
                *place = (near, Far { addr: there.base + offset, key: there.key });
                count += 1;
            }
            let ranges = ranges.get(..count).unwrap_or_default();
            let op = transfer.op;
            let flight = Flight::Slice { way: id, transfer: transfer_id, op, bytes: slice.bytes, begun: now };
            let begun = match op {
                Op::Write => self.endpoint.write(way.address, ranges, data, flight),
                Op::Read => self.endpoint.read(way.address, ranges, flight),
            };
            let line = if op == Op::Write { &mut way.writes } else { &mut way.reads };
            match begun {
                Attempt::Begun => {}
                Attempt::Full => {
                    line.push_front(transfer_id);
                    return false;
                }
                Attempt::Failed(_) => {
                    self.break_way(id, None);
                    return true;
                }
            }
            transfer.take(slice);
            transfer.under_way += 1;
            if transfer.has_more() {
                line.push_back(transfer_id);
            }
            match op {
                Op::Write => way.writing += 1,
                Op::Read => way.reading += 1,
            }
            way.bytes += slice.bytes;
            way.reads_next = op == Op::Write;
        }
        true
    }

    /// How posts are cut: the same for all slices of a post.
    pub(crate) fn cut(&self) -> Cut {
        let ranges = self.endpoint.promises().ranges.min(RANGES);
        Cut { ranges, bytes: self.config.slice_bytes as u64 }
    }
}

impl Way {
    /// The next post to cut a slice from: writes and reads take turns, and so do posts.
    fn next(&mut self, posts: &mut Posts<Transfer>, may_write: bool) -> Option<TransferId> {
        loop {
            let write = may_write && !self.writes.is_empty() && (!self.reads_next || self.reads.is_empty());
            let line = if write { &mut self.writes } else { &mut self.reads };
            let id = line.pop_front()?;
            if posts.get(id).is_some_and(|transfer| transfer.has_more()) {
                return Some(id);
            }
        }
    }

    /// Sends the notify frame of a counted post ahead.
    fn announce(&mut self, frame: bytes::Bytes, count: u32) -> Notify {
        let sequence = self.sequence;
        self.sequence = (sequence + 1) % (1 << SEQUENCE_BITS);
        let len = frame.len();
        self.announced += 1;
        self.announced_bytes += len;
        self.push(Header { len: len as u32, count, sequence, ..Header::new(self.key, Kind::Frame) }, frame);
        Notify::Announced { sequence, len }
    }
}
