//! The consumer's part: fetches entries. Sessions that want the same entry share one fetch.
//!
//! ```text
//!              ┌───────── pause over ─────────┐
//!              ▼                              │
//! wanted ─▶ reserve ─ no room, filled here ─▶ pausing ◀─ a passing reason ─┐
//!              │ blocks                       ▲                            │
//!              ▼                              └────────────────────────────┤
//!           moving ─ the inner machine's session fails: blocks given up ───┤
//!              │ it succeeds, and its blocks are back                      └─ any other reason ─▶ Failed
//!              ▼
//!           committed ─▶ Ready, pinned for each session
//! ```
//!
//! Sessions of one fetch may name several producers, which are asked in turn: a producer that does not answer
//! has its place until a session that names another one has half of its time left.
//!
//! A session of a request that has no room for all of its entries pauses until there is room, and is given no entry
//! before (`claims.rs`).
//!
//! A session that is out of budget fails at once. The blocks of a transfer that was given up are free for
//! other entries only when the inner machine has given them back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kv_core::proto::Command;
use kv_core::{
    ContentRequest, KvPoll, Pages, Room, SessionId, SessionOptions, Time, TransferError, TransferMode,
    WorkerRole,
};

use super::command::{EcPoll, Want};
use super::context::Context;
use super::error::EcError;
use super::fetch::{Fetch, Moving, Producer, Step, Waiter};
use super::turns::Turns;
use crate::cache::{Reservation, ReserveError};
use crate::room::Key;

/// The fetches under way.
#[derive(Debug, Default)]
pub(super) struct Fetching {
    fetches: BTreeMap<Key, Fetch>,
    of_session: BTreeMap<SessionId, Key>,
    /// By the inner machine's session.
    of_transfer: BTreeMap<SessionId, Key>,
    /// Transfers that were given up, and whose blocks are not back.
    leaving: BTreeSet<SessionId>,
    turns: Turns,
    timers: BTreeSet<(Time, Timer)>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// The budget of a session is over.
    Budget(SessionId),
    /// The pause of a fetch is over.
    Again(Key),
    /// The sessions that name other producers than the one that is asked cannot wait longer for theirs.
    Turn(Key),
}

impl Fetching {
    // ---- sessions -------------------------------------------------------------------------------

    pub(super) fn open(&mut self, cx: &mut Context, session: SessionId, want: Box<Want>) {
        let budget = want.budget.unwrap_or(cx.config.budget).min(LONGEST);
        let deadline = cx.now + budget;
        self.wait(cx, session, Waiter { want, budget, deadline });
    }

    /// Lets a session wait for its entry.
    fn wait(&mut self, cx: &mut Context, session: SessionId, waiter: Waiter) {
        let key = (waiter.want.hash.clone(), waiter.want.bytes);
        if let Some(why) = waiter.has_ended() {
            return cx.end_fetch(session, Err(why));
        }
        self.timers.insert((waiter.deadline, Timer::Budget(session)));
        self.of_session.insert(session, key.clone());
        if let Some(claim) = &waiter.want.claim {
            self.turns.add(claim, session);
        }
        let fetch = self.fetches.entry(key.clone()).or_insert_with(|| Fetch::new(cx.now));
        let is_first = fetch.waiters.is_empty();
        let turn = waiter.turn(cx.now);
        let producer = waiter.producer();
        let is_in_turn = waiter.waits_for_room().is_none();
        if !is_in_turn {
            self.turns.arm(cx.now);
        }
        fetch.waiters.insert(session, waiter);
        if is_first {
            return self.begin(cx, &key);
        }
        let Step::Moving(moving) = &fetch.step else {
            // The sessions before this one wait for their turns.
            if is_in_turn && fetch.out_of_turn {
                self.begin(cx, &key);
            }
            return;
        };
        if moving.met {
            cx.tell(session, EcPoll::Transferring);
        }
        if moving.producer != producer {
            self.hurry(&key, turn);
        }
    }

