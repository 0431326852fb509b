//! A small world of the encoder cache: one entry at a producer whose region has room for no other, and readers of
//! the entry under leases, any of which may give up or die.
//!
//! The steps are those of the KV cache's small worlds, and one more: the producer's encoder wants the room for
//! another entry, which it gets, and overwrites, as soon as nobody reads the first. The whole oracle of the
//! worlds of the encoder cache is asked after every step. The cache is shared by reference, so that a world
//! cannot be copied: a fork repeats the history.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use kv_core::proto::{Limits, Timing};
use kv_core::wire::{Body, Frame};
use kv_core::{TransferMode, TransportError};
use kv_ec::Eviction;

use super::scope::LEASE;
use super::search::{Histories, Outcome, search};
use super::stage::{Letter, Stage};
use crate::clock::Clock;
use crate::ec::params::EcParams;
use crate::ec::service::{Ec, EcWorld};
use crate::ec::workload::{EcAct, Wish};
use crate::net::Memory as _;
use crate::net::fact::Fact;
use crate::net::host::Engine;
use crate::net::lives::Slot;
use crate::net::params::{Physics, WayParams};
use crate::planted::Planted;
use crate::violation::Violation;

/// The slot of the producer; readers have the slots from 1 on.
const P: Slot = 0;
/// More events than any session can cause before its deadline.
const EVENTS: usize = 5000;

/// A small world of the encoder cache: its readers, and the faults that may happen in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryScope {
    /// The name of the world.
    pub name: &'static str,
    /// The number of hosts that want the entry.
    pub readers: usize,
    /// How often the producer's encoder may want the room for another entry.
    pub presses: u8,
    /// How many frames may be delivered twice in one history.
    pub duplicates: u8,
    /// How many sessions may be aborted in one history.
    pub aborts: u8,
    /// How many readers may die in one history.
    pub deaths: u8,
    /// The number of steps of the longest history.
    pub depth: u8,
}

impl EntryScope {
    /// All small worlds of the encoder cache. Their depths are chosen for a test build.
    pub const ALL: &[EntryScope] = &[
        EntryScope {
            name: "one reader that gives up",
            readers: 1,
            presses: 2,
            duplicates: 1,
            aborts: 1,
            deaths: 0,
            depth: 5,
        },
        EntryScope {
            name: "two readers, of which one gives up",
            readers: 2,
            presses: 1,
            duplicates: 0,
            aborts: 1,
            deaths: 0,
            depth: 5,
        },
        EntryScope {
            name: "two readers, of which one dies",
            readers: 2,
            presses: 1,
            duplicates: 0,
            aborts: 0,
            deaths: 1,
            depth: 5,
        },
        EntryScope {
            name: "three readers",
            readers: 3,
            presses: 1,
            duplicates: 0,
            aborts: 0,
            deaths: 0,
            depth: 4,
        },
    ];

    fn params(&self) -> EcParams {
        let timing = Timing::default().with(|timing| {
            timing.session_deadline = LEASE * 8;
            timing.retry_first = LEASE / 3;
            timing.retry_max = LEASE;
            timing.keepalive = LEASE * 10 / 3;
            timing.peer_timeout = LEASE * 10;
        });
        let ways = WayParams { kinds: [10, 0, 0], ..WayParams::default() };
        EcParams {
            // The search decides how late a timer rings.
            physics: Physics { timing, ways, lateness: 1 << 50, ..Physics::calm(0, (1, self.readers)) },
            blocks: vec![1; 1 + self.readers],
            block_bytes: 16,
            items: vec![1, 1],
            both: false,
            misfit: None,
            eviction: Eviction::Lru,
            lossless: false,
            budget: LEASE * 8,
            lease: LEASE,
            answer_deadline: LEASE * 8,
            try_limit: LEASE * 8,
            retry: (LEASE / 3, LEASE),
            max_answers: 8,
            posting: (64, 1024),
            limits: Limits::default(),
            evented: 0,
            abort: 0,
            ..EcParams::draw(0)
        }
    }
}

/// Goes through all histories of a small world of the encoder cache.
pub fn explore_entries(scope: EntryScope, planted: Option<Planted>) -> Outcome {
    search(|| Shared::new(scope, planted), scope.depth, planted.is_some())
}

