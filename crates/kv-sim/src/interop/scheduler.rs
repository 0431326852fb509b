//! The schedulers of all engines: when they open sessions, lend pages and abort.

use std::collections::BTreeSet;
use std::time::Duration;

use kv_core::machine::Input;
use kv_core::proto::Command;
use kv_core::random::mix;
use kv_core::{AuxIndex, PageList, SessionId, SessionOptions};

use super::hosts::ROWS;
use super::memory::Holder;
use super::requests::{Leg, Request, RequestNo};
use super::world::{Event, Peer, World};
use super::{Dialect, LegId, LifeId};
use crate::clock::{MS, SEC};

/// Most pages of a request.
const MAX_PAGES: u64 = 6;
/// The deadline of requests that must succeed.
const PATIENCE: u64 = 100 * SEC;

/// How old the transfer parameters of vLLM's pull mode may be: a sixth of the lease, less what clocks differ.
const FRESH: u64 = 4900 * MS;

/// What a scheduler does at one moment.
#[derive(Debug, Clone, Copy)]
pub(super) enum Act {
    /// A request begins at a prefill engine: a new one, or another try of one that was there, under its name.
    Begin { again: Option<RequestNo>, must: bool },
    /// The next chunk of a request is complete.
    Give { request: RequestNo },
    /// The decode engine opens its sessions.
    Open { request: RequestNo },
    /// The decode engine gives its pages.
    Init { request: RequestNo },
    /// A session is aborted.
    Abort { leg: LegId },
}

impl World {
    pub(super) fn plan_requests(&mut self) {
        for _ in 0..self.params.requests {
            let at = self.rng.below(self.params.fault_span);
            self.enter(at, Event::Act(Act::Begin { again: None, must: false }));
        }
    }

    /// Three requests that must succeed.
    pub(super) fn serve(&mut self) {
        for at in 0..3 {
            self.enter(at * 20 * SEC, Event::Act(Act::Begin { again: None, must: true }));
        }
    }

    pub(super) fn act(&mut self, act: Act) {
        if self.is_stopped(act) {
            return self.enter(100 * MS, Event::Act(act));
        }
        self.trace.note(self.now, || format!("{act:?}"));
        match act {
            Act::Begin { again, must } => self.begin(again, must),
            Act::Give { request } => self.give(request),
            Act::Open { request } => self.open_receivers(request),
            Act::Init { request } => self.init_receivers(request),
            Act::Abort { leg } => self.abort(leg),
        }
    }

    /// True if a scheduler that has to act is stopped, with one of its hosts.
    fn is_stopped(&self, act: Act) -> bool {
        let stopped = |life: &LifeId| self.lives[*life].stopped && self.lives[*life].alive;
        let of_engine = |engine: usize| self.engines[engine].lives.iter().any(stopped);
        match act {
            Act::Begin { .. } => (0..self.params.prefills).any(of_engine),
            Act::Give { request } => self.requests[request].sources.iter().any(stopped),
            Act::Open { request } | Act::Init { request } => of_engine(self.requests[request].engines.1),
            Act::Abort { leg } => stopped(&self.legs[leg].life),
        }
    }

    fn pause(&mut self, must: bool) -> u64 {
        if must || self.healed {
            self.rng.below(SEC)
        } else {
            self.rng.tail(10 * MS, self.params.slow_scheduler)
        }
    }

    fn deadline(&mut self, must: bool) -> u64 {
        let (least, most) = self.params.deadline;
        if must { PATIENCE } else { self.rng.between(least, most) }
    }

    /// Pages that are free on all ranks of an engine.
    fn free_pages(&mut self, lives: &[LifeId], count: usize) -> Option<Vec<u32>> {
        let free = |page: &u32| {
            lives.iter().all(|life| self.lives[*life].memory.pages[*page as usize] == Holder::Free)
        };
        let mut pages: Vec<u32> = (0..self.params.pages).filter(free).collect();
        self.rng.shuffle(&mut pages);
        pages.truncate(count);
        (pages.len() == count).then_some(pages)
    }

    fn free_row(&mut self, life: LifeId) -> Option<u32> {
        let rows = &self.lives[life].memory.rows;
        let first = self.rng.below(ROWS.into()) as u32;
        (0..rows.len() as u32)
            .map(|at| (first + at) % ROWS)
            .find(|row| self.lives[life].memory.rows[*row as usize] == Holder::Free)
    }

    fn has_rows(&self) -> bool {
        self.params.dialect == Dialect::Sglang
    }

