//! Messages of peers: greetings, frames, farewells.

use kv_core::{Origin, TransportEvent, WayEnd};
use kv_host::Life;

use crate::device::Device;
use crate::guest::{Guest, GuestId, Reply, Unanswered};
use crate::incoming::{ANNOUNCED, Incoming};
use crate::message::{Header, Hello, Kind};
use crate::pairing::MAX_LANES;
use crate::transport::FabricTransport;
use crate::way::Stage;

impl FabricTransport {
    /// A message of somebody is in a buffer.
    pub(crate) fn heard_message(&mut self, device: usize, buffer: usize, len: usize) {
        let mut scratch = std::mem::take(&mut self.scratch);
        let device = self.devices.get(device);
        let message = device.map_or(&[][..], |device| device.endpoint.message(buffer, &mut scratch, len));
        let heard = match Header::decode(message) {
            Some((header, body)) => self.heard(header, body),
            None => None,
        };
        self.stats.refused += u64::from(heard.is_none());
        self.scratch = scratch;
    }

    /// Does what a message asks for; `None` if it is a stranger's, or of an earlier life of either side.
    fn heard(&mut self, header: Header, body: &[u8]) -> Option<()> {
        match header.kind {
            Kind::Hello => self.hello(header.key, Hello::decode(body)?),
            Kind::Welcome => self.welcome(header, body),
            Kind::Ask => self.asked(header),
            Kind::Answer => self.answered(header),
            Kind::Farewell => {
                let id = *self.keys.get(&header.key)?;
                let way = self.ways.get_mut(&id)?;
                if let Life::Watched(process) = &way.life {
                    self.watch.forget(process);
                }
                // The transport there has ended, and none of its writes to this side is under way.
                way.life = Life::Dead;
                self.break_way(id, None);
                Some(())
            }
            Kind::Bye => {
                let id = self.guests.by_key(header.key)?;
                self.forget_guest(id);
                Some(())
            }
            Kind::Frame | Kind::More | Kind::Withdraw => {
                let id = self.guests.by_key(header.key)?;
                let guest = self.guests.get_mut(id)?;
                guest.heard = self.now;
                match guest.incoming.take(header, body) {
                    Ok(Some(frame)) => self.posts.tell(TransportEvent::Frame { from: Origin(id), frame }),
                    Ok(None) => {}
                    Err(_) => {
                        self.stats.broken += 1;
                        self.forget_guest(id);
                    }
                }
                self.answer_withheld(id);
                Some(())
            }
        }
    }

    /// Somebody connects this transport, or asks whether it is still there.
    fn hello(&mut self, key: u64, hello: Hello) -> Option<()> {
        if hello.to != self.given.token() || hello.from.token == self.given.token() {
            return None;
        }
        if let Some(id) = self.guests.by_key(key) {
            let guest = self.guests.get_mut(id).filter(|guest| guest.from == hello.from)?;
            guest.heard = self.now;
            self.welcome_guest(id);
            return Some(());
        }
        // Taken before an earlier way of the same peer is given back, so that its connection stays.
        let Device { addresses, endpoint, .. } = self.devices.first();
        let address = addresses.take(endpoint, &hello.name).ok()?;
        if let Some(earlier) = self.guests.by_token(hello.from.token) {
            self.forget_guest(earlier);
        }
        let Some(slot) = self.room_for_guest() else {
            let Device { addresses, endpoint, .. } = self.devices.first();
            addresses.give_back(endpoint, &hello.name);
            return None;
        };
        let id = self.next_id();
        let Hello { from, name, .. } = hello;
        let incoming = Incoming::default();
        let (heard, withheld, replies) = (self.now, None, 0);
        self.guests.insert(id, Guest { from, key, name, address, slot, incoming, withheld, replies, heard });
        self.stats.guests += 1;
        self.welcome_guest(id);
        Some(())
    }

    pub(crate) fn welcome_guest(&mut self, id: GuestId) {
        if let Some(guest) = self.guests.get(id) {
            let (sequence, count) = (guest.slot as u32, short(id));
            let welcome = Header { sequence, count, ..Header::new(guest.key, Kind::Welcome) };
            self.reply(id, Reply::Welcome, welcome);
        }
    }