/// One possible step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    Deliver { letter: usize, again: bool },
    Ring(Slot),
    Copy(usize),
    End(usize),
    Fail(usize),
    Press,
    Abort(Slot),
    Die(Slot),
    Gone(usize),
}

/// The whole state of a small world at one moment.
struct Shared {
    scope: EntryScope,
    planted: Option<Planted>,
    stage: Stage<Ec>,
    history: Vec<Choice>,
}

impl Shared {
    /// The world at the moment at which every reader has sent its request.
    fn new(scope: EntryScope, planted: Option<Planted>) -> Result<Shared, Violation> {
        let world = EcWorld::still_entries(scope.params(), planted);
        let stage = Stage::new(world, 6);
        let mut shared = Shared { scope, planted, stage, history: Vec::new() };
        shared.stage.world.now = 1_000_000_000;
        for slot in 0..=scope.readers {
            // The clocks of readers are slow, so that a lease seems to last longer than it does.
            let rate = if slot == P { 1_000_000 } else { 968_750 };
            let (clock, bits) = (Clock::new(0, 0, rate), 1 + slot as u64 * 100);
            let begun = shared.stage.world.begin_ec_life(slot, (0, bits), clock);
            begun.map_err(|error| Violation { invariant: "bounded", what: error.to_string() })?;
            shared.stage.lives.push(slot);
        }
        shared.save(0)?;
        for slot in 1..=scope.readers {
            let (mode, budget) = (TransferMode::Pull, None::<Duration>);
            let wish = Wish { item: 0, blocks: 1, source: P, sessions: 1, mode, budget, must: false };
            shared.stage.world.act_ec(EcAct::Want { slot, wish });
            shared.stage.settle()?;
            let asks = |letter: &Letter| {
                Frame::decode(&letter.bytes).is_ok_and(|frame| matches!(frame.body, Body::XferReq(_)))
            };
            while let Some(at) = shared.stage.wire.iter().position(|letter| !asks(letter)) {
                let letter = shared.stage.wire.remove(at);
                shared.stage.deliver(letter)?;
            }
        }
        Ok(shared)
    }

    /// The producer's encoder saves an entry, if there is room.
    fn save(&mut self, item: usize) -> Result<(), Violation> {
        let world = &mut self.stage.world;
        let save = world.service.ledger.saves.len();
        world.act_ec(EcAct::Save { slot: P, item, must: false });
        if world.service.ledger.saves.len() > save {
            world.act_ec(EcAct::Written { save });
        }
        self.stage.settle()
    }

    fn count(&self, taken: fn(&Choice) -> bool) -> u8 {
        self.history.iter().filter(|choice| taken(choice)).count() as u8
    }

    /// True if the reader on a host still waits.
    fn waits(&self, slot: Slot) -> bool {
        self.stage.is_alive(slot) && self.stage.world.service.ledger.open(slot).next().is_some()
    }

    fn next_in_order(&self) -> Option<Choice> {
        if !self.stage.proofs.is_empty() {
            return Some(Choice::Gone(0));
        }
        if !self.stage.wire.is_empty() {
            return Some(Choice::Deliver { letter: 0, again: false });
        }
        if let Some((read, it)) = self.stage.reads().next() {
            return Some(match (it.moved == it.pieces.len(), self.stage.can_copy(it)) {
                (true, _) => Choice::End(read),
                (false, true) => Choice::Copy(read),
                (false, false) => Choice::Fail(read),
            });
        }
        self.stage.first_timer().map(Choice::Ring)
    }
}

impl Histories for Shared {
    type Choice = Choice;

    fn fork(&self) -> Result<Shared, Violation> {
        let mut fork = Shared::new(self.scope, self.planted)?;
        for choice in &self.history {
            fork.apply(*choice)?;
        }
        Ok(fork)
    }

