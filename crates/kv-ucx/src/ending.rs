//! How ways and remotes end, and what has to be waited for.

use std::time::Duration;

use kv_core::{PeerId, TransportError, TransportEvent, WayEnd};
use kv_host::Life;

use crate::message::{self, Kind};
use crate::remote::{Remote, RemoteId, Stage};
use crate::transport::UcxTransport;
use crate::way::{self, WayId};

/// How long the death of a peer on this host is awaited after its connection has failed: the kernel closes a dying
/// process's sockets before the process counts as dead.
const DYING: Duration = Duration::from_secs(1);

impl UcxTransport {
    /// The owner leaves a peer: its posts end early, and the peer is told once they have ended.
    pub(crate) fn leave(&mut self, peer: PeerId) {
        let Some(id) = self.peers.remove(&peer) else { return };
        let Some(way) = self.ways.get_mut(&id) else { return };
        let open = std::mem::replace(&mut way.stage, way::Stage::Leaving(None));
        if let way::Stage::Open(session) = open {
            way.stage = way::Stage::Leaving(Some(session));
        }
        way.clear();
        for transfer in self.posts.of_way(id) {
            self.give_up(transfer, TransportError::Cancelled);
        }
        self.leave_if_over(id);
    }

    /// Removes a way that is left and has no posts any more.
    pub(crate) fn leave_if_over(&mut self, id: WayId) {
        let Some(way) = self.ways.get(&id) else { return };
        let remote = self.remotes.get(way.remote).filter(|remote| remote.is_standing());
        let (Some(remote), true) = (remote, self.posts.of_way(id).is_empty()) else { return };
        if let Some(session) = way.session() {
            let goodbye = message::header(Kind::Goodbye, session.token);
            // A peer that does not hear it keeps a session of which nothing comes.
            let _ = self.engine.send(remote.endpoint, goodbye, bytes::Bytes::new());
            self.engine.forget(remote.endpoint, session.keys.iter().copied().flatten());
        }
        self.remove_way(id);
    }

    fn remove_way(&mut self, id: WayId) {
        let Some(way) = self.ways.remove(&id) else { return };
        self.by_token.remove(&way.token);
        if self.peers.get(&way.peer) == Some(&id) {
            self.peers.remove(&way.peer);
        }
        if let Some(remote) = self.remotes.get_mut(way.remote) {
            remote.ways.remove(&id);
        }
    }

    /// Ends a way of which nothing is under way, with its posts, and tells the owner.
    pub(crate) fn end_way(&mut self, id: WayId, end: WayEnd) {
        for transfer in self.posts.of_way(id) {
            let failed = self.posts.get_mut(transfer).and_then(|transfer| transfer.failed.take());
            self.posts.end(transfer, Err(failed.unwrap_or(TransportError::PeerGone)));
        }
        if let Some(way) = self.ways.get(&id).filter(|way| !way.is_leaving()) {
            self.posts.tell(TransportEvent::PeerGone { peer: way.peer, end });
        }
        self.remove_way(id);
    }

    /// An operation has failed: nothing is known of the others on the endpoint.
    pub(crate) fn break_off_after_failure(&mut self, id: RemoteId) {
        self.break_off(id);
        if let Some(Remote { stage: Stage::Ending { unquiet, .. }, .. }) = self.remotes.get_mut(id) {
            *unquiet = true;
        }
    }

    /// Starts nothing more with a remote: its endpoint has failed, or its process has ended.
    pub(crate) fn break_off(&mut self, id: RemoteId) {
        let Some(remote) = self.remotes.get_mut(id).filter(|remote| remote.is_standing()) else { return };
        remote.stage = Stage::Ending { since: self.now, unquiet: remote.flights > 0 };
        // UCX ends the operations on the endpoint, with errors.
        self.engine.close(remote.endpoint);
        for id in &remote.ways {
            if let Some(way) = self.ways.get_mut(id) {
                way.clear();
            }
            for transfer in self.posts.of_way(*id) {
                if let Some(transfer) = self.posts.get_mut(transfer) {
                    transfer.failed.get_or_insert(TransportError::PeerGone);
                }
            }
        }
        let (name, home, parting) = (remote.name.clone(), remote.home, remote.their_parting);
        let sessions = self.remotes.end(id);
        if let Some(parting) = parting {
            self.parted.add(name, home, parting, sessions, self.now, self.config.max_known);
        }
        if self.ending.is_empty() {
            self.scans.wake(self.now);
        }
        self.ending.push(id);
    }

