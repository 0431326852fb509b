//! Writing the messages that are queued for a peer. A write wakes the peer, and costs more than the few bytes of most
//! messages: the messages of one turn travel together.

use std::mem;
use std::time::Duration;

use kv_core::Time;
use kv_host::OsError;
use rustix::io::Errno;

use crate::link::{LinkId, Stage};
use crate::transport::LocalTransport;

/// How soon a write that the kernel had no means for is tried again.
pub(super) const FLUSH_AGAIN: Duration = Duration::from_millis(10);

/// True if a write failed because the kernel has no memory, or no more descriptors may travel, at the moment. Every other
/// error means that the peer has closed.
fn is_for_now(error: &OsError) -> bool {
    let passing = [Errno::NOBUFS, Errno::NOMEM, Errno::TOOMANYREFS];
    passing.iter().any(|errno| error.errno == Some(errno.raw_os_error()))
}

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
        // After an error the socket is not watched for room: the link is starved and will be written to again, or the peer
        // has closed, and reading will find the end of the stream.
        let mut failed = self.write(id).is_err();
        let is_starved = self.starved.contains_key(&id);
        let Some(link) = self.links.get_mut(id) else {
            return;
        };
        let flushed = link.connection.outbound.is_flushed();
        match link.stage {
            Stage::Closing if failed && !is_starved || flushed => {
                self.remove(id);
                return;
            }
            Stage::Welcoming if flushed && !failed => {
                link.stage = Stage::Open;
                link.connection.outbound.open();
            }
            _ => {}
        }
        if self.unpark(id) > 0 {
            failed |= self.write(id).is_err();
        }
        self.set_interest(id, failed);
    }

    /// Writes some of the queued messages. A link that the kernel has no means to write to is starved until a later write
    /// works: meanwhile its socket would be reported as ready all the time.
    fn write(&mut self, id: LinkId) -> Result<(), OsError> {
        let Some(link) = self.links.get_mut(id) else {
            return Ok(());
        };
        let written = link.connection.flush(&mut self.outgoing);
        match &written {
            Err(error) if is_for_now(error) => {
                self.starved.entry(id).or_insert(self.now);
                self.flush_at = self.now + FLUSH_AGAIN;
            }
            _ => {
                self.starved.remove(&id);
            }
        }
        written
    }

    /// When starved links are to be written to again.
    pub(super) fn feed_at(&self) -> Option<Time> {
        (!self.starved.is_empty()).then_some(self.flush_at)
    }

    /// Writes to the starved links again, and returns those that have starved for longer than a handshake may take.
    pub(super) fn feed(&mut self) -> Vec<LinkId> {
        let (now, patience) = (self.now, self.config.handshake_timeout);
        let (over, waiting): (Vec<_>, Vec<_>) = self
            .starved
            .iter()
            .map(|(id, since)| (*id, *since))
            .partition(|(_, since)| *since + patience <= now);
        for (id, _) in waiting {
            self.flush(id);
        }
        over.into_iter().map(|(id, _)| id).collect()
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