    /// A guest asks whether a lane leads here, or whether its frames have arrived.
    fn asked(&mut self, header: Header) -> Option<()> {
        let id = self.guests.by_key(header.key)?;
        let guest = self.guests.get_mut(id)?;
        guest.heard = self.now;
        if header.sequence as usize >= MAX_LANES {
            return None;
        }
        let answer = Header { kind: Kind::Answer, len: 0, ..header };
        if header.sequence == 0 && guest.incoming.counters() > ANNOUNCED {
            // The writes for which the frames wait are in the queue of another device.
            guest.withheld = Some(answer);
        } else {
            self.reply(id, Reply::Answer(header.sequence), answer);
        }
        Some(())
    }

    fn reply(&mut self, id: GuestId, kind: Reply, header: Header) {
        self.unanswered.insert((id, kind), Unanswered { header, asked: self.now, again: self.now });
    }

    /// Sends the answer that was withheld from a guest, if few enough of its frames wait for writes by now.
    pub(crate) fn answer_withheld(&mut self, id: GuestId) {
        if let Some(guest) = self.guests.get_mut(id)
            && guest.incoming.counters() <= ANNOUNCED
            && let Some(answer) = guest.withheld.take()
        {
            self.reply(id, Reply::Answer(0), answer);
        }
    }

    /// A peer has answered a question.
    fn answered(&mut self, header: Header) -> Option<()> {
        let id = *self.keys.get(&header.key)?;
        let way = self.ways.get_mut(&id)?;
        let lane = way.lanes.get_mut(header.sequence as usize)?;
        way.heard = self.now;
        lane.is_heard(self.now);
        // No more than was sent, and no less than was known.
        let (new, unknown) =
            (header.count.wrapping_sub(way.confirmed), way.ahead.wrapping_sub(way.confirmed));
        if header.sequence == 0 && new <= unknown {
            way.confirmed = header.count;
        }
        self.stirred.insert(id);
        Some(())
    }

    fn room_for_guest(&mut self) -> Option<usize> {
        if let Some(slot) = self.guests.free_slot(self.config.max_guests) {
            return Some(slot);
        }
        let (id, heard) = self.guests.most_silent()?;
        if !self.silence.found_nothing_since(heard) {
            return None;
        }
        self.forget_guest(id);
        self.guests.free_slot(self.config.max_guests)
    }

    /// The peer of a way has answered.
    fn welcome(&mut self, header: Header, body: &[u8]) -> Option<()> {
        let id = *self.keys.get(&header.key)?;
        let way = self.ways.get_mut(&id)?;
        if body != way.identity.token.to_bytes() {
            return None;
        }
        if way.stage == Stage::Open && way.guest != header.count {
            // The peer has forgotten this side, and knows it anew: frames and questions of before were lost.
            self.break_way(id, Some(WayEnd::Lost));
            return Some(());
        }
        way.heard = self.now;
        (way.slot, way.guest) = (header.sequence, header.count);
        if way.stage == Stage::Greeting {
            way.stage = Stage::Open;
            way.greet_at = self.now + self.config.silence / 4;
            let at = way.greet_at;
            self.look_at(id, at);
            self.ask_lanes(id);
            self.stirred.insert(id);
        }
        Some(())
    }

    /// Forgets a guest. Writes that it has begun go on; frames that wait for them are never given out.
    pub(crate) fn forget_guest(&mut self, id: GuestId) {
        self.unanswered.retain(|(guest, _), _| *guest != id);
        if let Some(guest) = self.guests.remove(id) {
            let Device { addresses, endpoint, .. } = self.devices.first();
            addresses.give_back(endpoint, &guest.name);
        }
    }
}

