//! How posts and ways end: with proof that no data operation touches memory any more.

use std::time::Duration;

use bytes::Bytes;
use kv_core::{PeerId, Time, TransportError, TransportEvent, WayEnd};
use kv_host::{Life, TransferId};

use crate::completing::Flight;
use crate::ffi::Attempt;
use crate::lane::Probe;
use crate::message::{Header, Kind};
use crate::transfer::Notify;
use crate::transport::FabricTransport;
use crate::way::{Stage, WayId};

/// How long the end of a process on this host is awaited after its connection has failed.
const DYING: Duration = Duration::from_secs(1);
/// How often libfabric must have no room for a probe, though little is under way, until that means that there is no
/// connection.
const REFUSED: u8 = 3;
/// How often a way that waits for its end is looked at.
const AGAIN: Duration = Duration::from_millis(5);
/// How long a way that was disconnected goes on sending its frames.
pub(crate) const LEAVING: Duration = Duration::from_secs(2);

impl FabricTransport {
    /// The way to a peer to whom something can be sent.
    pub(crate) fn usable(&self, peer: PeerId) -> Result<WayId, TransportError> {
        let id = self.peers.get(&peer).copied().ok_or(TransportError::PeerGone)?;
        let usable = self.ways.get(&id).is_some_and(|way| way.is_usable());
        if usable { Ok(id) } else { Err(TransportError::PeerGone) }
    }

    /// Begins no more of a post. The post ends with this error once its slices have ended.
    pub(crate) fn give_up(&mut self, id: TransferId, error: TransportError) {
        let Some(transfer) = self.posts.get_mut(id) else { return };
        let way = transfer.way;
        transfer.failed.get_or_insert(error);
        if transfer.is_over() {
            if let Some(way) = self.ways.get_mut(&way) {
                way.parked.retain(|(parked, _)| *parked != id);
            }
            self.settle(id);
        }
    }

    /// Ends a post if nothing of it is under way and nothing more is to come.
    pub(crate) fn settle(&mut self, id: TransferId) {
        let Some(transfer) = self.posts.get_mut(id).filter(|transfer| transfer.is_over()) else { return };
        let (failed, way) = (transfer.failed.take(), self.ways.get_mut(&transfer.way));
        let notify = std::mem::replace(&mut transfer.notify, Notify::None);
        if let (Notify::Announced { sequence, len }, Some(way)) = (&notify, way) {
            way.announced -= 1;
            way.announced_bytes -= len;
            if failed.is_some() && matches!(way.stage, Stage::Open | Stage::Leaving { .. }) {
                // Writes that were begun have ended. They may be counted after this, by another device.
                let (sequence, count) = (*sequence, transfer.begun);
                let withdraw = Header { sequence, count, ..Header::new(way.key, Kind::Withdraw) };
                way.push(withdraw, Bytes::new());
            }
        }
        match (failed, notify) {
            (Some(error), _) => self.posts.end(id, Err(error)),
            (None, Notify::After(frame)) => {
                if let Some(way) = self.ways.get_mut(&transfer.way) {
                    way.parked.push_back((id, frame));
                }
            }
            (None, _) => self.posts.end(id, Ok(())),
        }
    }

    /// The owner has disconnected a peer: slices under way are awaited, and frames are sent.
    pub(crate) fn leave(&mut self, id: WayId) {
        let since = self.now;
        let Some(way) = self.ways.get_mut(&id) else { return };
        way.peer = None;
        way.permitted = Time::ZERO;
        match way.stage {
            Stage::Greeting => {
                way.stage = Stage::Leaving { since };
                way.drop_outgoing();
            }
            Stage::Open => {
                way.stage = Stage::Leaving { since };
                way.push(Header::new(way.key, Kind::Bye), Bytes::new());
            }
            Stage::Leaving { .. } | Stage::Broken { .. } => {}
        }
        self.give_up_all(id);
        self.stirred.insert(id);
        self.look_at(id, self.now);
    }

    pub(crate) fn give_up_all(&mut self, id: WayId) {
        for transfer in self.posts.of_way(id) {
            self.give_up(transfer, TransportError::PeerGone);
        }
    }

