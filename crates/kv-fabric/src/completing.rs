//! What libfabric reports: messages, writes of peers, and the ends of this side's operations.

use std::time::{Duration, Instant};

use kv_core::{Op, Origin, Time, TransportEvent};
use kv_host::{TransferId, clock};

use crate::ffi::{Attempt, Completion};
use crate::guest::GuestId;
use crate::message::Immediate;
use crate::transport::FabricTransport;
use crate::way::WayId;

/// How long one call of `poll` goes on while there is something to do.
const SHARE: Duration = Duration::from_micros(700);

/// How long a connection may be in use without the keepalive.
const NEW: Duration = Duration::from_secs(1);

/// Whose an operation of libfabric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flight {
    /// A message on a way.
    Message(WayId),
    /// A message to a guest.
    Reply(GuestId),
    /// The last message of a transport that is dropped.
    Farewell,
    /// A question whether a lane leads to the peer.
    Ask(WayId, usize),
    /// A write that nobody can answer, on one of the way's links.
    Probe(WayId, usize),
    /// A slice of a post, on one of the way's lanes.
    Slice { way: WayId, lane: usize, transfer: TransferId, op: Op, bytes: u64, begun: Time },
}

impl FabricTransport {
    /// Makes progress, for a bounded time.
    pub(crate) fn serve(&mut self, begun: Instant) {
        for id in self.watch.ended() {
            self.process_ended(id);
        }
        self.receive_again();
        let blocked = std::mem::take(&mut self.blocked);
        self.stirred.extend(blocked);
        let mut came = false;
        loop {
            let more = self.take_completions();
            came |= more;
            self.answer_guests();
            self.fill_stirred(|| begun.elapsed() >= SHARE);
            if !more || begun.elapsed() >= SHARE {
                break;
            }
        }
        self.now = clock::now();
        for looks in [&mut self.silence, &mut self.greeting, &mut self.leaving] {
            looks.look(self.now);
        }
        self.serve_timers();
        self.keep_alive(came);
    }

    /// Gives the keepalive to connections by which something has come or gone, a moment later: until one end of a
    /// connection has ended, libfabric refuses the other end another connection.
    fn keep_alive(&mut self, came: bool) {
        if came {
            self.keep_alive_at.get_or_insert(self.now + NEW);
        }
        if self.keep_alive_at.is_some_and(|at| at <= self.now) {
            self.keep_alive_at = None;
            let silence = self.config.silence;
            self.devices.all_mut().for_each(|device| device.endpoint.keep_alive(silence));
        }
    }

    /// Takes some completions of each device; false if there were none.
    pub(crate) fn take_completions(&mut self) -> bool {
        // Backwards: the first device has the frames that wait for writes of the others.
        let mut more = false;
        for device in (0..self.devices.len()).rev() {
            more |= self.take_completions_of(device);
        }
        more
    }

    fn take_completions_of(&mut self, device: usize) -> bool {
        let mut done = std::mem::take(&mut self.done);
        let more = self.devices.get(device).is_some_and(|device| device.endpoint.poll(&mut done));
        self.now = clock::now();
        for completion in done.drain(..) {
            match completion {
                Completion::Message { buffer, len } => {
                    self.heard_message(device, buffer, len);
                    self.give_back(device, buffer);
                }
                Completion::Arrived(data) => self.write_arrived(device, data),
                Completion::Done { what, result } => self.ended(what, result),
                Completion::Unreceived { buffer } => self.give_back(device, buffer),
                Completion::Stray => self.stats.stray += 1,
            }
        }
        self.done = done;
        more
    }

    fn give_back(&mut self, device: usize, buffer: usize) {
        if let Some(device) = self.devices.get(device)
            && device.endpoint.give_back(buffer) != Attempt::Begun
        {
            device.unreceived.push(buffer);
        }
    }

    fn receive_again(&mut self) {
        for device in self.devices.all_mut() {
            let waiting = std::mem::take(&mut device.unreceived);
            device.unreceived = waiting
                .into_iter()
                .filter(|buffer| device.endpoint.give_back(*buffer) != Attempt::Begun)
                .collect();
        }
    }

