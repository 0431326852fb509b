//! Removing links, and what is kept of them.

use kv_core::PeerId;

use crate::link::LinkId;
use crate::transport::LocalTransport;

impl LocalTransport {
    /// Removes a link and closes its socket. Returns the peer that the link served.
    pub(super) fn remove(&mut self, id: LinkId) -> Option<PeerId> {
        self.keep_lost(id, None);
        let link = self.links.remove(id)?;
        if link.interest.is_some() {
            self.watch.forget_socket(link.connection.socket());
        }
        if let Some((memory, _)) = link.memory {
            self.retired.extend(memory.retire());
        }
        self.backlog.retain(|other| *other != id);
        self.starved.remove(&id);
        self.pacing.close(id);
        link.peer
    }

    /// Keeps the rest of a link that ends without proof that its peer copies nothing more. `peer` is the peer
    /// whose death the owner must be told.
    pub(super) fn keep_lost(&mut self, id: LinkId, peer: Option<PeerId>) {
        let Some(link) = self.links.get_mut(id) else {
            return;
        };
        if let Some(process) = self.revoking.keep(id, link, peer) {
            self.watch.forget_process(&process);
        }
    }
}