    /// The process of a way's peer has ended.
    pub(crate) fn process_ended(&mut self, id: WayId) {
        let Some(way) = self.ways.get_mut(&id) else { return };
        if let Life::Watched(process) = &way.life {
            self.watch.forget(process);
        }
        way.life = Life::Dead;
        self.break_way(id, None);
        self.look_at(id, self.now);
    }

    /// A way is of no use any more: nothing more is begun on it. `end` is what is known about the peer.
    pub(crate) fn break_way(&mut self, id: WayId, end: Option<WayEnd>) {
        let Some(way) = self.ways.get_mut(&id) else { return };
        match way.stage {
            Stage::Greeting | Stage::Open => {
                let dying = if matches!(way.life, Life::Watched(_)) { DYING } else { Duration::ZERO };
                way.stage = Stage::Broken { until: self.now + dying, end };
            }
            Stage::Leaving { .. } | Stage::Broken { .. } => {}
        }
        way.drop_outgoing();
        self.give_up_all(id);
        self.look_at(id, self.now);
    }

    /// Looks at a way at this time, or before.
    pub(crate) fn look_at(&mut self, id: WayId, at: Time) {
        if self.ways.contains_key(&id) {
            self.timers.arm(id, at);
        }
    }

    /// Does what is due.
    pub(crate) fn serve_timers(&mut self) {
        for id in self.timers.due(self.now) {
            self.look(id);
        }
    }

    fn look(&mut self, id: WayId) {
        let Some(way) = self.ways.get_mut(&id) else { return };
        match way.stage {
            Stage::Greeting if self.greeting.found_nothing_since(way.heard) => {
                self.break_way(id, Some(WayEnd::Lost))
            }
            Stage::Greeting => self.greet(id),
            Stage::Open if self.silence.found_nothing_since(way.heard) => {
                self.break_way(id, Some(WayEnd::Lost))
            }
            Stage::Open => {
                self.ask_lanes(id);
                self.greet(id)
            }
            Stage::Leaving { since } => {
                let dead = way.life.is_over();
                if dead || self.leaving.found_nothing_since(since) {
                    way.drop_outgoing();
                }
                if way.under_way() == 0 && way.outgoing.is_empty() {
                    return self.finish(id, None);
                }
                self.look_at(id, self.now + AGAIN);
            }
            Stage::Broken { until, end } => self.look_at_broken(id, until, end),
        }
    }

    /// A broken way ends when nothing is under way any more, and, if the peer is dead, when nothing of it can arrive.
    fn look_at_broken(&mut self, id: WayId, until: Time, end: Option<WayEnd>) {
        let Some(way) = self.ways.get(&id) else { return };
        let (dead, is_quiet, drained) = (way.life.is_over(), way.under_way() == 0, way.is_drained());
        if !is_quiet || (!dead && end.is_none() && self.now < until) {
            return self.look_at(id, self.now + AGAIN);
        }
        if dead && !drained {
            self.probe(id);
            return self.look_at(id, self.now + AGAIN);
        }
        let end = if dead { WayEnd::Dead { quiet_after: Duration::ZERO } } else { WayEnd::Lost };
        self.finish(id, Some(end));
    }

    /// Finds out whether everything that a dead peer has sent was taken in or thrown away, on all links: the peer has paired
    /// its devices with those here as it liked.
    ///
    /// libfabric does not say when a connection has ended. But it ends a connection when it has read all of the
    /// connection's bytes, up to the end that the kernel has put behind them when the process ended; and then it cancels
    /// what is under way. So a write of one byte is begun, which nobody can answer. If it is cancelled, or there is no
    /// connection to begin it on, nothing comes any more. If it fails otherwise, bytes may still be unread, and the next
    /// one is tried.
    fn probe(&mut self, id: WayId) {
        let strict = self.reads_sockets();
        let Some(way) = self.ways.get_mut(&id) else { return };
        for (number, link) in way.links.iter_mut().enumerate() {
            let Some(device) = self.devices.get(link.device) else { continue };
            let refused = match link.probe {
                Probe::None => 0,
                Probe::Refused(times) => times,
                Probe::UnderWay | Probe::Drained => continue,
            };
            if !device.endpoint.has_room() {
                continue;
            }
            link.probe = match device.endpoint.probe(link.address, Flight::Probe(id, number)) {
                Attempt::Begun => Probe::UnderWay,
                Attempt::Full => Probe::Refused(refused + 1),
                // No connection leads there: an address that this host cannot reach any more.
                Attempt::Failed(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EADDRNOTAVAIL) => {
                    Probe::Refused(refused + 1)
                }
                Attempt::Failed(_) if strict => Probe::None,
                Attempt::Failed(_) => Probe::Drained,
            };
            if link.probe == Probe::Refused(REFUSED) {
                link.probe = Probe::Drained;
            }
        }
        if way.is_drained() {
            self.look_at(id, self.now);
        }
    }

