//! Which events of a link's socket the kernel is asked to report, and links that rest for a while.

use rustix::event::epoll::EventFlags;

use crate::link::{LinkId, Stage};
use crate::transport::LocalTransport;

impl LocalTransport {
    /// Asks the kernel to report when a link can be read, unless the link rests, and when more can be
    /// written, unless writing has `failed`.
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
            // The kernel has no room for another watch, and a link that is not watched cannot be used.
            Err(_) => self.unwatched.push(id),
        }
    }

    /// Counts the time of the turn that has ended: some links begin to rest, and others are read again.
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

    /// Ends the rest of a link, if it rests.
    pub(super) fn end_rest(&mut self, id: LinkId) {
        if self.pacing.end_rest(id) {
            self.listen_again(id);
        }
    }

    fn listen_again(&mut self, id: LinkId) {
        // There may be messages in the link's buffer, which the kernel does not report.
        self.backlog.push_back(id);
        self.set_interest(id, false);
    }
}