    /// Lets a producer take no longer than until then.
    fn hurry(&mut self, key: &Key, until: Time) {
        let Some(Step::Moving(moving)) = self.fetches.get_mut(key).map(|fetch| &mut fetch.step) else {
            return;
        };
        if until < moving.until {
            self.timers.remove(&(moving.until, Timer::Turn(key.clone())));
            moving.until = until;
            self.timers.insert((until, Timer::Turn(key.clone())));
        }
    }

    /// Ends a session for a reason of its own. False if the session wants nothing.
    pub(super) fn leave(&mut self, cx: &mut Context, session: SessionId, why: EcError) -> bool {
        let Some(key) = self.of_session.get(&session).cloned() else { return false };
        self.fail_one(cx, &key, session, why);
        self.drop_unwanted(cx, &key);
        true
    }

    /// All sessions that want something.
    pub(super) fn sessions(&self) -> Vec<SessionId> {
        self.of_session.keys().copied().collect()
    }

    // ---- time -----------------------------------------------------------------------------------

    pub(super) fn next_timeout(&self) -> Option<Time> {
        [self.timers.first().map(|(at, _)| *at), self.turns.next_timeout()].into_iter().flatten().min()
    }

    /// An input has come, after which sessions may begin.
    pub(super) fn begin_turn(&mut self) {
        self.turns.begin();
    }

    /// Does what is due first. False if nothing is due now.
    pub(super) fn tick(&mut self, cx: &mut Context) -> bool {
        let Some(due) = self.timers.first().filter(|(at, _)| *at <= cx.now).cloned() else {
            self.turns.look(cx.now, &cx.store);
            return self.turns.next().map(|session| self.decided(cx, session)).is_some();
        };
        self.timers.remove(&due);
        match due.1 {
            Timer::Budget(session) => self.out_of_budget(cx, session),
            Timer::Again(key) => self.begin(cx, &key),
            Timer::Turn(key) => self.turn_is_over(cx, &key),
        }
        true
    }

    /// The session's request may be in turn now, or never will be.
    fn decided(&mut self, cx: &mut Context, session: SessionId) {
        let Some(key) = self.of_session.get(&session).cloned() else { return };
        let Some(fetch) = self.fetches.get(&key) else { return };
        if let Some(why) = fetch.waiters.get(&session).and_then(Waiter::has_ended) {
            self.leave(cx, session, why);
        } else if fetch.out_of_turn {
            self.begin(cx, &key);
        }
    }

    /// The producer that is asked has had its time: the next one is asked.
    fn turn_is_over(&mut self, cx: &mut Context, key: &Key) {
        if let Some(session) = self.end_try(cx, key, EcError::Turn) {
            cx.command(Command::Abort { session });
        }
    }

    fn out_of_budget(&mut self, cx: &mut Context, session: SessionId) {
        let Some(fetch) = self.of_session.get(&session).and_then(|key| self.fetches.get(key)) else { return };
        let Some(waiter) = fetch.waiters.get(&session) else { return };
        let (after, last) = (waiter.budget, waiter.waits_for_room().or(fetch.last.clone()).map(Box::new));
        self.leave(cx, session, EcError::Budget { after, last });
    }

    // ---- one fetch ------------------------------------------------------------------------------

    /// Begins the next try of a fetch that does not move, or ends it if the entry is here.
    fn begin(&mut self, cx: &mut Context, key: &Key) {
        let Some(fetch) = self.fetches.get_mut(key) else { return };
        let Step::Pausing(until) = fetch.step else { return };
        self.timers.remove(&(until, Timer::Again(key.clone())));
        let waits = fetch.waits_for_room();
        fetch.out_of_turn = waits.is_some();
        if waits.is_some() {
            // No try at a peer, and no timer: the fetch begins once the claim is decided.
            (fetch.last, fetch.step) = (waits, Step::Pausing(Time::MAX));
            self.turns.arm(cx.now);
            return;
        }
        match cx.store.reserve(&key.0, key.1) {
            Ok(reservation) => self.ask(cx, key, reservation),
            Err(ReserveError::Known { ready: true }) => self.deliver(cx, key),
            // Somebody else on this host fills the entry.
            Err(ReserveError::Known { ready: false }) => self.pause(cx, key, LOOK_AGAIN),
            Err(error) => self.try_failed(cx, key, None, EcError::Room(error)),
        }
    }

