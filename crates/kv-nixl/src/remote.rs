//! A peer's agent: what is known of it, and what is on the way to it.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use kv_core::{Op, Origin, PeerId, PlaneError, PostId};

use crate::allowance::Allowance;
use crate::doorbell::Button;
use crate::frame::HEADER;
use crate::host::Life;
use crate::metadata::Place;
use crate::prepared::Grid;
use crate::random::random;
use crate::speed::{SLICE, Speed};
use crate::transport::Transport;

/// A connection to an agent; random, and thus also the connection's number in notifications, which
/// only that agent is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RemoteId(pub(crate) u64);

impl RemoteId {
    /// A new one; never the number of the doorbell.
    pub(crate) fn random() -> Result<RemoteId, PlaneError> {
        let number = random().map_err(|kind| PlaneError::Os { call: "getrandom", kind })?;
        Ok(RemoteId(number >> 1))
    }
}

/// A peer's agent.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) name: String,
    pub(crate) speech: Speech,
    pub(crate) regions: Vec<Place>,
    /// Their items, if NIXL has prepared a list of them.
    pub(crate) lists: Option<Grid>,
    pub(crate) life: Life,
    /// The way to it, once that is known.
    pub(crate) transport: Transport,
    pub(crate) stage: Stage,
    /// What its frames come under.
    pub(crate) origin: Origin,
    /// Peers that are this agent: usually one.
    pub(crate) users: Vec<PeerId>,

    /// Posts with something to send. Ids of ended posts are skipped.
    pub(crate) run: RunQueue,
    /// Writes that wait for the peer's permission.
    pub(crate) held: VecDeque<PostId>,
    /// Requests on their way, the part of a slice's time that each takes, and their weight, together.
    pub(crate) requests: usize,
    pub(crate) load: u64,
    pub(crate) underway: u64,
    /// Those of them that have failed: parts of them may still be on their way.
    pub(crate) failed: usize,
    /// When its connection was closed because of them.
    pub(crate) closed: Option<Instant>,
    speeds: [Speed; 2],

    /// Posts whose bytes are in place, and whose notify frames wait for room.
    pub(crate) parked: VecDeque<PostId>,
    /// When something was sent last.
    pub(crate) spoke: Instant,
}

/// What is said to an agent, and what is believed of what it says. Nothing of [`Speech::Ours`] can be
/// sent to a foreign agent, because what it would need is not there.
#[derive(Debug)]
pub(crate) enum Speech {
    /// The agent is a plane like this one.
    Ours(Dialogue),
    /// The agent is anybody's: raw notifications, as far as the allowance goes.
    Foreign(Allowance),
}

/// What two planes of ours know of each other's notifications.
#[derive(Debug)]
pub(crate) struct Dialogue {
    /// The peer's plane, which every notification names.
    pub(crate) token: u64,
    /// If the peer is on this host.
    pub(crate) button: Option<Button>,
    /// The number of the peer's connection to us, as it tells in what it sends: our proof, to it alone,
    /// that a farewell is ours.
    pub(crate) theirs: Option<u64>,
    /// The peer has said that it will not touch our memory any more.
    pub(crate) said_farewell: bool,
    /// Bytes of frames sent, and confirmed by the peer.
    pub(crate) sent: u64,
    pub(crate) confirmed: u64,
}

impl Dialogue {
    /// The peer says how much has arrived. It cannot make us believe in more than was sent.
    pub(crate) fn confirm(&mut self, count: u64) {
        self.confirmed = self.confirmed.max(count.min(self.sent));
    }
}

/// The life of a connection.
///
/// ```text
/// Open ── disconnect ──▶ Left ──────── requests over ──▶ (gone)
///  │  ◀──── connect ──────┘
///  └─ error, death ────▶ Broken ── requests over, or failed and quiet ──▶ PeerGone, (gone)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// In use.
    Open,
    /// Forgotten by our owner; requests are still on their way.
    Left,
    /// It failed at this moment; requests are still on their way, or its death is awaited.
    Broken(Instant),
}

impl Remote {
    /// Its requests are to be of this time and of this weight at most.
    pub(crate) fn new(
        name: String,
        speech: Speech,
        regions: Vec<Place>,
        life: Life,
        user: PeerId,
        slice: (Duration, u64),
    ) -> Remote {
        Remote {
            name,
            speech,
            regions,
            lists: None,
            life,
            transport: Transport::Unknown,
            stage: Stage::Open,
            origin: Origin(0),
            users: vec![user],
            run: RunQueue::default(),
            held: VecDeque::new(),
            requests: 0,
            load: 0,
            underway: 0,
            failed: 0,
            closed: None,
            speeds: [Speed::new(slice.0, slice.1), Speed::new(slice.0, slice.1)],
            parked: VecDeque::new(),
            spoke: Instant::now(),
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    /// How fast this direction is.
    pub(crate) fn speed(&mut self, op: Op) -> &mut Speed {
        let [write, read] = &mut self.speeds;
        match op {
            Op::Write => write,
            Op::Read => read,
        }
    }

    /// True if a request may follow those on their way: a second slice, so that the way is never
    /// empty, and short posts beside two of them.
    pub(crate) fn has_turn(&self, length: Length) -> bool {
        let window = match length {
            Length::Long => 2 * SLICE,
            Length::Short => 3 * SLICE,
        };
        self.load < window
    }

    /// True if a frame of this length may be sent now: an agent of ours has confirmed enough of what was
    /// sent before, a foreign one has been sent little enough of late.
    pub(crate) fn has_room(&self, len: usize, most: usize) -> bool {
        match &self.speech {
            Speech::Ours(dialogue) => {
                dialogue.sent.saturating_sub(dialogue.confirmed) + charge(len) <= most as u64
            }
            Speech::Foreign(allowance) => allowance.covers(charge(len), most as u64, Instant::now()),
        }
    }

    /// What is known of the agent's notifications, if it is one of ours.
    pub(crate) fn dialogue(&mut self) -> Option<&mut Dialogue> {
        match &mut self.speech {
            Speech::Ours(dialogue) => Some(dialogue),
            Speech::Foreign(_) => None,
        }
    }

    pub(crate) fn is_foreign(&self) -> bool {
        matches!(self.speech, Speech::Foreign(_))
    }

    /// Whether the agent has said that it will not touch our memory any more.
    pub(crate) fn said_farewell(&self) -> bool {
        matches!(&self.speech, Speech::Ours(dialogue) if dialogue.said_farewell)
    }
}

impl Speech {
    /// The beginning of a dialogue with the plane of this token; `near` if it is on this host.
    pub(crate) fn ours(token: u64, near: bool) -> Speech {
        let button = near.then(|| Button::new(token)).flatten();
        Speech::Ours(Dialogue { token, button, theirs: None, said_farewell: false, sent: 0, confirmed: 0 })
    }
}

/// Whether a post goes into one request together with others, or into several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Length {
    Short,
    Long,
}

/// Posts that wait for their turns: long ones, and short ones, which would otherwise wait for a part
/// of every long one. Each kind is served in a circle.
#[derive(Debug, Default)]
pub(crate) struct RunQueue {
    short: Waiting,
    long: Waiting,
}

/// Posts of one kind.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    pub(crate) posts: VecDeque<PostId>,
    /// The peer is in the plane's line of those with posts of this kind.
    pub(crate) in_line: bool,
}