/// The number of a guest in a header.
fn short(id: GuestId) -> u32 {
    (id & u64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use kv_core::{PeerId, Transport, TransportWait};
    use kv_host::Token;

    use super::*;
    use crate::config::FabricConfig;
    use crate::message::Immediate;
    use crate::metadata::Identity;

    fn transport(change: impl FnOnce(&mut FabricConfig)) -> FabricTransport {
        let config = FabricConfig::new("127.0.0.1".parse().unwrap());
        let config = config.with(|config| config.handshake_timeout = Duration::from_secs(6));
        FabricTransport::new(config.with(change)).unwrap()
    }

    fn serve(transport: &mut FabricTransport) {
        transport.poll(kv_host::clock::now(), &mut Vec::new());
    }

    /// Lets one transport connect the other, which must welcome it.
    fn connects(from: &mut FabricTransport, to: &mut FabricTransport) {
        from.connect(PeerId(1), &to.metadata().unwrap()).unwrap();
        let begun = Instant::now();
        while from.ways.values().any(|way| way.stage != Stage::Open) {
            assert!(begun.elapsed() < Duration::from_secs(5), "not welcomed");
            serve(from);
            serve(to);
        }
    }

    /// Polls this side alone until it tells that its peer is lost.
    fn lost(transport: &mut FabricTransport) {
        let (mut events, begun) = (Vec::new(), Instant::now());
        while events.is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(10), "a silent peer is not lost");
            transport.poll(kv_host::clock::now(), &mut events);
        }
        assert_eq!(events, [TransportEvent::PeerGone { peer: PeerId(1), end: WayEnd::Lost }]);
    }

    /// As when the process is stopped for a while: what the peer would have answered was not asked for.
    #[test]
    fn a_transport_that_pauses_for_longer_than_the_silence_finds_its_way_as_it_was() {
        let silence = Duration::from_secs(1);
        // The pause begins when the peer was heard last, and when most of its silence has passed.
        for before in [Duration::ZERO, silence / 10 * 9] {
            let mut pauses = transport(|config| config.silence = silence);
            let mut peer = transport(|_| {});
            connects(&mut pauses, &mut peer);
            let (id, begun) = (*pauses.ways.keys().next().unwrap(), Instant::now());
            let mut events = Vec::new();
            while begun.elapsed() < before {
                pauses.poll(kv_host::clock::now(), &mut events);
            }
            std::thread::sleep(2 * silence);
            let begun = Instant::now();
            while begun.elapsed() < 2 * silence {
                pauses.poll(kv_host::clock::now(), &mut events);
                serve(&mut peer);
            }
            assert_eq!(events, [], "paused after {before:?}");
            assert_eq!(pauses.ways.get(&id).map(|way| way.stage), Some(Stage::Open));
            // And a peer that says nothing is lost, as before.
            lost(&mut pauses);
        }
    }

    /// What it has said lies in its sockets, or was never sent.
    #[test]
    fn a_transport_that_pauses_while_it_greets_a_peer_still_opens_the_way() {
        let patience = Duration::from_millis(500);
        let mut pauses = transport(|config| config.handshake_timeout = patience);
        let mut peer = transport(|_| {});
        pauses.connect(PeerId(1), &peer.metadata().unwrap()).unwrap();
        std::thread::sleep(2 * patience);
        let (mut events, begun) = (Vec::new(), Instant::now());
        while pauses.ways.values().any(|way| way.stage != Stage::Open) {
            assert!(begun.elapsed() < Duration::from_secs(5), "not welcomed");
            pauses.poll(kv_host::clock::now(), &mut events);
            assert_eq!(events, []);
            serve(&mut peer);
        }
        // And a way to a peer that says nothing is given up, as before.
        let deaf = transport(|_| {});
        pauses.disconnect(PeerId(1));
        pauses.connect(PeerId(1), &deaf.metadata().unwrap()).unwrap();
        lost(&mut pauses);
    }

    #[test]
    fn a_host_that_pauses_forgets_no_guest_for_another_until_one_is_silent() {
        let mut host = transport(|config| (config.silence, config.max_guests) = (Duration::from_secs(1), 2));
        // They greet twice a second.
        let [mut silent, mut speaks] =
            [(); 2].map(|()| transport(|config| config.silence = Duration::from_secs(2)));
        connects(&mut silent, &mut host);
        connects(&mut speaks, &mut host);
        let tokens = [&silent, &speaks].map(|guest| guest.given.token());
        let guests = |host: &FabricTransport| tokens.map(|token| host.guests.by_token(token));
        let before = guests(&host);
        assert!(before.iter().all(Option::is_some));
        let mut newcomer = transport(|config| config.handshake_timeout = Duration::from_secs(60));
        newcomer.connect(PeerId(1), &host.metadata().unwrap()).unwrap();
        std::thread::sleep(Duration::from_millis(1500));
        // Those that are there come last to the host that moves again.
        let begun = Instant::now();
        while host.stats.refused == 0 {
            assert!(begun.elapsed() < Duration::from_secs(5), "not refused");
            serve(&mut newcomer);
            serve(&mut host);
            assert_eq!(guests(&host), before, "forgotten after the host's own pause");
        }
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(2) {
            [&mut newcomer, &mut silent, &mut speaks, &mut host].into_iter().for_each(serve);
            assert_eq!(guests(&host), before, "they were heard");
        }
        // One of them says nothing any more.
        let begun = Instant::now();
        while newcomer.ways.values().any(|way| way.stage != Stage::Open) {
            assert!(begun.elapsed() < Duration::from_secs(20), "a silent guest keeps its room");
            [&mut newcomer, &mut speaks, &mut host].into_iter().for_each(serve);
        }
        assert_eq!(guests(&host), [None, before[1]]);
    }

    #[test]
    fn a_guest_that_says_goodbye_leaves_its_room_to_another_at_once() {
        let mut host = transport(|config| config.max_guests = 1);
        for _ in 0..3 {
            let mut guest = transport(|_| {});
            connects(&mut guest, &mut host);
            guest.disconnect(PeerId(1));
            let begun = Instant::now();
            while host.guests.all().count() > 0 {
                assert!(begun.elapsed() < Duration::from_secs(5), "it keeps its room");
                serve(&mut guest);
                serve(&mut host);
            }
        }
        assert_eq!(host.guests.free_slot(1), Some(0), "each had the same number");
    }

    /// What an earlier life of either side has sent may still be on its way.
    #[test]
    fn messages_and_writes_of_other_lives_and_other_workers_are_refused() {
        let (mut host, mut guest) = (transport(|_| {}), transport(|_| {}));
        connects(&mut guest, &mut host);
        let (id, key, slot, from) = host
            .guests
            .all()
            .map(|(id, guest)| (id, guest.key, guest.slot as u32, guest.from))
            .next()
            .unwrap();
        let (to, name) = (host.given.token(), guest.given.name().to_vec());
        let hello = Hello { to, from, name };
        let other = || Token::random().unwrap();
        assert_eq!(host.hello(key, Hello { from: Identity::of(other(), b"another"), ..hello.clone() }), None);
        assert_eq!(host.hello(key, Hello { to: other(), ..hello.clone() }), None);
        assert_eq!(host.hello(key + 1, Hello { to: other(), ..hello.clone() }), None);
        assert_eq!(host.heard(Header::new(key + 1, Kind::Frame), b""), None);
        assert_eq!(host.heard(Header::new(key + 1, Kind::Bye), b""), None);
        // A write of an earlier way with the same number, for a post that is announced with it, too.
        let sequence = 5;
        let frame = Header { len: 4, count: 1, sequence, ..Header::new(key, Kind::Frame) };
        assert_eq!(host.heard(frame, b"done"), Some(()));
        let before = host.stats();
        host.write_arrived(0, Immediate { key: key ^ 1 << 63, slot, sequence }.encode());
        host.write_arrived(0, Immediate { key, slot: slot + 1, sequence }.encode());
        assert_eq!((host.stats().stray, host.stats().counted), (before.stray + 2, before.counted));
        assert_eq!(host.posts.events(), 0, "the frame was given out");
        host.write_arrived(0, Immediate { key, slot, sequence }.encode());
        let plain = Header { len: 4, ..Header::new(key, Kind::Frame) };
        assert_eq!(host.heard(plain, b"more"), Some(()));
        let mut events = Vec::new();
        host.posts.hand_over(&mut events);
        let told = |frame: &'static [u8]| {
            let frame = bytes::Bytes::from_static(frame);
            TransportEvent::Frame { from: Origin(id), frame }
        };
        assert_eq!(events, [told(b"done"), told(b"more")]);
        // And the guest takes no other worker's welcome, nor an answer about more than it has asked for.
        let (way, key) = guest.ways.iter().map(|(way, state)| (*way, state.key)).next().unwrap();
        let welcome = Header { sequence: 9, count: 9, ..Header::new(key, Kind::Welcome) };
        assert_eq!(guest.heard(welcome, &other().to_bytes()), None);
        assert_eq!(guest.heard(Header { count: 7, ..Header::new(key, Kind::Answer) }, b""), Some(()));
        let way = guest.ways.get(&way).unwrap();
        assert_eq!((way.stage, way.slot, way.confirmed), (Stage::Open, slot, 0));
    }

    /// Its own timers, greetings for one, are seconds away.
    #[test]
    fn a_worker_with_a_new_connection_sleeps_no_longer_than_until_its_keepalive_is_due() {
        let (mut host, mut guest) = (transport(|_| {}), transport(|_| {}));
        connects(&mut guest, &mut host);
        let begun = Instant::now();
        let slept = |transport: &FabricTransport| match transport.wait() {
            TransportWait::ReadableOrAfter(_, after) => Some(after),
            _ => None,
        };
        while slept(&host).is_none_or(|after| after < Duration::from_millis(100)) {
            assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", host.wait());
            serve(&mut host);
        }
        assert!(slept(&host).unwrap() <= Duration::from_secs(1), "{:?}", host.wait());
    }

    #[test]
    fn a_guest_that_is_gone_holds_up_no_other_and_is_not_answered_for_ever() {
        let (mut host, mut guest) = (transport(|_| {}), transport(|_| {}));
        let name = transport(|_| {}).given.name().to_vec();
        let from = Identity::of(Token::random().unwrap(), b"gone");
        host.hello(7, Hello { to: host.given.token(), from, name }).unwrap();
        connects(&mut guest, &mut host);
        let begun = Instant::now();
        while !host.unanswered.is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", host.unanswered);
            serve(&mut host);
        }
    }

    #[test]
    fn a_guest_that_takes_no_replies_takes_no_room_from_others() {
        let (mut host, mut deaf, mut other) = (transport(|_| {}), transport(|_| {}), transport(|_| {}));
        connects(&mut deaf, &mut host);
        let (id, _) = host.guests.all().next().unwrap();
        let (mut greeted, mut stuck) = (0, 0);
        while stuck < 1000 {
            greeted += 1;
            assert!(greeted < 2_000_000, "the kernel takes whatever is sent");
            host.welcome_guest(id);
            host.answer_guests();
            host.take_completions();
            let replies = host.guests.get(id).unwrap().replies;
            assert!(replies <= 2, "{replies}");
            stuck = if replies == 2 { stuck + 1 } else { 0 };
        }
        println!("stuck after {greeted} greetings");
        connects(&mut other, &mut host);
    }

    #[test]
    fn a_peer_that_comes_anew_takes_the_room_of_its_earlier_way() {
        let (mut host, mut guest) = (transport(|_| {}), transport(|_| {}));
        connects(&mut guest, &mut host);
        let (earlier, key, from) =
            host.guests.all().map(|(id, guest)| (id, guest.key, guest.from)).next().unwrap();
        let (to, name) = (host.given.token(), guest.given.name().to_vec());
        host.hello(key + 1, Hello { to, from, name }).unwrap();
        assert!(host.guests.get(earlier).is_none());
        assert_eq!((host.guests.all().count(), host.guests.by_key(key)), (1, None));
    }

    #[test]
    fn peers_that_are_refused_or_forgotten_leave_no_address_behind() {
        let (mut host, mut guest) = (transport(|config| config.max_guests = 1), transport(|_| {}));
        connects(&mut guest, &mut host);
        let newcomer = transport(|_| {});
        let (to, from) = (host.given.token(), newcomer.given.identity().unwrap());
        let name = newcomer.given.name().to_vec();
        assert_eq!(host.hello(7, Hello { to, from, name }), None);
        assert_eq!(host.devices.first().addresses.len(), 1);
        let (id, _) = host.guests.all().next().unwrap();
        host.forget_guest(id);
        assert_eq!(host.devices.first().addresses.len(), 0);
    }

    /// Frames for whose writes nobody has looked yet, on another device.
    #[test]
    fn an_answer_about_frames_waits_until_few_enough_of_them_wait_for_writes() {
        let (mut host, mut guest) = (transport(|_| {}), transport(|_| {}));
        connects(&mut guest, &mut host);
        let (id, key, slot) =
            host.guests.all().map(|(id, guest)| (id, guest.key, guest.slot as u32)).next().unwrap();
        host.unanswered.clear();
        let arrives = |host: &mut FabricTransport, sequence| {
            host.write_arrived(0, Immediate { key, slot, sequence }.encode());
        };
        let announced = |sequence, count| Header { sequence, count, ..Header::new(key, Kind::Frame) };
        let answers = |host: &FabricTransport| host.unanswered.contains_key(&(id, Reply::Answer(0)));
        host.heard(announced(0, 1), b"").unwrap();
        (1..=ANNOUNCED as u32).for_each(|sequence| arrives(&mut host, sequence));
        let ask = Header { count: 5, ..Header::new(key, Kind::Ask) };
        host.heard(ask, b"").unwrap();
        assert!(!answers(&host), "more wait than a guest may have");
        arrives(&mut host, 0);
        assert!(answers(&host), "a write has made room");
        host.unanswered.clear();
        arrives(&mut host, 0);
        host.heard(ask, b"").unwrap();
        assert!(!answers(&host));
        host.heard(announced(0, 1), b"").unwrap();
        assert!(answers(&host), "a frame has made room");
    }
}
