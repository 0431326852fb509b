//! The granting half of a pull session, on the prefill side: claims, leases, releases.
//!
//! ```text
//! open ─▶ WaitingForInput ─ send ─▶ Transferring ─ complete ─▶ pages pinned, lease runs
//!            claims wait                                          │ Granted to every claim
//!                                                                 │ heartbeats extend the lease
//!                                                                 ▼
//!                              every reader has released ─▶ Success, pages back
//!                              the lease has run out     ─▶ Failed(LeaseExpired), pages back
//! any other failure ─▶ Failed ─▶ readers told ─▶ each has released, or its lease has run out ─▶ pages back
//! ```
//!
//! What makes this safe: a reader reports success only if it knows, from an answer to something it
//! sent *before*, that the lease had not run out when its last read ended. So pages that a grant
//! has named stay as they are until their reader says that it is done, or until the last lease
//! that it may know of is over. Nothing else frees them, a failure of the session included; nor does
//! the plane's word that the peer is gone, for that is about this side's connection: the peer may
//! live, and go on reading through its own.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::handshake::MAX_ASKED;
use super::incoming::Incoming;
use super::node::Node;
use super::peer::{Registration, Wish};
use super::read::MAX_RUNS;
use super::rendezvous::Named;
use super::run_set;
use super::timer::Timer;
use crate::error::{Cause, PeerCause};
use crate::groups::Groups;
use crate::id::{Attempt, PeerId, SessionId};
use crate::meter::{each, step};
use crate::time::Time;
use crate::wire::{Body, Claim, Granted, Heartbeat, HeartbeatAck, Link, Registered, Release, Released};

/// Most attempts that one release ends.
const MAX_RELEASED: usize = 4096;

/// What became of grants that are no more: bounded, the oldest are forgotten first.
#[derive(Debug, Clone, Default)]
pub(super) struct EndedGrants {
    causes: BTreeMap<SessionId, PeerCause>,
    order: VecDeque<SessionId>,
}

impl EndedGrants {
    pub(super) fn insert(&mut self, nonce: SessionId, cause: PeerCause, max: usize) {
        while self.order.len() >= max.max(1) {
            step(1);
            if let Some(oldest) = self.order.pop_front() {
                self.causes.remove(&oldest);
            }
        }
        self.causes.insert(nonce, cause);
        self.order.push_back(nonce);
    }

    fn get(&self, nonce: SessionId) -> Option<&PeerCause> {
        self.causes.get(&nonce)
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }
}

