//! What must be true of entries, after every step.
//!
//! | invariant | what it says |
//! |---|---|
//! | `entries_have_their_bytes` | a committed entry, and an entry that a consumer uses, has the content of its hash in every block |
//! | `no_block_in_two_hands` | every block has one user, and the gauges say who (`books.rs`) |
//! | `no_wire_touches_a_free_block` | a post touches only blocks that are used as they were when it was made |
//! | `sessions_end_once_by_their_budget` | every session ends once, in time, and gives its slot back once |
//! | `refusals_are_true` | an entry is called missing, or not ready, or of another size, only if it was so |
//! | `a_lasting_refusal_ends_it` | nobody asks again after a refusal that lasts |
//! | `one_transfer_for_an_entry` | sessions that want an entry at once cause one transfer |
//! | `drains_lose_nothing` | a host that drains serves what came before and opens nothing more, and is empty only when nothing moves (`drains.rs`) |
//! | `requests_are_served` | once faults have stopped, whoever wants an entry that is there gets it |
//! | `idle_is_quiet` | at rest nothing is pinned, filling, lost or in quarantine, and nobody waits |
//! | `bounded` | no panic, no frame or post beyond its bound, no timer that rings without end |

use kv_core::machine::SessionStatus;
use kv_core::{Cause, MAX_FRAME, Op, SessionId, Time};
use kv_ec::{EcError, EcPoll, EntryGuard};

use super::books::committed;
use super::ledger::{Item, Session, State, item_of, refusal};
use super::service::{EcFact, EcGauges, EcWorld};
use crate::clock::MS;
use crate::net::fact::Fact;
use crate::net::lives::LifeId;
use crate::net::way::may_write;
use crate::violation::Violation;

pub(super) type Verdict = Result<(), Violation>;

/// More timeouts of one machine at one moment than any world needs.
const MAX_TIMEOUTS: u32 = 8;

pub(super) fn broken(invariant: &'static str, what: String) -> Verdict {
    Err(Violation { invariant, what })
}

impl EcWorld {
    /// Judges a fact.
    pub(super) fn judge(&mut self, fact: &Fact<'_, EcGauges, EcFact<'_>>) -> Verdict {
        match *fact {
            // What a step has done to the cache is looked at before its outputs are carried out.
            Fact::Cost { life, .. } | Fact::Own(EcFact::Changed(life)) => self.look(life),
            Fact::Stepped { life, input, now, next, gauges } => {
                self.look(life)?;
                self.look_at_transfers(life, &gauges.moving)?;
                self.spins(life, input, (now, next))?;
                self.after_a_step(life)
            }
            Fact::Own(EcFact::Status { life, session, to, why }) => self.told(life, session, to, why),
            Fact::Own(EcFact::Back { life, session, guard }) => self.comes_back(life, session, guard),
            Fact::Read { flight, piece, holder } => {
                let flight = &self.flights[flight];
                let (life, post) = (flight.life, flight.post);
                self.right_hold(life, piece.local_offset, piece.local_hold, holder, &format!("{post} reads"))
            }
            Fact::Written { flight, piece, life, holder } => {
                let flight = &self.flights[flight];
                let (offset, hold) = match flight.op {
                    Op::Read => (piece.local_offset, piece.local_hold),
                    Op::Write if life == flight.target => (piece.remote_offset, piece.remote_hold),
                    Op::Write => return Ok(()),
                };
                let post = flight.post;
                self.right_hold(life, offset, hold, holder, &format!("{post} writes"))
            }
            Fact::Panicked { life, message } => broken("bounded", format!("life {life} panics: {message}")),
            Fact::BadDescriptor { life, what } => broken("bounded", format!("life {life} posts {what}")),
            Fact::Sent { life, bytes } if bytes > MAX_FRAME => {
                broken("bounded", format!("life {life} sends a frame of {bytes} bytes"))
            }
            Fact::Restless => broken("idle_is_quiet", "the world does not come to rest".to_owned()),
            Fact::Settled { gauges, .. } => self.at_rest(gauges),
            _ => Ok(()),
        }
    }

    /// Everything that must hold after each step of a life.
    fn after_a_step(&self, life: LifeId) -> Verdict {
        if !self.lives[life].alive {
            return Ok(());
        }
        self.entries_have_their_bytes(life)?;
        self.flights_keep_to_their_blocks(life)?;
        self.empty_is_still(life)?;
        let late = self.service.ledger.open(life).find(|(_, session)| self.is_late(life, session));
        late.map_or(Ok(()), |(id, session)| {
            let what =
                format!("session {id} of life {life} is {} at {}: {session:?}", session.state, self.now);
            broken("sessions_end_once_by_their_budget", what)
        })
    }

    pub(super) fn entries_have_their_bytes(&self, life: LifeId) -> Verdict {
        let ledger = &self.service.ledger;
        for entry in committed(&ledger.desks[life].store) {
            self.right_bytes(life, entry.item, &entry.blocks, "committed")?;
        }
        for taken in ledger.taken.values().filter(|taken| taken.life == life) {
            self.right_bytes(life, taken.item, &taken.blocks, "in use")?;
        }
        Ok(())
    }

