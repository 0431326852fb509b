//! Frames that are sent: to transports of this crate in envelopes, to foreign agents as they are.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{MemoryKind, TransportEvent};
use kv_host::Life;

use crate::agent::engine::{Progress, Started};
use crate::connections::id::RemoteId;
use crate::connections::remote::Remote;
use crate::connections::route::Route;
use crate::notifications::arrivals::charge;
use crate::notifications::datagrams::{Datagrams, PeerSocket, parts};
use crate::notifications::envelope::{Kind, Notification};
use crate::notifications::speech::Speech;
use crate::transport::NixlTransport;

/// How long a connection may be silent before it is tried out, if the peer's death cannot be seen otherwise.
pub(crate) const PROBE: Duration = Duration::from_secs(1);
/// After this time without a word to a peer, the exchange of frames that was under way is over.
const CALM: Duration = Duration::from_micros(200);
/// How many foreign agents are tried out at once: each attempt takes some 15 µs.
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

    /// Sends a notification to a transport of this crate. False if the agent is a foreign one, or the
    /// connection has failed.
    fn notify(&mut self, id: RemoteId, kind: Kind, connection: u64) -> bool {
        let Some(dialogue) = self.remotes.get_mut(&id).and_then(Remote::dialogue) else { return false };
        let beside = matches!(kind, Kind::Frame(_) | Kind::Arrived(_));
        let bytes = Notification { to: dialogue.token, connection, kind }.encode();
        (beside && self.notify_beside(id, &bytes)) || (self.notify_raw(id, &bytes) && self.ring(id))
    }

    /// Makes a notification part of the next datagram to a peer. False if the notification must go by NIXL.
    fn notify_beside(&mut self, id: RemoteId, bytes: &[u8]) -> bool {
        if self.socket_of(id).is_some_and(|(_, socket)| !socket.has_room(bytes.len())) {
            self.send_datagram(id);
        }
        let is_open = self.remotes.get(&id).is_some_and(Remote::is_open);
        let Some((_, socket)) =
            self.socket_of(id).filter(|(_, socket)| is_open && socket.carries(bytes.len()))
        else {
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
        let Some(index) = self.unsent.iter().position(|unsent| *unsent == id) else { return };
        self.unsent.swap_remove(index);
        let Some((datagrams, socket)) = self.socket_of(id) else { return };
        if let Err(datagram) = socket.send(datagrams) {
            let sent = parts(&datagram).all(|part| self.notify_raw(id, part));
            if sent {
                self.ring(id);
            }
        }
    }

    /// Wakes the peer if the peer is on this host. Always true.
    fn ring(&mut self, id: RemoteId) -> bool {
        if let Some((datagrams, socket)) = self.socket_of(id) {
            socket.ring(datagrams, Instant::now());
        }
        true
    }

    /// This transport's socket and that of a peer, if the peer is on this host.
    fn socket_of(&mut self, id: RemoteId) -> Option<(&Datagrams, &mut PeerSocket)> {
        let socket = self.remotes.get_mut(&id)?.dialogue()?.socket.as_mut()?;
        Some((self.datagrams.as_ref()?, socket))
    }

    /// Sends bytes without an envelope. False if the connection has failed.
    fn notify_raw(&mut self, id: RemoteId, bytes: &[u8]) -> bool {
        let Some(remote) = self.remotes.get_mut(&id).filter(|remote| remote.is_open()) else {
            return false;
        };
        remote.spoke = Instant::now();
        self.pace.stir();
        if self.engine.notify(&remote.name, bytes).is_ok() {
            if remote.copies && !remote.unflushed {
                remote.unflushed = true;
                self.unflushed.push(id);
            }
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
        self.try_foreign(now);
    }

    /// Tries out the foreign agents that have been silent for longest.
    fn try_foreign(&mut self, now: Instant) {
        let silent = self.remotes.iter().filter(|(_, remote)| {
            remote.is_open() && remote.is_foreign() && now.saturating_duration_since(remote.spoke) >= PROBE
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

    /// Whether the connection to a foreign agent has failed, as far as UCX shows that without a word to the
    /// agent: UCX refuses a read of no bytes then. Both sides must have regions.
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

    /// Has UCX ask for a confirmation of what was sent to peers of this host, once the exchange of frames is over.
    /// UCX sends frames over TCP, and calls a copy between processes over only when the peer's UCX has confirmed
    /// what was sent before the copy. Without this, the next copy waits until the peer has looked, although its
    /// bytes are in place at once.
    ///
    /// Only the end that copies does so: UCX asks for a confirmation of its own confirmations too. And it does so
    /// once at a time: UCX keeps memory for each confirmation that a peer owes.
    pub(crate) fn flush_ahead(&mut self, now: Instant) {
        self.check_confirmations();
        let mut index = 0;
        while let Some(id) = self.unflushed.get(index).copied() {
            let Some(remote) = self.remotes.get_mut(&id) else {
                self.unflushed.swap_remove(index);
                continue;
            };
            let waits = remote.requests > 0 || self.confirming.iter().any(|(other, _)| *other == id);
            let calm = !waits && now.saturating_duration_since(remote.spoke) >= CALM;
            if remote.is_open() && !calm {
                index += 1;
                continue;
            }
            remote.unflushed = false;
            self.unflushed.swap_remove(index);
            // A read of nothing asks for the confirmation as every transfer does. If the connection is lost, the next
            // frame or request shows it.
            if remote.is_open()
                && let Some(Started::InFlight(request)) = self.try_out(id)
            {
                self.confirming.push((id, request));
            }
        }
    }

    /// Forgets the confirmations that have come, or cannot come any more.
    pub(crate) fn check_confirmations(&mut self) {
        self.confirming.retain(|(_, request)| self.engine.progress(request) == Progress::InFlight);
    }

    /// Rings at peers to which requests are on their way: over some transports, TCP for one, the peer must
    /// take part.
    pub(crate) fn ring_for_requests(&mut self, now: Instant) {
        let Some(datagrams) = &self.datagrams else { return };
        if self.requests.is_empty() {
            return;
        }
        for remote in self.remotes.values_mut().filter(|remote| remote.requests > 0) {
            if let Some(socket) = remote.dialogue().and_then(|dialogue| dialogue.socket.as_mut()) {
                socket.ring(datagrams, now);
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
    use kv_core::{Op, PostId, Time, Transport, WayEnd};
    use kv_host::HostMemory;

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

    /// The same once the first has copied: from then on it has its frames confirmed ahead.
    fn copied() -> Option<[(NixlTransport, HostMemory); 2]> {
        let [(mut here, ours), (mut there, theirs)] = copying()?;
        here.post(PEER, whole(1, Op::Write)).unwrap();
        until(&mut [&mut here, &mut there], "the first copy", |_, events| !events.is_empty());
        Some([(here, ours), (there, theirs)])
    }

    /// The kernel copies, so nobody at the other end need be awake.
    #[test]
    fn a_copy_ends_while_the_peer_sleeps_once_earlier_frames_are_confirmed() {
        let Some([(mut here, ours), (mut there, theirs)]) = copying() else { return };
        for round in 1..=3 {
            ours.write(0, &vec![round; LEN]).unwrap();
            here.post(PEER, whole(u64::from(round), Op::Write)).unwrap();
            if round == 1 {
                until(&mut [&mut here, &mut there], "the first copy", |_, events| !events.is_empty());
            } else {
                until(&mut [&mut here], "a copy to a peer that sleeps", |_, events| !events.is_empty());
            }
            assert_eq!(others(&theirs, round), 0, "round {round}");
            here.send(PEER, Bytes::from_static(b"a frame")).unwrap();
            let heard = until(&mut [&mut there, &mut here], "the frame", |_, events| !events.is_empty());
            assert!(matches!(&heard[..], [TransportEvent::Frame { frame, .. }] if frame == "a frame"));
            pass(&mut [&mut here, &mut there], 10 * CALM);
        }
    }

    /// The peer leaves with a copy on its way, and comes back before the copy has ended: the connection is the same.
    #[test]
    fn a_peer_that_comes_back_in_the_middle_of_a_copy_has_its_frames_confirmed_again() {
        let Some([(mut here, ours), (mut there, theirs)]) = copied() else { return };
        let metadata = there.metadata().unwrap();
        here.send(PEER, Bytes::from_static(b"not confirmed")).unwrap();
        here.post(PEER, whole(2, Op::Write)).unwrap();
        until(&mut [&mut here], "a copy on its way", |here, _| !here.requests.is_empty());
        here.disconnect(PEER);
        pass(&mut [&mut here], CALM);
        assert!(!here.requests.is_empty(), "the copy waits for the confirmation");
        here.connect(PEER, &metadata).unwrap();
        here.permit(PEER, Time::MAX);
        until(&mut [&mut here, &mut there], "the end of the copy", |here, _| here.requests.is_empty());

        here.send(PEER, Bytes::from_static(b"confirmed")).unwrap();
        pass(&mut [&mut here, &mut there], 100 * CALM);
        ours.write(0, &[3; LEN]).unwrap();
        here.post(PEER, whole(3, Op::Write)).unwrap();
        let copied = TransportEvent::Posted { post: PostId(3), result: Ok(()) };
        until(&mut [&mut here], "a copy to a peer that sleeps", |_, events| events.contains(&copied));
        assert_eq!(others(&theirs, 3), 0);
    }

    /// A peer whose UCX confirms something to an end that is gone has lost what it had not taken in.
    #[test]
    fn a_peer_that_was_busy_hears_the_last_frames_of_a_dropped_transport_and_its_farewell() {
        let Some([(mut here, _ours), (mut there, _theirs)]) = copied() else { return };
        there.connect(PEER, &here.metadata().unwrap()).unwrap();
        pass(&mut [&mut here, &mut there], 10 * CALM);
        here.send(PEER, Bytes::from_static(b"to be confirmed")).unwrap();
        pass(&mut [&mut here], 10 * CALM);
        let long = Bytes::from(vec![7; 60_000]);
        for _ in 0..20 {
            here.send(PEER, long.clone()).unwrap();
        }
        std::thread::scope(|scope| {
            scope.spawn(move || drop(here));
            std::thread::sleep(Duration::from_millis(100));
            let gone = |event: &TransportEvent| matches!(event, TransportEvent::PeerGone { .. });
            let heard = until(&mut [&mut there], "the farewell", |_, events| events.iter().any(gone));
            let whole = heard.iter().filter(|event| match event {
                TransportEvent::Frame { frame, .. } => *frame == long,
                _ => false,
            });
            assert_eq!(whole.count(), 20);
            let end = WayEnd::Dead { quiet_after: Duration::ZERO };
            assert_eq!(heard.last(), Some(&TransportEvent::PeerGone { peer: PEER, end }));
        });
    }

    /// UCX keeps memory for each confirmation that is awaited.
    #[test]
    fn a_peer_that_never_looks_owes_one_confirmation_whatever_it_is_sent() {
        let Some([(mut here, _ours), (mut there, _theirs)]) = copied() else { return };
        pass(&mut [&mut here, &mut there], 10 * CALM);
        for _ in 0..50 {
            here.send(PEER, Bytes::from_static(b"a frame")).unwrap();
            pass(&mut [&mut here], 2 * CALM);
        }
        assert_eq!((here.confirming.len(), here.unflushed.len()), (1, 1));
        until(&mut [&mut here, &mut there], "all confirmed", |here, _| {
            here.confirming.is_empty() && here.unflushed.is_empty()
        });
    }
}
