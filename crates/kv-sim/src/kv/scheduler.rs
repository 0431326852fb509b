//! The simulated schedulers: they allocate pages, compute, send, abort, and reuse pages as soon as these come
//! back.

use kv_core::proto::{Command, Input};
use kv_core::{AuxIndex, KvPoll, LeaseRef, PageList, Pages, SessionId, SessionOptions, TransferMode};

use crate::clock::MS;
use crate::kv::act::{Act, KvAct};
use crate::kv::fact::{Check, Fact, KvFact};
use crate::kv::ledger::{LegId, Side};
use crate::kv::params::Faults;
use crate::kv::service::KvWorld;
use crate::net::calendar::Event;
use crate::net::flight::Flight;
use crate::net::lives::LifeId;
use crate::net::params::Physics;
use crate::planted::Planted;

/// Most attempts to find pages before a request is aborted.
const MAX_TRIES: u32 = 40;

impl KvWorld {
    pub(crate) fn act(&mut self, leg: LegId, act: Act) {
        let known = &self.service.ledger.legs[leg];
        if act == Act::Open {
            return self.open(leg);
        }
        let Some(life) = known.life.filter(|&life| self.lives[life].alive) else { return };
        // A scheduler that has seen the end stops, most of the time.
        let ended = known.poll.is_terminal();
        match act {
            Act::Open => {}
            Act::Abort => self.abort(leg, life),
            Act::Misuse => self.misuse(leg, life),
            Act::Init { .. } | Act::Chunk { .. } | Act::Layers if ended && !self.rng.chance(100) => {}
            Act::Init { tries } => self.init(leg, life, tries),
            Act::Chunk { tries } => self.chunk(leg, life, tries),
            Act::Layers => self.layers(leg, life),
        }
    }

    fn open(&mut self, leg: LegId) {
        let slot = self.service.ledger.legs[leg].slot;
        if self.refuses_to_open(leg) {
            return;
        }
        let Some(life) = self.slots[slot] else {
            // The host is down: the router tries again while it must.
            if self.service.ledger.legs[leg].must_succeed {
                self.act_later(leg, Act::Open);
            }
            return;
        };
        let session = self.begin_session(leg, life);
        let deadline = self.service.plans[leg].deadline;
        let known = &self.service.ledger.legs[leg];
        let (side, room, receivers) = (known.side, known.room.clone(), known.receivers);
        let (server, prefix_pages) = (known.servers.first().copied().unwrap_or(0), known.prefix);
        let command = match side {
            Side::Sender => {
                let (mode, lease) = (
                    Some(self.service.requests[self.service.ledger.legs[leg].request].accepts),
                    self.service.plans[leg].lease,
                );
                let options = Box::new(SessionOptions::default().with(|options| {
                    options.deadline = deadline;
                    options.mode = mode;
                    options.lease = lease;
                }));
                let receivers = if self.service.plans[leg].learns { 0 } else { receivers };
                Command::OpenSender { session, room, receivers, options }
            }
            Side::Receiver => {
                let (bootstrap_addr, prefill_dp_rank) =
                    (self.service.params.addr(server), self.service.plans[leg].replica);
                let pulls = self.service.ledger.legs[leg].pulls;
                let mode = Some(if pulls { TransferMode::Pull } else { TransferMode::Push });
                let mut lease_refs = self.references(leg);
                lease_refs.truncate(if pulls { usize::MAX } else { 0 });
                self.note_references(leg, &lease_refs);
                // Only where pages are dealt they tell anything.
                let dealt =
                    self.service.params.unequal.as_ref().is_some_and(|pair| pair.engines[1].context > 1);
                let tokens = self.service.requests[self.service.ledger.legs[leg].request].tokens;
                let tokens = (dealt && self.rng.chance(500)).then_some(tokens);
                let options = SessionOptions::default().with(|options| {
                    options.deadline = deadline;
                    options.prefill_dp_rank = prefill_dp_rank;
                    options.mode = mode;
                    options.lease_refs = lease_refs;
                    options.prefix_pages = prefix_pages;
                    options.tokens = tokens;
                });
                Command::OpenReceiver { session, room, bootstrap_addr, options: Box::new(options) }
            }
        };
        self.feed(life, "open", Input::Command(command));
        if side == Side::Sender || self.service.plans[leg].early_init {
            self.act_later(leg, Act::Init { tries: 0 });
        }
    }

