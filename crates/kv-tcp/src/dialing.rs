//! Opening the way to a peer: the peer's addresses are tried in order, in rounds, until one answers as the
//! peer, all say that the peer is gone, or the time is over. The same search tells whether a peer whose kernel
//! has closed a connection is dead.

use std::net::SocketAddr;
use std::time::Duration;

use kv_core::{PeerId, Time, TransportError, WayEnd};
use kv_host::{Token, clock};

use crate::config::TcpConfig;
use crate::connection::{Connection, ConnectionId, Owner};
use crate::hello::{Hello, WELCOME, Welcome};
use crate::inbound::Received;
use crate::metadata::{Identity, Metadata};
use crate::peer_clock::PeerClock;
use crate::socket;
use crate::sockets::Over;
use crate::transport::TcpTransport;
use crate::way::{Dial, Stage, Way, WayId};

/// Longest pause between two rounds.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// How long the death of a peer is asked for after its kernel has closed a connection.
const PROOF: Duration = Duration::from_secs(1);

impl TcpTransport {
    pub(crate) fn open_way(&mut self, peer: PeerId, bytes: &[u8]) -> Result<(), TransportError> {
        let metadata = Metadata::decode(bytes)?;
        let ours = self.given.identity()?;
        let identity = Identity::of(metadata.token, bytes);
        match (self.config.encryption().is_some(), metadata.tls) {
            (true, false) => return Err(TransportError::Metadata("tls is on here, and off at the peer")),
            (false, true) => return Err(TransportError::Metadata("tls is off here, and on at the peer")),
            _ => {}
        }
        if identity.token == ours.token {
            return Err(TransportError::Metadata("it is that of this transport itself"));
        }
        if self.peers.contains_key(&peer) {
            return Err(TransportError::Unsupported("a second connect under the id of a connected peer"));
        }
        let mut connected = self.peers.values().filter_map(|id| self.ways.get(id));
        if connected.any(|way| way.identity.token == identity.token) {
            // Two peers that are one transport could not be told apart when one of them is revoked.
            return Err(TransportError::Metadata("the peer is connected already, under another id"));
        }
        if self.peers.len() >= self.config.max_peers {
            return Err(TransportError::WouldBlock);
        }
        let id = self.next_id();
        let way = Way::new(
            peer,
            Token::random()?,
            identity,
            (metadata.addresses, metadata.regions),
            Dial::new(self.now, self.config.handshake_timeout),
            (self.config.data_connections, self.config.window_bytes),
        );
        self.ways.insert(id, way);
        self.peers.insert(peer, id);
        self.lost.remove(&peer);
        self.try_address(id);
        Ok(())
    }

    /// Asks the addresses of a peer whether its transport is still there.
    pub(crate) fn prove(&mut self, id: WayId) {
        let span = PROOF.min(self.config.handshake_timeout);
        let dial = Dial::new(self.now, span);
        if let Some(way) = self.ways.get_mut(&id) {
            way.stage = Stage::Proving(dial);
            self.try_address(id);
        }
    }

    /// A moment has come that the search of a way has waited for.
    pub(crate) fn dial_on(&mut self, id: WayId) {
        let now = self.now;
        let Some(dial) = self.dial_of(id) else { return };
        if dial.deadline <= now {
            return self.conclude(id, WayEnd::Lost);
        }
        if dial.next > now {
            let at = dial.next.min(dial.deadline);
            return self.look_at(id, at);
        }
        match dial.connection.take() {
            // The address has been silent for too long.
            Some(connection) => {
                dial.unclear = true;
                self.close(connection);
                self.next_address(id);
            }
            None => self.try_address(id),
        }
    }

    /// The connection of a search has ended before the peer has answered.
    pub(crate) fn dial_failed(&mut self, id: WayId, connection: ConnectionId, over: Over) {
        let Some(dial) = self.dial_of(id).filter(|dial| dial.connection == Some(connection)) else { return };
        dial.connection = None;
        dial.unclear |= over != Over::Gone;
        self.next_address(id);
    }

    fn next_address(&mut self, id: WayId) {
        let now = self.now;
        let Some(count) = self.ways.get(&id).map(|way| way.addresses.len()) else { return };
        let Some(dial) = self.dial_of(id) else { return };
        dial.address += 1;
        if dial.address < count {
            return self.try_address(id);
        }
        if !dial.unclear {
            return self.conclude(id, WayEnd::Dead { quiet_after: Duration::ZERO });
        }
        (dial.address, dial.unclear) = (0, false);
        dial.next = now + dial.pause;
        dial.pause = (2 * dial.pause).min(LONGEST_PAUSE);
        let at = dial.next.min(dial.deadline);
        self.look_at(id, at);
    }