    /// A probe has ended.
    pub(crate) fn probed(&mut self, id: WayId, link: usize, result: Result<(), i32>) {
        let strict = self.reads_sockets();
        let Some(way) = self.ways.get_mut(&id) else { return };
        if let Some(link) = way.links.get_mut(link) {
            let drained = result == Err(libc::ECANCELED) || (result.is_err() && !strict);
            link.probe = if drained { Probe::Drained } else { Probe::None };
        }
        self.look_at(id, self.now);
    }

    /// True if this process copies the bytes of peers' writes out of sockets; false if a network card puts them in place,
    /// which has no bytes of a process that has ended.
    fn reads_sockets(&self) -> bool {
        self.devices.promises().copies
    }

    /// Removes a way. Its posts end, and then the owner is told of the peer's end, if it asked for the peer.
    fn finish(&mut self, id: WayId, end: Option<WayEnd>) {
        let Some(way) = self.ways.remove(&id) else { return };
        self.timers.remove(id);
        self.stirred.remove(&id);
        self.blocked.remove(&id);
        self.keys.remove(&way.key);
        if let Life::Watched(process) = &way.life {
            self.watch.forget(process);
        }
        if let (Some(WayEnd::Dead { .. }), Some(guest)) = (end, self.guests.by_token(way.identity.token)) {
            self.forget_guest(guest);
        }
        self.give_back_links(&way.links, &way.names);
        for transfer in self.posts.of_way(id) {
            let failed = self.posts.get_mut(transfer).and_then(|transfer| transfer.failed.take());
            self.posts.end(transfer, Err(failed.unwrap_or(TransportError::PeerGone)));
        }
        if let (Some(peer), Some(end)) = (way.peer, end) {
            self.peers.remove(&peer);
            self.posts.tell(TransportEvent::PeerGone { peer, end });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::Instant;

    use kv_core::{Op, Post, PostId, Transport};
    use kv_host::{Process, clock};

    use super::*;
    use crate::message::{Immediate, SEQUENCE_BITS};
    use crate::metadata::Place;
    use crate::pair::{
        LEN, PEER, both_until, config, connect_back, connected, connected_with, frames_of, poll, post, until,
        worker,
    };
    use crate::silence::Looks;

    /// Its pages must not be free while libfabric reads them.
    #[test]
    fn neither_a_post_nor_a_broken_way_ends_while_a_slice_of_it_is_under_way() {
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected();
        let begun = Instant::now();
        let waits = |what: &str| assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
        here.permit(PEER, Time::MAX);
        here.post(PEER, post(Op::Write, LEN, None)).unwrap();
        let mut events = Vec::new();
        while here.ways.get(&id).unwrap().moving() == 0 {
            waits("no slice is begun");
            here.poll(clock::now(), &mut events);
        }
        here.break_way(id, Some(WayEnd::Lost));
        // The peer does not look.
        let broken = Instant::now();
        while broken.elapsed() < Duration::from_millis(300) {
            here.poll(clock::now(), &mut events);
        }
        assert_eq!(events, []);
        assert!(here.ways.get(&id).unwrap().moving() > 0, "the sockets hold all of it");
        while events.len() < 2 {
            waits("the slices do not end");
            events.extend(poll([&mut here, &mut there]));
        }
        let posted = TransportEvent::Posted { post: PostId(1), result: Err(TransportError::PeerGone) };
        assert_eq!(events, [posted, TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost }]);
        assert!(!here.ways.contains_key(&id));
    }

    #[test]
    fn frames_that_were_taken_before_a_disconnect_arrive_though_this_side_pauses() {
        const FRAME: usize = 1 << 20;
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected();
        let frames: Vec<Bytes> = (1..4_u8).map(|byte| vec![byte; FRAME].into()).collect();
        frames.iter().for_each(|frame| here.send(PEER, frame.clone()).unwrap());
        here.disconnect(PEER);
        std::thread::sleep(LEAVING + LEAVING / 2);
        let (mut events, begun) = (Vec::new(), Instant::now());
        while here.ways.contains_key(&id) {
            assert!(begun.elapsed() < Duration::from_secs(20), "the way does not end");
            here.poll(clock::now(), &mut Vec::new());
            there.poll(clock::now(), &mut events);
        }
        while events.len() < frames.len() && begun.elapsed() < Duration::from_secs(20) {
            there.poll(clock::now(), &mut events);
        }
        assert!(frames_of(&events) == frames, "{} of {} frames", events.len(), frames.len());
    }

    /// Nobody counts the slices of these posts where they arrive.
    #[test]
    fn the_frame_of_a_read_and_of_writes_that_are_not_counted_follows_their_bytes() {
        for (op, immediate) in [(Op::Read, Immediate::SURE), (Op::Write, 4), (Op::Write, 0)] {
            let (id, [(mut here, ours), (mut there, theirs)]) = connected();
            here.permit(PEER, Time::MAX);
            here.ways.get_mut(&id).unwrap().immediate = immediate;
            let source = if op == Op::Write { &ours } else { &theirs };
            source.write(0, &vec![7; LEN]).unwrap();
            here.post(PEER, post(op, LEN, Some(b"moved"))).unwrap();
            let (mut told, mut heard, begun) = (Vec::new(), Vec::new(), Instant::now());
            while told.is_empty() || heard.is_empty() {
                assert!(begun.elapsed() < Duration::from_secs(20), "{op:?}: {told:?}, {heard:?}");
                here.poll(clock::now(), &mut told);
                there.poll(clock::now(), &mut heard);
                if !told.is_empty() || !heard.is_empty() {
                    let mut bytes = vec![0; LEN];
                    let target = if op == Op::Write { &theirs } else { &ours };
                    target.read(0, &mut bytes).unwrap();
                    assert!(bytes.iter().all(|byte| *byte == 7), "{op:?}: told before the bytes were there");
                }
            }
            assert_eq!(told, [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
            assert_eq!(frames_of(&heard), [&b"moved"[..]]);
            assert_eq!(there.stats().counted, 0);
        }
    }

    /// The number of a post is shorter than the number of posts that a way may carry.
    #[test]
    fn a_way_goes_on_counting_when_its_numbers_of_posts_begin_again() {
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected();
        here.permit(PEER, Time::MAX);
        here.ways.get_mut(&id).unwrap().sequence = (1 << SEQUENCE_BITS) - 2;
        let (mut told, mut heard) = (Vec::new(), Vec::new());
        for number in 1..6 {
            here.post(PEER, Post { id: PostId(number), ..post(Op::Write, 4096, Some(b"counted")) }).unwrap();
        }
        let begun = Instant::now();
        while told.len() < 5 || heard.len() < 5 {
            assert!(begun.elapsed() < Duration::from_secs(20), "{told:?}, {heard:?}");
            here.poll(clock::now(), &mut told);
            there.poll(clock::now(), &mut heard);
        }
        assert_eq!((there.stats().counted, there.stats().stray, there.stats().refused), (5, 0, 0));
    }

    /// libfabric has no room for it while it opens the connection.
    #[test]
    fn a_slice_that_finds_no_room_is_begun_again_and_all_bytes_arrive() {
        let ((mut here, ours), (mut there, theirs)) = (worker(), worker());
        here.connect(PEER, &there.metadata().unwrap()).unwrap();
        here.permit(PEER, Time::MAX);
        let way = here.ways.values_mut().next().unwrap();
        (way.stage, way.greet_at) = (Stage::Open, Time::MAX);
        let bytes: Vec<u8> = (0..LEN).map(|at| (at / 1000) as u8 | 1).collect();
        ours.write(0, &bytes).unwrap();
        here.post(PEER, post(Op::Write, LEN, None)).unwrap();
        here.poll(clock::now(), &mut Vec::new());
        assert_eq!(here.blocked.len(), 1, "there was room");
        let (mut events, begun) = (Vec::new(), Instant::now());
        while events.is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(20), "the post does not end");
            events = poll([&mut here, &mut there]);
        }
        assert_eq!(events, [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
        let mut arrived = vec![0; LEN];
        theirs.read(0, &mut arrived).unwrap();
        assert!(arrived == bytes, "bytes are missing");
    }

    #[test]
    fn cancelled_writes_leave_nothing_behind_though_the_peer_permits_none() {
        let (id, [(mut here, _ours), (_there, _theirs)]) = connected();
        kv_conformance::cancel_many(&mut here, PEER);
        let turns = here.ways.get(&id).unwrap().turns.len();
        assert!(turns < 100, "{turns} turns wait, and no post");
    }

    /// The peer's libfabric does not know the key.
    #[test]
    fn a_post_that_the_peer_refuses_ends_with_an_error_and_its_way_is_lost() {
        for op in [Op::Write, Op::Read] {
            let (id, [(mut here, _ours), (mut there, _theirs)]) = connected();
            here.permit(PEER, Time::MAX);
            let place = &mut here.ways.get_mut(&id).unwrap().regions[0];
            *place = Place::new(place.base, place.len, vec![place.key(0).unwrap() ^ 0x55], None);
            here.post(PEER, post(op, 4096, Some(b"never"))).unwrap();
            let (mut events, begun) = (Vec::new(), Instant::now());
            while events.len() < 2 {
                assert!(begun.elapsed() < Duration::from_secs(20), "{op:?}: {events:?}");
                events.extend(poll([&mut here, &mut there]));
            }
            let posted = TransportEvent::Posted { post: PostId(1), result: Err(TransportError::PeerGone) };
            assert_eq!(
                events,
                [posted, TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost }],
                "{op:?}"
            );
        }
    }

    /// What was said before the peer has forgotten this side was lost.
    #[test]
    fn a_peer_that_has_forgotten_this_side_is_lost_when_it_welcomes_it_anew() {
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected();
        let begun = Instant::now();
        let (guest, _) = there.guests.all().next().unwrap();
        there.forget_guest(guest);
        here.ways.get_mut(&id).unwrap().greet_at = Time::ZERO;
        here.look_at(id, clock::now());
        let mut events = Vec::new();
        while events.is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(20), "not lost");
            events = poll([&mut here, &mut there]);
        }
        assert_eq!(events, [TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost }]);
    }

    #[test]
    fn a_disconnected_way_to_a_peer_that_takes_nothing_throws_its_frames_away_in_the_end() {
        let config = || config(1).with(|config| config.outbound_bytes = 64 << 20);
        let (id, [(mut here, _ours), (_there, _theirs)]) = connected_with([config(), config()]);
        while here.send(PEER, vec![1; 1 << 20].into()).is_ok() {}
        here.leaving = Looks::new(Duration::from_millis(100));
        here.disconnect(PEER);
        let begun = Instant::now();
        while here.ways.get(&id).is_some_and(|way| !way.outgoing.is_empty()) {
            assert!(begun.elapsed() < Duration::from_secs(20), "they wait for ever");
            here.poll(clock::now(), &mut Vec::new());
        }
    }

    #[test]
    fn a_way_that_has_ended_leaves_no_address_behind_on_any_device() {
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected_with([config(2), config(2)]);
        let in_use = |transport: &FabricTransport| -> Vec<usize> {
            transport.devices.all().map(|device| device.addresses.len()).collect()
        };
        assert_eq!(in_use(&here), [2, 2]);
        here.disconnect(PEER);
        both_until([&mut here, &mut there], "the end of the way", |here, _, _| !here.ways.contains_key(&id));
        assert_eq!(in_use(&here), [0, 0]);
    }

    #[test]
    fn a_dead_peer_is_no_guest_any_more_once_its_way_has_ended() {
        let (_, [(mut here, _ours), (mut there, _theirs)]) = connected();
        connect_back(&mut here, &mut there);
        let (way, dead) = (*there.ways.keys().next().unwrap(), WayEnd::Dead { quiet_after: Duration::ZERO });
        there.finish(way, Some(dead));
        assert_eq!(there.guests.all().count(), 0);
    }

    #[test]
    fn a_post_that_is_cancelled_amid_its_writes_leaves_nothing_behind_at_its_peer() {
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected();
        here.permit(PEER, Time::MAX);
        here.post(PEER, post(Op::Write, LEN, Some(b"void"))).unwrap();
        both_until([&mut here, &mut there], "a write", |here, there, _| {
            here.ways.get(&id).unwrap().moving() > 0 && there.stats().counted > 0
        });
        here.cancel(PostId(1));
        let events = both_until([&mut here, &mut there], "nothing is left", |here, there, events| {
            let held = there.guests.all().map(|(_, guest)| guest.incoming.held()).next();
            here.ways.get(&id).unwrap().outgoing.is_empty() && !events.is_empty() && held == Some((0, 0))
        });
        let result = Err(TransportError::Cancelled);
        assert_eq!(events, [TransportEvent::Posted { post: PostId(1), result }]);
    }

    /// The end of a process is reported after that of its connections.
    #[test]
    fn a_peer_whose_process_ends_after_its_connection_has_failed_is_dead_and_not_lost() {
        let (id, [(mut here, _ours), (_there, _theirs)]) = connected();
        let mut child =
            Command::new("sleep").arg("60").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let process = Process::open(i32::try_from(child.id()).unwrap()).unwrap();
        here.watch.watch(id, &process).unwrap();
        here.ways.get_mut(&id).unwrap().life = Life::Watched(process);
        here.break_way(id, None);
        let (way, now) = (here.ways.get_mut(&id).unwrap(), here.now);
        let Stage::Broken { until: wait, .. } = &mut way.stage else { panic!("{:?}", way.stage) };
        assert!(*wait > now, "its end is not awaited");
        // However busy this machine is.
        *wait = Time::MAX;
        way.links.iter_mut().for_each(|link| link.probe = Probe::Drained);
        let mut events = Vec::new();
        for _ in 0..3 {
            here.look_at(id, Time::ZERO);
            here.poll(clock::now(), &mut events);
        }
        assert_eq!(events, []);
        child.kill().unwrap();
        child.wait().unwrap();
        let events = until(&mut here, "the end", |events| !events.is_empty());
        let end = WayEnd::Dead { quiet_after: Duration::ZERO };
        assert_eq!(events, [TransportEvent::PeerGone { peer: PEER, end }]);
    }

    /// It has been reported as ended, but its kernel still holds the connections.
    #[test]
    fn a_dead_peer_is_drained_only_when_the_connections_of_all_devices_have_ended() {
        let (id, [(mut here, _ours), (_there, _theirs)]) = connected_with([config(2), config(2)]);
        here.process_ended(id);
        let of = |here: &FabricTransport, device: usize| {
            let mut links = here.ways.get(&id).unwrap().links.iter();
            links.position(|link| (link.device, link.endpoint) == (device, device)).unwrap()
        };
        let probe = |here: &FabricTransport, link: usize| here.ways.get(&id).unwrap().links[link].probe;
        let (first, second, begun) = (of(&here, 0), of(&here, 1), Instant::now());
        while [first, second].iter().any(|link| probe(&here, *link) != Probe::UnderWay) {
            assert!(begun.elapsed() < Duration::from_secs(20), "not probed");
            here.poll(clock::now(), &mut Vec::new());
        }
        for (result, after) in
            [(Ok(()), Probe::None), (Err(libc::EIO), Probe::None), (Err(libc::ECANCELED), Probe::Drained)]
        {
            here.probed(id, first, result);
            assert_eq!(probe(&here, first), after, "{result:?}");
        }
        let links = here.ways.get(&id).unwrap().links.len();
        let mut events = Vec::new();
        for link in (0..links).filter(|&link| link != first) {
            // No probe is under way on any of the others.
            (link..links)
                .filter(|&link| link != first)
                .for_each(|link| here.probed(id, link, Err(libc::EIO)));
            here.look_at(id, Time::ZERO);
            here.poll(clock::now(), &mut events);
            assert!(here.ways.contains_key(&id), "link {link} is not drained");
            here.probed(id, link, Err(libc::ECANCELED));
        }
        while events.is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(20), "all are drained");
            here.poll(clock::now(), &mut events);
        }
        let end = WayEnd::Dead { quiet_after: Duration::ZERO };
        assert_eq!(events, [TransportEvent::PeerGone { peer: PEER, end }]);
    }
}