    /// Enters a session into the books of its host and of the world. The caller gives the command that opens
    /// it.
    pub(crate) fn begin_session(&mut self, leg: LegId, life: LifeId) -> SessionId {
        self.cover_open(leg);
        let host = &mut self.service.stock[life];
        let session = SessionId(host.next_session);
        host.next_session += 1;
        host.sessions.insert(session, leg);
        let deadline = self.service.plans[leg].deadline;
        let now = self.lives[life].clock.local(self.now);
        let known = &mut self.service.ledger.legs[leg];
        known.life = Some(life);
        known.session = session;
        known.opened_at = self.now;
        known.deadline = now + deadline.unwrap_or(self.service.params.physics.timing.session_deadline);
        let (due, side, room) = (known.deadline, known.side, known.room.clone());
        self.lives[life].open_sessions += 1;
        self.last_change = self.now;
        self.service.counters.sessions += 1;
        self.trace.note(self.now, || {
            format!("open      leg {leg}: {side:?} {room} as session {session} of life {life}")
        });
        self.watch_deadline(leg, life, due);
        self.watch_failed_counterparts(leg);
        session
    }

    /// The lease ids that the router carried from the sender's side, if the request goes that way: that of
    /// one rank, or of each.
    fn references(&mut self, leg: LegId) -> Vec<LeaseRef> {
        let chance = self.service.params.sched.referenced;
        let known = |sender: LegId| {
            let sender = &self.service.ledger.legs[sender];
            let incarnation = self.hosts[sender.life?].incarnation;
            Some(LeaseRef::new(incarnation, sender.session))
        };
        let mut references: Vec<LeaseRef> = self.service.ledger.counterparts(leg).filter_map(known).collect();
        let ranks = self.service.ledger.legs[leg].servers.len();
        if references.len() < ranks || ranks == 1 || self.rng.chance(500) {
            references.truncate(1);
        }
        if references.is_empty() || !self.rng.chance(chance) { Vec::new() } else { references }
    }

    /// Notes in the ledger which senders the lease ids of a receiver name.
    pub(crate) fn note_references(&mut self, leg: LegId, lease_refs: &[LeaseRef]) {
        let named = |sender: &LegId| {
            let sender = &self.service.ledger.legs[*sender];
            let of = |lease_ref: &LeaseRef| {
                sender.life.is_some_and(|life| self.hosts[life].incarnation == lease_ref.incarnation)
                    && lease_ref.lease_id == sender.session
            };
            lease_refs.iter().any(of)
        };
        self.service.ledger.legs[leg].meant = self.service.ledger.counterparts(leg).filter(named).collect();
    }

    pub(crate) fn act_later(&mut self, leg: LegId, act: Act) {
        let pause = self.pause();
        self.calendar.enter(self.now + pause, Event::Act(KvAct::Do { leg, act }));
    }

    fn init(&mut self, leg: LegId, life: LifeId, tries: u32) {
        let known = &self.service.ledger.legs[leg];
        if known.inited_at.is_some() {
            return;
        }
        let (session, num_pages) = (known.session, known.num_pages);
        let needed = if known.side == Side::Receiver { num_pages } else { 0 };
        let host = &self.service.stock[life];
        let short = known.wants_aux && host.free_rows.is_empty() || self.lacks_items(leg, life);
        if needed > host.free_pages.len() || short {
            return self.starve(leg, life, Act::Init { tries: tries + 1 }, tries);
        }
        let aux = self.take_row(leg, life);
        let known = &mut self.service.ledger.legs[leg];
        (known.inited_at, known.starved) = (Some(self.now), false);
        self.give_items(leg, life);
        let command = match self.service.ledger.legs[leg].side {
            Side::Sender => Command::InitSender { session, num_pages, aux },
            Side::Receiver => {
                let pages = self.take_pages(life, needed);
                let Some(pages) = self.give(leg, life, &pages) else { return };
                Command::InitReceiver { session, pages, aux }
            }
        };
        self.feed(life, "init", Input::Command(command));
        if self.service.ledger.legs[leg].side == Side::Sender {
            self.act_later(leg, Act::Chunk { tries: 0 });
        }
        self.free_row_if_over(leg, life);
    }