impl Node {
    pub(super) fn on_claim(&mut self, id: PeerId, claim: Claim) {
        self.on_floor(id, claim.floor);
        let Claim { attempt, room, grant, beat, ranks, ttl_ms, .. } = claim;
        let Some(peer) = self.peers.get(id) else { return };
        if !self.may_note(peer, attempt) {
            self.frames_dropped += 1;
            return;
        }
        let (named, origin) = (Named::new(room, peer.suffixed), peer.origin);
        if matches!(peer.incoming.get(attempt), Some(Incoming::Served { .. } | Incoming::Failed { .. })) {
            return self.tell_about(id, attempt);
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        match peer.incoming.get_mut(attempt) {
            Some(&mut Incoming::Reading { session, target, .. }) => {
                if let Some(target) = self.target_mut(session, target) {
                    target.beat = beat;
                }
                return self.answer_claim(id, attempt, session, target);
            }
            Some(Incoming::Waiting(registration)) => {
                if let Wish::Read { beat: known } = &mut registration.wish {
                    *known = beat;
                }
                return self.send(id, Body::Registered(Registered { attempt }));
            }
            // The number stands for something else already.
            Some(_) => return,
            None => {}
        }
        let registration = Registration { named, origin, ranks, wish: Wish::Read { beat } };
        match grant {
            Some(nonce) if !self.stopping => self.claim_grant(id, attempt, nonce, registration),
            _ => self.seek_sender(id, attempt, registration, ttl_ms),
        }
    }

    /// A claim that says which sender it means.
    fn claim_grant(&mut self, id: PeerId, attempt: Attempt, nonce: SessionId, registration: Registration) {
        let refused = self.peers.get(id).is_some_and(|peer| peer.refused);
        let unknown = PeerCause::UnknownGrant { nonce: nonce.0 };
        let cause = match self.senders.get(&nonce) {
            _ if refused => PeerCause::Protocol,
            Some(sender) if !sender.named.is_same_request(&registration.named) => unknown,
            Some(sender) => match &sender.failure {
                Some(cause) => cause.clone(),
                None if sender.lacks_receivers() => {
                    self.watch_peer(id);
                    return self.attach(nonce, id, attempt, registration);
                }
                None => PeerCause::GrantConsumed { nonce: nonce.0 },
            },
            None => self.ended_grants.get(nonce).cloned().unwrap_or(unknown),
        };
        self.refuse_attempt(id, attempt, cause);
    }

    /// A reader will never claim the grant that it was given: nobody else will.
    pub(super) fn reader_gave_up(&mut self, nonce: SessionId, named: &Named, cause: PeerCause) {
        let meant = self
            .senders
            .get(&nonce)
            .is_some_and(|sender| sender.named.is_same_request(named) && sender.lacks_receivers());
        if meant {
            self.fail_sender_of(nonce, Cause::ByPeer(cause), 1);
        }
    }

    /// Tells a reader the grant, or that there is none yet.
    pub(super) fn answer_claim(&mut self, id: PeerId, attempt: Attempt, session: SessionId, index: usize) {
        let granted = self.senders.get(&session).is_some_and(|sender| sender.pinned_until.is_some());
        if granted {
            self.say_granted(session, index);
        } else {
            self.send(id, Body::Registered(Registered { attempt }));
        }
    }

    /// The pages are complete: pins them, and tells the readers that have claimed them.
    pub(super) fn grant(&mut self, session: SessionId) {
        let Some(sender) = self.senders.get_mut(&session) else { return };
        let until = self.now + sender.lease.duration();
        sender.pinned_until = Some(until);
        let readers: Vec<usize> = sender.readers().map(|(index, _)| index).collect();
        self.pages_leased += sender.pages_leased();
        self.timers.arm(Timer::Lease(session), until);
        for index in each(readers) {
            self.say_granted(session, index);
        }
    }

    fn say_granted(&mut self, session: SessionId, index: usize) {
        let Some(sender) = self.senders.get(&session) else { return };
        let (Some(pinned_until), Some(target)) = (sender.pinned_until, sender.targets.get(index)) else {
            return;
        };
        if target.over || sender.failure.is_some() {
            return;
        }
        let (id, attempt) = (target.peer, target.attempt);
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(Incoming::Reading { until, extension, intact, .. }) = peer.incoming.get_mut(attempt) else {
            return;
        };
        *until = pinned_until.max(*until);
        *extension = sender.lease.extension();
        *intact = true;
        let (lease, interval) = (*until - self.now, sender.lease.heartbeat_interval());
        let granted = Granted {
            attempt,
            beat: target.beat,
            grant: session,
            pages: sender.all_pages(),
            aux: sender.aux(),
            lease_ms: millis(lease),
            interval_ms: interval.map_or(0, |interval| millis(interval).max(1)),
            groups: sender.groups.as_ref().map(Groups::lists).unwrap_or_default(),
        };
        let theirs = peer.theirs.unwrap_or(Link::NONE);
        match peer.codec.encode(theirs, &Body::Granted(granted)) {
            Ok(frame) => self.output(super::io::Output::Send { peer: id, frame }),
            Err(_) => self.fail_sender(session, Cause::Protocol("pages too scattered for one frame")),
        }
    }

    pub(super) fn on_heartbeat(&mut self, id: PeerId, heartbeat: Heartbeat) {
        let Heartbeat { beat, floor, attempts } = heartbeat;
        if !is_rising(&attempts) {
            self.frames_dropped += 1;
            return;
        }
        self.on_floor(id, floor);
        let now = self.now;
        let Some(peer) = self.peers.get_mut(id) else { return };
        let mut alive: Vec<(u64, u32)> = Vec::new();
        let mut others: Vec<Attempt> = Vec::new();
        let mut until = Time::MAX;
        // One walk along the attempts, however scattered the runs are.
        let ends = |&(start, count): &(u64, u32)| (start, start.saturating_add(u64::from(count)));
        let span = attempts.first().map_or(0, |run| run.0)..attempts.last().map_or(0, |run| ends(run).1);
        let mut runs = attempts.iter().map(ends);
        let mut run = runs.next();
        for attempt in each(peer.incoming.reading(Attempt(span.start)..Attempt(span.end))) {
            while let Some((next, end)) = run.filter(|&(_, end)| end <= attempt.0) {
                step(1);
                note_missing(&mut others, next, end);
                run = runs.next();
            }
            let Some((next, end)) = run.filter(|&(next, _)| next <= attempt.0) else { continue };
            note_missing(&mut others, next, attempt.0);
            run = Some((attempt.0 + 1, end));
            let incoming = peer.incoming.get_mut(attempt);
            let Some(Incoming::Reading { until: own, extension, intact: true, .. }) = incoming else {
                note_missing(&mut others, attempt.0, attempt.0 + 1);
                continue;
            };
            if let Some(extension) = *extension {
                *own = (*own).max(now + extension);
            }
            until = until.min(*own);
            run_set::append(&mut alive, attempt.0);
        }
        while let Some((next, end)) = run {
            step(1);
            note_missing(&mut others, next, end);
            run = runs.next();
        }
        // One run that came may be many that are left: more than fit into a frame.
        for attempts in each(alive.chunks(MAX_RUNS)) {
            let (lease_ms, attempts) = (millis(until - now), attempts.to_vec());
            self.send(id, Body::HeartbeatAck(HeartbeatAck { beat, lease_ms, attempts }));
        }
        for attempt in each(others) {
            self.tell_about(id, attempt);
        }
    }

    pub(super) fn on_release(&mut self, id: PeerId, release: Release) {
        let Release { floor, attempts } = release;
        if !is_rising(&attempts) {
            self.frames_dropped += 1;
            return;
        }
        // One short frame may name many: those that are left are released when the peer says it again.
        let mut left = MAX_RELEASED;
        let mut released: Vec<(u64, u32)> = Vec::new();
        for &(start, count) in each(&attempts) {
            let end = Attempt(start.saturating_add(u64::from(count)));
            let mut next = Attempt(start);
            while left > 0
                && let Some(peer) = self.peers.get(id)
                && let Some(attempt) = peer.incoming.first_live(next..end)
            {
                left -= 1;
                next = Attempt(attempt.0 + 1);
                self.finish_attempt(id, attempt);
            }
            let Some(peer) = self.peers.get_mut(id) else { return };
            if peer.incoming.first_live(next..end).is_some() {
                break;
            }
            peer.incoming.close_results(Attempt(start)..end);
            released.push((start, count));
        }
        self.on_floor(id, floor);
        self.send(id, Body::Released(Released { attempts: released }));
    }

    /// A reader needs the pages no more.
    pub(super) fn reader_finished(&mut self, session: SessionId, index: usize) {
        let Some(sender) = self.senders.get_mut(&session) else { return };
        let granted = sender.pinned_until.is_some();
        let failed = sender.failure.is_some();
        let Some(target) = sender.targets.get_mut(index) else { return };
        target.released = true;
        if granted && !failed {
            target.over = true;
            self.maybe_end_sender(session);
        } else if failed {
            self.reader_let_go(session, index);
        } else {
            self.fail_sender(session, Cause::Protocol("released before it was granted"));
        }
    }

    /// A reader of a failed session will not report success. Others may have lost their lease by now.
    pub(super) fn reader_let_go(&mut self, session: SessionId, index: usize) {
        self.target_advanced(session, index);
        self.on_lease(session);
    }

    /// The session has failed: what its readers know of the lease is all they will ever get.
    pub(super) fn fence_readers(&mut self, session: SessionId) {
        let Some(sender) = self.senders.get_mut(&session) else { return };
        let Some(pinned_until) = sender.pinned_until else { return };
        let mut last = None;
        for target in each(sender.targets.iter_mut().filter(|target| target.reads && !target.over)) {
            let mut fence = pinned_until;
            let incoming =
                self.peers.get_mut(target.peer).and_then(|peer| peer.incoming.get_mut(target.attempt));
            if let Some(Incoming::Reading { until, extension, intact, .. }) = incoming {
                fence = fence.max(*until);
                *extension = None;
                *intact = false;
            }
            target.fence = Some(fence);
            last = last.max(Some(fence));
        }
        match last {
            Some(fence) => self.timers.arm(Timer::Lease(session), fence),
            None => self.timers.cancel(Timer::Lease(session)),
        }
    }

    /// A reader of a failed session has failed too: its lease need not run out.
    pub(super) fn reader_has_failed(&mut self, session: SessionId, index: usize) {
        let now = self.now;
        let Some(target) = self.target_mut(session, index) else { return };
        target.fence = target.fence.map(|fence| fence.min(now));
        self.on_lease(session);
    }

    /// The lease may have run out: heartbeats move its end without moving the timer.
    pub(super) fn on_lease(&mut self, session: SessionId) {
        let Some(until) = self.lease_until(session) else { return };
        if until <= self.now && self.senders.get(&session).is_some_and(|sender| sender.failure.is_none()) {
            // Fences the readers, at a time that is over.
            return self.fail_sender(session, Cause::LeaseExpired);
        }
        let targets = self.senders.get(&session).map_or(0, |sender| sender.targets.len());
        for index in each(0..targets) {
            self.target_advanced(session, index);
        }
        if let Some(until) = self.lease_until(session) {
            self.timers.arm(Timer::Lease(session), until);
        }
    }

    /// When the last reader that the session waits for loses its lease; `None` if it waits for none.
    fn lease_until(&self, session: SessionId) -> Option<Time> {
        let sender = self.senders.get(&session)?;
        let pinned_until = sender.pinned_until?;
        let readers = sender.readers().filter(|(_, target)| !target.over);
        if sender.failure.is_some() {
            return readers.filter_map(|(_, target)| target.fence).max();
        }
        let missing = sender.lacks_receivers().then_some(pinned_until);
        let renewed = readers.map(|(_, target)| {
            match self.peers.get(target.peer).and_then(|peer| peer.incoming.get(target.attempt)) {
                Some(&Incoming::Reading { until, .. }) => until.max(pinned_until),
                _ => pinned_until,
            }
        });
        renewed.chain(missing).max()
    }
}

/// True if the runs follow each other without overlap: a frame names no attempt twice, so that what
/// it costs is bounded by what there is.
pub(super) fn is_rising(runs: &[(u64, u32)]) -> bool {
    let mut next = 0;
    each(runs).all(|&(start, count)| {
        let fits = start >= next && count > 0;
        next = start.saturating_add(u64::from(count));
        fits
    })
}

/// Appends the numbers from `start` up to `end`, as far as they will be answered.
fn note_missing(others: &mut Vec<Attempt>, start: u64, end: u64) {
    let room = MAX_ASKED.saturating_sub(others.len());
    others.extend(each((start..end).take(room)).map(Attempt));
}

/// Whole milliseconds: a lease is told shorter than it is, never longer.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
