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

use std::time::Duration;

use super::directory::Question;
use super::io::{LONGEST, Output};
use super::node::{Node, encode};
use super::peer::Peer;
use super::read::{Reading, of_life};
use super::rendezvous::Named;
use super::run_set::RunSet;
use super::timer::Timer;
use crate::bootstrap::WorkerRole;
use crate::error::{Cause, PeerCause, Phase};
use crate::groups::{Groups, MAX_REQUEST_GROUPS};
use crate::id::{Attempt, AuxIndex, PeerId, Room, SessionId};
use crate::lease::{GrantRef, TransferMode};
use crate::meter::each;
use crate::pages::{PageList, Pages};
use crate::plane::Directions;
use crate::poll::KvPoll;
use crate::session_options::SessionOptions;
use crate::time::Time;
use crate::wire::{Body, Done, Failed, Finish, Progress, Register};

/// Most parts of one attempt: a peer that claims more is lying.
const MAX_PARTS: u32 = 1 << 22;
/// Most gaps among the parts that have arrived.
const MAX_PART_RUNS: usize = 1 << 16;

/// A receiving session.
#[derive(Debug)]
pub(super) struct ReceiveSession {
    pub(super) room: Room,
    pub(super) deadline: Duration,
    pub(super) opened: Time,
    pub(super) poll: KvPoll,
    pub(super) mode: TransferMode,
    /// It reads, instead of being written to. Decided when all sources are met.
    pub(super) pulls: bool,
    /// The sender's session that is meant.
    pub(super) grants: Vec<GrantRef>,
    pub(super) question: Question,
    pub(super) given: Option<(Pages, Option<AuxIndex>)>,
    /// Items of state groups, given before the pages.
    pub(super) groups: Option<Groups>,
    /// The groups among them that no source has. Known from the moment at which the pages are given.
    pub(super) unheld: Vec<u16>,
    /// Pages of the request that are here already; the given ones come after them.
    pub(super) prefix: usize,
    /// Pages that the request has on this rank in all, if they are dealt to ranks and that was told.
    pub(super) whole: Option<usize>,
    pub(super) sources: Vec<Source>,
    pub(super) repeats: u32,
    /// Why it failed, as its sources are told.
    pub(super) failure: Option<PeerCause>,
}

#[derive(Debug, Clone)]
pub(super) struct Source {
    pub(super) peer: PeerId,
    pub(super) state: SourceState,
    pub(super) attempt: Option<Attempt>,
    /// The peer has the registration, or the claim.
    pub(super) registered: bool,
    pub(super) parts: RunSet,
    pub(super) total: Option<u32>,
    /// Groups that the source has left out.
    pub(super) skipped: Vec<u16>,
    /// In pull mode: the grant, once it has come.
    pub(super) reading: Option<Reading>,
    pub(super) last_news: Time,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SourceState {
    Meeting,
    Met,
    Open,
    Closing,
    Over,
}

impl ReceiveSession {
    /// True if nothing was heard about the source's registered attempt for a while.
    pub(super) fn is_quiet(&self, source: usize, now: Time, quiet: Duration) -> bool {
        self.sources.get(source).is_some_and(|source| {
            // With a grant there are heartbeats.
            let waits = source.state == SourceState::Open && source.registered && source.reading.is_none();
            waits && now - source.last_news >= quiet
        })
    }