    /// Dials the present address of a search.
    fn try_address(&mut self, id: WayId) {
        let (now, connection) = (self.now, self.next_id());
        let Some(way) = self.ways.get_mut(&id) else { return };
        let left = way.addresses.len() as u32;
        let (Stage::Dialing(dial) | Stage::Proving(dial)) = &mut way.stage else { return };
        let Some(address) = way.addresses.get(dial.address) else { return };
        // The addresses that are left share the time that is left.
        let share = dial.deadline.since(now) / (left - dial.address as u32).max(1);
        dial.next = now + share;
        let at = dial.next;
        match dialed(address, &self.config, Owner::Dialed(id, 0), now) {
            Ok(dialed) => {
                dial.connection = Some(connection);
                self.keep(connection, dialed);
                self.look_at(id, at);
            }
            Err(over) => {
                dial.unclear |= over != Over::Gone;
                self.next_address(id);
            }
        }
    }

    /// Opens the lanes for slices, unless they are open or being opened.
    pub(crate) fn open_lanes(&mut self, id: WayId) {
        for lane in 1..self.ways.get(&id).map_or(0, |way| way.lanes.len()) {
            let connection = self.next_id();
            let Some(way) = self.ways.get_mut(&id).filter(|way| matches!(way.stage, Stage::Open)) else {
                return;
            };
            let Some(address) = way.addresses.get(way.address) else { return };
            let Some(here) = way.lanes.get_mut(lane).filter(|lane| lane.connection.is_none()) else {
                continue;
            };
            match dialed(address, &self.config, Owner::Dialed(id, lane), self.now) {
                Ok(dialed) => {
                    here.connection = Some(connection);
                    self.keep(connection, dialed);
                }
                Err(over) => return self.way_failed(id, over),
            }
        }
    }

    /// The kernel has connected a socket, or has failed to.
    pub(crate) fn connected(&mut self, connection: &mut Connection) -> Result<(), Over> {
        let Owner::Dialed(id, lane) = connection.owner else { return Ok(()) };
        if let Some(error) = socket::failure(connection.socket()) {
            return Err(error.into());
        }
        let way = self.ways.get(&id).ok_or(Over::Failed)?;
        let from = self.given.identity().map_err(|_| Over::Failed)?;
        let hello = Hello { number: lane as u32, to: way.identity, from, way: way.number };
        connection.outbound.push(bytes::Bytes::copy_from_slice(&hello.encode()));
        connection.owner = Owner::Greeted(id, lane);
        Ok(())
    }

    pub(crate) fn read_welcome(&mut self, id: ConnectionId, connection: &mut Connection) -> Result<(), Over> {
        let Owner::Greeted(way_id, lane) = connection.owner else { return Ok(()) };
        match self.receive_up_to(connection, WELCOME)? {
            Received::Bytes(_) | Received::Last(_) => {}
            Received::Nothing => return Ok(()),
            Received::End => return Err(Over::Closed),
        }
        let Some(bytes) = connection.inbound.bytes.first_chunk::<WELCOME>() else { return Ok(()) };
        let welcome = Welcome::decode(bytes).ok_or(Over::Broken)?;
        let way = self.ways.get_mut(&way_id).ok_or(Over::Failed)?;
        if welcome.way != way.number {
            return Err(Over::Broken);
        }
        // Another transport has the address now: a restarted peer is another peer.
        if welcome.from != way.identity {
            return Err(Over::Gone);
        }
        connection.inbound.bytes.clear();
        match &mut way.stage {
            Stage::Proving(_) => {
                self.conclude(way_id, WayEnd::Lost);
                return Err(Over::Failed);
            }
            Stage::Dialing(dial) => {
                way.address = dial.address;
                way.stage = Stage::Open;
            }
            Stage::Open | Stage::Leaving { .. } => {}
            Stage::Ending { .. } => return Err(Over::Failed),
        }
        let now = clock::now();
        let clock = way.clock.get_or_insert(PeerClock::new(welcome.clock, now));
        // When this lane's hello was sent is not known any more.
        clock.heard(welcome.clock, Time::ZERO, now);
        if let Some(lane) = way.lanes.get_mut(lane) {
            (lane.connection, lane.open) = (Some(id), true);
        }
        connection.owner = Owner::Lane(way_id, lane);
        self.stirred.insert(way_id);
        Ok(())
    }

