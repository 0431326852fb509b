//! Frames in and out, and the ends of connections.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{MAX_FRAME, PeerId, PlaneError, PlaneEvent, PostId, WayEnd};
use rustix::event::{Timespec, epoll};

use crate::doorbell::Doorbell;
use crate::frame::{Kind, Notification};
use crate::host::Life;
use crate::inbox::Put;
use crate::plane::NixlPlane;
use crate::remote::{Dialogue, Remote, RemoteId, Speech, Stage, charge};
use crate::transport::Transport;

/// A connection on which nothing was sent for so long is tried out, if the peer's death cannot be
/// seen otherwise.
const PROBE: Duration = Duration::from_secs(1);
/// How long the death of a peer on this host is awaited after its connection has failed: the kernel
/// closes a dying process' sockets before it declares it dead.
const DYING: Duration = Duration::from_secs(1);

/// What the epoll set calls the doorbell; connections have smaller numbers.
pub(crate) const RINGING: u64 = u64::MAX;

impl NixlPlane {
    /// Takes what has come.
    pub(crate) fn take_notifications(&mut self) {
        let (token, arrivals, stats) = (self.token, &mut self.arrivals, &mut self.stats);
        let (events, origins) = (&mut self.events, &mut self.origins);
        let (names, remotes, inbox) = (&self.names, &mut self.remotes, &mut self.inbox);
        let (mut heard, mut due, mut leaving) = (false, Vec::new(), Vec::new());
        // An error is of one backend's moment, and comes again if it lasts: sends will fail.
        let _ = self.engine.receive(|name, bytes| {
            let known = names.get(name).and_then(|id| remotes.get(id));
            let foreign = known.is_some_and(Remote::is_foreign);
            let ours = if foreign { None } else { Notification::decode(&bytes) };
            let Some(Notification { connection, kind, .. }) = ours.filter(|ours| ours.to == token) else {
                let raw = known.is_none_or(Remote::is_foreign);
                match if raw { inbox.put(name, bytes) } else { Put::Unwanted } {
                    Put::Taken => heard = true,
                    Put::Dropped => stats.foreign_dropped += 1,
                    Put::Unwanted => stats.strangers += 1,
                }
                return;
            };
            heard = true;
            // It may be forged, but by nobody who gains by it: a farewell that names a wrong number is
            // not believed, and the end is seen otherwise.
            let known = names.get(name).and_then(|id| remotes.get_mut(id));
            let mut origin = None;
            if let Some(remote) = known {
                origin = Some(remote.origin);
                if let Some(dialogue) = remote.dialogue()
                    && matches!(kind, Kind::Frame(_) | Kind::Probe)
                {
                    dialogue.theirs = Some(connection);
                }
            }
            match kind {
                Kind::Frame(frame) if frame.len() <= MAX_FRAME => {
                    if let Some(count) = arrivals.count(connection, name, frame.len()) {
                        due.push((name.to_owned(), connection, count));
                    }
                    let from = origin.unwrap_or_else(|| origins.of(name));
                    events.push(PlaneEvent::Frame { from, frame });
                }
                Kind::Arrived(count) => due.push((String::new(), connection, count)),
                Kind::Farewell(proof) => leaving.push((name.to_owned(), RemoteId(proof))),
                Kind::Frame(_) | Kind::Probe => {}
            }
        });
        if heard {
            self.pace.stir();
        }
        for (name, connection, count) in due {
            if name.is_empty() {
                let id = RemoteId(connection);
                if let Some(dialogue) = self.remotes.get_mut(&id).and_then(Remote::dialogue) {
                    dialogue.confirm(count);
                    self.flush(id);
                }
            } else if let Some(id) = self.names.get(&name) {
                self.confirm(*id, connection, count);
            }
        }
        for (name, id) in leaving {
            let named = self.remotes.get_mut(&id).filter(|remote| remote.name == name);
            if let Some(dialogue) = named.and_then(Remote::dialogue) {
                dialogue.said_farewell = true;
                self.break_off(id);
            }
        }
    }

    /// Tells the peers that this plane ends. Nothing is on its way any more.
    pub(crate) fn say_farewell(&mut self) {
        let peers = self.remotes.iter_mut().filter(|(_, remote)| remote.transport != Transport::Storage);
        // Who has not told us its number does not believe us, and sees our end otherwise.
        let proofs: Vec<(RemoteId, u64)> =
            peers.filter_map(|(id, remote)| Some((*id, remote.dialogue()?.theirs?))).collect();
        for (id, proof) in proofs {
            self.notify(id, Kind::Farewell(proof), id.0);
        }
    }

    /// Tells a peer what has come from it before we knew it.
    pub(crate) fn confirm_arrivals_to(&mut self, id: RemoteId) {
        let Some(remote) = self.remotes.get(&id) else { return };
        for (connection, count) in self.arrivals.untold(&remote.name) {
            self.confirm(id, connection, count);
        }
    }

