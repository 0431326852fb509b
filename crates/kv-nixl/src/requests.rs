//! Requests to NIXL: posts are cut into them, they are started in turns, and end.

use std::collections::VecDeque;
use std::time::Instant;

use kv_core::{Op, PlaneError, PlaneEvent, PostId};
use nixl_sys::XferRequest;

use crate::engine::{Progress, Started};
use crate::plane::{NixlPlane, backend};
use crate::remote::{Length, RemoteId, Stage};

/// A post that takes less than this part of a slice is short: it shares a request with others, and
/// does not wait for long ones.
const SHORT: u64 = 4;
/// Short posts share requests of this part of a slice.
const SHARED: u64 = 4;
/// One call of `poll` goes on to start requests of short posts for this part of a slice's time...
const SHORT_TIME: u32 = 8;
/// ...and of long ones until this part of it has passed.
const START_TIME: u32 = 3;

/// Peers with something to send, next one first.
#[derive(Debug, Default)]
pub(crate) struct Line {
    short: VecDeque<RemoteId>,
    long: VecDeque<RemoteId>,
}

impl Line {
    pub(crate) fn is_empty(&self) -> bool {
        self.short.is_empty() && self.long.is_empty()
    }

    fn of(&mut self, length: Length) -> &mut VecDeque<RemoteId> {
        match length {
            Length::Short => &mut self.short,
            Length::Long => &mut self.long,
        }
    }
}

/// A request on its way.
pub(crate) struct Request {
    handle: XferRequest,
    parts: Parts,
    /// It has failed already; parts of it may be on their way.
    failed: bool,
}

/// What a request carries.
struct Parts {
    remote: RemoteId,
    posts: Vec<PostId>,
    op: Op,
    weight: u64,
    /// The part of a slice's time that it was taken for.
    load: u64,
    started: Instant,
}

impl NixlPlane {
    /// Puts a post that has something to send at the end of its peer's queue.
    pub(crate) fn enqueue(&mut self, id: RemoteId, post: PostId) {
        if let (Some(remote), Some(transfer)) = (self.remotes.get_mut(&id), self.transfers.get(&post)) {
            let short = transfer.is_shorter_than(remote.speed(transfer.op).slice() / SHORT);
            let length = if short { Length::Short } else { Length::Long };
            remote.run.of(length).posts.push_back(post);
        }
        self.stand_in_line(id);
    }

    /// Puts a peer in the lines of those with something to send.
    fn stand_in_line(&mut self, id: RemoteId) {
        let Some(remote) = self.remotes.get_mut(&id) else { return };
        for length in [Length::Short, Length::Long] {
            let has_turn = remote.has_turn(length);
            let waiting = remote.run.of(length);
            if has_turn && !waiting.in_line && !waiting.posts.is_empty() {
                waiting.in_line = true;
                self.line.of(length).push_back(id);
            }
        }
    }

    /// Starts requests for a while, peer after peer: of short posts first, then of long ones, at
    /// least one of these. All of it takes about the time of a slice.
    pub(crate) fn start_requests(&mut self) {
        let begun = Instant::now();
        let time = self.config.slice_time;
        for (length, time) in [(Length::Short, time / SHORT_TIME), (Length::Long, time / START_TIME)] {
            while let Some(id) = self.line.of(length).pop_front() {
                if let Some(remote) = self.remotes.get_mut(&id) {
                    remote.run.of(length).in_line = false;
                    if remote.is_open() && remote.has_turn(length) {
                        self.start_one(id, length, begun);
                    }
                    self.stand_in_line(id);
                }
                if begun.elapsed() >= time {
                    break;
                }
            }
        }
    }

