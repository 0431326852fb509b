//! The granting side of a pull session, on the prefill worker: acquire messages, leases, releases.
//!
//! ```text
//! open ─▶ WaitingForInput ─ send ─▶ Transferring ─ complete ─▶ pages pinned, lease runs
//!            acquire messages wait                                │ Granted to every acquire message
//!                                                                 │ heartbeats extend the lease
//!                                                                 ▼
//!                              every reader has released ─▶ Success, pages back
//!                              the lease has run out     ─▶ Failed(LeaseExpired), pages back
//! any other failure ─▶ Failed ─▶ readers told ─▶ each has released, or its lease has run out ─▶ pages back
//! ```
//!
//! Why this is safe: a reader reports success only if it knows, from an answer to a message that it
//! sent *before*, that the lease had not run out when its last read ended. So pages under a lease
//! stay as they are until the reader says that it is done, or until the last lease of which the
//! reader may know is over. A reader that greets anew has failed all its sessions, and relies on no
//! lease. Nothing else frees the pages: neither a failure of the session, nor the transport's
//! report that the peer is gone, because that report is about this side's connection, and the peer
//! may go on reading through a connection of its own.

use crate::error::{Cause, PeerCause};
use crate::groups::RequestCacheGroups;
use crate::id::{Attempt, PeerId, SessionId};
use crate::meter::{each, step};
use crate::proto::context::Context;
use crate::proto::conversation::{Extended, Incoming, MAX_ASKED, Registration, millis};
use crate::proto::ending::Ending;
use crate::proto::rendezvous::Named;
use crate::proto::run_set;
use crate::proto::sending::Sending;
use crate::proto::timer::Timer;
use crate::time::Time;
use crate::trace::KvWhat;
use crate::wire::{Body, Granted, Registered};

impl Sending {
    /// Handles an acquire message that names the sender's lease id.
    pub(super) fn acquire_lease(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        attempt: Attempt,
        lease_id: SessionId,
        registration: Registration,
    ) {
        let refused = cx.peers.get(id).is_some_and(|peer| peer.is_refused());
        let unknown = PeerCause::UnknownLease { lease_id: lease_id.0 };
        let cause = match self.sessions.get(&lease_id) {
            _ if refused => PeerCause::Protocol,
            Some(sender) if !sender.named.is_same_request(&registration.named) => unknown,
            Some(sender) => match sender.standing.failure() {
                Some(cause) => cause.clone(),
                None if sender.lacks_receivers() => {
                    cx.watch_peer(id);
                    return self.attach(cx, lease_id, id, attempt, registration);
                }
                None => PeerCause::LeaseConsumed { lease_id: lease_id.0 },
            },
            None => self.ended_leases.get(lease_id).cloned().unwrap_or(unknown),
        };
        self.refuse_attempt(cx, id, attempt, cause);
    }

    /// The reader for which a lease was meant will never acquire it: the session fails.
    pub(super) fn reader_gave_up(
        &mut self,
        cx: &mut Context,
        lease_id: SessionId,
        named: &Named,
        cause: PeerCause,
    ) {
        let meant = self
            .sessions
            .get(&lease_id)
            .is_some_and(|sender| sender.named.is_same_request(named) && sender.lacks_receivers());
        if meant {
            self.fail_one(cx, lease_id, Cause::ByPeer(cause));
        }
    }

    /// Tells a reader its lease, or that there is none yet.
    pub(super) fn answer_acquire(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        attempt: Attempt,
        session: SessionId,
        index: usize,
    ) {
        let granted = self.sessions.get(&session).is_some_and(|sender| sender.pinned_until.is_some());
        if granted {
            self.say_granted(cx, session, index);
        } else {
            cx.send(id, Body::Registered(Registered { attempt }));
        }
    }