    fn confirm(&mut self, id: RemoteId, connection: u64, count: u64) {
        if self.notify(id, Kind::Arrived(count), connection) {
            self.arrivals.told(connection, count);
        }
    }

    /// Sends a frame for which there is room, to a foreign agent as it is; false if the connection has
    /// failed.
    pub(crate) fn transmit(&mut self, id: RemoteId, frame: Bytes) -> bool {
        let Some(remote) = self.remotes.get_mut(&id) else { return false };
        if remote.transport == Transport::Storage {
            // To ourselves.
            self.events.push(PlaneEvent::Frame { from: remote.origin, frame });
            return true;
        }
        let charged = charge(frame.len());
        if let Speech::Foreign(allowance) = &mut remote.speech {
            allowance.take(charged, self.config.outbound_bytes as u64, Instant::now());
            return self.notify_raw(id, &frame);
        }
        let sent = self.notify(id, Kind::Frame(frame), id.0);
        if sent && let Some(dialogue) = self.remotes.get_mut(&id).and_then(Remote::dialogue) {
            dialogue.sent += charged;
        }
        sent
    }

    /// Tells an agent of ours something; false to any other, and if the connection has failed.
    fn notify(&mut self, id: RemoteId, kind: Kind, connection: u64) -> bool {
        let Some(dialogue) = self.remotes.get_mut(&id).and_then(Remote::dialogue) else { return false };
        let bytes = Notification { to: dialogue.token, connection, kind }.encode();
        if !self.notify_raw(id, &bytes) {
            return false;
        }
        let dialogue = self.remotes.get_mut(&id).and_then(Remote::dialogue);
        let button = dialogue.and_then(|dialogue| dialogue.button.as_mut());
        if let (Some(doorbell), Some(button)) = (&self.doorbell, button) {
            button.press(doorbell, Instant::now());
        }
        true
    }

    /// Sends bytes as they are; false if the connection has failed.
    fn notify_raw(&mut self, id: RemoteId, bytes: &[u8]) -> bool {
        let Some(remote) = self.remotes.get_mut(&id).filter(|remote| remote.is_open()) else {
            return false;
        };
        remote.spoke = Instant::now();
        if self.engine.notify(&remote.name, bytes).is_ok() {
            return true;
        }
        self.break_off(id);
        false
    }

    /// Sends the notify frames that wait, as far as there is room.
    pub(crate) fn flush(&mut self, id: RemoteId) {
        loop {
            let Some(remote) = self.remotes.get_mut(&id).filter(|remote| remote.is_open()) else { return };
            let Some(post) = remote.parked.front().copied() else { return };
            let Some(frame) = self.transfers.get(&post).and_then(|transfer| transfer.notify.clone()) else {
                remote.parked.pop_front();
                continue;
            };
            if !remote.has_room(frame.len(), self.config.outbound_bytes) {
                return;
            }
            remote.parked.pop_front();
            if !self.transmit(id, frame) {
                return;
            }
            self.end(post, Ok(()));
        }
    }

    /// Tries out connections that have been silent, and those that wait for their allowance.
    pub(crate) fn probe(&mut self, now: Instant) {
        if now < self.probe_at {
            return;
        }
        self.probe_at = now + PROBE / 4;
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
    }

    /// Takes the deaths and the rings of peers on this host.
    pub(crate) fn take_wakes(&mut self) {
        let nothing = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut woken = [nothing; 16];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok(count) = epoll::wait(&self.wakes, &mut woken[..], Some(&now)) else { return };
        for event in woken.iter().take(count) {
            let number = event.data.u64();
            if number == RINGING {
                if self.doorbell.as_ref().is_some_and(Doorbell::answer) {
                    self.pace.stir();
                }
                continue;
            }
            let id = RemoteId(number);
            if let Some(remote) = self.remotes.get(&id) {
                // It stays dead; it need not be reported again.
                if let Life::Watched(fd) = &remote.life {
                    let _ = epoll::delete(&self.wakes, fd);
                }
                self.break_off(id);
            }
        }
    }

    /// Keeps peers awake to which something is on its way: over some transports, TCP for one, the
    /// peer must take part.
    pub(crate) fn ring_for_requests(&mut self, now: Instant) {
        let Some(doorbell) = &self.doorbell else { return };
        if self.requests.is_empty() {
            return;
        }
        for remote in self.remotes.values_mut().filter(|remote| remote.requests > 0) {
            if let Some(button) = remote.dialogue().and_then(|dialogue| dialogue.button.as_mut()) {
                button.press(doorbell, now);
            }
        }
    }

