//! Pull: this worker reads the pages of a request, and tells every rank that needs to know.

use std::collections::VecDeque;

use bytes::Bytes;
use kv_core::plan::{Plan, PlanError, RegionMap, Side};
use kv_core::{Cause, Descriptor, Op, PageList, PeerId, SessionId, Time};

use super::super::context::Context;
use super::super::notification::done;
use super::Consumer;
use super::engine::{EngineNo, Stage};
use super::handshake::mismatch;
use super::receiving::Progress;
use crate::flows::{Ended, descriptors};

/// What is read from one rank: its position, its agent, and the places.
type Reading = (usize, PeerId, VecDeque<Descriptor>);

impl Consumer {
    /// Reads the pages of a session, whose engine is ready. A session that has all pages ends at once.
    pub(super) fn read(&mut self, cx: &mut Context, session: SessionId, pages: &PageList) {
        if self.is_expired(cx, session) {
            return self.fail(cx, session, Cause::LeaseExpired);
        }
        let readings = match self.plan(session, pages) {
            Ok(readings) => readings,
            Err(cause) => return self.fail(cx, session, cause),
        };
        if readings.is_empty() {
            return self.finish(cx, session);
        }
        for (rank, agent, places) in readings {
            let flow = self.flows.start(&mut cx.effects, agent, Op::Read, places, None);
            self.readings.insert(flow, (session, rank));
            self.watch_silence(cx.now, agent);
            if let Some(live) = self.sessions.live(session) {
                live.dialect.flows.insert(flow);
            }
        }
        if let Some(live) = self.sessions.live(session) {
            live.dialect.progress = Progress::Reading;
        }
    }

    fn plan(&mut self, session: SessionId, pages: &PageList) -> Result<Vec<Reading>, Cause> {
        let Some(live) = self.sessions.live(session) else { return Ok(Vec::new()) };
        let receiving = &live.dialect;
        let none = PageList::default();
        let theirs = receiving.remote.block_ids.first().unwrap_or(&none);
        let Some(engine) = self.engines.get(receiving.engine) else { return Ok(Vec::new()) };
        let mut readings = Vec::new();
        if pages.is_empty() {
            return Ok(readings);
        }
        for (number, rank) in engine.ranks.iter().enumerate() {
            let (Some((cache, map)), Some(agent)) = (&rank.pages, rank.agent) else { continue };
            let plan = plan_of(map, pages, receiving.prefix, theirs).map_err(cause_of)?;
            let places = descriptors(plan, cache);
            if !places.is_empty() {
                readings.push((number, agent, places));
            }
        }
        Ok(readings)
    }

    /// Begins the next reads at a peer. A session whose turn it is fails if its lease is over: where the process was
    /// stopped for long, the end of an earlier read may come before every timer.
    pub(super) fn read_on(&mut self, cx: &mut Context, peer: PeerId) {
        while let Some(flow) = self.flows.next(peer)
            && let Some((session, _)) = self.readings.get(&flow).copied()
            && self.is_expired(cx, session)
        {
            // The failure cancels the flow, which then has no turn any more.
            self.fail(cx, session, Cause::LeaseExpired);
        }
        self.flows.fill(&mut cx.effects, peer);
        self.watch_silence(cx.now, peer);
    }

    /// Notes since when an agent owes the end of a read.
    fn watch_silence(&mut self, now: Time, agent: PeerId) {
        let owes = self.flows.in_flight(agent) > 0;
        if let Some(rank) = self.engines.rank_of(agent) {
            rank.silent_since = owes.then(|| rank.silent_since.unwrap_or(now));
        }
    }

