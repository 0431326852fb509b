//! The events for the listener, and what must be remembered to tell them.

use std::collections::BTreeMap;

use super::posts::InFlight;
use crate::id::{PostId, SessionId};
use crate::quarantine::{Quarantine, QuarantineReason};
use crate::time::Time;
use crate::trace::{Event, KvWhat, Log, Who};
use crate::transport::{Descriptor, TransportError};

/// The events that were not fetched yet. Empty while nobody listens.
#[derive(Debug, Clone, Default)]
pub(super) struct Tracer {
    log: Log<KvWhat>,
    /// Posts that have not ended, each with its bytes and the time of its start.
    posts: BTreeMap<PostId, (u64, Time)>,
    /// Sessions in quarantine, each with the reason and the time of the beginning.
    quarantined: BTreeMap<SessionId, (QuarantineReason, Time)>,
}

impl Tracer {
    pub(super) fn listen(&mut self, on: bool) {
        *self = Tracer::default();
        self.log.listen(on);
    }

    #[inline(always)]
    pub(super) fn is_heard(&self) -> bool {
        self.log.is_heard()
    }

    #[inline(always)]
    pub(super) fn tell(&mut self, now: Time, who: impl Into<Who>, what: impl FnOnce() -> KvWhat) {
        self.log.tell(now, who, what);
    }

    pub(super) fn next(&mut self) -> Option<Event<KvWhat>> {
        self.log.next()
    }

    /// Tells that a data operation has started.
    pub(super) fn post_started(
        &mut self,
        now: Time,
        id: PostId,
        post: &InFlight,
        descriptors: &[Descriptor],
    ) {
        if !self.is_heard() {
            return;
        }
        let bytes = descriptors.iter().map(|descriptor| descriptor.len).sum();
        self.posts.insert(id, (bytes, now));
        let (op, descriptors) = (post.op, descriptors.len());
        self.tell(now, (post.session, post.peer), || KvWhat::PostStarted {
            post: id,
            op,
            bytes,
            descriptors,
        });
    }

    /// Tells that a data operation has ended.
    pub(super) fn post_ended(
        &mut self,
        now: Time,
        id: PostId,
        post: &InFlight,
        result: &Result<(), TransportError>,
    ) {
        let Some((bytes, started)) = self.posts.remove(&id) else { return };
        let took = now - started;
        self.tell(now, (post.session, post.peer), || KvWhat::PostEnded {
            post: id,
            bytes,
            took,
            error: result.clone().err(),
        });
    }

    /// Tells that a session has failed, and that its pages and items are in quarantine.
    pub(super) fn quarantine_began(&mut self, now: Time, session: SessionId, waits: &Quarantine) {
        let &Quarantine { reason, pages, items, .. } = waits;
        if self.is_heard() && pages + items > 0 {
            self.quarantined.insert(session, (reason, now));
            self.tell(now, session, || KvWhat::QuarantineBegan { reason, pages, items });
        }
    }

    /// Tells that nothing is left of a session.
    pub(super) fn closed(&mut self, now: Time, session: SessionId) {
        if let Some((reason, began)) = self.quarantined.remove(&session) {
            let lasted = now - began;
            self.tell(now, session, || KvWhat::QuarantineEnded { reason, lasted });
        }
        self.tell(now, session, || KvWhat::Closed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::id::PeerId;
    use crate::transport::Op;

    #[test]
    fn the_tracer_forgets_sessions_and_posts_that_have_ended() {
        let (session, peer) = (SessionId(1), PeerId(2));
        let post = InFlight { op: Op::Read, session, target: 0, part: 0, peer, origin: None };
        let descriptor =
            Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 64 };
        let reason = QuarantineReason::OwnPosts;
        let waits = Quarantine { peer: None, reason, pages: 1, items: 0, sessions: 1, ends_within: None };
        let (began, span) = (Time::ZERO, Duration::from_secs(3));
        let mut tracer = Tracer::default();
        tracer.listen(true);
        tracer.post_started(began, PostId(7), &post, &[descriptor, descriptor]);
        tracer.quarantine_began(began, session, &waits);
        tracer.post_ended(began + span, PostId(7), &post, &Ok(()));
        tracer.closed(began + span, session);
        assert!(tracer.posts.is_empty() && tracer.quarantined.is_empty());
        let told: Vec<KvWhat> = std::iter::from_fn(|| tracer.next()).map(|event| event.what).collect();
        let started = KvWhat::PostStarted { post: PostId(7), op: Op::Read, bytes: 128, descriptors: 2 };
        let ended = KvWhat::PostEnded { post: PostId(7), bytes: 128, took: span, error: None };
        let quarantine = KvWhat::QuarantineBegan { reason, pages: 1, items: 0 };
        let over = KvWhat::QuarantineEnded { reason, lasted: span };
        assert_eq!(told, [started, quarantine, ended, over, KvWhat::Closed]);
    }
}
