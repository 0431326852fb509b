//! What is sent on ways that are open: frames, and slices of posts.

use std::mem;
use std::ops::Bound;

use kv_core::{Op, TransportError};
use kv_host::{TransferId, clock};

use crate::ffi::engine::Piece;
use crate::message::{self, Kind};
use crate::transport::{Flight, UcxTransport};
use crate::way::{Stage, WayId};

/// Most slices under way to one peer.
const FLIGHTS: usize = 64;

impl UcxTransport {
    /// Sends what is to be sent on the ways where something has changed, until the time is over. The ways take turns.
    pub(crate) fn fill_stirred(&mut self, is_over: impl Fn() -> bool) {
        let stirred = mem::take(&mut self.stirred);
        let last = self.filled;
        let after = (Bound::Excluded(last), Bound::Unbounded);
        for (number, id) in stirred.range(after).chain(stirred.range(..=last)).copied().enumerate() {
            if number > 0 && is_over() {
                self.stirred.insert(id);
                continue;
            }
            self.filled = id;
            self.send_frames(id);
            // One slice a turn: another way's are next.
            if self.begin_slice(id) {
                self.stirred.insert(id);
            }
        }
    }

    /// Bytes of frames that wait for a peer.
    pub(crate) fn frame_bytes(&self, id: WayId) -> usize {
        let Some(way) = self.ways.get(&id) else { return 0 };
        let unsent = self.remotes.get(way.remote).map_or(0, |remote| self.engine.unsent(remote.endpoint));
        way.frame_bytes + unsent
    }

    /// Sends the frames that have waited, and as many notify frames as there is room for.
    fn send_frames(&mut self, id: WayId) {
        let Some(way) = self.ways.get_mut(&id) else { return };
        let Stage::Open(session) = &way.stage else { return };
        let Some(remote) = self.remotes.get(way.remote).filter(|remote| remote.is_standing()) else { return };
        let header = message::header(Kind::Frame, session.token);
        way.frame_bytes = 0;
        for frame in mem::take(&mut way.frames) {
            if self.engine.send(remote.endpoint, header, frame).is_err() {
                let remote = way.remote;
                self.break_off_after_failure(remote);
                return;
            }
        }
        while let Some((transfer, notify)) = way.parked.pop_front() {
            if self.engine.unsent(remote.endpoint) + notify.len() > self.config.outbound_bytes {
                way.parked.push_front((transfer, notify));
                self.crowded.insert(id);
                return;
            }
            if self.engine.send(remote.endpoint, header, notify.clone()).is_err() {
                way.parked.push_front((transfer, notify));
                let remote = way.remote;
                self.break_off_after_failure(remote);
                return;
            }
            self.posts.end(transfer, Ok(()));
        }
    }

    /// Begins one slice of a way. False if there is none, or no room for one.
    fn begin_slice(&mut self, id: WayId) -> bool {
        let now = clock::now();
        let Some(way) = self.ways.get_mut(&id) else { return false };
        if !matches!(way.stage, Stage::Open(_)) {
            return false;
        }
        let window = self.config.window_bytes as u64;
        let room = |remote: &&mut crate::remote::Remote| {
            remote.is_standing() && remote.flights < FLIGHTS && remote.weight < window
        };
        let Some(remote) = self.remotes.get_mut(way.remote).filter(room) else { return false };
        let may_write = now + remote.latency.expected(now) < way.permitted;
        let Some(transfer) = way.turns.next(&self.posts, may_write) else { return false };
        let Some(post) = self.posts.get_mut(transfer) else { return true };
        self.parts.clear();
        let weight = post.cut((self.config.slice_bytes as u64).min(window), &mut self.parts);
        post.under_way += 1;
        let op = post.op;
        way.turns.begun(transfer, &self.posts);
        (remote.flights, remote.weight) = (remote.flights + 1, remote.weight + weight);
        let remote = way.remote;
        let endpoint = self.remotes.get(remote).map_or(0, |remote| remote.endpoint);
        self.last_id += 1;
        let flight = self.last_id;
        self.flights.insert(flight, Flight { transfer, way: id, remote, weight, begun: now });
        self.launch(id, endpoint, op, flight);
        true
    }

    /// Hands the parts of a slice to UCX.
    fn launch(&mut self, id: WayId, endpoint: u64, op: Op, flight: u64) {
        self.pieces.clear();
        let Some(way) = self.ways.get_mut(&id) else { return };
        let Stage::Open(session) = &mut way.stage else { return };
        for part in &self.parts {
            let region = part.remote_region as usize;
            let (Some(place), Some(packed), Some(key)) =
                (way.regions.get(region), session.packed.get(region), session.keys.get_mut(region))
            else {
                continue;
            };
            if key.is_none() {
                *key = self.engine.unpack(endpoint, packed).ok();
            }
            self.pieces.push(Piece {
                memory: part.local_region,
                offset: part.local_offset,
                len: part.len,
                remote: place.addr + part.remote_offset,
                // A key that UCX refuses fails the slice.
                key: key.unwrap_or(u32::MAX),
            });
        }
        self.stats.slices += 1;
        self.stats.descriptors += self.pieces.len() as u64;
        self.stats.bytes += self.parts.iter().map(|part| part.len).sum::<u64>();
        self.engine.begin(endpoint, op, &self.pieces, flight);
    }

