//! Slices of this side's posts: which is begun next, and when.

use std::mem;
use std::ops::Bound;

use kv_core::Op;
use kv_host::clock;

use crate::completing::Flight;
use crate::ffi::{Attempt, Far, MOVES, Near, RANGES};
use crate::incoming::{ANNOUNCED, ANNOUNCED_BYTES};
use crate::lane::Lane;
use crate::message::{Header, Immediate, Kind, SEQUENCE_BITS};
use crate::pairing::MAX_LANES;
use crate::transfer::{Cut, Notify};
use crate::transport::FabricTransport;
use crate::way::{Stage, Way, WayId};

/// Most slices under way to one peer over one device.
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
            if !self.send_outgoing(id) || !self.begin_slices(id, &is_over) || !self.send_outgoing(id) {
                self.blocked.insert(id);
            }
        }
    }

    /// Begins slices of posts to a peer on all lanes, as far as there is room and time. False if libfabric has no room.
    fn begin_slices(&mut self, id: WayId, is_over: &impl Fn() -> bool) -> bool {
        let share = (MOVES / (self.ways.len() + 1)).clamp(4, SLICES);
        let (window, cut) = (self.config.window_bytes as u64, self.cut());
        let Some(way) = self.ways.get_mut(&id).filter(|way| way.stage == Stage::Open) else { return true };
        if way.lanes.len() > 1 && !way.turns.is_empty() {
            self.ask_lanes(id);
        }
        let Some(way) = self.ways.get_mut(&id) else { return true };
        let mut may_announce = true;
        // Lanes for which libfabric has no room.
        let mut full = [false; MAX_LANES];
        loop {
            let now = clock::now();
            let is_full = |number: usize| full.get(number).is_none_or(|full| *full);
            let has_room = |number: usize, lane: &Lane| {
                let is_used = number == 0 || lane.is_fresh(now);
                is_used && !is_full(number) && lane.moving() < share && lane.bytes < window
            };
            let permitted = way.permitted;
            let mut may_write = false;
            let mut may_read = false;
            for (_, lane) in way.lanes.iter().enumerate().filter(|(number, lane)| has_room(*number, lane)) {
                may_read = true;
                may_write |= may_announce && lane.may_write(now, permitted);
            }
            let next = if may_read { way.turns.next(&self.posts, may_write) } else { None };
            let Some(transfer_id) = next else { return !full.contains(&true) };
            let Some(transfer) = self.posts.get_mut(transfer_id) else { continue };
            let Some(slice) = transfer.peek(cut) else { continue };
            if let Notify::Counted(frame) = &transfer.notify {
                if !way.may_announce(frame.len()) {
                    // The end of another counted post makes room, or an answer of the peer.
                    may_announce = false;
                    way.turns.put_back(transfer_id, Op::Write);
                    continue;
                }
                let count = transfer.slices(cut);
                transfer.notify = way.announce(frame.clone(), count);
            }
            let data = match transfer.notify {
                Notify::Announced { sequence, .. } => {
                    Some(Immediate { key: way.key, slot: way.slot, sequence }.encode())
                }
                _ => None,
            };
            let op = transfer.op;
            let nodes = transfer.ranges(slice).next().map_or((None, None), |range| {
                let there = way.regions.get(range.there.0 as usize).and_then(|region| region.node);
                (self.given.node_of(range.here.0), there)
            });
            let lanes = way.lanes.iter_mut().enumerate();
            let lanes = lanes.filter(|(number, lane)| {
                has_room(*number, lane) && (op == Op::Read || lane.may_write(now, permitted))
            });
            let Some((number, lane)) = lanes.min_by_key(|(_, lane)| lane.cost(nodes)) else {
                way.turns.put_back(transfer_id, op);
                return !full.contains(&true);
            };
            let mut ranges = [(Near { region: 0, offset: 0, len: 0 }, Far { addr: 0, key: 0 }); RANGES];
            let mut count = 0;
            for (place, range) in ranges.iter_mut().zip(transfer.ranges(slice)) {
                let (region, offset) = range.here;
                let near = Near { region: region as usize, offset: offset as usize, len: range.len as usize };
                let (region, offset) = range.there;
                let Some(there) = way.regions.get(region as usize) else { continue };
                let Some(key) = there.key(lane.endpoint) else { continue };
                *place = (near, Far { addr: there.base + offset, key });
                count += 1;
            }
            let ranges = ranges.get(..count).unwrap_or_default();
            let Some(device) = self.devices.get(lane.device) else { return true };
            let (bytes, begun) = (slice.bytes, now);
            let flight = Flight::Slice { way: id, lane: number, transfer: transfer_id, op, bytes, begun };
            let begun = match op {
                Op::Write => device.endpoint.write(lane.address, ranges, data, flight),
                Op::Read => device.endpoint.read(lane.address, ranges, flight),
            };
            match begun {
                Attempt::Begun => {}
                Attempt::Full => {
                    way.turns.put_back(transfer_id, op);
                    if let Some(full) = full.get_mut(number) {
                        *full = true;
                    }
                    continue;
                }
                Attempt::Failed(_) if number > 0 => {
                    // Nothing was begun: the other lanes may do.
                    way.turns.put_back(transfer_id, op);
                    lane.close();
                    continue;
                }
                Attempt::Failed(_) => {
                    self.break_way(id, None);
                    return true;
                }
            }
            transfer.take(slice);
            transfer.begun += 1;
            transfer.under_way += 1;
            way.turns.begun(transfer_id, &self.posts);
            lane.begin(op, bytes);
            if is_over() {
                self.stirred.insert(id);
                return true;
            }
        }
    }

    /// How posts are cut: the same for all slices of a post.
    pub(crate) fn cut(&self) -> Cut {
        let ranges = self.devices.promises().ranges.min(RANGES);
        Cut { ranges, bytes: self.config.slice_bytes as u64 }
    }
}

impl Way {
    /// True if a notify frame of this length may be sent ahead, so that the peer never holds more than it has room for. One
    /// may be longer than all together may be.
    fn may_announce(&self, len: usize) -> bool {
        let fits = self.announced < ANNOUNCED && self.announced_bytes + len <= ANNOUNCED_BYTES;
        (fits || self.announced == 0) && (self.ahead.wrapping_sub(self.confirmed) as usize) < ANNOUNCED
    }

    /// Sends the notify frame of a counted post ahead. Writes may overtake such frames by other devices, and their posts
    /// may end before the frames have arrived: so the peer is asked, once in a while, how many it has.
    fn announce(&mut self, frame: bytes::Bytes, count: u32) -> Notify {
        let sequence = self.sequence;
        self.sequence = (sequence + 1) % (1 << SEQUENCE_BITS);
        let len = frame.len();
        self.announced += 1;
        self.announced_bytes += len;
        self.push(Header { len: len as u32, count, sequence, ..Header::new(self.key, Kind::Frame) }, frame);
        self.ahead = self.ahead.wrapping_add(1);
        if self.ahead.wrapping_sub(self.asked) as usize >= ANNOUNCED / 2 {
            self.ask_for_frames();
        }
        Notify::Announced { sequence, len }
    }

    /// Asks the peer how many frames that were sent ahead it has.
    pub(crate) fn ask_for_frames(&mut self) {
        self.asked = self.ahead;
        self.push(Header { count: self.ahead, ..Header::new(self.key, Kind::Ask) }, bytes::Bytes::new());
    }
}