    pub(crate) fn starve(&mut self, leg: LegId, life: LifeId, again: Act, tries: u32) {
        self.service.counters.starved += 1;
        self.service.ledger.legs[leg].starved = true;
        if tries >= MAX_TRIES && !self.service.ledger.legs[leg].must_succeed {
            return self.abort(leg, life);
        }
        let pause = self.rng.tail(2 * MS, 50 * MS);
        self.calendar.enter(self.now + pause, Event::Act(KvAct::Do { leg, act: again }));
    }

    pub(crate) fn abort(&mut self, leg: LegId, life: LifeId) {
        if self.service.ledger.legs[leg].is_open() {
            self.service.counters.aborts += 1;
            self.service.ledger.legs[leg].aborted = true;
            let touches = |flight: &Flight| {
                !flight.over
                    && flight.pieces.iter().any(|piece| {
                        let held =
                            |hold: u32| hold != 0 && self.service.ledger.holds[hold as usize].leg == leg;
                        held(piece.local_hold) || held(piece.remote_hold)
                    })
            };
            self.service.counters.abort_in_flight += u64::from(self.flights.iter().any(touches));
        }
        let session = self.service.ledger.legs[leg].session;
        self.feed(life, "abort", Input::Command(Command::Abort { session }));
    }

    /// Gives a command with arguments that cannot be right.
    fn misuse(&mut self, leg: LegId, life: LifeId) {
        self.service.counters.misuses += 1;
        let known = &self.service.ledger.legs[leg];
        let (session, side, num_pages) = (known.session, known.side, known.num_pages);
        let rows = self.memories[life].rows.len() as u32;
        let beyond = self.memories[life].pages.len() as u32 + self.rng.below(100) as u32;
        let own =
            if self.service.stock[life].free_pages.is_empty() { vec![] } else { self.take_pages(life, 1) };
        let choice = self.rng.below(4);
        let given = if choice == 0 { [&own[..], &[beyond]].concat() } else { own };
        let stranger = SessionId(u64::MAX - 7);
        let command = match (side, choice) {
            (Side::Sender, 2) => {
                self.put_back(life, &given);
                Command::InitSender { session, num_pages: num_pages + 1, aux: Some(AuxIndex(rows)) }
            }
            (Side::Sender, 3) => {
                self.put_back(life, &given);
                return self.feed_stranger(life, Command::Send { session: stranger, chunk: Pages::none() });
            }
            (Side::Sender, _) => {
                self.fill(leg, life, &given, true);
                let Some(chunk) = self.give_final(leg, life, &given) else { return };
                Command::Send { session, chunk }
            }
            (Side::Receiver, choice) => return self.init_wrongly(leg, life, &given, choice == 1),
        };
        self.feed(life, "misuse", Input::Command(command));
    }

    /// Gives a receiver pages that it must refuse: their aux row does not exist, or it was given pages before.
    fn init_wrongly(&mut self, leg: LegId, life: LifeId, given: &[u32], strange_row: bool) {
        let Some(pages) = self.hand_over(leg, life, given) else { return };
        let rows = self.memories[life].rows.len() as u32;
        let known = &self.service.ledger.legs[leg];
        let (session, again) = (known.session, known.inited_at.is_some());
        let aux = (strange_row || !again).then_some(AuxIndex(rows));
        let unheard = again && known.is_open() && self.planted == Some(Planted::SecondInitUnheard);
        if !unheard {
            self.feed(life, "misuse", Input::Command(Command::InitReceiver { session, pages, aux }));
        }
        // A machine that hears of this fails an open receiver. So a session that is still open here has taken the pages
        // against the rules, or has not heard of them: they count, and success without their bytes is a violation. They do
        // not count for a session that is over. That may be by a success: the turn of a driver that was stopped takes what
        // the transport has for it before it takes the command.
        let known = &mut self.service.ledger.legs[leg];
        if known.is_open() {
            known.pages.extend_from_slice(given);
        }
    }

    fn feed_stranger(&mut self, life: LifeId, command: Command) {
        self.lives[life].holds_out += 1;
        self.feed(life, "misuse", Input::Command(command));
    }

    // ---- pages -------------------------------------------------------------------------------

