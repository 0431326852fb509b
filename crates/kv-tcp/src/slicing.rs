//! Slices of this side's posts: which is sent next, on which lane, and for how long it may be under way.

use std::mem;
use std::ops::Bound;

use kv_core::{Op, Time};
use kv_host::{Posts, TransferId, clock};
use rustix::event::epoll::EventFlags;

use crate::connection::Connection;
use crate::message::{self, Asked, HEADER, MAX_NOTIFY, RANGE};
use crate::transfer::{Slice, Transfer};
use crate::transport::TcpTransport;
use crate::way::{Flight, Stage, Way, WayId};

/// Most slices under way on one lane.
const FLIGHTS: usize = 64;
/// A lane on which so many segments wait to be written gets no slices.
pub(crate) const QUEUED: usize = 2048;

impl TcpTransport {
    /// Sends what is to be sent on the ways where something has changed, until the time is over. The ways take
    /// turns.
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
            self.fill(id);
        }
    }

    fn fill(&mut self, id: WayId) {
        let Some(way) = self.ways.get(&id) else { return };
        if matches!(way.stage, Stage::Open) && (way.permitted > self.now || !way.turns.is_empty()) {
            self.open_lanes(id);
        }
        self.queue_frames(id);
        self.queue_slices(id);
        let Some(way) = self.ways.get(&id) else { return };
        let open = way.lanes.iter().filter(|lane| lane.open).filter_map(|lane| lane.connection);
        let waiting: Vec<u64> = open
            .filter(|id| self.connections.get(id).is_some_and(|connection| !connection.is_flushed()))
            .collect();
        for connection in waiting {
            self.ready(connection, EventFlags::empty());
        }
    }

    /// There is room on a lane again.
    pub(crate) fn resume(&mut self, id: WayId) {
        let Some(way) = self.ways.get(&id) else { return };
        if !way.turns.is_empty() || !way.frames.is_empty() || !way.parked.is_empty() {
            self.stirred.insert(id);
        }
        if matches!(way.stage, Stage::Leaving { .. }) {
            self.look_at(id, self.now);
        }
    }

    /// Bytes of frames that wait for a peer.
    pub(crate) fn frame_bytes(&self, id: WayId) -> usize {
        let Some(way) = self.ways.get(&id) else { return 0 };
        let lane = way.lanes.first().and_then(|lane| self.connections.get(&lane.connection?));
        way.frame_bytes + lane.map_or(0, |connection| connection.outbound.encoded())
    }

    fn queue_frames(&mut self, id: WayId) {
        let Some(way) = self.ways.get_mut(&id) else { return };
        let Some(lane) = way.lanes.first().filter(|lane| lane.open) else { return };
        let connection = lane.connection.and_then(|connection| self.connections.get_mut(&connection));
        let Some(connection) = connection else { return };
        for frame in way.frames.drain(..) {
            connection.outbound.push(message::frame(frame.len()));
            connection.outbound.push(frame);
        }
        way.frame_bytes = 0;
        while let Some((transfer, notify)) = way.parked.pop_front() {
            if connection.outbound.encoded() + HEADER + notify.len() > self.config.outbound_bytes {
                way.parked.push_front((transfer, notify));
                return;
            }
            connection.outbound.push(message::frame(notify.len()));
            connection.outbound.push(notify);
            self.posts.end(transfer, Ok(()));
        }
    }

    fn queue_slices(&mut self, id: WayId) {
        let now = clock::now();
        let Some(way) = self.ways.get_mut(&id).filter(|way| matches!(way.stage, Stage::Open)) else { return };
        loop {
            // The lane with the fewest bytes under way.
            let room = |lane: &crate::way::Lane| {
                lane.open && lane.flights.len() < FLIGHTS && lane.bytes < lane.window
            };
            let lanes = way.lanes.iter().enumerate().skip(way.first_for_slices());
            let best = lanes.filter(|(_, lane)| room(lane)).min_by_key(|(_, lane)| lane.bytes);
            let Some((at, lane)) = best else { return };
            let connection = lane.connection.and_then(|connection| self.connections.get_mut(&connection));
            let Some(connection) = connection.filter(|it| it.outbound.len() < QUEUED) else { return };
            let may_write = now + lane.latency.expected(now) < way.permitted;
            let most = (self.config.slice_bytes as u64).min(lane.window);
            let Some((transfer, slice, whole)) = way.next_slice(&mut self.posts, may_write, most) else {
                return;
            };
            let until = match self.posts.get(transfer).map(|transfer| transfer.op) {
                Some(Op::Write) => way.permitted.min(now + self.config.slice_time),
                _ => now + self.config.slice_time,
            };
            if let Some(transfer_ref) = self.posts.get_mut(transfer) {
                let launch = Launch { transfer, slice, whole, now, until };
                way.launch(at, connection, transfer_ref, launch);
            }
        }
    }
}