    /// Ends the connections on which nothing is on its way any more.
    pub(crate) fn end_connections(&mut self, now: Instant) {
        let mut index = 0;
        while let Some(id) = self.ending.get(index).copied() {
            if self.end_connection(id, now) {
                self.ending.swap_remove(index);
            } else {
                index += 1;
            }
        }
    }

    /// True if it has ended, or is in use again.
    fn end_connection(&mut self, id: RemoteId, now: Instant) -> bool {
        let Some(remote) = self.remotes.get(&id) else { return true };
        if remote.stage == Stage::Open {
            return true;
        }
        if remote.requests > remote.failed {
            return false;
        }
        let Stage::Broken(since) = remote.stage else {
            if remote.failed > 0 {
                // Of files.
                return false;
            }
            self.remove(id);
            return true;
        };
        if remote.failed > 0 {
            if !self.is_quiet(id, now) {
                return false;
            }
            self.end_failed(id);
        }
        let Some(remote) = self.remotes.get(&id) else { return true };
        let posts: Vec<PostId> = self
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.remote == id)
            .map(|(post, _)| *post)
            .collect();
        let dead = remote.said_farewell() || remote.life.is_over();
        if !dead && matches!(remote.life, Life::Watched(_)) && now.saturating_duration_since(since) < DYING {
            return false;
        }
        let end = if dead { WayEnd::Dead { quiet_after: Duration::ZERO } } else { WayEnd::Lost };
        let users = self.remove(id);
        for post in posts {
            let stopped = self.transfers.get(&post).and_then(|transfer| transfer.stopped.clone());
            self.end(post, Err(stopped.unwrap_or(PlaneError::PeerGone)));
        }
        for peer in users {
            self.peers.remove(&peer);
            self.permissions.remove(&peer);
            self.events.push(PlaneEvent::PeerGone { peer, end });
        }
        true
    }

    /// Whether nothing of a broken connection's failed requests touches memory any more. That is so
    ///
    /// 1. when the connection was closed, here at least, and what UCX had taken in before has been
    ///    dealt with, that is in another call than this one,
    /// 2. and when the peer's process is dead, or [`settle`](crate::NixlConfig::settle) has passed: bytes
    ///    may be between the hosts, or with a peer that has not looked.
    ///
    /// A connection is closed only if UCX has failed it, or the peer is dead: else requests would go on.
    fn is_quiet(&mut self, id: RemoteId, now: Instant) -> bool {
        let Some(remote) = self.remotes.get(&id) else { return true };
        let (dead, closed) = (remote.life.is_over(), remote.closed);
        if let Some(closed) = closed {
            return dead || now.saturating_duration_since(closed) >= self.config.settle;
        }
        if dead || self.is_severed(id, now) {
            self.give_up_handles(id);
            if let Some(remote) = self.remotes.get_mut(&id) {
                remote.closed = Some(now);
                self.engine.forget(&remote.name);
            }
        }
        false
    }

    /// Whether UCX has failed a connection: NIXL then drops the peer, or sends it nothing more. Tried
    /// out now and then, but not with a foreign agent, which would have to understand it.
    fn is_severed(&mut self, id: RemoteId, now: Instant) -> bool {
        let Some(remote) = self.remotes.get_mut(&id) else { return true };
        if !self.engine.knows(&remote.name) {
            return true;
        }
        if now.saturating_duration_since(remote.spoke) < PROBE / 4 {
            return false;
        }
        remote.spoke = now;
        let Some(Dialogue { token, .. }) = remote.dialogue() else { return false };
        let probe = Notification { to: *token, connection: id.0, kind: Kind::Probe };
        self.engine.notify(&remote.name, &probe.encode()).is_err()
    }

    /// Tells a new peer the number of our connection to it.
    pub(crate) fn greet(&mut self, id: RemoteId) {
        self.notify(id, Kind::Probe, id.0);
    }

    fn remove(&mut self, id: RemoteId) -> Vec<PeerId> {
        let Some(remote) = self.remotes.remove(&id) else { return Vec::new() };
        if remote.transport != Transport::Storage {
            self.engine.forget(&remote.name);
        }
        self.names.remove(&remote.name);
        remote.users
    }
}

#[cfg(test)]
mod tests {
    use kv_core::{Op, Origin, Plane};

    use super::*;
    use crate::config::NixlConfig;
    use crate::engine::Engine;
    use crate::metadata::Metadata;
    use crate::testing::{LEN, PEER, nixl, others, pass, until, whole, worker};

    const FRAME: &[u8] = b"frame";

    fn frames(events: &[PlaneEvent]) -> Vec<Origin> {
        let frames = events.iter().filter_map(|event| match event {
            PlaneEvent::Frame { from, frame } if *frame == FRAME => Some(*from),
            _ => None,
        });
        frames.collect()
    }

