//! Keeps the events of a running worker, in bounded memory.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::trace::{Event, KvWhat};
use kv_core::{Incarnation, WorkerId};
use kv_poll::worker::Listener;

use crate::note::{Message, Note, What};
use crate::record::{Lost, MAX_PEERS, PeerNote, Record, SessionNotes};
use crate::text::Text;

/// The memory that a recorder uses at most if nothing else is said: 32 MiB, the events of some ten thousand
/// sessions.
pub const DEFAULT_BYTES: usize = 32 << 20;
/// Of which events of no session (peers, heartbeats, ignored frames) have at most one part in so many.
const OTHERS_SHARE: usize = 4;
/// What a session costs beside its events: its place in the map, the queue and the allocator.
const SESSION_BYTES: usize = 128;

/// Keeps the events of one worker, in one of its lives, in bounded memory. Clones share the same events.
///
/// The bound counts the notes of all events with their texts, the room that lists have for more, and what a
/// session costs beside. When there is no more room, the events of the oldest session that is over are dropped
/// together, and counted; if all are open, those of the oldest. Events of no session have a quarter of the memory,
/// and the oldest of them are dropped first. The table of peers comes on top: [`MAX_PEERS`](crate::MAX_PEERS) peers of
/// some 200 bytes and a name each.
///
/// An event costs the worker's thread a lock that nobody else holds, and most often no allocation. A [`Record`] can
/// be made at any time, from any thread, while the worker serves: it is what the worker knew at one moment. Meanwhile
/// the lock is held while the events of no session and pointers to the sessions are copied, not the events of
/// sessions.
#[derive(Debug, Clone)]
pub struct Recorder {
    worker: WorkerId,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Debug, Default)]
struct Kept {
    max_bytes: usize,
    /// Bytes of all sessions, and of the events of no session.
    sessions_bytes: usize,
    others_bytes: usize,
    sessions: BTreeMap<u64, Session>,
    /// Sessions that are over, in the order of their ends.
    over: VecDeque<u64>,
    others: VecDeque<Note>,
    peers: BTreeMap<u64, PeerNote>,
    /// The highest heartbeat of each peer that was answered, and when.
    answered: BTreeMap<u64, (u64, u64)>,
    lost: Lost,
}

#[derive(Debug, Default)]
struct Session {
    notes: Arc<Vec<Note>>,
    /// Bytes of all texts in the notes.
    texts: usize,
    over: bool,
}

impl Session {
    fn bytes(&self) -> usize {
        SESSION_BYTES + self.texts + self.notes.capacity() * size_of::<Note>()
    }
}

impl Recorder {
    /// A recorder for the worker with this id, with the default bound on its memory.
    pub fn new(worker: &WorkerId) -> Recorder {
        Recorder::with_bytes(worker, DEFAULT_BYTES)
    }

    /// A recorder that uses at most this much memory, in bytes.
    pub fn with_bytes(worker: &WorkerId, max_bytes: usize) -> Recorder {
        let kept = Kept { max_bytes, ..Kept::default() };
        Recorder { worker: worker.clone(), kept: Arc::new(Mutex::new(kept)) }
    }

    /// The listener for [`WorkerConfig::listener`](kv_poll::WorkerConfig::listener) of the worker.
    pub fn listener(&self) -> Listener<KvWhat> {
        let recorder = self.clone();
        Listener::new(move |_, event| recorder.hear(event))
    }

    /// Keeps an event; for servers whose listener has more to do than to record.
    pub fn hear(&self, event: &Event<KvWhat>) {
        let note = Note::of(event);
        let mut kept = self.lock();
        kept.lost.missed = kept.lost.missed.saturating_add(event.missed);
        match event.who.session {
            Some(session) => kept.hear_session(session.0, note),
            None => kept.hear_other(note),
        }
    }

    /// What was recorded until now. The worker knows its incarnation as soon as it has started.
    pub fn record(&self, incarnation: Incarnation) -> Record {
        self.latest(incarnation, usize::MAX)
    }

    /// What was recorded until now of at most so many sessions: those that are not over, and those that were opened
    /// last, with the events of no session since the first of these was opened. The rest counts as
    /// [lost](Record::lost) to the record. For servers that are asked for their record while they serve.
    pub fn latest(&self, incarnation: Incarnation, sessions: usize) -> Record {
        let mut record = Record::new(self.worker.clone(), incarnation);
        let chosen: Vec<(u64, Arc<Vec<Note>>)> = {
            let kept = self.lock();
            record.lost = kept.lost;
            record.peers = kept.peers.values().cloned().collect();
            let chosen = kept.latest(sessions, &mut record.lost);
            let since = match sessions {
                usize::MAX => 0,
                _ => chosen
                    .iter()
                    .filter_map(|(_, notes)| notes.first())
                    .map(|note| note.at)
                    .min()
                    .unwrap_or(0),
            };
            let from = kept.others.partition_point(|note| note.at < since);
            record.lost.other_events = record.lost.other_events.saturating_add(from as u64);
            record.others = kept.others.range(from..).cloned().collect();
            chosen
        };
        let session = |(session, notes): (u64, Arc<Vec<Note>>)| SessionNotes {
            session,
            notes: Arc::unwrap_or_clone(notes),
        };
        record.sessions = chosen.into_iter().map(session).collect();
        record
    }

