//! A peer's agent: what is known of the agent, and what is on the way to the agent.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kv_core::{Op, Origin, PeerId, PostId, TransportError};
use kv_host::{Life, Parked};

use crate::connections::route::Route;
use crate::notifications::speech::{Dialogue, Speech};
use crate::regions::place::Place;
use crate::regions::prepared::Grid;
use crate::transfers::lead::Lead;
use crate::transfers::line::{Length, RunQueue};
use crate::transfers::speed::{SLICE, Speed};

/// A peer's agent, as this transport knows the agent.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) name: String,
    pub(crate) speech: Speech,
    /// A hash of the transport's metadata, with a key that peers do not know; zero for a foreign agent.
    pub(crate) metadata: u64,
    pub(crate) regions: Vec<Place>,
    /// The items of the regions, if NIXL has prepared a list of them.
    pub(crate) lists: Option<Grid>,
    pub(crate) life: Life,
    /// The route to the agent; `Unknown` until the connection is open.
    pub(crate) route: Route,
    pub(crate) stage: Stage,
    /// The origin under which the agent's frames are reported.
    pub(crate) origin: Origin,
    /// Ids of peers that are this agent: usually one.
    pub(crate) users: Vec<PeerId>,

    /// Posts with something to send. Ids of ended posts are skipped.
    pub(crate) run: RunQueue,
    /// Writes that wait for the peer's permission.
    pub(crate) held: VecDeque<PostId>,
    /// Requests on their way: how many, the sum of their shares of a slice's time, and the sum of their
    /// weights.
    pub(crate) requests: usize,
    pub(crate) load: u64,
    pub(crate) underway: u64,
    /// How far the requests are ahead of the peer's thread, where it takes part in them.
    pub(crate) lead: Lead,
    /// How many of the requests have failed: parts of them may still be on their way.
    pub(crate) failed: usize,
    /// When the connection was closed because of failed requests.
    pub(crate) closed: Option<Instant>,
    speeds: [Speed; 2],

    /// Posts whose bytes are in place, and whose notify frames wait for room.
    pub(crate) parked: Parked,
    /// When something was sent by NIXL last, or the connection was tried out.
    pub(crate) spoke: Instant,
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
    /// The connection is in use.
    Open,
    /// The owner has disconnected the peer; requests are still on their way.
    Left,
    /// The connection failed at this moment; requests are still on their way, or the peer's death is awaited.
    Broken(Instant),
}

impl Remote {
    /// An agent whose requests are cut for this time and this weight at most.
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
            metadata: 0,
            regions,
            lists: None,
            life,
            route: Route::Unknown,
            stage: Stage::Open,
            origin: Origin(0),
            users: vec![user],
            run: RunQueue::default(),
            held: VecDeque::new(),
            requests: 0,
            load: 0,
            underway: 0,
            lead: Lead::default(),
            failed: 0,
            closed: None,
            speeds: [Speed::new(slice.0, slice.1), Speed::new(slice.0, slice.1)],
            parked: Parked::default(),
            spoke: Instant::now(),
        }
    }

    /// Refuses other metadata in the name of the agent: the peer that presents the metadata is another one, or
    /// was another one when the agent was connected.
    pub(crate) fn check_same(&self, metadata: u64) -> Result<(), TransportError> {
        if self.metadata == metadata {
            return Ok(());
        }
        Err(TransportError::Metadata("the agent is connected already, by other metadata"))
    }

    pub(crate) fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    /// The measured speed of one direction.
    pub(crate) fn speed(&mut self, op: Op) -> &mut Speed {
        let [write, read] = &mut self.speeds;
        match op {
            Op::Write => write,
            Op::Read => read,
        }
    }

    /// True if another request may follow those on their way: two slices, so that the way is never empty, and
    /// short posts beside them; and the peer's thread is not too far behind.
    pub(crate) fn has_turn(&self, length: Length) -> bool {
        let window = match length {
            Length::Long => 2 * SLICE,
            Length::Short => 3 * SLICE,
        };
        self.load < window && self.lead.has_room(window)
    }

    /// The dialogue with an agent of this crate; `None` for a foreign agent.
    pub(crate) fn dialogue(&mut self) -> Option<&mut Dialogue> {
        match &mut self.speech {
            Speech::Ours(dialogue) => Some(dialogue),
            Speech::Foreign(_) => None,
        }
    }

    pub(crate) fn is_foreign(&self) -> bool {
        matches!(self.speech, Speech::Foreign(_))
    }

    /// Whether the agent has said that the agent will not touch this transport's memory any more.
    pub(crate) fn said_farewell(&self) -> bool {
        matches!(&self.speech, Speech::Ours(dialogue) if dialogue.said_farewell)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notifications::arrivals::charge;

    #[test]
    fn a_sender_waits_for_room_and_cannot_be_told_more_than_it_sent() {
        let (speech, slice) = (Speech::ours(1, None), (Duration::ZERO, 1));
        let mut remote = Remote::new("x".to_owned(), speech, Vec::new(), Life::Unseen, PeerId(1), slice);
        let most = 2 << 20;
        while remote.speech.has_room(1000, most) {
            remote.dialogue().unwrap().sent += charge(1000);
        }
        let dialogue = remote.dialogue().unwrap();
        assert!(dialogue.sent <= most as u64 && dialogue.sent > most as u64 - charge(1000));
        dialogue.confirm(u64::MAX);
        assert_eq!(dialogue.confirmed, dialogue.sent);
        dialogue.confirm(0);
        assert_eq!(dialogue.confirmed, dialogue.sent);
        assert!(remote.speech.has_room(1000, most));
    }
}
