//! Frames in and out, and the ends of connections.

use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{MAX_FRAME, Origin, PeerId, PlaneError, PlaneEvent, PostId, WayEnd};
use rustix::event::{Timespec, epoll};

use crate::doorbell::Doorbell;
use crate::frame::{Kind, Notification};
use crate::host::Life;
use crate::plane::NixlPlane;
use crate::remote::{RemoteId, Stage, charge};
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
        let events = &mut self.events;
        let (mut heard, mut due, mut leaving) = (false, Vec::new(), Vec::new());
        // An error is of one backend's moment, and comes again if it lasts: sends will fail.
        let _ = self.engine.receive(|name, bytes| {
            let ours = Notification::decode(bytes).filter(|notification| notification.to == token);
            let Some(Notification { connection, kind, .. }) = ours else {
                stats.strangers += 1;
                return;
            };
            heard = true;
            match kind {
                Kind::Frame(frame) if frame.len() <= MAX_FRAME => {
                    if let Some(count) = arrivals.count(connection, name, frame.len()) {
                        due.push((name.to_owned(), connection, count));
                    }
                    events.push(PlaneEvent::Frame { from: Origin(connection), frame });
                }
                Kind::Arrived(count) => due.push((String::new(), connection, count)),
                Kind::Farewell => leaving.push(name.to_owned()),
                Kind::Frame(_) | Kind::Probe => {}
            }
        });
        if heard {
            self.pace.stir();
        }
        for (name, connection, count) in due {
            if name.is_empty() {
                let id = RemoteId(connection);
                if let Some(remote) = self.remotes.get_mut(&id) {
                    remote.confirm(count);
                    self.flush(id);
                }
            } else if let Some(id) = self.names.get(&name) {
                self.confirm(*id, connection, count);
            }
        }
        for name in leaving {
            let Some(id) = self.names.get(&name).copied() else { continue };
            if let Some(remote) = self.remotes.get_mut(&id) {
                remote.said_farewell = true;
                self.break_off(id);
            }
        }
    }

    /// Tells the peers that this plane ends. Nothing is on its way any more.
    pub(crate) fn say_farewell(&mut self) {
        let peers = self.remotes.iter().filter(|(_, remote)| remote.transport != Transport::Storage);
        let ids: Vec<RemoteId> = peers.map(|(id, _)| *id).collect();
        for id in ids {
            self.notify(id, Kind::Farewell, id.0);
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

    /// Sends a frame for which there is room; false if the connection has failed.
    pub(crate) fn transmit(&mut self, id: RemoteId, frame: Bytes) -> bool {
        if self.remotes.get(&id).is_some_and(|remote| remote.transport == Transport::Storage) {
            // To ourselves.
            self.events.push(PlaneEvent::Frame { from: Origin(id.0), frame });
            return true;
        }
        let charged = charge(frame.len());
        let sent = self.notify(id, Kind::Frame(frame), id.0);
        if sent && let Some(remote) = self.remotes.get_mut(&id) {
            remote.sent += charged;
        }
        sent
    }

    fn notify(&mut self, id: RemoteId, kind: Kind, connection: u64) -> bool {
        let Some(remote) = self.remotes.get_mut(&id).filter(|remote| remote.is_open()) else {
            return false;
        };
        let now = Instant::now();
        remote.spoke = now;
        let bytes = Notification { to: remote.token, connection, kind }.encode();
        if self.engine.notify(&remote.name, &bytes).is_ok() {
            if let (Some(doorbell), Some(button)) = (&self.doorbell, &mut remote.button) {
                button.press(doorbell, now);
            }
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

    /// Tries out connections that have been silent.
    pub(crate) fn probe(&mut self, now: Instant) {
        if now < self.probe_at {
            return;
        }
        self.probe_at = now + PROBE / 4;
        let silent = self.remotes.iter().filter(|(_, remote)| {
            remote.is_open()
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
            if let Some(button) = &mut remote.button {
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
        if remote.requests > 0 {
            return false;
        }
        let Stage::Broken(since) = remote.stage else {
            self.remove(id);
            return true;
        };
        let posts: Vec<PostId> = self
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.remote == id)
            .map(|(post, _)| *post)
            .collect();
        let dead = remote.said_farewell || remote.life.is_over();
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
            self.events.push(PlaneEvent::PeerGone { peer, end });
        }
        true
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
