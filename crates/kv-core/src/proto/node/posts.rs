//! Posts between the parts that plan them and the transport.

use super::Node;
use crate::error::Obstacle;
use crate::id::{PostId, SessionId};
use crate::proto::posts::{Leave, PostingState};
use crate::proto::timer::Timer;
use crate::transport::{Op, TransportError};

impl Node {
    /// Starts posts while there is room for them, each target in its turn.
    pub(super) fn pump_posts(&mut self) {
        let now = self.cx.fx.now();
        loop {
            let leave = |peer| match self.cx.peers.get(peer) {
                Some(peer) => Leave { writes: peer.writes_out().is_permitted(now), origin: peer.origin() },
                None => Leave::default(),
            };
            match self.cx.posts.next_ready(now, leave) {
                Some((Op::Read, session, index)) => self.receiving.post_read(&mut self.cx, session, index),
                Some((Op::Write, session, index)) => self.sending.post_next(&mut self.cx, session, index),
                None => break,
            }
        }
        if let Some(at) = self.cx.posts.next_stuck(now) {
            self.cx.fx.arm(Timer::Stuck, at);
        }
    }

    /// A post has ended: tells the part that planned the post.
    pub(super) fn on_posted(&mut self, id: PostId, result: Result<(), TransportError>) {
        let Some(post) = self.cx.posts.end(id, self.cx.fx.now()) else { return };
        self.cx.peers.post_ended(post.peer);
        self.cx.fx.post_ended(id, &post, &result);
        match post.op {
            Op::Read => self.receiving.on_read(&mut self.cx, &post, result),
            Op::Write => self.sending.on_written(&mut self.cx, &post, result),
        }
    }

    /// What a session's data operations wait for.
    pub(super) fn posting_obstacle(&self, session: SessionId) -> Option<Obstacle> {
        let posting = self.sending.posting(session).chain(self.receiving.posting(session));
        posting.into_iter().find_map(|posting| self.obstacle(&posting))
    }

    fn obstacle(
        &self,
        &PostingState { peer: id, op, queued, outstanding }: &PostingState,
    ) -> Option<Obstacle> {
        let peer = self.cx.peers.get(id)?;
        let stuck = |posts| Obstacle::Stuck { peer: peer.worker().clone(), posts };
        let own = || (outstanding > 0).then(|| stuck(outstanding as usize));
        if !queued {
            return own();
        }
        if let Some(posts) = self.cx.posts.full(id) {
            return Some(stuck(posts));
        }
        if op == Op::Write && !peer.writes_out().is_permitted(self.cx.fx.now()) {
            return Some(Obstacle::NotPermitted { peer: peer.worker().clone() });
        }
        // An announcement of a moment ago has not had its turn yet; older posts may still be stuck.
        let Some((busiest, posts)) = self.cx.posts.busiest() else { return own() };
        let peer = self.cx.peers.get(busiest)?.worker().clone();
        Some(Obstacle::Behind { peer, posts })
    }
}
