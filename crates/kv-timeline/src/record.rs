//! What one worker has recorded, as a value that can be saved and sent.

use kv_core::{Incarnation, WorkerId};
use serde::{Deserialize, Serialize};

use crate::note::Note;
use crate::text::Text;

/// The version of the form of records. A record of another version is refused.
pub const VERSION: u32 = 1;
/// The longest record that is read, in bytes of JSON: 64 MiB.
pub const MAX_RECORD: usize = 64 << 20;
/// Most peers that a record names.
pub const MAX_PEERS: usize = 4096;

/// The events of one worker in one of its incarnations, as a [`Recorder`](crate::Recorder) has kept them.
///
/// As JSON, a record is saved and sent ([`to_json`](Record::to_json), [`from_json`](Record::from_json)). A
/// record that was read may hold anything that its author likes: a timeline of such records can be wrong, and does
/// no other harm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    /// The engine and the rank of the worker.
    pub worker: WorkerId,
    /// The life of the worker.
    pub incarnation: Incarnation,
    /// The peers that the worker has met.
    pub peers: Vec<PeerNote>,
    /// The events of each session, in the order in which the sessions were opened.
    pub sessions: Vec<SessionNotes>,
    /// The events of no session, in the order in which they happened: most of them are about a peer.
    pub others: Vec<Note>,
    /// What the record lacks.
    pub lost: Lost,
}

/// A peer of a worker, and when the first messages of the two were said and heard, in nanoseconds of the
/// worker's clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerNote {
    /// The worker's own number for the peer.
    pub peer: u64,
    /// The engine and the rank of the peer.
    pub worker: WorkerId,
    /// The life of the peer.
    pub incarnation: Incarnation,
    /// The transport by which the peer was reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Text>,
    /// When this worker first said hello.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hello_said: Option<u64>,
    /// When the peer's hello was first heard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hello_heard: Option<u64>,
    /// When this worker first answered the peer's hello.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub welcome_said: Option<u64>,
    /// When the peer's answer was first heard.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub welcome_heard: Option<u64>,
}

/// The events of one session, from the first to the last that was recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionNotes {
    /// The worker's own number for the session.
    pub session: u64,
    /// The events, in the order in which they happened.
    pub notes: Vec<Note>,
}

/// What a record does not hold, because there was no room, or because it was asked for the latest sessions only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Lost {
    /// Sessions that were dropped, with all of their events.
    pub sessions: u64,
    /// Events of these sessions.
    pub session_events: u64,
    /// Events of no session that were dropped.
    pub other_events: u64,
    /// Events that the worker itself has lost, because more of them happened in one step than it keeps for its listener.
    pub missed: u64,
}

/// Why a record cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The record is too long.
    #[error("a record has {len} bytes, and at most {max} are read")]
    TooLong {
        /// The length of the record in bytes.
        len: usize,
        /// The longest record that is read, in bytes.
        max: usize,
    },
    /// The record is of another version of this crate.
    #[error("version differs: the record has {found}, this crate reads {known}")]
    Version {
        /// The version of the record.
        found: u32,
        /// The version that this crate reads and writes.
        known: u32,
    },
    /// The bytes are no record.
    #[error("not a record: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The record names too many peers.
    #[error("a record names {found} peers, and at most {max} are read")]
    TooManyPeers {
        /// How many peers the record names.
        found: usize,
        /// The most peers that a record may name.
        max: usize,
    },
}

/// What every version of a record begins with.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl Record {
    /// A record without events, of this life of this worker.
    pub fn new(worker: WorkerId, incarnation: Incarnation) -> Record {
        Record {
            version: VERSION,
            worker,
            incarnation,
            peers: Vec::new(),
            sessions: Vec::new(),
            others: Vec::new(),
            lost: Lost::default(),
        }
    }

    /// The record as one line of JSON, in the form that [`from_json`](Record::from_json) reads.
    pub fn to_json(&self) -> Result<String, RecordError> {
        Ok(serde_json::to_string(self)?)
    }

    /// Reads a record that was saved or sent. The record takes at most ten times the memory of the JSON, which
    /// has at most [`MAX_RECORD`] bytes.
    pub fn from_json(json: &[u8]) -> Result<Record, RecordError> {
        if json.len() > MAX_RECORD {
            return Err(RecordError::TooLong { len: json.len(), max: MAX_RECORD });
        }
        // First, so that a record of another form is refused by its version.
        let Versioned { version: found } = serde_json::from_slice(json)?;
        if found != VERSION {
            return Err(RecordError::Version { found, known: VERSION });
        }
        let record: Record = serde_json::from_slice(json)?;
        if record.peers.len() > MAX_PEERS {
            return Err(RecordError::TooManyPeers { found: record.peers.len(), max: MAX_PEERS });
        }
        Ok(record)
    }

    /// Reads the records of a process that has several workers, one a line, and at most `max` of them.
    pub fn from_lines(lines: &[u8], max: usize) -> Result<Vec<Record>, RecordError> {
        let lines = lines.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        lines.take(max).map(Record::from_json).collect()
    }

    /// The number of events in the record.
    pub fn events(&self) -> usize {
        self.others.len() + self.sessions.iter().map(|session| session.notes.len()).sum::<usize>()
    }

    /// The moment of the last event, in nanoseconds of the worker's clock; 0 without events.
    pub(crate) fn last_at(&self) -> u64 {
        self.all_notes().map(|note| note.at).max().unwrap_or(0)
    }

    pub(crate) fn all_notes(&self) -> impl Iterator<Item = &Note> {
        self.sessions.iter().flat_map(|session| &session.notes).chain(&self.others)
    }
}
