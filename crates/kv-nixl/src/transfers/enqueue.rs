//! Where a post waits: for its turn, or for the peer's permission.

use kv_core::PostId;

use crate::connections::id::RemoteId;
use crate::transfers::line::Length;
use crate::transport::NixlTransport;

/// A post is short if it takes less than a slice divided by this number: a short post shares a request with
/// others, and does not wait for long posts.
const SHORT: u64 = 5;

impl NixlTransport {
    /// Puts a post that has something to send at the end of its peer's queue.
    pub(crate) fn enqueue(&mut self, id: RemoteId, post: PostId) {
        if let (Some(remote), Some(transfer)) = (self.remotes.get_mut(&id), self.transfers.get(&post)) {
            let most = remote.speed(transfer.op).slice() / SHORT;
            let short = transfer.ready.is_empty() && transfer.is_shorter_than(most);
            let length = if short { Length::Short } else { Length::Long };
            remote.run.of(length).posts.push_back(post);
        }
        self.stand_in_line(id);
    }

    /// Puts a peer into the lines of peers that have something to send.
    pub(crate) fn stand_in_line(&mut self, id: RemoteId) {
        let Some(remote) = self.remotes.get_mut(&id) else { return };
        for length in [Length::Short, Length::Long] {
            let has_turn = remote.has_turn(length);
            let waiting = remote.run.of(length);
            if has_turn && !waiting.in_line && !waiting.posts.is_empty() {
                waiting.in_line = true;
                self.line.of(length).push_back(id);
            }
        }
    }

    pub(crate) fn hold(&mut self, id: RemoteId, post: PostId) {
        if let Some(remote) = self.remotes.get_mut(&id) {
            remote.held.push_back(post);
        }
    }
}