    /// A third agent that calls itself as the victim does, knows the numbers in which the victim's
    /// metadata and ours differ, and says goodbye for it in the middle of the victim's write.
    #[test]
    fn a_farewell_in_another_agents_name_ends_nothing_and_its_own_ends_it() {
        let Some(nixl) = nixl() else { return };
        let ((mut here, ours), (mut victim, theirs)) = (worker(nixl), worker(nixl));
        theirs.write(0, &vec![7; LEN]).unwrap();
        let (metadata, metadata_of_victim) = (here.metadata().unwrap(), victim.metadata().unwrap());
        here.connect(PEER, &metadata_of_victim).unwrap();
        victim.connect(PEER, &metadata).unwrap();
        let knows = |speech: &Speech| matches!(speech, Speech::Ours(said) if said.theirs.is_some());
        let told = |victim: &NixlPlane| victim.remotes.values().all(|remote| knows(&remote.speech));
        until(&mut [&mut victim, &mut here], "both know each other", |victim, _| told(victim));
        until(&mut [&mut here, &mut victim], "both know each other", |here, _| told(here));

        let name = &here.remotes.values().next().unwrap().name;
        let config =
            NixlConfig { backend_params: here.config.backend_params.clone(), ..NixlConfig::default() };
        let mut impostor = Engine::new(nixl, name, &config).unwrap();
        let decoded = Metadata::decode(&metadata).unwrap();
        let target = impostor.load(&decoded.nixl).unwrap();
        // What the victim calls its connection to us, were that to leak, is not enough.
        let (victims, guess) = (victim.remotes.keys().next().unwrap().0, 1234);
        for (connection, proof) in
            [(guess, guess), (victims, victims), (victims, 0), (victims, decoded.token)]
        {
            let forged = Notification { to: decoded.token, connection, kind: Kind::Farewell(proof) };
            impostor.notify(&target, &forged.encode()).unwrap();
        }
        let last = Kind::Frame(Bytes::from_static(FRAME));
        let last = Notification { to: decoded.token, connection: guess, kind: last };
        impostor.notify(&target, &last.encode()).unwrap();
        victim.post(PEER, whole(1, Op::Write)).unwrap();
        let mut events = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(60);
        while frames(&events).is_empty() {
            assert!(Instant::now() < deadline, "the impostor is not heard");
            let _ = impostor.receive(|_, _| {});
            events.extend(pass(&mut [&mut here], Duration::from_millis(10)));
        }
        assert_eq!(events.len(), 1, "{events:?}");
        assert_eq!(others(&ours, 0), 0, "the victim is about to write");
        victim.permit(PEER, kv_core::Time::MAX);
        let written = until(&mut [&mut victim, &mut here], "a write", |_, events| !events.is_empty());
        assert_eq!(written, [PlaneEvent::Posted { post: PostId(1), result: Ok(()) }]);
        assert_eq!(others(&ours, 7), 0, "it lives, and has written");

        // The impostor has made the victim's number unknown to us by its frame; nothing of ours.
        victim.shutdown(Duration::from_secs(1));
        victim.say_farewell();
        let events = until(&mut [&mut here, &mut victim], "the farewell", |_, events| !events.is_empty());
        let end = WayEnd::Dead { quiet_after: Duration::ZERO };
        assert_eq!(events, [PlaneEvent::PeerGone { peer: PEER, end }]);
    }

    /// Whatever number of a connection is written into a frame.
    #[test]
    fn frames_of_one_agent_have_one_origin_and_those_of_others_another() {
        let Some(nixl) = nixl() else { return };
        let ((mut here, _), (mut a, _), (mut b, _)) = (worker(nixl), worker(nixl), worker(nixl));
        let metadata = here.metadata().unwrap();
        let mut origins = Vec::new();
        for (round, other) in [(0, &mut a), (1, &mut b)] {
            other.connect(PEER, &metadata).unwrap();
            let (name, token) = (here.agent_name(), here.token);
            for connection in [1, 2, 1 << 62] {
                let frame =
                    Notification { to: token, connection, kind: Kind::Frame(Bytes::from_static(FRAME)) };
                other.engine.notify(&name, &frame.encode()).unwrap();
            }
            let events = until(&mut [&mut here, other], "frames", |_, events| frames(events).len() == 3);
            origins.extend(frames(&events));
            // Also once it is connected.
            here.connect(PeerId(10 + round), &other.metadata().unwrap()).unwrap();
            other.send(PEER, Bytes::from_static(FRAME)).unwrap();
            let events = until(&mut [&mut here, other], "a frame", |_, events| !events.is_empty());
            origins.extend(frames(&events));
        }
        let (a, b) = (origins[0], origins[4]);
        assert_ne!(a, b);
        assert_eq!(origins, [a, a, a, a, b, b, b, b]);
    }
}
