//! Pull: vLLM's ranks read the pages of a session, and this worker only waits. Both modes: complete pages wait
//! under a lease.
//!
//! This worker posts nothing. A reader's rank tells `<id>:<n>` once it has read, and the pages are free when `n`
//! ranks have told. Meanwhile the pages are pinned under a lease, which the heartbeats of readers extend. In push,
//! the lease is for the time without a receiver.
//!
//! What vLLM's protocol cannot promise: a reader is never told that the lease is over, and cannot be kept from
//! reading. So the pages of a session that failed under a lease stay in quarantine until a read that began before
//! the end of the lease must be over (`read_bound`). A heartbeat in that time shows a reader that still wants the
//! pages, and extends the quarantine as it would have extended the lease.
//!
//! vLLM counts messages. This worker counts the agents that sent them: what one agent tells twice is the same
//! reader, so that a repeated message never frees pages under another reader. Where messages of one request name
//! different numbers of readers, the largest counts, and so does the number that the scheduler told.

use std::collections::BTreeSet;
use std::time::Duration;

use kv_core::trace::KvWhat;
use kv_core::{Cause, Lease, QuarantineReason, SessionId, Time};

use super::{Producer, Way};
use crate::gauges::Ignored;
use crate::sessions::Held;
use crate::vllm::config::LONGEST_LEASE;
use crate::vllm::context::Context;
use crate::vllm::notification::HeartbeatIds;

/// Most agents of which is remembered that they have read one request.
const MAX_AGENTS: usize = 4096;

/// The readers of one session.
#[derive(Debug)]
pub(super) struct Readers {
    /// How many ranks read at least.
    consumers: usize,
    /// The agents that have read.
    done: BTreeSet<Box<str>>,
    /// True once a reader has shown that the reader knows the request.
    known: bool,
}

impl Readers {
    pub(super) fn new(receivers: u32) -> Readers {
        Readers { consumers: receivers.max(1) as usize, done: BTreeSet::new(), known: false }
    }

    /// Why the pages of the session, which fails now, cannot be handed back yet.
    pub(super) fn held(&self, pinned_until: Option<Time>, now: Time, read_bound: Duration) -> Option<Held> {
        let readable = self.known || pinned_until.is_some();
        let until = pinned_until.unwrap_or(now).max(now) + read_bound;
        readable.then_some(Held { reason: QuarantineReason::ReaderLease, peer: None, until: Some(until) })
    }

    fn all_done(&self) -> bool {
        self.done.len() >= self.consumers
    }

    /// Notes that an agent has read. False if the agent has told before.
    fn note_done(&mut self, agent: &str, consumers: u32) -> bool {
        self.known = true;
        self.consumers = self.consumers.max(consumers as usize);
        self.done.len() < MAX_AGENTS && self.done.insert(agent.into())
    }
}

/// The lease that a session asks for, no longer than can be counted.
pub(super) fn sane(lease: Lease) -> Lease {
    match lease {
        Lease::Fixed(duration) => Lease::Fixed(duration.min(LONGEST_LEASE)),
        lease => Lease::Renewable(lease.duration().min(LONGEST_LEASE)),
    }
}

impl Producer {
    /// Pins the pages of a session that are complete and have no receiver. Readers may have read before: such a
    /// session is over.
    pub(super) fn pin_if_complete(&mut self, cx: &mut Context, session: SessionId) {
        let now = cx.now;
        let Some(sender) = self.sender(session) else { return };
        if !sender.given.is_complete() || sender.pinned_until.is_some() || sender.has_receiver() {
            return;
        }
        let until = now + sender.lease.duration();
        sender.pinned_until = Some(until);
        let pages = sender.given.num_pages();
        sender.pages_pinned = pages;
        let done = matches!(&sender.way, Way::Read(readers) if readers.all_done());
        self.pages_leased += pages;
        self.leases.insert((until, session));
        if done {
            self.succeed(cx, session);
        }
    }

    /// Ends the lease of a session, if the lease runs.
    pub(super) fn unpin(&mut self, session: SessionId) {
        let Some(sender) = self.sender(session) else { return };
        // The scheduler may have given more pages since, for which the session fails.
        let pages = sender.pages_pinned;
        if let Some(until) = sender.pinned_until.take() {
            self.leases.remove(&(until, session));
            self.pages_leased -= pages;
        }
    }

    /// A rank of a vLLM engine has read a request, or does not need it any more.
    pub(crate) fn read(
        &mut self,
        cx: &mut Context,
        agent: &str,
        request: &str,
        consumers: u32,
    ) -> Result<(), Ignored> {
        let id = *self.requests.get(request).ok_or(Ignored::UnknownRequest)?;
        let session = self.sessions.any(id).ok_or(Ignored::UnknownRequest)?;
        let ended = session.has_ended();
        let sender = &mut session.dialect;
        let Way::Read(readers) = &mut sender.way else { return Err(Ignored::OtherMode) };
        if !readers.note_done(agent, consumers) {
            return Err(Ignored::Repeated);
        }
        match (readers.all_done(), ended) {
            (true, true) => self.free(cx, id),
            (true, false) if sender.pinned_until.is_some() => self.succeed(cx, id),
            _ => {}
        }
        Ok(())
    }

    /// A vLLM engine still wants these requests.
    pub(crate) fn heartbeat(&mut self, cx: &mut Context, ids: &HeartbeatIds) {
        for request in ids.iter() {
            self.registrations.renew(cx.now, request);
            if let Some(session) = self.requests.get(request).or(self.written_request(request)) {
                self.extend(cx.now, *session);
            }
        }
    }

    fn extend(&mut self, now: Time, id: SessionId) {
        let Some(session) = self.sessions.any(id) else { return };
        let held = session.held().cloned();
        let sender = &mut session.dialect;
        let reads = match &mut sender.way {
            Way::Read(readers) => {
                readers.known = true;
                true
            }
            Way::Write(_) => false,
        };
        let Some(extension) = sender.lease.extension() else { return };
        if let Some(held) = held.filter(|_| reads) {
            let until = held.until.max(Some(now + extension + self.timing.read_bound));
            self.sessions.hold(id, Held { until, ..held });
        } else if let Some(until) = sender.pinned_until.filter(|until| *until < now + extension) {
            sender.pinned_until = Some(now + extension);
            self.leases.remove(&(until, id));
            self.leases.insert((now + extension, id));
        }
    }

    /// Fails the sessions whose leases are over.
    pub(super) fn expire_leases(&mut self, cx: &mut Context) {
        while let Some((_, session)) = self.leases.first().copied().filter(|(until, _)| *until <= cx.now) {
            cx.tell(session, || KvWhat::LeaseExpired);
            self.fail(cx, session, Cause::LeaseExpired);
        }
    }
}
