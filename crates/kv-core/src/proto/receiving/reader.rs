//! The reading half of a pull session, on the decode side.
//!
//! ```text
//! open ─▶ lookup ─▶ hello ─▶ acquire to each source ─▶ WaitingForInput     (in the scheduler's queue)
//!                                   │ Granted: heartbeats to the source from now on
//!                                   ├─ init(pages) ─▶ Transferring ─▶ READs ─▶ the last one has ended
//!                                   ▼                                             │ and the lease had not
//!                               a heartbeat's answer proves how long the          ▼
//!                               pages have been as they were granted  ──────▶ Release, Success, pages back
//! any failure ─▶ Failed ─▶ Abort to each source (repeated by the peer's timer) ─▶ own READs ended ─▶ pages back
//! ```
//!
//! A *proof* is an answer to a frame that was sent at time `t`. The sender of the answer still held
//! the pages when the frame came, hence after `t`, and keeps them for the time in the answer. So
//! the pages are intact until `t` plus that time, by this side's clock and with a margin for clocks
//! of different rates. A read that ended before that moment is right without another round trip. A
//! read that ended at that moment or later waits for the answer to a heartbeat that was sent after
//! the end of the read.

use std::time::Duration;

use crate::error::{Cause, PeerCause};
use crate::id::{Attempt, PeerId, SessionId};
use crate::lease::LeaseRef;
use crate::meter::each;
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::conversation::{Asks, Maps, of_incarnation};
use crate::proto::ending::Ending;
use crate::proto::groups::{check_aux, check_peer_groups};
use crate::proto::posts::{InFlight, PostingState};
use crate::proto::receiving::Receiving;
use crate::proto::receiving::planning::plan_reads;
use crate::proto::receiving::reading::{Part, Reading};
use crate::proto::run_set;
use crate::proto::timer::Timer;
use crate::time::Time;
use crate::transport::{Op, TransportError};
use crate::wire::{Body, Granted, HeartbeatAck};

impl Receiving {
    pub(in crate::proto) fn on_granted(&mut self, cx: &mut Context, id: PeerId, granted: Granted) {
        let now = cx.fx.now();
        let Some(peer) = cx.peers.get(id) else { return };
        let proven = peer.granted_until(granted.number, granted.lease_ms);
        let (incarnation, possible) = (peer.incarnation(), is_possible(&granted, peer.maps()));
        let Some((session, index)) = peer.outgoing().of(granted.attempt) else { return };
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        if !receiver.standing.is_going() || !receiver.pulls {
            return;
        }
        let expected = of_incarnation(&receiver.lease_refs, incarnation).cloned();
        let Some(source) = receiver.sources.get_mut(index) else { return };
        if !source.is_open() {
            return;
        }
        source.hear(now);
        let intact_until = proven.unwrap_or(Time::ZERO);
        if let Some(reading) = &mut source.reading {
            if reading.lease() == granted.lease_id {
                reading.prove(intact_until);
                return self.reading_advanced(cx, session, index);
            }
            return self.fail_by(
                cx,
                session,
                Some(id),
                Cause::Protocol("two leases for one acquire message"),
            );
        }
        if !possible {
            return self.fail_by(
                cx,
                session,
                Some(id),
                Cause::Protocol("a lease of pages that do not exist"),
            );
        }
        if let Some(cause) = expected.and_then(|expected| disagreement(&expected, &granted)) {
            return self.fail_by(cx, session, Some(id), cause);
        }
        // Each heartbeat walks along all attempts at the peer: the peer alone must not decide how
        // often.
        let least = cx.config.timing.keepalive / 10;
        let interval =
            (granted.interval_ms > 0).then(|| Duration::from_millis(granted.interval_ms).max(least));
        let attempt = granted.attempt;
        source.reading = Some(Reading::new(granted, interval, intact_until));
        if intact_until <= now {
            // The lease was not asked for, or long ago: ask for a proof while the reads run.
            cx.say_heartbeat(id, Asks { leases: vec![(attempt.0, 1)], ..Asks::default() });
        }
        cx.watch_peer(id);
        cx.keep_beating(id, interval);
        self.start_reading(cx, session, index);
    }

