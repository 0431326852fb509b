//! What becomes of posts when one of their requests has ended.

use kv_core::{PostId, TransportError};

use crate::connections::id::RemoteId;
use crate::transfers::request::{Parts, Request};
use crate::transport::NixlTransport;

impl NixlTransport {
    /// Takes note that a request has ended.
    pub(crate) fn finish(&mut self, parts: &Parts, error: Option<TransportError>) {
        for post in &parts.posts {
            if let Some(transfer) = self.transfers.get_mut(post) {
                transfer.in_flight -= 1;
                if let Some(error) = &error {
                    transfer.stop(error.clone());
                }
            }
            self.settle(*post);
        }
    }

    /// Looks whether a post is over, which has one request less on its way.
    pub(crate) fn settle(&mut self, post: PostId) {
        let Some(transfer) = self.transfers.get(&post) else { return };
        if transfer.in_flight > 0 || transfer.has_more() {
            return;
        }
        match &transfer.stopped {
            // It ends with its connection, when nothing of any post is on its way any more.
            Some(TransportError::PeerGone) => {}
            Some(error) => {
                let error = error.clone();
                self.end(post, Err(error));
            }
            None => self.bytes_in_place(post),
        }
    }

    /// All bytes of a post are in place: the peer is told, once there is room for the notify frame.
    fn bytes_in_place(&mut self, post: PostId) {
        let Some(transfer) = self.transfers.get_mut(&post) else { return };
        let Some(notify) = transfer.notify.take() else {
            self.end(post, Ok(()));
            return;
        };
        let id = transfer.remote;
        if let Some(remote) = self.remotes.get_mut(&id) {
            remote.parked.push(post, notify);
            self.flush(id);
        }
    }

    /// Removes a request of which nothing is on its way any more, and returns its content.
    pub(crate) fn take_over(&mut self, index: usize) -> Parts {
        let Request { parts, failed, .. } = self.requests.swap_remove(index);
        if let Some(remote) = self.remotes.get_mut(&parts.remote) {
            remote.requests -= 1;
            remote.load -= parts.load;
            remote.underway -= parts.weight;
            remote.failed -= usize::from(failed.is_some());
        }
        parts
    }

    /// Gives up the handles of a connection's failed requests: NIXL closes the connection with the last
    /// handle.
    pub(crate) fn give_up_handles(&mut self, id: RemoteId) {
        let failed =
            self.requests.iter_mut().filter(|request| request.parts.remote == id && request.failed.is_some());
        failed.for_each(|request| request.handle = None);
    }

    /// Ends the failed requests of a connection. Nothing of them is on its way any more.
    pub(crate) fn end_failed(&mut self, id: RemoteId) {
        let is_one = |request: &Request| request.parts.remote == id && request.failed.is_some();
        while let Some(index) = self.requests.iter().position(is_one) {
            let parts = self.take_over(index);
            self.finish(&parts, Some(TransportError::PeerGone));
        }
    }
}
