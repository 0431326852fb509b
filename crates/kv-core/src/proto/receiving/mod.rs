//! The receiving half of a session, on the decode side. What differs in pull mode is in `read.rs`.
//!
//! ```text
//! open ─▶ lookup ─▶ hello ─▶ WaitingForInput ─ init(pages) ─▶ Register to each source ─▶ Transferring
//!          (Bootstrapping)                                         │ all parts of all sources done
//!                                                                  ▼
//!                                                               Success, pages back
//! any failure ─▶ Failed ─▶ Abort to each source that may still write ─▶ AbortAck | proof of death ─▶ pages back
//! ```
//!
//! A *source* is a rank of the prefill engine that writes into this rank. Each is served by an
//! attempt of its own, which is over (`Over`) once it is certain that this source writes no more:
//!
//! | source | from | when |
//! |---|---|---|
//! | `Meeting` | – | the peer is not up yet |
//! | `Met` | `Meeting` | the hello was answered |
//! | `Open` | `Met` | pages are there: the registration was sent |
//! | `Closing` | `Met`, `Open` | the session failed: the abort was sent |
//! | `Over` | `Open` | all its parts are in place, or it failed and is quiet |
//! | `Over` | `Closing` | the abort was acknowledged, or the peer is proven dead and its wire quiet |

mod close;
mod groups;
mod lookup;
mod peers;
mod quarantine;
pub(in crate::proto) mod reader;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::{Cause, PeerCause, Phase};
use crate::groups::{Groups, MAX_REQUEST_GROUPS};
use crate::id::{Attempt, AuxIndex, PeerId, Room, SessionId};

use crate::lease::{GrantRef, TransferMode};
use crate::meter::each;
use crate::pages::{PageList, Pages};
use crate::plane::Directions;
use crate::poll::KvPoll;
use crate::proto::context::Context;
use crate::proto::conversation::{Peer, of_life};
use crate::proto::io::LONGEST;
use crate::proto::lookups::Question;
use crate::proto::receiving::reader::Reading;
use crate::proto::rendezvous::Named;
use crate::proto::run_set::RunSet;
use crate::proto::timer::Timer;
use crate::record::WorkerRole;
use crate::session_options::SessionOptions;
use crate::time::Time;
use crate::wire::{Body, Done, Failed, Progress, Register};

/// Most parts of one attempt: a peer that claims more is lying.
const MAX_PARTS: u32 = 1 << 22;
/// Most gaps among the parts that have arrived.
const MAX_PART_RUNS: usize = 1 << 16;

/// All receiving sessions of a worker.
#[derive(Debug, Default)]
#[cfg_attr(feature = "model", derive(Clone))]
pub(in crate::proto) struct Receiving {
    sessions: BTreeMap<SessionId, ReceiveSession>,
}

impl Receiving {
    /// How many sessions have not ended, or have pages that have not come back.
    pub(in crate::proto) fn len(&self) -> usize {
        self.sessions.len()
    }

    pub(in crate::proto) fn ids(&self) -> impl Iterator<Item = SessionId> {
        self.sessions.keys().copied()
    }

    pub(in crate::proto) fn deadline(&self, session: SessionId) -> Option<Duration> {
        self.sessions.get(&session).map(|receiver| receiver.deadline)
    }
}

/// A receiving session.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
struct ReceiveSession {
    room: Room,
    deadline: Duration,
    opened: Time,
    poll: KvPoll,
    mode: TransferMode,
    /// It reads, instead of being written to. Decided when all sources are met.
    pulls: bool,
    /// The sender's session that is meant.
    grants: Vec<GrantRef>,
    question: Question,
    given: Option<(Pages, Option<AuxIndex>)>,
    /// Items of state groups, given before the pages.
    groups: Option<Groups>,
    /// The groups among them that no source has. Known from the moment at which the pages are given.
    unheld: Vec<u16>,
    /// Pages of the request that are here already; the given ones come after them.
    prefix: usize,
    /// Pages that the request has on this rank in all, if they are dealt to ranks and that was told.
    whole: Option<usize>,
    sources: Vec<Source>,
    repeats: u32,
    /// Why it failed, as its sources are told.
    failure: Option<PeerCause>,
}

