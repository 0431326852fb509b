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
        self.remotes.end(id);
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
        if let Some(Remote { life: Life::Watched(process), .. }) = self.remotes.remove(id) {
            self.watch.remove(&process);
        }
    }
}