    /// Starts one request of the posts that wait at this peer: of as many short ones as go into it,
    /// or of a part of a long one.
    fn start_one(&mut self, id: RemoteId, length: Length, begun: Instant) {
        let started = Instant::now();
        let whole = self.config.slice_time.as_nanos().max(1) as f64;
        let left = 1.0 - started.saturating_duration_since(begun).as_nanos() as f64 / whole;
        let Some(parts) = self.gather(id, length, started, left.max(0.5)) else { return };
        let (Some(remote), Some(kind)) = (self.remotes.get_mut(&id), self.batch.kind) else { return };
        self.stats.requests += 1;
        self.stats.descriptors += self.batch.pieces.len() as u64;
        self.stats.bytes += self.batch.pieces.iter().map(|piece| piece.len).sum::<u64>();
        let (handle, failed) = match self.engine.start(kind, &self.batch.pieces, &remote.name) {
            Started::Done => {
                self.pace.stir();
                self.finish(&parts, None);
                return;
            }
            Started::Refused(error) => {
                // NIXL drops what it knows of a peer when its connection has failed.
                let known = self.engine.knows(&remote.name);
                let error = if known { backend(error) } else { PlaneError::PeerGone };
                if !known {
                    self.break_off(id);
                }
                self.finish(&parts, Some(error));
                return;
            }
            Started::InFlight(handle) => (handle, false),
            Started::Failed(handle) => (handle, true),
        };
        remote.requests += 1;
        remote.load += parts.load;
        self.requests.push(Request { handle, parts, failed });
        if failed {
            self.break_off(id);
        }
    }

    /// Fills the batch, a long post's with so much of a slice. `None` if nothing of the posts that
    /// waited has anything to send.
    fn gather(&mut self, id: RemoteId, length: Length, started: Instant, left: f64) -> Option<Parts> {
        let remote = self.remotes.get_mut(&id)?;
        self.batch.clear();
        let mut parts: Option<Parts> = None;
        while let Some(post) = remote.run.of(length).posts.front().copied() {
            let Some(transfer) = self.transfers.get_mut(&post).filter(|transfer| transfer.has_more()) else {
                remote.run.of(length).posts.pop_front();
                continue;
            };
            let slice = remote.speed(transfer.op).slice();
            let most = match length {
                Length::Short => slice / SHARED,
                Length::Long => (slice as f64 * left) as u64,
            };
            let joins = parts.is_none()
                || length == Length::Short
                    && self.batch.kind.is_some_and(|(op, ..)| op == transfer.op)
                    && transfer.is_shorter_than(most.saturating_sub(self.batch.weight));
            let before = self.batch.pieces.len();
            if joins {
                transfer.cut(&self.regions, &remote.regions, most, &mut self.batch);
            }
            if self.batch.pieces.len() == before {
                if parts.is_some() {
                    break;
                }
                // Cannot happen to descriptors that were checked.
                remote.run.of(length).posts.pop_front();
                transfer.stopped.get_or_insert(PlaneError::Unsupported("a descriptor of no region"));
                self.settle(post);
                return None;
            }
            remote.run.of(length).posts.pop_front();
            transfer.in_flight += 1;
            let part = Parts { remote: id, posts: Vec::new(), op: transfer.op, weight: 0, load: 0, started };
            parts.get_or_insert(part).posts.push(post);
            if transfer.has_more() {
                let short = transfer.is_shorter_than(slice / SHORT);
                let rest = if short { Length::Short } else { Length::Long };
                remote.run.of(rest).posts.push_back(post);
                break;
            }
            if length == Length::Long {
                break;
            }
        }
        let parts = parts?;
        let weight = self.batch.weight;
        Some(Parts { weight, load: remote.speed(parts.op).load(weight), ..parts })
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
            let Request { handle, parts, failed } = self.requests.swap_remove(index);
            // Its end is known: nothing is left to stop.
            drop(handle);
            self.pace.stir();
            if let Some(remote) = self.remotes.get_mut(&parts.remote) {
                remote.requests -= 1;
                remote.load -= parts.load;
            }
            let failed = failed || progress == Progress::Failed;
            if failed {
                self.break_off(parts.remote);
            }
            self.finish(&parts, failed.then_some(PlaneError::PeerGone));
            self.stand_in_line(parts.remote);
        }
    }

    /// A request has ended.
    fn finish(&mut self, parts: &Parts, error: Option<PlaneError>) {
        if error.is_none()
            && let Some(remote) = self.remotes.get_mut(&parts.remote)
        {
            remote.speed(parts.op).ended(parts.weight, parts.started, Instant::now());
        }
        for post in &parts.posts {
            if let Some(transfer) = self.transfers.get_mut(post) {
                transfer.in_flight -= 1;
                if let Some(error) = &error {
                    transfer.stopped.get_or_insert_with(|| error.clone());
                }
            }
            self.settle(*post);
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
