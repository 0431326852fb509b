//! Reading and writing, in bounded shares.

use kv_core::{Origin, PlaneEvent};
use rustix::buffer::spare_capacity;
use rustix::event::epoll;

use super::{Budget, EVENTS, LISTENER, MESSAGE_BUDGET, NOW, READ_BUDGET, READ_SHARE, socket_key};
use crate::connection::{Message, Received};
use crate::link::{Link, LinkId, Stage};
use crate::plane::LocalPlane;

impl LocalPlane {
    pub(crate) fn serve_sockets(&mut self) {
        // Half for those who have waited, half for those who are ready now: nobody waits for ever.
        let mut budget = Budget { bytes: READ_BUDGET / 2, messages: MESSAGE_BUDGET / 2 };
        for _ in 0..self.backlog.len() {
            if budget.messages == 0 {
                break;
            }
            if let Some(id) = self.backlog.pop_front() {
                let share = self.links.get(&id).map_or(0, Link::share);
                self.read(id, &mut budget, share);
            }
        }
        budget.bytes += READ_BUDGET / 2;
        budget.messages += MESSAGE_BUDGET / 2;
        let mut ready: Vec<epoll::Event> = Vec::with_capacity(EVENTS);
        if epoll::wait(&self.epoll, spare_capacity(&mut ready), Some(&NOW)).is_err() || ready.is_empty() {
            return;
        }
        self.turn = self.turn.wrapping_add(1);
        let first = self.turn % ready.len();
        ready.rotate_left(first);
        for event in ready {
            let (data, flags) = (event.data, event.flags);
            match data.u64() {
                LISTENER => self.accept_some(),
                key if key & 1 == 1 => self.process_ended(key >> 1),
                key => self.socket_ready(key >> 1, flags, &mut budget),
            }
        }
    }

    pub(super) fn socket_ready(&mut self, id: LinkId, flags: epoll::EventFlags, budget: &mut Budget) {
        use epoll::EventFlags;
        let Some(link) = self.links.get(&id) else {
            return;
        };
        if link.stage == Stage::Closing && flags.intersects(EventFlags::HUP | EventFlags::ERR) {
            self.remove(id);
            return;
        }
        if flags.contains(EventFlags::OUT) {
            self.flush(id);
        }
        let has_ended = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        if has_ended {
            // What is left in the socket is not much, and the kernel would tell of the end again and again.
            self.end_rest(id);
        }
        let share = self.links.get(&id).filter(|link| link.resting.is_none()).map_or(0, Link::share);
        let to_read = has_ended || flags.contains(EventFlags::IN);
        if to_read && share > 0 && !self.backlog.contains(&id) {
            self.read(id, budget, share);
        }
    }

    /// Takes messages from a link until it has no more, or its share is used up.
    pub(super) fn read(&mut self, id: LinkId, budget: &mut Budget, mut messages: usize) {
        let mut share = READ_SHARE.min(budget.bytes);
        loop {
            let Some(link) = self.links.get_mut(&id).filter(|link| link.stage != Stage::Closing) else {
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
                    share -= count;
                    budget.bytes -= count;
                    self.pacing.note_bytes(id, count);
                }
                Ok(Received::Nothing) => return,
                Ok(Received::End) => return self.on_end(id),
                Err(broken) => return self.on_broken(id, broken),
            }
        }
    }

    pub(super) fn on_message(&mut self, id: LinkId, message: Message) {
        match message {
            Message::Frame(frame) => self.events.push(PlaneEvent::Frame { from: Origin(id), frame }),
            Message::Goodbye => self.gone(id),
            Message::Hello(body) => {
                if self.on_hello(id, body).is_err() {
                    self.stats.refused += 1;
                    self.reject(id);
                }
            }
        }
    }

    /// Writes some of what is queued, lets parked posts end, and tells epoll what to watch for.
    pub(crate) fn flush(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        // An error means that the peer has closed; reading will find the end of the stream.
        let mut failed = link.connection.flush().is_err();
        let flushed = link.connection.is_flushed();
        match link.stage {
            Stage::Closing if failed || flushed => {
                self.remove(id);
                return;
            }
            Stage::Welcoming if flushed && !failed => {
                link.stage = Stage::Open;
                link.connection.open();
            }
            _ => {}
        }
        if self.unpark(id) > 0
            && let Some(link) = self.links.get_mut(&id)
        {
            failed |= link.connection.flush().is_err();
        }
        self.set_interest(id, failed);
    }

    /// Queues notify frames while there is room. Returns how many.
    pub(super) fn unpark(&mut self, id: LinkId) -> usize {
        let mut ended = 0;
        while let Some(link) = self.links.get_mut(&id)
            && let Some((post, notify)) = link.parked.pop(|len| link.connection.has_room(len))
        {
            link.connection.queue_frame(notify);
            ended += 1;
            self.end(post, Ok(()));
        }
        ended
    }

    pub(super) fn set_interest(&mut self, id: LinkId, failed: bool) {
        use epoll::EventFlags;
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let mut wanted = EventFlags::empty();
        if link.stage != Stage::Closing && link.resting.is_none() {
            wanted |= EventFlags::IN;
        }
        if !failed && (!link.connection.is_flushed() || !link.parked.is_empty()) {
            wanted |= EventFlags::OUT;
        }
        if link.interest == Some(wanted) || link.stage == Stage::Dialing {
            return;
        }
        let socket = link.connection.socket();
        let done = match link.interest {
            None => epoll::add(&self.epoll, socket, socket_key(id), wanted),
            Some(_) => epoll::modify(&self.epoll, socket, socket_key(id), wanted),
        };
        if done.is_ok() {
            link.interest = Some(wanted);
        } else {
            // The kernel has no room for another watch: a link that is not watched is of no use.
            self.reject(id);
        }
    }
}
