//! What encoders and schedulers do: entries are saved, wanted, used, and given up.

use std::time::Duration;

use kv_core::machine::SessionStatus;
use kv_core::{ReadyEventError, SessionId, TransferMode};
use kv_ec::{Command, EcError, EcPoll, EntryGuard, Reservation, ReserveError, Resource, Want};

use super::ledger::{Item, Save, Session, Taken, Use, hash_of};
use super::params::EcParams;
use super::service::EcWorld;
use crate::clock::{MS, SEC, US};
use crate::kv::stats::cause_name;
use crate::net::lives::{LifeId, Slot};
use crate::planted::Planted;

/// What encoders and schedulers do at moments of their own.
#[derive(Debug, Clone)]
pub(crate) enum EcAct {
    /// An encoder begins to write an entry.
    Save { slot: Slot, item: Item, must: bool },
    /// An encoder has written an entry, or gives the entry up.
    Written { save: usize },
    /// Sessions of one host want an entry at once.
    Want { slot: Slot, wish: Wish },
    /// A scheduler ends a session.
    Abort { life: LifeId, session: SessionId },
    /// A consumer needs an entry no longer.
    Drop { life: LifeId, taken: u64 },
}

/// An entry that sessions want.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish {
    pub(crate) item: Item,
    pub(crate) blocks: u32,
    pub(crate) source: Slot,
    pub(crate) sessions: usize,
    pub(crate) mode: TransferMode,
    pub(crate) budget: Option<Duration>,
    pub(crate) must: bool,
}

impl EcWorld {
    /// Plans what happens while there are faults.
    pub(super) fn plan_entries(&mut self) {
        let EcParams { saves, wants, both, ref items, .. } = self.service.params;
        let (count, hosts, producers) = (items.len(), self.params.hosts(), self.params.prefills);
        let savers = if both { hosts } else { producers };
        let first = if both { 0 } else { producers };
        let span = self.params.fault_span;
        let mut planned = Vec::new();
        for _ in 0..saves {
            let (slot, item, at) = (self.rng.index(savers), self.rng.index(count), self.rng.below(span));
            planned.push((slot, item));
            self.act_in(at, EcAct::Save { slot, item, must: false });
        }
        for _ in 0..wants {
            let slot = first + self.rng.index(hosts - first);
            let known = planned[self.rng.index(planned.len())];
            let (source, item) =
                if self.rng.chance(750) { known } else { (self.rng.index(hosts), self.rng.index(count)) };
            let other = self.rng.chance(self.service.params.other_size);
            let blocks = self.service.params.items[item] + u32::from(other) * (1 + self.rng.below(60) as u32);
            let budget = self.rng.chance(self.service.params.own_budget).then(|| self.rng.between(1, 400));
            let wish = Wish {
                item,
                blocks,
                source,
                sessions: 1 + self.rng.index(4),
                mode: self.rng.pick(self.service.params.modes),
                budget: budget.map(Duration::from_millis),
                must: false,
            };
            let at = self.rng.below(span);
            if source != slot {
                self.act_in(at, EcAct::Want { slot, wish });
            }
        }
    }

    pub(super) fn place_of(&self, act: &EcAct) -> Option<LifeId> {
        match act {
            EcAct::Save { slot, .. } | EcAct::Want { slot, .. } => self.life(*slot),
            EcAct::Written { save } => Some(self.service.ledger.saves[*save].life),
            EcAct::Abort { life, .. } | EcAct::Drop { life, .. } => Some(*life),
        }
    }

    pub(crate) fn act_ec(&mut self, act: EcAct) {
        let Some(life) = self.place_of(&act).filter(|life| self.lives[*life].alive) else { return };
        match act {
            EcAct::Save { item, must, .. } => self.reserve(life, item, must),
            EcAct::Written { save } => self.written(life, save),
            EcAct::Want { wish, .. } => self.want(life, wish),
            EcAct::Abort { session, .. } => self.abort(life, session),
            EcAct::Drop { taken, .. } => {
                let over = self.service.ledger.taken.remove(&taken);
                drop(over.and_then(|taken| taken.guard));
                self.changed(life);
            }
        }
    }

    // ---- encoders --------------------------------------------------------------------------------

