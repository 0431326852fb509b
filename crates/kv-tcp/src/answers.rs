//! What peers say about the slices of this side's posts, and the pages that they send.

use kv_core::{Op, TransportError};
use kv_host::{TransferId, clock};

use crate::connection::Connection;
use crate::inbound::{Landing, Received};
use crate::message::{RANGE, Reply, Verdict};
use crate::sockets::Over;
use crate::transport::TcpTransport;
use crate::way::{Flight, Stage, WayId};

/// The smallest window of a lane, in bytes.
const LEAST_WINDOW: u64 = 64 << 10;
/// A lane may have more bytes under way while slices take less than one part in so many of their time.
const QUICK: u32 = 8;

impl TcpTransport {
    /// Reads a share of what a peer has answered.
    pub(crate) fn read_lane(
        &mut self,
        connection: &mut Connection,
        way: WayId,
        lane: usize,
    ) -> Result<(), Over> {
        let mut left = connection.share();
        let mut more = true;
        loop {
            self.take_replies(connection, way, lane)?;
            if !more || left == 0 {
                return Ok(());
            }
            self.quiet(connection);
            match self.receive(connection, left)? {
                Received::Bytes(count) => left = left.saturating_sub(count),
                Received::Last(_) => more = false,
                Received::Nothing => return Ok(()),
                Received::End => return Err(Over::Closed),
            }
        }
    }

    fn take_replies(&mut self, connection: &mut Connection, way: WayId, lane: usize) -> Result<(), Over> {
        loop {
            if connection.inbound.landing.is_some() {
                self.quiet(connection);
                if !connection.inbound.settle(self.given.regions())? {
                    return Ok(());
                }
                connection.inbound.landing = None;
                connection.reading = None;
                self.front(way, lane)?.landed = true;
                continue;
            }
            match Reply::next(&mut connection.inbound.bytes)? {
                None => return Ok(()),
                Some(Reply::Bytes { number, bytes }) => {
                    self.begin_landing(connection, (way, lane), number, bytes)?
                }
                Some(Reply::Answer { number, verdict, clock: theirs }) => {
                    let now = clock::now();
                    if let Some(clock) = self.ways.get_mut(&way).and_then(|way| way.clock.as_mut()) {
                        clock.heard(theirs, now);
                    }
                    self.on_answer(way, lane, number, verdict)?;
                }
            }
        }
    }

    /// The slice that is answered next on a lane.
    fn front(&mut self, way: WayId, lane: usize) -> Result<&mut Flight, Over> {
        let lane = self.ways.get_mut(&way).and_then(|way| way.lanes.get_mut(lane)).ok_or(Over::Failed)?;
        lane.flights.front_mut().ok_or(Over::Broken)
    }

    /// Throws away what comes for a post that was given up.
    fn quiet(&self, connection: &mut Connection) {
        let given_up = |id: TransferId| self.posts.get(id).is_none_or(|transfer| transfer.failed.is_some());
        if let Some(landing) = &mut connection.inbound.landing
            && connection.reading.is_none_or(given_up)
        {
            landing.discard();
        }
    }

    fn begin_landing(
        &mut self,
        connection: &mut Connection,
        (way, lane): (WayId, usize),
        number: u32,
        bytes: u64,
    ) -> Result<(), Over> {
        let flight = self.front(way, lane)?;
        let expected = flight.number == number && flight.op == Op::Read && !flight.landed;
        if !expected || flight.slice.bytes != bytes {
            return Err(Over::Broken);
        }
        let (id, slice) = (flight.transfer, flight.slice);
        let transfer = id.and_then(|id| self.posts.get(id));
        let ranges = transfer.map(|transfer| transfer.ranges(slice).map(|(here, _)| here).collect());
        connection.inbound.landing = Some(Landing::new(ranges.unwrap_or_default(), bytes));
        connection.reading = id;
        Ok(())
    }

    fn on_answer(&mut self, id: WayId, lane: usize, number: u32, verdict: Verdict) -> Result<(), Over> {
        let front = self.front(id, lane)?;
        if front.number != number || (front.op == Op::Read && verdict == Verdict::Done && !front.landed) {
            return Err(Over::Broken);
        }
        let slice_time = self.config.slice_time;
        let way = self.ways.get_mut(&id).ok_or(Over::Failed)?;
        let lane = way.lanes.get_mut(lane).ok_or(Over::Failed)?;
        let Some(flight) = lane.flights.pop_front() else { return Err(Over::Broken) };
        lane.bytes -= flight.slice.bytes + (RANGE * flight.ranges) as u64;
        match verdict {
            Verdict::Done => {
                let now = clock::now();
                let took = now.since(flight.begun);
                lane.latency.note(took, now);
                if took < slice_time / QUICK {
                    lane.window = (lane.window + flight.slice.bytes).min(self.config.window_bytes as u64);
                }
            }
            Verdict::Late => {
                self.stats.late += 1;
                lane.window = (lane.window / 2).max(LEAST_WINDOW.min(self.config.window_bytes as u64));
            }
            Verdict::Revoked => way.revoked = true,
        }
        self.stirred.insert(id);
        if matches!(way.stage, Stage::Leaving { .. }) {
            self.look_at(id, self.now);
        }
        if let Some(transfer) = flight.transfer {
            self.answered(transfer, flight, verdict);
        }
        if verdict == Verdict::Revoked {
            self.writes_revoked(id);
        }
        Ok(())
    }

    fn answered(&mut self, id: TransferId, flight: Flight, verdict: Verdict) {
        let Some(transfer) = self.posts.get_mut(id) else { return };
        transfer.under_way -= 1;
        match verdict {
            Verdict::Done => {}
            Verdict::Revoked => {
                transfer.failed = Some(transfer.failed.take().unwrap_or(TransportError::Revoked))
            }
            Verdict::Late => {
                transfer.notify = flight.notify.or(transfer.notify.take());
                transfer.again(flight.slice);
                let (way, op) = (transfer.way, transfer.op);
                if let Some(way) = self.ways.get_mut(&way) {
                    let line = if op == Op::Write { &mut way.writes } else { &mut way.reads };
                    line.push_front(id);
                }
            }
        }
        self.settle(id);
    }

    /// Ends a post if nothing of it is under way and nothing more is to come.
    pub(crate) fn settle(&mut self, id: TransferId) {
        let Some(transfer) = self.posts.get_mut(id).filter(|transfer| transfer.is_over()) else { return };
        match (transfer.failed.take(), transfer.notify.take()) {
            (Some(error), _) => self.posts.end(id, Err(error)),
            (None, None) => self.posts.end(id, Ok(())),
            (None, Some(notify)) => {
                if let Some(way) = self.ways.get_mut(&transfer.way) {
                    way.parked.push_back((id, notify));
                }
            }
        }
    }

    /// The peer has revoked the right to write: no write of this side can succeed any more.
    fn writes_revoked(&mut self, id: WayId) {
        for transfer in self.posts.of_way(id) {
            if self
                .posts
                .get(transfer)
                .is_some_and(|transfer| transfer.op == Op::Write && transfer.has_more())
            {
                self.give_up(transfer, TransportError::Revoked);
            }
        }
    }
}
