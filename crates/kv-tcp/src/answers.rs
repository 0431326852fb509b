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
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use bytes::{Bytes, BytesMut};
    use kv_core::{Descriptor, PeerId, Post, PostId, Region, RegionRole, Time, Transport, TransportEvent};
    use kv_host::{Arena, Token};

    use super::*;
    use crate::config::TcpConfig;
    use crate::hello::{HELLO, Hello, Welcome};
    use crate::message::{Asked, Request};
    use crate::metadata::{Identity, Metadata};

    const LEN: u64 = 1 << 20;

    /// A peer that answers as the test likes: what it says it is, and its connection once a transport has dialed.
    struct Peer {
        metadata: Metadata,
        listener: TcpListener,
        stream: Option<TcpStream>,
        got: BytesMut,
        /// By how much its clock is ahead of this host's.
        ahead: Duration,
        /// What it says in place of the truth when it welcomes a transport.
        welcomes: fn(Welcome) -> Welcome,
    }

    impl Peer {
        fn new() -> Peer {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.set_nonblocking(true).unwrap();
            let addresses = vec![listener.local_addr().unwrap()];
            let metadata =
                Metadata { token: Token::random().unwrap(), addresses, regions: vec![LEN], tls: false };
            let (got, ahead) = (BytesMut::new(), Duration::ZERO);
            Peer { metadata, listener, stream: None, got, ahead, welcomes: |welcome| welcome }
        }

        /// The next slice to read that the transport asks for, if one has come.
        fn next(&mut self) -> Option<Asked> {
            self.next_request().map(|request| match request {
                Request::Read(asked) => asked,
                other => panic!("{other:?}"),
            })
        }

        /// What the transport asks for next, if it has come.
        fn next_request(&mut self) -> Option<Request> {
            self.fill();
            Request::next(&mut self.got, |_| Some(LEN)).unwrap()
        }

        fn clock(&self) -> Time {
            clock::now() + self.ahead
        }

        /// Takes what has come, and answers the hello.
        fn fill(&mut self) {
            let now = self.clock();
            let Some(stream) = &mut self.stream else {
                let Ok((stream, _)) = self.listener.accept() else { return };
                stream.set_nonblocking(true).unwrap();
                self.stream = Some(stream);
                return;
            };
            let mut bytes = [0; 4096];
            match stream.read(&mut bytes) {
                Ok(count) => self.got.extend_from_slice(&bytes[..count]),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            if let Some(hello) = self.got.first_chunk::<HELLO>().and_then(Hello::decode) {
                let from = Identity::of(self.metadata.token, &self.metadata.encode().unwrap());
                let welcome = (self.welcomes)(Welcome { from, way: hello.way, clock: now });
                stream.write_all(&welcome.encode()).unwrap();
                let _ = self.got.split_to(HELLO);
            }
        }

        fn answer(&mut self, number: u32, verdict: Verdict) {
            let answer = Reply::Answer { number, verdict, clock: self.clock() };
            self.stream.as_mut().unwrap().write_all(&answer.encode()).unwrap();
        }
    }

    /// A transport with one connection to the peer and a region of [`LEN`] bytes, which asks for all bytes of the
    /// peer's region in so many posts.
    fn reader(peer: &Peer, posts: u64) -> (TcpTransport, Arena) {
        reader_with(peer, posts, |_| {})
    }

    /// The same, with a configuration that is changed.
    fn reader_with(peer: &Peer, posts: u64, change: impl FnOnce(&mut TcpConfig)) -> (TcpTransport, Arena) {
        let config = TcpConfig::new("127.0.0.1:0".parse().unwrap());
        let config = config.with(|config| (config.data_connections, config.slice_bytes) = (0, 4096));
        let config = config.with(change);
        let (mut transport, arena) = (TcpTransport::new(config).unwrap(), Arena::new(LEN as usize).unwrap());
        transport.add_memory(&arena).unwrap();
        transport.register(&Region::dram(RegionRole::Kv, arena.addr(), LEN, 1)).unwrap();
        transport.connect(PeerId(1), &peer.metadata.encode().unwrap()).unwrap();
        let len = LEN / posts.max(1);
        for post in 0..posts {
            let (local_offset, remote_offset) = (len * post, len * post);
            let descriptor =
                Descriptor { local_region: 0, remote_region: 0, local_offset, remote_offset, len };
            let post = Post { id: PostId(post), op: Op::Read, descriptors: vec![descriptor], notify: None };
            transport.post(PeerId(1), post).unwrap();
        }
        (transport, arena)
    }

    #[test]
    fn slices_say_until_when_they_may_touch_memory_by_the_clock_of_their_peer() {
        let hour = Duration::from_secs(3600);
        let mut peer = Peer { ahead: hour, ..Peer::new() };
        let (mut transport, _arena) = reader(&peer, 1);
        let slice_time = transport.config.slice_time;
        let deadline = Instant::now() + Duration::from_secs(60);
        for number in 1..=20 {
            let asked = loop {
                assert!(Instant::now() < deadline);
                transport.poll(Time::ZERO, &mut Vec::new());
                if let Some(asked) = peer.next() {
                    break asked;
                }
            };
            let now = peer.clock();
            let until = asked.until;
            assert!(until > now && until <= now + slice_time, "slice {number}: {until:?}, and it is {now:?}");
            peer.answer(asked.number, Verdict::Late);
        }
    }

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
    fn frames_for_a_peer_that_reads_nothing_are_refused_beyond_their_bound() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 0);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !transport.ways.values().any(|way| matches!(way.stage, Stage::Open)) {
            assert!(Instant::now() < deadline);
            peer.fill();
            transport.poll(Time::ZERO, &mut Vec::new());
        }
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
        let descriptor =
            Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 100 };
        let notify = Some(Bytes::from_static(b"notify"));
        let post = Post { id: PostId(1), op: Op::Write, descriptors: vec![descriptor], notify };
        transport.permit(PeerId(1), Time::MAX);
        transport.post(PeerId(1), post).unwrap();
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
    fn cancelled_writes_leave_nothing_behind_though_the_peer_permits_none() {
        let peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 0);
        kv_conformance::cancel_many(&mut transport, PeerId(1));
        let turns = transport.ways.values().next().unwrap().turns.len();
        assert!(turns < 100, "{turns} turns wait, and no post");
    }

    #[test]
    fn a_peer_that_hangs_up_and_answers_at_its_address_is_lost_and_not_dead() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 0);
        let (mut hung_up, mut events) = (false, Vec::new());
        let deadline = Instant::now() + Duration::from_secs(60);
        while events.is_empty() {
            assert!(Instant::now() < deadline);
            peer.fill();
            transport.poll(Time::ZERO, &mut events);
            let open = transport.ways.values().any(|way| matches!(way.stage, Stage::Open));
            if open && !hung_up {
                (peer.stream, hung_up) = (None, true);
            }
        }
        assert!(hung_up);
        assert_eq!(events, [TransportEvent::PeerGone { peer: PeerId(1), end: kv_core::WayEnd::Lost }]);
    }

    /// A write of the first 100 bytes.
    fn write_of(id: u64, notify: Option<Bytes>) -> Post {
        let descriptor =
            Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 100 };
        Post { id: PostId(id), op: Op::Write, descriptors: vec![descriptor], notify }
    }

    /// Sends frames that the peer does not read, until none fits any more, be it as short as this. Returns how many.
    fn fill_with_frames(
        transport: &mut TcpTransport,
        shortest: usize,
        events: &mut Vec<TransportEvent>,
    ) -> usize {
        let mut sent = 0;
        for len in [64 << 10, shortest] {
            let frame = Bytes::from(vec![7; len]);
            let mut refused = 0;
            while refused < 100 {
                match transport.send(PeerId(1), frame.clone()) {
                    Ok(()) => sent += 1,
                    Err(error) => {
                        assert_eq!(error, TransportError::WouldBlock);
                        refused += 1;
                    }
                }
                transport.poll(Time::ZERO, events);
            }
        }
        sent
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
    fn a_welcome_of_another_way_or_with_other_metadata_opens_no_way() {
        let lies: [fn(Welcome) -> Welcome; 2] = [
            |welcome| Welcome { way: Token::from_bytes([7; Token::LEN]), ..welcome },
            |welcome| Welcome {
                from: Identity::of(welcome.from.token, b"another table of regions"),
                ..welcome
            },
        ];
        for (number, welcomes) in lies.into_iter().enumerate() {
            let mut peer = Peer { welcomes, ..Peer::new() };
            let (mut transport, _arena) =
                reader_with(&peer, 1, |config| config.handshake_timeout = Duration::from_millis(300));
            let mut events = Vec::new();
            let deadline = Instant::now() + Duration::from_secs(20);
            while events.len() < 2 {
                assert!(Instant::now() < deadline, "lie {number}: {events:?}");
                transport.poll(Time::ZERO, &mut events);
                let is_open = transport.ways.values().any(|way| matches!(way.stage, Stage::Open));
                assert!(!is_open, "lie {number} is believed");
                peer.fill();
            }
            let result = Err(TransportError::PeerGone);
            assert_eq!(events[0], TransportEvent::Posted { post: PostId(0), result }, "lie {number}");
        }
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
    fn frames_for_a_peer_whose_way_is_not_open_yet_are_refused_beyond_their_bound() {
        let peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 0);
        let taken = fill_with_frames(&mut transport, 64 << 10, &mut Vec::new());
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
        transport.post(PeerId(1), write_of(1, Some(Bytes::from(vec![5; 20 << 10])))).unwrap();
        let (mut number, mut events) = (None, Vec::new());
        let deadline = Instant::now() + Duration::from_secs(60);
        while number.is_none() {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut events);
            number = peer.next_request().map(|request| match request {
                Request::Write(asked, 0) => asked.number,
                other => panic!("{other:?}"),
            });
        }
        fill_with_frames(&mut transport, 8 << 10, &mut events);
        peer.answer(number.unwrap(), Verdict::Done);
        while transport.ways.values().all(|way| way.parked.is_empty()) {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut events);
        }
        assert_eq!(events, []);
        (transport, arena)
    }

    /// Lets the peer read until the transport has nothing left to write. Returns the first byte of each frame.
    fn frames_read(
        peer: &mut Peer,
        transport: &mut TcpTransport,
        events: &mut Vec<TransportEvent>,
    ) -> Vec<u8> {
        let (mut frames, mut idle, mut is_begun) = (Vec::new(), 0, false);
        let deadline = Instant::now() + Duration::from_secs(60);
        while idle < 100 {
            assert!(Instant::now() < deadline, "{} frames", frames.len());
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
            idle += 1;
            while let Some(request) = peer.next_request() {
                let Request::Frame(frame) = request else { panic!("{request:?}") };
                frames.push(frame[0]);
                idle = 0;
            }
            if !peer.got.is_empty() || kept > 0 {
                idle = 0;
            }
        }
        frames
    }

    #[test]
    fn a_notify_frame_that_waits_for_room_goes_before_all_later_frames() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = parked(&mut peer);
        let way = *transport.ways.keys().next().unwrap();
        let later = Bytes::from_static(b"later");
        assert!(
            transport.frame_bytes(way) + 100 < transport.config.outbound_bytes,
            "there is no room at all"
        );
        assert_eq!(transport.send(PeerId(1), later.clone()), Err(TransportError::WouldBlock));
        let mut events = Vec::new();
        let frames = frames_read(&mut peer, &mut transport, &mut events);
        assert_eq!(events, [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
        assert_eq!(frames.iter().position(|first| *first == 5), Some(frames.len() - 1));
        transport.send(PeerId(1), later).unwrap();
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
        assert!(!frames.is_empty() && frames.iter().all(|first| *first == 7));
    }

    #[test]
    fn frames_that_were_taken_before_a_disconnect_arrive_and_then_the_way_goes() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader_with(&peer, 0, |config| {
            // The way goes because the frames are written, and not because the time is over.
            config.slice_time = Duration::from_secs(60);
            config.outbound_bytes = 2 << 20;
        });
        let deadline = Instant::now() + Duration::from_secs(30);
        while !transport.ways.values().any(|way| matches!(way.stage, Stage::Open)) {
            assert!(Instant::now() < deadline);
            peer.fill();
            transport.poll(Time::ZERO, &mut Vec::new());
        }
        let sent = fill_with_frames(&mut transport, 64 << 10, &mut Vec::new());
        transport.disconnect(PeerId(1));
        let mut got = 0;
        while got < sent || !transport.ways.is_empty() {
            assert!(Instant::now() < deadline, "{got} of {sent} frames, {} ways", transport.ways.len());
            transport.poll(Time::ZERO, &mut Vec::new());
            while let Some(request) = peer.next_request() {
                assert!(matches!(request, Request::Frame(_)), "{request:?}");
                got += 1;
            }
        }
        assert!(transport.connections.is_empty());
    }

    #[test]
    fn posts_to_a_peer_that_is_left_while_its_death_is_asked_for_end_when_they_are_quiet() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 1);
        transport.config.slice_time = Duration::from_millis(300);
        let (mut until, mut events) = (None, Vec::new());
        let deadline = Instant::now() + Duration::from_secs(60);
        while events.is_empty() {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut events);
            if until.is_none() {
                until = peer.next().map(|asked| asked.until);
            } else if peer.stream.take().is_some() {
                // The peer hangs up, and its address neither answers nor refuses.
                while !transport.ways.values().any(|way| matches!(way.stage, Stage::Proving(_))) {
                    assert!(Instant::now() < deadline);
                    transport.poll(Time::ZERO, &mut events);
                }
                transport.disconnect(PeerId(1));
            }
        }
        assert!(until.unwrap() <= clock::now(), "until then, the peer may touch memory");
        let result = Err(TransportError::PeerGone);
        assert_eq!(events, [TransportEvent::Posted { post: PostId(0), result }]);
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

    #[test]
    fn a_write_that_waits_is_sent_once_the_peer_permits_it_though_nothing_else_happens() {
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
        let asked = loop {
            assert!(Instant::now() < deadline, "the write waits");
            transport.poll(Time::ZERO, &mut Vec::new());
            if let Some(request) = peer.next_request() {
                break request;
            }
        };
        assert!(matches!(asked, Request::Write(..)), "{asked:?}");
    }

    #[test]
    fn frames_that_were_taken_before_the_transport_is_dropped_are_written_as_the_last_thing() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 0);
        let deadline = Instant::now() + Duration::from_secs(60);
        while transport.ways.values().all(|way| way.clock.is_none()) {
            assert!(Instant::now() < deadline);
            peer.fill();
            transport.poll(Time::ZERO, &mut Vec::new());
        }
        transport.send(PeerId(1), Bytes::from_static(b"the last")).unwrap();
        drop(transport);
        let stream = peer.stream.as_mut().unwrap();
        stream.set_nonblocking(false).unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        peer.got.extend_from_slice(&rest);
        let frame = Request::next(&mut peer.got, |_| Some(LEN)).unwrap();
        assert_eq!(frame, Some(Request::Frame(Bytes::from_static(b"the last"))));
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
    fn slices_of_a_write_may_land_no_longer_than_the_peer_permits() {
        let mut peer = Peer::new();
        let (mut transport, _arena) =
            reader_with(&peer, 0, |config| config.slice_time = Duration::from_secs(60));
        let permitted = clock::now() + Duration::from_secs(30);
        transport.permit(PeerId(1), permitted);
        transport.post(PeerId(1), write_of(1, None)).unwrap();
        let asked = loop {
            assert!(clock::now() < permitted);
            transport.poll(Time::ZERO, &mut Vec::new());
            if let Some(request) = peer.next_request() {
                break request;
            }
        };
        // The clock of this peer is that of this host.
        let Request::Write(asked, _) = asked else { panic!("{asked:?}") };
        assert!(asked.until <= permitted, "{:?} is after {permitted:?}", asked.until);
    }

    #[test]
    fn posts_to_a_peer_that_is_left_end_when_the_peer_may_touch_memory_no_more() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 1);
        transport.config.slice_time = Duration::from_millis(300);
        let (mut until, mut events) = (None, Vec::new());
        let deadline = Instant::now() + Duration::from_secs(20);
        while events.is_empty() {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut events);
            if until.is_none()
                && let Some(asked) = peer.next()
            {
                until = Some(asked.until);
                transport.disconnect(PeerId(1));
            }
        }
        assert!(until.unwrap() <= clock::now(), "until then, the peer may touch memory");
        let result = Err(TransportError::PeerGone);
        assert_eq!(events, [TransportEvent::Posted { post: PostId(0), result }]);
    }
}
