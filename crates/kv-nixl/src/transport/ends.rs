//! How a post ends, and how a connection breaks.

use std::time::Instant;

use kv_core::{PostId, TransportError, TransportEvent};

use crate::connections::id::RemoteId;
use crate::connections::remote::Stage;
use crate::transport::NixlTransport;

impl NixlTransport {
    /// Ends a post, and reports the end as an event.
    pub(crate) fn end(&mut self, post: PostId, result: Result<(), TransportError>) {
        if self.transfers.remove(&post).is_some() {
            self.stats.posts_completed += u64::from(result.is_ok());
            self.events.push(TransportEvent::Posted { post, result });
        }
    }

    /// Starts nothing more on a connection: the connection has failed, or the peer has died.
    pub(crate) fn break_off(&mut self, id: RemoteId) {
        let Some(remote) = self.remotes.get_mut(&id) else { return };
        match remote.stage {
            Stage::Broken(_) => return,
            Stage::Open => self.ending.push(id),
            Stage::Left => {}
        }
        remote.stage = Stage::Broken(Instant::now());
        remote.run.clear();
        remote.held.clear();
        remote.parked.clear();
        for transfer in self.transfers.values_mut().filter(|transfer| transfer.remote == id) {
            transfer.stop(TransportError::PeerGone);
        }
    }
}
