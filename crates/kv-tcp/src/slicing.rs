//! Slices of this side's posts: which is sent next, on which lane, and for how long it may be under way.

use std::mem;
use std::ops::Bound;

use kv_core::{Op, Time};
use kv_host::{Posts, TransferId, clock};
use rustix::event::epoll::EventFlags;

use crate::connection::Connection;
use crate::message::{self, Asked, HEADER, MAX_NOTIFY, RANGE};
use crate::transfer::{Slice, Transfer};
use crate::transport::TcpTransport;
use crate::way::{Flight, Stage, Way, WayId};

/// Most slices under way on one lane.
const FLIGHTS: usize = 64;
/// A lane on which so many segments wait to be written gets no slices.
pub(crate) const QUEUED: usize = 2048;

impl TcpTransport {
    /// Sends what is to be sent on the ways where something has changed, until the time is over. The ways take
    /// turns.
    pub(crate) fn fill_stirred(&mut self, is_over: impl Fn() -> bool) {
        let stirred = mem::take(&mut self.stirred);
        let last = self.filled;
        let after = (Bound::Excluded(last), Bound::Unbounded);
        let ids = stirred.range(after).chain(stirred.range(..=last)).copied();
        for (number, id) in ids.enumerate() {
            if number > 0 && is_over() {
                self.stirred.insert(id);
                continue;
            }
            self.filled = id;
            self.fill(id);
        }
    }

    fn fill(&mut self, id: WayId) {
        let Some(way) = self.ways.get(&id) else { return };
        if matches!(way.stage, Stage::Open) && (way.permitted > self.now || !way.turns.is_empty()) {
            self.open_lanes(id);
        }
        self.queue_frames(id);
        self.queue_slices(id);
        let Some(way) = self.ways.get(&id) else { return };
        let open = way.lanes.iter().filter(|lane| lane.open).filter_map(|lane| lane.connection);
        let waiting: Vec<u64> = open
            .filter(|id| self.connections.get(id).is_some_and(|connection| !connection.is_flushed()))
            .collect();
        for connection in waiting {
            self.ready(connection, EventFlags::empty());
        }
    }

    /// There is room on a lane again.
    pub(crate) fn resume(&mut self, id: WayId) {
        let Some(way) = self.ways.get(&id) else { return };
        if !way.turns.is_empty() || !way.frames.is_empty() || !way.parked.is_empty() {
            self.stirred.insert(id);
        }
        if matches!(way.stage, Stage::Leaving { .. }) {
            self.look_at(id, self.now);
        }
    }

    /// Bytes of frames that wait for a peer.
    pub(crate) fn frame_bytes(&self, id: WayId) -> usize {
        let Some(way) = self.ways.get(&id) else { return 0 };
        let lane = way.lanes.first().and_then(|lane| self.connections.get(&lane.connection?));
        way.frame_bytes + lane.map_or(0, |connection| connection.outbound.encoded())
    }

    fn queue_frames(&mut self, id: WayId) {
        let Some(way) = self.ways.get_mut(&id) else { return };
        let Some(lane) = way.lanes.first().filter(|lane| lane.open) else { return };
        let connection = lane.connection.and_then(|connection| self.connections.get_mut(&connection));
        let Some(connection) = connection else { return };
        for frame in way.frames.drain(..) {
            connection.outbound.push(message::frame(frame.len()));
            connection.outbound.push(frame);
        }
        way.frame_bytes = 0;
        while let Some((transfer, notify)) = way.parked.pop_front() {
            if connection.outbound.encoded() + HEADER + notify.len() > self.config.outbound_bytes {
                way.parked.push_front((transfer, notify));
                return;
            }
            connection.outbound.push(message::frame(notify.len()));
            connection.outbound.push(notify);
            self.posts.end(transfer, Ok(()));
        }
    }