    fn fingerprint(&self) -> u64 {
        let mut state = DefaultHasher::new();
        let world = &self.stage.world;
        let left = |choice: fn(&Choice) -> bool| self.count(choice);
        let faults = [
            left(|choice| *choice == Choice::Press),
            left(|choice| matches!(choice, Choice::Deliver { again: true, .. })),
            left(|choice| matches!(choice, Choice::Abort(_))),
            left(|choice| matches!(choice, Choice::Die(_))),
        ];
        (world.now, faults, &self.stage.proofs).hash(&mut state);
        for (slot, &life) in self.stage.lives.iter().enumerate() {
            let machine = match &world.hosts[life].engine {
                Engine::Node(machine) => machine.fingerprint(),
                _ => 0,
            };
            let desk = &world.service.ledger.desks[life];
            let cache = format!("{:?} {:?}", desk.uses, desk.store.gauges());
            (self.stage.is_alive(slot), machine, cache, world.memories[life].piece(0, 0, 16))
                .hash(&mut state);
        }
        for (_, read) in self.stage.reads() {
            (read.life, read.post, read.moved).hash(&mut state);
        }
        for session in world.service.ledger.sessions.values() {
            (session.state as u8).hash(&mut state);
        }
        let letters = self.stage.wire.iter().map(|letter| {
            let mut hash = DefaultHasher::new();
            letter.hash(&mut hash);
            hash.finish()
        });
        // In which order frames were sent does not matter.
        letters.fold(0_u64, u64::wrapping_add).hash(&mut state);
        state.finish()
    }

    fn choices(&self) -> Vec<Choice> {
        let EntryScope { presses, duplicates, aborts, deaths, readers, .. } = self.scope;
        let mut choices = Vec::new();
        let again = self.count(|choice| matches!(choice, Choice::Deliver { again: true, .. })) < duplicates;
        for letter in self.stage.letters() {
            choices.push(Choice::Deliver { letter, again: false });
            choices.extend(again.then_some(Choice::Deliver { letter, again: true }));
        }
        for (read, it) in self.stage.reads() {
            choices.push(match (it.moved == it.pieces.len(), self.stage.can_copy(it)) {
                (true, _) => Choice::End(read),
                (false, true) => Choice::Copy(read),
                (false, false) => Choice::Fail(read),
            });
        }
        choices.extend(self.stage.timers().map(Choice::Ring));
        if self.count(|choice| *choice == Choice::Press) < presses {
            choices.push(Choice::Press);
        }
        let slots = 1..=readers;
        if self.count(|choice| matches!(choice, Choice::Abort(_))) < aborts {
            choices.extend(slots.clone().filter(|slot| self.waits(*slot)).map(Choice::Abort));
        }
        if self.count(|choice| matches!(choice, Choice::Die(_))) < deaths {
            choices.extend(slots.filter(|slot| self.stage.is_alive(*slot)).map(Choice::Die));
        }
        choices.extend((0..self.stage.proofs.len()).map(Choice::Gone));
        choices
    }

    fn apply(&mut self, choice: Choice) -> Result<(), Violation> {
        self.history.push(choice);
        match choice {
            Choice::Deliver { letter, again: true } => self.stage.deliver(self.stage.wire[letter].clone()),
            Choice::Deliver { letter, again: false } => {
                let letter = self.stage.wire.remove(letter);
                self.stage.deliver(letter)
            }
            Choice::Ring(slot) => self.stage.ring(slot),
            Choice::Copy(read) => {
                self.stage.copy(read);
                self.stage.settle()
            }
            Choice::End(read) => {
                self.stage.end(read, Ok(()));
                self.stage.settle()
            }
            Choice::Fail(read) => {
                self.stage.end(read, Err(TransportError::PeerGone));
                self.stage.settle()
            }
            Choice::Press => self.save(1),
            Choice::Abort(slot) => {
                let open = self.stage.world.service.ledger.open(slot).next().map(|(session, _)| session);
                if let Some(session) = open {
                    self.stage.world.act_ec(EcAct::Abort { life: slot, session });
                }
                self.stage.settle()
            }
            Choice::Die(slot) => self.stage.die(slot),
            Choice::Gone(proof) => self.stage.prove(proof),
        }
    }

    fn describe(&self, choice: Choice) -> String {
        let what = match choice {
            Choice::Deliver { letter, .. } => {
                let it = &self.stage.wire[letter];
                let body = Frame::decode(&it.bytes).map(|frame| format!("{:?}", frame.body));
                format!("{choice:?}: {} receives {}", it.to, body.unwrap_or_default())
            }
            choice => format!("{choice:?}"),
        };
        format!("{:>9.3} s  {what}", self.stage.world.now as f64 / 1e9)
    }