    /// The pages are complete: pins them, and tells the readers that have asked for a lease. The
    /// pages of a session that has failed, perhaps in the same step, are not pinned.
    pub(in crate::proto) fn grant(&mut self, cx: &mut Context, session: SessionId) {
        let sender = self.sessions.get_mut(&session).filter(|sender| sender.standing.is_going());
        let Some(sender) = sender else { return };
        let until = cx.fx.now() + sender.lease.duration();
        sender.pinned_until = Some(until);
        let readers: Vec<usize> = sender.readers().map(|(index, _)| index).collect();
        self.pages_leased += sender.pages_pinned();
        cx.fx.arm(Timer::Lease(session), until);
        for index in each(readers) {
            self.say_granted(cx, session, index);
        }
    }

    fn say_granted(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let Some(sender) = self.sessions.get(&session) else { return };
        let (Some(pinned_until), Some(target)) = (sender.pinned_until, sender.targets.get(index)) else {
            return;
        };
        if target.is_over() || sender.standing.failure().is_some() {
            return;
        }
        let (id, attempt) = (target.peer, target.attempt);
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let Some(Incoming::Reading { until, extension, intact, .. }) = peer.incoming_mut().get_mut(attempt)
        else {
            return;
        };
        *until = pinned_until.max(*until);
        *extension = sender.lease.extension();
        *intact = true;
        let (lease, interval) = (*until - cx.fx.now(), sender.lease.heartbeat_interval());
        let granted = Granted {
            attempt,
            number: target.reads().map_or(0, |reads| reads.number),
            lease_id: session,
            pages: sender.given.all_pages(),
            aux: sender.given.aux(),
            lease_ms: millis(lease),
            interval_ms: interval.map_or(0, |interval| millis(interval).max(1)),
            groups: sender.groups.as_ref().map(RequestCacheGroups::lists).unwrap_or_default(),
        };
        if !cx.send_long(id, &Body::Granted(granted)) {
            self.fail(cx, session, Cause::Protocol("pages too scattered for one frame"));
        }
    }

