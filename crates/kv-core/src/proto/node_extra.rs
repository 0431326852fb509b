use crate::error::{Cause, Obstacle};
use crate::groups::Groups;
use crate::id::{PeerId, PostId, SessionId};
use crate::plane::{Op, PlaneError};
use crate::proto::groups::check_own_groups;
use crate::proto::node::Node;
use crate::proto::posts::{InFlight, Leave};
use crate::proto::timer::Timer;

impl Node {
    pub(super) fn take_groups(&mut self, session: SessionId, groups: Groups) {
        let bad = check_own_groups(&groups, self.cx.config.args.geometry());
        // Those that come too late were promised to nobody.
        let (late, taken) = if let Some(sender) = self.sending.sessions.get_mut(&session) {
            if sender.poll.is_terminal() {
                return self.cx.release_groups(session, groups, Vec::new());
            }
            (sender.complete, &mut sender.groups)
        } else if let Some(receiver) = self.receiving.sessions.get_mut(&session) {
            if receiver.poll.is_terminal() {
                return self.cx.release_groups(session, groups, Vec::new());
            }
            (receiver.given.is_some(), &mut receiver.groups)
        } else {
            return self.cx.release_groups(session, groups, Vec::new());
        };
        if late || taken.is_some() {
            self.end_session(session, Cause::InitOrder);
            return self.cx.release_groups(session, groups, Vec::new());
        }
        *taken = Some(groups);
        if let Some(cause) = bad {
            self.end_session(session, cause);
        }
    }

    /// The permission, and what it could lead to, are over.
    pub(super) fn on_fence_due(&mut self, id: PeerId) {
        // A peer that speaks again says itself when it has stopped.
        if self.cx.peers.get(id).is_some_and(|peer| peer.lost || peer.given_up) {
            self.fenced(id);
        }
    }

    pub(super) fn on_revoked(&mut self, id: PeerId) {
        if self.cx.peers.get(id).is_some_and(|peer| peer.writes_in.revoking) {
            self.fenced(id);
        }
    }

    /// No write of the peer's arrives any more: ends the conversation, and gives the pages back.
    fn fenced(&mut self, id: PeerId) {
        let cause = self.cx.loss(id, self.cx.silence(id));
        self.fail_peer_sessions(id, cause, Some(self.cx.fx.now()));
        self.cx.forget_peer(id);
    }

    /// Starts posts while there is room for them, each target in its turn.
    pub(super) fn pump_posts(&mut self) {
        let now = self.cx.fx.now();
        loop {
            let leave = |peer| match self.cx.peers.get(peer) {
                Some(peer) => Leave { writes: peer.writes_out.is_permitted(now), origin: peer.origin },
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

    /// What a session's data operations wait for.
    pub(super) fn posting_obstacle(&self, session: SessionId) -> Option<Obstacle> {
        let targets = self.sending.sessions.get(&session).into_iter().flat_map(|sender| &sender.targets);
        let writes = targets.filter(|target| !target.reads && !target.over);
        let writes = writes.map(|target| (target.peer, Op::Write, target.queued, target.outstanding));
        let sources =
            self.receiving.sessions.get(&session).into_iter().flat_map(|receiver| &receiver.sources);
        let reads = sources.filter_map(|source| {
            let (queued, outstanding) = source.reading.as_ref()?.posting();
            Some((source.peer, Op::Read, queued, outstanding))
        });
        writes.chain(reads).find_map(|(id, op, queued, outstanding)| {
            let peer = self.cx.peers.get(id)?;
            let stuck = |posts| Obstacle::Stuck { peer: peer.worker.clone(), posts };
            if !queued {
                return (outstanding > 0).then(|| stuck(outstanding as usize));
            }
            if let Some(posts) = self.cx.posts.full(id) {
                return Some(stuck(posts));
            }
            if op == Op::Write && !peer.writes_out.is_permitted(self.cx.fx.now()) {
                return Some(Obstacle::NotPermitted { peer: peer.worker.clone() });
            }
            // What was announced a moment ago has not had its turn; posts from before may still be stuck.
            let Some((busiest, posts)) = self.cx.posts.busiest() else {
                return (outstanding > 0).then(|| stuck(outstanding as usize));
            };
            let peer = self.cx.peers.get(busiest)?.worker.clone();
            Some(Obstacle::Behind { peer, posts })
        })
    }

    pub(super) fn on_posted(&mut self, post: PostId, result: Result<(), PlaneError>) {
        let Some(InFlight { session, target: index, part, peer, .. }) =
            self.cx.posts.end(post, self.cx.fx.now())
        else {
            return;
        };
        self.cx.peers.post_ended(peer);
        if self.receiving.sessions.contains_key(&session) {
            return self.receiving.on_read(&mut self.cx, session, index, result);
        }
        let Some(sender) = self.sending.sessions.get_mut(&session) else { return };
        let Some(target) = sender.targets.get_mut(index) else { return };
        target.outstanding -= 1;
        match result {
            Ok(()) => target.done.insert(u64::from(part), 1),
            Err(error) => self.sending.fail_sender(&mut self.cx, session, Cause::Post(error)),
        }
        self.sending.target_advanced(&mut self.cx, session, index);
    }
}