impl RunQueue {
    pub(crate) fn of(&mut self, length: Length) -> &mut Waiting {
        match length {
            Length::Short => &mut self.short,
            Length::Long => &mut self.long,
        }
    }

    pub(crate) fn clear(&mut self) {
        self.short.posts.clear();
        self.long.posts.clear();
    }
}

/// What a frame counts: UCX and NIXL keep some hundred bytes with each.
pub(crate) fn charge(len: usize) -> u64 {
    (len + HEADER + 238) as u64
}

/// After so many bytes their arrival is confirmed: less than half of what a sender may have
/// unconfirmed, so that one that sends on never waits for a timer.
const CONFIRM_EVERY: u64 = 512 << 10;
/// Connections whose bytes are counted; above, the one that began first is forgotten.
const MOST: usize = 4096;

/// Counts what arrives, by the senders' connections.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    counts: HashMap<u64, Arrival>,
    order: VecDeque<u64>,
}

#[derive(Debug)]
struct Arrival {
    /// The sender's agent, as it says itself.
    name: String,
    count: u64,
    told: u64,
}

impl Arrivals {
    /// Counts a frame. Returns the count if it is time to confirm it.
    pub(crate) fn count(&mut self, connection: u64, name: &str, len: usize) -> Option<u64> {
        if !self.counts.contains_key(&connection) {
            if self.order.len() >= MOST
                && let Some(oldest) = self.order.pop_front()
            {
                self.counts.remove(&oldest);
            }
            self.order.push_back(connection);
            self.counts.insert(connection, Arrival { name: name.to_owned(), count: 0, told: 0 });
        }
        let arrival = self.counts.get_mut(&connection)?;
        arrival.count += charge(len);
        (arrival.count - arrival.told >= CONFIRM_EVERY).then_some(arrival.count)
    }

    /// This count was confirmed.
    pub(crate) fn told(&mut self, connection: u64, count: u64) {
        if let Some(arrival) = self.counts.get_mut(&connection) {
            arrival.told = arrival.told.max(count);
        }
    }

    /// What has arrived from an agent that could not be told so far.
    pub(crate) fn untold(&self, name: &str) -> Vec<(u64, u64)> {
        let due = |arrival: &Arrival| arrival.name == name && arrival.count - arrival.told >= CONFIRM_EVERY;
        let due = self.counts.iter().filter(|(_, arrival)| due(arrival));
        due.map(|(connection, arrival)| (*connection, arrival.count)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_are_confirmed_now_and_then_and_bounded() {
        let mut arrivals = Arrivals::default();
        let frame = 100_000;
        assert_eq!(arrivals.count(1, "a", frame), None);
        let count = (0..10).find_map(|_| arrivals.count(1, "a", frame)).unwrap();
        assert!(count >= CONFIRM_EVERY && count < CONFIRM_EVERY + charge(frame));
        assert_eq!(arrivals.untold("a"), [(1, count)]);
        arrivals.told(1, count);
        assert_eq!(arrivals.untold("a"), []);
        for connection in 0..3 * MOST as u64 {
            arrivals.count(connection, "b", 0);
        }
        assert_eq!(arrivals.counts.len(), MOST);
        assert_eq!(arrivals.order.len(), MOST);
    }

    #[test]
    fn a_sender_waits_for_room_and_cannot_be_told_more_than_it_sent() {
        let (speech, slice) = (Speech::ours(1, false), (Duration::ZERO, 1));
        let mut remote = Remote::new("x".to_owned(), speech, Vec::new(), Life::Unseen, PeerId(1), slice);
        let most = 2 << 20;
        while remote.has_room(1000, most) {
            remote.dialogue().unwrap().sent += charge(1000);
        }
        let dialogue = remote.dialogue().unwrap();
        assert!(dialogue.sent <= most as u64 && dialogue.sent > most as u64 - charge(1000));
        dialogue.confirm(u64::MAX);
        assert_eq!(dialogue.confirmed, dialogue.sent);
        dialogue.confirm(0);
        assert_eq!(dialogue.confirmed, dialogue.sent);
        assert!(remote.has_room(1000, most));
    }
}
