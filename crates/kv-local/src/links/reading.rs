//! Reading the messages of peers, in bounded shares.

use std::mem;
use std::time::Duration;

use kv_core::{Origin, Time, TransportEvent};
use rustix::event::epoll::EventFlags;

use crate::framing::Message;
use crate::inbound::Received;
use crate::link::{LinkId, Stage};
use crate::transport::LocalTransport;
use crate::watch::Woken;

/// Most bytes read in one call of `poll`, from all links together.
const READ_BUDGET: usize = 1 << 20;
/// Most bytes read from one link in one call of `poll`.
const READ_SHARE: usize = 256 << 10;
/// Most messages taken in one call of `poll`, from all links together.
pub(super) const MESSAGE_BUDGET: usize = 2048;
/// Most messages taken from one link in one call of `poll`.
pub(super) const MESSAGE_SHARE: usize = 256;
/// So many messages in one call of `poll` are a crowd, which is followed by others.
const CROWD: usize = 16;
/// For so long after a crowd, unless this side posts or has several connections, messages are looked for at pauses and do
/// not wake the owner. Each write of a peer that copies would wake it, which costs both sides; and a kernel that wakes it
/// on the processor of that peer takes the processor from the copies, even while another one is idle.
const CROWD_LASTS: Duration = Duration::from_millis(2);
/// How long messages are not looked for.
const CROWD_PAUSE: Duration = Duration::from_micros(250);

/// How much one call of `poll` may still read.
struct Budget {
    bytes: usize,
    messages: usize,
}

impl LocalTransport {
    pub(crate) fn serve_sockets(&mut self) {
        // Half for links that have waited, half for links that are ready now: no link waits for ever.
        let mut budget = Budget { bytes: READ_BUDGET / 2, messages: MESSAGE_BUDGET / 2 };
        for _ in 0..self.backlog.len() {
            if budget.messages == 0 {
                break;
            }
            if let Some(id) = self.backlog.pop_front() {
                let share = self.pacing.share(id, MESSAGE_SHARE);
                self.read(id, &mut budget, share);
            }
        }
        budget.bytes += READ_BUDGET / 2;
        budget.messages += MESSAGE_BUDGET / 2;
        for woken in self.watch.woken() {
            match woken {
                Woken::Listener => self.accept_some(),
                Woken::Process(id) => self.process_ended(id),
                Woken::Socket(id, flags) => self.socket_ready(id, flags, &mut budget),
            }
        }
        if MESSAGE_BUDGET - budget.messages >= CROWD && !self.pacing.is_shared() {
            self.crowded_until = self.now + CROWD_LASTS;
        }
    }

    /// Until when messages are not looked for; `None` if they wake the owner.
    pub(crate) fn pause(&self) -> Option<Time> {
        (self.now < self.crowded_until).then_some(self.now + CROWD_PAUSE)
    }

    fn socket_ready(&mut self, id: LinkId, flags: EventFlags, budget: &mut Budget) {
        let Some(link) = self.links.get(id) else {
            return;
        };
        let has_ended = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        if link.stage == Stage::Closing && has_ended {
            self.remove(id);
            return;
        }
        if flags.contains(EventFlags::OUT) {
            self.flush(id);
        }
        if has_ended {
            // Little is left in the socket, and the kernel would report its end again and again.
            self.end_rest(id);
        }
        let to_read = has_ended || flags.contains(EventFlags::IN);
        if to_read && !self.pacing.is_resting(id) && !self.backlog.contains(&id) {
            let share = self.pacing.share(id, MESSAGE_SHARE);
            self.read(id, budget, share);
        }
    }

    fn process_ended(&mut self, id: LinkId) {
        if let Some(lost) = self.revoking.process_ended(id, &mut self.links) {
            if let Some(process) = lost.process {
                self.watch.forget_process(&process);
            }
            if let Some(peer) = lost.peer {
                self.tell_dead(peer);
            }
            return;
        }
        // Frames that the process sent before it ended may still be of use; a socket holds less than this.
        let mut budget = Budget { bytes: READ_BUDGET, messages: MESSAGE_BUDGET };
        self.read(id, &mut budget, MESSAGE_BUDGET);
        self.gone(id);
    }

    /// Takes messages from a link until no more have arrived, or the link's share is used up.
    fn read(&mut self, id: LinkId, budget: &mut Budget, mut messages: usize) {
        let mut share = READ_SHARE.min(budget.bytes);
        loop {
            let Some(link) = self.links.get_mut(id).filter(|link| link.stage != Stage::Closing) else {
                return;
            };
            if messages == 0 || budget.messages == 0 {
                self.backlog.push_back(id);
                return;
            }
            match link.connection.next_message() {
                Ok(Some(message)) => {
                    budget.messages -= 1;
                    messages -= 1;
                    self.pacing.note_message(id, &message);
                    self.on_message(id, message);
                    continue;
                }
                Ok(None) => {}
                Err(broken) => return self.on_broken(id, broken),
            }
            if share == 0 {
                return;
            }
            let room = self.scratch.len().min(share);
            match link.connection.receive(self.scratch.get_mut(..room).unwrap_or_default()) {
                Ok(Received::Bytes(count)) => {
                    link.heard = self.now;
                    // Fewer bytes than there was room for are the last ones for now.
                    let is_last = count < room && link.stage == Stage::Open;
                    share = if is_last { 0 } else { share - count };
                    budget.bytes -= count;
                    self.pacing.note_bytes(id, count);
                }
                Ok(Received::Nothing) => return,
                Ok(Received::End) => return self.on_end(id),
                Err(broken) => return self.on_broken(id, broken),
            }
        }
    }

    fn on_message(&mut self, id: LinkId, message: Message) {
        match message {
            Message::Frame(frame) => {
                self.announced.came(&id);
                if let Some(link) = self.links.get_mut(id) {
                    (link.may_wake, link.may_be_woken) = (true, true);
                }
                self.posts.tell(TransportEvent::Frame { from: Origin(id), frame });
            }
            Message::Goodbye => self.gone(id),
            Message::Wake => {
                if self.links.get_mut(id).is_some_and(|link| mem::take(&mut link.may_be_woken)) {
                    self.announced.announce(id);
                }
            }
            Message::Hello(body) => {
                if self.on_hello(id, body).is_err() {
                    self.stats.refused += 1;
                    self.reject(id);
                }
            }
        }
    }
}