    fn add_leg(&mut self, life: LifeId, request: RequestNo, receives: bool) -> LegId {
        self.sessions += 1;
        let session = SessionId(self.sessions);
        self.counters.sessions += 1;
        let leg = self.legs.len();
        let (pages, row) = (Vec::new(), None);
        let (ended, back, told_by) = (None, None, BTreeSet::new());
        // Nobody begins anything with the agents of an engine whose side channel was seen to be dead.
        let agents = self.lives[life].peers.values().filter_map(Peer::agent);
        let met = agents.filter(|agent| !self.is_deaf(*agent)).collect();
        self.legs.push(Leg {
            life,
            session,
            request,
            receives,
            met,
            pages,
            row,
            told_by,
            lent: 0,
            ended,
            back,
        });
        self.lives[life].sessions.insert(session, leg);
        leg
    }

    fn begin(&mut self, again: Option<RequestNo>, must: bool) {
        let prefill = self.rng.index(self.params.prefills);
        let decode = self.params.prefills + self.rng.index(self.params.decodes);
        let sources = self.engines[prefill].lives.clone();
        if sources.iter().any(|life| !self.lives[*life].alive) {
            return;
        }
        let number = self.requests.len();
        let (count, prefix, name) = match again.map(|again| &self.requests[again]) {
            Some(first) => (first.pages.len(), first.prefix, first.name),
            None => {
                let count = self.rng.between(1, MAX_PAGES) as usize;
                let prefix = if self.rng.chance(700) { 0 } else { self.rng.index(count + 1) };
                (count, prefix, number as u64 + 1)
            }
        };
        // Every try computes the same bytes.
        let key = mix(self.params.seed ^ mix(name));
        let Some(pages) = self.free_pages(&sources, count) else { return };
        self.requests.push(Request {
            name,
            key,
            engines: (prefill, decode),
            sources: sources.clone(),
            senders: Vec::new(),
            receivers: Vec::new(),
            pages: pages.clone(),
            given: 0,
            complete_at: 0,
            prefix,
            must,
        });
        let deadline = self.deadline(must);
        for &life in &sources {
            let leg = self.add_leg(life, number, false);
            self.requests[number].senders.push(leg);
            for page in &pages {
                self.lives[life].memory.pages[*page as usize] = Holder::Scheduler(leg);
            }
            self.open_sender(leg, deadline);
            self.maybe_abort(leg, must);
        }
        let after = self.pause(must);
        self.enter(after, Event::Act(Act::Give { request: number }));
        if self.params.dialect != Dialect::VllmPull {
            let after = self.pause(must);
            self.enter(after, Event::Act(Act::Open { request: number }));
        }
    }

    fn maybe_abort(&mut self, leg: LegId, must: bool) {
        if !must && self.rng.chance(self.params.abort) {
            let after = self.rng.tail(100 * MS, 40 * SEC);
            self.enter(after, Event::Act(Act::Abort { leg }));
        }
    }

    fn open_sender(&mut self, leg: LegId, deadline: u64) {
        let Leg { life, session, request, .. } = self.legs[leg];
        let Some(room) = self.room(request) else { return };
        let (prefill, decode) = (self.params.prefill_tp, self.params.decode_tp);
        let receivers = (decode / prefill).max(1);
        let options =
            SessionOptions::default().with(|options| options.deadline = Some(Duration::from_nanos(deadline)));
        let row = if self.has_rows() { self.free_row(life) } else { None };
        if let Some(row) = row {
            let Request { key, name, .. } = self.requests[request];
            self.legs[leg].row = Some(row);
            self.lives[life].memory.rows[row as usize] = Holder::Lent(leg);
            self.lives[life].memory.fill_row(row, key, name);
            self.note_row(life, row);
        }
        self.expect_end(leg, deadline);
        let num_pages = self.requests[request].pages.len();
        let options = Box::new(options);
        self.command(life, Command::OpenSender { session, room, receivers, options });
        self.command(life, Command::InitSender { session, num_pages, aux: row.map(AuxIndex) });
    }

    fn expect_end(&mut self, leg: LegId, deadline: u64) {
        let clock = self.lives[self.legs[leg].life].clock;
        let due = clock.global(clock.local(self.now) + Duration::from_nanos(deadline));
        let slack = self.params.lateness + 50 * MS;
        self.enter(due.saturating_sub(self.now) + slack, Event::Overdue { leg });
    }

    fn command(&mut self, life: LifeId, command: Command) {
        self.tell(life, "command", Input::Command(command));
    }