    /// A read has ended; if it `came`, the silence has ended too. If no read had ended for long, the heartbeats of that
    /// time may have come too late, and the sessions fail whose lease may have ended meanwhile.
    pub(super) fn judge_silence(&mut self, cx: &mut Context, agent: PeerId, came: bool) {
        let Some(rank) = self.engines.rank_of(agent) else { return };
        let Some(since) = rank.silent_since else { return };
        if came {
            rank.silent_since = None;
        }
        if cx.now - since <= self.config.kv_lease_duration / 3 {
            return;
        }
        let users = self.engines.of_agent(agent).and_then(|(no, _)| self.engines.get(no));
        for session in users.map(|engine| engine.users.clone()).unwrap_or_default() {
            let live = self.sessions.live(session).map(|live| &live.dialect);
            if live.is_some_and(|it| it.is_pull() && !it.lease.outlasts(since, cx.now)) {
                self.fail(cx, session, Cause::LeaseExpired);
            }
        }
    }

    /// A flow of reads has ended: none of its reads touches memory any more.
    pub(super) fn reading_ended(&mut self, cx: &mut Context, ended: Ended) {
        let Some((session, _)) = self.readings.remove(&ended.flow) else { return };
        let Some(open) = self.sessions.any(session) else { return };
        open.dialect.flows.remove(&ended.flow);
        let (over, last) = (open.has_ended(), open.dialect.flows.is_empty());
        match ended.result {
            _ if over && last => self.free(cx, session),
            _ if over => {}
            Err(error) => self.fail(cx, session, Cause::Post(error)),
            Ok(_) if last && self.is_expired(cx, session) => self.fail(cx, session, Cause::LeaseExpired),
            Ok(_) if last => self.finish(cx, session),
            Ok(_) => {}
        }
    }

    /// Tells every rank of the engine, once, that this worker reads a request no more.
    pub(super) fn release_at_engine(&mut self, cx: &mut Context, session: SessionId) {
        let Some(open) = self.sessions.any(session) else { return };
        let receiving = &mut open.dialect;
        if !receiving.is_pull() || std::mem::replace(&mut receiving.released, true) {
            return;
        }
        let consumers = self.cache.consumers(receiving.remote.tp_size);
        let bytes = done(receiving.remote.request.as_str(), consumers);
        let (no, remote) = (receiving.engine, receiving.remote.clone());
        let until = receiving.lease.remembered_until(cx.now + self.config.kv_lease_duration);
        if self.tell_ranks(cx, no, bytes) {
            self.used.end(&remote, until);
        }
    }

    /// Tells all ranks of an engine, now or after the handshake. False if they cannot be told.
    fn tell_ranks(&mut self, cx: &mut Context, no: EngineNo, bytes: Bytes) -> bool {
        let Some(engine) = self.engines.get(no) else { return false };
        if engine.ranks.iter().all(|rank| rank.connected) {
            for agent in engine.agents() {
                cx.effects.notify(agent, bytes.clone());
            }
            return true;
        }
        let later = !engine.lost && engine.stage != Stage::Ready;
        if later {
            engine.keep(bytes);
        }
        later
    }
}

/// The plan of the pages after the prefix. Where pages have one size, they are the last pages at the engine, as in
/// vLLM.
fn plan_of(map: &RegionMap, ours: &PageList, prefix: usize, theirs: &PageList) -> Result<Plan, PlanError> {
    let count = PlanError::PageCount { local: prefix + ours.len(), remote: theirs.len() };
    if !map.same_pages() {
        map.check_counts(prefix + ours.len(), theirs.len())?;
        return Plan::chunk(map, ours, prefix, theirs);
    }
    match theirs.len().checked_sub(ours.len()) {
        Some(before) if prefix == 0 || prefix == before => Plan::chunk(map, ours, before, theirs),
        _ => Err(count),
    }
}

fn cause_of(error: PlanError) -> Cause {
    match error {
        PlanError::PageCount { local, remote } => Cause::PageCount { sent: remote, registered: local },
        PlanError::Pages { side: Side::Remote, error } => Cause::LeaseOutOfRange(error),
        PlanError::Pages { side: Side::Local, error } => Cause::BadPages(error),
        error => Cause::Incompatible(mismatch(error)),
    }
}