    fn reserve(&mut self, life: LifeId, item: Item, must: bool) {
        let Some(hash) = hash_of(item) else { return };
        let bytes = self.bytes_of(self.service.params.items[item]);
        self.evict_wrongly(life, Planted::UnpinnedAtGrant);
        let store = self.service.ledger.desks[life].store.clone();
        let mut reserved = store.reserve(&hash, bytes);
        if matches!(reserved, Err(ReserveError::Full { .. }))
            && self.evict_wrongly(life, Planted::EvictedInUse)
        {
            reserved = store.reserve(&hash, bytes);
        }
        let reservation = match reserved {
            Ok(reservation) => reservation,
            Err(why) => {
                self.service.counters.full += u64::from(!matches!(why, ReserveError::Known { .. }));
                if must && !matches!(why, ReserveError::Known { ready: true }) {
                    self.unserved(format!("life {life} has no room for image {item}: {why}"));
                }
                return self.changed(life);
            }
        };
        let desk = &self.service.ledger.desks[life];
        let in_transfers = desk.moving.iter().filter(|transfer| **transfer != 0).count();
        let out = desk.uses.iter().filter(|used| **used == Use::Out).count();
        self.service.counters.pressed += u64::from(out > in_transfers);
        self.service.counters.saves += 1;
        let evented = self.rng.chance(self.service.params.evented) && !self.lives[life].shut_down;
        let session = evented.then(|| self.open(life, (item, bytes), None, must));
        let (save, blocks) = (self.service.ledger.saves.len(), reservation.pages().iter().collect());
        let reservation = Some(Box::new(reservation));
        self.service.ledger.saves.push(Save { life, item, blocks, reservation, session, must });
        self.changed(life);
        if let Some(session) = session {
            self.command(life, "save", Command::Save { session });
        }
        let delay = self.rng.tail(100 * US, self.service.params.hold_max);
        self.act_in(delay, EcAct::Written { save });
    }

    fn written(&mut self, life: LifeId, save: usize) {
        let slot = self.hosts[life].slot;
        let Save { item, must, session, ref blocks, .. } = self.service.ledger.saves[save];
        let (key, blocks) = (self.content_key(slot, item), blocks.clone());
        let fails = !must && self.rng.chance(200);
        if !fails {
            for (block, position) in blocks.into_iter().zip(0..) {
                self.memories[life].fill_page(block, key, position);
            }
        }
        let Some(reservation) = self.service.ledger.saves[save].reservation.take() else { return };
        self.service.counters.given_up += u64::from(fails);
        match session {
            Some(session) if fails => {
                let error = ReadyEventError::Device { code: 7 };
                self.command(life, "commit failed", Command::CommitFailed { session, reservation, error });
            }
            Some(session) => {
                self.command(life, "commit", Command::Commit { session, reservation, ready: None });
            }
            None => self.settle(life, *reservation, fails),
        }
        self.changed(life);
    }

    /// An encoder makes an entry ready by itself, or gives the entry up.
    fn settle(&mut self, life: LifeId, reservation: Reservation, fails: bool) {
        let store = &self.service.ledger.desks[life].store;
        match if fails { Err(reservation) } else { store.commit(reservation) } {
            Ok(()) => self.service.counters.saved += 1,
            Err(reservation) => store.discard(reservation),
        }
    }

    // ---- consumers -------------------------------------------------------------------------------

    fn want(&mut self, life: LifeId, wish: Wish) {
        let Some(hash) = hash_of(wish.item) else { return };
        let bytes = self.bytes_of(wish.blocks);
        for _ in 0..wish.sessions {
            let local = self.service.ledger.desks[life].store.pin_guard(&hash).ok();
            if let Some(guard) = local.filter(|guard| guard.bytes() == bytes) {
                self.service.counters.hits += 1;
                self.service.counters.served += u64::from(wish.must);
                self.use_entry(life, wish.item, guard);
                self.changed(life);
                continue;
            }
            let joins = self
                .service
                .ledger
                .open(life)
                .any(|(_, other)| (other.item, other.bytes) == (wish.item, bytes));
            self.service.counters.joined += u64::from(joins);
            self.service.counters.sessions += 1;
            let session = self.open(life, (wish.item, bytes), Some((wish.source, wish.budget)), wish.must);
            let want = Want::new(hash.clone(), bytes, EcParams::addr(wish.source)).with(|want| {
                want.mode = Some(wish.mode);
                want.budget = wish.budget;
            });
            self.command(life, "fetch", Command::Fetch { session, want: Box::new(want) });
            let aborts = !wish.must && self.rng.chance(self.service.params.abort);
            if aborts {
                let delay = self.rng.tail(100 * US, 300 * MS);
                self.act_in(delay, EcAct::Abort { life, session });
            }
        }
    }

