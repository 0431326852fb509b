//! How posts, ways and guests end: with proof that no data operation touches memory any more.

use kv_core::{PeerId, Time, TransportError, TransportEvent, WayEnd};
use kv_host::{Token, TransferId};

use crate::connection::{ConnectionId, Owner};
use crate::guest::GuestId;
use crate::sockets::Over;
use crate::transport::TcpTransport;
use crate::way::{Stage, WayId};

impl TcpTransport {
    /// The way to a peer to whom something can be sent.
    pub(crate) fn usable(&self, peer: PeerId) -> Result<WayId, TransportError> {
        let id = self.peers.get(&peer).copied().ok_or(TransportError::PeerGone)?;
        let usable = self.ways.get(&id).is_some_and(|way| way.is_usable());
        if usable { Ok(id) } else { Err(TransportError::PeerGone) }
    }

    /// The life of a peer that is connected, or to whom the way was lost.
    pub(crate) fn token_of(&self, peer: PeerId) -> Option<Token> {
        let way = self.peers.get(&peer).and_then(|id| self.ways.get(id));
        way.map(|way| way.identity.token).or_else(|| self.lost.get(&peer).copied())
    }

    /// Sends no more of a post. The post ends with this error once its slices are answered, or their time is
    /// over.
    pub(crate) fn give_up(&mut self, id: TransferId, error: TransportError) {
        let Some(transfer) = self.posts.get_mut(id) else { return };
        let way = transfer.way;
        transfer.failed.get_or_insert(error);
        if transfer.is_over() {
            if let Some(way) = self.ways.get_mut(&way) {
                way.parked.retain(|(parked, _)| *parked != id);
            }
            self.settle(id);
        } else if let Some(at) = self.ways.get(&way).map(|way| way.last_flight()) {
            self.look_at(way, at);
        }
    }

    /// The owner has disconnected a peer: slices under way are awaited, and frames are sent.
    pub(crate) fn leave(&mut self, id: WayId) {
        let leave_at = self.now + self.config.slice_time;
        let Some(way) = self.ways.get_mut(&id) else { return };
        way.peer = None;
        way.permitted = Time::ZERO;
        let at = way.last_flight();
        match way.stage {
            Stage::Dialing(_) => return self.finish(id, None),
            Stage::Open => way.stage = Stage::Leaving { at: leave_at.max(at) },
            Stage::Proving(_) => return self.end_way(id, WayEnd::Lost, at),
            Stage::Leaving { .. } | Stage::Ending { .. } => {}
        }
        for transfer in self.posts.of_way(id) {
            self.give_up(transfer, TransportError::PeerGone);
        }
        self.stirred.insert(id);
        self.look_at(id, self.now);
    }

    /// A connection has ended.
    pub(crate) fn ended(&mut self, id: ConnectionId, owner: Owner, over: Over) {
        self.stats.broken += u64::from(over == Over::Broken && owner != Owner::Stranger);
        self.stats.untrusted += u64::from(matches!(over, Over::Untrusted(_)));
        if let (Owner::Dialed(way, _) | Owner::Greeted(way, _) | Owner::Lane(way, _), Over::Untrusted(reason)) =
            (owner, over)
            && let Some(way) = self.ways.get_mut(&way)
        {
            way.distrust = Some(reason);
        }
        match owner {
            Owner::Stranger => {
                self.strangers.remove(&id);
                self.stats.refused += 1;
            }
            Owner::Guest(guest) => self.guest_lost(guest, id, over),
            Owner::Dialed(way, 0) | Owner::Greeted(way, 0) => self.dial_failed(way, id, over),
            Owner::Dialed(way, _) | Owner::Greeted(way, _) | Owner::Lane(way, _) => {
                self.way_failed(way, over)
            }
        }
    }

    /// A connection of a guest has ended. Frames on its first connection may still be of use.
    fn guest_lost(&mut self, id: GuestId, connection: ConnectionId, over: Over) {
        let Some(guest) = self.guests.get_mut(id) else { return };
        let is_first = guest.connections.get(&0) == Some(&connection);
        guest.connections.retain(|_, other| *other != connection);
        if is_first || over != Over::Closed || guest.connections.is_empty() {
            self.drop_guest(id);
        }
    }

    /// Closes the connections of a guest: nothing of it lands here or is sent from here any more.
    pub(crate) fn drop_guest(&mut self, id: GuestId) {
        for connection in
            self.guests.remove(id).map(|guest| guest.connections).unwrap_or_default().into_values()
        {
            self.close(connection);
        }
    }

