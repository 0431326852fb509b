//! Keeps the events of a running worker, in bounded memory.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::trace::{Event, KvWhat};
use kv_core::{Incarnation, WorkerId};
use kv_poll::worker::Listener;

use crate::note::{Message, Note, What};
use crate::record::{Lost, MAX_PEERS, PeerNote, Record, SessionNotes};

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
/// An event costs the worker's thread a lock that nobody else holds, and most often no allocation. Making a
/// [`Record`] holds the lock while pointers to the sessions are copied, not their events.
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
    lost: Lost,
}

#[derive(Debug, Default)]
struct Session {
    notes: Arc<Vec<Note>>,
    /// Bytes of all texts in the notes.
    texts: usize,
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
        let mut record = Record::new(self.worker.clone(), incarnation);
        let sessions: Vec<(u64, Arc<Vec<Note>>)> = {
            let kept = self.lock();
            record.lost = kept.lost;
            record.peers = kept.peers.values().cloned().collect();
            record.others = kept.others.iter().cloned().collect();
            kept.sessions.iter().map(|(&session, kept)| (session, Arc::clone(&kept.notes))).collect()
        };
        let session = |(session, notes): (u64, Arc<Vec<Note>>)| SessionNotes {
            session,
            notes: Arc::unwrap_or_clone(notes),
        };
        record.sessions = sessions.into_iter().map(session).collect();
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

    fn hear_other(&mut self, note: Note) {
        self.note_peer(&note);
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

    /// Remembers who a peer is, and when it was first spoken to.
    fn note_peer(&mut self, note: &Note) {
        let Some(number) = note.peer else { return };
        if let What::PeerMet { worker, incarnation } = &note.what {
            if self.peers.len() >= MAX_PEERS {
                self.peers.pop_first();
            }
            let peer = PeerNote {
                peer: number,
                worker: worker.clone(),
                incarnation: *incarnation,
                hello_said: None,
                hello_heard: None,
                welcome_said: None,
                welcome_heard: None,
            };
            self.peers.insert(number, peer);
            return;
        }
        let Some(peer) = self.peers.get_mut(&number) else { return };
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
