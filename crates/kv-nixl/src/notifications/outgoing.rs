//! What is sent. To transports of this crate: frames, confirmations, probes and farewells in envelopes, by NIXL or as
//! datagrams, and rings. To foreign agents: frames as they are.

use std::mem;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{MemoryKind, Op, PostId, TransportEvent};
use kv_host::{Life, wake};

use crate::agent::engine::Started;
use crate::connections::id::RemoteId;
use crate::connections::remote::Remote;
use crate::connections::route::Route;
use crate::notifications::arrivals::charge;
use crate::notifications::datagrams::{PeerSocket, parts};
use crate::notifications::envelope::{Answer, Kind, Notification};
use crate::notifications::speech::Speech;
use crate::transport::NixlTransport;

/// How long nothing may go by NIXL on a connection before it is tried out.
pub(crate) const PROBE: Duration = Duration::from_secs(1);
/// How many connections one call tries out with a read of no bytes, which takes some 15 µs each.
const TRIED: usize = 16;

impl NixlTransport {
    /// Sends a frame for which there is room; a foreign agent gets the frame as it is. False if the
    /// connection has failed.
    pub(crate) fn transmit(&mut self, id: RemoteId, frame: Bytes) -> bool {
        let Some(remote) = self.remotes.get_mut(&id) else { return false };
        if remote.route == Route::Storage {
            // To ourselves.
            self.events.push(TransportEvent::Frame { from: remote.origin, frame });
            return true;
        }
        let charged = charge(frame.len());
        if let Speech::Foreign(monologue) = &mut remote.speech {
            monologue.allowance.take(charged, self.config.outbound_bytes as u64, Instant::now());
            return self.notify_raw(id, &frame);
        }
        let sent = self.notify(id, Kind::Frame(frame), id.0);
        if sent && let Some(dialogue) = self.remotes.get_mut(&id).and_then(Remote::dialogue) {
            dialogue.sent += charged;
        }
        sent
    }

    /// Answers a question, if there is room as for a frame. Who gets no answer goes on without one after a while.
    pub(crate) fn answer(&mut self, id: RemoteId, answer: Answer) {
        let most = self.config.outbound_bytes;
        let has_room = self.remotes.get(&id).is_some_and(|remote| remote.speech.has_room(Answer::LEN, most));
        if has_room
            && self.notify(id, Kind::Answer(answer), id.0)
            && let Some(dialogue) = self.remotes.get_mut(&id).and_then(Remote::dialogue)
        {
            dialogue.sent += charge(Answer::LEN);
        }
    }

    /// Sends a notification to a transport of this crate. False if the agent is a foreign one, or the
    /// connection has failed.
    pub(crate) fn notify(&mut self, id: RemoteId, kind: Kind, connection: u64) -> bool {
        let Some(dialogue) = self.remotes.get_mut(&id).and_then(Remote::dialogue) else { return false };
        let beside = matches!(kind, Kind::Frame(_) | Kind::Arrived(_));
        let bytes = Notification { to: dialogue.token, connection, kind }.encode();
        (beside && self.notify_beside(id, &bytes)) || self.notify_and_ring(id, &bytes)
    }

    /// Makes a notification part of the next datagram to a peer. False if the notification must go by NIXL.
    fn notify_beside(&mut self, id: RemoteId, bytes: &[u8]) -> bool {
        if self.socket_of(id).is_some_and(|socket| !socket.has_room(bytes.len())) {
            self.send_datagram(id);
        }
        let is_open = self.remotes.get(&id).is_some_and(Remote::is_open);
        let Some(socket) = self.socket_of(id).filter(|socket| is_open && socket.carries(bytes.len())) else {
            return false;
        };
        if socket.put(bytes) {
            self.unsent.push(id);
        }
        true
    }

    /// Sends the datagrams that wait: what one turn has to say to a peer goes together.
    pub(crate) fn send_datagrams(&mut self) {
        while let Some(id) = self.unsent.last().copied() {
            self.send_datagram(id);
        }
    }

