//! Ends in good order and otherwise: see [`super`] for what counts as proof.

use std::time::Duration;

use kv_core::{PeerId, PlaneError, PlaneEvent, WayEnd};
use rustix::event::{PollFd, PollFlags, epoll, poll};
use rustix::time::Timespec;

use super::{Budget, MESSAGE_BUDGET, READ_BUDGET};
use crate::connection::Broken;
use crate::link::{Link, LinkId, Mourned, Stage};
use crate::plane::LocalPlane;

impl LocalPlane {
    /// We forget whoever is at the other end, in good order.
    pub(crate) fn forget(&mut self, id: LinkId) {
        if self.mourned.contains_key(&id) {
            self.unmourn(id);
            return;
        }
        let secondary = self.secondary_links(id);
        self.close(id);
        for other in secondary {
            self.close(other);
        }
    }

    /// Unclaimed links of the same peer: both sides may have connected at the same time.
    pub(super) fn secondary_links(&self, id: LinkId) -> Vec<LinkId> {
        let token = |id: &LinkId| Some(self.links.get(id)?.identity.as_ref()?.metadata.token);
        match token(&id) {
            Some(ours) => self.unclaimed.iter().filter(|other| token(other) == Some(ours)).copied().collect(),
            None => Vec::new(),
        }
    }

    pub(super) fn close(&mut self, id: LinkId) {
        self.end_posts(id);
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        if let Some(peer) = link.peer.take() {
            self.peers.remove(&peer);
        }
        if link.stage == Stage::Dialing || self.strangers.contains(&id) {
            self.remove(id);
            return;
        }
        if link.stage == Stage::Closing {
            return;
        }
        link.stage = Stage::Closing;
        link.connection.queue_goodbye();
        if let Some(process) = link.process.take() {
            let _ = epoll::delete(&self.epoll, process.pidfd());
        }
        if let Some(memory) = link.memory.take() {
            self.retired.extend(memory.retire());
        }
        link.fds.clear();
        self.unclaimed.remove(&id);
        self.flush(id);
    }

    /// The peer's hello is not acceptable.
    pub(super) fn reject(&mut self, id: LinkId) {
        if self.links.get(&id).is_some_and(|link| link.peer.is_some()) {
            self.mourn(id);
        } else {
            self.remove(id);
        }
    }

    pub(super) fn on_broken(&mut self, id: LinkId, _why: Broken) {
        self.stats.broken += 1;
        self.reject(id);
    }

    /// The stream has ended, and no goodbye was in it.
    pub(super) fn on_end(&mut self, id: LinkId) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        match (link.peer, link.stage) {
            (None, _) => {
                self.remove(id);
            }
            (Some(_), Stage::Dialing | Stage::Greeting) => self.gone(id),
            (Some(_), _) => self.mourn(id),
        }
    }

    pub(super) fn process_ended(&mut self, id: LinkId) {
        if self.mourned.contains_key(&id) {
            if let Some(peer) = self.unmourn(id) {
                self.events
                    .push(PlaneEvent::PeerGone { peer, end: WayEnd::Dead { quiet_after: Duration::ZERO } });
            }
            return;
        }
        // What it sent before it died may still be of use; a socket holds less than this.
        let mut budget = Budget { bytes: READ_BUDGET, messages: MESSAGE_BUDGET };
        self.read(id, &mut budget, MESSAGE_BUDGET);
        self.gone(id);
    }

    /// There is proof that the peer copies nothing any more.
    pub(super) fn gone(&mut self, id: LinkId) {
        self.end_posts(id);
        if let Some(peer) = self.remove(id) {
            self.peers.remove(&peer);
            self.events
                .push(PlaneEvent::PeerGone { peer, end: WayEnd::Dead { quiet_after: Duration::ZERO } });
        }
    }

    /// The peer cannot be spoken to any more, but may live.
    pub(super) fn mourn(&mut self, id: LinkId) {
        self.end_posts(id);
        let Some(mut link) = self.links.remove(&id) else {
            return;
        };
        let process = link.process.take();
        // True: our own posts have ended. It lets the peer give up this connection as well.
        link.connection.queue_goodbye();
        let _ = link.connection.flush();
        let peer = link.peer;
        self.dispose(id, link);
        match (peer, process) {
            // Still watched by epoll, under the same key.
            (Some(peer), Some(process)) => {
                self.mourned.insert(id, Mourned { peer, process });
            }
            (Some(peer), None) => {
                self.peers.remove(&peer);
            }
            (None, _) => {}
        }
    }

    pub(super) fn unmourn(&mut self, id: LinkId) -> Option<PeerId> {
        let mourned = self.mourned.remove(&id)?;
        let _ = epoll::delete(&self.epoll, mourned.process.pidfd());
        self.peers.remove(&mourned.peer);
        Some(mourned.peer)
    }

    /// Our copies for this link stop here, so its posts end.
    pub(super) fn end_posts(&mut self, id: LinkId) {
        let mut posts: Vec<_> = self
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.link == id)
            .map(|(post, _)| *post)
            .collect();
        posts.sort_unstable();
        for post in posts {
            self.end(post, Err(PlaneError::PeerGone));
        }
    }

    /// Drops a link. Returns whom it served.
    pub(super) fn remove(&mut self, id: LinkId) -> Option<PeerId> {
        let mut link = self.links.remove(&id)?;
        if let Some(process) = link.process.take() {
            let _ = epoll::delete(&self.epoll, process.pidfd());
        }
        let peer = link.peer;
        self.dispose(id, link);
        peer
    }

    pub(super) fn dispose(&mut self, id: LinkId, link: Link) {
        // Closing would do, unless a forked child holds the socket open.
        if link.interest.is_some() {
            let _ = epoll::delete(&self.epoll, link.connection.socket());
        }
        if let Some(memory) = link.memory {
            self.retired.extend(memory.retire());
        }
        for set in [&mut self.strangers, &mut self.unclaimed, &mut self.dialing] {
            set.remove(&id);
        }
        self.backlog.retain(|other| *other != id);
    }

    /// Waits a moment for sockets that are full, and writes on.
    pub(crate) fn wait_for_closing(&mut self) {
        let closing: Vec<LinkId> =
            self.links.iter().filter(|(_, link)| link.stage == Stage::Closing).map(|(id, _)| *id).collect();
        let sockets = closing.iter().filter_map(|id| self.links.get(id)).map(|link| link.connection.socket());
        let mut fds: Vec<PollFd<'_>> =
            sockets.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::OUT)).collect();
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 10_000_000 }));
        for id in closing {
            self.flush(id);
        }
    }
}