/// A slice that is about to be sent.
struct Launch {
    transfer: TransferId,
    slice: Slice,
    whole: bool,
    now: Time,
    until: Time,
}

impl Way {
    /// Cuts the next slice.
    fn next_slice(
        &mut self,
        posts: &mut Posts<Transfer>,
        may_write: bool,
        most: u64,
    ) -> Option<(TransferId, Slice, bool)> {
        let id = self.turns.next(posts, may_write)?;
        let (slice, whole) = posts.get_mut(id)?.cut(most)?;
        self.turns.begun(id, posts);
        Some((id, slice, whole))
    }

    /// Queues a slice on a lane.
    fn launch(&mut self, at: usize, connection: &mut Connection, transfer: &mut Transfer, launch: Launch) {
        let Launch { transfer: id, slice, whole, now, until } = launch;
        let (Some(lane), Some(clock)) = (self.lanes.get_mut(at), self.clock) else { return };
        lane.next = lane.next.wrapping_add(1);
        let (number, op) = (lane.next, transfer.op);
        let (here, there): (Vec<_>, Vec<_>) = transfer.ranges(slice).unzip();
        let asked = Asked { number, until: clock.theirs(until, now), ranges: there, bytes: slice.bytes };
        let mut notify = None;
        if op == Op::Write {
            // The frame of a post that is one slice travels with it, and is there as soon as its bytes are.
            let fits = |notify: &bytes::Bytes| whole && !notify.is_empty() && notify.len() <= MAX_NOTIFY;
            notify = transfer.notify.take_if(|notify| fits(notify));
            let frame = notify.clone().unwrap_or_default();
            connection.outbound.push(message::write(&asked, frame.len()));
            connection.outbound.push_pages(here, until);
            connection.outbound.push_write_done();
            connection.outbound.push(frame);
        } else {
            connection.outbound.push(message::read(&asked));
        }
        transfer.under_way += 1;
        // Small ranges cost their part of the message, too.
        lane.bytes += slice.bytes + (RANGE * asked.ranges.len()) as u64;
        let ranges = asked.ranges.len();
        let transfer = Some(id);
        let landed = false;
        lane.flights.push_back(Flight {
            number,
            transfer,
            op,
            slice,
            ranges,
            notify,
            begun: now,
            until,
            landed,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::{Duration, Instant};

    use bytes::Bytes;
    use kv_core::{PeerId, PostId, Transport, TransportError, TransportEvent, TransportWait};
    use kv_host::Arena;

    use super::*;
    use crate::config::TcpConfig;
    use crate::message::{Reply, Request, Verdict};
    use crate::scripted::{LEN, Peer, asked, fill_with_frames, opened, reader, reader_with, write_of};

    #[test]
    fn ways_for_which_there_is_no_time_keep_their_turns_in_a_circle() {
        let config = TcpConfig::new("127.0.0.1:0".parse().unwrap());
        let mut transport = TcpTransport::new(config).unwrap();
        transport.stirred.extend([5, 6, 7]);
        transport.filled = 6;
        for (left, filled) in [(vec![5, 6], 7), (vec![6], 5), (vec![], 6)] {
            transport.fill_stirred(|| true);
            let stirred: Vec<WayId> = transport.stirred.iter().copied().collect();
            assert_eq!((stirred, transport.filled), (left, filled));
        }
    }

    #[test]
    fn slices_say_until_when_they_may_touch_memory_by_the_clock_of_their_peer() {
        let hour = Duration::from_secs(3600);
        let mut peer = Peer { ahead: hour, ..Peer::new() };
        let (mut transport, _arena) = reader(&peer, 1);
        let slice_time = transport.config.slice_time;
        for number in 1..=20 {
            let Request::Read(asked) = asked(&mut peer, &mut transport) else { panic!("no read") };
            let now = peer.clock();
            let until = asked.until;
            assert!(until > now && until <= now + slice_time, "slice {number}: {until:?}, and it is {now:?}");
            peer.answer(asked.number, Verdict::Late);
        }
    }

    #[test]
    fn slices_end_by_the_clock_of_their_peer_also_after_that_clock_has_stood_still() {
        let hour = Duration::from_secs(3600);
        let mut peer = Peer { ahead: hour, ..Peer::new() };
        let (mut transport, _arena) = reader(&peer, 1);
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut slices = Vec::new();
        while slices.len() < FLIGHTS {
            assert!(Instant::now() < deadline, "{} slices", slices.len());
            transport.poll(Time::ZERO, &mut Vec::new());
            slices.extend(peer.next());
        }
        peer.ahead = hour / 2;
        peer.answer(slices[0].number, Verdict::Late);
        let Request::Read(asked) = asked(&mut peer, &mut transport) else { panic!("no read") };
        let (until, latest) = (asked.until, peer.clock() + transport.config.slice_time);
        assert!(until <= latest, "{until:?} is after {latest:?}");
    }

    #[test]
    fn pages_do_not_travel_with_frames_where_there_is_a_connection_for_pages() {
        let mut frames = Peer::new();
        let (mut transport, _arena) = reader_with(&frames, 1, |config| config.data_connections = 1);
        let (listener, metadata) = (frames.listener.try_clone().unwrap(), frames.metadata.clone());
        let mut pages = Peer { listener, metadata, ..Peer::new() };
        transport.send(PeerId(1), Bytes::from_static(b"a frame")).unwrap();
        let (mut frame, mut asked) = (None, None);
        let deadline = Instant::now() + Duration::from_secs(60);
        while frame.is_none() || asked.is_none() {
            assert!(Instant::now() < deadline, "{frame:?}, {asked:?}");
            transport.poll(Time::ZERO, &mut Vec::new());
            match frames.next_request() {
                Some(Request::Frame(bytes)) => frame = Some(bytes),
                other => assert_eq!(other, None),
            }
            // The first connection is that for frames.
            if frame.is_some() && asked.is_none() {
                asked = pages.next();
            }
        }
        assert_eq!(frame.unwrap(), "a frame");
    }

    #[test]
    fn slices_and_what_is_under_way_stay_within_their_configured_bounds() {
        let (slice, window) = (4096, 32 << 10);
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader_with(&peer, 1, |config| config.window_bytes = window);
        let (mut asked, mut events, mut most) = (std::collections::VecDeque::new(), Vec::new(), 0);
        let deadline = Instant::now() + Duration::from_secs(60);
        while events.is_empty() {
            assert!(Instant::now() < deadline);
            for _ in 0..5 {
                transport.poll(Time::ZERO, &mut events);
                asked.extend(std::iter::from_fn(|| peer.next()));
            }
            assert!(asked.iter().all(|asked| asked.bytes <= slice));
            most = asked.iter().map(|asked| asked.bytes).sum::<u64>().max(most);
            assert!(most < window as u64 + slice, "{most} bytes are under way");
            if let Some(Asked { number, bytes, .. }) = asked.pop_front() {
                let stream = peer.stream.as_mut().unwrap();
                stream.write_all(&Reply::Bytes { number, bytes }.encode()).unwrap();
                stream.write_all(&vec![7; bytes as usize]).unwrap();
                peer.answer(number, Verdict::Done);
            }
        }
        assert_eq!(events, [TransportEvent::Posted { post: PostId(0), result: Ok(()) }]);
        assert!(most >= window as u64 - slice, "{most} bytes at once say nothing of the bound");
        let under_way: u64 = transport.ways.values().flat_map(|way| &way.lanes).map(|lane| lane.bytes).sum();
        assert_eq!(under_way, 0, "bytes that have arrived take room");
    }

    #[test]
    fn slices_of_writes_on_all_connections_may_land_no_longer_than_the_peer_permits() {
        let peer = Peer::new();
        let (mut transport, _arena) = reader_with(&peer, 0, |config| {
            (config.data_connections, config.slice_time) = (3, Duration::from_secs(60));
        });
        let permitted = clock::now() + Duration::from_secs(30);
        transport.permit(PeerId(1), permitted);
        let mut connections = [0; 4].map(|_| {
            let (listener, metadata) = (peer.listener.try_clone().unwrap(), peer.metadata.clone());
            Peer { listener, metadata, ..Peer::new() }
        });
        let deadline = Instant::now() + Duration::from_secs(60);
        while !transport.ways.values().flat_map(|way| &way.lanes).all(|lane| lane.open) {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut Vec::new());
            connections.iter_mut().for_each(Peer::fill);
        }
        for id in 1..=3 {
            transport.post(PeerId(1), write_of(id, None)).unwrap();
        }
        let mut asked = [None, None, None, None];
        while asked.iter().flatten().count() < 3 {
            assert!(Instant::now() < deadline, "{asked:?}");
            transport.poll(Time::ZERO, &mut Vec::new());
            for (asked, connection) in asked.iter_mut().zip(&mut connections) {
                *asked = asked.take().or_else(|| connection.next_request());
            }
        }
        for request in asked.into_iter().flatten() {
            // The clock of this peer is that of this host.
            let Request::Write(asked, _) = request else { panic!("{request:?}") };
            assert!(asked.until <= permitted, "{:?} is after {permitted:?}", asked.until);
        }
    }

    #[test]
    fn pages_of_a_write_are_not_read_after_the_time_of_their_slice() {
        let mut peer = Peer::new();
        let (mut transport, arena) = reader_with(&peer, 0, |config| {
            (config.slice_bytes, config.slice_time) = (LEN as usize, Duration::from_millis(200));
            // The kernel does not hold all pages.
            config.send_buffer = Some(4096);
        });
        transport.permit(PeerId(1), Time::MAX);
        let mut post = write_of(1, None);
        post.descriptors[0].len = LEN;
        transport.post(PeerId(1), post).unwrap();
        let Request::Write(..) = asked(&mut peer, &mut transport) else { panic!("no write") };
        transport.cancel(PostId(1));
        let (mut events, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        while events.is_empty() {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut events);
        }
        arena.write(0, &[9; LEN as usize]).unwrap();
        while peer.got.len() < LEN as usize {
            assert!(Instant::now() < deadline, "{} bytes", peer.got.len());
            transport.poll(Time::ZERO, &mut events);
            peer.fill();
        }
        assert!(!peer.got[..LEN as usize].contains(&9), "bytes of the next owner of the pages");
    }

    #[test]
    fn a_write_that_waits_is_sent_once_the_peer_permits_it() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 0);
        transport.post(PeerId(1), write_of(1, None)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while transport.ways.values().all(|way| way.clock.is_none()) || !transport.stirred.is_empty() {
            assert!(Instant::now() < deadline);
            assert_eq!(peer.next_request(), None);
            transport.poll(Time::ZERO, &mut Vec::new());
        }
        transport.permit(PeerId(1), Time::MAX);
        assert_eq!(transport.wait(), TransportWait::Now);
        let asked = asked(&mut peer, &mut transport);
        assert!(matches!(asked, Request::Write(..)), "{asked:?}");
    }

    #[test]
    fn posts_beyond_their_bound_are_refused_until_the_ends_of_others_are_told() {
        let peer = Peer::new();
        let (mut transport, _arena) = reader_with(&peer, 0, |config| config.max_posts = 2);
        for (id, wanted) in [(1, Ok(())), (2, Ok(())), (3, Err(TransportError::WouldBlock))] {
            assert_eq!(transport.post(PeerId(1), write_of(id, None)), wanted);
        }
        transport.cancel(PostId(1));
        assert_eq!(transport.post(PeerId(1), write_of(3, None)), Err(TransportError::WouldBlock));
        transport.poll(Time::ZERO, &mut Vec::new());
        assert_eq!(transport.post(PeerId(1), write_of(3, None)), Ok(()));
    }

    #[test]
    fn frames_for_a_peer_that_reads_nothing_are_refused_beyond_their_bound() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 0);
        opened(&mut peer, &mut transport);
        let (mut refused, frame) = (0, Bytes::from(vec![7; 64 << 10]));
        for _ in 0..1000 {
            refused += u32::from(transport.send(PeerId(1), frame.clone()) == Err(TransportError::WouldBlock));
            transport.poll(Time::ZERO, &mut Vec::new());
            let kept: usize = transport.connections.values().map(|it| it.outbound.encoded()).sum();
            assert!(kept <= transport.config.outbound_bytes, "{kept} bytes are kept");
        }
        assert!(refused > 0, "64 MB were taken");
    }

    #[test]
    fn frames_for_a_peer_whose_way_is_not_open_yet_are_refused_beyond_their_bound() {
        let peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 0);
        let taken = fill_with_frames(&mut transport, &mut Vec::new());
        assert!(
            taken > 0 && taken * (64 << 10) <= transport.config.outbound_bytes,
            "{taken} frames are kept"
        );
    }

    /// A transport whose post 1 is in place at the peer, and has a notify frame of 20 KiB for which there is no room beside
    /// frames that the peer has not read; for a shorter frame there is.
    fn parked(peer: &mut Peer) -> (TcpTransport, Arena) {
        let (mut transport, arena) = reader(peer, 0);
        transport.config.outbound_bytes = 1 << 20;
        transport.permit(PeerId(1), Time::MAX);
        transport.post(PeerId(1), write_of(1, Some(Bytes::from(vec![NOTIFY; 20 << 10])))).unwrap();
        let Request::Write(Asked { number, .. }, 0) = asked(peer, &mut transport) else { panic!("no write") };
        let mut events = Vec::new();
        fill_with_frames(&mut transport, &mut events);
        peer.answer(number, Verdict::Done);
        let deadline = Instant::now() + Duration::from_secs(60);
        let way = *transport.ways.keys().next().unwrap();
        while transport.ways.get(&way).unwrap().parked.is_empty() {
            assert!(Instant::now() < deadline);
            transport.config.outbound_bytes = transport.frame_bytes(way) + (10 << 10);
            transport.poll(Time::ZERO, &mut events);
        }
        assert_eq!(events, []);
        (transport, arena)
    }

    /// The first byte of the notify frame, and of the frame that is sent last.
    const NOTIFY: u8 = 5;
    const LAST: u8 = 6;

    /// Sends another frame as soon as it is taken, and lets the peer read up to that. Returns the first byte of each frame.
    fn frames_read(
        peer: &mut Peer,
        transport: &mut TcpTransport,
        events: &mut Vec<TransportEvent>,
    ) -> Vec<u8> {
        let (mut frames, mut is_sent, mut is_begun) = (Vec::new(), false, false);
        let deadline = Instant::now() + Duration::from_secs(60);
        while frames.last() != Some(&LAST) {
            assert!(Instant::now() < deadline, "{} frames", frames.len());
            is_sent = is_sent || transport.send(PeerId(1), Bytes::from_static(&[LAST; 10])).is_ok();
            transport.poll(Time::ZERO, events);
            let kept: usize = transport.connections.values().map(|it| it.outbound.encoded()).sum();
            assert!(kept <= transport.config.outbound_bytes, "{kept} bytes are kept");
            if !is_begun {
                // The pages of the write, and the byte after them.
                peer.fill();
                is_begun = peer.got.len() >= 101;
                drop(peer.got.split_to(if is_begun { 101 } else { 0 }));
                continue;
            }
            while let Some(request) = peer.next_request() {
                let Request::Frame(frame) = request else { panic!("{request:?}") };
                frames.push(frame[0]);
            }
        }
        frames
    }

    #[test]
    fn a_notify_frame_that_waits_for_room_goes_before_all_later_frames() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = parked(&mut peer);
        let later = Bytes::from_static(b"later");
        assert_eq!(transport.send(PeerId(1), later), Err(TransportError::WouldBlock));
        let mut events = Vec::new();
        let frames = frames_read(&mut peer, &mut transport, &mut events);
        assert_eq!(events, [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
        assert!(frames.ends_with(&[NOTIFY, LAST]), "{frames:?}");
    }

    #[test]
    fn a_post_that_is_cancelled_while_its_notify_frame_waits_for_room_sends_none() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = parked(&mut peer);
        transport.cancel(PostId(1));
        let mut events = Vec::new();
        let frames = frames_read(&mut peer, &mut transport, &mut events);
        let result = Err(TransportError::Cancelled);
        assert_eq!(events, [TransportEvent::Posted { post: PostId(1), result }]);
        assert!(frames.len() > 1 && !frames.contains(&NOTIFY), "{frames:?}");
    }
}
