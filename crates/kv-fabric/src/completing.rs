//! What libfabric reports: messages, writes of peers, and the ends of this side's operations.

use std::time::{Duration, Instant};

use kv_core::{Op, Origin, Time, TransportEvent};
use kv_host::{TransferId, clock};

use crate::ffi::{Attempt, Completion};
use crate::message::Immediate;
use crate::transport::FabricTransport;
use crate::way::WayId;

/// How long one call of `poll` goes on while there is something to do.
const SHARE: Duration = Duration::from_micros(700);

/// Whose an operation of libfabric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flight {
    /// A message on a way.
    Message(WayId),
    /// A message to a guest.
    Reply,
    /// A write that nobody can answer.
    Probe(WayId),
    /// A slice of a post.
    Slice { way: WayId, transfer: TransferId, op: Op, bytes: u64, begun: Time },
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
        loop {
            let more = self.take_completions();
            self.answer_guests();
            self.fill_stirred(|| begun.elapsed() >= SHARE);
            if !more || begun.elapsed() >= SHARE {
                break;
            }
        }
        self.now = clock::now();
        self.serve_timers();
    }

    /// Takes some completions; false if there were none.
    pub(crate) fn take_completions(&mut self) -> bool {
        let mut done = std::mem::take(&mut self.done);
        let more = self.endpoint.poll(&mut done);
        self.now = clock::now();
        for completion in done.drain(..) {
            match completion {
                Completion::Message { buffer, len } => {
                    self.heard_message(buffer, len);
                    self.give_back(buffer);
                }
                Completion::Arrived(data) => self.write_arrived(data),
                Completion::Done { what, result } => self.ended(what, result),
                Completion::Unreceived { buffer } => self.give_back(buffer),
                Completion::Stray => self.stats.stray += 1,
            }
        }
        self.done = done;
        more
    }

    fn give_back(&mut self, buffer: usize) {
        if self.endpoint.give_back(buffer) != Attempt::Begun {
            self.unreceived.push(buffer);
        }
    }

    fn receive_again(&mut self) {
        for buffer in std::mem::take(&mut self.unreceived) {
            self.give_back(buffer);
        }
    }

    /// A peer's write with data is in place. Data that name no guest, or an earlier way of one, are dropped.
    fn write_arrived(&mut self, data: u64) {
        let (slot, sequence) = Immediate::parts(data);
        let size = self.endpoint.promises().immediate;
        let guest = self.guests.by_slot(slot);
        let Some((id, guest)) = guest.and_then(|id| Some((id, self.guests.get_mut(id)?))) else {
            self.stats.stray += 1;
            return;
        };
        if !Immediate::may_be_of(data, guest.key, size) {
            self.stats.stray += 1;
            return;
        }
        self.stats.counted += 1;
        guest.heard = self.now;
        if let Some(frame) = guest.incoming.arrived(sequence) {
            self.posts.tell(TransportEvent::Frame { from: Origin(id), frame });
        }
    }

    /// An operation of this side has ended.
    fn ended(&mut self, flight: Flight, result: Result<(), i32>) {
        let id = match flight {
            Flight::Reply => return,
            Flight::Probe(id) => return self.probed(id, result),
            Flight::Message(id) | Flight::Slice { way: id, .. } => id,
        };
        let Some(way) = self.ways.get_mut(&id) else { return };
        match flight {
            Flight::Slice { transfer, op, bytes, begun, .. } => {
                match op {
                    Op::Write => way.writing -= 1,
                    Op::Read => way.reading -= 1,
                }
                way.bytes -= bytes;
                if result.is_ok() {
                    way.heard = self.now;
                    way.latency.note(self.now.since(begun), self.now);
                }
                if let Some(transfer) = self.posts.get_mut(transfer) {
                    transfer.under_way -= 1;
                    if result.is_err() {
                        transfer.failed.get_or_insert(kv_core::TransportError::PeerGone);
                    }
                }
                self.settle(transfer);
            }
            Flight::Message(_) | Flight::Reply | Flight::Probe(_) => way.messages -= 1,
        }
        if result.is_err() {
            self.break_way(id, None);
        }
        self.stirred.insert(id);
        if self.ways.get(&id).is_some_and(|way| way.under_way() == 0 && !way.is_usable()) {
            self.look_at(id, self.now);
        }
    }
}
