//! The writes of a push session, on the prefill worker. Announcements are planned lazily into
//! *parts*. Each part is one post, and sessions post in turns. The frame of a post tells the
//! receiver that the part is in place; the last part tells how many parts there are.

use crate::error::Cause;
use crate::id::{PeerId, SessionId};
use crate::proto::context::Context;
use crate::proto::ending::Ending;
use crate::proto::posts::{InFlight, PostingState};
use crate::proto::sending::Sending;
use crate::proto::sending::target::{Part, Target};
use crate::time::Time;
use crate::transport::{Op, TransportError};
use crate::wire::{Body, Progress};

impl Sending {
    pub(in crate::proto) fn post_next(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let (max_sge, max_bytes) = (cx.config.args.max_sge(), cx.config.limits.max_post_bytes);
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        let Some(target) = sender.targets.get_mut(index) else { return };
        let (id, attempt) = (target.peer, target.attempt);
        let Some(written) = target.written_mut() else { return };
        if !written.take_turn() || !sender.standing.is_going() {
            return;
        }
        let Some(peer) = cx.peers.get_mut(id).filter(|peer| peer.maps().out().is_some()) else { return };
        let here = cx.config.args.geometry();
        let part = match written.next_part((peer, here), &sender.given, (max_sge, max_bytes)) {
            Ok(Some(part)) => part,
            Ok(None) => return,
            Err(_) => {
                return self.fail(
                    cx,
                    session,
                    Cause::Protocol("the registered pages do not fit the two geometries"),
                );
            }
        };
        if part.more {
            cx.posts.queue(id, Op::Write, session, index);
        }
        let Part { number, descriptors, total, .. } = part;
        let (done, skipped) = (vec![(number, 1)], written.skipped().to_vec());
        let done = Body::Progress(Progress { attempt, done, total, skipped });
        if descriptors.is_empty() {
            written.in_place(number);
            cx.send(id, done);
            return self.target_advanced(cx, session, index);
        }
        written.post_started();
        let (notify, origin) = (peer.notice(&done), peer.origin());
        let post = InFlight { op: Op::Write, session, target: index, part: number, peer: id, origin };
        cx.start_post(post, descriptors, notify);
    }

    /// A post of a session has ended.
    pub(in crate::proto) fn on_written(
        &mut self,
        cx: &mut Context,
        post: &InFlight,
        result: Result<(), TransportError>,
    ) {
        let (session, index) = (post.session, post.target);
        let Some(written) = self.target_mut(session, index).and_then(Target::written_mut) else { return };
        written.post_ended();
        match result {
            Ok(()) => written.in_place(post.part),
            Err(error) => self.fail(cx, session, Cause::Post(error)),
        }
        self.target_advanced(cx, session, index);
    }

    /// The receiver of a session to which so many more pages are all that is missing, and the bytes that are written there at
    /// once. `None` if the session has several receivers so far.
    pub(in crate::proto) fn addressee(
        &self,
        cx: &Context,
        now: Time,
        session: SessionId,
        pages: usize,
    ) -> Option<(PeerId, u64)> {
        let sender = self.sessions.get(&session).filter(|sender| sender.standing.is_going())?;
        let target =
            sender.targets.first().filter(|target| sender.targets.len() == 1 && !target.is_over())?;
        if !sender.given.lacks(pages) {
            return None;
        }
        let peer = cx.peers.get(target.peer)?;
        let bytes = match target.written() {
            Some(_) if !peer.writes_out().is_permitted(now) => return None,
            Some(_) => cx.config.args.geometry().bytes_per_page().saturating_mul(pages as u64),
            None => 0,
        };
        Some((target.peer, bytes))
    }

    /// Whether writes of the session wait, and how many are in flight, for each target.
    pub(in crate::proto) fn posting(&self, session: SessionId) -> impl Iterator<Item = PostingState> {
        let targets = self.sessions.get(&session).into_iter().flat_map(|sender| sender.targets.iter());
        targets.filter(|target| !target.is_over()).filter_map(|target| {
            let (queued, outstanding) = (target.written()?.is_queued(), target.outstanding());
            Some(PostingState { peer: target.peer, op: Op::Write, queued, outstanding })
        })
    }
}