#[derive(Debug, Clone)]
struct Source {
    peer: PeerId,
    state: SourceState,
    attempt: Option<Attempt>,
    /// The peer has the registration, or the claim.
    registered: bool,
    parts: RunSet,
    total: Option<u32>,
    /// Groups that the source has left out.
    skipped: Vec<u16>,
    /// In pull mode: the grant, once it has come.
    reading: Option<Reading>,
    last_news: Time,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SourceState {
    Meeting,
    Met,
    Open,
    Closing,
    Over,
}

impl ReceiveSession {
    /// True if nothing was heard about the source's registered attempt for a while.
    fn is_quiet(&self, source: usize, now: Time, quiet: Duration) -> bool {
        self.sources.get(source).is_some_and(|source| {
            // With a grant there are heartbeats.
            let waits = source.state == SourceState::Open && source.registered && source.reading.is_none();
            waits && now - source.last_news >= quiet
        })
    }

    pub(in crate::proto) fn phase(&self) -> Phase {
        if self.sources.is_empty() {
            Phase::Bootstrap
        } else if each(self.sources.iter()).any(|source| source.state == SourceState::Meeting) {
            Phase::Handshake
        } else if each(self.sources.iter()).all(|source| source.parts.len() == 0 && source.reading.is_none())
        {
            Phase::Rendezvous
        } else {
            Phase::Transfer
        }
    }

    fn all(&self, state: SourceState) -> bool {
        each(self.sources.iter()).all(|source| source.state == state)
    }
}

impl Receiving {
    pub(in crate::proto) fn open_receiver(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        room: Room,
        addr: String,
        options: SessionOptions,
    ) {
        let deadline = options.deadline.unwrap_or(cx.config.timing.session_deadline).min(LONGEST);
        let role = options.source.unwrap_or(WorkerRole::Prefill);
        let question = cx.lookups.question(&addr, role, &room, options.prefill_dp_rank);
        let mode = options.mode.unwrap_or(cx.config.args.transfer_mode());
        let geometry = cx.config.args.geometry();
        let dealt = options.tokens.filter(|_| geometry.layout.context_size > 1);
        let receiver = ReceiveSession {
            room,
            deadline,
            opened: cx.fx.now(),
            poll: KvPoll::Bootstrapping,
            mode,
            pulls: mode == TransferMode::Pull,
            grants: options.grants,
            question,
            given: None,
            groups: None,
            unheld: Vec::new(),
            prefix: options.prefix_pages,
            whole: dealt.map(|tokens| geometry.own_pages_of(tokens)),
            sources: Vec::new(),
            repeats: 0,
            failure: None,
        };
        self.sessions.insert(session, receiver);
        cx.fx.status(session, KvPoll::Bootstrapping, None);
        if cx.stopping {
            return self.fail_receiver(cx, session, Cause::WorkerStopped);
        }
        cx.fx.arm(Timer::Deadline(session), cx.fx.now() + deadline);
        if let Some(cause) = self.note_receiver(cx, session) {
            return self.fail_receiver(cx, session, cause);
        }
        self.find_sources(cx, session);
    }

    /// Notes the room of a receiver of an engine that adds suffixes. If another one is open whose id differs
    /// in nothing but the suffix, the other side could take the one for the other: that is the cause.
    fn note_receiver(&mut self, cx: &mut Context, session: SessionId) -> Option<Cause> {
        if !cx.config.args.suffixes_requests() {
            return None;
        }
        let named = Named::new(self.sessions.get(&session)?.room.clone(), true);
        let open = &mut cx.rendezvous.receivers;
        let other = match open.find(&named) {
            Ok(found) => found.and_then(|other| self.sessions.get(&other)).map(|other| other.room.clone()),
            Err((one, _)) => Some(one),
        };
        open.insert(&named, session);
        let room = named.room;
        other.filter(|other| *other != room).map(|other| Cause::AmbiguousRoom { room, other })
    }

    /// The receiver has ended.
    fn forget_room(&mut self, cx: &mut Context, session: SessionId) {
        if let Some(receiver) = self.sessions.get(&session).filter(|_| cx.config.args.suffixes_requests()) {
            cx.rendezvous.receivers.remove(&Named::new(receiver.room.clone(), true), session);
        }
    }

    fn take_sources(&mut self, cx: &mut Context, session: SessionId, peers: &[PeerId]) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        if receiver.poll.is_terminal() {
            return;
        }
        for &peer in each(peers) {
            receiver.sources.push(Source {
                peer,
                state: SourceState::Meeting,
                attempt: None,
                registered: false,
                parts: RunSet::default(),
                total: None,
                skipped: Vec::new(),
                reading: None,
                last_news: cx.fx.now(),
            });
        }
        for &id in each(peers) {
            if let Some(peer) = cx.peers.get_mut(id) {
                peer.outgoing_mut().wait(session);
                cx.watch_peer(id);
            }
        }
        self.source_came_up(cx, session);
    }

