//! Messages to peers: greetings, frames in parts, welcomes.

use std::time::Duration;

use kv_core::{PeerId, TransportError};
use kv_host::{Life, random};

use crate::completing::Flight;
use crate::ffi::{Attempt, SENDS};
use crate::message::{BODY, Header, Hello, Kind};
use crate::metadata::{Identity, Metadata};
use crate::transport::FabricTransport;
use crate::way::{Stage, Way, WayId};

/// When a greeting without an answer is repeated.
const GREET_AGAIN: Duration = Duration::from_millis(200);
/// When a greeting that libfabric had no room for is tried again: its connection is being opened.
const GREET_SOON: Duration = Duration::from_millis(1);
/// Most messages under way to one peer.
const MESSAGES: usize = 32;

impl FabricTransport {
    pub(crate) fn open_way(&mut self, peer: PeerId, bytes: &[u8]) -> Result<(), TransportError> {
        let metadata = Metadata::decode(bytes)?;
        let ours = self.given.identity()?;
        let identity = Identity::of(metadata.token, bytes);
        if identity.token == ours.token {
            return Err(TransportError::Metadata("it is that of this transport itself"));
        }
        if metadata.provider != self.given.provider() {
            return Err(TransportError::Metadata("the peer uses another provider of libfabric"));
        }
        if self.peers.contains_key(&peer) {
            return Err(TransportError::Unsupported("a second connect under the id of a connected peer"));
        }
        let mut connected = self.peers.values().filter_map(|id| self.ways.get(id));
        if connected.any(|way| way.identity.token == identity.token) {
            return Err(TransportError::Metadata("the peer is connected already, under another id"));
        }
        if self.peers.len() >= self.config.max_peers {
            return Err(TransportError::WouldBlock);
        }
        let life = metadata.process.watch(&metadata.host);
        if let Life::Dead = life {
            return Err(TransportError::PeerGone);
        }
        let key = u64::from_le_bytes(random()?);
        let address = self.addresses.take(&mut self.endpoint, &metadata.name)?;
        let id = self.next_id();
        if let Life::Watched(process) = &life
            && let Err(error) = self.watch.watch(id, process)
        {
            self.addresses.give_back(&mut self.endpoint, &metadata.name);
            return Err(error.into());
        }
        let times = (self.now, self.now + self.config.handshake_timeout);
        let immediate = self.endpoint.promises().immediate;
        let way = Way::new(peer, key, identity, (metadata, address), life, immediate, times);
        self.ways.insert(id, way);
        self.keys.insert(key, id);
        self.peers.insert(peer, id);
        self.greet(id);
        Ok(())
    }

    /// Greets a peer, if it is time to, and looks at the way again when it is time for the next greeting.
    pub(crate) fn greet(&mut self, id: WayId) {
        let Ok(from) = self.given.identity() else { return };
        let Some(way) = self.ways.get_mut(&id) else { return };
        if way.greet_at <= self.now {
            let hello = Hello { to: way.identity.token, from, name: self.given.name().to_vec() };
            let header = Header::new(way.key, Kind::Hello).encode();
            let begun = self.endpoint.send(way.address, [&header, &hello.encode()], Flight::Message(id));
            let pause = match (begun, way.stage) {
                (Attempt::Begun, Stage::Open) => self.config.silence / 4,
                (Attempt::Full, _) => GREET_SOON,
                _ => GREET_AGAIN,
            };
            way.messages += usize::from(begun == Attempt::Begun);
            way.greet_at = self.now + pause;
        }
        let at = way.greet_at;
        self.look_at(id, at);
    }

    /// Welcomes guests that have greeted.
    pub(crate) fn answer_guests(&mut self) {
        let token = self.given.token().to_bytes();
        while let Some(id) = self.unanswered.first().copied() {
            if let Some(guest) = self.guests.get(id) {
                let header = Header { sequence: guest.slot as u32, ..Header::new(guest.key, Kind::Welcome) };
                let begun = self.endpoint.send(guest.address, [&header.encode(), &token], Flight::Reply);
                if begun == Attempt::Full {
                    return;
                }
            }
            self.unanswered.remove(&id);
        }
    }

    /// Sends what waits for a peer, as far as there is room. False if libfabric has no room.
    pub(crate) fn send_outgoing(&mut self, id: WayId) -> bool {
        let share = (SENDS / (self.ways.len() + 1)).clamp(2, MESSAGES);
        let Some(way) = self.ways.get_mut(&id) else { return true };
        if !matches!(way.stage, Stage::Open | Stage::Leaving { .. }) {
            return true;
        }
        loop {
            while let Some((_, notify)) = way.parked.front()
                && way.frame_bytes + notify.len() <= self.config.outbound_bytes
                && let Some((transfer, notify)) = way.parked.pop_front()
            {
                way.push(Header { len: notify.len() as u32, ..Header::new(way.key, Kind::Frame) }, notify);
                self.posts.end(transfer, Ok(()));
            }
            let Some(front) = way.outgoing.front_mut() else { return true };
            if way.messages >= share {
                return true;
            }
            let header = if front.sent == 0 { front.header } else { Header::new(way.key, Kind::More) };
            let part = front.body.get(front.sent..).unwrap_or_default();
            let part = part.get(..BODY).unwrap_or(part);
            match self.endpoint.send(way.address, [&header.encode(), part], Flight::Message(id)) {
                Attempt::Begun => {}
                Attempt::Full => return false,
                Attempt::Failed(_) => {
                    self.break_way(id, None);
                    return true;
                }
            }
            way.messages += 1;
            way.frame_bytes -= part.len();
            front.sent += part.len();
            if front.sent == front.body.len() {
                way.outgoing.pop_front();
            }
        }
    }
}
