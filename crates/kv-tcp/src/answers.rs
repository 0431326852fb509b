//! What peers say about the slices of this side's posts, and the pages that they send.

use kv_core::{Op, TransportError};
use kv_host::{OfWay, TransferId, clock};

use crate::connection::Connection;
use crate::inbound::{Landing, Received};
use crate::message::{RANGE, Reply, Verdict};
use crate::sockets::Over;
use crate::transport::TcpTransport;
use crate::way::{Flight, Stage, WayId};

/// The smallest window of a lane, in bytes.
const LEAST_WINDOW: u64 = 64 << 10;
/// A lane may have more bytes under way while slices take less than one part in so many of their time.
const QUICK: u32 = 8;

impl TcpTransport {
    /// Reads a share of what a peer has answered.
    pub(crate) fn read_lane(
        &mut self,
        connection: &mut Connection,
        way: WayId,
        lane: usize,
    ) -> Result<(), Over> {
        let mut left = connection.share();
        let mut more = true;
        loop {
            self.take_replies(connection, way, lane)?;
            if !more || left == 0 {
                return Ok(());
            }
            self.quiet(connection);
            match self.receive(connection, left)? {
                Received::Bytes(count) => left = left.saturating_sub(count),
                Received::Last(_) => more = false,
                Received::Nothing => return Ok(()),
                Received::End => return Err(Over::Closed),
            }
        }
    }

    fn take_replies(&mut self, connection: &mut Connection, way: WayId, lane: usize) -> Result<(), Over> {
        loop {
            if connection.inbound.landing.is_some() {
                self.quiet(connection);
                if !connection.inbound.settle(self.given.regions())? {
                    return Ok(());
                }
                connection.inbound.landing = None;
                connection.reading = None;
                self.front(way, lane)?.landed = true;
                continue;
            }
            match Reply::next(&mut connection.inbound.bytes)? {
                None => return Ok(()),
                Some(Reply::Bytes { number, bytes }) => {
                    self.begin_landing(connection, (way, lane), number, bytes)?
                }
                Some(Reply::Answer { number, verdict, clock: theirs }) => {
                    let (begun, now) = (self.front(way, lane)?.begun, clock::now());
                    if let Some(clock) = self.ways.get_mut(&way).and_then(|way| way.clock.as_mut()) {
                        clock.heard(theirs, begun, now);
                    }
                    self.on_answer(way, lane, number, verdict)?;
                }
            }
        }
    }

    /// The slice that is answered next on a lane.
    fn front(&mut self, way: WayId, lane: usize) -> Result<&mut Flight, Over> {
        let lane = self.ways.get_mut(&way).and_then(|way| way.lanes.get_mut(lane)).ok_or(Over::Failed)?;
        lane.flights.front_mut().ok_or(Over::Broken)
    }

    /// Throws away what comes for a post that was given up.
    fn quiet(&self, connection: &mut Connection) {
        let given_up = |id: TransferId| self.posts.get(id).is_none_or(|transfer| transfer.failed.is_some());
        if let Some(landing) = &mut connection.inbound.landing
            && connection.reading.is_none_or(given_up)
        {
            landing.discard();
        }
    }

    fn begin_landing(
        &mut self,
        connection: &mut Connection,
        (way, lane): (WayId, usize),
        number: u32,
        bytes: u64,
    ) -> Result<(), Over> {
        let flight = self.front(way, lane)?;
        let expected = flight.number == number && flight.op == Op::Read && !flight.landed;
        if !expected || flight.slice.bytes != bytes {
            return Err(Over::Broken);
        }
        let (id, slice) = (flight.transfer, flight.slice);
        let transfer = id.and_then(|id| self.posts.get(id));
        let ranges = transfer.map(|transfer| transfer.ranges(slice).map(|(here, _)| here).collect());
        connection.inbound.landing = Some(Landing::new(ranges.unwrap_or_default(), bytes));
        connection.reading = id;
        Ok(())
    }

