//! What the kernel is asked to tell of a link's socket, and links that are left alone for a while.

use rustix::event::epoll::EventFlags;

use crate::link::{LinkId, Stage};
use crate::transport::LocalTransport;

impl LocalTransport {
    /// Asks the kernel to tell when a link can be read, unless it is left alone, and when more can be
    /// written; the latter not if writing has `failed`.
    pub(super) fn set_interest(&mut self, id: LinkId, failed: bool) {
        let Some(link) = self.links.get_mut(id) else {
            return;
        };
        let mut wanted = EventFlags::empty();
        if link.stage != Stage::Closing && !self.pacing.is_resting(id) {
            wanted |= EventFlags::IN;
        }
        if !failed && (!link.connection.outbound.is_flushed() || !link.parked.is_empty()) {
            wanted |= EventFlags::OUT;
        }
        if link.interest == Some(wanted) || link.stage == Stage::Dialing {
            return;
        }
        match self.watch.watch_socket(id, link.connection.socket(), link.interest, wanted) {
            Ok(()) => link.interest = Some(wanted),
            // The kernel has no room for another watch: a link that is not watched is of no use.
            Err(_) => self.unwatched.push(id),
        }
    }

    /// Counts the time of the turn that has ended: some links are left alone, others listened to again.
    pub(crate) fn keep_pace(&mut self) {
        let changes = self.pacing.keep_pace();
        for id in changes.rest {
            self.backlog.retain(|other| *other != id);
            self.set_interest(id, false);
        }
        for id in changes.listen {
            self.listen_again(id);
        }
    }

    /// Listens to a link again, if it is left alone.
    pub(super) fn end_rest(&mut self, id: LinkId) {
        if self.pacing.end_rest(id) {
            self.listen_again(id);
        }
    }

    fn listen_again(&mut self, id: LinkId) {
        // There may be messages in its buffer, of which the kernel knows nothing.
        self.backlog.push_back(id);
        self.set_interest(id, false);
    }
}
