//! The content of the next request: a slice of a long post, or several short posts.

use std::time::Instant;

use kv_core::{Op, PostId, TransportError};

use crate::agent::engine::Engine;
use crate::connections::id::RemoteId;
use crate::transfers::line::Length;
use crate::transfers::request::Parts;
use crate::transfers::transfer::{Batch, Made};
use crate::transport::NixlTransport;

/// A request of short posts takes at most a slice divided by this number.
const SHARED: u64 = 2;
/// How many requests of a long post are made at once. A request costs 3 µs to make after another one, and 15
/// µs after a copy that has emptied the caches.
const AHEAD: usize = 8;
/// The most long posts at one peer for which requests are made ahead: requests of more posts would take much
/// memory.
const FEW: usize = 4;

impl NixlTransport {
    /// Makes the next request of the posts that wait at this peer, or takes one that was made ahead. `None`
    /// if the posts have nothing to send, or may send nothing now.
    pub(crate) fn next_request(
        &mut self,
        id: RemoteId,
        length: Length,
        started: Instant,
    ) -> Option<(Made, Parts)> {
        let (made, op, posts) = match length {
            Length::Short => self.gather_short(id)?,
            Length::Long => self.next_slice(id)?,
        };
        self.wake_first(id, &posts, made.bytes);
        // The last thing before its start: what was made ahead, or took long to make, is no exception.
        if !self.may_start(id, op, &posts, made.weight) {
            self.put_back(id, length, made, posts);
            return None;
        }
        for post in &posts {
            if let Some(transfer) = self.transfers.get_mut(post) {
                transfer.in_flight += 1;
                if transfer.has_more() {
                    self.enqueue(id, *post);
                }
            }
        }
        let weight = made.weight;
        let load = self.remotes.get_mut(&id)?.speed(op).load(weight);
        Some((made, Parts { remote: id, posts, op, weight, load, started }))
    }

    /// Makes one request of short posts of one direction to one peer, whose permission they share.
    fn gather_short(&mut self, id: RemoteId) -> Option<(Made, Op, Vec<PostId>)> {
        let remote = self.remotes.get_mut(&id)?;
        self.batch.clear();
        let (mut posts, mut peer) = (Vec::new(), None);
        while let Some(post) = remote.run.of(Length::Short).posts.front().copied() {
            let Some(transfer) = self.transfers.get_mut(&post).filter(|transfer| transfer.has_more()) else {
                remote.run.of(Length::Short).posts.pop_front();
                continue;
            };
            let most = remote.speed(transfer.op).slice() / SHARED;
            let first = posts.is_empty();
            let joins = self.batch.kind.is_some_and(|(op, ..)| op == transfer.op)
                && peer == Some(transfer.peer)
                && transfer.is_shorter_than(most.saturating_sub(self.batch.weight));
            if !first && !joins {
                break;
            }
            peer = Some(transfer.peer);
            let before = self.batch.pieces.len();
            let lists = self.lists.as_ref().zip(remote.lists.as_ref());
            transfer.cut(&self.regions, &remote.regions, lists, u64::MAX, &mut self.batch);
            if self.batch.pieces.len() == before {
                if first {
                    remote.run.of(Length::Short).posts.pop_front();
                    self.out_of_region(post);
                    return None;
                }
                break;
            }
            remote.run.of(Length::Short).posts.pop_front();
            posts.push(post);
            if transfer.has_more() {
                // The rest is of other kinds of memory.
                break;
            }
        }
        let (op, ..) = self.batch.kind?;
        Some((make(&self.engine, &self.batch, &remote.name)?, op, posts))
    }

    /// The next slice of the long post whose turn it is. If no slices are ready, some are cut.
    fn next_slice(&mut self, id: RemoteId) -> Option<(Made, Op, Vec<PostId>)> {
        let remote = self.remotes.get_mut(&id)?;
        let (post, transfer) = loop {
            let post = remote.run.of(Length::Long).posts.pop_front()?;
            // Borrowed anew: the borrow checker does not see that the other one has ended.
            if self.transfers.get(&post).is_some_and(|transfer| transfer.has_more()) {
                break (post, self.transfers.get_mut(&post)?);
            }
        };
        let op = transfer.op;
        if let Some(made) = transfer.ready.pop_front() {
            return Some((made, op, vec![post]));
        }
        let few = remote.run.of(Length::Long).posts.len() < FEW;
        let speed = remote.speed(op);
        let slice = speed.slice();
        let ahead = if few && speed.is_known() { AHEAD } else { 1 };
        let lists = self.lists.as_ref().zip(remote.lists.as_ref());
        for _ in 0..ahead {
            self.batch.clear();
            transfer.cut(&self.regions, &remote.regions, lists, slice, &mut self.batch);
            if self.batch.pieces.is_empty() {
                break;
            }
            transfer.ready.extend(make(&self.engine, &self.batch, &remote.name));
        }
        let Some(made) = transfer.ready.pop_front() else {
            self.out_of_region(post);
            return None;
        };
        Some((made, op, vec![post]))
    }

    /// Stops a post whose descriptor names no region, which checked descriptors cannot do.
    fn out_of_region(&mut self, post: PostId) {
        if let Some(transfer) = self.transfers.get_mut(&post) {
            transfer.stop(TransportError::Unsupported("a descriptor names a region that does not exist"));
        }
        self.settle(post);
    }
}

/// Makes a request of a batch; `None` of an empty batch.
fn make(engine: &Engine, batch: &Batch, name: &str) -> Option<Made> {
    Some(Made {
        request: match &batch.numbers {
            Some(numbers) => engine.create_of_items(batch.kind?, numbers, name),
            None => engine.create(batch.kind?, &batch.pieces, name),
        },
        by_number: batch.numbers.is_some(),
        descriptors: batch.pieces.len() as u64,
        bytes: batch.pieces.iter().map(|piece| piece.len).sum(),
        weight: batch.weight,
    })
}