    /// Extends the leases of these attempts, which rise. Returns the attempts whose leases hold,
    /// and the first attempts whose leases do not.
    pub(in crate::proto) fn extend_leases(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        leases: &[(u64, u32)],
    ) -> (Extended, Vec<Attempt>) {
        let now = cx.fx.now();
        let mut alive: Vec<(u64, u32)> = Vec::new();
        let mut others: Vec<Attempt> = Vec::new();
        let Some(peer) = cx.peers.get_mut(id) else { return (Extended::default(), others) };
        let mut until = Time::MAX;
        // One walk along the attempts, however scattered the runs are.
        let ends = |&(start, count): &(u64, u32)| (start, start.saturating_add(u64::from(count)));
        let span = leases.first().map_or(0, |run| run.0)..leases.last().map_or(0, |run| ends(run).1);
        let mut runs = leases.iter().map(ends);
        let mut run = runs.next();
        let readers = peer.incoming_mut().reading_mut(Attempt(span.start)..Attempt(span.end));
        for (attempt, incoming) in readers {
            while let Some((next, end)) = run.filter(|&(_, end)| end <= attempt.0) {
                step(1);
                note_missing(&mut others, next, end);
                run = runs.next();
            }
            let Some((next, end)) = run.filter(|&(next, _)| next <= attempt.0) else { continue };
            note_missing(&mut others, next, attempt.0);
            run = Some((attempt.0 + 1, end));
            let Incoming::Reading { until: own, extension, intact: true, .. } = incoming else {
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
        let lease_ms = if alive.is_empty() { 0 } else { millis(until - now) };
        (Extended { leases: alive, lease_ms }, others)
    }

    /// A reader does not need the pages any more. If it has not told how its read has ended, the session fails with
    /// `untold`. A release before the lease was granted breaks the protocol.
    pub(super) fn reader_released(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        index: usize,
        untold: Option<Cause>,
    ) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        let granted = sender.pinned_until.is_some();
        let failed = sender.standing.failure().is_some();
        let Some(target) = sender.targets.get_mut(index) else { return };
        if let Some(reads) = target.reads_mut() {
            reads.released = true;
        }
        if failed {
            self.reader_let_go(cx, session, index);
        } else if let Some(cause) = untold {
            self.fail(cx, session, cause);
        } else if granted {
            target.end();
            self.settle(cx, session);
        } else {
            self.fail(cx, session, Cause::Protocol("the lease was released before it was granted"));
        }
    }

    /// A reader of a failed session will not report success. Other readers may have lost their
    /// lease by now.
    pub(super) fn reader_let_go(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        self.target_advanced(cx, session, index);
        self.on_lease(cx, session);
    }

    /// The session has failed: its readers get no more time than they know of.
    pub(super) fn fence_readers(&mut self, cx: &mut Context, session: SessionId) {
        let Some(sender) = self.sessions.get_mut(&session) else { return };
        let Some(pinned_until) = sender.pinned_until else { return };
        let mut last = None;
        for target in each(sender.targets.iter_mut().filter(|target| !target.is_over())) {
            let (peer, attempt) = (target.peer, target.attempt);
            let Some(reads) = target.reads_mut() else { continue };
            let mut fence = pinned_until;
            let incoming = cx.peers.get_mut(peer).and_then(|peer| peer.incoming_mut().get_mut(attempt));
            if let Some(Incoming::Reading { until, extension, intact, .. }) = incoming {
                fence = fence.max(*until);
                *extension = None;
                *intact = false;
            }
            reads.fence = Some(fence);
            last = last.max(Some(fence));
        }
        match last {
            Some(fence) => cx.fx.arm(Timer::Lease(session), fence),
            None => cx.fx.cancel(Timer::Lease(session)),
        }
    }

    /// A reader of a failed session has failed, too: its lease need not run out.
    pub(super) fn reader_has_failed(&mut self, cx: &mut Context, session: SessionId, index: usize) {
        let now = cx.fx.now();
        let Some(target) = self.target_mut(session, index) else { return };
        if let Some(reads) = target.reads_mut() {
            reads.fence = reads.fence.map(|fence| fence.min(now));
        }
        self.on_lease(cx, session);
    }

    /// The lease may have run out. Heartbeats move its end without moving the timer.
    pub(in crate::proto) fn on_lease(&mut self, cx: &mut Context, session: SessionId) {
        let Some(until) = self.lease_until(cx, session) else { return };
        if until <= cx.fx.now()
            && self.sessions.get(&session).is_some_and(|sender| sender.standing.failure().is_none())
        {
            cx.fx.tell(session, || KvWhat::LeaseExpired);
            // Fences the readers at a time that is over.
            return self.fail(cx, session, Cause::LeaseExpired);
        }
        let targets = self.sessions.get(&session).map_or(0, |sender| sender.targets.len());
        for index in each(0..targets) {
            self.target_advanced(cx, session, index);
        }
        if let Some(until) = self.lease_until(cx, session) {
            cx.fx.arm(Timer::Lease(session), until);
        }
    }

    /// When the last reader for which the session waits loses its lease; `None` if it waits for no
    /// reader.
    fn lease_until(&self, cx: &Context, session: SessionId) -> Option<Time> {
        let sender = self.sessions.get(&session)?;
        let pinned_until = sender.pinned_until?;
        let readers = sender.readers().filter(|(_, target)| !target.is_over());
        if sender.standing.failure().is_some() {
            return readers.filter_map(|(_, target)| target.reads()?.fence).max();
        }
        let missing = sender.lacks_receivers().then_some(pinned_until);
        let renewed = readers.map(|(_, target)| {
            match cx.peers.get(target.peer).and_then(|peer| peer.incoming().get(target.attempt)) {
                Some(&Incoming::Reading { until, .. }) => until.max(pinned_until),
                _ => pinned_until,
            }
        });
        renewed.chain(missing).max()
    }
}

/// Appends the attempts from `start` up to `end`, as many as will be answered.
fn note_missing(others: &mut Vec<Attempt>, start: u64, end: u64) {
    let room = MAX_ASKED.saturating_sub(others.len());
    others.extend(each((start..end).take(room)).map(Attempt));
}