    /// A peer that the session waited for is up.
    pub(in crate::proto) fn source_came_up(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        for source in each(&mut receiver.sources) {
            if source.state == SourceState::Meeting
                && cx.peers.get(source.peer).is_some_and(|peer| peer.is_up())
            {
                source.state = SourceState::Met;
            }
        }
        let met = each(receiver.sources.iter()).filter(|source| source.state == SourceState::Met);
        let refusal = met.filter_map(|source| cx.peers.get(source.peer)?.refuses().cloned()).next();
        if let Some(cause) = refusal {
            return self.fail_receiver(cx, session, cause);
        }
        if receiver.poll != KvPoll::Bootstrapping || !receiver.all(SourceState::Met) {
            return;
        }
        receiver.poll = KvPoll::WaitingForInput;
        if receiver.mode == TransferMode::Auto {
            let ways = each(receiver.sources.iter()).filter_map(|source| cx.peers.get(source.peer));
            let good = ways.fold(Directions::BOTH, |good, peer| good.and(peer.directions()));
            // A reference is a sender's that waits for nobody: reading needs no registration first.
            receiver.pulls = good.read && (!receiver.grants.is_empty() || !good.write);
        }
        let pulls = receiver.pulls;
        cx.fx.status(session, KvPoll::WaitingForInput, None);
        if pulls {
            if let Some(cause) = self.check_grants(cx, session) {
                return self.fail_receiver(cx, session, cause);
            }
            // The sender's pages are claimed at once: their lease is kept alive from now on, however
            // long the request waits for pages of its own.
            self.open_attempts(cx, session);
            self.say_registrations(cx, session);
        }
        self.register(cx, session);
    }

    pub(in crate::proto) fn init_receiver(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        pages: Pages,
        aux: Option<AuxIndex>,
    ) {
        let geometry = cx.config.args.geometry();
        let bad = pages.list().check_below(geometry.num_pages).err().map(Cause::BadPages);
        let bad = bad.or_else(|| check_aux(aux, geometry.aux_rows().unwrap_or(0)));
        let Some(receiver) = self.sessions.get_mut(&session) else {
            return cx.fx.release(session, pages);
        };
        if receiver.poll.is_terminal() {
            return cx.fx.release(session, pages);
        }
        if receiver.given.is_some() {
            self.fail_receiver(cx, session, Cause::InitOrder);
            return cx.fx.release(session, pages);
        }
        receiver.given = Some((pages, aux));
        match bad {
            Some(cause) => self.fail_receiver(cx, session, cause),
            None => self.register(cx, session),
        }
    }

    /// Registers at all sources, once pages and peers are there.
    fn register(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get(&session) else { return };
        if receiver.poll != KvPoll::WaitingForInput || receiver.given.is_none() {
            return;
        }
        let unheld = self.unheld_groups(cx, receiver);
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        receiver.unheld = unheld;
        receiver.poll = KvPoll::Transferring;
        let (pulls, sources) = (receiver.pulls, receiver.sources.len());
        cx.fx.status(session, KvPoll::Transferring, None);
        if pulls {
            for index in each(0..sources) {
                self.start_reading(cx, session, index);
            }
        } else {
            self.open_attempts(cx, session);
            self.say_registrations(cx, session);
        }
    }

    fn open_attempts(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        for (index, source) in each(receiver.sources.iter_mut().enumerate()) {
            let Some(peer) = cx.peers.get_mut(source.peer) else { continue };
            source.attempt = Some(peer.outgoing_mut().open(session, index));
            source.state = SourceState::Open;
            source.last_news = cx.fx.now();
        }
    }

    /// Why the grants cannot be the sources'.
    fn check_grants(&self, cx: &Context, session: SessionId) -> Option<Cause> {
        let receiver = self.sessions.get(&session)?;
        let first = receiver.grants.first()?;
        let sources = || each(receiver.sources.iter()).filter_map(|source| cx.peers.get(source.peer));
        let unnamed = |peer: &&Peer| of_life(&receiver.grants, peer.incarnation()).is_none();
        // One grant may be of any source, and the others are claimed by the room. Several name all.
        let stale = match receiver.grants.len() {
            1 if sources().all(|peer| unnamed(&peer)) => sources().next(),
            1 => None,
            _ => sources().find(unnamed),
        };
        if let Some(peer) = stale {
            return Some(Cause::StaleGrant { referenced: first.incarnation, found: peer.incarnation() });
        }
        sources().find_map(|peer| {
            let pages = of_life(&receiver.grants, peer.incarnation())?.pages.as_ref()?;
            pages.check_below(peer.maps().geometry().num_pages).err().map(Cause::GrantOutOfRange)
        })
    }