    fn on_answer(&mut self, id: WayId, lane: usize, number: u32, verdict: Verdict) -> Result<(), Over> {
        let front = self.front(id, lane)?;
        let fits = match (front.op, verdict) {
            (Op::Read, Verdict::Done) => front.landed,
            // Only writes need a right. The search for the writes that end would come with each such answer.
            (Op::Read, Verdict::Revoked) => false,
            _ => true,
        };
        if front.number != number || !fits {
            return Err(Over::Broken);
        }
        let slice_time = self.config.slice_time;
        let way = self.ways.get_mut(&id).ok_or(Over::Failed)?;
        let lane = way.lanes.get_mut(lane).ok_or(Over::Failed)?;
        let Some(flight) = lane.flights.pop_front() else { return Err(Over::Broken) };
        lane.bytes -= flight.slice.bytes + (RANGE * flight.ranges) as u64;
        match verdict {
            Verdict::Done => {
                let now = clock::now();
                let took = now.since(flight.begun);
                lane.latency.note(took, now);
                if took < slice_time / QUICK {
                    lane.window = (lane.window + flight.slice.bytes).min(self.config.window_bytes as u64);
                }
            }
            Verdict::Late => {
                self.stats.late += 1;
                lane.window = (lane.window / 2).max(LEAST_WINDOW.min(self.config.window_bytes as u64));
            }
            Verdict::Revoked => way.revoked = true,
        }
        self.stirred.insert(id);
        if matches!(way.stage, Stage::Leaving { .. }) {
            self.look_at(id, self.now);
        }
        if let Some(transfer) = flight.transfer {
            self.answered(transfer, flight, verdict);
        }
        if verdict == Verdict::Revoked {
            self.writes_revoked(id);
        }
        Ok(())
    }

    fn answered(&mut self, id: TransferId, flight: Flight, verdict: Verdict) {
        let Some(transfer) = self.posts.get_mut(id) else { return };
        transfer.under_way -= 1;
        match verdict {
            Verdict::Done => {}
            Verdict::Revoked => {
                transfer.failed = Some(transfer.failed.take().unwrap_or(TransportError::Revoked))
            }
            Verdict::Late => {
                transfer.notify = flight.notify.or(transfer.notify.take());
                // A post with slices to be cut has its place in the line.
                let waits = transfer.has_more();
                transfer.again(flight.slice);
                let (way, op) = (transfer.way, transfer.op);
                if !waits
                    && transfer.has_more()
                    && let Some(way) = self.ways.get_mut(&way)
                {
                    way.turns.put_back(id, op);
                }
            }
        }
        self.settle(id);
    }

    /// Ends a post if nothing of it is under way and nothing more is to come.
    pub(crate) fn settle(&mut self, id: TransferId) {
        let Some(transfer) = self.posts.get_mut(id).filter(|transfer| transfer.is_over()) else { return };
        match (transfer.failed.take(), transfer.notify.take()) {
            (Some(error), _) => self.posts.end(id, Err(error)),
            (None, None) => self.posts.end(id, Ok(())),
            (None, Some(notify)) => {
                if let Some(way) = self.ways.get_mut(&transfer.way) {
                    way.parked.push_back((id, notify));
                }
            }
        }
    }