    pub(super) fn phase(&self) -> Phase {
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

impl Node {
    pub(super) fn open_receiver(
        &mut self,
        session: SessionId,
        room: Room,
        addr: String,
        options: SessionOptions,
    ) {
        let deadline = options.deadline.unwrap_or(self.config.timing.session_deadline).min(LONGEST);
        let role = options.source.unwrap_or(WorkerRole::Prefill);
        let question = self.directory.question(&addr, role, &room, options.prefill_dp_rank);
        let mode = options.mode.unwrap_or(self.config.args.transfer_mode());
        let geometry = self.config.args.geometry();
        let dealt = options.tokens.filter(|_| geometry.layout.context_size > 1);
        let receiver = ReceiveSession {
            room,
            deadline,
            opened: self.now,
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
        self.receivers.insert(session, receiver);
        self.status(session, KvPoll::Bootstrapping, None);
        if self.stopping {
            return self.fail_receiver(session, Cause::WorkerStopped);
        }
        self.timers.arm(Timer::Deadline(session), self.now + deadline);
        if let Some(cause) = self.note_receiver(session) {
            return self.fail_receiver(session, cause);
        }
        self.find_sources(session);
    }

    /// Notes the room of a receiver of an engine that adds suffixes. If another one is open whose id differs
    /// in nothing but the suffix, the other side could take the one for the other: that is the cause.
    fn note_receiver(&mut self, session: SessionId) -> Option<Cause> {
        if !self.config.args.suffixes_requests() {
            return None;
        }
        let named = Named::new(self.receivers.get(&session)?.room.clone(), true);
        let open = &mut self.rendezvous.receivers;
        let other = match open.find(&named) {
            Ok(found) => found.and_then(|other| self.receivers.get(&other)).map(|other| other.room.clone()),
            Err((one, _)) => Some(one),
        };
        open.insert(&named, session);
        let room = named.room;
        other.filter(|other| *other != room).map(|other| Cause::AmbiguousRoom { room, other })
    }

    /// The receiver has ended.
    pub(super) fn forget_room(&mut self, session: SessionId) {
        if let Some(receiver) = self.receivers.get(&session).filter(|_| self.config.args.suffixes_requests())
        {
            self.rendezvous.receivers.remove(&Named::new(receiver.room.clone(), true), session);
        }
    }

    pub(super) fn take_sources(&mut self, session: SessionId, peers: &[PeerId]) {
        let Some(receiver) = self.receivers.get_mut(&session) else { return };
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
                last_news: self.now,
            });
        }
        for &id in each(peers) {
            if let Some(peer) = self.peers.get_mut(id) {
                peer.waiting.insert(session);
                self.watch_peer(id);
            }
        }
        self.source_came_up(session);
    }

    /// A peer that the session waited for is up.
    pub(super) fn source_came_up(&mut self, session: SessionId) {
        let Some(receiver) = self.receivers.get_mut(&session) else { return };
        for source in each(&mut receiver.sources) {
            if source.state == SourceState::Meeting
                && self.peers.get(source.peer).is_some_and(|peer| peer.is_up())
            {
                source.state = SourceState::Met;
            }
        }
        let met = each(receiver.sources.iter()).filter(|source| source.state == SourceState::Met);
        let refusal = met.filter_map(|source| self.peers.get(source.peer)?.refuses.clone()).next();
        if let Some(cause) = refusal {
            return self.fail_receiver(session, cause);
        }
        if receiver.poll != KvPoll::Bootstrapping || !receiver.all(SourceState::Met) {
            return;
        }
        receiver.poll = KvPoll::WaitingForInput;
        if receiver.mode == TransferMode::Auto {
            let ways = each(receiver.sources.iter()).filter_map(|source| self.peers.get(source.peer));
            let good = ways.fold(Directions::BOTH, |good, peer| good.and(peer.directions));
            // A reference is a sender's that waits for nobody: reading needs no registration first.
            receiver.pulls = good.read && (!receiver.grants.is_empty() || !good.write);
        }
        let pulls = receiver.pulls;
        self.status(session, KvPoll::WaitingForInput, None);
        if pulls {
            if let Some(cause) = self.check_grants(session) {
                return self.fail_receiver(session, cause);
            }
            // The sender's pages are claimed at once: their lease is kept alive from now on, however
            // long the request waits for pages of its own.
            self.open_attempts(session);
            self.say_registrations(session);
        }
        self.register(session);
    }