    /// Sends the registrations that were not acknowledged, and sets the time of the next try.
    fn say_registrations(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        let (pages, aux) = match &receiver.given {
            Some((pages, aux)) => (pages.list().clone(), *aux),
            None if receiver.pulls => (PageList::default(), None),
            None => return,
        };
        let groups = receiver.groups.as_ref().filter(|_| !receiver.pulls).map(Groups::lists);
        let (pulls, grants) = (receiver.pulls, receiver.grants.clone());
        // A little longer than this side waits: its own deadline shall end it, not the peer's patience.
        let left = receiver.deadline.saturating_sub(cx.fx.now() - receiver.opened);
        let ttl = left + cx.config.timing.retry_first;
        let mut frames = Vec::new();
        for (index, source) in each(receiver.sources.iter().enumerate()) {
            let (SourceState::Open, false, Some(attempt)) = (source.state, source.registered, source.attempt)
            else {
                continue;
            };
            let Some(peer) = cx.peers.get(source.peer) else { continue };
            let share = peer.maps().geometry().parallel.page_range(pages.len());
            let number = |pages: usize| u32::try_from(pages).unwrap_or(u32::MAX);
            let register = Register {
                attempt,
                floor: peer.outgoing().floor(),
                room: receiver.room.clone(),
                pages: pages.slice(share.start, share.len()).unwrap_or_default(),
                first: number(receiver.prefix.saturating_add(share.start)),
                whole: number(receiver.prefix.saturating_add(pages.len())),
                aux,
                // The first source is the one whose row counts.
                aux_here: index == 0,
                ranks: peer.maps().ranks_served(),
                ttl_ms: u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX),
                groups: groups.clone().unwrap_or_default(),
                ask: 0,
                permit_ms: 0,
            };
            frames.push((source.peer, register));
        }
        if frames.is_empty() {
            return;
        }
        receiver.repeats += 1;
        let repeats = receiver.repeats;
        for (peer, mut register) in each(frames) {
            cx.watch_peer(peer);
            let body = match pulls {
                true => cx.claim(peer, register, &grants),
                false => {
                    (register.ask, register.permit_ms) = cx.permit(peer);
                    Body::Register(register)
                }
            };
            if !cx.send_long(peer, &body) {
                // It would never arrive.
                let cause = Cause::Protocol("pages too scattered for one frame");
                return self.fail_receiver(cx, session, cause);
            }
        }
        let pause = cx.fx.backoff(cx.config.timing.retry_first, repeats);
        cx.fx.arm(Timer::Repeat(session), cx.fx.now() + pause);
    }

    pub(in crate::proto) fn on_repeat(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get(&session) else { return };
        match receiver.poll {
            KvPoll::Failed => self.say_aborts(cx, session),
            _ => {
                self.say_registrations(cx, session);
                self.ask_for_proof(cx, session);
            }
        }
    }

    /// The source with this open attempt at the peer.
    fn source_of(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        attempt: Attempt,
    ) -> Option<(SessionId, usize, &mut Source, bool)> {
        let (session, index) = cx.peers.get(id)?.outgoing().of(attempt)?;
        let receiver = self.sessions.get_mut(&session)?;
        let live = !receiver.poll.is_terminal();
        let source = receiver.sources.get_mut(index)?;
        Some((session, index, source, live))
    }

    pub(in crate::proto) fn on_registered(&mut self, cx: &mut Context, id: PeerId, attempt: Attempt) {
        let now = cx.fx.now();
        if let Some((_, _, source, _)) = self.source_of(cx, id, attempt) {
            source.registered = true;
            source.last_news = now;
        }
    }

    pub(in crate::proto) fn on_done(&mut self, cx: &mut Context, id: PeerId, done: Done) {
        self.parts_arrived(cx, id, done.attempt, &[(done.part, 1)], (done.total, done.skipped));
    }

    pub(in crate::proto) fn on_progress(&mut self, cx: &mut Context, id: PeerId, progress: Progress) {
        self.parts_arrived(cx, id, progress.attempt, &progress.done, (progress.total, progress.skipped));
    }

    fn parts_arrived(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        attempt: Attempt,
        runs: &[(u32, u32)],
        (total, skipped): (Option<u32>, Vec<u16>),
    ) {
        let now = cx.fx.now();
        let Some((session, index, source, live)) = self.source_of(cx, id, attempt) else { return };
        if !live || source.state != SourceState::Open || source.reading.is_some() {
            return;
        }
        source.registered = true;
        source.last_news = now;
        if skipped.len() > MAX_REQUEST_GROUPS {
            return self.fail_receiver(
                cx,
                session,
                Cause::Protocol("more groups left out than a request has"),
            );
        }
        for &(start, count) in each(runs) {
            source.parts.insert(u64::from(start), u64::from(count));
        }
        let contradiction = matches!((source.total, total), (Some(before), Some(now)) if before != now);
        source.total = source.total.or(total);
        if total.is_some() {
            source.skipped = skipped;
        }
        let bound = u64::from(source.total.unwrap_or(MAX_PARTS).min(MAX_PARTS));
        if contradiction || source.parts.end() > bound || source.parts.runs_len() > MAX_PART_RUNS {
            return self.fail_receiver(cx, session, Cause::Protocol("impossible part numbers"));
        }
        if source.total.is_some_and(|total| source.parts.len() == u64::from(total)) {
            if let Some(cause) = self.check_skipped(cx, session, index) {
                return self.fail_receiver(cx, session, cause);
            }
            self.source_over(cx, session, index);
            self.maybe_succeed(cx, session);
        }
    }

    fn maybe_succeed(&mut self, cx: &mut Context, session: SessionId) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        if receiver.poll != KvPoll::Transferring || !receiver.all(SourceState::Over) {
            return;
        }
        receiver.poll = KvPoll::Success;
        self.forget_room(cx, session);
        cx.fx.status(session, KvPoll::Success, None);
        self.retire_receiver(cx, session);
    }

    pub(in crate::proto) fn on_failed(&mut self, cx: &mut Context, id: PeerId, failed: Failed) {
        let Some((session, index, source, live)) = self.source_of(cx, id, failed.attempt) else {
            // Over for us: let the peer forget it too.
            return cx.say_finish(id, failed.attempt);
        };
        if source.state == SourceState::Over {
            return;
        }
        if failed.quiet {
            // No abort is needed for this source.
            self.source_over(cx, session, index);
        }
        if live {
            let cause = match failed.cause {
                PeerCause::LeaseExpired => Cause::LeaseExpired,
                cause => Cause::ByPeer(cause),
            };
            self.fail_receiver(cx, session, cause);
        } else {
            self.maybe_retire(cx, session);
        }
    }

    pub(in crate::proto) fn on_abort_ack(&mut self, cx: &mut Context, id: PeerId, attempt: Attempt) {
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.outgoing_mut().acknowledged(attempt..Attempt(attempt.0.saturating_add(1)));
        }
        let Some((session, index, source, _)) = self.source_of(cx, id, attempt) else { return };
        if source.state == SourceState::Closing {
            self.source_over(cx, session, index);
            self.maybe_retire(cx, session);
        }
    }

    /// The source writes no more, and that is certain. The peer may forget the attempt.
    fn source_over(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let Some(receiver) = self.sessions.get_mut(&session) else { return };
        let Some(source) = receiver.sources.get_mut(index) else { return };
        source.state = SourceState::Over;
        let (id, attempt) = (source.peer, source.attempt);
        cx.fx.cancel(Timer::Quiet(session, id));
        if let (Some(attempt), Some(peer)) = (attempt, cx.peers.get_mut(id)) {
            peer.outgoing_mut().end(attempt);
            cx.say_finish(id, attempt);
        }
    }

    /// Hands the pages of a failed session back once all its sources are over.
    fn maybe_retire(&mut self, cx: &mut Context, session: SessionId) {
        let retire = self
            .sessions
            .get(&session)
            .is_some_and(|receiver| receiver.poll == KvPoll::Failed && receiver.all(SourceState::Over));
        if retire && !cx.posts.has_any_of(session) {
            self.retire_receiver(cx, session);
        }
    }

    fn retire_receiver(&mut self, cx: &mut Context, session: SessionId) {
        cx.fx.cancel(Timer::Deadline(session));
        cx.fx.cancel(Timer::Repeat(session));
        let Some(receiver) = self.sessions.remove(&session) else { return };
        for source in each(&receiver.sources) {
            cx.stop_beating_if_idle(source.peer);
        }
        let skipped = receiver.skipped_groups();
        if let Some((pages, _)) = receiver.given {
            cx.fx.release(session, pages);
        }
        if let Some(groups) = receiver.groups {
            cx.fx.release_groups(session, groups, skipped);
        }
    }
}

/// Checks an aux row against the number of rows.
pub(in crate::proto) fn check_aux(aux: Option<AuxIndex>, rows: u32) -> Option<Cause> {
    match aux {
        Some(AuxIndex(index)) if index >= rows => Some(Cause::BadAux { index, rows }),
        _ => None,
    }
}