    /// The bytes that the events occupy now: at most the bound.
    pub fn bytes(&self) -> usize {
        let kept = self.lock();
        kept.sessions_bytes + kept.others_bytes
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    /// At most `count` sessions, in the order of their numbers: first those that are not over, then the latest.
    fn latest(&self, count: usize, lost: &mut Lost) -> Vec<(u64, Arc<Vec<Note>>)> {
        let of = |over: bool| self.sessions.iter().rev().filter(move |(_, session)| session.over == over);
        let mut chosen: Vec<(u64, &Session)> = Vec::new();
        for (number, (&name, session)) in of(false).chain(of(true)).enumerate() {
            if number < count {
                chosen.push((name, session));
            } else {
                lost.sessions = lost.sessions.saturating_add(1);
                lost.session_events = lost.session_events.saturating_add(session.notes.len() as u64);
            }
        }
        chosen.sort_unstable_by_key(|&(name, _)| name);
        chosen.into_iter().map(|(name, session)| (name, Arc::clone(&session.notes))).collect()
    }

    fn hear_session(&mut self, number: u64, note: Note) {
        let opens = matches!(note.what, What::Opened { .. });
        let closes = note.what == What::Closed;
        if opens && !self.sessions.contains_key(&number) {
            let session = Session::default();
            self.sessions_bytes += session.bytes();
            self.sessions.insert(number, session);
        }
        let Some(session) = self.sessions.get_mut(&number) else {
            // The rest of a session that was dropped while it was open.
            self.lost.session_events = self.lost.session_events.saturating_add(1);
            return;
        };
        self.sessions_bytes -= session.bytes();
        session.texts += note.heap_bytes();
        Arc::make_mut(&mut session.notes).push(note);
        self.sessions_bytes += session.bytes();
        if closes {
            session.over = true;
            self.over.push_back(number);
        }
        while self.sessions_bytes > self.max_bytes - self.max_bytes / OTHERS_SHARE {
            let oldest = self.over.pop_front().or_else(|| self.sessions.keys().next().copied());
            let Some(dropped) = oldest.and_then(|oldest| self.sessions.remove(&oldest)) else { break };
            self.sessions_bytes -= dropped.bytes();
            self.lost.sessions = self.lost.sessions.saturating_add(1);
            let events = dropped.notes.len() as u64;
            self.lost.session_events = self.lost.session_events.saturating_add(events);
        }
    }

    fn hear_other(&mut self, mut note: Note) {
        self.note_peer(&note);
        self.rename_late_answer(&mut note);
        // Twice the size of a note, because a list that grows has room for as many again.
        let bytes = |note: &Note| 2 * size_of::<Note>() + note.heap_bytes();
        while self.others_bytes + bytes(&note) > self.max_bytes / OTHERS_SHARE {
            self.lost.other_events = self.lost.other_events.saturating_add(1);
            let Some(oldest) = self.others.pop_front() else { return };
            self.others_bytes -= bytes(&oldest);
        }
        self.others_bytes += bytes(&note);
        self.others.push_back(note);
    }

    /// An answer to a heartbeat that was heard twice, or late, is kept as such: of two answers with the same number,
    /// clocks are compared by the first, which may be dropped earlier.
    fn rename_late_answer(&mut self, note: &mut Note) {
        let (Some(peer), What::Said(Message::HeartbeatAnswered { number, .. })) = (note.peer, &note.what)
        else {
            return;
        };
        let number = *number;
        if !self.peers.contains_key(&peer) {
            return;
        }
        let (last, at) = self.answered.entry(peer).or_insert((number, note.at));
        // A long answer is several messages at one moment.
        if number > *last {
            (*last, *at) = (number, note.at);
        } else if (number, note.at) != (*last, *at) {
            let name = Text::from(format!("→ heartbeat {number} answered, again or late"));
            note.what = What::Other { name };
        }
    }

    /// Remembers who a peer is, and when it was first spoken to.
    fn note_peer(&mut self, note: &Note) {
        let Some(number) = note.peer else { return };
        if let What::PeerMet { worker, incarnation } = &note.what {
            if self.peers.len() >= MAX_PEERS
                && let Some((forgotten, _)) = self.peers.pop_first()
            {
                self.answered.remove(&forgotten);
            }
            let peer = PeerNote {
                peer: number,
                worker: worker.clone(),
                incarnation: *incarnation,
                transport: None,
                hello_said: None,
                hello_heard: None,
                welcome_said: None,
                welcome_heard: None,
            };
            self.peers.insert(number, peer);
            return;
        }
        let Some(peer) = self.peers.get_mut(&number) else { return };
        if let What::WayChosen { transport } = &note.what {
            peer.transport = Some(transport.clone());
        }
        let first = match &note.what {
            What::Said(Message::Hello) => &mut peer.hello_said,
            What::Heard(Message::Hello) => &mut peer.hello_heard,
            What::Said(Message::Welcome) => &mut peer.welcome_said,
            What::PeerAnswers => &mut peer.welcome_heard,
            _ => return,
        };
        first.get_or_insert(note.at);
    }
}
