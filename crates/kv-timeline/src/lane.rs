//! One session of one worker, as spans of time.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::Room;

use crate::note::{Failure, Message, Note, Side, What};
use crate::record::SessionNotes;
use crate::text::Text;

/// One session of one worker. Times are in nanoseconds of the timeline.
#[derive(Debug, Clone)]
pub struct Lane {
    /// The worker: its position among the timeline's workers.
    pub worker: usize,
    /// The worker's own number for the session.
    pub session: u64,
    /// The room, as this side knows it.
    pub room: Room,
    /// Whether the session sends or receives.
    pub side: Side,
    /// When the session was opened.
    pub from: i64,
    /// The last event of the session; the end of the record if the session is not closed by then.
    pub to: i64,
    /// The phases, one after the other.
    pub spans: Vec<Span>,
    /// The data operations. Several may be in flight at once.
    pub posts: Vec<PostSpan>,
    /// From when until when a lease protected the pages, as far as this side knows (pull).
    pub lease: Option<(i64, i64)>,
    /// When the registration was sent once more, because an answer was missing.
    pub repeats: Vec<i64>,
    /// How the session ended.
    pub outcome: Outcome,
    /// The number of pages.
    pub pages: u64,
    /// The workers of the other side: the position among the timeline's workers, and the first and last message.
    pub peers: Vec<(usize, i64, i64)>,
    /// The transports by which the workers of the other side were reached, as far as the record has them.
    pub transports: BTreeMap<usize, Text>,
    /// All events of the session.
    pub(crate) notes: Vec<Note>,
    /// The workers of the other side, by the numbers that this worker gave them.
    actors: BTreeMap<u64, usize>,
    /// The time of the timeline's beginning in the worker's clock.
    zero: i128,
}

/// A peer of a worker.
#[derive(Debug, Clone)]
pub(crate) struct Met {
    /// The position among the timeline's workers.
    pub(crate) actor: usize,
    /// The transport by which the peer was reached.
    pub(crate) transport: Option<Text>,
}

/// A phase of a session: the states of [`KvPoll`](kv_core::KvPoll) until the end, and what follows the end. (The phases
/// of causes and of metrics are others.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The session waits for the peer: lookup, handshake, and on a sender the registration.
    Bootstrapping,
    /// The session waits for its scheduler: a sender for computed pages, a receiver for free pages.
    WaitingForInput,
    /// Bytes move, or may move.
    Transferring,
    /// The session has succeeded, and its peer has not heard of that yet.
    Closing,
    /// The session has failed, and its peer has not heard of that yet.
    Failing,
    /// The session has failed, and its pages wait until no data operation can touch them.
    Quarantine,
}

/// A phase from one moment to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The name of the phase.
    pub phase: Phase,
    /// When the phase began.
    pub from: i64,
    /// When the phase ended; the last event of the session if the end is not recorded.
    pub to: i64,
}

/// A data operation of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PostSpan {
    /// The worker's own number for the post.
    pub post: u64,
    /// Whether the post writes; otherwise it reads.
    pub write: bool,
    /// The bytes that were to be moved.
    pub bytes: u64,
    /// When the data operation began.
    pub from: i64,
    /// When the data operation ended; `None` if the end is not recorded.
    pub to: Option<i64>,
    /// The peer: its position among the timeline's workers.
    pub peer: Option<usize>,
    /// Why the post failed, if it did.
    pub error: Option<String>,
}

/// How a session ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Every byte is in place.
    Succeeded,
    /// The session has failed.
    Failed(Box<Failure>),
    /// The record ends before the session does.
    Open,
}

impl Lane {
    /// The lane of a session; `None` if its first event is not its opening, which is never recorded so. A session
    /// that is not closed goes on until the end of its record, which is `last` by the worker's clock.
    pub(crate) fn of(
        worker: usize,
        session: SessionNotes,
        peers: &BTreeMap<u64, Met>,
        zero: i128,
        last: u64,
    ) -> Option<Lane> {
        let SessionNotes { session, notes } = session;
        let What::Opened { room, side } = &notes.first()?.what else { return None };
        let mut lane = Lane {
            worker,
            session,
            room: room.clone(),
            side: *side,
            from: 0,
            to: 0,
            spans: Vec::new(),
            posts: Vec::new(),
            lease: None,
            repeats: Vec::new(),
            outcome: Outcome::Open,
            pages: 0,
            peers: Vec::new(),
            transports: BTreeMap::new(),
            notes: Vec::new(),
            actors: BTreeMap::new(),
            zero,
        };
        lane.from = notes.first().map_or(0, |note| lane.time(note));
        lane.to = notes.iter().map(|note| lane.time(note)).max().unwrap_or(lane.from).max(lane.from);
        if !is_closed(&notes) {
            lane.to = lane.to.max(lane.shifted(last));
        }
        lane.read(&notes, peers);
        lane.notes = notes;
        Some(lane)
    }

