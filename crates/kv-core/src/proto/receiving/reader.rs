//! The reading half of a pull session, on the decode side.
//!
//! ```text
//! open ─▶ lookup ─▶ hello ─▶ Claim to each source ─▶ WaitingForInput     (in the scheduler's queue)
//!                                   │ Granted: heartbeats to the source from now on
//!                                   ├─ init(pages) ─▶ Transferring ─▶ READs ─▶ the last one has ended
//!                                   ▼                                             │ and the lease had not
//!                               a heartbeat's answer proves how long the          ▼
//!                               pages have been as they were granted  ──────▶ Release, Success, pages back
//! any failure ─▶ Failed ─▶ Abort to each source (repeated by the peer's timer) ─▶ own READs ended ─▶ pages back
//! ```
//!
//! A *proof* is an answer to a frame that was sent at `t`: whoever sent it still held the pages
//! when the frame came, hence after `t`, and keeps them for the time that stands in it. So the
//! pages are intact before `t` plus that time, by this side's clock and with a margin for clocks
//! that run at different rates. A read that ended before that is right, without another round
//! trip; one that ended at that moment or later waits for the answer to a heartbeat that was sent
//! after its end.

use std::time::Duration;

use crate::error::Cause;
use crate::groups::{GroupLists, Groups};
use crate::id::{Attempt, AuxIndex, PeerId, SessionId};
use crate::lease::GrantRef;
use crate::meter::{each, step};
use crate::pages::PageList;
use crate::plan::{Plan, Side};
use crate::plane::{Desc, Op, PlaneError, Post};
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::conversation::{MAX_RUNS, of_life};
use crate::proto::groups::{Between, GroupPlans, check_aux, check_peer_groups};
use crate::proto::io::Output;
use crate::proto::posts::{InFlight, PostingState};
use crate::proto::receiving::{Receiving, SourceState};
use crate::proto::run_set;
use crate::proto::run_set::is_rising;
use crate::proto::timer::Timer;
use crate::time::Time;
use crate::wire::{Body, Granted, HeartbeatAck};

/// What is known of a grant, and how far its pages have been read.
#[derive(Debug, Clone)]
pub(in crate::proto) struct Reading {
    nonce: SessionId,
    pages: PageList,
    aux: Option<AuxIndex>,
    groups: GroupLists,
    /// How often the source wants heartbeats.
    interval: Option<Duration>,
    /// Before this moment, the pages are known to be as granted. At it they may be gone.
    intact_until: Time,
    /// Plans not yet handed out, in reverse order; `None` until there are pages to read into.
    plans: Option<Vec<Plan>>,
    queued: bool,
    next_part: u32,
    outstanding: u32,
    /// When the last read ended.
    ended: Option<Time>,
}

impl Reading {
    fn is_proven(&self) -> bool {
        self.ended.is_some_and(|ended| ended < self.intact_until)
    }
}

impl Receiving {
    pub(in crate::proto) fn on_granted(&mut self, cx: &mut Context, id: PeerId, granted: Granted) {
        let now = cx.fx.now();
        let Some(peer) = cx.peers.get(id) else { return };
        let proven = peer.outgoing().granted_until(granted.beat, granted.lease_ms);
        let (num_pages, rows) = (peer.maps().geometry().num_pages, peer.maps().aux_rows());
        let incarnation = peer.incarnation();
        let groups_bad = check_peer_groups(&granted.groups, peer.maps().group_items()).is_err();
        let Some((session, index)) = peer.outgoing().of(granted.attempt) else { return };
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        if receiver.poll.is_terminal() || !receiver.pulls {
            return;
        }
        let expected = of_life(&receiver.grants, incarnation).cloned();
        let Some(source) = receiver.sources.get_mut(index) else { return };
        if source.state != SourceState::Open {
            return;
        }
        source.registered = true;
        source.last_news = now;
        let intact_until = proven.unwrap_or(Time::ZERO);
        if let Some(reading) = &mut source.reading {
            if reading.nonce == granted.grant {
                reading.intact_until = reading.intact_until.max(intact_until);
                return self.reading_advanced(cx, session, index);
            }
            return self.fail_receiver(cx, session, Cause::Protocol("two grants for one claim"));
        }
        let bad = granted.pages.check_below(num_pages).is_err()
            || granted.pages.check_distinct().is_err()
            || check_aux(granted.aux, rows).is_some()
            || groups_bad;
        if bad {
            return self.fail_receiver(cx, session, Cause::Protocol("a grant of pages that do not exist"));
        }
        if let Some(cause) = expected.and_then(|expected| disagreement(&expected, &granted)) {
            return self.fail_receiver(cx, session, cause);
        }
        // Each heartbeat walks along all attempts at the peer: it does not decide alone how often.
        let least = cx.config.timing.keepalive / 10;
        let interval =
            (granted.interval_ms > 0).then(|| Duration::from_millis(granted.interval_ms).max(least));
        source.reading = Some(Reading {
            nonce: granted.grant,
            pages: granted.pages,
            aux: granted.aux,
            groups: granted.groups,
            interval,
            intact_until,
            plans: None,
            queued: false,
            next_part: 0,
            outstanding: 0,
            ended: None,
        });
        if intact_until <= now {
            // It was not asked for, or long ago: ask for a proof while the reads run.
            cx.say_heartbeat(id, vec![(granted.attempt.0, 1)]);
        }
        cx.watch_peer(id);
        cx.keep_beating(id, interval);
        self.start_reading(cx, session, index);
    }

