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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use kv_core::{PeerId, Post, PostId, Time, Transport, TransportEvent};
    use kv_host::Latency;

    use super::*;
    use crate::metadata::Place;
    use crate::pair::{LEN, PEER, both_until, config, connected, connected_with, frames_of, post, worker};

    const DONE: TransportEvent = TransportEvent::Posted { post: PostId(1), result: Ok(()) };
    const VERY_LONG: Duration = Duration::from_secs(1 << 30);

    fn lane(transport: &mut FabricTransport, id: WayId, number: usize) -> &mut Lane {
        &mut transport.ways.get_mut(&id).unwrap().lanes[number]
    }

    /// Bytes of slices that each lane has begun.
    fn begun(transport: &FabricTransport, id: WayId) -> Vec<u64> {
        transport.ways.get(&id).unwrap().lanes.iter().map(|lane| lane.begun).collect()
    }

    /// Polls one side until this number has grown, and then has not grown for many polls.
    fn polled_until_full(transport: &mut FabricTransport, number: impl Fn(&FabricTransport) -> u64) {
        let (mut last, mut same, begun) = (0, 0, std::time::Instant::now());
        while last == 0 || same < 100 {
            assert!(begun.elapsed() < Duration::from_secs(20), "{last}, {same} times");
            transport.poll(clock::now(), &mut Vec::new());
            let now = number(transport);
            same = if now == last { same + 1 } else { 0 };
            last = now;
        }
    }

    #[test]
    fn no_lane_begins_a_write_that_takes_longer_than_the_permission_lasts() {
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected_with([config(2), config(2)]);
        for number in 0..2 {
            lane(&mut here, id, number).latency.note(VERY_LONG, clock::now());
        }
        here.permit(PEER, clock::now() + Duration::from_secs(100));
        here.post(PEER, post(Op::Write, 4 << 20, None)).unwrap();
        for _ in 0..20 {
            here.poll(clock::now(), &mut Vec::new());
        }
        assert_eq!(begun(&here, id), [0, 0]);
        lane(&mut here, id, 0).latency = Latency::default();
        here.permit(PEER, clock::now() + Duration::from_secs(100));
        let events = both_until([&mut here, &mut there], "the post", |_, _, events| !events.is_empty());
        assert_eq!(events, [DONE]);
        assert_eq!(begun(&here, id), [4 << 20, 0]);
        assert!(
            lane(&mut here, id, 0).latency.expected(clock::now()) > Duration::ZERO,
            "nothing was learned"
        );
    }

    /// The peer does not look meanwhile.
    #[test]
    fn no_more_than_a_window_of_bytes_and_of_slices_is_under_way() {
        let most = |slice, window| {
            let config = config(1).with(|config| (config.slice_bytes, config.window_bytes) = (slice, window));
            let (id, [(mut here, _ours), (_there, _theirs)]) = connected_with([config.clone(), config]);
            here.permit(PEER, Time::MAX);
            here.post(PEER, post(Op::Read, LEN, None)).unwrap();
            polled_until_full(&mut here, |here| begun(here, id)[0]);
            let lane = lane(&mut here, id, 0);
            (lane.moving(), lane.bytes)
        };
        assert_eq!(most(16 << 10, 64 << 10), (4, 64 << 10));
        assert_eq!(most(4 << 10, 1 << 30), (SLICES, SLICES as u64 * (4 << 10)));
    }

    #[test]
    fn a_device_on_which_nothing_is_heard_gets_no_slices_until_it_is_heard_again() {
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected_with([config(2), config(2)]);
        here.permit(PEER, Time::MAX);
        // An answer to an earlier question may be on its way: closed until two looks agree.
        let mut looks = 0;
        while looks < 2 {
            lane(&mut here, id, 1).close();
            let begun = std::time::Instant::now();
            both_until([&mut here, &mut there], "rest", |_, _, _| {
                begun.elapsed() > Duration::from_millis(20)
            });
            looks = if here.ways.get(&id).unwrap().lanes[1].is_fresh(here.now) { 0 } else { looks + 1 };
        }
        let second = lane(&mut here, id, 1);
        // A question is stuck.
        second.asked(true, clock::now());
        here.post(PEER, post(Op::Write, LEN, None)).unwrap();
        both_until([&mut here, &mut there], "the post", |_, _, events| !events.is_empty());
        assert_eq!(begun(&here, id), [LEN as u64, 0]);
        lane(&mut here, id, 1).has_asked();
        let (mut number, since) = (1, std::time::Instant::now());
        while begun(&here, id)[1] == 0 {
            assert!(since.elapsed() < Duration::from_secs(60), "the second device is not used again");
            number += 1;
            here.post(PEER, Post { id: PostId(number), ..post(Op::Write, LEN, None) }).unwrap();
            both_until([&mut here, &mut there], "a post", |_, _, events| !events.is_empty());
        }
    }

    #[test]
    fn a_slice_goes_beside_its_memory_there_with_the_key_of_that_endpoint() {
        for op in [Op::Write, Op::Read] {
            let (id, [(mut here, ours), (mut there, theirs)]) = connected_with([config(1), config(2)]);
            here.permit(PEER, Time::MAX);
            let way = here.ways.get_mut(&id).unwrap();
            let (place, node) = (&mut way.regions[0], Some(7));
            let key = place.key(1).unwrap();
            *place = Place::new(place.base, place.len, vec![key ^ 0x55, key], node);
            way.lanes[1].nodes = (None, node);
            way.lanes[1].is_heard(clock::now() + Duration::from_secs(100));
            let (source, target) = if op == Op::Write { (&ours, &theirs) } else { (&theirs, &ours) };
            source.write(0, b"keys and values").unwrap();
            here.post(PEER, post(op, 4096, None)).unwrap();
            let events = both_until([&mut here, &mut there], "the post", |_, _, events| !events.is_empty());
            assert_eq!(events, [DONE], "{op:?}");
            let mut page = [0; 15];
            target.read(0, &mut page).unwrap();
            assert_eq!(&page, b"keys and values", "{op:?}");
            assert_eq!(begun(&here, id), [0, 4096], "{op:?}");
        }
    }

    #[test]
    fn ways_take_turns_when_the_time_is_over_after_each_of_them() {
        let ((mut here, _ours), peers) = (worker(), [(); 3].map(|()| worker()));
        for (number, (peer, _)) in (1..).zip(&peers) {
            here.connect(PeerId(number), &peer.metadata().unwrap()).unwrap();
        }
        let ids: Vec<WayId> = here.ways.keys().copied().collect();
        let mut served = Vec::new();
        for _ in 0..2 * ids.len() {
            here.stirred.extend(&ids);
            here.fill_stirred(|| true);
            served.push(here.filled);
            assert_eq!(here.stirred.len(), ids.len() - 1, "those that were not served wait");
        }
        assert_eq!(served, [&ids[..], &ids].concat());
    }

    /// The peer does not look at first, and then counts all of them.
    #[test]
    fn frames_that_are_sent_ahead_are_never_more_bytes_than_the_peer_has_room_for() {
        const POSTS: u64 = 12;
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected();
        here.permit(PEER, Time::MAX);
        let frame = Bytes::from(vec![1; 1 << 20]);
        for number in 0..POSTS {
            let notify = Some(frame.clone());
            here.post(PEER, Post { id: PostId(number), notify, ..post(Op::Write, 4096, None) }).unwrap();
        }
        polled_until_full(&mut here, |here| here.ways.get(&id).unwrap().announced as u64);
        let way = here.ways.get(&id).unwrap();
        assert_eq!((way.announced, way.announced_bytes), (ANNOUNCED_BYTES >> 20, ANNOUNCED_BYTES));
        let (mut told, mut heard, begun) = (Vec::new(), Vec::new(), std::time::Instant::now());
        while told.len() < POSTS as usize || heard.len() < POSTS as usize {
            assert!(begun.elapsed() < Duration::from_secs(20), "{told:?}, {} frames", heard.len());
            here.poll(clock::now(), &mut told);
            there.poll(clock::now(), &mut heard);
        }
        assert!(frames_of(&heard).iter().all(|heard| *heard == frame));
        let way = here.ways.get(&id).unwrap();
        assert_eq!((way.announced, way.announced_bytes), (0, 0));
    }

    #[test]
    fn a_lane_that_can_begin_nothing_is_left_out_and_the_others_carry_all() {
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected_with([config(1), config(3)]);
        here.permit(PEER, Time::MAX);
        let way = here.ways.get_mut(&id).unwrap();
        let (place, node) = (&mut way.regions[0], Some(7));
        let key = place.key(0).unwrap();
        // None at the third endpoint, which is beside the memory.
        *place = Place::new(place.base, place.len, vec![key, key ^ 0x55], node);
        way.lanes[2].nodes = (None, node);
        way.lanes[2].is_heard(clock::now() + Duration::from_secs(100));
        here.post(PEER, post(Op::Write, 4096, None)).unwrap();
        let events = both_until([&mut here, &mut there], "the post", |_, _, events| !events.is_empty());
        assert_eq!((events, begun(&here, id)), (vec![DONE], vec![4096, 0, 0]));
    }

    #[test]
    fn no_more_frames_are_sent_ahead_than_the_peer_is_known_to_have_room_for() {
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected();
        here.permit(PEER, Time::MAX);
        let way = here.ways.get_mut(&id).unwrap();
        (way.ahead, way.asked) = (ANNOUNCED as u32, ANNOUNCED as u32);
        here.post(PEER, post(Op::Write, 4096, Some(b"counted"))).unwrap();
        for _ in 0..20 {
            here.poll(clock::now(), &mut Vec::new());
        }
        assert_eq!(begun(&here, id), [0]);
        here.ways.get_mut(&id).unwrap().ask_for_frames();
        here.stirred.insert(id);
        let (mut told, mut heard) = (Vec::new(), Vec::new());
        let since = std::time::Instant::now();
        while told.is_empty() || heard.is_empty() {
            assert!(since.elapsed() < Duration::from_secs(20), "{told:?}, {heard:?}");
            here.poll(clock::now(), &mut told);
            there.poll(clock::now(), &mut heard);
        }
        assert_eq!((told, frames_of(&heard)), (vec![DONE], vec![Bytes::from_static(b"counted")]));
    }
}