    /// Sends the datagram that waits for this peer, if one does. What the peer cannot take goes by NIXL.
    pub(crate) fn send_datagram(&mut self, id: RemoteId) {
        let Some(index) = self.unsent.iter().rposition(|unsent| *unsent == id) else { return };
        self.unsent.swap_remove(index);
        let Some(socket) = self.socket_of(id) else { return };
        if let Err(datagram) = socket.send() {
            // It stops when the connection has failed.
            let _ = parts(&datagram).all(|part| self.notify_and_ring(id, part));
        }
    }

    /// Wakes the peer of a short write that is all there is to do: the peer's processor wakes while the kernel copies. One
    /// request, with `bytes` of the posts, is to start.
    pub(crate) fn wake_first(&mut self, id: RemoteId, posts: &[PostId], bytes: u64) {
        let ([post], 1) = (posts, self.transfers.len()) else { return };
        let Some(lone) = self.transfers.get(post) else { return };
        let is_meant = lone.op == Op::Write && lone.notify.is_some() && wake::LENGTHS.contains(&bytes);
        if !is_meant || lone.bytes != bytes {
            return;
        }
        let Some(dialogue) = self.remotes.get_mut(&id).and_then(Remote::dialogue) else { return };
        // Only where the kernel copies do frames go as datagrams.
        if let Some(socket) = dialogue.socket.as_ref().filter(|socket| socket.carries(0))
            && mem::take(&mut dialogue.may_wake)
        {
            socket.wake();
        }
    }

    /// Sends a notification by NIXL, and wakes the peer if the peer is on this host. False if the connection has failed.
    fn notify_and_ring(&mut self, id: RemoteId, bytes: &[u8]) -> bool {
        let sent = self.notify_raw(id, bytes);
        if sent && let Some(socket) = self.socket_of(id) {
            socket.ring(Instant::now());
        }
        sent
    }

    /// The socket to a peer, if the peer is on this host.
    fn socket_of(&mut self, id: RemoteId) -> Option<&mut PeerSocket> {
        self.remotes.get_mut(&id)?.dialogue()?.socket.as_mut()
    }

    /// Sends bytes without an envelope. False if the connection has failed.
    fn notify_raw(&mut self, id: RemoteId, bytes: &[u8]) -> bool {
        let Some(remote) = self.remotes.get_mut(&id).filter(|remote| remote.is_open()) else {
            return false;
        };
        remote.spoke = Instant::now();
        self.pace.stir();
        if self.engine.notify(&remote.name, bytes).is_ok() {
            return true;
        }
        self.break_off(id);
        false
    }

    /// Sends the notify frames that wait for room, as far as there is room.
    pub(crate) fn flush(&mut self, id: RemoteId) {
        loop {
            let Some(remote) = self.remotes.get_mut(&id).filter(|remote| remote.is_open()) else { return };
            let (speech, most) = (&remote.speech, self.config.outbound_bytes);
            let Some((post, frame)) = remote.parked.pop(|len| speech.has_room(len, most)) else { return };
            if !self.transmit(id, frame) {
                return;
            }
            self.end(post, Ok(()));
        }
    }

    /// Asks a peer whether its thread has come so far, if a number is to be asked.
    pub(crate) fn ask(&mut self, id: RemoteId, number: Option<u64>) {
        if let Some(number) = number {
            self.notify(id, Kind::Ask(number), id.0);
        }
    }

    /// Tells a new peer the number of this transport's connection to the peer.
    pub(crate) fn greet(&mut self, id: RemoteId) {
        self.notify(id, Kind::Probe, id.0);
    }

    /// Confirms to a peer what had arrived from the peer before the peer was connected.
    pub(crate) fn confirm_arrivals_to(&mut self, id: RemoteId) {
        let Some(remote) = self.remotes.get(&id) else { return };
        for (connection, count) in self.arrivals.untold(&remote.name) {
            self.confirm(id, connection, count);
        }
    }

    pub(crate) fn confirm(&mut self, id: RemoteId, connection: u64, count: u64) {
        if self.notify(id, Kind::Arrived(count), connection) {
            self.arrivals.told(connection, count);
        }
    }