    /// A peer's write with data is in place. Data that name no guest, or an earlier way of one, are dropped.
    pub(crate) fn write_arrived(&mut self, device: usize, data: u64) {
        let (slot, sequence) = Immediate::parts(data);
        let guest = self.guests.by_slot(slot);
        let Some((id, guest)) = guest.and_then(|id| Some((id, self.guests.get_mut(id)?))) else {
            self.stats.stray += 1;
            return;
        };
        if !Immediate::is_of(data, guest.key) {
            self.stats.stray += 1;
            return;
        }
        self.stats.counted += 1;
        if let Some(device) = self.devices.get(device) {
            device.counted += 1;
        }
        guest.heard = self.now;
        if let Some(frame) = guest.incoming.arrived(sequence) {
            self.posts.tell(TransportEvent::Frame { from: Origin(id), frame });
        }
        self.answer_withheld(id);
    }

    /// An operation of this side has ended.
    fn ended(&mut self, flight: Flight, result: Result<(), i32>) {
        let (id, broken) = match flight {
            Flight::Reply(guest) => {
                if let Some(guest) = self.guests.get_mut(guest) {
                    guest.replies -= 1;
                }
                return;
            }
            Flight::Farewell => return,
            Flight::Probe(id, link) => return self.probed(id, link, result),
            Flight::Message(id) => {
                let Some(way) = self.ways.get_mut(&id) else { return };
                way.messages -= 1;
                (id, result.is_err())
            }
            Flight::Ask(id, lane) => {
                let Some(way) = self.ways.get_mut(&id) else { return };
                way.asks -= 1;
                if let Some(lane) = way.lanes.get_mut(lane) {
                    lane.has_asked();
                }
                // A lane that leads nowhere is not used. The peer may be reached by others.
                (id, false)
            }
            Flight::Slice { way: id, lane, transfer, op, bytes, begun } => {
                let Some(way) = self.ways.get_mut(&id) else { return };
                let Some(lane) = way.lanes.get_mut(lane) else { return };
                lane.end(op, bytes);
                if result.is_ok() {
                    way.heard = self.now;
                    lane.is_heard(self.now);
                    lane.latency.note(self.now.since(begun), self.now);
                    if let Some(device) = self.devices.get(lane.device) {
                        device.slices += 1;
                        device.bytes += bytes;
                    }
                }
                if let Some(transfer) = self.posts.get_mut(transfer) {
                    transfer.under_way -= 1;
                    if result.is_err() {
                        transfer.failed.get_or_insert(kv_core::TransportError::PeerGone);
                    }
                }
                self.settle(transfer);
                (id, result.is_err())
            }
        };
        if broken {
            self.break_way(id, None);
        }
        self.stirred.insert(id);
        if self.ways.get(&id).is_some_and(|way| way.under_way() == 0 && !way.is_usable()) {
            self.look_at(id, self.now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pair::{both_until, config, connected_with};

    /// It was idle for longer than a second, and the first question was answered long ago.
    #[test]
    fn a_second_device_that_was_idle_is_asked_again_each_time() {
        let (id, [(mut here, _ours), (mut there, _theirs)]) = connected_with([config(2), config(2)]);
        for _ in 0..3 {
            here.ways.get_mut(&id).unwrap().lanes[1].close();
            here.ask_lanes(id);
            both_until([&mut here, &mut there], "an answer", |here, _, _| {
                here.ways.get(&id).unwrap().lanes[1].is_fresh(here.now)
            });
        }
    }

    #[test]
    fn connections_of_all_devices_get_the_keepalive_and_its_timer_rings_no_more() {
        let (_, [(mut here, _ours), (mut there, _theirs)]) = connected_with([config(2), config(2)]);
        for transport in [&mut here, &mut there] {
            transport.keep_alive_at = Some(Time::ZERO);
            transport.keep_alive(false);
            let kept: Vec<usize> =
                transport.devices.all().map(|device| device.endpoint.kept_alive()).collect();
            assert!(kept.iter().all(|connections| *connections > 0), "{kept:?}");
            assert_eq!(transport.keep_alive_at, None);
        }
    }
}
