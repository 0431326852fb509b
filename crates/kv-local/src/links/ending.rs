//! How links end, with a goodbye or without. [`links`](super) says what proves that a peer copies no more.

use std::time::Duration;

use kv_core::{PeerId, TransportEvent, WayEnd};
use kv_host::Token;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use crate::framing::Broken;
use crate::link::{LinkId, Stage};
use crate::transport::LocalTransport;

impl LocalTransport {
    /// Disconnects the peer of a link, with a goodbye on all its links.
    pub(crate) fn forget(&mut self, id: LinkId) {
        let beside = self.links.unclaimed_beside(id);
        self.close(id);
        for other in beside {
            self.close(other);
        }
    }

    /// Queues a goodbye on one link, which ends once the goodbye is written.
    pub(super) fn close(&mut self, id: LinkId) {
        self.posts.end_of(id);
        let is_stranger = self.links.strangers().contains(&id);
        self.links.release(id);
        let Some(link) = self.links.get_mut(id) else {
            return;
        };
        if link.stage == Stage::Dialing || is_stranger {
            self.remove(id);
            return;
        }
        if link.stage == Stage::Closing {
            return;
        }
        // A goodbye takes the place of the messages of which nothing is written.
        self.flush_noted(id);
        let Some(link) = self.links.get_mut(id) else {
            return;
        };
        link.stage = Stage::Closing;
        link.connection.outbound.queue_goodbye();
        if let Some((memory, _)) = link.memory.take() {
            self.retired.extend(memory.retire());
        }
        link.lent = None;
        self.keep_lost(id, None);
        self.flush(id);
    }

    /// Ends a link whose peer has broken the rules, whose hello is refused, or that was starved for too long.
    pub(super) fn reject(&mut self, id: LinkId) {
        if self.links.get(id).is_some_and(|link| link.peer.is_some()) {
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

    /// Handles the end of a stream that had no goodbye.
    pub(super) fn on_end(&mut self, id: LinkId) {
        let Some(link) = self.links.get(id) else {
            return;
        };
        let is_dead = link.process.as_ref().is_some_and(|process| !process.is_alive());
        match link.peer {
            None => {
                self.remove(id);
            }
            Some(_) if is_dead => {
                self.revoking.process_ended(id, &mut self.links);
                self.gone(id);
            }
            // The kernel closes the sockets of a dying process before it declares it dead.
            Some(_) => self.lose(id),
        }
    }

    /// Ends a link whose peer is proven to copy nothing any more.
    pub(super) fn gone(&mut self, id: LinkId) {
        self.posts.end_of(id);
        let Some(link) = self.links.get_mut(id) else {
            return;
        };
        link.granted = None;
        if let Some(peer) = self.remove(id) {
            self.tell_dead(peer);
        }
    }

    /// Reports the death of a peer, which also completes a revocation.
    pub(super) fn tell_dead(&mut self, peer: PeerId) {
        self.revoking.dead(peer, &self.links);
        let end = WayEnd::Dead { quiet_after: Duration::ZERO };
        self.posts.tell(TransportEvent::PeerGone { peer, end });
    }

    /// Ends a link that can carry nothing any more while its peer may live. The owner is told after a moment,
    /// in which the peer's death would become known.
    pub(super) fn lose(&mut self, id: LinkId) {
        self.posts.end_of(id);
        // No goodbye: the peer would take it for the end of this side's copies on all connections.
        let peer = self.links.get(id).and_then(|link| link.peer);
        self.keep_lost(id, peer);
        self.remove(id);
        if let Some(peer) = peer {
            self.revoking.await_death(peer, self.now);
        }
    }

    /// Ends the links whose sockets the kernel does not watch.
    pub(super) fn drop_unwatched(&mut self) {
        for id in std::mem::take(&mut self.unwatched) {
            self.reject(id);
        }
    }

    /// Reports lost connections of peers that have not been proven dead in the time since.
    pub(super) fn tell_lost_of_the_living(&mut self) {
        for peer in self.revoking.living(self.now) {
            self.posts.tell(TransportEvent::PeerGone { peer, end: WayEnd::Lost });
        }
    }

    /// Reports the revocations that are complete.
    pub(crate) fn serve_revocations(&mut self) {
        for peer in self.revoking.answered(&self.links) {
            self.posts.tell(TransportEvent::Revoked { peer });
        }
        for process in self.revoking.settle(self.now) {
            self.watch.forget_process(&process);
        }
    }

    /// Notes that the owner need not be told any more about a peer whose link was lost.
    pub(crate) fn forget_lost(&mut self, peer: PeerId) {
        if let Some(token) = self.revoking.token_of_lost(peer) {
            self.close_revoked(token);
        }
        self.revoking.forget(peer);
        self.serve_revocations();
    }

    /// Says goodbye on the unclaimed links that were revoked with the right of a peer whose own link was lost. A revoked
    /// right never comes back: the other side would write through such a link in vain for ever, and connects anew now.
    pub(super) fn close_revoked(&mut self, token: Token) {
        for id in self.links.revoked_unclaimed(token) {
            self.close(id);
        }
    }

    /// Waits up to 10 ms for full sockets of links that are closing, and writes on. False if there are none.
    pub(crate) fn wait_for_closing(&mut self) -> bool {
        let is_closing = self.links.iter().filter(|(_, link)| link.stage == Stage::Closing);
        let closing: Vec<LinkId> = is_closing.map(|(id, _)| id).collect();
        let sockets =
            closing.iter().filter_map(|id| self.links.get(*id)).map(|link| link.connection.socket());
        let mut fds: Vec<PollFd<'_>> =
            sockets.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::OUT)).collect();
        if fds.is_empty() {
            return false;
        }
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 10_000_000 }));
        for id in closing {
            self.flush(id);
        }
        true
    }
}