    /// Opens a session of the inner machine at the next producer that a waiting session names.
    fn ask(&mut self, cx: &mut Context, key: &Key, mut reservation: Reservation) {
        let Some(fetch) = self.fetches.get_mut(key) else { return cx.store.discard(reservation) };
        let Some(next) = fetch.next() else { return cx.store.discard(reservation) };
        let (transfer, producer) = (cx.inner_session(), next.producer());
        let mode = next.want.mode.unwrap_or(cx.config.mode);
        let patience = fetch.waiters.values().map(|waiter| waiter.deadline.since(cx.now)).max();
        let options = SessionOptions::default().with(|options| {
            options.deadline = patience.map(|patience| patience.min(cx.config.try_limit));
            options.mode = Some(mode);
            options.prefill_dp_rank = producer.1;
            options.source = Some(WorkerRole::Encode);
            options.content = Some(ContentRequest::new(key.0.clone(), &*cx.config.compatibility, key.1));
        });
        let (pages, bootstrap_addr) = (reservation.take_pages(), producer.0.clone());
        let others = fetch.waiters.values().filter(|waiter| waiter.producer() != producer);
        let turn = others.map(|waiter| waiter.turn(cx.now)).min();
        fetch.asked = Some(producer.clone());
        let (until, met, arrived) = (Time::MAX, false, false);
        let moving = Moving { transfer, producer, mode, reservation, until, met, arrived };
        fetch.step = Step::Moving(Box::new(moving));
        self.of_transfer.insert(transfer, key.clone());
        if let Some(turn) = turn {
            self.hurry(key, turn);
        }
        let (room, options) = (Room::Number(transfer.0), Box::new(options));
        cx.command(Command::OpenReceiver { session: transfer, room, bootstrap_addr, options });
        cx.command(Command::InitReceiver { session: transfer, pages, aux: None });
    }

    /// Gives the entry, which is here, to all sessions that want it and may have it.
    fn deliver(&mut self, cx: &mut Context, key: &Key) {
        let Some(fetch) = self.fetches.remove(key) else { return };
        for (session, waiter) in fetch.waiters {
            self.forget(session, &waiter);
            // A request has nothing before it has room for all of its entries.
            if waiter.waits_for_room().is_some() {
                self.wait(cx, session, waiter);
                continue;
            }
            let (hash, asked) = key;
            let may_hold = || waiter.want.claim.as_ref().is_none_or(|claim| claim.hold([key.clone()]));
            let entry = match cx.store.pin_guard(hash) {
                Ok(entry) if entry.bytes() == *asked && may_hold() => Ok(entry),
                // The request has lost its room this very moment.
                Ok(entry) if entry.bytes() == *asked => {
                    drop(entry);
                    self.wait(cx, session, waiter);
                    continue;
                }
                Ok(entry) => {
                    waiter.give_up(key);
                    Err(waiter.want.ends(EcError::OtherLength { held: entry.bytes(), asked: *asked }))
                }
                // Another thread has evicted the entry already.
                Err(_) => {
                    self.wait(cx, session, waiter);
                    continue;
                }
            };
            cx.end_fetch(session, entry);
        }
    }

