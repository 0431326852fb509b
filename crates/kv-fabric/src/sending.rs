//! Messages to peers: greetings, frames in parts, welcomes.

use std::time::Duration;

use bytes::Bytes;
use kv_core::{PeerId, TransportError};
use kv_host::{Life, random};

use crate::completing::Flight;
use crate::device::Device;
use crate::error::FabricError;
use crate::ffi::{Attempt, SENDS};
use crate::guest::Reply;
use crate::lane::{Lane, Link, Probe, Reach};
use crate::message::{BODY, Header, Hello, Kind};
use crate::metadata::{Identity, Metadata};
use crate::pairing::pairs;
use crate::transport::FabricTransport;
use crate::way::{Stage, Way, WayId};

/// When a greeting without an answer is repeated.
const GREET_AGAIN: Duration = Duration::from_millis(200);
/// When a greeting that libfabric had no room for is tried again: its connection is being opened.
const GREET_SOON: Duration = Duration::from_millis(1);
/// Most messages under way to one peer.
const MESSAGES: usize = 32;
/// Most replies under way to one guest, which may never take them.
const REPLIES: usize = 2;

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
        let key = u64::from_le_bytes(random()?);
        let reach = self.reach(&metadata)?;
        let id = self.next_id();
        if let Life::Watched(process) = &life
            && let Err(error) = self.watch.watch(id, process)
        {
            let names: Vec<_> = metadata.ports.iter().map(|port| port.name.clone()).collect();
            self.give_back_links(&reach.links, &names);
            return Err(error.into());
        }
        let immediate = self.devices.promises().immediate;
        let way = Way::new(peer, key, identity, (metadata, reach), life, immediate, self.now);
        self.ways.insert(id, way);
        self.keys.insert(key, id);
        self.peers.insert(peer, id);
        match self.ways.get(&id).map(|way| &way.life) {
            // Bytes of its writes may still be unread.
            Some(Life::Dead) => self.break_way(id, None),
            _ => self.greet(id),
        }
        Ok(())
    }

    /// Takes all endpoints of a peer into the address tables of all devices, as far as they are of one kind of network. The
    /// first endpoint and the first device must be.
    fn reach(&mut self, metadata: &Metadata) -> Result<Reach, FabricError> {
        let (mut first, mut links, mut refused) = (None, Vec::new(), None);
        for (number, device) in self.devices.all_mut().enumerate() {
            let Device { addresses, endpoint: here, .. } = device;
            for (endpoint, port) in metadata.ports.iter().enumerate() {
                match addresses.take(here, &port.name) {
                    Ok(address) => {
                        first.get_or_insert(address);
                        links.push(Link { device: number, endpoint, address, probe: Probe::None });
                    }
                    Err(FabricError::Name { .. }) if first.is_some() => {}
                    Err(error) => {
                        refused.get_or_insert(error);
                    }
                }
            }
        }
        if let Some(error) = refused {
            let names: Vec<_> = metadata.ports.iter().map(|port| port.name.clone()).collect();
            self.give_back_links(&links, &names);
            return Err(error);
        }
        let address = first.ok_or(FabricError::Name { got: 0, ours: self.given.name().len() })?;
        let lanes = self.lanes(&links, metadata);
        Ok(Reach { address, links, lanes })
    }

    /// The pairs of devices here and endpoints there that move bytes.
    fn lanes(&self, links: &[Link], metadata: &Metadata) -> Vec<Lane> {
        let ours: Vec<_> = self.devices.all().map(|device| device.location.node).collect();
        let theirs: Vec<_> = metadata.ports.iter().map(|port| port.node).collect();
        let pairs = pairs(&ours, &theirs).into_iter();
        let links = pairs.filter_map(|pair| links.iter().find(|link| (link.device, link.endpoint) == pair));
        let node = |nodes: &[Option<u16>], end: usize| nodes.get(end).copied().flatten();
        links.map(|link| Lane::new(link, (node(&ours, link.device), node(&theirs, link.endpoint)))).collect()
    }

    /// A way needs its endpoints no more.
    pub(crate) fn give_back_links(&mut self, links: &[Link], names: &[Bytes]) {
        for link in links {
            if let (Some(device), Some(name)) = (self.devices.get(link.device), names.get(link.endpoint)) {
                device.addresses.give_back(&mut device.endpoint, name);
            }
        }
    }

    /// Asks a peer by lanes on which nothing was heard for a while whether they lead to it, and looks at the way again if
    /// one could not be asked.
    pub(crate) fn ask_lanes(&mut self, id: WayId) {
        let Some(way) = self.ways.get_mut(&id).filter(|way| way.stage == Stage::Open) else { return };
        for (number, lane) in way.lanes.iter_mut().enumerate().skip(1) {
            let Some(device) = self.devices.get(lane.device) else { continue };
            if lane.may_ask(self.now) {
                let ask = Header { sequence: number as u32, ..Header::new(way.key, Kind::Ask) }.encode();
                let begun = device.endpoint.send(lane.address, [&ask, &[]], Flight::Ask(id, number));
                lane.asked(begun == Attempt::Begun, self.now);
                way.asks += usize::from(begun == Attempt::Begun);
            }
        }
        if let Some(at) = way.lanes.iter().skip(1).filter_map(Lane::due).min() {
            self.look_at(id, at);
        }
    }

    /// Greets a peer, if it is time to, and looks at the way again when it is time for the next greeting.
    pub(crate) fn greet(&mut self, id: WayId) {
        let Ok(from) = self.given.identity() else { return };
        let Some(way) = self.ways.get_mut(&id) else { return };
        if way.greet_at <= self.now {
            let hello = Hello { to: way.identity.token, from, name: self.given.name().to_vec() };
            let header = Header::new(way.key, Kind::Hello).encode();
            let endpoint = &mut self.devices.first().endpoint;
            let begun = endpoint.send(way.address, [&header, &hello.encode()], Flight::Message(id));
            let pause = match (begun, way.stage) {
                (Attempt::Begun, Stage::Open) => self.config.silence / 4,
                (Attempt::Full, _) => GREET_SOON,
                _ => GREET_AGAIN,
            };
            way.messages += usize::from(begun == Attempt::Begun);
            // Each look that may find the peer silent greets it.
            let looks = if way.stage == Stage::Open { &self.silence } else { &self.greeting };
            way.greet_at = (self.now + pause).min(looks.next(way.heard));
            if way.stage == Stage::Open && way.ahead != way.confirmed {
                // An answer of before may have been lost.
                way.ask_for_frames();
                self.stirred.insert(id);
            }
        }
        let at = way.greet_at;
        self.look_at(id, at);
    }

    /// Welcomes guests that have greeted, and answers those that have asked.
    pub(crate) fn answer_guests(&mut self) {
        let token = self.given.token().to_bytes();
        let (now, patience) = (self.now, self.config.handshake_timeout);
        let mut waiting = std::mem::take(&mut self.unanswered);
        waiting.retain(|(id, kind), reply| {
            let age = now.since(reply.asked);
            let Some(guest) = self.guests.get_mut(*id).filter(|_| age < patience) else { return false };
            if guest.replies >= REPLIES || now < reply.again {
                return true;
            }
            let body = if *kind == Reply::Welcome { &token[..] } else { &[] };
            let endpoint = &mut self.devices.first().endpoint;
            match endpoint.send(guest.address, [&reply.header.encode(), body], Flight::Reply(*id)) {
                Attempt::Begun => {
                    guest.replies += 1;
                    false
                }
                // Its connection is being opened, or nobody is there any more; the others need not wait for that.
                Attempt::Full => {
                    reply.again = now + GREET_SOON.max(age / 8);
                    true
                }
                Attempt::Failed(_) => false,
            }
        });
        self.unanswered = waiting;
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
            let endpoint = &mut self.devices.first().endpoint;
            match endpoint.send(way.address, [&header.encode(), part], Flight::Message(id)) {
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kv_core::{Op, PostId, Time, Transport, TransportEvent, WayEnd};

    use super::*;
    use crate::message::Immediate;
    use crate::metadata::Port;
    use crate::pair::{
        PEER, both_until, config, connected, connected_with, post, until, worker, worker_with,
    };
    use crate::transfer::Notify;

    #[test]
    fn a_peer_whose_answer_about_frames_was_lost_is_asked_again() {
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected();
        let way = here.ways.get_mut(&id).unwrap();
        (way.ahead, way.asked, way.greet_at) = (5, 5, Time::ZERO);
        here.look_at(id, Time::ZERO);
        both_until([&mut here, &mut there], "an answer", |here, _, _| {
            here.ways.get(&id).unwrap().confirmed == 5
        });
    }

    #[test]
    fn writes_to_a_peer_that_takes_fewer_bytes_of_data_are_not_counted() {
        let ((mut here, _ours), (there, _theirs)) = (worker(), worker());
        let mut metadata = Metadata::decode(&there.metadata().unwrap()).unwrap();
        metadata.immediate = 4;
        here.connect(PEER, &metadata.encode().unwrap()).unwrap();
        assert!(here.ways.values().next().unwrap().immediate < Immediate::SURE && here.counts_writes());
        here.post(PEER, post(Op::Write, 4096, Some(b"after its bytes"))).unwrap();
        let transfer = here.posts.id_of(PostId(1)).unwrap();
        assert!(matches!(here.posts.get(transfer).unwrap().notify, Notify::After(_)));
    }

    #[test]
    fn connects_that_are_refused_say_why_and_leave_nothing_behind() {
        let (mut here, _ours) = worker_with(config(1).with(|config| config.max_peers = 1));
        let ((first, _one), (second, _two)) = (worker(), worker());
        let metadata = first.metadata().unwrap();
        let changed = |change: fn(&mut Metadata)| {
            let mut metadata = Metadata::decode(&metadata).unwrap();
            change(&mut metadata);
            metadata.encode().unwrap()
        };
        let is_metadata = |result| matches!(result, Err(TransportError::Metadata(_)));
        let itself = here.metadata().unwrap();
        assert!(is_metadata(here.connect(PEER, &itself)));
        assert!(is_metadata(here.connect(PEER, &changed(|metadata| metadata.provider = "efa".to_owned()))));
        let foreign = |metadata: &mut Metadata| {
            metadata.ports.insert(0, Port { name: Bytes::from_static(b"of another network"), node: None });
        };
        assert!(here.connect(PEER, &changed(foreign)).is_err());
        assert_eq!((here.devices.first().addresses.len(), here.ways.len(), here.peers.len()), (0, 0, 0));
        here.connect(PEER, &metadata).unwrap();
        let again = here.connect(PEER, &second.metadata().unwrap());
        assert!(matches!(again, Err(TransportError::Unsupported(_))), "{again:?}");
        assert!(is_metadata(here.connect(PeerId(2), &metadata)), "it has another id already");
        let more = here.connect(PeerId(2), &second.metadata().unwrap());
        assert_eq!(more, Err(TransportError::WouldBlock));
        assert_eq!((here.devices.first().addresses.len(), here.ways.len(), here.peers.len()), (1, 1, 1));
    }

    /// Another process has its number now.
    #[test]
    fn a_peer_whose_process_has_ended_before_the_connect_takes_nothing_and_is_dead() {
        let ((mut here, _ours), (there, _theirs)) = (worker(), worker());
        let mut metadata = Metadata::decode(&there.metadata().unwrap()).unwrap();
        (metadata.process.inode, metadata.process.started) = (0, metadata.process.started - 1);
        let metadata = metadata.encode().unwrap();
        drop(there);
        here.connect(PEER, &metadata).unwrap();
        assert_eq!(here.send(PEER, Bytes::from_static(b"hello")), Err(TransportError::PeerGone));
        let events = until(&mut here, "the end", |events| !events.is_empty());
        let end = WayEnd::Dead { quiet_after: Duration::ZERO };
        assert_eq!(events, [TransportEvent::PeerGone { peer: PEER, end }]);
    }

    #[test]
    fn a_way_is_looked_at_when_a_lane_that_is_not_heard_is_to_be_asked_again() {
        let (id, [(mut here, _ours), (_there, _theirs)]) = connected_with([config(2), config(2)]);
        let lane = &mut here.ways.get_mut(&id).unwrap().lanes[1];
        lane.close();
        // libfabric had no room.
        lane.asked(false, here.now);
        let due = lane.due();
        here.timers.remove(id);
        here.ask_lanes(id);
        assert!(due.is_some() && here.timers.next() == due, "{due:?}");
    }
}