    pub(super) fn init_receiver(&mut self, session: SessionId, pages: Pages, aux: Option<AuxIndex>) {
        let geometry = self.config.args.geometry();
        let bad = pages.list().check_below(geometry.num_pages).err().map(Cause::BadPages);
        let bad = bad.or_else(|| check_aux(aux, geometry.aux_rows().unwrap_or(0)));
        let Some(receiver) = self.receivers.get_mut(&session) else {
            return self.output(Output::Release { session, resource: pages.into() });
        };
        if receiver.poll.is_terminal() {
            return self.output(Output::Release { session, resource: pages.into() });
        }
        if receiver.given.is_some() {
            self.fail_receiver(session, Cause::InitOrder);
            return self.output(Output::Release { session, resource: pages.into() });
        }
        receiver.given = Some((pages, aux));
        match bad {
            Some(cause) => self.fail_receiver(session, cause),
            None => self.register(session),
        }
    }

    /// Registers at all sources, once pages and peers are there.
    fn register(&mut self, session: SessionId) {
        let Some(receiver) = self.receivers.get(&session) else { return };
        if receiver.poll != KvPoll::WaitingForInput || receiver.given.is_none() {
            return;
        }
        let unheld = self.unheld_groups(receiver);
        let Some(receiver) = self.receivers.get_mut(&session) else { return };
        receiver.unheld = unheld;
        receiver.poll = KvPoll::Transferring;
        let (pulls, sources) = (receiver.pulls, receiver.sources.len());
        self.status(session, KvPoll::Transferring, None);
        if pulls {
            for index in each(0..sources) {
                self.start_reading(session, index);
            }
        } else {
            self.open_attempts(session);
            self.say_registrations(session);
        }
    }

    fn open_attempts(&mut self, session: SessionId) {
        let Some(receiver) = self.receivers.get_mut(&session) else { return };
        for (index, source) in each(receiver.sources.iter_mut().enumerate()) {
            let Some(peer) = self.peers.get_mut(source.peer) else { continue };
            source.attempt = Some(peer.open_attempt(session, index));
            source.state = SourceState::Open;
            source.last_news = self.now;
        }
    }

    /// Why the grants cannot be the sources'.
    fn check_grants(&self, session: SessionId) -> Option<Cause> {
        let receiver = self.receivers.get(&session)?;
        let first = receiver.grants.first()?;
        let sources = || each(receiver.sources.iter()).filter_map(|source| self.peers.get(source.peer));
        let unnamed = |peer: &&Peer| of_life(&receiver.grants, peer.incarnation).is_none();
        // One grant may be of any source, and the others are claimed by the room. Several name all.
        let stale = match receiver.grants.len() {
            1 if sources().all(|peer| unnamed(&peer)) => sources().next(),
            1 => None,
            _ => sources().find(unnamed),
        };
        if let Some(peer) = stale {
            return Some(Cause::StaleGrant { referenced: first.incarnation, found: peer.incarnation });
        }
        sources().find_map(|peer| {
            let pages = of_life(&receiver.grants, peer.incarnation)?.pages.as_ref()?;
            pages.check_below(peer.geometry.num_pages).err().map(Cause::GrantOutOfRange)
        })
    }