    pub(crate) fn take_pages(&mut self, life: LifeId, count: usize) -> Vec<u32> {
        let scattered = self.rng.chance(300);
        let mut pages = Vec::with_capacity(count);
        for _ in 0..count {
            let free = &mut self.service.stock[life].free_pages;
            if scattered && !free.is_empty() {
                let at = self.rng.index(free.len());
                pages.push(free.swap_remove(at));
            } else if let Some(page) = free.pop() {
                pages.push(page);
            }
        }
        pages
    }

    pub(crate) fn put_back(&mut self, life: LifeId, pages: &[u32]) {
        for &page in pages {
            if (page as usize) < self.memories[life].pages.len() {
                self.memories[life].poison_page(page);
                self.memories[life].pages[page as usize] = 0;
                self.service.stock[life].free_pages.push(page);
            }
        }
    }

    fn take_row(&mut self, leg: LegId, life: LifeId) -> Option<AuxIndex> {
        if !self.service.ledger.legs[leg].wants_aux {
            return None;
        }
        let row = self.service.stock[life].free_rows.pop()?;
        let hold = self.service.ledger.hold(leg, Vec::new());
        self.memories[life].rows[row as usize] = hold;
        let known = &mut self.service.ledger.legs[leg];
        (known.row, known.row_hold) = (Some(row), hold);
        Some(AuxIndex(row))
    }

    /// Gives pages to a session whose content is final.
    pub(crate) fn give_final(&mut self, leg: LegId, life: LifeId, pages: &[u32]) -> Option<Pages> {
        let given = self.give(leg, life, pages)?;
        if let Some(&hold) = self.service.ledger.legs[leg].holds.last() {
            self.service.ledger.announce(hold, &(0..64));
        }
        Some(given)
    }

    /// Gives a session the next pages of its request.
    pub(crate) fn give(&mut self, leg: LegId, life: LifeId, pages: &[u32]) -> Option<Pages> {
        let given = self.hand_over(leg, life, pages)?;
        let known = &mut self.service.ledger.legs[leg];
        if !known.poll.is_terminal() {
            known.pages.extend_from_slice(pages);
        }
        Some(given)
    }

    /// Makes the `Pages` for a session, and notes in the memory who holds the pages.
    fn hand_over(&mut self, leg: LegId, life: LifeId, pages: &[u32]) -> Option<Pages> {
        let given =
            PageList::from_pages(pages.iter().copied()).ok().and_then(|list| Pages::unpooled(list).ok())?;
        let hold = self.service.ledger.hold(leg, pages.to_vec());
        for &page in pages {
            if let Some(holder) = self.memories[life].pages.get_mut(page as usize) {
                *holder = hold;
            }
        }
        self.service.ledger.legs[leg].holds.push(hold);
        self.lives[life].holds_out += 1;
        self.service.plans[leg].given += 1;
        Some(given)
    }

    pub(crate) fn release(&mut self, life: LifeId, session: SessionId, released: Pages) {
        let pages: Vec<u32> = released.list().iter().collect();
        self.trace.note(self.now, || format!("  life {life} session {session} releases {released:?}"));
        self.trace.fold(pages.len() as u64);
        drop(released);
        let leg = self.service.stock[life].sessions.get(&session).copied();
        let holds = leg.map(|leg| self.service.ledger.legs[leg].holds.clone()).unwrap_or_default();
        let items = leg.map_or(0, |leg| self.service.ledger.legs[leg].state.hold);
        let mut holds = holds.iter().copied().filter(|&hold| hold != items);
        let hold = holds.find(|&hold| self.service.ledger.holds[hold as usize].pages == pages);
        self.tell(&Fact::Own(KvFact::Released { life, session, leg, hold, pages: &pages }));
        let out = &mut self.lives[life].holds_out;
        *out = out.saturating_sub(1);
        self.last_change = self.now;
        let (Some(leg), Some(hold)) = (leg, hold) else { return };
        let known = &mut self.service.ledger.legs[leg];
        known.holds.retain(|&held| held != hold);
        if known.ended_at.is_some_and(|ended| ended < self.now) {
            self.service.counters.quarantined += 1;
        }
        self.put_back(life, &pages);
        self.free_row_if_over(leg, life);
    }

