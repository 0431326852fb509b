//! New connections: strangers until their hello has come, guests afterwards.

use std::time::Duration;

use bytes::Bytes;
use kv_core::Time;
use kv_host::{Token, clock};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use crate::connection::{Connection, ConnectionId, Owner};
use crate::guest::Guest;
use crate::hello::{HELLO, Hello, Welcome};
use crate::inbound::Received;
use crate::metadata::Identity;
use crate::socket;
use crate::sockets::Over;
use crate::transport::TcpTransport;

/// Most connections accepted at once.
const ACCEPTS: usize = 32;
/// The pause in accepting when the process has no descriptor left.
const LISTEN_AGAIN: Duration = Duration::from_millis(100);
/// How long a stranger is not dropped for another one. The hellos of peers that all connect at once come within
/// this time, TLS included, and a stranger who says nothing keeps nobody out for longer.
const PATIENCE: Duration = Duration::from_millis(100);
/// The pause in accepting when no stranger may be dropped.
const PAUSE: Duration = Duration::from_millis(1);
/// Most ways of one peer: an old one may not have ended when the peer opens a new one.
const MAX_WAYS: usize = 8;
/// Most connections of one way, beside the first.
const MAX_NUMBER: u32 = 16;

impl TcpTransport {
    pub(crate) fn accept_some(&mut self) {
        for _ in 0..ACCEPTS {
            if !self.has_room_for_a_stranger() {
                return self.accept_after(PAUSE);
            }
            match socket::accept(self.watch.listener(), &self.config) {
                Ok(socket) => {
                    self.stats.accepted += 1;
                    if self.strangers.len() >= self.config.max_strangers
                        && let Some(oldest) = self.strangers.first().copied()
                    {
                        self.stats.refused += 1;
                        self.close(oldest);
                    }
                    let session = self.config.encryption().map(|tls| tls.accepted());
                    let Ok(session) = session.transpose() else {
                        self.stats.refused += 1;
                        continue;
                    };
                    let id = self.next_id();
                    self.strangers.insert(id);
                    let stranger = Connection::new(socket, Owner::Stranger, self.now);
                    self.keep(id, stranger.encrypted(session));
                }
                Err(Errno::WOULDBLOCK) => return,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    return self.accept_after(LISTEN_AGAIN);
                }
                // The connection has ended while it waited.
                Err(_) => {}
            }
        }
    }

    /// Accepts nothing for a while. New connections wait in the backlog.
    fn accept_after(&mut self, pause: Duration) {
        self.watch.ignore_listener();
        self.listen_at = Some(self.now + pause);
    }

    /// True if there is room for one more stranger, or the oldest one has had its time and may be dropped.
    fn has_room_for_a_stranger(&mut self) -> bool {
        if self.strangers.len() < self.config.max_strangers {
            return true;
        }
        let Some((oldest, since)) = self.oldest_stranger() else { return true };
        if since + PATIENCE > self.now {
            return false;
        }
        // Its hello may have come while this side was busy.
        self.ready(oldest, EventFlags::IN);
        true
    }

    /// Reads the hello of a stranger, and nothing beyond it.
    pub(crate) fn read_stranger(
        &mut self,
        id: ConnectionId,
        connection: &mut Connection,
    ) -> Result<(), Over> {
        match self.receive_up_to(connection, HELLO)? {
            Received::Bytes(_) | Received::Last(_) => {}
            Received::Nothing => return Ok(()),
            Received::End => return Err(Over::Closed),
        }
        if !Hello::may_begin_with(&connection.inbound.bytes) {
            return Err(Over::Broken);
        }
        let Some(bytes) = connection.inbound.bytes.first_chunk::<HELLO>() else { return Ok(()) };
        let hello = Hello::decode(bytes).ok_or(Over::Broken)?;
        connection.inbound.bytes.clear();
        if !connection.is_trusted() {
            return Err(Over::Untrusted("the peer has shown no certificate"));
        }
        let ours = self.given.identity().map_err(|_| Over::Failed)?;
        if hello.to != ours {
            // Says that the transport that was asked for is not here, and not which one is.
            let nobody = Identity { token: Token::from_bytes([0; Token::LEN]), hash: [0; Identity::HASH] };
            self.welcome(connection, nobody, &hello);
            let _ = self.write(connection);
            return Err(Over::Gone);
        }
        let guest = self.guest_for(id, &hello).ok_or(Over::Failed)?;
        self.strangers.remove(&id);
        connection.owner = Owner::Guest(guest);
        self.welcome(connection, ours, &hello);
        Ok(())
    }

    fn welcome(&mut self, connection: &mut Connection, from: Identity, hello: &Hello) {
        let welcome = Welcome { from, way: hello.way, clock: clock::now() };
        connection.outbound.push(Bytes::copy_from_slice(&welcome.encode()));
    }

    /// The guest to whom a connection with this hello belongs, if it is accepted.
    fn guest_for(&mut self, id: ConnectionId, hello: &Hello) -> Option<u64> {
        if hello.from.token == self.given.token() || hello.number > MAX_NUMBER {
            return None;
        }
        let known = self.guests.by_way(hello.from.token, hello.way);
        if hello.number > 0 {
            let guest = self.guests.get_mut(known?)?;
            if guest.from != hello.from || guest.connections.contains_key(&hello.number) {
                return None;
            }
            guest.connections.insert(hello.number, id);
            return known;
        }
        if known.is_some() || self.guests.len() >= self.config.max_guests {
            return None;
        }
        let same = self.guests.of(hello.from.token);
        if same.len() >= MAX_WAYS
            && let Some(oldest) = same.first()
        {
            self.drop_guest(*oldest);
        }
        let guest = self.next_id();
        let connections = [(0, id)].into();
        self.guests.insert(guest, Guest { from: hello.from, way: hello.way, connections, revoked: false });
        Some(guest)
    }

    /// Drops strangers whose time is over, and accepts again after a pause.
    pub(crate) fn serve_listener(&mut self) {
        if self.listen_at.is_some_and(|at| at <= self.now) {
            self.listen_at = match self.watch.watch_listener() {
                Ok(()) => None,
                Err(_) => Some(self.now + LISTEN_AGAIN),
            };
        }
        while let Some((id, since)) = self.oldest_stranger()
            && since + self.config.handshake_timeout <= self.now
        {
            self.stats.refused += 1;
            self.close(id);
        }
    }

    /// The stranger who has been here for longest, and since when.
    pub(crate) fn oldest_stranger(&self) -> Option<(ConnectionId, Time)> {
        let id = *self.strangers.first()?;
        Some((id, self.connections.get(&id).map_or(Time::ZERO, |connection| connection.since)))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::TcpStream;
    use std::time::Instant;

    use kv_core::{Transport, TransportWait};

    use super::*;
    use crate::config::TcpConfig;
    use crate::hello::WELCOME;

    #[test]
    fn a_way_is_opened_once_and_only_its_opener_adds_connections_to_it() {
        let mut transport = TcpTransport::new(TcpConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
        let to = Identity::of(transport.given.token(), &transport.metadata().unwrap());
        let [token, way, other_way] = [0; 3].map(|_| Token::random().unwrap());
        let from = Identity::of(token, b"a guest");
        let hello = Hello { number: 0, to, from, way };
        let elsewhere = Identity::of(token, b"another table of regions");
        let mut kept = Vec::new();
        for (hello, is_accepted) in [
            (Hello { number: 1, ..hello }, false),
            (hello, true),
            (hello, false),
            (Hello { number: 1, from: elsewhere, ..hello }, false),
            (Hello { number: 1, way: other_way, ..hello }, false),
            (Hello { number: MAX_NUMBER + 1, ..hello }, false),
            (Hello { number: 1, ..hello }, true),
            (Hello { number: 1, ..hello }, false),
        ] {
            let mut guest = TcpStream::connect(transport.local_addr()).unwrap();
            guest.write_all(&hello.encode()).unwrap();
            guest.set_nonblocking(true).unwrap();
            let deadline = Instant::now() + Duration::from_secs(60);
            let mut piece = [0; 256];
            let got = loop {
                assert!(Instant::now() < deadline, "{hello:?}");
                transport.poll(Time::ZERO, &mut Vec::new());
                match guest.read(&mut piece) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    got => break got.unwrap_or(0),
                }
            };
            assert_eq!(got, if is_accepted { WELCOME } else { 0 }, "{hello:?}");
            kept.push(guest);
        }
        assert_eq!((transport.guests.len(), transport.connections.len()), (1, 2));
    }

    /// Connects a guest, which says this hello. Returns its socket, and how many bytes the transport has answered: none if
    /// it has closed the connection.
    fn greeted(transport: &mut TcpTransport, hello: &Hello) -> (TcpStream, usize) {
        let mut guest = TcpStream::connect(transport.local_addr()).unwrap();
        guest.write_all(&hello.encode()).unwrap();
        guest.set_nonblocking(true).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            assert!(Instant::now() < deadline, "{hello:?}");
            transport.poll(Time::ZERO, &mut Vec::new());
            match guest.read(&mut [0; 256]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                got => return (guest, got.unwrap_or(0)),
            }
        }
    }

    #[test]
    fn a_guest_that_breaks_the_rules_on_one_connection_loses_all_of_them() {
        let mut transport = TcpTransport::new(TcpConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
        let to = Identity::of(transport.given.token(), &transport.metadata().unwrap());
        let [token, way] = [0; 2].map(|_| Token::random().unwrap());
        let hello = Hello { number: 0, to, from: Identity::of(token, b"a guest"), way };
        let _frames = greeted(&mut transport, &hello);
        let (mut pages, _) = greeted(&mut transport, &Hello { number: 1, ..hello });
        assert_eq!((transport.guests.len(), transport.connections.len()), (1, 2));
        pages.write_all(&[0xff; 64]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while transport.stats().broken == 0 {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut Vec::new());
        }
        assert_eq!((transport.guests.len(), transport.connections.len()), (0, 0));
    }

    #[test]
    fn guests_and_the_ways_of_one_of_them_are_bounded() {
        let config = TcpConfig::new("127.0.0.1:0".parse().unwrap()).with(|config| config.max_guests = 10);
        let mut transport = TcpTransport::new(config).unwrap();
        let to = Identity::of(transport.given.token(), &transport.metadata().unwrap());
        let token = Token::random().unwrap();
        let hello = |token| {
            let way = Token::random().unwrap();
            Hello { number: 0, to, from: Identity::of(token, b"a guest"), way }
        };
        let mut kept = Vec::new();
        for ways in 1..=MAX_WAYS + 2 {
            kept.push(greeted(&mut transport, &hello(token)));
            assert_eq!(transport.guests.len(), ways.min(MAX_WAYS), "the oldest way makes room");
        }
        for accepted in [true, true, false, false] {
            let (stream, got) = greeted(&mut transport, &hello(Token::random().unwrap()));
            assert_eq!(got, if accepted { WELCOME } else { 0 }, "{} guests", transport.guests.len());
            kept.push((stream, got));
        }
        assert_eq!(transport.guests.len(), 10);
    }

    #[test]
    fn a_pause_in_accepting_ends_in_time_though_nothing_else_wakes_the_owner() {
        let config = TcpConfig::new("127.0.0.1:0".parse().unwrap()).with(|config| config.max_strangers = 1);
        let mut transport = TcpTransport::new(config).unwrap();
        let _strangers = [0; 3].map(|_| TcpStream::connect(transport.local_addr()).unwrap());
        let deadline = Instant::now() + Duration::from_secs(60);
        while transport.listen_at.is_none() {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut Vec::new());
        }
        let wait = transport.wait();
        let is_short = matches!(&wait, TransportWait::ReadableOrAfter(_, after) if *after <= PAUSE);
        assert!(is_short, "{wait:?}: others wait in the backlog");
    }

    #[test]
    fn a_guest_whose_first_connection_has_ended_loses_the_others_and_not_the_other_way_round() {
        let mut transport = TcpTransport::new(TcpConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
        let to = Identity::of(transport.given.token(), &transport.metadata().unwrap());
        let [token, way] = [0; 2].map(|_| Token::random().unwrap());
        let hello = Hello { number: 0, to, from: Identity::of(token, b"a guest"), way };
        let (first, _) = greeted(&mut transport, &hello);
        let (second, _) = greeted(&mut transport, &Hello { number: 1, ..hello });
        let (_third, _) = greeted(&mut transport, &Hello { number: 2, ..hello });
        for (ended, left) in [(second, (1, 2)), (first, (0, 0))] {
            drop(ended);
            let deadline = Instant::now() + Duration::from_secs(20);
            while (transport.guests.len(), transport.connections.len()) != left {
                assert!(Instant::now() < deadline, "{} connections", transport.connections.len());
                transport.poll(Time::ZERO, &mut Vec::new());
            }
        }
    }
}
