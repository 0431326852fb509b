//! Whose turn it is to post: peers take turns, and the targets of each peer take turns. The posts
//! in flight are bounded for each peer, and for all peers together.
//!
//! A peer whose posts do not end delays only its own requests. Each peer has a window of its own,
//! and a peer of which no post has ended for a while does not count among the posts of all peers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::id::{PeerId, PostId, SessionId};
use crate::in_order::InOrder;
use crate::meter::{each, step};
use crate::time::Time;
use crate::transport::{Op, Origin};

/// The posts in flight of all peers together are bounded by this many windows of one peer.
const WINDOWS: usize = 4;

/// The targets that have something to post, and the posts in flight.
#[derive(Debug, Clone)]
pub(super) struct Posting {
    /// Most posts in flight to one peer.
    window: usize,
    /// A peer is stuck if none of its posts has ended for this long.
    patience: Duration,
    in_flight: InOrder<PostId, InFlight>,
    of_session: BTreeSet<(SessionId, PostId)>,
    lanes: BTreeMap<PeerId, Lane>,
    /// The places of each session in the lanes.
    queued: BTreeSet<(SessionId, PeerId, Ticket)>,
    tickets: u64,
    /// Peers that may have a post to start, each at most once.
    turns: VecDeque<PeerId>,
    /// How many posts are in flight by connection: the peers of one connection share a window.
    of_origin: BTreeMap<Origin, usize>,
    /// Peers that wait until posts of other peers of their connection end.
    waiting: BTreeMap<Origin, BTreeSet<PeerId>>,
    /// True if a peer waits until posts to other peers end.
    crowded: bool,
    next: u64,
}

/// A place in a lane. Writes and reads have lines of their own; later places have higher numbers.
type Ticket = (bool, u64);

/// The posts that wait for one peer, and how many are in flight.
#[derive(Debug, Clone, Default)]
struct Lane {
    /// Targets in the order of their turns, each at most once. Writes need a permission.
    writes: InOrder<u64, (SessionId, usize)>,
    reads: InOrder<u64, (SessionId, usize)>,
    in_flight: usize,
    /// When a post of the peer ended last, or when the first of those in flight was started.
    moved: Time,
    /// True if the peer is among the turns.
    in_turn: bool,
}

/// What may be posted to a peer now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Leave {
    /// True if the peer permits writes.
    pub(super) writes: bool,
    /// The peer's connection, if it is known.
    pub(super) origin: Option<Origin>,
}

/// A post that has not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct InFlight {
    pub(super) op: Op,
    pub(super) session: SessionId,
    pub(super) target: usize,
    pub(super) part: u32,
    pub(super) peer: PeerId,
    pub(super) origin: Option<Origin>,
}

/// The data operations of one session with one peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PostingState {
    pub(super) peer: PeerId,
    pub(super) op: Op,
    /// True if something waits for its turn.
    pub(super) queued: bool,
    /// How many posts have not ended.
    pub(super) outstanding: u32,
}

impl Posting {
    pub(super) fn new(window: usize, patience: Duration) -> Posting {
        Posting {
            window,
            patience,
            in_flight: InOrder::default(),
            of_session: BTreeSet::new(),
            lanes: BTreeMap::new(),
            queued: BTreeSet::new(),
            tickets: 0,
            turns: VecDeque::new(),
            of_origin: BTreeMap::new(),
            waiting: BTreeMap::new(),
            crowded: false,
            next: 0,
        }
    }

    /// Puts a target at the end of the peer's line.
    pub(super) fn queue(&mut self, peer: PeerId, op: Op, session: SessionId, target: usize) {
        self.tickets += 1;
        let (lane, reads) = (self.lanes.entry(peer).or_default(), op == Op::Read);
        lane.line(reads).insert(self.tickets, (session, target));
        self.queued.insert((session, peer, (reads, self.tickets)));
        self.wake(peer);
    }

