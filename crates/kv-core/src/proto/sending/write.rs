//! The writes of a push session, on the prefill side: announcements are planned lazily into *parts*, one post
//! each, in turn with those of other sessions. The frame that a post carries counts its part down at
//! the receiver; the last part says how many there are.

use crate::error::Cause;
use crate::id::{AuxIndex, SessionId};
use crate::layout::Geometry;
use crate::meter::step;
use crate::plan::{Plan, PlanError};
use crate::plane::{Desc, Op, PlaneError, Post};
use crate::proto::context::Context;
use crate::proto::conversation::Peer;
use crate::proto::io::Output;
use crate::proto::posts::{InFlight, PostingState};
use crate::proto::sending::chunks::{Chunk, Final};
use crate::proto::sending::{Sending, Target};
use crate::wire::{Body, Done};

impl Target {
    /// The plan of the next announcement, and after the last one those of the state groups and the aux row.
    fn next_plan(
        &mut self,
        (peer, here): (&mut Peer, &Geometry),
        (chunks, finals): (&[Chunk], &[Final]),
        aux: Option<AuxIndex>,
    ) -> Result<Option<Plan>, PlanError> {
        if let Some(&Final { chunk, layers }) = finals.get(self.next_final) {
            self.next_final += 1;
            let (Some(chunk), Some(map)) = (chunks.get(chunk), peer.maps_mut().out_of_layers(here, layers))
            else {
                return Ok(None);
            };
            let local = (chunk.pages.list(), chunk.offset);
            return Plan::suffix(map, local, (&self.pages, self.first)).map(Some);
        }
        if let Some(plan) = self.group_plans.as_mut().and_then(Vec::pop) {
            return Ok(Some(plan));
        }
        match (aux, self.aux, peer.maps().out()) {
            (Some(local), Some(remote), Some(map)) if self.aux_here && !self.aux_planned => {
                self.aux_planned = true;
                Plan::aux(map, local, remote).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn has_planned_all(&self, finals: &[Final], aux: Option<AuxIndex>) -> bool {
        self.plan.is_none()
            && self.next_final == finals.len()
            && self.group_plans.as_ref().is_none_or(Vec::is_empty)
            && (aux.is_none() || self.aux_planned || !self.aux_here)
    }
}

impl Sending {
    pub(in crate::proto) fn post_next(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let (max_sge, max_bytes) = (cx.config.args.max_sge(), cx.config.limits.max_post_bytes);
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        let Some(target) = sender.targets.get_mut(index) else { return };
        target.queued = false;
        if sender.poll.is_terminal() || target.total.is_some() {
            return;
        }
        let Some(peer) = cx.peers.get_mut(target.peer) else { return };
        if peer.maps().out().is_none() {
            return;
        }
        let here = cx.config.args.geometry();
        let aux = sender.announced.and_then(|(_, aux)| aux).filter(|_| sender.complete);
        let mut descs: Vec<Desc> = Vec::new();
        let mut bytes = 0;
        while descs.len() < max_sge && bytes < max_bytes {
            step(1);
            if target.plan.is_none() {
                match target.next_plan((peer, here), (&sender.chunks, &sender.finals), aux) {
                    Ok(Some(plan)) => target.plan = Some(plan),
                    Ok(None) => break,
                    Err(_) => {
                        return self.fail_sender(cx, session, Cause::Protocol("pages that no plan leads to"));
                    }
                }
            }
            let Some(plan) = &mut target.plan else { break };
            let room = max_sge - descs.len();
            let progress = plan.fill(&mut descs, room, max_bytes - bytes);
            bytes += progress.bytes;
            if progress.done {
                target.plan = None;
            } else if progress.descs == 0 {
                break;
            }
        }
        let planned_all = target.has_planned_all(&sender.finals, aux);
        let last = planned_all && sender.complete;
        if descs.is_empty() && !last {
            return;
        }
        let part = target.next_part;
        target.next_part += 1;
        target.total = last.then_some(target.next_part);
        if !planned_all {
            target.queued = true;
            cx.posts.queue(target.peer, Op::Write, session, index);
        }
        let (id, attempt, total) = (target.peer, target.attempt, target.total);
        let skipped = total.map_or_else(Vec::new, |_| target.skipped.clone());
        let done = Body::Done(Done { attempt, part, total, skipped });
        if descs.is_empty() {
            target.done.insert(u64::from(part), 1);
            cx.send(id, done);
            return self.target_advanced(cx, session, index);
        }
        target.outstanding += 1;
        let (notify, origin) = (peer.notice(&done), peer.origin());
        let post = cx
            .posts
            .start(InFlight { op: Op::Write, session, target: index, part, peer: id, origin }, cx.fx.now());
        cx.peers.post_started(id);
        cx.fx.output(Output::Post { peer: id, post: Post { id: post, op: Op::Write, descs, notify } });
    }

    /// A post of a session's has ended.
    pub(in crate::proto) fn on_written(
        &mut self,
        cx: &mut Context,
        post: &InFlight,
        result: Result<(), PlaneError>,
    ) {
        let (session, index) = (post.session, post.target);
        let Some(target) = self.target_mut(session, index) else { return };
        target.outstanding -= 1;
        match result {
            Ok(()) => target.done.insert(u64::from(post.part), 1),
            Err(error) => self.fail_sender(cx, session, Cause::Post(error)),
        }
        self.target_advanced(cx, session, index);
    }

    /// How the writes of a session stand.
    pub(in crate::proto) fn posting(&self, session: SessionId) -> impl Iterator<Item = PostingState> {
        let targets = self.sessions.get(&session).into_iter().flat_map(|sender| &sender.targets);
        targets.filter(|target| !target.reads && !target.over).map(|target| PostingState {
            peer: target.peer,
            op: Op::Write,
            queued: target.queued,
            outstanding: target.outstanding,
        })
    }
}
