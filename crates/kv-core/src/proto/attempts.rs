//! Attempts of peers at this node, before and after a session serves them: registrations that wait,
//! aborts, and answers to receivers that missed something.
//!
//! The states of an attempt stand at [`Incoming`]. An attempt that its receiver has ended is closed
//! for ever: a registration that arrives after its abort is never served.

use std::time::Duration;

use super::groups::check_peer_groups;
use super::node::Node;
use super::peer::{Incoming, Registration, Wish};
use super::receive::check_aux;
use super::timer::Timer;
use crate::error::{Cause, PeerCause};
use crate::id::{Attempt, PeerId, Room};
use crate::pages::MAX_PAGES;
use crate::wire::{Abort, AbortAck, Body, Failed, Finish, Progress, Register, Registered};

/// Most runs of parts that one answer lists; the receiver asks again for the rest.
const MAX_TOLD_RUNS: usize = 1024;

impl Node {
    pub(super) fn on_register(&mut self, id: PeerId, register: Register) {
        self.on_floor(id, register.floor);
        let Register { attempt, room, pages, first, whole, aux, aux_here, ranks, ttl_ms, groups, .. } =
            register;
        let Some(peer) = self.peers.get_mut(id) else { return };
        let window = self.config.limits.max_attempts;
        if peer.is_closed(attempt) || attempt.0 - peer.floor.0 >= window {
            self.frames_dropped += 1;
            return;
        }
        match peer.incoming.get(&attempt) {
            Some(Incoming::Waiting(_) | Incoming::Active(..)) => {
                return self.send(id, Body::Registered(Registered { attempt }));
            }
            Some(Incoming::Served { .. } | Incoming::Failed { .. }) => return self.tell_about(id, attempt),
            // The number stands for something else already.
            Some(Incoming::Reading { .. }) => return,
            None => {}
        }
        let geometry = &peer.geometry;
        let out_of_range = pages.check_below(geometry.num_pages).is_err()
            || pages.check_distinct().is_err()
            || first > MAX_PAGES
            || pages.len() as u64 + u64::from(first) > u64::from(whole)
            || check_aux(aux, geometry.aux_rows().unwrap_or(0)).is_some()
            || check_peer_groups(&groups, geometry).is_err();
        if out_of_range && !self.stopping {
            return self.refuse_registration(id, attempt, room, PeerCause::OutOfRange);
        }
        let wish = Wish::Write { pages, first, whole, aux, aux_here, groups };
        let registration = Registration { room, ranks, wish };
        self.seek_sender(id, attempt, registration, ttl_ms);
    }

    /// Brings a new registration or claim to its sender, or lets it wait for one.
    pub(super) fn seek_sender(
        &mut self,
        id: PeerId,
        attempt: Attempt,
        registration: Registration,
        ttl_ms: u64,
    ) {
        if self.stopping {
            return self.refuse_attempt(id, attempt, PeerCause::WorkerStopped);
        }
        if self.peers.get(id).is_some_and(|peer| peer.refused) {
            return self.refuse_registration(id, attempt, registration.room, PeerCause::Protocol);
        }
        self.watch_peer(id);
        if let Some(session) = self.rendezvous.senders.find(&registration.room) {
            return self.attach(session, id, attempt, registration);
        }
        if let Some(cause) = self.rendezvous.failed_senders.take(&registration.room, registration.ranks) {
            return self.refuse_attempt(id, attempt, cause);
        }
        let (limits, runs) = (&self.config.limits, registration.runs());
        if self.rendezvous.registrations.len() >= limits.max_registrations
            || self.rendezvous.waiting_runs + runs > limits.max_waiting_runs
        {
            return self.refuse_registration(id, attempt, registration.room, PeerCause::Overloaded);
        }
        self.rendezvous.registrations.insert(&registration.room, (id, attempt));
        self.rendezvous.waiting_runs += runs;
        if let Some(peer) = self.peers.get_mut(id) {
            peer.incoming.insert(attempt, Incoming::Waiting(registration));
        }
        let ttl = Duration::from_millis(ttl_ms)
            .min(self.config.timing.session_deadline.max(Duration::from_secs(1)));
        self.timers.arm(Timer::Registration(id, attempt), self.now + ttl);
        self.send(id, Body::Registered(Registered { attempt }));
    }