    /// The processes of these remotes have ended.
    pub(crate) fn processes_ended(&mut self) {
        for id in self.watch.ended() {
            if let Some(Remote { life: Life::Watched(process), .. }) = self.remotes.get(id) {
                self.watch.remove(process);
            }
            self.break_off(id);
        }
    }

    /// Ends the remotes of which nothing touches memory any more.
    pub(crate) fn end_remotes(&mut self) {
        if self.ending.is_empty() {
            return;
        }
        self.scans.turn(self.now);
        let mut index = 0;
        while let Some(id) = self.ending.get(index).copied() {
            match self.end_of(id) {
                None => index += 1,
                Some(end) => {
                    self.ending.swap_remove(index);
                    self.end_remote(id, end);
                }
            }
        }
    }

    /// How a remote has ended; `None` while that is not known.
    fn end_of(&mut self, id: RemoteId) -> Option<WayEnd> {
        let Some(remote) = self.remotes.get(id) else { return Some(WayEnd::Lost) };
        let Stage::Ending { since, unquiet } = remote.stage else { return Some(WayEnd::Lost) };
        if remote.flights > 0 || !self.engine.is_closed(remote.endpoint) {
            return None;
        }
        let passed = self.now.since(since);
        if remote.life.is_over() {
            return match self.scans.is_quiet(id, self.now) {
                true => Some(WayEnd::Dead { quiet_after: Duration::ZERO }),
                // Something that this process never reads: nothing is proven.
                false => (passed >= self.config.settle).then_some(WayEnd::Lost),
            };
        }
        let dying = matches!(remote.life, Life::Watched(_)) && passed < DYING;
        let settling = unquiet && passed < self.config.settle;
        (!dying && !settling).then_some(WayEnd::Lost)
    }

    fn end_remote(&mut self, id: RemoteId, end: WayEnd) {
        self.scans.forget(id);
        let ways = self.remotes.get_mut(id).map(|remote| std::mem::take(&mut remote.ways));
        for way in ways.unwrap_or_default() {
            self.end_way(way, end);
        }
        let Some(remote) = self.remotes.remove(id) else { return };
        if let WayEnd::Dead { .. } = end {
            self.parted.forget(&remote.name);
        }
        if let Life::Watched(process) = &remote.life {
            self.watch.remove(process);
        }
    }
}

#[cfg(test)]
#[allow(clippy::print_stdout)]
pub(crate) mod tests {
    use std::time::Instant;

    use bytes::Bytes;
    use kv_core::{Descriptor, Op, Post, PostId, Region, RegionRole, Time, Transport};
    use kv_host::{Arena, ProcessIdentity, Token, clock};

    use super::*;
    use crate::config::UcxConfig;
    use crate::ffi::engine::Arrived;
    use crate::library::Ucx;
    use crate::metadata::{Metadata, Name};
    use crate::quiet;
    use crate::transport::Flight;

    pub(crate) const PEER: PeerId = PeerId(1);
    /// Longer than what UCX sends as one piece.
    const LONG: usize = 60_000;

    /// Two transports over TCP on the loopback device, and what they have told.
    pub(crate) struct Pair {
        pub(crate) sides: [UcxTransport; 2],
        pub(crate) events: [Vec<TransportEvent>; 2],
        pub(crate) arena: Arena,
    }

    pub(crate) fn side(ucx: Ucx, config: &UcxConfig, arena: &Arena) -> UcxTransport {
        let mut transport = UcxTransport::new(ucx, config.clone()).unwrap();
        transport.add_memory(arena).unwrap();
        transport.register(&Region::dram(RegionRole::Kv, arena.addr(), 4096, 1)).unwrap();
        transport
    }