    /// A try has failed: the sessions that a lasting reason concerns fail, and the others wait for the next
    /// try. `asked` is the producer that was asked, if any was, and which side was to move the bytes: where that is
    /// the reason, sessions that want the other side to do so are not concerned.
    fn try_failed(
        &mut self,
        cx: &mut Context,
        key: &Key,
        asked: Option<(&Producer, TransferMode)>,
        why: EcError,
    ) {
        let Some(fetch) = self.fetches.get_mut(key) else { return };
        cx.store.counters().failed_tries.add(1);
        fetch.step = Step::Pausing(cx.now);
        let mut pause = Duration::ZERO;
        if why.is_passing() {
            fetch.tries = fetch.tries.saturating_add(1);
            let first = cx.config.retry_first.max(SHORTEST_PAUSE);
            pause = first.saturating_mul(1 << (fetch.tries - 1).min(16)).min(cx.config.retry_max.max(first));
        } else {
            fetch.tries = 0;
            let mode = |waiter: &Waiter| waiter.want.mode.unwrap_or(cx.config.mode);
            let concerned = |waiter: &Waiter| {
                asked.is_none_or(|(asked, by)| {
                    waiter.producer() == *asked && (!why.is_of_mode() || mode(waiter) == by)
                })
            };
            let failed: Vec<SessionId> =
                fetch.waiters.iter().filter(|(_, waiter)| concerned(waiter)).map(|(id, _)| *id).collect();
            for session in failed {
                self.fail_one(cx, key, session, why.clone());
            }
        }
        if let Some(fetch) = self.fetches.get_mut(key) {
            fetch.last = Some(why);
        }
        self.drop_unwanted(cx, key);
        self.pause(cx, key, pause);
    }

    /// Waits before the next try.
    fn pause(&mut self, cx: &mut Context, key: &Key, pause: Duration) {
        let Some(fetch) = self.fetches.get_mut(key) else { return };
        let until = cx.now + pause;
        fetch.step = Step::Pausing(until);
        self.timers.insert((until, Timer::Again(key.clone())));
        self.turns.arm(cx.now);
    }

    fn fail_one(&mut self, cx: &mut Context, key: &Key, session: SessionId, why: EcError) {
        let Some(fetch) = self.fetches.get_mut(key) else { return };
        if let Some(waiter) = fetch.waiters.remove(&session) {
            self.forget(session, &waiter);
            if let Some(claim) = &waiter.want.claim
                && self.turns.of(claim).all(|other| self.of_session.get(other) != Some(key))
            {
                claim.give_up(key);
            }
            // After the claim has given the entry up: nobody ends a claim that waits for no entry.
            cx.end_fetch(session, Err(waiter.want.ends(why)));
        }
    }

    fn forget(&mut self, session: SessionId, waiter: &Waiter) {
        self.of_session.remove(&session);
        self.timers.remove(&(waiter.deadline, Timer::Budget(session)));
        if let Some(claim) = &waiter.want.claim {
            self.turns.remove(claim, session);
        }
    }

    /// Ends a fetch that no session wants any more.
    fn drop_unwanted(&mut self, cx: &mut Context, key: &Key) {
        if !self.fetches.get(key).is_some_and(|fetch| fetch.waiters.is_empty()) {
            return;
        }
        match self.fetches.remove(key).map(|fetch| fetch.step) {
            Some(Step::Moving(moving)) => {
                let session = moving.transfer;
                self.give_up(cx, key, *moving);
                cx.command(Command::Abort { session });
            }
            Some(Step::Pausing(until)) => drop(self.timers.remove(&(until, Timer::Again(key.clone())))),
            None => {}
        }
    }

    /// Gives up a transfer. Its blocks come back later.
    fn give_up(&mut self, cx: &mut Context, key: &Key, moving: Moving) {
        self.timers.remove(&(moving.until, Timer::Turn(key.clone())));
        self.of_transfer.remove(&moving.transfer);
        self.leaving.insert(moving.transfer);
        cx.store.discard(moving.reservation);
    }

    // ---- the inner machine's sessions -----------------------------------------------------------