    fn rest(mut self, lossy: bool) -> Result<(), Violation> {
        if lossy {
            self.stage.wire.clear();
        }
        self.stage.frames = usize::MAX;
        for _ in 0..EVENTS {
            if let Some(choice) = self.next_in_order() {
                self.apply(choice)?;
                continue;
            }
            // The readers need the entry no longer.
            self.stage.world.service.ledger.taken.clear();
            (0..=self.scope.readers).for_each(|life| self.stage.world.changed(life));
            self.stage.world.settled(!lossy);
            return self.stage.settle();
        }
        self.stage.world.tell(&Fact::Restless);
        self.stage.settle()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::service::Service as _;

    /// A producer that is told to drain while the readers on all hosts read the entry, in a world without loss.
    fn drained(readers: usize, planted: Option<Planted>) -> Shared {
        let scope = EntryScope {
            name: "a drain",
            readers,
            presses: 0,
            duplicates: 0,
            aborts: 1,
            deaths: 0,
            depth: 0,
        };
        let mut shared = Shared::new(scope, planted).unwrap();
        shared.stage.world.service.params.lossless = true;
        while shared.stage.reads().count() < readers {
            shared.apply(Choice::Deliver { letter: 0, again: false }).unwrap();
        }
        deliver_all(&mut shared).unwrap();
        shared.stage.world.drain(P);
        shared.stage.settle().unwrap();
        shared
    }

    fn deliver_all(shared: &mut Shared) -> Result<(), Violation> {
        while !shared.stage.wire.is_empty() {
            shared.apply(Choice::Deliver { letter: 0, again: false })?;
        }
        Ok(())
    }

    fn is_empty(shared: &Shared) -> bool {
        shared.stage.world.lives[P].emptied.is_some()
    }

    /// The producer is told again, which changes nothing, and the oracle looks at the producer.
    fn judge(shared: &mut Shared) -> Result<(), Violation> {
        Ec::drain(&mut shared.stage.world, P);
        shared.stage.settle()
    }

    /// Seed 9100031929: the reader has kept the blocks that the read fills, and no session waits for them.
    #[test]
    fn a_producer_is_empty_although_a_reader_that_has_given_up_still_reads() {
        let mut shared = drained(1, None);
        judge(&mut shared).unwrap();
        assert!(!is_empty(&shared), "the reader has the producer's word");
        shared.apply(Choice::Abort(1)).unwrap();
        assert!(!is_empty(&shared), "the producer has not heard");
        deliver_all(&mut shared).unwrap();
        judge(&mut shared).unwrap();
        assert_eq!((is_empty(&shared), shared.stage.reads().count()), (true, 1));
        // The read ends with the producer, and the blocks come back.
        shared.stage.crash(P);
        shared.apply(Choice::Fail(0)).unwrap();
        shared.rest(false).unwrap();
    }

    #[test]
    fn a_producer_is_not_empty_while_another_reader_reads() {
        let mut shared = drained(2, None);
        shared.apply(Choice::Abort(1)).unwrap();
        deliver_all(&mut shared).unwrap();
        judge(&mut shared).unwrap();
        assert!(!is_empty(&shared));
    }

    /// What the oracle says once the producer is called empty too early, and the reader on the first host has given up.
    fn called_empty(readers: usize, heard: bool) -> Option<&'static str> {
        let mut shared = drained(readers, Some(Planted::EmptyWhileItServes));
        shared.apply(Choice::Abort(1)).unwrap();
        if heard {
            deliver_all(&mut shared).ok();
        }
        judge(&mut shared).err().map(|violation| violation.invariant)
    }

    #[test]
    fn only_a_read_of_which_the_producer_knows_that_it_was_given_up_may_go_on_when_the_producer_is_empty() {
        assert_eq!(called_empty(1, true), None);
        let broken = Some(Planted::EmptyWhileItServes.caught_by());
        assert_eq!((called_empty(1, false), called_empty(2, true)), (broken, broken));
    }
}