    pub(super) fn take_registration(&mut self, id: PeerId, attempt: Attempt) -> Option<Registration> {
        let peer = self.peers.get_mut(id)?;
        match peer.incoming.remove(&attempt) {
            Some(Incoming::Waiting(registration)) => {
                self.rendezvous.registrations.remove(&registration.room, (id, attempt));
                self.rendezvous.waiting_runs -= registration.runs();
                self.timers.cancel(Timer::Registration(id, attempt));
                Some(registration)
            }
            other => {
                if let Some(other) = other {
                    peer.incoming.insert(attempt, other);
                }
                None
            }
        }
    }

    pub(super) fn on_registration_expired(&mut self, id: PeerId, attempt: Attempt) {
        self.drop_registration(id, attempt, PeerCause::DeadlineExceeded);
    }

    /// Fails a registration that waits for its sender.
    pub(super) fn drop_registration(&mut self, id: PeerId, attempt: Attempt, cause: PeerCause) {
        if let Some(registration) = self.take_registration(id, attempt) {
            self.refuse_registration(id, attempt, registration.room, cause);
        }
    }

    /// Fails a registration on this side's account: its sender should not wait for another one.
    fn refuse_registration(&mut self, id: PeerId, attempt: Attempt, room: Room, cause: PeerCause) {
        self.refuse_attempt(id, attempt, cause.clone());
        self.receiver_gave_up(room, cause);
    }

    /// Fails an attempt that no session serves.
    pub(super) fn refuse_attempt(&mut self, id: PeerId, attempt: Attempt, cause: PeerCause) {
        if let Some(peer) = self.peers.get_mut(id) {
            peer.incoming.insert(attempt, Incoming::Failed { cause: cause.clone() });
        }
        self.watch_peer(id);
        self.send(id, Body::Failed(Failed { attempt, cause, quiet: true }));
    }

    pub(super) fn on_abort(&mut self, id: PeerId, abort: Abort) {
        let Abort { attempt, room, grant, cause } = abort;
        let Some(peer) = self.peers.get_mut(id) else { return };
        if peer.is_closed(attempt) {
            return self.send(id, Body::AbortAck(AbortAck { attempt }));
        }
        if attempt.0 - peer.floor.0 >= self.config.limits.max_attempts {
            self.frames_dropped += 1;
            return;
        }
        match peer.incoming.get(&attempt) {
            Some(&Incoming::Active(session, index)) => {
                let target = self.senders.get_mut(&session).and_then(|sender| sender.targets.get_mut(index));
                if let Some(target) = target {
                    target.abort_asked = true;
                }
                // Acknowledged once the target's posts have ended: maybe now, maybe later.
                return self.fail_sender(session, Cause::ByPeer(cause));
            }
            Some(&Incoming::Reading { session, target: index, .. }) => {
                if let Some(target) = self.target_mut(session, index) {
                    target.abort_asked = true;
                }
                self.fail_sender(session, Cause::ByPeer(cause));
                // It may have failed before.
                return self.reader_let_go(session, index);
            }
            Some(Incoming::Waiting(_)) => {
                self.take_registration(id, attempt);
                self.receiver_gave_up(room, cause);
            }
            Some(Incoming::Served { .. } | Incoming::Failed { .. }) => {}
            None => match grant {
                None => self.receiver_gave_up(room, cause),
                Some(nonce) => self.reader_gave_up(nonce, &room, cause),
            },
        }
        if let Some(peer) = self.peers.get_mut(id) {
            peer.close(attempt);
        }
        self.send(id, Body::AbortAck(AbortAck { attempt }));
    }

    /// A receiver will never register: its sender is told, now or when it comes.
    fn receiver_gave_up(&mut self, room: Room, cause: PeerCause) {
        match self.rendezvous.senders.find(&room) {
            Some(session) => self.fail_sender_of(session, Cause::ByPeer(cause), 1),
            None => {
                let until = self.now + self.config.timing.failed_room_ttl;
                let max = self.config.limits.max_failed_rooms;
                self.rendezvous.failed_receivers.insert(room, cause, until, max);
                self.timers.arm_once(Timer::Rooms, until);
            }
        }
    }

