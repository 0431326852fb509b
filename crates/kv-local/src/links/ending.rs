//! Ends in good order and otherwise: see [`super`] for what counts as proof.

use std::time::Duration;

use kv_core::{PeerId, PlaneError, PlaneEvent, WayEnd};
use rustix::event::{PollFd, PollFlags, epoll, poll};
use rustix::time::Timespec;

use super::{Budget, MESSAGE_BUDGET, READ_BUDGET};
use crate::connection::Broken;
use crate::link::{Link, LinkId, Stage};
use crate::plane::LocalPlane;

/// How long the death of a peer is awaited after its way was lost.
pub(super) const DYING: Duration = Duration::from_millis(500);

impl LocalPlane {
    /// We forget whoever is at the other end, in good order.
    pub(crate) fn forget(&mut self, id: LinkId) {
        let secondary = self.secondary_links(id);
        self.close(id);
        for other in secondary {
            self.close(other);
        }
    }

    /// Unclaimed links of the same peer: both sides may have connected at the same time.
    pub(super) fn secondary_links(&self, id: LinkId) -> Vec<LinkId> {
        let token = |id: &LinkId| self.links.get(id)?.token();
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
        if let Some((memory, _)) = link.memory.take() {
            self.retired.extend(memory.retire());
        }
        link.lent = None;
        self.unclaimed.remove(&id);
        self.keep_lost(id, None);
        self.flush(id);
    }

    /// The peer's hello is not acceptable.
    pub(super) fn reject(&mut self, id: LinkId) {
        if self.links.get(&id).is_some_and(|link| link.peer.is_some()) {
            self.lose(id);
        } else {
            self.remove(id);
        }
    }

    pub(super) fn on_broken(&mut self, id: LinkId, why: Broken) {
        match why {
            Broken::Opening => self.stats.refused += 1,
            Broken::Kind(_) | Broken::Length { .. } | Broken::Descriptors => self.stats.broken += 1,
        }
        self.reject(id);
    }

    /// The stream has ended, and no goodbye was in it.
    pub(super) fn on_end(&mut self, id: LinkId) {
        let Some(link) = self.links.get(&id) else {
            return;
        };
        let is_dead = link.process.as_ref().is_some_and(|process| !process.is_alive());
        match link.peer {
            None => {
                self.remove(id);
            }
            Some(_) if is_dead => {
                self.settle(id);
                self.gone(id);
            }
            // The kernel closes the sockets of a dying process before it declares it dead.
            Some(_) => self.lose(id),
        }
    }

    pub(super) fn process_ended(&mut self, id: LinkId) {
        self.settle(id);
        if let Some(lost) = self.lost.remove(&id) {
            if let Some(process) = lost.process {
                let _ = epoll::delete(&self.epoll, &process);
            }
            if let Some(peer) = lost.peer {
                self.tell_dead(peer);
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
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        link.granted = None;
        if let Some(peer) = self.remove(id) {
            self.peers.remove(&peer);
            self.tell_dead(peer);
        }
    }

    /// Reports the end of a peer, which also answers a revocation.
    fn tell_dead(&mut self, peer: PeerId) {
        self.dying.remove(&peer);
        if let Some(mut links) = self.revoking.remove(&peer) {
            links.retain(|id| self.is_marked(*id));
            if !links.is_empty() {
                self.revoking.insert(peer, links);
            }
        }
        self.events.push(PlaneEvent::PeerGone { peer, end: WayEnd::Dead { quiet_after: Duration::ZERO } });
    }

    /// The peer cannot be spoken to over this link any more, but may live. That is told after a moment in
    /// which the peer's death, if it is that, becomes known.
    pub(super) fn lose(&mut self, id: LinkId) {
        self.end_posts(id);
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        // No goodbye: the peer would take it for the end of our copies on all connections.
        let peer = link.peer;
        self.keep_lost(id, peer);
        self.remove(id);
        if let Some(peer) = peer {
            self.peers.remove(&peer);
            self.dying.insert(peer, self.now + DYING);
        }
    }

    /// Reports the ways that were lost long enough ago for their peers to be known as dead, if they were.
    pub(super) fn tell_lost_of_the_living(&mut self) {
        let now = self.now;
        let living: Vec<PeerId> =
            self.dying.iter().filter(|(_, due)| **due <= now).map(|(&peer, _)| peer).collect();
        for peer in living {
            self.dying.remove(&peer);
            self.events.push(PlaneEvent::PeerGone { peer, end: WayEnd::Lost });
        }
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
        self.keep_lost(id, None);
        let link = self.links.remove(&id)?;
        let peer = link.peer;
        self.dispose(id, link);
        peer
    }

    pub(super) fn dispose(&mut self, id: LinkId, link: Link) {
        // Closing would do, unless a forked child holds the socket open.
        if link.interest.is_some() {
            let _ = epoll::delete(&self.epoll, link.connection.socket());
        }
        if let Some((memory, _)) = link.memory {
            self.retired.extend(memory.retire());
        }
        for set in [&mut self.strangers, &mut self.unclaimed, &mut self.dialing] {
            set.remove(&id);
        }
        self.backlog.retain(|other| *other != id);
        self.pacing.forget(id, link.resting);
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