    /// Tries out connections that have been silent, and connections that wait for their allowance.
    pub(crate) fn probe(&mut self, now: Instant) {
        if now < self.probe_at {
            return;
        }
        self.probe_at = now + PROBE / 4;
        let late = self.remotes.iter_mut().filter_map(|(id, remote)| remote.lead.give_up(now).then_some(*id));
        for id in late.collect::<Vec<RemoteId>>() {
            self.stand_in_line(id);
        }
        let waits = |remote: &Remote| remote.is_foreign() && !remote.parked.is_empty();
        let waiting = self.remotes.iter().filter(|(_, remote)| waits(remote));
        for id in waiting.map(|(id, _)| *id).collect::<Vec<RemoteId>>() {
            self.flush(id);
        }
        let silent = self.remotes.iter().filter(|(_, remote)| {
            remote.is_open()
                && !remote.is_foreign()
                && matches!(remote.life, Life::Unseen)
                && now.saturating_duration_since(remote.spoke) >= PROBE
        });
        let silent: Vec<RemoteId> = silent.map(|(id, _)| *id).collect();
        for id in silent {
            self.notify(id, Kind::Probe, id.0);
        }
        self.try_silent(now);
    }

    /// Tries out the connections on which nothing went by NIXL for longest, each with a read of no bytes: those to foreign
    /// agents, and those to peers whose process is watched. These get no probe, because their next copy would wait until
    /// the probe is confirmed.
    fn try_silent(&mut self, now: Instant) {
        let silent = self.remotes.iter().filter(|(_, remote)| {
            remote.is_open()
                && remote.route != Route::Storage
                && (remote.is_foreign() || !matches!(remote.life, Life::Unseen))
                && now.saturating_duration_since(remote.spoke) >= PROBE
        });
        let mut silent: Vec<(Instant, RemoteId)> = silent.map(|(id, remote)| (remote.spoke, *id)).collect();
        silent.sort_unstable();
        for (_, id) in silent.into_iter().take(TRIED) {
            if self.has_lost(id) {
                self.break_off(id);
            } else if let Some(remote) = self.remotes.get_mut(&id) {
                remote.spoke = now;
            }
        }
    }

    /// Whether a connection has failed, as far as UCX shows that without a word to the peer: UCX refuses a read of
    /// no bytes then. Both sides must have regions.
    pub(crate) fn has_lost(&self, id: RemoteId) -> bool {
        !self.remotes.contains_key(&id) || matches!(self.try_out(id), Some(Started::Failed(_)))
    }

    fn try_out(&self, id: RemoteId) -> Option<Started> {
        let remote = self.remotes.get(&id).filter(|_| self.config.backend == "UCX")?;
        let here = self.regions.iter().find(|region| region.kind() != MemoryKind::File)?;
        let there = remote.regions.first()?;
        let (local, remotely) = ((here.addr(), here.device()), (there.addr, there.device));
        self.engine.try_out((here.kind(), there.kind), local, remotely, &remote.name)
    }

    /// Rings at peers to which requests are on their way: over some transports, TCP for one, the peer must
    /// take part.
    pub(crate) fn ring_for_requests(&mut self, now: Instant) {
        if self.requests.is_empty() {
            return;
        }
        for remote in self.remotes.values_mut().filter(|remote| remote.requests > 0) {
            if let Some(socket) = remote.dialogue().and_then(|dialogue| dialogue.socket.as_mut()) {
                socket.ring(now);
            }
        }
    }