    /// True content in all blocks of an entry.
    fn right_bytes(&self, life: LifeId, item: Item, blocks: &[u32], what: &str) -> Verdict {
        let key = self.content_key(self.hosts[life].slot, item);
        let memory = &self.memories[life];
        let mut places = blocks.iter().zip(0..);
        match places.find(|(block, position)| memory.wrong_page(**block, key, *position, u64::MAX).is_some())
        {
            Some((block, position)) => broken(
                "entries_have_their_bytes",
                format!(
                    "image {item}, {what} on life {life}, has other bytes in block {block} ({position} of {blocks:?})"
                ),
            ),
            None => Ok(()),
        }
    }

    /// Posts that are under way touch blocks of a life only as these were used when the posts were made.
    fn flights_keep_to_their_blocks(&self, life: LifeId) -> Verdict {
        let memory = &self.memories[life];
        let block = |offset: u64| (offset / self.service.params.block_bytes as u64) as usize;
        for flight in self.flights.iter().filter(|flight| !flight.over) {
            let own = flight.life == life;
            let into = flight.target == life
                && flight.op == Op::Write
                && may_write(flight, &self.ways[flight.way], &self.lives, self.now);
            for piece in &flight.pieces {
                let wrong = own && memory.pages[block(piece.local_offset)] != piece.local_hold
                    || into && memory.pages[block(piece.remote_offset)] != piece.remote_hold;
                if wrong {
                    let what = format!(
                        "{} of life {} is under way, and its blocks of life {life} are used otherwise: {piece:?}",
                        flight.post, flight.life
                    );
                    return broken("no_wire_touches_a_free_block", what);
                }
            }
        }
        Ok(())
    }

    fn right_hold(&self, life: LifeId, offset: u64, then: u32, now: u32, what: &str) -> Verdict {
        if then != 0 && then == now {
            return Ok(());
        }
        let what = format!("{what} at {offset} of life {life}, used as {then} when posted and as {now} now");
        broken("no_wire_touches_a_free_block", what)
    }

    /// True if the session's budget is over. A host that was stopped has had no time to end it.
    fn is_late(&self, life: LifeId, session: &Session) -> bool {
        let known = &self.lives[life];
        let due = known.clock.global(session.due);
        session.source.is_some() && self.now > due.max(known.paused_until) + self.slack() + MS
    }

    fn told(&mut self, life: LifeId, id: SessionId, to: EcPoll, why: Option<&EcError>) -> Verdict {
        const ENDS: &str = "sessions_end_once_by_their_budget";
        if self.params.ways.several
            && let Some(EcError::Transfer(error)) = why
            && matches!(error.cause, Cause::PeerUnresponsive { .. })
        {
            self.service.ledger.excuse_vain_wait((life, id), self.now);
        }
        let Some(session) = self.service.ledger.sessions.get(&(life, id)) else {
            return broken(ENDS, format!("unknown session {id} of life {life} becomes {to}"));
        };
        let from = session.state;
        let forward = match (from, to) {
            (EcPoll::Ready | EcPoll::Failed, _) => false,
            (EcPoll::Waiting, _) | (_, EcPoll::Ready | EcPoll::Failed) => true,
            // Another try begins when one has failed.
            (EcPoll::Transferring, _) => true,
        };
        if !forward || self.is_late(life, session) || (to == EcPoll::Failed) != why.is_some() {
            let what =
                format!("session {id} of life {life}: {from} -> {to}, {why:?} at {}: {session:?}", self.now);
            return broken(ENDS, what);
        }
        if session.must && to == EcPoll::Failed {
            let what = format!("session {id} of life {life} fails without a fault: {why:?}: {session:?}");
            return broken("requests_are_served", what);
        }
        self.opened_before_the_drain(life, id, session, to)?;
        why.map_or(Ok(()), |why| self.reason_is_true(life, session, why))
    }