    /// Frees the aux row of a session that has ended and whose pages are all back.
    pub(crate) fn free_row_if_over(&mut self, leg: LegId, life: LifeId) {
        let known = &mut self.service.ledger.legs[leg];
        if !known.poll.is_terminal() || !known.holds.is_empty() {
            return;
        }
        if let Some(row) = known.row.take() {
            self.memories[life].rows[row as usize] = 0;
            self.memories[life].poison_row(row);
            self.service.stock[life].free_rows.push(row);
        }
    }

    // ---- reactions ---------------------------------------------------------------------------

    pub(crate) fn state_changed(&mut self, leg: LegId, to: KvPoll) {
        let known = &self.service.ledger.legs[leg];
        let (side, request) = (known.side, known.request);
        let Some(life) = known.life else { return };
        match (side, to) {
            (Side::Receiver, KvPoll::WaitingForInput) if known.inited_at.is_none() => {
                self.act_later(leg, Act::Init { tries: 0 });
            }
            (Side::Receiver, KvPoll::Transferring) => {
                self.watch_failed_counterparts(leg);
                self.watch_refused(leg);
            }
            (_, KvPoll::Failed) => {
                self.watch_counterparts(leg);
                self.free_row_if_over(leg, life);
                self.retry(request, side);
            }
            (_, KvPoll::Success) => {
                self.watch_counterparts(leg);
                self.cover_success(leg);
                self.free_row_if_over(leg, life);
            }
            _ => {}
        }
    }

    /// Notes when the other halves of a half that has ended must have heard of that, where ends must be told.
    fn watch_counterparts(&mut self, origin: LegId) {
        if !self.service.params.tells_ends() || self.healed.is_some() {
            return;
        }
        let others: Vec<LegId> = self.service.ledger.counterparts(origin).collect();
        for leg in others {
            if self.is_remembered(origin) && self.must_be_told(leg, origin) {
                self.expect_told(leg, origin);
            }
        }
    }

    /// A half has been opened, or has made progress: if another half of the request failed before, this one
    /// must hear of that failure.
    fn watch_failed_counterparts(&mut self, leg: LegId) {
        if !self.service.params.tells_ends() || self.healed.is_some() {
            return;
        }
        let others: Vec<LegId> = self.service.ledger.counterparts(leg).collect();
        for origin in others {
            let has_failed = self.service.ledger.legs[origin].poll == KvPoll::Failed;
            if has_failed && self.is_remembered(origin) && self.must_be_told(leg, origin) {
                self.expect_told(leg, origin);
            }
        }
    }

    /// True if a frame that is under way now, however slow, finds the end of this half remembered.
    fn is_remembered(&self, origin: LegId) -> bool {
        let Physics { timing, net, .. } = &self.service.params.physics;
        let ttl = timing.failed_room_ttl.as_nanos() as u64;
        let until = self.service.ledger.legs[origin].ended_at.map(|ended| ended + ttl);
        until.is_some_and(|until| self.now + net.delay_max.max(ttl / 2) < until)
    }

    fn must_be_told(&self, leg: LegId, origin: LegId) -> bool {
        let (told, ended) = (&self.service.ledger.legs[leg], &self.service.ledger.legs[origin]);
        told.is_open()
            && match ended.side {
                // A receiver that has registered, or registers later, is told.
                Side::Sender => told.poll == KvPoll::Transferring,
                // A sender that succeeds waits for no receiver.
                Side::Receiver if ended.poll == KvPoll::Success => false,
                // A receiver that had met its sender's host says goodbye.
                Side::Receiver if ended.before < KvPoll::WaitingForInput => false,
                Side::Receiver if self.service.params.faults == Faults::None => true,
                // Where the connection breaks before the goodbye is heard, it is said again in the next conversation, for
                // senders that were open when the receiver failed. Each host measures that by its own clock: nothing is
                // asked for a sender that was opened so shortly before that the clocks may see it otherwise.
                Side::Receiver => {
                    let clocks = self.service.params.telling_time() / 16;
                    ended.ended_at.is_some_and(|at| told.opened_at + clocks <= at)
                }
            }
    }

    fn expect_told(&mut self, leg: LegId, origin: LegId) {
        self.service.counters.told += 1;
        let at = self.now + self.service.params.telling_time();
        self.calendar.enter(at, Event::Act(KvAct::Check(Check::Told { leg, origin })));
    }
}