    /// Tells the peers that this transport ends. None of its requests is on its way any more.
    pub(crate) fn say_farewell(&mut self) {
        self.send_datagrams();
        let peers = self.remotes.iter_mut().filter(|(_, remote)| remote.route != Route::Storage);
        // Who has not told us its number does not believe us, and sees our end otherwise.
        let proofs: Vec<(RemoteId, u64)> =
            peers.filter_map(|(id, remote)| Some((*id, remote.dialogue()?.theirs?))).collect();
        for (id, proof) in proofs {
            self.notify(id, Kind::Farewell(proof), id.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use kv_core::{
        Descriptor, MAX_FRAME, Origin, Post, PostId, Time, Transport, TransportError, TransportWait, WayEnd,
    };
    use kv_host::HostMemory;
    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;
    use crate::config::NixlConfig;
    use crate::testing::{LEN, PEER, nixl, others, pass, until, whole, worker_with};

    /// Two transports, of which the first has connected the second and may write to it, with their memory. `None` if the
    /// kernel does not copy between them here.
    fn copying() -> Option<[(NixlTransport, HostMemory); 2]> {
        let nixl = nixl()?;
        let worker = || worker_with(nixl, NixlConfig::default());
        let ((mut here, ours), (there, theirs)) = (worker(), worker());
        here.connect(PEER, &there.metadata().unwrap()).unwrap();
        if here.route(PEER) != Some(Route::Memory) {
            println!("skipped: the kernel does not copy between processes here");
            return None;
        }
        here.permit(PEER, Time::MAX);
        Some([(here, ours), (there, theirs)])
    }

    /// Sends frames until one goes by NIXL, because the peer, which is not polled, can take no further datagram. Returns
    /// how many were sent.
    fn fill_queue(here: &mut NixlTransport) -> usize {
        let spoke = |here: &NixlTransport| here.remotes.values().next().unwrap().spoke;
        let (before, mut sent) = (spoke(here), 0);
        while spoke(here) == before {
            here.send(PEER, Bytes::from_static(b"another")).unwrap();
            here.poll(Time::ZERO, &mut Vec::new());
            sent += 1;
        }
        sent
    }

    fn framed(events: &[TransportEvent]) -> Vec<(Origin, Bytes)> {
        let frames = events.iter().filter_map(|event| match event {
            TransportEvent::Frame { from, frame } => Some((*from, frame.clone())),
            _ => None,
        });
        frames.collect()
    }

    #[test]
    fn a_short_write_alone_wakes_its_peer_before_its_frame() {
        let Some([(mut here, _ours), (mut there, _theirs)]) = copying() else { return };
        here.post(PEER, whole(0, Op::Write)).unwrap();
        until(&mut [&mut here, &mut there], "the first copy", |_, events| !events.is_empty());
        there.connect(PEER, &here.metadata().unwrap()).unwrap();
        let mut wakes = |posts: &[Post]| {
            // A peer that says nothing is not woken again.
            there.send(PEER, Bytes::from_static(b"received")).unwrap();
            until(&mut [&mut here, &mut there], "a word", |_, events| !events.is_empty());
            posts.iter().for_each(|post| here.post(PEER, post.clone()).unwrap());
            until(&mut [&mut here], "the copies", |_, events| events.len() == posts.len());
            here.poll(Time::ZERO, &mut Vec::new());
            there.datagrams.as_mut().unwrap().lengths().iter().filter(|len| **len == 0).count()
        };
        let part = |id, op, len| {
            let whole = whole(id, op);
            let descriptor = Descriptor { len, ..whole.descriptors[0] };
            let notify = (op == Op::Write).then(|| Bytes::from_static(b"there"));
            Post { descriptors: vec![descriptor], notify, ..whole }
        };
        assert_eq!(wakes(&[part(1, Op::Write, 64 << 10)]), 1);
        assert_eq!(wakes(&[part(2, Op::Write, 256 << 10)]), 1);
        assert_eq!(wakes(&[part(3, Op::Write, (64 << 10) - 1)]), 0, "copied sooner than a datagram is sent");
        assert_eq!(wakes(&[part(4, Op::Write, LEN as u64)]), 0, "the end of a long copy is not near");
        assert_eq!(wakes(&[part(5, Op::Read, 256 << 10)]), 0, "the peer is told nothing of a read");
        assert_eq!(wakes(&[Post { notify: None, ..part(6, Op::Write, 256 << 10) }]), 0, "nothing follows");
        let both = [part(7, Op::Write, 64 << 10), part(8, Op::Read, 64 << 10)];
        assert_eq!(wakes(&both), 0, "there is more to do");
    }

    #[test]
    fn a_peer_is_woken_once_until_it_says_something_and_wakes_once_until_its_frame() {
        let Some([(mut here, _ours), (mut there, _theirs)]) = copying() else { return };
        here.post(PEER, whole(0, Op::Write)).unwrap();
        until(&mut [&mut here, &mut there], "the first copy", |_, events| !events.is_empty());
        there.connect(PEER, &here.metadata().unwrap()).unwrap();
        there.send(PEER, Bytes::from_static(b"a word")).unwrap();
        until(&mut [&mut here, &mut there], "a word", |_, events| !events.is_empty());
        pass(&mut [&mut here, &mut there], Duration::from_millis(100));
        fn flags(transport: &mut NixlTransport) -> [bool; 2] {
            let dialogue = transport.remotes.values_mut().find_map(Remote::dialogue).unwrap();
            [dialogue.may_wake, dialogue.may_be_woken]
        }
        assert_eq!((flags(&mut here), flags(&mut there)), ([true; 2], [true; 2]));
        let post = Post { notify: Some(Bytes::from_static(b"there")), ..whole(1, Op::Write) };
        let descriptors = vec![Descriptor { len: 256 << 10, ..post.descriptors[0] }];
        let silent = Post { descriptors, ..post };
        here.post(PEER, silent.clone()).unwrap();
        until(&mut [&mut here], "a copy", |_, events| !events.is_empty());
        assert_eq!(flags(&mut here), [false, true]);
        here.post(PEER, Post { id: PostId(2), ..silent }).unwrap();
        until(&mut [&mut here], "another", |_, events| !events.is_empty());
        here.poll(Time::ZERO, &mut Vec::new());
        let told = there.datagrams.as_mut().unwrap().lengths();
        assert_eq!(told.iter().filter(|len| **len == 0).count(), 1, "{told:?}");
        let id = *here.remotes.keys().next().unwrap();
        for _ in 0..3 {
            here.socket_of(id).unwrap().wake();
            there.poll(Time::ZERO, &mut Vec::new());
            assert_eq!(flags(&mut there), [true, false]);
        }
        here.send(PEER, Bytes::from_static(b"frame")).unwrap();
        until(&mut [&mut there, &mut here], "the frame", |_, events| !events.is_empty());
        assert_eq!(flags(&mut there), [true; 2]);
        assert!(!there.announced.is_awaited());
    }

    /// The kernel copies, and frames wait at the peer: nobody at the other end need be awake.
    #[test]
    fn a_copy_ends_while_the_peer_sleeps_on_frames_that_it_has_not_taken() {
        let Some([(mut here, ours), (mut there, theirs)]) = copying() else { return };
        here.post(PEER, whole(1, Op::Write)).unwrap();
        until(&mut [&mut here, &mut there], "the first copy", |_, events| !events.is_empty());
        for round in 2..=3 {
            ours.write(0, &vec![round; LEN]).unwrap();
            here.send(PEER, Bytes::from_static(b"before")).unwrap();
            let post =
                Post { notify: Some(Bytes::from_static(b"behind")), ..whole(u64::from(round), Op::Write) };
            here.post(PEER, post).unwrap();
            let copied =
                until(&mut [&mut here], "a copy to a peer that sleeps", |_, events| !events.is_empty());
            assert_eq!(copied, [TransportEvent::Posted { post: PostId(u64::from(round)), result: Ok(()) }]);
            assert_eq!(others(&theirs, round), 0, "round {round}");
        }
        // All of it is at the peer already.
        let heard = until(&mut [&mut there], "the frames", |_, events| events.len() == 4);
        let heard: Vec<Bytes> = framed(&heard).into_iter().map(|(_, frame)| frame).collect();
        assert_eq!(heard, ["before", "behind", "before", "behind"]);
    }

    #[test]
    fn frames_of_one_turn_that_fill_several_datagrams_arrive_in_their_order() {
        let Some([(mut here, _ours), (mut there, _theirs)]) = copying() else { return };
        let sent: Vec<Bytes> = (0..20_u8).map(|number| vec![number; 3000].into()).collect();
        sent.iter().for_each(|frame| here.send(PEER, frame.clone()).unwrap());
        let all = |events: &[TransportEvent]| events.len() == sent.len();
        let heard = until(&mut [&mut there, &mut here], "all frames", |_, events| all(events));
        let heard: Vec<Bytes> = framed(&heard).into_iter().map(|(_, frame)| frame).collect();
        assert!(heard == sent);
    }

    /// A sleeping peer's socket has room for a few, the longest fit no datagram, and NIXL takes the rest.
    #[test]
    fn frames_that_find_no_room_at_a_sleeping_peer_all_arrive_and_are_all_confirmed() {
        let Some([(mut here, _ours), (mut there, _theirs)]) = copying() else { return };
        there.connect(PEER, &here.metadata().unwrap()).unwrap();
        pass(&mut [&mut here, &mut there], Duration::from_millis(100));
        let lens = [0, 1, 1000, (16 << 10) - 20, (16 << 10) - 19, 70_000, MAX_FRAME];
        let mut sent: Vec<Bytes> = Vec::new();
        for number in 0_u64.. {
            let mut frame = vec![number as u8; lens[number as usize % lens.len()]];
            frame.extend(number.to_le_bytes());
            frame.truncate(MAX_FRAME);
            let frame = Bytes::from(frame);
            match here.send(PEER, frame.clone()) {
                Ok(()) => sent.push(frame),
                Err(error) => {
                    assert_eq!(error, TransportError::WouldBlock);
                    break;
                }
            }
            here.poll(Time::ZERO, &mut Vec::new());
        }
        assert!(sent.len() > 20, "the queue of a socket takes all of {}", sent.len());
        let heard = until(&mut [&mut there, &mut here], "all frames", |_, events| events.len() == sent.len());
        let origin = there.remotes.values().next().unwrap().origin;
        let mut heard = framed(&heard);
        assert!(heard.iter().all(|(from, _)| *from == origin));
        let mut expected: Vec<(Origin, Bytes)> = sent.into_iter().map(|frame| (origin, frame)).collect();
        heard.sort();
        expected.sort();
        assert!(heard == expected, "{} frames of {}", heard.len(), expected.len());
        let owed = |here: &NixlTransport| match &here.remotes.values().next().unwrap().speech {
            Speech::Ours(dialogue) => dialogue.sent - dialogue.confirmed,
            Speech::Foreign(_) => 0,
        };
        until(&mut [&mut here, &mut there], "the confirmation", |here, _| owed(here) < 1 << 20);
        assert_eq!(here.send(PEER, Bytes::from(vec![0; MAX_FRAME])), Ok(()));
    }

    /// What was sent last before the farewell comes before the end is told.
    #[test]
    fn a_peer_that_was_busy_hears_the_last_frames_of_a_dropped_transport_and_its_farewell() {
        let Some([(mut here, _ours), (mut there, _theirs)]) = copying() else { return };
        there.connect(PEER, &here.metadata().unwrap()).unwrap();
        pass(&mut [&mut here, &mut there], Duration::from_millis(100));
        let frames = [Bytes::from(vec![7; 60_000]), Bytes::from_static(b"short")];
        for frame in frames.iter().cycle().take(40) {
            here.send(PEER, frame.clone()).unwrap();
        }
        std::thread::scope(|scope| {
            scope.spawn(move || drop(here));
            std::thread::sleep(Duration::from_millis(100));
            let gone = |event: &TransportEvent| matches!(event, TransportEvent::PeerGone { .. });
            let heard = until(&mut [&mut there], "the farewell", |_, events| events.iter().any(gone));
            for frame in frames {
                assert_eq!(framed(&heard).iter().filter(|(_, heard)| *heard == frame).count(), 20);
            }
            let end = WayEnd::Dead { quiet_after: Duration::ZERO };
            assert_eq!(heard.last(), Some(&TransportEvent::PeerGone { peer: PEER, end }));
        });
    }

    #[test]
    fn a_frame_that_is_sent_just_before_its_peer_is_disconnected_arrives() {
        let Some([(mut here, _ours), (mut there, _theirs)]) = copying() else { return };
        here.send(PEER, Bytes::from_static(b"the last one")).unwrap();
        assert_eq!(here.wait(), TransportWait::Now);
        here.disconnect(PEER);
        let heard = until(&mut [&mut there, &mut here], "the frame", |_, events| !events.is_empty());
        assert_eq!(framed(&heard)[0].1, "the last one");
    }

    /// Nothing is sent by NIXL on a connection that is not in use.
    #[test]
    fn a_frame_that_finds_no_room_before_its_peer_is_disconnected_goes_by_nixl() {
        let Some([(mut here, _ours), (mut there, _theirs)]) = copying() else { return };
        // The peer knows its end of the connection.
        here.send(PEER, Bytes::from_static(b"the first one")).unwrap();
        until(&mut [&mut there, &mut here], "the frame", |_, events| !events.is_empty());
        pass(&mut [&mut here, &mut there], Duration::from_millis(100));
        let sent = fill_queue(&mut here);
        let last = ["the last but one", "the last one"];
        last.iter().for_each(|frame| here.send(PEER, Bytes::from_static(frame.as_bytes())).unwrap());
        here.disconnect(PEER);
        here.poll(Time::ZERO, &mut Vec::new());
        let heard = until(&mut [&mut there, &mut here], "all frames", |_, events| events.len() > sent + 1);
        for last in last {
            assert_eq!(framed(&heard).iter().filter(|(_, frame)| *frame == last).count(), 1, "{last}");
        }
    }

    /// Its bytes are in place, and its notify frame waits for room.
    #[test]
    fn a_waiting_notify_frame_is_passed_by_no_frame_and_goes_nowhere_once_its_post_is_cancelled() {
        let Some([(mut here, ours), (mut there, theirs)]) = copying() else { return };
        pass(&mut [&mut here, &mut there], Duration::from_millis(100));
        let id = *here.remotes.keys().next().unwrap();
        let most = here.config.outbound_bytes as u64;
        // Room for an empty frame.
        here.remotes.get_mut(&id).unwrap().dialogue().unwrap().sent = most - charge(0);
        ours.write(0, &vec![7; LEN]).unwrap();
        let notify = Some(Bytes::from_static(b"the bytes are there"));
        here.post(PEER, Post { notify, ..whole(1, Op::Write) }).unwrap();
        let waits = |here: &NixlTransport| !here.remotes[&id].parked.is_empty();
        let events = until(&mut [&mut here, &mut there], "the copy", |here, _| waits(here));
        assert_eq!((others(&theirs, 7), events), (0, Vec::new()));
        assert_eq!(here.send(PEER, Bytes::new()), Err(TransportError::WouldBlock));
        here.cancel(PostId(1));
        here.remotes.get_mut(&id).unwrap().dialogue().unwrap().confirm(most);
        here.flush(id);
        assert_eq!(here.send(PEER, Bytes::from_static(b"after")), Ok(()));
        let cancelled = TransportEvent::Posted { post: PostId(1), result: Err(TransportError::Cancelled) };
        assert_eq!(pass(&mut [&mut here], Duration::from_millis(20)), [cancelled]);
        let heard = pass(&mut [&mut there, &mut here], Duration::from_millis(100));
        assert_eq!(framed(&heard).len(), 1, "{heard:?}");
        assert_eq!(framed(&heard)[0].1, "after");
    }

    #[test]
    fn what_was_accepted_before_a_shutdown_is_sent_by_the_shutdown() {
        let Some([(mut here, _ours), (mut there, _theirs)]) = copying() else { return };
        here.send(PEER, Bytes::from_static(b"the last one")).unwrap();
        assert!(here.shutdown(Duration::from_secs(1)));
        let heard = until(&mut [&mut there], "the frame", |_, events| !events.is_empty());
        assert_eq!(framed(&heard)[0].1, "the last one");
    }

    /// Nothing of NIXL is expected: what the peer sends wakes its reader.
    #[test]
    fn a_transport_sleeps_long_after_frames_of_its_host_and_wakes_by_the_next() {
        let Some([(mut here, _ours), (mut there, _theirs)]) = copying() else { return };
        let idle = there.config.idle_poll;
        let rests = |there: &NixlTransport| matches!(there.wait(), TransportWait::ReadableOrAfter(_, sleep) if sleep == idle);
        until(&mut [&mut there, &mut here], "rest", |there, _| rests(there));
        for _ in 0..3 {
            here.send(PEER, Bytes::from_static(b"a frame")).unwrap();
            here.poll(Time::ZERO, &mut Vec::new());
            let mut readable = [PollFd::from_borrowed_fd(there.wakes.as_fd(), PollFlags::IN)];
            assert_eq!(rustix::event::poll(&mut readable, Some(&Timespec { tv_sec: 60, tv_nsec: 0 })), Ok(1));
            let heard = until(&mut [&mut there], "the frame", |_, events| !events.is_empty());
            assert_eq!(framed(&heard)[0].1, "a frame");
            assert!(rests(&there), "{:?}", there.wait());
        }
    }
}