    pub(in crate::proto) fn on_heartbeat_due(&mut self, cx: &mut Context, id: PeerId) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        peer.outgoing_mut().beaten();
        let mut runs: Vec<(u64, u32)> = Vec::new();
        let mut interval: Option<Duration> = None;
        for (Attempt(attempt), session, index) in peer.outgoing().all() {
            let receiver = self.sessions.get(&session).filter(|receiver| !receiver.poll.is_terminal());
            let reading = receiver.and_then(|receiver| receiver.sources.get(index)?.reading.as_ref());
            let Some(wanted) = reading.and_then(|reading| reading.interval) else { continue };
            interval = Some(interval.map_or(wanted, |least| least.min(wanted)));
            run_set::append(&mut runs, attempt);
        }
        for runs in each(runs.chunks(MAX_RUNS)) {
            cx.say_heartbeat(id, runs.to_vec());
        }
        cx.keep_beating(id, interval);
    }

    pub(in crate::proto) fn on_heartbeat_ack(&mut self, cx: &mut Context, id: PeerId, ack: HeartbeatAck) {
        let now = cx.fx.now();
        let Some(peer) = cx.peers.get(id) else { return };
        let proven = peer.outgoing().granted_until(ack.beat, ack.lease_ms);
        let Some(intact_until) = proven else { return };
        if !is_rising(&ack.attempts) {
            cx.fx.drop_frame();
            return;
        }
        let mut ended = Vec::new();
        for (start, count) in each(ack.attempts) {
            let end = start.saturating_add(u64::from(count));
            for (_, session, index) in peer.outgoing().iter(Attempt(start)..Attempt(end)) {
                let receiver = self.sessions.get_mut(&session);
                let Some(source) = receiver.and_then(|receiver| receiver.sources.get_mut(index)) else {
                    continue;
                };
                let Some(reading) = &mut source.reading else { continue };
                source.last_news = now;
                reading.intact_until = reading.intact_until.max(intact_until);
                if reading.ended.is_some() {
                    ended.push((session, index));
                }
            }
        }
        for (session, index) in each(ended) {
            self.reading_advanced(cx, session, index);
        }
    }

    /// Plans the reads from one source, once both the grant and the pages are there.
    pub(super) fn start_reading(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let now = cx.fx.now();
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        if receiver.poll != KvPoll::Transferring {
            return;
        }
        let Some((given, aux)) = &receiver.given else { return };
        let mut others = each(receiver.sources.iter()).filter_map(|source| source.reading.as_ref());
        let agreed = others.find(|reading| reading.plans.is_some()).map(|reading| reading.pages.len());
        let Some(source) = receiver.sources.get_mut(index) else { return };
        let Some(reading) = source.reading.as_mut().filter(|reading| reading.plans.is_none()) else { return };
        let Some(peer) = cx.peers.get(source.peer) else { return };
        let Some(map) = peer.maps().inward() else { return };
        let (held, wanted) = (reading.pages.len(), given.len());
        // Pages that the request has here already are those before the given ones. Nobody has to say
        // how many, if pages are counted alike on both sides.
        let told = receiver.prefix;
        let counted = told == 0 && map.same_pages();
        // Of dealt pages the number tells: ranks that disagree about the end must not shift the rest.
        let whole = receiver.whole.filter(|_| wanted > 0).unwrap_or(held);
        let prefix = if counted { whole.saturating_sub(wanted) } else { told };
        let registered = match agreed {
            // Sources that hold other numbers of pages would each mean another prefix.
            Some(pages) if counted => pages,
            _ => prefix.saturating_add(wanted),
        };
        let planned = match (map.check_counts(registered, held), *aux, reading.aux) {
            (Err(_), ..) => Err(Cause::PageCount { sent: held, registered }),
            (_, Some(_), None) => Err(Cause::AuxOneSided { sender: false, receiver: true }),
            (Ok(()), row, row_there) => {
                // Other ranks that hold the same pages are asked for the others.
                let share = peer.maps().geometry().parallel.page_range(wanted);
                let mine = given.list().slice(share.start, share.len()).unwrap_or_default();
                let pages = Plan::chunk(map, &mine, prefix.saturating_add(share.start), &reading.pages);
                // The row of the first source counts.
                let aux = row
                    .filter(|_| index == 0)
                    .zip(row_there)
                    .map(|(here, there)| Plan::aux(map, here, there))
                    .transpose();
                let no_plan = |_| Cause::Protocol("a grant that no plan leads to");
                // Whoever gives nothing at all reads nothing.
                let nothing = given.is_empty() && receiver.groups.is_none();
                let (ours, theirs) = (cx.config.args.geometry(), peer.maps().geometry());
                let between = Between { map, ours, theirs, source: Side::Remote };
                let groups = match &receiver.groups {
                    _ if nothing => Ok(GroupPlans::default()),
                    Some(groups) => between.plan(groups, &reading.groups),
                    None => between.plan(&Groups::none(), &reading.groups),
                };
                pages.map_err(no_plan).and_then(|pages| Ok((pages, groups?, aux.map_err(no_plan)?)))
            }
        };
        match planned {
            Err(cause) => self.fail_receiver(cx, session, cause),
            Ok((pages, groups, aux)) => {
                source.skipped = groups.skipped;
                let plans = aux.into_iter().chain(groups.plans).chain([pages]);
                let plans = plans.filter(|plan| !plan.is_done()).collect::<Vec<_>>();
                if plans.is_empty() {
                    reading.ended = Some(now);
                } else {
                    reading.queued = true;
                    cx.posts.queue(source.peer, Op::Read, session, index);
                }
                reading.plans = Some(plans);
                self.reading_advanced(cx, session, index);
            }
        }
    }

    /// Posts the next part of the reads from one source.
    pub(in crate::proto) fn post_read(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let (max_sge, max_bytes) = (cx.config.args.max_sge(), cx.config.limits.max_post_bytes);
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        if receiver.poll.is_terminal() {
            return;
        }
        let Some(source) = receiver.sources.get_mut(index) else { return };
        let Some(reading) = &mut source.reading else { return };
        reading.queued = false;
        let Some(plans) = &mut reading.plans else { return };
        let mut descs: Vec<Desc> = Vec::new();
        let mut bytes = 0;
        while let Some(plan) = plans.last_mut() {
            step(1);
            let room = max_sge - descs.len();
            let progress = plan.fill(&mut descs, room, max_bytes.saturating_sub(bytes));
            bytes += progress.bytes;
            if !progress.done {
                break;
            }
            plans.pop();
        }
        if descs.is_empty() {
            return;
        }
        reading.outstanding += 1;
        let part = reading.next_part;
        reading.next_part += 1;
        if !plans.is_empty() {
            reading.queued = true;
            cx.posts.queue(source.peer, Op::Read, session, index);
        }
        let peer = source.peer;
        let origin = cx.peers.get(peer).and_then(|peer| peer.origin());
        let post = cx
            .posts
            .start(InFlight { op: Op::Read, session, target: index, part, peer, origin }, cx.fx.now());
        cx.peers.post_started(peer);
        cx.fx.output(Output::Post { peer, post: Post { id: post, op: Op::Read, descs, notify: None } });
    }

    /// A read of a session's has ended.
    pub(in crate::proto) fn on_read(
        &mut self,
        cx: &mut Context,
        post: &InFlight,
        result: Result<(), PlaneError>,
    ) {
        let (session, index) = (post.session, post.target);
        let now = cx.fx.now();
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        let Some(source) = receiver.sources.get_mut(index) else { return };
        let Some(reading) = &mut source.reading else { return };
        reading.outstanding -= 1;
        if let Err(error) = result {
            self.fail_receiver(cx, session, Cause::Post(error));
        } else if reading.outstanding == 0 && !reading.queued {
            reading.ended = Some(now);
        }
        self.reading_advanced(cx, session, index);
    }

    /// A read has ended, or a proof has come: is the source done, and with it the session?
    fn reading_advanced(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        if receiver.poll.is_terminal() {
            return self.maybe_retire(cx, session);
        }
        let Some(source) = receiver.sources.get_mut(index) else { return };
        let (SourceState::Open, Some(attempt), Some(reading)) =
            (source.state, source.attempt, &source.reading)
        else {
            return;
        };
        if reading.ended.is_none() {
            return;
        }
        if !reading.is_proven() {
            return self.ask_for_proof(cx, session);
        }
        source.state = SourceState::Over;
        cx.release_read(source.peer, attempt);
        self.maybe_succeed(cx, session);
    }

    /// Asks the sources whose reads have ended too late whether the pages are still as they were;
    /// repeated until answered.
    pub(super) fn ask_for_proof(&mut self, cx: &mut Context, session: SessionId) {
        if cx.fx.is_armed(Timer::Repeat(session)) {
            return;
        }
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        let unproven = each(receiver.sources.iter()).filter(|source| {
            source.state == SourceState::Open
                && source
                    .reading
                    .as_ref()
                    .is_some_and(|reading| reading.ended.is_some() && !reading.is_proven())
        });
        let asked: Vec<_> = unproven.filter_map(|source| Some((source.peer, source.attempt?))).collect();
        if asked.is_empty() {
            return;
        }
        receiver.repeats += 1;
        let repeats = receiver.repeats;
        for (id, attempt) in each(asked) {
            cx.watch_peer(id);
            cx.say_heartbeat(id, vec![(attempt.0, 1)]);
        }
        let pause = cx.fx.backoff(cx.config.timing.retry_first, repeats);
        cx.fx.arm(Timer::Repeat(session), cx.fx.now() + pause);
    }

    /// A pull session has failed: its sources are told, again and again if need be, and its own
    /// reads are stopped. Its pages come back when the reads have ended.
    pub(super) fn stop_reading(&mut self, cx: &mut Context, session: SessionId) {
        for post in each(cx.posts.of(session)) {
            cx.fx.output(Output::Cancel { post });
        }
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        let Some(cause) = receiver.failure.clone() else { return };
        let (room, grants) = (receiver.room.clone(), receiver.grants.clone());
        let closing = each(receiver.sources.iter_mut()).filter(|source| source.state == SourceState::Closing);
        let mut frames = Vec::new();
        for source in each(closing) {
            source.state = SourceState::Over;
            let (Some(attempt), Some(peer)) = (source.attempt, cx.peers.get_mut(source.peer)) else {
                continue;
            };
            frames.push((source.peer, peer.abort(attempt, &room, &grants, &cause)));
        }
        for (id, abort) in each(frames) {
            cx.watch_peer(id);
            cx.send(id, Body::Abort(abort));
        }
    }

    /// How the reads of a session stand.
    pub(in crate::proto) fn posting(&self, session: SessionId) -> impl Iterator<Item = PostingState> {
        let sources = self.sessions.get(&session).into_iter().flat_map(|receiver| &receiver.sources);
        sources.filter_map(|source| {
            let reading = source.reading.as_ref()?;
            let (queued, outstanding) = (reading.queued, reading.outstanding);
            Some(PostingState { peer: source.peer, op: Op::Read, queued, outstanding })
        })
    }
}

/// How a grant differs from the reference that the router carried.
fn disagreement(expected: &GrantRef, granted: &Granted) -> Option<Cause> {
    if expected.nonce != granted.grant {
        return Some(Cause::Protocol("a grant with another nonce"));
    }
    let referenced = expected.pages.as_ref()?;
    if *referenced == granted.pages {
        return None;
    }
    let (mut here, mut there) = (referenced.iter(), granted.pages.iter());
    (0..).map(|position| (position, here.next(), there.next())).find_map(|(position, referenced, held)| {
        (referenced != held || referenced.is_none()).then_some(Cause::GrantPages {
            position,
            referenced,
            held,
        })
    })
}
