//! The last words of a transport that is dropped.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use kv_host::{Token, clock};

use crate::completing::Flight;
use crate::ffi::Address;
use crate::message::{Header, Kind};
use crate::transport::FabricTransport;
use crate::way::{Stage, Way, WayId};

/// How long at most a transport that is dropped sends frames and awaits slices, and how long it then awaits that its
/// farewells are sent: each.
const FAREWELL: Duration = Duration::from_millis(400);

impl FabricTransport {
    /// Sends the frames that were taken, and awaits the slices under way, for [`FAREWELL`] at most. Then takes leave of the
    /// peers with which no slice is under way.
    pub(crate) fn take_leave(&mut self) {
        let ids: Vec<WayId> = self.ways.keys().copied().collect();
        for id in ids {
            self.give_up_all(id);
        }
        let has_words =
            |way: &Way| way.moving() > 0 || (way.stage != Stage::Greeting && !way.outgoing.is_empty());
        let begun = Instant::now();
        while self.ways.values().any(has_words) && begun.elapsed() < FAREWELL {
            self.serve(Instant::now());
        }
        self.now = clock::now();
        let mut words = self.last_words();
        let begun = Instant::now();
        while (!words.is_empty() || self.devices.first().endpoint.is_sending()) && begun.elapsed() < FAREWELL
        {
            // Each is tried once: what finds no connection to a peer finds none for long, and libfabric 1.17 can crash if it
            // is asked again and again meanwhile.
            let endpoint = &mut self.devices.first().endpoint;
            while endpoint.has_room_to_send()
                && let Some((address, header)) = words.pop_front()
            {
                let _ = endpoint.send(address, [&header.encode(), &[]], Flight::Farewell);
            }
            self.take_completions();
        }
    }

    /// The farewells to guests, and then the goodbyes to peers. A peer with which slices are under way, on any lane of any
    /// way to it, is told nothing, and takes nothing from the others.
    fn last_words(&self) -> VecDeque<(Address, Header)> {
        let moving = self.ways.values().filter(|way| way.moving() > 0);
        let moving: HashSet<Token> = moving.map(|way| way.identity.token).collect();
        let guests = self.guests.all().filter(|(_, guest)| !moving.contains(&guest.from.token));
        let farewells = guests.map(|(_, guest)| (guest.address, Header::new(guest.key, Kind::Farewell)));
        let is_left = |way: &&Way| way.stage == Stage::Open && !moving.contains(&way.identity.token);
        let ways = self.ways.values().filter(is_left);
        let byes = ways.map(|way| (way.address, Header::new(way.key, Kind::Bye)));
        farewells.chain(byes).collect()
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use kv_core::{Op, PeerId, Time, Transport, TransportEvent, WayEnd};

    use super::*;
    use crate::ffi::SENDS;
    use crate::guest::Guest;
    use crate::incoming::Incoming;
    use crate::metadata::Identity;
    use crate::pair::{LEN, PEER, connect_back, connected, frames_of, post, until, worker};
    use crate::silence::Looks;

    const SHORT: Duration = Duration::from_secs(1);

    #[test]
    fn frames_that_were_taken_before_a_transport_ends_arrive_before_its_farewell() {
        let (_, [(mut here, _ours), (mut there, _theirs)]) = connected();
        connect_back(&mut here, &mut there);
        let frames: Vec<Bytes> = (0..100_u8).map(|byte| vec![byte; 1000].into()).collect();
        frames.iter().for_each(|frame| here.send(PEER, frame.clone()).unwrap());
        drop(here);
        let gone = |event: &TransportEvent| matches!(event, TransportEvent::PeerGone { .. });
        let mut events = until(&mut there, "the end", |events| events.iter().any(gone));
        let end = WayEnd::Dead { quiet_after: Duration::ZERO };
        assert_eq!(events.pop(), Some(TransportEvent::PeerGone { peer: PEER, end }));
        assert!(frames_of(&events) == frames, "{} of {} frames", events.len(), frames.len());
    }

    /// Posts a write to a peer that takes nothing meanwhile, and polls until a slice of it is under way.
    fn write_begins(here: &mut FabricTransport, id: WayId, len: usize) {
        here.permit(PEER, Time::MAX);
        here.post(PEER, post(Op::Write, len, None)).unwrap();
        let begun = Instant::now();
        while here.ways.get(&id).unwrap().moving() == 0 {
            assert!(begun.elapsed() < Duration::from_secs(20), "no slice is begun");
            here.poll(clock::now(), &mut Vec::new());
        }
    }

    /// Some of its bytes may still be on their way when it has ended: nothing is proven.
    #[test]
    fn a_transport_that_ends_amid_its_writes_says_no_farewell_on_a_new_way_either() {
        for again in [false, true] {
            let (id, [(mut here, _ours), (mut there, _theirs)]) = connected();
            connect_back(&mut here, &mut there);
            // So few bytes that a farewell would find room behind them.
            write_begins(&mut here, id, 64 << 10);
            if again {
                here.disconnect(PEER);
                here.connect(PEER, &there.metadata().unwrap()).unwrap();
                assert_eq!(here.ways.len(), 2, "the first way has ended");
            }
            (there.config.silence, there.silence) = (SHORT, Looks::new(SHORT));
            drop(here);
            // A frame to it finds no connection, or no answer.
            there.send(PEER, Bytes::from_static(b"anybody there?")).unwrap();
            let events = until(&mut there, "the end", |events| !events.is_empty());
            let lost = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost };
            assert_eq!(events, [lost], "connected again: {again}");
        }
    }