    pub(super) fn on_finish(&mut self, id: PeerId, finish: Finish) {
        self.finish_attempt(id, finish.attempt);
        self.on_floor(id, finish.floor);
    }

    /// The peer says that the attempt is over for it.
    pub(super) fn finish_attempt(&mut self, id: PeerId, attempt: Attempt) {
        self.take_registration(id, attempt);
        let Some(peer) = self.peers.get_mut(id) else { return };
        let active = match peer.incoming.get(&attempt) {
            Some(&Incoming::Active(session, index)) => Some((session, index)),
            Some(&Incoming::Reading { session, target, .. }) => {
                peer.close(attempt);
                return self.reader_finished(session, target);
            }
            _ => None,
        };
        peer.close(attempt);
        let Some((session, index)) = active else { return };
        let target = self.senders.get(&session).and_then(|sender| sender.targets.get(index));
        if target.is_some_and(|target| target.total.is_none()) {
            self.fail_sender(session, Cause::Protocol("finished before everything was sent"));
        }
    }

    /// All attempts of the peer below `floor` are over for it.
    pub(super) fn on_floor(&mut self, id: PeerId, floor: Attempt) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        if floor <= peer.floor {
            return;
        }
        let over: Vec<Attempt> = peer.incoming.range(..floor).map(|(&attempt, _)| attempt).collect();
        peer.floor = floor;
        peer.closed.forget_below(floor.0);
        for attempt in over {
            self.finish_attempt(id, attempt);
        }
    }

    /// Answers a receiver that has heard nothing about an attempt.
    pub(super) fn tell_about(&mut self, id: PeerId, attempt: Attempt) {
        let Some(peer) = self.peers.get(id) else { return };
        let body = match peer.incoming.get(&attempt) {
            Some(Incoming::Waiting(_)) => return,
            Some(Incoming::Active(session, index)) => {
                let Some(sender) = self.senders.get(session) else { return };
                let Some(target) = sender.targets.get(*index) else { return };
                match &sender.failure {
                    Some(cause) => Body::Failed(Failed { attempt, cause: cause.clone(), quiet: false }),
                    None if target.done.len() == 0 => return,
                    None => {
                        let runs = target.done.runs().take(MAX_TOLD_RUNS);
                        let done = runs.map(|(start, count)| (start as u32, count as u32)).collect();
                        let skipped = target.total.map_or_else(Vec::new, |_| target.skipped.clone());
                        Body::Progress(Progress { attempt, done, total: target.total, skipped })
                    }
                }
            }
            Some(&Incoming::Reading { session, target, .. }) => {
                let Some(sender) = self.senders.get(&session) else { return };
                match &sender.failure {
                    Some(cause) => Body::Failed(Failed { attempt, cause: cause.clone(), quiet: false }),
                    None => return self.answer_claim(id, attempt, session, target),
                }
            }
            Some(Incoming::Served { total, skipped }) => Body::Progress(Progress {
                attempt,
                done: vec![(0, *total)],
                total: Some(*total),
                skipped: skipped.clone(),
            }),
            Some(Incoming::Failed { cause }) => {
                Body::Failed(Failed { attempt, cause: cause.clone(), quiet: true })
            }
            None => Body::Failed(Failed { attempt, cause: PeerCause::Unknown, quiet: true }),
        };
        self.send(id, body);
    }

    /// A failed attempt is quiet: the receiver may have its pages back.
    pub(super) fn attempt_failed(
        &mut self,
        id: PeerId,
        attempt: Attempt,
        cause: PeerCause,
        abort_asked: bool,
    ) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        if abort_asked {
            peer.close(attempt);
            return self.send(id, Body::AbortAck(AbortAck { attempt }));
        }
        if !peer.is_closed(attempt) {
            peer.incoming.insert(attempt, Incoming::Failed { cause: cause.clone() });
        }
        self.send(id, Body::Failed(Failed { attempt, cause, quiet: true }));
    }
}
