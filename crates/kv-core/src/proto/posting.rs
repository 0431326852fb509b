//! Whose turn it is to post: round robin, a bounded number at a time.

use std::collections::{BTreeMap, VecDeque};

use crate::id::{PeerId, PostId, SessionId};

/// Targets that have something to post, and posts in flight.
#[derive(Debug, Clone)]
pub(super) struct Posting {
    max_in_flight: usize,
    in_flight: BTreeMap<PostId, InFlight>,
    /// Targets in turn; each at most once.
    ready: VecDeque<(SessionId, usize)>,
    next: u64,
}

/// A post that has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct InFlight {
    pub(super) session: SessionId,
    pub(super) target: usize,
    pub(super) part: u32,
    pub(super) peer: PeerId,
}

impl Posting {
    pub(super) fn new(max_in_flight: usize) -> Posting {
        Posting { max_in_flight, in_flight: BTreeMap::new(), ready: VecDeque::new(), next: 0 }
    }

    /// Puts a target at the end of the line.
    pub(super) fn queue(&mut self, session: SessionId, target: usize) {
        self.ready.push_back((session, target));
    }

    /// The target whose turn it is, if another post may be started.
    pub(super) fn next_ready(&mut self) -> Option<(SessionId, usize)> {
        if self.in_flight.len() >= self.max_in_flight { None } else { self.ready.pop_front() }
    }

    pub(super) fn start(&mut self, post: InFlight) -> PostId {
        let id = PostId(self.next);
        self.next += 1;
        self.in_flight.insert(id, post);
        id
    }

    pub(super) fn end(&mut self, id: PostId) -> Option<InFlight> {
        self.in_flight.remove(&id)
    }

    /// The posts of a session that have not ended.
    pub(super) fn of(&self, session: SessionId) -> Vec<PostId> {
        self.in_flight.iter().filter(|(_, post)| post.session == session).map(|(&id, _)| id).collect()
    }

    /// True if the session has a post that has not ended.
    pub(super) fn has_any_of(&self, session: SessionId) -> bool {
        self.in_flight.values().any(|post| post.session == session)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }
}
