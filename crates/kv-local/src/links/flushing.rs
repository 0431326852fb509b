//! Writing the messages that are queued for a peer. A write wakes the peer, and costs more than the few bytes of most
//! messages: the messages of one turn travel together.

use std::mem;

use crate::link::{LinkId, Stage};
use crate::transport::LocalTransport;

impl LocalTransport {
    /// Notes that a message was queued for a link, to be written with those that follow: in the next call of `poll`, or
    /// once they are many.
    pub(crate) fn flush_soon(&mut self, id: LinkId) {
        self.unflushed.insert(id);
        if self.links.get(id).is_some_and(|link| link.connection.outbound.is_long()) {
            self.flush_noted(id);
        }
    }

    /// Writes the messages of a link, if some were noted.
    pub(crate) fn flush_noted(&mut self, id: LinkId) {
        if self.unflushed.remove(&id) {
            self.flush(id);
        }
    }

    /// Writes the messages of all links for which some were noted.
    pub(crate) fn flush_all(&mut self) {
        for id in mem::take(&mut self.unflushed) {
            self.flush(id);
        }
    }

    /// Writes some of the queued messages, ends parked posts whose notify frames have room now, and asks the
    /// kernel to report when there is room for more.
    pub(crate) fn flush(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id) else {
            return;
        };
        // An error means that the peer has closed; reading will find the end of the stream.
        let mut failed = link.connection.flush(&mut self.outgoing).is_err();
        let flushed = link.connection.outbound.is_flushed();
        match link.stage {
            Stage::Closing if failed || flushed => {
                self.remove(id);
                return;
            }
            Stage::Welcoming if flushed && !failed => {
                link.stage = Stage::Open;
                link.connection.outbound.open();
            }
            _ => {}
        }
        if self.unpark(id) > 0
            && let Some(link) = self.links.get_mut(id)
        {
            failed |= link.connection.flush(&mut self.outgoing).is_err();
        }
        self.set_interest(id, failed);
    }

    /// Queues the notify frames of parked posts while there is room. Returns how many were queued.
    pub(crate) fn unpark(&mut self, id: LinkId) -> usize {
        let mut ended = 0;
        while let Some(link) = self.links.get_mut(id)
            && let Some((post, notify)) = link.parked.pop(|len| link.connection.outbound.has_room(len))
        {
            link.connection.outbound.queue_frame(notify);
            ended += 1;
            self.posts.end(post, Ok(()));
        }
        ended
    }
}