    fn reason_is_true(&self, life: LifeId, session: &Session, why: &EcError) -> Verdict {
        let known = &self.lives[life];
        let desk = &self.service.ledger.desks[life];
        let untrue = match why {
            EcError::Aborted => !session.aborted,
            EcError::WorkerStopped => !known.shut_down,
            EcError::Draining => known.draining.is_none_or(|since| session.opened_at < since),
            EcError::Budget { last, .. } => {
                known.clock.local(self.now) < session.due
                    || last.as_ref().is_some_and(|last| self.is_unheard(life, session, last))
            }
            EcError::OtherLength { held, asked } => {
                held == asked || !desk.seen[session.item].was(State::Ready, 0)
            }
            EcError::Room(error) => {
                !matches!(error, kv_ec::ReserveError::TooLarge { blocks, region } if blocks > &u64::from(*region))
            }
            EcError::Transfer(error) => match &error.cause {
                Cause::ByPeer(kv_core::PeerCause::EntryNotReady) => true,
                Cause::Incompatible(_) | Cause::ByPeer(kv_core::PeerCause::Incompatible(_)) => {
                    self.service.params.misfit.is_none()
                }
                Cause::Protocol(_) | Cause::BadPages(_) | Cause::InitOrder | Cause::TooManyPages { .. } => {
                    true
                }
                // A peer may come by a transport that swallows what this side says: one session waits there in vain.
                Cause::PeerUnresponsive { .. } if self.params.ways.several => false,
                Cause::PeerLost | Cause::WayLost | Cause::PeerRestarted | Cause::PeerUnresponsive { .. } => {
                    self.service.params.lossless && self.lives.iter().all(|life| life.emptied.is_none())
                }
                Cause::ByPeer(kv_core::PeerCause::WorkerStopped) => {
                    !self.lives.iter().any(|life| life.shut_down || life.draining.is_some())
                }
                _ => self.is_unheard(life, session, why),
            },
            _ => false,
        };
        match untrue {
            true => broken("refusals_are_true", format!("life {life} is told {why:?}: {session:?}")),
            false => Ok(()),
        }
    }

    /// True if the reason is a refusal that no life of the session's producer has told this life.
    fn is_unheard(&self, life: LifeId, session: &Session, why: &EcError) -> bool {
        let EcError::Transfer(error) = why else { return false };
        let Cause::ByPeer(cause) = &error.cause else { return false };
        let Some(name) = refusal(cause) else { return false };
        let said = &self.service.ledger.said;
        // Sessions of one fetch may name different producers.
        !said.iter().any(|(to, _, item, told)| (*to, *item, *told) == (life, session.item, name))
    }

    fn comes_back(&self, life: LifeId, id: SessionId, guard: Option<&EntryGuard>) -> Verdict {
        const ENDS: &str = "sessions_end_once_by_their_budget";
        let Some(session) = self.service.ledger.sessions.get(&(life, id)) else {
            return broken(ENDS, format!("unknown session {id} of life {life} gives a slot back"));
        };
        let ready = session.state == EcPoll::Ready && session.source.is_some();
        if session.back || !session.state.is_terminal() || guard.is_some() != ready {
            let what = format!("session {id} of life {life} gives a slot back: {guard:?}, {session:?}");
            return broken(ENDS, what);
        }
        let Some(guard) = guard else { return Ok(()) };
        let right = item_of(guard.hash()) == Some(session.item) && guard.bytes() == session.bytes;
        if !right {
            return broken(
                "entries_have_their_bytes",
                format!("{guard:?} is not what was wanted: {session:?}"),
            );
        }
        self.right_bytes(life, session.item, &guard.pages().iter().collect::<Vec<_>>(), "given out")
    }

    /// True if a timer is due again at the moment at which it rang, time after time.
    fn spins(&mut self, life: LifeId, input: &str, (now, next): (Time, Option<Time>)) -> Verdict {
        if input != "timeout" {
            return Ok(());
        }
        let (at, times) = self.service.timeouts.entry(life).or_insert((now, 0));
        *times = if *at == now { *times + 1 } else { 1 };
        *at = now;
        match *times > MAX_TIMEOUTS && next.is_some_and(|next| next <= now) {
            true => broken("bounded", format!("life {life} wants a timeout at {next:?} again and again")),
            false => Ok(()),
        }
    }

    fn at_rest(&self, gauges: &[(LifeId, EcGauges, Option<Time>)]) -> Verdict {
        const IDLE: &str = "idle_is_quiet";
        for (life, gauges, next) in gauges {
            let cache = self.service.ledger.desks[*life].store.gauges();
            let (machine, node) = (gauges.machine, gauges.machine.node);
            let kept = [
                ("blocks pinned", cache.pinned as usize),
                ("blocks filling", cache.filling as usize),
                ("blocks lost", cache.lost as usize),
                ("sessions waiting", machine.waiting),
                ("transfers", machine.transfers),
                ("answers", machine.answers),
                ("senders", node.senders),
                ("receivers", node.receivers),
                ("registrations", node.registrations),
                ("failed rooms", node.failed_rooms),
                ("posts", node.posts),
                ("lookups", node.lookups),
                ("timers", node.timers),
                ("leased pages", node.pages_leased),
            ];
            if let Some((what, count)) = kept.into_iter().find(|(_, count)| *count > 0) {
                return broken(
                    IDLE,
                    format!("life {life} keeps {count} {what} when all is still: {gauges:?}"),
                );
            }
            if next.is_some() {
                return broken(IDLE, format!("life {life} wants a timeout at {next:?} when all is still"));
            }
        }
        let sessions = &self.service.ledger.sessions;
        let mut living = sessions.iter().filter(|((life, _), _)| self.lives[*life].alive);
        if let Some((id, session)) = living.find(|(_, known)| !known.state.is_terminal() || !known.back) {
            let what = format!("session {id:?} has not ended at rest, or its slot is not back: {session:?}");
            return broken("sessions_end_once_by_their_budget", what);
        }
        self.drains_have_ended()?;
        self.round_is_served()
    }
}