    pub(in crate::proto) fn on_heartbeat_due(&mut self, cx: &mut Context, id: PeerId) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        peer.outgoing_mut().last_numbered();
        let mut runs: Vec<(u64, u32)> = Vec::new();
        let mut interval: Option<Duration> = None;
        for (Attempt(attempt), session, index) in peer.outgoing().all() {
            let receiver = self.sessions.get(&session).filter(|receiver| receiver.standing.is_going());
            let reading = receiver.and_then(|receiver| receiver.sources.get(index)?.reading.as_ref());
            let Some(wanted) = reading.and_then(Reading::interval) else { continue };
            interval = Some(interval.map_or(wanted, |least| least.min(wanted)));
            run_set::append(&mut runs, attempt);
        }
        if !runs.is_empty() {
            for leases in run_set::frames(runs) {
                cx.say_heartbeat(id, Asks { leases, ..Asks::default() });
            }
        }
        cx.keep_beating(id, interval);
    }

    /// The peer has answered a heartbeat. The leases in the answer, which rise, hold for a while
    /// from the time of the heartbeat.
    pub(in crate::proto) fn leases_extended(&mut self, cx: &mut Context, id: PeerId, ack: HeartbeatAck) {
        let now = cx.fx.now();
        let Some(peer) = cx.peers.get(id) else { return };
        let Some(intact_until) = peer.granted_until(ack.number, ack.lease_ms) else { return };
        let mut ended = Vec::new();
        for (start, count) in each(ack.leases) {
            let end = start.saturating_add(u64::from(count));
            for (_, session, index) in peer.outgoing().iter(Attempt(start)..Attempt(end)) {
                let receiver = self.sessions.get_mut(&session);
                let Some(source) = receiver.and_then(|receiver| receiver.sources.get_mut(index)) else {
                    continue;
                };
                let Some(reading) = &mut source.reading else { continue };
                reading.prove(intact_until);
                if reading.has_ended() {
                    ended.push((session, index));
                }
                source.hear(now);
            }
        }
        for (session, index) in each(ended) {
            self.reading_advanced(cx, session, index);
        }
    }

    /// Plans the reads from one source, once the lease and the pages are there.
    pub(super) fn start_reading(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        if receiver.standing.poll() != KvPoll::Transferring {
            return;
        }
        let Some(source) = receiver.sources.get(index) else { return };
        let id = source.peer;
        if source.reading.as_ref().is_none_or(Reading::is_planned) {
            return;
        }
        let Some(peer) = cx.peers.get(id) else { return };
        let planned = match plan_reads(receiver, index, peer.maps(), cx.config.args.geometry()) {
            Some(Ok(planned)) => planned,
            Some(Err(cause)) => return self.fail_by(cx, session, Some(id), cause),
            None => return,
        };
        let Some(source) = receiver.sources.get_mut(index) else { return };
        source.skipped = planned.skipped;
        let now = cx.fx.now();
        if source.reading.as_mut().is_some_and(|reading| reading.plan(planned.plans, now)) {
            cx.posts.queue(id, Op::Read, session, index);
        }
        self.reading_advanced(cx, session, index);
    }

    /// Posts the next part of the reads from one source.
    pub(in crate::proto) fn post_read(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let (max_sge, max_bytes) = (cx.config.args.max_sge(), cx.config.limits.max_post_bytes);
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        if !receiver.standing.is_going() {
            return;
        }
        let Some(source) = receiver.sources.get_mut(index) else { return };
        let peer = source.peer;
        let part = source.reading.as_mut().and_then(|reading| reading.next_part(max_sge, max_bytes));
        let Some(Part { number, descriptors, more }) = part else { return };
        if more {
            cx.posts.queue(peer, Op::Read, session, index);
        }
        let origin = cx.peers.get(peer).and_then(|peer| peer.origin());
        let post = InFlight { op: Op::Read, session, target: index, part: number, peer, origin };
        cx.start_post(post, descriptors, None);
    }

    /// A read of a session has ended.
    pub(in crate::proto) fn on_read(
        &mut self,
        cx: &mut Context,
        post: &InFlight,
        result: Result<(), TransportError>,
    ) {
        let (session, index) = (post.session, post.target);
        let now = cx.fx.now();
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        let Some(source) = receiver.sources.get_mut(index) else { return };
        let Some(reading) = &mut source.reading else { return };
        reading.post_ended(result.is_ok(), now);
        if let Err(error) = result {
            self.fail_by(cx, session, Some(post.peer), Cause::Post(error));
        }
        self.reading_advanced(cx, session, index);
    }

    /// A read has ended, or a proof has come: checks whether the source is done, and with it the
    /// session.
    fn reading_advanced(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        if !receiver.standing.is_going() {
            return self.settle(cx, session);
        }
        let Some(source) = receiver.sources.get_mut(index) else { return };
        let (Some(attempt), Some(reading)) = (source.open_attempt(), &source.reading) else { return };
        if !reading.has_ended() {
            return;
        }
        if !reading.is_proven() {
            return self.ask_for_proof(cx, session);
        }
        source.end();
        cx.release_read(source.peer, attempt);
        self.settle(cx, session);
    }

    /// Asks the sources whose last read ended too late whether the pages were still intact;
    /// repeated until they answer.
    pub(super) fn ask_for_proof(&mut self, cx: &mut Context, session: SessionId) {
        if cx.fx.is_armed(Timer::Repeat(session)) {
            return;
        }
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        let unproven = each(receiver.sources.iter()).filter(|source| {
            source.reading.as_ref().is_some_and(|reading| reading.has_ended() && !reading.is_proven())
        });
        let asked = unproven.filter_map(|source| Some((source.peer, source.open_attempt()?)));
        let asked: Vec<_> = asked.collect();
        if asked.is_empty() {
            return;
        }
        receiver.repeats += 1;
        let repeats = receiver.repeats;
        for (id, attempt) in each(asked) {
            cx.watch_peer(id);
            cx.say_heartbeat(id, Asks { leases: vec![(attempt.0, 1)], ..Asks::default() });
        }
        let pause = cx.fx.backoff(cx.config.timing.retry_first, repeats);
        cx.fx.arm(Timer::Repeat(session), cx.fx.now() + pause);
    }

    /// A pull session has failed. Its sources are told until they acknowledge. Its pages come back
    /// when its own reads have ended.
    pub(super) fn stop_reading(&mut self, cx: &mut Context, session: SessionId, told: &PeerCause) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        let (room, lease_refs) = (receiver.room.clone(), receiver.lease_refs.clone());
        let mut frames = Vec::new();
        for source in each(receiver.sources.iter_mut()) {
            let Some(attempt) = source.closing_attempt() else { continue };
            let unanswered = source.closes_unanswered_since();
            source.end();
            let Some(peer) = cx.peers.get_mut(source.peer) else { continue };
            frames.push((source.peer, peer.abort((attempt, unanswered), &room, &lease_refs, told)));
        }
        for (id, abort) in each(frames) {
            cx.watch_peer(id);
            cx.send(id, Body::Abort(abort));
        }
    }

    /// Whether reads of the session wait, and how many are in flight, for each source.
    pub(in crate::proto) fn posting(&self, session: SessionId) -> impl Iterator<Item = PostingState> {
        let sources = self.sessions.get(&session).into_iter().flat_map(|receiver| receiver.sources.iter());
        sources.filter_map(|source| {
            let (queued, outstanding) = source.reading.as_ref()?.posting();
            Some(PostingState { peer: source.peer, op: Op::Read, queued, outstanding })
        })
    }
}

/// True if the peer has all pages and items that it grants.
fn is_possible(granted: &Granted, maps: &Maps) -> bool {
    granted.pages.check_below(maps.geometry().num_pages).is_ok()
        && granted.pages.check_distinct().is_ok()
        && check_aux(granted.aux, maps.aux_rows()).is_none()
        && check_peer_groups(&granted.groups, maps.group_items()).is_ok()
}

/// How a lease differs from the reference that the router carried; `None` if it does not.
fn disagreement(expected: &LeaseRef, granted: &Granted) -> Option<Cause> {
    if expected.lease_id != granted.lease_id {
        return Some(Cause::Protocol("a lease with another id"));
    }
    let referenced = expected.pages.as_deref()?;
    if *referenced == granted.pages {
        return None;
    }
    let (mut here, mut there) = (referenced.iter(), granted.pages.iter());
    (0..).map(|position| (position, here.next(), there.next())).find_map(|(position, referenced, held)| {
        (referenced != held || referenced.is_none()).then_some(Cause::LeasePages {
            position,
            referenced,
            held,
        })
    })
}