    /// The peer has revoked the right to write: no write of this side can succeed any more.
    fn writes_revoked(&mut self, id: WayId) {
        for transfer in self.posts.of_way(id) {
            if self
                .posts
                .get(transfer)
                .is_some_and(|transfer| transfer.op == Op::Write && transfer.has_more())
            {
                self.give_up(transfer, TransportError::Revoked);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::{Duration, Instant};

    use bytes::Bytes;
    use kv_core::{PeerId, PostId, Time, Transport, TransportEvent};

    use super::*;
    use crate::message::{Asked, Request};
    use crate::scripted::{LEN, Peer, asked, reader, write_of};

    #[test]
    fn a_reply_that_was_not_asked_for_ends_the_way_and_touches_no_memory() {
        let clock = clock::now();
        let lies: [fn(&Asked, Time) -> Reply; 4] = [
            |asked, clock| Reply::Answer { number: asked.number + 1, verdict: Verdict::Late, clock },
            |asked, clock| Reply::Answer { number: asked.number, verdict: Verdict::Done, clock },
            |asked, _| Reply::Bytes { number: asked.number + 1, bytes: asked.bytes },
            |asked, _| Reply::Bytes { number: asked.number, bytes: asked.bytes - 1 },
        ];
        for (number, lie) in lies.into_iter().enumerate() {
            let mut peer = Peer::new();
            let (mut transport, arena) = reader(&peer, 1);
            transport.config.slice_time = Duration::from_millis(200);
            let (mut told, mut events) = (false, Vec::new());
            let deadline = Instant::now() + Duration::from_secs(20);
            while events.is_empty() {
                assert!(Instant::now() < deadline, "lie {number} is believed");
                transport.poll(Time::ZERO, &mut events);
                if !told && let Some(asked) = peer.next() {
                    let stream = peer.stream.as_mut().unwrap();
                    let lie = lie(&asked, clock);
                    stream.write_all(&lie.encode()).unwrap();
                    if matches!(lie, Reply::Bytes { .. }) {
                        stream.write_all(&[7; 100]).unwrap();
                    }
                    told = true;
                }
            }
            let result = Err(TransportError::PeerGone);
            assert_eq!(events[0], TransportEvent::Posted { post: PostId(0), result }, "lie {number}");
            assert_eq!(transport.stats().broken, 1, "lie {number}");
            let mut bytes = vec![0; LEN as usize];
            arena.read(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0), "lie {number}");
        }
    }

    #[test]
    fn bytes_of_a_read_that_come_after_its_post_has_ended_are_thrown_away() {
        let mut peer = Peer::new();
        let (mut transport, arena) = reader(&peer, 1);
        transport.config.slice_time = Duration::from_millis(200);
        let memory = || {
            let mut bytes = vec![0; LEN as usize];
            arena.read(0, &mut bytes).unwrap();
            bytes
        };
        let (mut asked, mut events) = (None, Vec::new());
        let deadline = Instant::now() + Duration::from_secs(60);
        while events.is_empty() {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut events);
            if asked.is_none() {
                asked = peer.next();
                let (Some(Asked { number, bytes, .. }), Some(stream)) = (&asked, &mut peer.stream) else {
                    continue;
                };
                stream.write_all(&Reply::Bytes { number: *number, bytes: *bytes }.encode()).unwrap();
                stream.write_all(&vec![1; *bytes as usize / 2]).unwrap();
            }
            if memory().contains(&1) {
                transport.cancel(PostId(0));
            }
        }
        assert_eq!(
            events,
            [TransportEvent::Posted { post: PostId(0), result: Err(TransportError::Cancelled) }]
        );
        let (before, asked) = (memory(), asked.unwrap());
        let stream = peer.stream.as_mut().unwrap();
        stream.write_all(&vec![2; (asked.bytes - asked.bytes / 2) as usize]).unwrap();
        peer.answer(asked.number, Verdict::Done);
        let until = Instant::now() + Duration::from_millis(100);
        while Instant::now() < until {
            transport.poll(Time::ZERO, &mut events);
        }
        assert!(memory() == before, "bytes have come after the end of their post");
        assert_eq!((transport.stats().broken, events.len()), (0, 1), "the connection stays in order");
    }

    #[test]
    fn an_answer_that_begins_after_its_read_has_ended_costs_no_way() {
        let mut peer = Peer::new();
        let (mut transport, arena) = reader(&peer, 1);
        transport.config.slice_time = Duration::from_millis(200);
        let Request::Read(Asked { number, bytes, .. }) = asked(&mut peer, &mut transport) else {
            panic!("no read")
        };
        transport.cancel(PostId(0));
        let (mut events, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        while events.is_empty() {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut events);
        }
        let mut answer = Reply::Bytes { number, bytes }.encode().to_vec();
        answer.extend(vec![2; bytes as usize]);
        peer.stream.as_mut().unwrap().write_all(&answer).unwrap();
        peer.answer(number, Verdict::Done);
        let until = Instant::now() + Duration::from_millis(100);
        while Instant::now() < until {
            transport.poll(Time::ZERO, &mut events);
        }
        let mut memory = vec![1; LEN as usize];
        arena.read(0, &mut memory).unwrap();
        assert!(memory.iter().all(|byte| *byte == 0));
        assert_eq!((transport.stats().broken, events.len()), (0, 1), "{events:?}");
    }

    #[test]
    fn an_answer_that_revokes_the_right_to_read_ends_the_way_for_there_is_none() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 1);
        let (mut answered, mut events) = (None, Vec::new());
        let deadline = Instant::now() + Duration::from_secs(60);
        while events.is_empty() {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut events);
            if answered.is_none()
                && let Some(asked) = peer.next()
            {
                peer.answer(asked.number, Verdict::Revoked);
                answered = Some(asked.until);
            }
        }
        assert!(answered < Some(clock::now()), "until then, the peer may touch memory");
        let result = Err(TransportError::PeerGone);
        assert_eq!(events[0], TransportEvent::Posted { post: PostId(0), result });
        assert_eq!(transport.stats().broken, 1);
    }

    #[test]
    fn the_notify_frame_of_a_slice_that_came_too_late_follows_the_slice_that_comes_in_time() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 0);
        transport.permit(PeerId(1), Time::MAX);
        transport.post(PeerId(1), write_of(1, Some(Bytes::from_static(b"notify")))).unwrap();
        let (mut seen, mut events) = (Vec::new(), Vec::new());
        let deadline = Instant::now() + Duration::from_secs(60);
        while events.is_empty() || seen.len() < 3 {
            assert!(Instant::now() < deadline, "{seen:?}, {events:?}");
            transport.poll(Time::ZERO, &mut events);
            match peer.next_request() {
                Some(Request::Write(asked, notify)) => {
                    let len = asked.bytes as usize + 1 + notify;
                    while peer.got.len() < len {
                        transport.poll(Time::ZERO, &mut events);
                        peer.fill();
                    }
                    drop(peer.got.split_to(len));
                    let verdict = if seen.is_empty() { Verdict::Late } else { Verdict::Done };
                    peer.answer(asked.number, verdict);
                    seen.push((asked.bytes, notify));
                }
                Some(Request::Frame(frame)) => {
                    assert_eq!(frame, "notify");
                    seen.push((0, frame.len()));
                }
                other => assert_eq!(other, None),
            }
        }
        // The first slice carries the frame itself.
        assert_eq!(seen, [(100, 6), (100, 0), (0, 6)]);
        assert_eq!(events, [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
    }

    #[test]
    fn slices_that_come_too_late_again_and_again_give_their_post_no_further_turns() {
        const POSTS: u64 = 4;
        let mut peer = Peer::new();
        let (mut transport, arena) = reader(&peer, POSTS);
        let (mut late, mut events) = (0, Vec::new());
        let deadline = Instant::now() + Duration::from_secs(60);
        while (events.len() as u64) < POSTS {
            assert!(Instant::now() < deadline, "{late} late slices, {events:?}");
            transport.poll(Time::ZERO, &mut events);
            let line = transport.ways.values().next().unwrap().turns.len() as u64;
            assert!(line <= POSTS, "{line} turns wait for {POSTS} posts after {late} late slices");
            while let Some(Asked { number, ranges, bytes, .. }) = peer.next() {
                if late < 3000 {
                    late += 1;
                    peer.answer(number, Verdict::Late);
                    continue;
                }
                let stream = peer.stream.as_mut().unwrap();
                stream.write_all(&Reply::Bytes { number, bytes }.encode()).unwrap();
                for range in ranges {
                    let pages: Vec<u8> =
                        (range.offset..).take(range.len as usize).map(|at| (at % 251) as u8).collect();
                    stream.write_all(&pages).unwrap();
                }
                peer.answer(number, Verdict::Done);
            }
        }
        events.sort_by_key(|event| format!("{event:?}"));
        let wanted = (0..POSTS).map(|post| TransportEvent::Posted { post: PostId(post), result: Ok(()) });
        assert_eq!(events, wanted.collect::<Vec<_>>());
        let mut bytes = vec![0; LEN as usize];
        arena.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == (at % 251) as u8));
    }

    #[test]
    fn each_slice_that_comes_too_late_halves_what_may_be_under_way_down_to_a_least_window() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 1);
        let window = |transport: &TcpTransport| transport.ways.values().next().unwrap().lanes[0].window;
        let mut wanted = window(&transport);
        let deadline = Instant::now() + Duration::from_secs(60);
        for late in 1..=10 {
            let Request::Read(asked) = asked(&mut peer, &mut transport) else { panic!("no read") };
            peer.answer(asked.number, Verdict::Late);
            while transport.stats().late < late {
                assert!(Instant::now() < deadline);
                transport.poll(Time::ZERO, &mut Vec::new());
            }
            wanted = (wanted / 2).max(LEAST_WINDOW);
            assert_eq!(window(&transport), wanted, "after {late} late slices");
        }
        assert_eq!(wanted, LEAST_WINDOW);
    }

    #[test]
    fn cancelled_writes_leave_nothing_behind_though_the_peer_permits_none() {
        let peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 0);
        kv_conformance::cancel_many(&mut transport, PeerId(1));
        let turns = transport.ways.values().next().unwrap().turns.len();
        assert!(turns < 100, "{turns} turns wait, and no post");
    }

    #[test]
    fn bytes_that_come_for_a_write_end_the_way_and_touch_no_memory() {
        let mut peer = Peer::new();
        let (mut transport, arena) = reader(&peer, 0);
        transport.config.slice_time = Duration::from_millis(200);
        transport.permit(PeerId(1), Time::MAX);
        transport.post(PeerId(1), write_of(1, None)).unwrap();
        let (mut told, mut events) = (false, Vec::new());
        let deadline = Instant::now() + Duration::from_secs(20);
        while events.is_empty() {
            assert!(Instant::now() < deadline, "the bytes are taken");
            transport.poll(Time::ZERO, &mut events);
            if !told && let Some(Request::Write(asked, _)) = peer.next_request() {
                let stream = peer.stream.as_mut().unwrap();
                let bytes = Reply::Bytes { number: asked.number, bytes: asked.bytes };
                stream.write_all(&bytes.encode()).unwrap();
                stream.write_all(&[7; 100]).unwrap();
                told = true;
            }
        }
        let result = Err(TransportError::PeerGone);
        assert_eq!(events[0], TransportEvent::Posted { post: PostId(1), result });
        assert_eq!(transport.stats().broken, 1);
        let mut bytes = vec![0; LEN as usize];
        arena.read(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn writes_that_wait_when_the_peer_revokes_the_right_end_and_so_do_later_ones() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 0);
        transport.permit(PeerId(1), Time::MAX);
        transport.post(PeerId(1), write_of(1, None)).unwrap();
        let (mut answered, mut events) = (false, Vec::new());
        let deadline = Instant::now() + Duration::from_secs(20);
        while events.len() < 3 {
            assert!(Instant::now() < deadline, "{events:?}");
            transport.poll(Time::ZERO, &mut events);
            if !answered && let Some(Request::Write(asked, _)) = peer.next_request() {
                // The permission has ended: the next write waits for another one.
                transport.permit(PeerId(1), Time::ZERO);
                transport.post(PeerId(1), write_of(2, None)).unwrap();
                transport.poll(Time::ZERO, &mut events);
                assert_eq!(events, []);
                peer.answer(asked.number, Verdict::Revoked);
                answered = true;
            }
            if events.len() == 2 {
                transport.post(PeerId(1), write_of(3, None)).unwrap();
                transport.poll(Time::ZERO, &mut events);
            }
        }
        let revoked = |id| TransportEvent::Posted { post: PostId(id), result: Err(TransportError::Revoked) };
        assert_eq!(events, [revoked(1), revoked(2), revoked(3)]);
    }
}