    /// The time of a note of this lane.
    pub(crate) fn time(&self, note: &Note) -> i64 {
        self.shifted(note.at)
    }

    fn shifted(&self, at: u64) -> i64 {
        i64::try_from(i128::from(at) - self.zero).unwrap_or(i64::MAX)
    }

    /// The position among the timeline's workers of the peer that has this number here.
    pub(crate) fn actor_of(&self, peer: Option<u64>) -> Option<usize> {
        self.actors.get(&peer?).copied()
    }

    /// Bytes of the data operations that have succeeded.
    pub fn bytes(&self) -> u64 {
        let moved = self.posts.iter().filter(|post| post.to.is_some() && post.error.is_none());
        moved.fold(0, |sum, post| sum.saturating_add(post.bytes))
    }

    fn read(&mut self, notes: &[Note], peers: &BTreeMap<u64, Met>) {
        let mut phase = (Phase::Bootstrapping, self.from);
        let mut posts: BTreeMap<u64, usize> = BTreeMap::new();
        let mut spoken: BTreeMap<usize, (i64, i64)> = BTreeMap::new();
        let mut asked: BTreeSet<(Option<u64>, Option<u64>, bool)> = BTreeSet::new();
        let (mut given, mut closed) = (0u64, false);
        let (mut leased, mut unleased) = (None, None);
        for note in notes {
            let at = self.time(note);
            let met = note.peer.and_then(|peer| peers.get(&peer));
            let peer = met.map(|met| met.actor);
            if let Some(Met { actor: peer, transport }) = met {
                let peer = *peer;
                self.transports.extend(transport.clone().map(|transport| (peer, transport)));
                let span = spoken.entry(peer).or_insert((at, at));
                *span = (span.0.min(at), span.1.max(at));
                self.actors.extend(note.peer.map(|number| (number, peer)));
            }
            let next = match &note.what {
                What::Bootstrapping => Phase::Bootstrapping,
                What::WaitingForInput => Phase::WaitingForInput,
                What::Transferring => Phase::Transferring,
                What::Ended => {
                    self.outcome = Outcome::Succeeded;
                    unleased = unleased.or(Some(at));
                    Phase::Closing
                }
                What::Failed(failure) => {
                    self.outcome = Outcome::Failed(failure.clone());
                    unleased = unleased.or(Some(at));
                    Phase::Failing
                }
                What::QuarantineBegan { .. } => Phase::Quarantine,
                What::QuarantineEnded { .. } => Phase::Failing,
                What::Closed => {
                    closed = true;
                    self.push(phase, at);
                    continue;
                }
                other => {
                    match other {
                        What::ChunkGiven { pages, .. } | What::PagesGiven { pages } => {
                            given = given.saturating_add(*pages);
                        }
                        What::PostStarted { post, write, bytes, .. } => {
                            posts.insert(*post, self.posts.len());
                            let (post, write, bytes) = (*post, *write, *bytes);
                            let span = PostSpan { post, write, bytes, from: at, to: None, peer, error: None };
                            self.posts.push(span);
                        }
                        What::PostEnded { post, error, .. } => {
                            let started = posts.get(post).and_then(|&place| self.posts.get_mut(place));
                            if let Some(started) = started {
                                started.to = Some(at.max(started.from));
                                started.error = error.as_ref().map(ToString::to_string);
                            }
                        }
                        What::LeaseExpired => {
                            leased = leased.or(Some(self.from));
                            unleased = Some(at);
                        }
                        What::Said(Message::Granted { .. }) | What::Heard(Message::Granted { .. }) => {
                            leased = leased.or(Some(at));
                        }
                        What::Said(Message::Register { .. }) | What::Said(Message::Acquire { .. }) => {
                            let acquire = matches!(other, What::Said(Message::Acquire { .. }));
                            if !asked.insert((note.peer, note.attempt, acquire)) {
                                self.repeats.push(at);
                            }
                        }
                        _ => {}
                    }
                    continue;
                }
            };
            if !closed {
                self.push(phase, at);
                phase = (next, at);
            }
        }
        if !closed {
            self.push(phase, self.to);
        }
        self.pages = given;
        // The pages of a pull are kept from the moment at which they were given.
        let given_at = self.spans.iter().find(|span| span.phase == Phase::Transferring).map(|span| span.from);
        self.lease = leased.map(|first| {
            let first = given_at.filter(|_| self.side == Side::Sender).unwrap_or(first);
            (first, unleased.unwrap_or(self.to).max(first))
        });
        self.peers = spoken.into_iter().map(|(peer, (first, last))| (peer, first, last)).collect();
    }

    fn push(&mut self, (phase, from): (Phase, i64), to: i64) {
        if to > from {
            self.spans.push(Span { phase, from, to });
        }
    }
}

/// True if the worker has forgotten the session whose notes these are.
pub(crate) fn is_closed(notes: &[Note]) -> bool {
    notes.iter().rev().any(|note| note.what == What::Closed)
}