    #[test]
    fn a_peer_that_takes_nothing_takes_no_farewell_from_the_others() {
        const OTHER: PeerId = PeerId(2);
        let (id, [(mut here, _ours), (_stuck, _theirs)]) = connected();
        let (mut other, _memory) = worker();
        here.connect(OTHER, &other.metadata().unwrap()).unwrap();
        connect_back(&mut here, &mut other);
        write_begins(&mut here, id, LEN);
        drop(here);
        let events = until(&mut other, "the end", |events| !events.is_empty());
        let end = WayEnd::Dead { quiet_after: Duration::ZERO };
        assert_eq!(events, [TransportEvent::PeerGone { peer: PEER, end }]);
    }

    /// More farewells than the endpoint has room for, in no order: one of them is for the peer.
    #[test]
    fn each_of_very_many_guests_hears_the_farewell() {
        let (_, [(mut here, _ours), (mut there, _theirs)]) = connected();
        connect_back(&mut here, &mut there);
        let (_, known) = here.guests.all().next().unwrap();
        let (name, address, hash) = (known.name.clone(), known.address, known.from.hash);
        for id in 0..6 * SENDS as u64 {
            let from = Identity { token: Token::random().unwrap(), hash };
            let (name, incoming, heard) = (name.clone(), Incoming::default(), here.now);
            let guest = Guest {
                from,
                key: id,
                name,
                address,
                slot: usize::MAX,
                incoming,
                withheld: None,
                replies: 0,
                heard,
            };
            here.guests.insert(u64::MAX - id, guest);
        }
        drop(here);
        let events = until(&mut there, "the end", |events| !events.is_empty());
        let end = WayEnd::Dead { quiet_after: Duration::ZERO };
        assert_eq!(events, [TransportEvent::PeerGone { peer: PEER, end }]);
    }

    #[test]
    fn a_transport_that_is_dropped_is_no_guest_of_its_peers_any_more() {
        let (_, [(here, _ours), (mut there, _theirs)]) = connected();
        assert_eq!(there.guests.all().count(), 1);
        drop(here);
        let begun = Instant::now();
        while there.guests.all().count() > 0 {
            assert!(begun.elapsed() < Duration::from_secs(20), "its room is kept");
            there.poll(clock::now(), &mut Vec::new());
        }
    }
}