    /// The inner machine reports a transfer's state.
    pub(super) fn progressed(
        &mut self,
        cx: &mut Context,
        transfer: SessionId,
        poll: KvPoll,
        failure: Option<Box<TransferError>>,
    ) {
        let Some(key) = self.of_transfer.get(&transfer).cloned() else { return };
        let Some(fetch) = self.fetches.get_mut(&key) else { return };
        let Step::Moving(moving) = &mut fetch.step else { return };
        match (poll, failure) {
            (KvPoll::Success, _) => moving.arrived = true,
            (KvPoll::Failed, Some(error)) => drop(self.end_try(cx, &key, EcError::Transfer(error))),
            (KvPoll::Transferring, _) => {
                moving.met = true;
                for session in fetch.waiters.keys() {
                    cx.tell(*session, EcPoll::Transferring);
                }
            }
            _ => {}
        }
    }

    /// Gives up the try that is under way, for this reason. Returns its transfer.
    fn end_try(&mut self, cx: &mut Context, key: &Key, why: EcError) -> Option<SessionId> {
        let fetch = self.fetches.get_mut(key)?;
        let Step::Moving(moving) = std::mem::replace(&mut fetch.step, Step::Pausing(cx.now)) else {
            return None;
        };
        let (transfer, asked, mode) = (moving.transfer, moving.producer.clone(), moving.mode);
        self.give_up(cx, key, *moving);
        self.try_failed(cx, key, Some((&asked, mode)), why);
        Some(transfer)
    }

    /// The inner machine has given a transfer's blocks back: no data operation can touch them any more.
    pub(super) fn released(&mut self, cx: &mut Context, transfer: SessionId, pages: Pages) {
        if self.leaving.remove(&transfer) {
            return cx.give_back(pages);
        }
        let Some(key) = self.of_transfer.remove(&transfer) else { return cx.give_back(pages) };
        let Some(fetch) = self.fetches.get_mut(&key) else { return cx.give_back(pages) };
        let Step::Moving(moving) = std::mem::replace(&mut fetch.step, Step::Pausing(cx.now)) else { return };
        let Moving { mut reservation, arrived, until, .. } = *moving;
        self.timers.remove(&(until, Timer::Turn(key.clone())));
        let whole = reservation.put_back(pages).is_ok();
        debug_assert!(whole && arrived, "blocks come back after the end of their transfer");
        match if arrived { cx.store.commit(reservation) } else { Err(reservation) } {
            Ok(()) => {
                cx.store.counters().fetched.add(1);
                cx.store.counters().fetched_bytes.add(key.1);
                self.deliver(cx, &key);
            }
            Err(reservation) => {
                cx.store.discard(reservation);
                self.try_failed(cx, &key, None, EcError::NotWhole);
            }
        }
    }

    /// The transfers that were not given up, with their entries and blocks.
    #[cfg(feature = "model")]
    pub(super) fn moving(
        &self,
    ) -> impl Iterator<Item = (SessionId, &kv_core::ContentHash, &kv_core::PageList)> {
        self.fetches.iter().filter_map(|((hash, _), fetch)| match &fetch.step {
            Step::Moving(moving) => Some((moving.transfer, hash, moving.reservation.pages())),
            Step::Pausing(_) => None,
        })
    }

    // ---- how many -------------------------------------------------------------------------------

    /// Sessions that want an entry.
    pub(super) fn len(&self) -> usize {
        self.of_session.len()
    }

    /// Transfers under way, those included that were given up and whose blocks are not back.
    pub(super) fn transfers(&self) -> usize {
        self.of_transfer.len() + self.leaving.len()
    }
}

/// The longest budget that counts.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
/// The shortest pause before another try, whatever the settings say.
const SHORTEST_PAUSE: Duration = Duration::from_micros(100);
/// How soon to look again at an entry that somebody else on this host fills.
const LOOK_AGAIN: Duration = Duration::from_millis(2);