    /// Removes a session that has nothing to post any more.
    pub(super) fn leave(&mut self, session: SessionId) {
        let first = (session, PeerId(0), (false, 0));
        while let Some(&(_, peer, (reads, ticket))) =
            self.queued.range(first..).next().filter(|at| at.0 == session)
        {
            self.queued.remove(&(session, peer, (reads, ticket)));
            if let Some(lane) = self.lanes.get_mut(&peer) {
                lane.line(reads).remove(ticket);
                if lane.in_flight == 0 && !lane.has_targets() && !lane.in_turn {
                    self.lanes.remove(&peer);
                }
            }
        }
    }

    /// Gives the peer a turn again: a permission has come, or a post has ended.
    pub(super) fn wake(&mut self, peer: PeerId) {
        if let Some(lane) = self.lanes.get_mut(&peer).filter(|lane| !lane.in_turn && lane.has_targets()) {
            lane.in_turn = true;
            self.turns.push_back(peer);
        }
    }

    /// The target whose turn it is, if another post may be started. `leave` tells what may be
    /// posted to a peer.
    pub(super) fn next_ready(
        &mut self,
        now: Time,
        leave: impl Fn(PeerId) -> Leave,
    ) -> Option<(Op, SessionId, usize)> {
        self.crowded = false;
        while let Some(&peer) = self.turns.front() {
            step(1);
            if self.in_flight.len() >= self.window * WINDOWS && self.moving(now) >= self.window * WINDOWS {
                self.crowded = true;
                return None;
            }
            self.turns.pop_front();
            let Some(lane) = self.lanes.get_mut(&peer) else { continue };
            lane.in_turn = false;
            if lane.in_flight == 0 && !lane.has_targets() {
                self.lanes.remove(&peer);
                continue;
            }
            if lane.in_flight >= self.window {
                continue;
            }
            let leave = leave(peer);
            let busy =
                |origin: &Origin| self.of_origin.get(origin).is_some_and(|&posts| posts >= self.window);
            if let Some(origin) = leave.origin.filter(busy) {
                self.waiting.entry(origin).or_default().insert(peer);
                continue;
            }
            // A worker seldom has both reads and writes to post.
            let op = match lane.reads.is_empty() {
                false => Op::Read,
                true if leave.writes => Op::Write,
                true => continue,
            };
            let reads = op == Op::Read;
            if let Some((ticket, (session, target))) = lane.line(reads).pop_first() {
                self.queued.remove(&(session, peer, (reads, ticket)));
                self.wake(peer);
                return Some((op, session, target));
            }
        }
        None
    }

    /// How many posts are in flight to peers that are not stuck.
    fn moving(&self, now: Time) -> usize {
        let moving = each(self.lanes.values()).filter(|lane| now - lane.moved < self.patience);
        moving.map(|lane| lane.in_flight).sum()
    }

    /// When the next peer for which others wait is to be considered stuck.
    pub(super) fn next_stuck(&self, now: Time) -> Option<Time> {
        let busy = each(self.lanes.values()).filter(|lane| lane.in_flight > 0);
        let at = busy.map(|lane| lane.moved + self.patience).filter(|&at| at > now);
        if self.crowded { at.min() } else { None }
    }

    pub(super) fn start(&mut self, post: InFlight, now: Time) -> PostId {
        let id = PostId(self.next);
        self.next += 1;
        self.in_flight.insert(id, post);
        self.of_session.insert((post.session, id));
        if let Some(origin) = post.origin {
            *self.of_origin.entry(origin).or_default() += 1;
        }
        let lane = self.lanes.entry(post.peer).or_default();
        if lane.in_flight == 0 {
            lane.moved = now;
        }
        lane.in_flight += 1;
        id
    }