    /// The only page, there and here.
    const PAGE: Descriptor =
        Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 4096 };

    /// Begins to write a page to the peer. The test says when and how the slice lands.
    pub(crate) fn begin_write(side: &mut UcxTransport, id: u64, notify: Option<Bytes>) -> Flight {
        side.permit(PEER, Time::MAX);
        let post = Post { id: PostId(id), op: Op::Write, descriptors: vec![PAGE], notify };
        side.post(PEER, post).unwrap();
        side.fill_stirred(|| false);
        side.flights.drain().next().unwrap().1
    }

    /// Begins to write more to the peer than sockets hold.
    pub(crate) fn write_much(side: &mut UcxTransport) {
        side.permit(PEER, Time::MAX);
        let post = Post { id: PostId(1), op: Op::Write, descriptors: vec![PAGE; 1 << 14], notify: None };
        side.post(PEER, post).unwrap();
        while side.stats().slices < 4 {
            side.poll(clock::now(), &mut Vec::new());
        }
    }

    impl Pair {
        /// `None`, and the reason why nothing is tested, without UCX.
        pub(crate) fn new() -> Option<Pair> {
            Pair::with(|_| {})
        }

        pub(crate) fn with(change: impl Fn(&mut UcxConfig)) -> Option<Pair> {
            let ucx = kv_conformance::needed("UCX", Ucx::load(None))?;
            let arena = Arena::new(4096).unwrap();
            let config = UcxConfig::default().with(|config| {
                (config.devices, config.transports) = (vec!["lo".to_owned()], vec!["tcp".to_owned()]);
                // Otherwise UCX notices after 20 s what the tests are about.
                config.settings = vec![("KEEPALIVE_INTERVAL".to_owned(), "inf".to_owned())];
                change(config);
            });
            let sides = [(); 2].map(|()| side(ucx, &config, &arena));
            Some(Pair { sides, events: Default::default(), arena })
        }

        pub(crate) fn connect(&mut self, from: usize) {
            let metadata = self.sides[1 - from].metadata().unwrap();
            self.sides[from].connect(PEER, &metadata).unwrap();
        }

        pub(crate) fn until(&mut self, what: &str, done: impl Fn(&Pair) -> bool) {
            let deadline = Instant::now() + Duration::from_secs(30);
            while !done(self) {
                assert!(Instant::now() < deadline, "{what}: {:?} beside frames", self.beside_frames());
                for (side, events) in self.sides.iter_mut().zip(&mut self.events) {
                    side.poll(clock::now(), events);
                }
            }
        }

        /// What was told, without frames, which may be many and long.
        fn beside_frames(&self) -> Vec<&TransportEvent> {
            let is_frame = |event: &&TransportEvent| matches!(event, TransportEvent::Frame { .. });
            self.events.iter().flatten().filter(|event| !is_frame(event)).collect()
        }

        /// Sends a frame, and sees it arrive.
        pub(crate) fn send(&mut self, from: usize, len: usize) {
            self.sides[from].send(PEER, vec![7; len].into()).unwrap();
            let is_it = |event: &TransportEvent| matches!(event, TransportEvent::Frame { frame, .. } if frame.len() == len);
            self.until("the frame", |pair| pair.events[1 - from].iter().any(is_it));
            self.events[1 - from].retain(|event| !is_it(event));
        }

        /// Waits until a side has lost its way.
        fn lost(&mut self, side: usize) {
            let lost = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost };
            self.until("the end of the way", |pair| pair.events[side].contains(&lost));
            assert_eq!(std::mem::take(&mut self.events[side]), [lost]);
        }

        /// Breaks a side's endpoint off. The other side notices nothing.
        fn break_off(&mut self, side: usize) {
            let name = self.sides[1 - side].given.name().clone();
            let remote = self.sides[side].remotes.by_name(&name).unwrap();
            self.sides[side].break_off(remote);
            self.until("the end of the remote", |pair| pair.sides[side].ending.is_empty());
        }
    }

    #[test]
    fn a_peer_that_has_not_noticed_the_end_of_its_endpoint_is_told_when_it_is_met_again() {
        let Some(mut pair) = Pair::new() else { return };
        pair.connect(0);
        pair.connect(1);
        pair.send(1, LONG);
        pair.send(0, LONG);
        for _ in 0..3 {
            pair.break_off(0);
            pair.lost(0);
            assert_eq!(pair.events[1], []);
            pair.connect(0);
            pair.lost(1);
            pair.connect(1);
            pair.send(1, LONG);
            pair.send(0, LONG);
            assert_eq!(pair.events, [[], []]);
        }
    }

    #[test]
    fn a_frame_of_a_session_that_is_over_makes_the_peer_greet_anew() {
        let Some(mut pair) = Pair::new() else { return };
        pair.connect(1);
        pair.send(1, LONG);
        pair.break_off(0);
        let strangers = pair.sides[0].stats().strangers;
        // Side 0 has no reason to connect side 1, which sends and sends.
        let deadline = Instant::now() + Duration::from_secs(30);
        while pair.events[1].is_empty() {
            assert!(Instant::now() < deadline);
            let _ = pair.sides[1].send(PEER, Bytes::from_static(b"is somebody there?"));
            let end = Instant::now() + Duration::from_millis(5);
            pair.until("5 ms", |_| Instant::now() > end);
        }
        pair.lost(1);
        assert!(pair.sides[0].stats().strangers > strangers);
        assert_eq!(pair.sides[0].remotes.len(), 1, "the frames were answered by one endpoint");
        pair.connect(1);
        pair.send(1, LONG);
        assert_eq!(pair.events, [[], []]);
    }

    #[test]
    fn a_peer_that_connects_by_an_endpoint_that_leads_nowhere_is_told_and_comes_again() {
        let Some(mut pair) = Pair::new() else { return };
        pair.connect(0);
        pair.send(0, LONG);
        pair.break_off(0);
        pair.lost(0);
        // Side 1 has the endpoint by which it has answered.
        pair.connect(1);
        pair.lost(1);
        pair.connect(1);
        pair.send(1, LONG);
        assert_eq!(pair.events, [[], []]);
    }

    /// Otherwise pages are given back into which a peer that lives still writes, or from which it still reads.
    #[test]
    fn posts_whose_slices_were_under_way_to_a_peer_that_lives_end_after_the_settle() {
        let settle = Duration::from_secs(1);
        let Some(mut pair) = Pair::with(|config| config.settle = settle) else { return };
        pair.connect(0);
        pair.send(0, 1);
        let side = &mut pair.sides[0];
        write_much(side);
        // The settle counts from the last poll.
        let (remote, begun) = (side.remotes.all().next().unwrap().0, side.now);
        side.break_off(remote);
        pair.until("the end of the way", |pair| !pair.events[0].is_empty());
        let took = clock::now().since(begun);
        assert!(took >= settle, "after {took:?}");
        let ended = TransportEvent::Posted { post: PostId(1), result: Err(TransportError::PeerGone) };
        assert_eq!(pair.events[0], [ended, TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost }]);
    }

    /// Nothing is known of a slice that has failed while another one is under way.
    #[test]
    fn no_post_to_a_lost_peer_ends_before_the_last_slice_of_all_posts_to_it() {
        let settle = Duration::from_millis(1);
        let Some(mut pair) = Pair::with(|config| config.settle = settle) else { return };
        pair.connect(0);
        pair.send(0, 1);
        let side = &mut pair.sides[0];
        let [first, last] = [1, 2].map(|id| begin_write(side, id, None));
        let (id, remote) = side.remotes.all().next().unwrap();
        let endpoint = remote.endpoint;
        side.break_off(id);
        side.landed(first, false);
        let begun = Instant::now();
        pair.until("the end of the endpoint", |pair| {
            pair.sides[0].engine.is_closed(endpoint) && begun.elapsed() > 100 * settle
        });
        pair.sides[0].poll(clock::now(), &mut pair.events[0]);
        assert_eq!(pair.events[0], [], "a slice is under way");
        pair.sides[0].landed(last, false);
        pair.until("the end of the way", |pair| !pair.events[0].is_empty());
        let ended = |id| TransportEvent::Posted { post: PostId(id), result: Err(TransportError::PeerGone) };
        let lost = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost };
        assert_eq!(pair.events[0], [ended(1), ended(2), lost]);
    }

    #[test]
    fn cancelled_writes_leave_nothing_behind_though_the_peer_permits_none() {
        let Some(mut pair) = Pair::new() else { return };
        pair.connect(0);
        pair.send(0, 1);
        kv_conformance::cancel_many(&mut pair.sides[0], PEER);
        let turns = pair.sides[0].ways.values().next().unwrap().turns.len();
        assert!(turns < 100, "{turns} turns wait, and no post");
    }

    #[test]
    fn a_peer_beyond_max_known_takes_the_place_of_one_that_has_left() {
        let Some(mut pair) = Pair::with(|config| config.max_known = 1) else { return };
        let (ucx, config) = (Ucx::load(None).unwrap(), pair.sides[1].config.clone());
        let metadata = pair.sides[0].metadata().unwrap();
        pair.connect(1);
        pair.send(1, LONG);
        let mut other = side(ucx, &config, &pair.arena);
        other.connect(PEER, &metadata).unwrap();
        std::mem::swap(&mut pair.sides[1], &mut other);
        let begun = Instant::now();
        pair.until("a while", |_| begun.elapsed() > Duration::from_millis(300));
        let name = |side: &UcxTransport| side.given.name().clone();
        assert!(pair.sides[0].remotes.by_name(&name(&other)).is_some(), "the first one has not left");
        assert_eq!(pair.sides[0].remotes.by_name(&name(&pair.sides[1])), None, "there is no room");
        other.disconnect(PEER);
        pair.until("the other's greeting", |pair| {
            pair.sides[0].remotes.by_name(&name(&pair.sides[1])).is_some() && pair.sides[0].remotes.len() == 1
        });
        pair.send(1, LONG);
    }

    #[test]
    fn nobody_ends_an_endpoint_without_its_secret() {
        let Some(mut pair) = Pair::new() else { return };
        pair.connect(0);
        pair.connect(1);
        pair.send(0, LONG);
        pair.send(1, LONG);
        let of_way = pair.sides[1].ways.values().map(|way| way.token);
        let of_session =
            pair.sides[1].ways.values().filter_map(|way| way.session()).map(|session| session.token);
        let others = [Token::random().unwrap(), pair.sides[1].given.name().token];
        let secrets: Vec<Token> = of_way.chain(of_session).chain(others).collect();
        assert_eq!(secrets.len(), 4);
        for (secret, kind) in
            secrets.iter().flat_map(|secret| [Kind::Parted, Kind::Farewell].map(|kind| (*secret, kind)))
        {
            let header = message::header(kind, secret);
            pair.sides[1].on_message(Arrived { header, body: Bytes::new() });
        }
        pair.send(0, LONG);
        pair.send(1, LONG);
        assert_eq!(pair.events, [[], []]);
    }

    /// The process of a number, as its metadata would name it.
    fn identity(pid: u32) -> ProcessIdentity {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let started = stat.rsplit(')').next().unwrap().split_ascii_whitespace().nth(19).unwrap();
        let ours = ProcessIdentity::here().unwrap();
        ProcessIdentity { inode: 0, pid: pid.cast_signed(), started: started.parse().unwrap(), ..ours }
    }

    #[test]
    fn a_process_that_was_given_no_session_is_told_dead_only_once_its_bytes_are_read() {
        let Some(mut pair) = Pair::new() else { return };
        let (near, mut other) = quiet::tests::pair();
        let writer = quiet::tests::writer_into(near, &other);
        // The name leads to side 1, which does not answer for it.
        let address = pair.sides[1].given.name().address.clone();
        let name = Name { token: Token::random().unwrap(), address };
        let (host, process) = (pair.sides[0].given.host, identity(writer.id()));
        let metadata = Metadata { name, host, process, regions: Vec::new() }.encode().unwrap();
        pair.sides[0].connect(PEER, &metadata).unwrap();
        quiet::tests::kill(writer);
        let begun = Instant::now();
        pair.until("half a second", |_| begun.elapsed() > Duration::from_millis(500));
        assert_eq!(pair.events, [[], []], "the bytes of a dead process are unread");
        quiet::tests::read_all(&mut other);
        pair.until("the end of the way", |pair| !pair.events[0].is_empty());
        let dead = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Dead { quiet_after: Duration::ZERO } };
        assert_eq!(pair.events[0], [dead]);
    }
}
