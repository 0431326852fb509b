//! Requests to NIXL: posts are cut into them, they are started in turns, and end.

use std::time::{Duration, Instant};

use kv_core::{PlaneError, PlaneEvent, PostId};
use nixl_sys::XferRequest;

use crate::engine::{Progress, Started};
use crate::plane::{NixlPlane, SHORT, backend};
use crate::remote::{RemoteId, Stage};

/// How long one call of `poll` starts requests: with the last of them, half of what it may take.
const START_TIME: Duration = Duration::from_micros(500);

/// A request on its way.
pub(crate) struct Request {
    handle: XferRequest,
    post: PostId,
    remote: RemoteId,
    /// What it counts of the peer's window.
    weight: u64,
    /// It has failed already; parts of it may be on their way.
    failed: bool,
}

impl NixlPlane {
    /// Puts a peer in the line of those with something to send.
    pub(crate) fn stand_in_line(&mut self, id: RemoteId) {
        if let Some(remote) = self.remotes.get_mut(&id)
            && !remote.in_line
            && !remote.run.is_empty()
            && remote.weight < self.config.window_bytes
        {
            remote.in_line = true;
            self.line.push_back(id);
        }
    }

    /// Starts requests for a while: one of each peer's next post, peer after peer.
    pub(crate) fn start_requests(&mut self) {
        let begun = Instant::now();
        while let Some(id) = self.line.pop_front() {
            if let Some(remote) = self.remotes.get_mut(&id) {
                remote.in_line = false;
                if remote.is_open()
                    && let Some(post) = remote.run.pop()
                {
                    self.start_one(id, post);
                    self.stand_in_line(id);
                }
            }
            if begun.elapsed() >= START_TIME {
                return;
            }
        }
    }

    fn start_one(&mut self, id: RemoteId, post: PostId) {
        let (Some(remote), Some(transfer)) = (self.remotes.get_mut(&id), self.transfers.get_mut(&post))
        else {
            return;
        };
        if !transfer.has_more() {
            return;
        }
        let cut = transfer.cut(&self.regions, &remote.regions, self.config.slice_bytes, &mut self.pieces);
        let Some(cut) = cut else {
            // Cannot happen to descriptors that were checked.
            transfer.stopped.get_or_insert(PlaneError::Unsupported("a descriptor of no region"));
            self.settle(post);
            return;
        };
        if transfer.has_more() {
            remote.run.push(post, transfer.is_shorter_than(self.config.slice_bytes / SHORT));
        }
        self.stats.requests += 1;
        self.stats.descriptors += self.pieces.len() as u64;
        self.stats.bytes += self.pieces.iter().map(|piece| piece.len).sum::<u64>();
        let (handle, failed) = match self.engine.start(cut.op, cut.kinds, &self.pieces, &remote.name) {
            Started::Done => {
                self.pace.stir();
                self.settle(post);
                return;
            }
            Started::Refused(error) => {
                // NIXL drops what it knows of a peer when its connection has failed.
                if !self.engine.knows(&remote.name) {
                    transfer.stopped.get_or_insert(PlaneError::PeerGone);
                    self.break_off(id);
                } else {
                    transfer.stopped.get_or_insert(backend(error));
                }
                self.settle(post);
                return;
            }
            Started::InFlight(handle) => (handle, false),
            Started::Failed(handle) => (handle, true),
        };
        remote.requests += 1;
        remote.weight += cut.weight;
        transfer.in_flight += 1;
        self.requests.push(Request { handle, post, remote: id, weight: cut.weight, failed });
        if failed {
            self.break_off(id);
        }
    }

    /// Looks how the requests do.
    pub(crate) fn check_requests(&mut self) {
        let mut index = 0;
        while let Some(request) = self.requests.get(index) {
            let progress = self.engine.progress(&request.handle);
            if progress == Progress::InFlight {
                index += 1;
                continue;
            }
            let Request { handle, post, remote: id, weight, failed } = self.requests.swap_remove(index);
            // Its end is known: nothing is left to stop.
            drop(handle);
            self.pace.stir();
            if let Some(remote) = self.remotes.get_mut(&id) {
                remote.requests -= 1;
                remote.weight -= weight;
            }
            let failed = failed || progress == Progress::Failed;
            if let Some(transfer) = self.transfers.get_mut(&post) {
                transfer.in_flight -= 1;
                if failed {
                    transfer.stopped.get_or_insert(PlaneError::PeerGone);
                }
            }
            if failed {
                self.break_off(id);
            }
            self.settle(post);
            self.stand_in_line(id);
        }
    }

    /// A post has one request less on its way: it may be over.
    fn settle(&mut self, post: PostId) {
        let Some(transfer) = self.transfers.get(&post) else { return };
        if transfer.in_flight > 0 || transfer.has_more() {
            return;
        }
        match &transfer.stopped {
            // It ends with its connection, when nothing of any post is on its way any more.
            Some(PlaneError::PeerGone) => {}
            Some(error) => {
                let error = error.clone();
                self.end(post, Err(error));
            }
            None => self.bytes_in_place(post),
        }
    }

    /// All bytes of a post are in place: tells the peer, once there is room to.
    fn bytes_in_place(&mut self, post: PostId) {
        let Some(transfer) = self.transfers.get(&post) else { return };
        if transfer.notify.is_none() {
            self.end(post, Ok(()));
            return;
        }
        let id = transfer.remote;
        if let Some(remote) = self.remotes.get_mut(&id) {
            remote.parked.push_back(post);
            self.flush(id);
        }
    }

    /// Ends a post with its event.
    pub(crate) fn end(&mut self, post: PostId, result: Result<(), PlaneError>) {
        if self.transfers.remove(&post).is_some() {
            self.stats.posts_completed += u64::from(result.is_ok());
            self.events.push(PlaneEvent::Posted { post, result });
        }
    }

    /// The connection has failed, or the peer has died: nothing more is started on it.
    pub(crate) fn break_off(&mut self, id: RemoteId) {
        let Some(remote) = self.remotes.get_mut(&id) else { return };
        match remote.stage {
            Stage::Broken(_) => return,
            Stage::Open => self.ending.push(id),
            Stage::Left => {}
        }
        remote.stage = Stage::Broken(Instant::now());
        remote.run.clear();
        remote.parked.clear();
        for transfer in self.transfers.values_mut().filter(|transfer| transfer.remote == id) {
            transfer.stopped.get_or_insert(PlaneError::PeerGone);
        }
    }
}