    /// Ends a post if nothing of it is under way and nothing more is to come. A post whose remote is ending ends with
    /// the remote.
    pub(crate) fn settle(&mut self, id: TransferId) {
        let Some(transfer) = self.posts.get_mut(id).filter(|transfer| transfer.is_over()) else { return };
        let Some(way) = self.ways.get_mut(&transfer.way) else { return };
        let number = transfer.way;
        if self.remotes.get(way.remote).is_none_or(|remote| !remote.is_standing()) {
            return;
        }
        match (transfer.failed.take(), transfer.notify.take()) {
            (Some(error), _) => self.posts.end(id, Err(error)),
            (None, None) => self.posts.end(id, Ok(())),
            (None, Some(notify)) => {
                way.parked.push_back((id, notify));
                self.stirred.insert(number);
            }
        }
        if self.ways.get(&number).is_some_and(|way| way.is_leaving()) {
            self.leave_if_over(number);
        }
    }

    /// Sends nothing more of a post, and ends the post if nothing of it is under way.
    pub(crate) fn give_up(&mut self, id: TransferId, error: TransportError) {
        let Some(transfer) = self.posts.get_mut(id) else { return };
        transfer.failed.get_or_insert(error);
        if let Some(way) = self.ways.get_mut(&transfer.way) {
            way.parked.retain(|(parked, _)| *parked != id);
        }
        self.settle(id);
    }
}

#[cfg(test)]
mod tests {
    use kv_core::{PostId, Transport, TransportEvent};

    use super::*;
    use crate::ending::tests::{PEER, Pair, begin_write};

    /// Longer than the room that frames of [`FRAME`] bytes leave.
    const NOTIFY: usize = 100_000;
    const FRAME: usize = 60_000;

    /// A side with a post whose bytes are in place, and whose notify frame waits: the peer does not poll, so frames
    /// fill the room.
    fn parked() -> Option<(Pair, WayId)> {
        let mut pair = Pair::new()?;
        pair.connect(0);
        pair.send(0, 1);
        let side = &mut pair.sides[0];
        let flight = begin_write(side, 1, Some(vec![7; NOTIFY].into()));
        // UCX sends nothing of what waits while it is given more.
        while side.send(PEER, vec![7; FRAME].into()).is_ok() {
            side.fill_stirred(|| false);
        }
        side.landed(flight, true);
        side.fill_stirred(|| false);
        let (id, way) = side.ways.first_key_value().unwrap();
        assert_eq!((way.parked.len(), side.posts.open()), (1, 1));
        let id = *id;
        Some((pair, id))
    }

    /// The lengths of the frames that the peer has heard, without those that have filled the room.
    fn heard(pair: &Pair) -> Vec<usize> {
        let len = |event: &TransportEvent| match event {
            TransportEvent::Frame { frame, .. } => frame.len(),
            other => panic!("{other:?}"),
        };
        pair.events[1].iter().map(len).filter(|len| *len != FRAME).collect()
    }

    #[test]
    fn a_notify_frame_that_finds_no_room_waits_for_it_and_no_frame_overtakes_it() {
        let Some((mut pair, id)) = parked() else { return };
        let side = &mut pair.sides[0];
        assert!(side.frame_bytes(id) < side.config.outbound_bytes, "there is room for the frame");
        assert_eq!(side.send(PEER, vec![7].into()), Err(TransportError::WouldBlock));
        pair.until("the end of the post", |pair| !pair.events[0].is_empty());
        assert_eq!(pair.events[0], [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
        pair.send(0, 1);
        assert_eq!(heard(&pair), [NOTIFY]);
    }

    #[test]
    fn the_notify_frame_of_a_post_that_was_cancelled_while_it_waited_for_room_is_not_sent() {
        let Some((mut pair, id)) = parked() else { return };
        pair.sides[0].cancel(PostId(1));
        pair.until("room", |pair| pair.sides[0].frame_bytes(id) == 0);
        pair.sides[0].poll(clock::now(), &mut pair.events[0]);
        let result = Err(TransportError::Cancelled);
        assert_eq!(pair.events[0], [TransportEvent::Posted { post: PostId(1), result }]);
        pair.send(0, 1);
        assert_eq!(heard(&pair), []);
    }
}