    fn dial_of(&mut self, id: WayId) -> Option<&mut Dial> {
        match &mut self.ways.get_mut(&id)?.stage {
            Stage::Dialing(dial) | Stage::Proving(dial) => Some(dial),
            _ => None,
        }
    }

    /// Reads a greeting of `len` bytes, and nothing beyond it.
    pub(crate) fn receive_up_to(
        &mut self,
        connection: &mut Connection,
        len: usize,
    ) -> Result<Received, Over> {
        let room = len.saturating_sub(connection.inbound.bytes.len()).min(self.scratch.len());
        let scratch = self.scratch.get_mut(..room).unwrap_or_default();
        Ok(connection.receive(self.given.regions(), scratch, 0)?)
    }
}

/// A connection that is being opened to this address.
fn dialed(address: &SocketAddr, config: &TcpConfig, owner: Owner, now: Time) -> Result<Connection, Over> {
    let session = config.encryption().map(|tls| tls.dialed(address.ip()).map_err(|_| Over::Failed));
    let session = session.transpose()?;
    let socket = socket::dial(address, config)?;
    Ok(Connection::new(socket, owner, now).encrypted(session))
}

impl TcpTransport {
    /// The search of a way has a result.
    fn conclude(&mut self, id: WayId, end: WayEnd) {
        let Some(way) = self.ways.get(&id) else { return };
        let at = if end == WayEnd::Lost { way.last_flight() } else { Time::ZERO };
        self.end_way(id, end, at);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Instant;

    use kv_core::{Transport, TransportEvent};

    use super::*;
    use crate::scripted::{Peer, reader_with};

    /// What a transport says of a peer at this address and at one where nothing listens. Somebody else is at the first
    /// one, and hangs up so many times; after that, nothing listens there either.
    fn end_beside(hang_ups: Option<usize>, patience: Duration) -> Vec<TransportEvent> {
        let listener = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (mut other, nowhere) = (Some(listener()), listener().local_addr().unwrap());
        let addresses = other.iter().map(|other| other.local_addr().unwrap()).chain([nowhere]).collect();
        other.as_ref().unwrap().set_nonblocking(true).unwrap();
        let metadata = Metadata { token: Token::random().unwrap(), addresses, regions: vec![1], tls: false };
        let config = TcpConfig::new("127.0.0.1:0".parse().unwrap());
        let config = config.with(|config| config.handshake_timeout = patience);
        let mut transport = TcpTransport::new(config).unwrap();
        transport.connect(PeerId(1), &metadata.encode().unwrap()).unwrap();
        let (mut hung_up, mut events) = (0, Vec::new());
        let deadline = Instant::now() + Duration::from_secs(60);
        while events.is_empty() {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut events);
            if let (Some(most), Some(listener)) = (hang_ups, &other)
                && listener.accept().is_ok()
            {
                hung_up += 1;
                other = other.filter(|_| hung_up < most);
            }
        }
        events
    }

    #[test]
    fn an_address_that_is_silent_or_hangs_up_proves_no_death() {
        let lost = TransportEvent::PeerGone { peer: PeerId(1), end: WayEnd::Lost };
        for hang_ups in [None, Some(usize::MAX)] {
            let told = end_beside(hang_ups, Duration::from_millis(300));
            assert_eq!(told, std::slice::from_ref(&lost), "{hang_ups:?}");
        }
    }

    #[test]
    fn a_peer_is_dead_once_all_addresses_say_so_in_one_round() {
        let dead = WayEnd::Dead { quiet_after: Duration::ZERO };
        let told = end_beside(Some(1), Duration::from_secs(50));
        assert_eq!(told, [TransportEvent::PeerGone { peer: PeerId(1), end: dead }]);
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
                reader_with(&peer, 1, |config| config.handshake_timeout = Duration::from_secs(60));
            let (mut events, begun) = (Vec::new(), Instant::now());
            // The first is no welcome; the second is that of another transport, which has the peer's address now.
            while transport.stats().broken == 0 && events.len() < 2 {
                assert!(begun.elapsed() < Duration::from_secs(50), "lie {number} is not heard: {events:?}");
                peer.fill();
                transport.poll(Time::ZERO, &mut events);
                let is_open = transport.ways.values().any(|way| matches!(way.stage, Stage::Open));
                assert!(!is_open, "lie {number} is believed");
            }
            let end = WayEnd::Dead { quiet_after: Duration::ZERO };
            let gone = TransportEvent::PeerGone { peer: PeerId(1), end };
            assert_eq!(events.pop(), [None, Some(gone)][number], "lie {number}");
        }
    }
}