    /// A connection of an open way has ended.
    pub(crate) fn way_failed(&mut self, id: WayId, over: Over) {
        let Some(way) = self.ways.get_mut(&id) else { return };
        let (at, open) = (way.last_flight(), matches!(way.stage, Stage::Open));
        if !open && !matches!(way.stage, Stage::Leaving { .. }) {
            return;
        }
        for connection in way.connections() {
            self.close(connection);
        }
        match over {
            Over::Closed | Over::Gone if open => self.prove(id),
            _ => self.end_way(id, WayEnd::Lost, at),
        }
    }

    /// A way ends: at once, or when no slice of it can touch memory any more.
    pub(crate) fn end_way(&mut self, id: WayId, end: WayEnd, at: Time) {
        let Some(way) = self.ways.get_mut(&id) else { return };
        let connections = way.connections();
        way.stage = Stage::Ending { end, at };
        for connection in connections {
            self.close(connection);
        }
        self.look_at(id, at.max(self.now));
    }

    /// Removes a way. Its posts end, and then the owner is told of the peer's end, if it asked for the peer.
    fn finish(&mut self, id: WayId, end: Option<WayEnd>) {
        let Some(mut way) = self.ways.remove(&id) else { return };
        for connection in way.connections() {
            self.close(connection);
        }
        self.timers.remove(id);
        self.stirred.remove(&id);
        let cause = match way.distrust {
            Some(status) => TransportError::Backend { call: "TLS", status, code: None },
            None => TransportError::PeerGone,
        };
        for transfer in self.posts.of_way(id) {
            let failed = self.posts.get_mut(transfer).and_then(|transfer| transfer.failed.take());
            self.posts.end(transfer, Err(failed.unwrap_or_else(|| cause.clone())));
        }
        let token = way.identity.token;
        match end {
            // What the peer has sent before may still be read; after this, nothing of it arrives any more.
            Some(WayEnd::Dead { .. }) => self.close_guests(token),
            Some(WayEnd::Lost) => {
                if let Some(peer) = way.peer {
                    self.lost.insert(peer, token);
                }
            }
            None => {}
        }
        if let (Some(peer), Some(end)) = (way.peer, end) {
            self.peers.remove(&peer);
            self.posts.tell(TransportEvent::PeerGone { peer, end });
        }
    }

    /// Takes the last frames of a transport that has ended, and closes its connections.
    fn close_guests(&mut self, token: Token) {
        for id in self.guests.of(token) {
            let first = self.guests.get(id).and_then(|guest| guest.connections.get(&0).copied());
            if let Some(first) = first {
                self.ready(first, rustix::event::epoll::EventFlags::IN);
            }
            self.drop_guest(id);
        }
    }

    /// Looks at a way at this time, or before.
    pub(crate) fn look_at(&mut self, id: WayId, at: Time) {
        if self.ways.contains_key(&id) {
            self.timers.arm(id, at);
        }
    }

    /// Does what is due.
    pub(crate) fn serve_timers(&mut self) {
        self.serve_listener();
        for id in self.timers.due(self.now) {
            self.look(id);
        }
    }

    fn look(&mut self, id: WayId) {
        let Some(way) = self.ways.get(&id) else { return };
        match way.stage {
            Stage::Dialing(_) | Stage::Proving(_) => self.dial_on(id),
            Stage::Open => self.release(id),
            Stage::Leaving { at } => {
                self.release(id);
                let Some(way) = self.ways.get(&id) else { return };
                let ids = way.lanes.iter().filter_map(|lane| lane.connection);
                let mut open = ids.filter_map(|id| self.connections.get(&id));
                let drained = way.frames.is_empty()
                    && way.last_flight() == Time::ZERO
                    && open.all(|connection| connection.is_flushed());
                if drained || at <= self.now { self.finish(id, None) } else { self.look_at(id, at) }
            }
            Stage::Ending { end, at } => {
                if at <= self.now {
                    self.finish(id, Some(end));
                } else {
                    self.look_at(id, at);
                }
            }
        }
    }