    /// A new session in the ledger.
    fn open(
        &mut self,
        life: LifeId,
        (item, bytes): (Item, u64),
        fetch: Option<(Slot, Option<Duration>)>,
        must: bool,
    ) -> SessionId {
        let desk = &mut self.service.ledger.desks[life];
        let id = SessionId(desk.next_session);
        desk.next_session += 1;
        let budget = fetch.and_then(|(_, budget)| budget).unwrap_or(self.service.params.budget);
        let session = Session {
            item,
            bytes,
            source: fetch.map(|(source, _)| source),
            opened_at: self.now,
            due: self.lives[life].clock.local(self.now) + budget,
            state: EcPoll::OPENED,
            back: fetch.is_none(),
            aborted: false,
            must,
        };
        self.service.ledger.sessions.insert((life, id), session);
        self.lives[life].open_sessions += 1;
        self.last_change = self.now;
        id
    }

    fn abort(&mut self, life: LifeId, session: SessionId) {
        let Some(known) = self.service.ledger.sessions.get_mut(&(life, session)) else { return };
        known.aborted = true;
        self.service.counters.aborts += u64::from(!known.state.is_terminal());
        let moves = known.state == EcPoll::Transferring;
        let flies =
            self.flights.iter().any(|flight| !flight.over && (flight.life == life || flight.target == life));
        self.service.counters.abort_in_flight += u64::from(moves && flies);
        self.command(life, "abort", Command::Abort { session });
    }

    /// A consumer uses an entry for a while.
    pub(super) fn use_entry(&mut self, life: LifeId, item: Item, guard: EntryGuard) {
        let taken = self.service.ledger.next_taken;
        self.service.ledger.next_taken += 1;
        let blocks = guard.pages().iter().collect();
        let guard = match self.planted {
            Some(Planted::NoPinForWaiter) => None,
            Some(Planted::PinsKept) if taken.is_multiple_of(2) => {
                std::mem::forget(guard);
                None
            }
            _ => Some(guard),
        };
        self.service.ledger.taken.insert(taken, Taken { life, item, blocks, guard });
        let delay = self.rng.tail(100 * US, self.service.params.hold_max);
        self.act_in(delay, EcAct::Drop { life, taken });
    }

    // ---- what machines report --------------------------------------------------------------------

    pub(super) fn note_status(&mut self, life: LifeId, id: SessionId, to: EcPoll, why: Option<&EcError>) {
        self.trace.note(self.now, || format!("  session {id} of life {life} is {to}: {why:?}"));
        self.trace.fold(id.0 << 8 | to as u64);
        let Some(session) = self.service.ledger.sessions.get_mut(&(life, id)) else { return };
        session.state = to;
        let (fetch, must) = (session.source.is_some(), session.must);
        self.last_change = self.now;
        if !to.is_terminal() {
            return;
        }
        self.lives[life].open_sessions -= 1;
        let counters = &mut self.service.counters;
        match (to, fetch) {
            (EcPoll::Ready, true) => {
                counters.ready += 1;
                counters.served += u64::from(must);
            }
            (EcPoll::Ready, false) => counters.saved += 1,
            _ => {
                counters.failed += u64::from(fetch);
                counters.failures.count(format!("ec: {}", why.map_or_else(String::new, name_of)));
            }
        }
    }

    pub(super) fn note_back(&mut self, life: LifeId, id: SessionId, resource: Resource) {
        self.last_change = self.now;
        let known = self.service.ledger.sessions.get_mut(&(life, id));
        match resource {
            Resource::Slot(guard) => {
                let Some(session) = known else { return };
                session.back = true;
                let item = session.item;
                if let Some(guard) = guard {
                    self.use_entry(life, item, guard);
                }
            }
            // The encoder has written into the blocks, and does so no more.
            Resource::Reservation(Some(reservation)) => {
                self.service.ledger.desks[life].store.discard(*reservation);
            }
            Resource::Reservation(None) => {}
        }
    }

    /// The longest time that a healed world may take.
    pub(super) const PATIENCE: Duration = Duration::from_nanos(60 * SEC);
}

fn name_of(error: &EcError) -> String {
    match error {
        EcError::Transfer(error) => cause_name(&error.cause),
        EcError::Budget { last: Some(last), .. } => format!("Budget, {}", name_of(last)),
        error => format!("{error:?}").chars().take_while(|letter| letter.is_alphanumeric()).collect(),
    }
}
