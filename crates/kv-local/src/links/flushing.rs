//! Writing the messages that are queued for a peer.

use crate::link::{LinkId, Stage};
use crate::transport::LocalTransport;

impl LocalTransport {
    /// Writes some of the queued messages, ends parked posts whose notify frames have room now, and asks the
    /// kernel to report when there is room for more.
    pub(crate) fn flush(&mut self, id: LinkId) {
        let Some(link) = self.links.get_mut(id) else {
            return;
        };
        // An error means that the peer has closed; reading will find the end of the stream.
        let mut failed = link.connection.flush().is_err();
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
            failed |= link.connection.flush().is_err();
        }
        self.set_interest(id, failed);
    }

    /// Queues the notify frames of parked posts while there is room. Returns how many were queued.
    fn unpark(&mut self, id: LinkId) -> usize {
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
