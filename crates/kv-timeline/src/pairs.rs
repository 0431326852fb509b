//! Messages that one worker has said and another has heard: what they tell of the difference of two clocks.

use std::collections::BTreeMap;

use crate::note::{Message, Note, What};
use crate::record::{Lost, PeerNote, Record};

/// What one message tells of the difference of two clocks, `b`'s minus `a`'s. Times are in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bound {
    /// When the message was said or heard by `a`, on the clock of `a`. The bound holds at that time.
    pub at: u64,
    /// The difference is at most this, if `a` has said the message.
    pub upper: Option<i128>,
    /// The difference is at least this, if `a` has heard the message.
    pub lower: Option<i128>,
}

/// Which message of two workers: equal on the side that says it, and on the side that hears it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Hello,
    Welcome,
    Heartbeat(u64),
    HeartbeatAnswered(u64),
    OfAttempt(u64, Kind),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Register,
    Acquire,
    Granted,
    Registered,
    Failed,
    Abort,
    AbortAcknowledged,
}

impl Kind {
    /// True for messages that may be said when their session is not known, so that the first of several is not
    /// among the session's events.
    fn may_be_of_no_session(self) -> bool {
        matches!(self, Kind::Registered | Kind::Failed | Kind::Abort | Kind::AbortAcknowledged)
    }
}

/// One direction between two workers, and a message: who says it, who hears it.
type Of = (usize, usize, Key);

/// Compares all messages between all pairs of workers. The bounds under `(a, b)`, where `a < b`, are those of
/// `b`'s clock minus `a`'s.
///
/// A message is heard after it was said. A message that was said several times, because an answer was missing,
/// counts from the first time; that makes a bound weaker and never wrong. So a message counts only if its sayer's
/// record surely holds the first time. `InPlace` does not count: the transport says it together with the last bytes of
/// a post, without telling the worker when, and the worker itself says it only again.
pub fn compare(
    records: &[Record],
    node_of: impl Fn(&PeerNote) -> Option<usize>,
) -> BTreeMap<(usize, usize), Vec<Bound>> {
    let (mut said, mut heard): (BTreeMap<Of, u64>, BTreeMap<Of, u64>) = Default::default();
    for (here, record) in records.iter().enumerate() {
        let mut peers: BTreeMap<u64, usize> = BTreeMap::new();
        let mut met: BTreeMap<usize, usize> = BTreeMap::new();
        for peer in &record.peers {
            let Some(there) = node_of(peer).filter(|&there| there != here) else { continue };
            peers.insert(peer.peer, there);
            *met.entry(there).or_default() += 1;
        }
        // A peer that was met twice has numbered its attempts twice.
        let complete = record.lost == Lost::default();
        let usable = |there: usize| complete || met.get(&there) == Some(&1);
        for peer in &record.peers {
            let Some(&there) = peers.get(&peer.peer) else { continue };
            if record.lost.missed == 0 && usable(there) {
                first(&mut said, (here, there, Key::Hello), peer.hello_said);
                first(&mut said, (here, there, Key::Welcome), peer.welcome_said);
            }
            first(&mut heard, (there, here, Key::Hello), peer.hello_heard);
            first(&mut heard, (there, here, Key::Welcome), peer.welcome_heard);
        }
        let sessions = record.sessions.iter().flat_map(|session| &session.notes).map(|note| (note, true));
        for (note, of_session) in sessions.chain(record.others.iter().map(|note| (note, false))) {
            let Some(&there) = note.peer.and_then(|peer| peers.get(&peer)) else { continue };
            match &note.what {
                What::Said(message) => {
                    let Some(key) = key(message, note) else { continue };
                    let surely_first = match key {
                        Key::OfAttempt(_, kind) => {
                            let whole = of_session && !kind.may_be_of_no_session();
                            record.lost.missed == 0 && (whole || record.lost.other_events == 0)
                        }
                        // A number is never used again; recorders know later answers to the same one.
                        Key::Heartbeat(_) => true,
                        Key::HeartbeatAnswered(_) => record.lost.missed == 0,
                        Key::Hello | Key::Welcome => false,
                    };
                    if surely_first && usable(there) {
                        first(&mut said, (here, there, key), Some(note.at));
                    }
                }
                What::Heard(message) => {
                    let key = key(message, note).filter(|key| !matches!(key, Key::Hello | Key::Welcome));
                    let Some(key) = key else { continue };
                    first(&mut heard, (there, here, key), Some(note.at));
                }
                _ => {}
            }
        }
    }
    let mut all: BTreeMap<(usize, usize), Vec<Bound>> = BTreeMap::new();
    for ((from, to, key), said) in said {
        let Some(&heard) = heard.get(&(from, to, key)) else { continue };
        let took = i128::from(heard) - i128::from(said);
        let bound = if from < to {
            Bound { at: said, upper: Some(took), lower: None }
        } else {
            Bound { at: heard, upper: None, lower: Some(-took) }
        };
        all.entry((from.min(to), from.max(to))).or_default().push(bound);
    }
    all
}

fn first(times: &mut BTreeMap<Of, u64>, of: Of, at: Option<u64>) {
    if let Some(at) = at {
        times.entry(of).and_modify(|first| *first = at.min(*first)).or_insert(at);
    }
}

fn key(message: &Message, note: &Note) -> Option<Key> {
    let of = |kind| note.attempt.map(|attempt| Key::OfAttempt(attempt, kind));
    match *message {
        Message::Hello => Some(Key::Hello),
        Message::Welcome => Some(Key::Welcome),
        Message::Heartbeat { number, .. } => Some(Key::Heartbeat(number)),
        Message::HeartbeatAnswered { number, .. } => Some(Key::HeartbeatAnswered(number)),
        Message::Register { .. } => of(Kind::Register),
        Message::Acquire { .. } => of(Kind::Acquire),
        Message::Granted { .. } => of(Kind::Granted),
        Message::Registered => of(Kind::Registered),
        Message::Failed { .. } => of(Kind::Failed),
        Message::Abort { .. } => of(Kind::Abort),
        Message::AbortAcknowledged => of(Kind::AbortAcknowledged),
        Message::Refused { .. }
        | Message::InPlace { .. }
        | Message::Release { .. }
        | Message::Released { .. }
        | Message::Other { .. } => None,
    }
}