    /// Sends the registrations that were not acknowledged, and sets the time of the next try.
    pub(super) fn say_registrations(&mut self, session: SessionId) {
        let Some(receiver) = self.receivers.get_mut(&session) else { return };
        let (pages, aux) = match &receiver.given {
            Some((pages, aux)) => (pages.list().clone(), *aux),
            None if receiver.pulls => (PageList::default(), None),
            None => return,
        };
        let groups = receiver.groups.as_ref().filter(|_| !receiver.pulls).map(Groups::lists);
        let (pulls, grants) = (receiver.pulls, receiver.grants.clone());
        // A little longer than this side waits: its own deadline shall end it, not the peer's patience.
        let left = receiver.deadline.saturating_sub(self.now - receiver.opened);
        let ttl = left + self.config.timing.retry_first;
        let mut frames = Vec::new();
        for (index, source) in each(receiver.sources.iter().enumerate()) {
            let (SourceState::Open, false, Some(attempt)) = (source.state, source.registered, source.attempt)
            else {
                continue;
            };
            let Some(peer) = self.peers.get(source.peer) else { continue };
            let share = peer.geometry.parallel.page_range(pages.len());
            let number = |pages: usize| u32::try_from(pages).unwrap_or(u32::MAX);
            let register = Register {
                attempt,
                floor: peer.outgoing_floor(),
                room: receiver.room.clone(),
                pages: pages.slice(share.start, share.len()).unwrap_or_default(),
                first: number(receiver.prefix.saturating_add(share.start)),
                whole: number(receiver.prefix.saturating_add(pages.len())),
                aux,
                // The first source is the one whose row counts.
                aux_here: index == 0,
                ranks: peer.ranks_served,
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
            self.watch_peer(peer);
            let body = match pulls {
                true => self.claim(peer, register, &grants),
                false => {
                    (register.ask, register.permit_ms) = self.permit(peer);
                    Body::Register(register)
                }
            };
            let link = self.peers.get(peer).and_then(|peer| peer.theirs);
            match link.map(|link| encode(link, body)) {
                Some(Some(frame)) => self.output(Output::Send { peer, frame }),
                // It would never arrive.
                Some(None) => {
                    let cause = Cause::Protocol("pages too scattered for one frame");
                    return self.fail_receiver(session, cause);
                }
                None => {}
            }
        }
        let pause = self.backoff(self.config.timing.retry_first, repeats);
        self.timers.arm(Timer::Repeat(session), self.now + pause);
    }

    pub(super) fn on_repeat(&mut self, session: SessionId) {
        let Some(receiver) = self.receivers.get(&session) else { return };
        match receiver.poll {
            KvPoll::Failed => self.say_aborts(session),
            _ => {
                self.say_registrations(session);
                self.ask_for_proof(session);
            }
        }
    }

    /// The source with this open attempt at the peer.
    fn source_of(&mut self, id: PeerId, attempt: Attempt) -> Option<(SessionId, usize, &mut Source, bool)> {
        let &(session, index) = self.peers.get(id)?.outgoing.get(&attempt)?;
        let receiver = self.receivers.get_mut(&session)?;
        let live = !receiver.poll.is_terminal();
        let source = receiver.sources.get_mut(index)?;
        Some((session, index, source, live))
    }

    pub(super) fn on_registered(&mut self, id: PeerId, attempt: Attempt) {
        let now = self.now;
        if let Some((_, _, source, _)) = self.source_of(id, attempt) {
            source.registered = true;
            source.last_news = now;
        }
    }

    pub(super) fn on_done(&mut self, id: PeerId, done: Done) {
        self.parts_arrived(id, done.attempt, &[(done.part, 1)], (done.total, done.skipped));
    }

    pub(super) fn on_progress(&mut self, id: PeerId, progress: Progress) {
        self.parts_arrived(id, progress.attempt, &progress.done, (progress.total, progress.skipped));
    }

    fn parts_arrived(
        &mut self,
        id: PeerId,
        attempt: Attempt,
        runs: &[(u32, u32)],
        (total, skipped): (Option<u32>, Vec<u16>),
    ) {
        let now = self.now;
        let Some((session, index, source, live)) = self.source_of(id, attempt) else { return };
        if !live || source.state != SourceState::Open || source.reading.is_some() {
            return;
        }
        source.registered = true;
        source.last_news = now;
        if skipped.len() > MAX_REQUEST_GROUPS {
            return self.fail_receiver(session, Cause::Protocol("more groups left out than a request has"));
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
            return self.fail_receiver(session, Cause::Protocol("impossible part numbers"));
        }
        if source.total.is_some_and(|total| source.parts.len() == u64::from(total)) {
            if let Some(cause) = self.check_skipped(session, index) {
                return self.fail_receiver(session, cause);
            }
            self.source_over(session, index);
            self.maybe_succeed(session);
        }
    }

    pub(super) fn maybe_succeed(&mut self, session: SessionId) {
        let Some(receiver) = self.receivers.get_mut(&session) else { return };
        if receiver.poll != KvPoll::Transferring || !receiver.all(SourceState::Over) {
            return;
        }
        receiver.poll = KvPoll::Success;
        self.forget_room(session);
        self.status(session, KvPoll::Success, None);
        self.retire_receiver(session);
    }

    pub(super) fn on_failed(&mut self, id: PeerId, failed: Failed) {
        let Some((session, index, source, live)) = self.source_of(id, failed.attempt) else {
            // Over for us: let the peer forget it too.
            return self.say_finish(id, failed.attempt);
        };
        if source.state == SourceState::Over {
            return;
        }
        if failed.quiet {
            // No abort is needed for this source.
            self.source_over(session, index);
        }
        if live {
            let cause = match failed.cause {
                PeerCause::LeaseExpired => Cause::LeaseExpired,
                cause => Cause::ByPeer(cause),
            };
            self.fail_receiver(session, cause);
        } else {
            self.maybe_retire(session);
        }
    }

    pub(super) fn on_abort_ack(&mut self, id: PeerId, attempt: Attempt) {
        if let Some(peer) = self.peers.get_mut(id) {
            peer.releasing.remove(&attempt);
        }
        let Some((session, index, source, _)) = self.source_of(id, attempt) else { return };
        if source.state == SourceState::Closing {
            self.source_over(session, index);
            self.maybe_retire(session);
        }
    }

    /// The source writes no more, and that is certain. The peer may forget the attempt.
    fn source_over(&mut self, session: SessionId, index: usize) {
        let Some(receiver) = self.receivers.get_mut(&session) else { return };
        let Some(source) = receiver.sources.get_mut(index) else { return };
        source.state = SourceState::Over;
        let (id, attempt) = (source.peer, source.attempt);
        self.timers.cancel(Timer::Quiet(session, id));
        if let (Some(attempt), Some(peer)) = (attempt, self.peers.get_mut(id)) {
            peer.end_attempt(attempt);
            self.say_finish(id, attempt);
        }
    }

    /// Lost? Then the floor of a later frame says it.
    fn say_finish(&mut self, id: PeerId, attempt: Attempt) {
        if let Some(peer) = self.peers.get(id)
            && attempt.0 < peer.next_attempt
        {
            let floor = peer.outgoing_floor();
            self.send(id, Body::Finish(Finish { attempt, floor }));
        }
    }

    /// Hands the pages of a failed session back once all its sources are over.
    pub(super) fn maybe_retire(&mut self, session: SessionId) {
        let retire = self
            .receivers
            .get(&session)
            .is_some_and(|receiver| receiver.poll == KvPoll::Failed && receiver.all(SourceState::Over));
        if retire && !self.posting.has_any_of(session) {
            self.retire_receiver(session);
        }
    }

    fn retire_receiver(&mut self, session: SessionId) {
        self.timers.cancel(Timer::Deadline(session));
        self.timers.cancel(Timer::Repeat(session));
        let Some(receiver) = self.receivers.remove(&session) else { return };
        for source in each(&receiver.sources) {
            self.stop_beating_if_idle(source.peer);
        }
        let skipped = receiver.skipped_groups();
        if let Some((pages, _)) = receiver.given {
            self.output(Output::Release { session, resource: pages.into() });
        }
        if let Some(groups) = receiver.groups {
            self.release_groups(session, groups, skipped);
        }
    }
}

/// Checks an aux row against the number of rows.
pub(super) fn check_aux(aux: Option<AuxIndex>, rows: u32) -> Option<Cause> {
    match aux {
        Some(AuxIndex(index)) if index >= rows => Some(Cause::BadAux { index, rows }),
        _ => None,
    }
}
