//! The writes of a push session, on the prefill side: announcements are planned lazily into *parts*, one post
//! each, in turn with those of other sessions. The frame that a post carries counts its part down at
//! the receiver; the last part says how many there are.

use super::chunks::{Chunk, Final};
use super::io::Output;
use super::node::Node;
use super::peer::Peer;
use super::posting::{InFlight, Leave};
use super::send::Target;
use super::timer::Timer;
use crate::error::{Cause, Obstacle};
use crate::id::{AuxIndex, PostId, SessionId};
use crate::layout::Geometry;
use crate::meter::step;
use crate::plan::{Plan, PlanError};
use crate::plane::{Desc, Op, PlaneError, Post};
use crate::wire::{Body, Done, Link};

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
            let (Some(chunk), Some(map)) = (chunks.get(chunk), peer.map_out(here, layers)) else {
                return Ok(None);
            };
            let local = (chunk.pages.list(), chunk.offset);
            return Plan::suffix(map, local, (&self.pages, self.first)).map(Some);
        }
        if let Some(plan) = self.group_plans.as_mut().and_then(Vec::pop) {
            return Ok(Some(plan));
        }
        match (aux, self.aux, &peer.out) {
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

impl Node {
    /// Starts posts while there is room for them, each target in its turn.
    pub(super) fn pump_posts(&mut self) {
        let now = self.now;
        loop {
            let leave = |peer| match self.peers.get(peer) {
                Some(peer) => Leave { writes: peer.writes_out.is_permitted(now), origin: peer.origin },
                None => Leave::default(),
            };
            match self.posting.next_ready(now, leave) {
                Some((Op::Read, session, index)) => self.post_read(session, index),
                Some((Op::Write, session, index)) => self.post_next(session, index),
                None => break,
            }
        }
        if let Some(at) = self.posting.next_stuck(now) {
            self.timers.arm(Timer::Stuck, at);
        }
    }

    /// What a session's data operations wait for.
    pub(super) fn posting_obstacle(&self, session: SessionId) -> Option<Obstacle> {
        let targets = self.senders.get(&session).into_iter().flat_map(|sender| &sender.targets);
        let writes = targets.filter(|target| !target.reads && !target.over);
        let writes = writes.map(|target| (target.peer, Op::Write, target.queued, target.outstanding));
        let sources = self.receivers.get(&session).into_iter().flat_map(|receiver| &receiver.sources);
        let reads = sources.filter_map(|source| {
            let (queued, outstanding) = source.reading.as_ref()?.posting();
            Some((source.peer, Op::Read, queued, outstanding))
        });
        writes.chain(reads).find_map(|(id, op, queued, outstanding)| {
            let peer = self.peers.get(id)?;
            let stuck = |posts| Obstacle::Stuck { peer: peer.worker.clone(), posts };
            if !queued {
                return (outstanding > 0).then(|| stuck(outstanding as usize));
            }
            if let Some(posts) = self.posting.full(id) {
                return Some(stuck(posts));
            }
            if op == Op::Write && !peer.writes_out.is_permitted(self.now) {
                return Some(Obstacle::NotPermitted { peer: peer.worker.clone() });
            }
            let (busiest, posts) = self.posting.busiest()?;
            let peer = self.peers.get(busiest)?.worker.clone();
            Some(Obstacle::Behind { peer, posts })
        })
    }

    fn post_next(&mut self, session: SessionId, index: usize) {
        let (max_sge, max_bytes) = (self.config.args.max_sge(), self.config.limits.max_post_bytes);
        let Some(sender) = self.senders.get_mut(&session) else { return };
        let Some(target) = sender.targets.get_mut(index) else { return };
        target.queued = false;
        if sender.poll.is_terminal() || target.total.is_some() {
            return;
        }
        let Some(peer) = self.peers.get_mut(target.peer) else { return };
        if peer.out.is_none() {
            return;
        }
        let here = self.config.args.geometry();
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
                        return self.fail_sender(session, Cause::Protocol("pages that no plan leads to"));
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
            self.posting.queue(target.peer, Op::Write, session, index);
        }
        let (id, attempt, total) = (target.peer, target.attempt, target.total);
        let skipped = total.map_or_else(Vec::new, |_| target.skipped.clone());
        let done = Body::Done(Done { attempt, part, total, skipped });
        if descs.is_empty() {
            target.done.insert(u64::from(part), 1);
            self.send(id, done);
            return self.target_advanced(session, index);
        }
        target.outstanding += 1;
        let notify = peer.codec.encode(peer.theirs.unwrap_or(Link::NONE), &done).ok();
        let origin = peer.origin;
        let post = self.posting.start(InFlight { session, target: index, part, peer: id, origin }, self.now);
        self.peers.post_started(id);
        self.output(Output::Post { peer: id, post: Post { id: post, op: Op::Write, descs, notify } });
    }

    pub(super) fn on_posted(&mut self, post: PostId, result: Result<(), PlaneError>) {
        let Some(InFlight { session, target: index, part, peer, .. }) = self.posting.end(post, self.now)
        else {
            return;
        };
        self.peers.post_ended(peer);
        if self.receivers.contains_key(&session) {
            return self.on_read(session, index, result);
        }
        let Some(sender) = self.senders.get_mut(&session) else { return };
        let Some(target) = sender.targets.get_mut(index) else { return };
        target.outstanding -= 1;
        match result {
            Ok(()) => target.done.insert(u64::from(part), 1),
            Err(error) => self.fail_sender(session, Cause::Post(error)),
        }
        self.target_advanced(session, index);
    }
}