    /// Gives up slices of posts that were given up, whose time is over: they can touch no memory any more.
    fn release(&mut self, id: WayId) {
        let Some(way) = self.ways.get_mut(&id) else { return };
        let (mut released, mut next) = (Vec::new(), None);
        for flight in way.lanes.iter_mut().flat_map(|lane| &mut lane.flights) {
            let Some(transfer) = flight.transfer else { continue };
            if self.posts.get(transfer).is_none_or(|transfer| transfer.failed.is_some()) {
                if flight.until <= self.now {
                    flight.transfer = None;
                    released.push(transfer);
                } else {
                    next = Some(next.unwrap_or(flight.until).min(flight.until));
                }
            }
        }
        for transfer in released {
            if let Some(transfer) = self.posts.get_mut(transfer) {
                transfer.under_way -= 1;
            }
            self.settle(transfer);
        }
        if let Some(at) = next {
            self.look_at(id, at);
        }
    }

    /// When `serve_timers` has something to do, if nothing else happens before.
    pub(crate) fn next_timer(&self) -> Option<Time> {
        let way = self.timers.next();
        let stranger = self.oldest_stranger().map(|(_, since)| since + self.config.handshake_timeout);
        [way, stranger, self.listen_at].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::time::{Duration, Instant};

    use bytes::Bytes;
    use kv_core::{PostId, Transport};
    use kv_host::clock;

    use super::*;
    use crate::message::Request;
    use crate::scripted::{LEN, Peer, fill_with_frames, opened, reader, reader_with};

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

    #[test]
    fn a_peer_whose_connection_is_reset_and_whose_address_refuses_is_dead() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 0);
        opened(&mut peer, &mut transport);
        let mut events = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(60);
        transport.send(PeerId(1), Bytes::from_static(b"what the peer does not read")).unwrap();
        let Peer { listener, stream: Some(stream), .. } = peer else { panic!("no connection") };
        while stream.peek(&mut [0]).is_err() {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut events);
        }
        // The kernel of a process that has bytes to read at its end resets the connection.
        drop((listener, stream));
        while events.is_empty() {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut events);
        }
        let dead = kv_core::WayEnd::Dead { quiet_after: Duration::ZERO };
        assert_eq!(events, [TransportEvent::PeerGone { peer: PeerId(1), end: dead }]);
    }

    /// The first post has ended, and nothing else; and the time until which the peer may touch memory is over.
    fn assert_ended_when_quiet(until: Option<Time>, events: &[TransportEvent]) {
        assert!(until.unwrap() <= clock::now(), "until then, the peer may touch memory");
        let result = Err(TransportError::PeerGone);
        assert_eq!(events, [TransportEvent::Posted { post: PostId(0), result }]);
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
        assert_ended_when_quiet(until, &events);
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
        assert_ended_when_quiet(until, &events);
    }

    #[test]
    fn posts_to_a_lost_peer_end_when_their_slices_are_over_though_its_death_was_asked_for() {
        for answers in [true, false] {
            let mut peer = Peer::new();
            let (mut transport, _arena) = reader(&peer, 1);
            transport.config.slice_time = Duration::from_millis(600);
            let (mut until, mut events) = (None, Vec::new());
            let deadline = Instant::now() + Duration::from_secs(60);
            while events.is_empty() {
                assert!(Instant::now() < deadline);
                transport.poll(Time::ZERO, &mut events);
                if until.is_none() {
                    until = peer.next().map(|asked| asked.until);
                    if until.is_some() {
                        // The peer hangs up. Its address is asked for this long, and answers or is silent.
                        transport.config.handshake_timeout = Duration::from_millis(50);
                        peer.stream = None;
                    }
                } else if answers {
                    peer.fill();
                }
            }
            assert!(until.unwrap() <= clock::now(), "until then, the peer may touch memory: {answers}");
            let result = Err(TransportError::PeerGone);
            let posted = TransportEvent::Posted { post: PostId(0), result };
            let lost = TransportEvent::PeerGone { peer: PeerId(1), end: kv_core::WayEnd::Lost };
            assert_eq!(events, [posted, lost], "{answers}");
        }
    }

    #[test]
    fn frames_that_were_taken_before_a_disconnect_arrive_and_then_the_way_goes() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader_with(&peer, 0, |config| {
            // The way goes because the frames are written, and not because the time is over.
            config.slice_time = Duration::from_secs(60);
            config.outbound_bytes = 2 << 20;
        });
        opened(&mut peer, &mut transport);
        let deadline = Instant::now() + Duration::from_secs(30);
        let sent = fill_with_frames(&mut transport, &mut Vec::new());
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
    fn frames_that_were_taken_before_the_transport_is_dropped_are_written_as_the_last_thing() {
        let mut peer = Peer::new();
        let (mut transport, _arena) = reader(&peer, 0);
        opened(&mut peer, &mut transport);
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
}