    /// A chunk is complete: every rank gives its pages.
    fn give(&mut self, request: RequestNo) {
        let Request { given, must, .. } = self.requests[request];
        let pages = self.requests[request].pages.clone();
        let left = pages.len() - given;
        let count = 1 + self.rng.index(left);
        let key = self.requests[request].key;
        for leg in self.requests[request].senders.clone() {
            let Leg { life, session, .. } = self.legs[leg];
            if !self.lives[life].alive || self.legs[leg].ended.is_some() {
                continue;
            }
            let chunk = &pages[given..given + count];
            for (position, page) in (given..).zip(chunk) {
                self.lives[life].memory.pages[*page as usize] = Holder::Lent(leg);
                self.lives[life].memory.fill_page(*page, key, position);
            }
            let Some(lent) = self.lend(life, leg, chunk) else { return };
            self.command(life, Command::Send { session, chunk: lent });
        }
        self.requests[request].given += count;
        if count < left {
            let after = self.pause(must);
            return self.enter(after, Event::Act(Act::Give { request }));
        }
        self.requests[request].complete_at = self.now;
        // The router hears of the pages only from a sender that has all of them.
        let waits = |leg: &LegId| self.legs[*leg].ended.is_none() && self.legs[*leg].back.is_none();
        if self.params.dialect == Dialect::VllmPull && self.requests[request].senders.iter().all(waits) {
            let after = self.pause(must);
            self.enter(after, Event::Act(Act::Open { request }));
        }
    }

    fn lend(&mut self, life: LifeId, leg: LegId, pages: &[u32]) -> Option<kv_core::Pages> {
        let list = PageList::from_pages(pages.iter().copied()).ok()?;
        match self.lives[life].pool.adopt(list) {
            Ok(lent) => {
                self.legs[leg].lent += 1;
                self.legs[leg].pages.extend(pages);
                Some(lent)
            }
            Err(error) => {
                self.violate("dialect_pages_come_back", format!("pages {pages:?} of life {life}: {error}"));
                None
            }
        }
    }

    fn open_receivers(&mut self, request: RequestNo) {
        let Request { engines: (prefill, decode), must, prefix, .. } = self.requests[request];
        let lives = self.engines[decode].lives.clone();
        if lives.iter().any(|life| !self.lives[*life].alive) {
            return;
        }
        let old = self.now - self.requests[request].complete_at > FRESH;
        if old && self.params.dialect == Dialect::VllmPull {
            return;
        }
        let deadline = self.deadline(must);
        let nanos = Duration::from_nanos(deadline);
        let (room, bootstrap_addr) = match self.params.dialect {
            Dialect::Sglang => (self.room(request), format!("bootstrap-{prefill}:8998")),
            _ => (self.remote_room(request), format!("10.0.0.{}:5600", prefill + 1)),
        };
        let Some(room) = room else { return };
        for life in lives {
            let leg = self.add_leg(life, request, true);
            self.requests[request].receivers.push(leg);
            let options = SessionOptions::default().with(|options| {
                options.deadline = Some(nanos);
                options.prefix_pages = prefix;
                options.remote = self.remote(request).map(Box::new);
            });
            self.expect_end(leg, deadline);
            self.maybe_abort(leg, must);
            let Leg { session, .. } = self.legs[leg];
            let (room, bootstrap_addr, options) = (room.clone(), bootstrap_addr.clone(), Box::new(options));
            self.command(life, Command::OpenReceiver { session, room, bootstrap_addr, options });
        }
        let after = self.pause(must);
        self.enter(after, Event::Act(Act::Init { request }));
    }

    fn init_receivers(&mut self, request: RequestNo) {
        let Request { prefix, .. } = self.requests[request];
        let count = self.requests[request].pages.len() - prefix;
        let legs = self.requests[request].receivers.clone();
        let lives: Vec<LifeId> = legs.iter().map(|leg| self.legs[*leg].life).collect();
        if lives.iter().any(|life| !self.lives[*life].alive) {
            return;
        }
        let Some(pages) = self.free_pages(&lives, count) else {
            // The others are in quarantine.
            self.requests[request].must = false;
            return legs.into_iter().for_each(|leg| self.abort(leg));
        };
        for leg in legs {
            let Leg { life, session, .. } = self.legs[leg];
            if self.legs[leg].ended.is_some() {
                continue;
            }
            let row = if self.has_rows() { self.free_row(life) } else { None };
            if let Some(row) = row {
                self.lives[life].memory.rows[row as usize] = Holder::Lent(leg);
            }
            self.legs[leg].row = row;
            for page in &pages {
                self.lives[life].memory.pages[*page as usize] = Holder::Lent(leg);
            }
            let Some(lent) = self.lend(life, leg, &pages) else { return };
            self.command(life, Command::InitReceiver { session, pages: lent, aux: row.map(AuxIndex) });
        }
    }

    fn abort(&mut self, leg: LegId) {
        let Leg { life, session, .. } = self.legs[leg];
        if self.lives[life].alive && self.legs[leg].ended.is_none() {
            self.counters.aborts += 1;
            self.command(life, Command::Abort { session });
        }
    }
}