    fn queue_slices(&mut self, id: WayId) {
        let now = clock::now();
        let Some(way) = self.ways.get_mut(&id).filter(|way| matches!(way.stage, Stage::Open)) else { return };
        loop {
            // The lane with the fewest bytes under way.
            let room = |lane: &crate::way::Lane| {
                lane.open && lane.flights.len() < FLIGHTS && lane.bytes < lane.window
            };
            let lanes = way.lanes.iter().enumerate().skip(way.first_for_slices());
            let best = lanes.filter(|(_, lane)| room(lane)).min_by_key(|(_, lane)| lane.bytes);
            let Some((at, lane)) = best else { return };
            let connection = lane.connection.and_then(|connection| self.connections.get_mut(&connection));
            let Some(connection) = connection.filter(|it| it.outbound.len() < QUEUED) else { return };
            let may_write = now + lane.latency.expected(now) < way.permitted;
            let most = (self.config.slice_bytes as u64).min(lane.window);
            let Some((transfer, slice, whole)) = way.next_slice(&mut self.posts, may_write, most) else {
                return;
            };
            let until = match self.posts.get(transfer).map(|transfer| transfer.op) {
                Some(Op::Write) => way.permitted.min(now + self.config.slice_time),
                _ => now + self.config.slice_time,
            };
            if let Some(transfer_ref) = self.posts.get_mut(transfer) {
                let launch = Launch { transfer, slice, whole, now, until };
                way.launch(at, connection, transfer_ref, launch);
            }
        }
    }
}

/// A slice that is about to be sent.
struct Launch {
    transfer: TransferId,
    slice: Slice,
    whole: bool,
    now: Time,
    until: Time,
}

impl Way {
    /// Cuts the next slice.
    fn next_slice(
        &mut self,
        posts: &mut Posts<Transfer>,
        may_write: bool,
        most: u64,
    ) -> Option<(TransferId, Slice, bool)> {
        let id = self.turns.next(posts, may_write)?;
        let (slice, whole) = posts.get_mut(id)?.cut(most)?;
        self.turns.begun(id, posts);
        Some((id, slice, whole))
    }

    /// Queues a slice on a lane.
    fn launch(&mut self, at: usize, connection: &mut Connection, transfer: &mut Transfer, launch: Launch) {
        let Launch { transfer: id, slice, whole, now, until } = launch;
        let (Some(lane), Some(clock)) = (self.lanes.get_mut(at), self.clock) else { return };
        lane.next = lane.next.wrapping_add(1);
        let (number, op) = (lane.next, transfer.op);
        let (here, there): (Vec<_>, Vec<_>) = transfer.ranges(slice).unzip();
        let asked = Asked { number, until: clock.theirs(until, now), ranges: there, bytes: slice.bytes };
        let mut notify = None;
        if op == Op::Write {
            // The frame of a post that is one slice travels with it, and is there as soon as its bytes are.
            let fits = |notify: &bytes::Bytes| whole && !notify.is_empty() && notify.len() <= MAX_NOTIFY;
            notify = transfer.notify.take_if(|notify| fits(notify));
            let frame = notify.clone().unwrap_or_default();
            connection.outbound.push(message::write(&asked, frame.len()));
            connection.outbound.push_pages(here, until);
            connection.outbound.push_write_done();
            connection.outbound.push(frame);
        } else {
            connection.outbound.push(message::read(&asked));
        }
        transfer.under_way += 1;
        // Small ranges cost their part of the message, too.
        lane.bytes += slice.bytes + (RANGE * asked.ranges.len()) as u64;
        let ranges = asked.ranges.len();
        let transfer = Some(id);
        let landed = false;
        lane.flights.push_back(Flight {
            number,
            transfer,
            op,
            slice,
            ranges,
            notify,
            begun: now,
            until,
            landed,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TcpConfig;

    #[test]
    fn ways_for_which_there_is_no_time_keep_their_turns_in_a_circle() {
        let config = TcpConfig::new("127.0.0.1:0".parse().unwrap());
        let mut transport = TcpTransport::new(config).unwrap();
        transport.stirred.extend([5, 6, 7]);
        transport.filled = 6;
        for (left, filled) in [(vec![5, 6], 7), (vec![6], 5), (vec![], 6)] {
            transport.fill_stirred(|| true);
            let stirred: Vec<WayId> = transport.stirred.iter().copied().collect();
            assert_eq!((stirred, transport.filled), (left, filled));
        }
    }
}