    pub(super) fn end(&mut self, id: PostId, now: Time) -> Option<InFlight> {
        let post = self.in_flight.remove(id)?;
        self.of_session.remove(&(post.session, id));
        if let Some(lane) = self.lanes.get_mut(&post.peer) {
            lane.in_flight -= 1;
            lane.moved = now;
            if lane.in_flight == 0 && !lane.has_targets() {
                self.lanes.remove(&post.peer);
            }
        }
        self.wake(post.peer);
        if let Some(origin) = post.origin {
            self.end_of_origin(origin);
        }
        Some(post)
    }

    /// A post of the connection has ended: other peers of the connection may have their turn.
    fn end_of_origin(&mut self, origin: Origin) {
        if let Some(posts) = self.of_origin.get_mut(&origin) {
            *posts -= 1;
            if *posts == 0 {
                self.of_origin.remove(&origin);
            }
        }
        for peer in self.waiting.remove(&origin).unwrap_or_default() {
            self.wake(peer);
        }
    }

    /// Starts nothing to or from the peer any more.
    pub(super) fn forget(&mut self, peer: PeerId) {
        let Some(lane) = self.lanes.get_mut(&peer) else { return };
        for reads in [false, true] {
            for (ticket, (session, _)) in std::mem::take(lane.line(reads)).iter() {
                self.queued.remove(&(*session, peer, (reads, ticket)));
            }
        }
        if lane.in_flight == 0 {
            self.lanes.remove(&peer);
        }
    }

    /// The posts of a session that have not ended.
    pub(super) fn of(&self, session: SessionId) -> Vec<PostId> {
        let all = (session, PostId(0))..=(session, PostId(u64::MAX));
        each(self.of_session.range(all)).map(|&(_, post)| post).collect()
    }

    /// True if a post of the session has not ended.
    pub(super) fn has_any_of(&self, session: SessionId) -> bool {
        !self.of(session).is_empty()
    }

    /// The peer with the most posts in flight, and how many these are, if posts to other peers wait
    /// for them.
    pub(super) fn busiest(&self) -> Option<(PeerId, usize)> {
        let busiest = self.lanes.iter().max_by_key(|(_, lane)| lane.in_flight).filter(|_| self.crowded);
        busiest.map(|(&peer, lane)| (peer, lane.in_flight))
    }

    /// How many posts are in flight to the peer, if it has as many as it may have; otherwise
    /// `None`.
    pub(super) fn full(&self, peer: PeerId) -> Option<usize> {
        self.lanes.get(&peer).map(|lane| lane.in_flight).filter(|&posts| posts >= self.window)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// How many targets have something to post.
    pub(super) fn queued(&self) -> usize {
        self.queued.len()
    }
}

impl Lane {
    fn line(&mut self, reads: bool) -> &mut InOrder<u64, (SessionId, usize)> {
        if reads { &mut self.reads } else { &mut self.writes }
    }

    fn has_targets(&self) -> bool {
        !(self.writes.is_empty() && self.reads.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::from_nanos(seconds * 1_000_000_000)
    }

    /// A peer that permits writes.
    const FREE: Leave = Leave { writes: true, origin: None };

    fn post(peer: u64) -> InFlight {
        InFlight {
            op: Op::Write,
            session: SessionId(peer),
            target: 0,
            part: 0,
            peer: PeerId(peer),
            origin: None,
        }
    }

    /// Starts all that may be started now; how many posts.
    fn start_all(posting: &mut Posting, now: Time) -> usize {
        let mut started = 0;
        while let Some((_, session, target)) = posting.next_ready(now, |_| FREE) {
            posting.start(post(session.0), now);
            posting.queue(PeerId(session.0), Op::Write, session, target);
            started += 1;
        }
        started
    }

    #[test]
    fn a_stuck_peer_fills_its_own_window_and_no_other() {
        let mut posting = Posting::new(2, Duration::from_secs(1));
        for peer in 0..5 {
            posting.queue(PeerId(peer), Op::Write, SessionId(peer), 0);
        }
        // Four windows of two, of which no peer has more than one.
        assert_eq!(start_all(&mut posting, at(1)), 8);
        assert_eq!(posting.next_stuck(at(1)), Some(at(2)));
        assert_eq!(posting.busiest().map(|(_, posts)| posts), Some(2));
        // Nobody's posts end: the fifth peer has its turn all the same.
        assert_eq!(start_all(&mut posting, at(2)), 2);
        assert_eq!(posting.full(PeerId(4)), Some(2));
        assert_eq!(start_all(&mut posting, at(9)), 0);
    }

    #[test]
    fn writes_wait_for_permission_and_do_not_hold_up_other_peers() {
        let mut posting = Posting::new(2, Duration::from_secs(1));
        posting.queue(PeerId(1), Op::Write, SessionId(1), 0);
        posting.queue(PeerId(1), Op::Read, SessionId(9), 0);
        posting.queue(PeerId(2), Op::Write, SessionId(2), 0);
        let may_write = |peer| Leave { writes: peer == PeerId(2), origin: None };
        assert_eq!(posting.next_ready(at(1), may_write), Some((Op::Read, SessionId(9), 0)));
        assert_eq!(posting.next_ready(at(1), may_write), Some((Op::Write, SessionId(2), 0)));
        assert_eq!(posting.next_ready(at(1), may_write), None);
        posting.wake(PeerId(1));
        assert_eq!(posting.next_ready(at(1), |_| FREE), Some((Op::Write, SessionId(1), 0)));
        assert_eq!(posting.queued(), 0);
    }

    #[test]
    fn peers_of_one_connection_share_a_window_and_wake_each_other() {
        let mut posting = Posting::new(2, Duration::from_secs(1));
        let shared = Leave { origin: Some(Origin(5)), ..FREE };
        for peer in 1..6 {
            posting.queue(PeerId(peer), Op::Write, SessionId(peer), 0);
        }
        let mut started = Vec::new();
        while let Some((_, session, _)) = posting.next_ready(at(1), |_| shared) {
            started.push(posting.start(InFlight { origin: shared.origin, ..post(session.0) }, at(1)));
        }
        assert_eq!(started.len(), 2);
        assert_eq!(posting.queued(), 3);
        posting.end(started[0], at(2));
        assert_eq!(posting.turns, [3, 4, 5].map(PeerId), "none of those that wait is forgotten");
        assert_eq!(posting.next_ready(at(2), |_| shared), Some((Op::Write, SessionId(3), 0)));
        posting.end(started[1], at(2));
        assert!(posting.of_origin.is_empty() && posting.waiting.is_empty());
    }

    #[test]
    fn sessions_that_have_ended_leave_the_line_of_a_stuck_peer() {
        let mut posting = Posting::new(1, Duration::from_secs(1));
        posting.queue(PeerId(1), Op::Write, SessionId(1), 0);
        assert_eq!(start_all(&mut posting, at(1)), 1);
        for session in 2..100 {
            posting.queue(PeerId(1), Op::Write, SessionId(session), 0);
            posting.queue(PeerId(1), Op::Read, SessionId(session), 1);
            posting.leave(SessionId(session));
        }
        assert_eq!((posting.queued(), posting.lanes.len()), (1, 1));
        posting.leave(SessionId(1));
        assert_eq!((posting.queued(), posting.lanes.len()), (0, 1), "a post is in flight");
        posting.end(PostId(0), at(2));
        assert_eq!((posting.lanes.len(), posting.queued.len()), (0, 0));
    }

    #[test]
    fn posts_alternate_between_peers_and_between_targets_of_a_peer() {
        let mut posting = Posting::new(8, Duration::from_secs(1));
        for (peer, session) in [(1, 10), (1, 11), (2, 20), (1, 12)] {
            posting.queue(PeerId(peer), Op::Write, SessionId(session), 0);
        }
        let order: Vec<u64> = std::iter::from_fn(|| posting.next_ready(at(1), |_| FREE))
            .map(|(_, session, _)| session.0)
            .collect();
        assert_eq!(order, [10, 20, 11, 12]);
    }
}
