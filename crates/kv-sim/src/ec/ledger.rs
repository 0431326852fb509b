//! What is known of a world from outside of its machines: sessions, saves, entries in use, and requests.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use kv_core::machine::SessionStatus;
use kv_core::wire::ConversationId;
use kv_core::{ContentHash, PeerCause, SessionId, Time};
use kv_ec::{EcPoll, EntryGuard, Reservation, SharedStore};

use crate::net::lives::{HoldId, LifeId, Slot};

/// The number of an entry's content in its world.
pub(crate) type Item = usize;

/// The hash of an entry's content.
pub(crate) fn hash_of(item: Item) -> Option<ContentHash> {
    ContentHash::new(&format!("image-{item}")).ok()
}

/// The content that a hash names; `None` for a hash of no content of these worlds.
pub(crate) fn item_of(hash: &ContentHash) -> Option<Item> {
    hash.as_str().strip_prefix("image-")?.parse().ok()
}

/// A session that wants an entry, or saves one.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) item: Item,
    pub(crate) bytes: u64,
    /// The host that is asked; `None` for a session that saves.
    pub(crate) source: Option<Slot>,
    pub(crate) opened_at: u64,
    /// The end of the budget, by the clock of the host.
    pub(crate) due: Time,
    pub(crate) state: EcPoll,
    /// True once what the session was lent has come back.
    pub(crate) back: bool,
    pub(crate) aborted: bool,
    /// True if nothing excuses a failure.
    pub(crate) must: bool,
}

/// An entry that an encoder writes.
#[derive(Debug)]
pub(crate) struct Save {
    pub(crate) life: LifeId,
    pub(crate) item: Item,
    pub(crate) blocks: Vec<u32>,
    /// `None` once the encoder has given the reservation away.
    pub(crate) reservation: Option<Box<Reservation>>,
    /// The session, if the machine is to make the entry ready.
    pub(crate) session: Option<SessionId>,
    pub(crate) must: bool,
}

/// An entry that a consumer uses.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) life: LifeId,
    pub(crate) item: Item,
    pub(crate) blocks: Vec<u32>,
    /// Dropped with the rest; `None` where a planted bug has taken it away.
    pub(crate) guard: Option<EntryGuard>,
}

/// Who has a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// Nobody.
    Free,
    /// A reservation, or a transfer.
    Out,
    /// The committed entry with this number.
    Committed(u64),
}

/// The state of an entry at one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Missing,
    Filling,
    Ready,
}

/// When an entry was last in each of its states at one host, in global time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LastSeen {
    moments: [Option<u64>; 3],
    state: State,
}

impl LastSeen {
    /// An entry that a new host does not have.
    pub(crate) fn missing() -> LastSeen {
        LastSeen { moments: [None; 3], state: State::Missing }
    }

    /// The entry is looked at: until now it was in the state in which it was seen last.
    pub(crate) fn look(&mut self, now: u64, state: State) {
        self.moments[self.state as usize] = Some(now);
        self.moments[state as usize] = Some(now);
        self.state = state;
    }

    /// True if the entry was in this state at the moment `since` or later.
    pub(crate) fn was(&self, state: State, since: u64) -> bool {
        self.moments[state as usize].is_some_and(|moment| moment >= since)
    }
}

/// The cache of one life, as it was seen last.
#[derive(Debug)]
pub(crate) struct Desk {
    pub(crate) store: SharedStore,
    pub(crate) uses: Vec<Use>,
    /// The transfer that fills each block; zero for none.
    pub(crate) moving: Vec<u16>,
    pub(crate) seen: Vec<LastSeen>,
    pub(crate) next_session: u64,
    pub(crate) evictions: u64,
}

/// A request of a consumer, as its producer has heard it.
#[derive(Debug, Clone)]
pub(crate) struct Heard {
    pub(crate) item: Item,
    pub(crate) bytes: u64,
    pub(crate) at: u64,
}

/// A request of a consumer, as the consumer has sent it.
#[derive(Debug, Clone)]
pub(crate) struct Sent {
    pub(crate) item: Item,
    pub(crate) bytes: u64,
    pub(crate) at: u64,
    /// True once the producer has failed it.
    pub(crate) failed: bool,
    /// True once the producer has granted the entry, or has told of bytes in place.
    pub(crate) served: bool,
    /// True once the consumer has aborted the request.
    pub(crate) given_up: bool,
    /// True once the consumer has been given a refusal that lasts.
    pub(crate) heard_no: bool,
    /// True if it was sent in the round that goes on.
    pub(crate) of_round: bool,
}

/// A request: the consumer, the producer, what the consumer calls their conversation, and the attempt. Each conversation of a
/// consumer counts its attempts by itself.
pub(crate) type RequestId = (LifeId, LifeId, ConversationId, u64);

/// What is known of a world from outside.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// By life.
    pub(crate) desks: Vec<Desk>,
    pub(crate) sessions: BTreeMap<(LifeId, SessionId), Session>,
    pub(crate) saves: Vec<Save>,
    pub(crate) taken: BTreeMap<u64, Taken>,
    pub(crate) next_taken: u64,
    pub(crate) last_hold: HoldId,
    /// What a life has told another one last to call their conversation in frames to it. What comes under another name is
    /// not heard.
    pub(crate) called: BTreeMap<(LifeId, LifeId), ConversationId>,
    /// What the sender of a frame calls the conversation, by sender, receiver, and what the receiver calls it, which is
    /// what stands in the frame. Two lives may have several conversations, one after another or over several ways.
    names: BTreeMap<(LifeId, LifeId, ConversationId), ConversationId>,
    pub(crate) sent: BTreeMap<RequestId, Sent>,
    pub(crate) heard: BTreeMap<RequestId, Heard>,
    /// What producers said of entries: consumer, producer, entry, name of the cause.
    pub(crate) said: BTreeSet<(LifeId, LifeId, Item, &'static str)>,
    /// When requests were sent that were refused for good: by consumer, producer, entry, blocks.
    pub(crate) refused: BTreeMap<(LifeId, LifeId, Item, u64), Vec<u64>>,
}

impl Ledger {
    /// Notes how both sides call the conversation in which the first welcomes the second.
    pub(crate) fn welcomes(
        &mut self,
        (from, to): (LifeId, LifeId),
        theirs: ConversationId,
        ours: ConversationId,
    ) {
        self.called.insert((from, to), ours);
        self.names.insert((from, to, theirs), ours);
        self.names.insert((to, from, ours), theirs);
    }

    /// What a life calls the conversation in which it sends a frame; `None` if it has not named any. Before one side has
    /// welcomed the other, that is what the life has named last, and stays so for this name of the other side's.
    pub(crate) fn speaks(
        &mut self,
        (from, to): (LifeId, LifeId),
        theirs: ConversationId,
    ) -> Option<ConversationId> {
        let last = self.called.get(&(from, to)).copied();
        match self.names.entry((from, to, theirs)) {
            Entry::Occupied(known) => Some(*known.get()),
            Entry::Vacant(unknown) => last.map(|last| *unknown.insert(last)),
        }
    }

    /// What the sender of a frame calls the conversation; `None` if the frame was not sent to this receiver.
    pub(crate) fn name_of_sender(
        &self,
        (from, to): (LifeId, LifeId),
        theirs: ConversationId,
    ) -> Option<ConversationId> {
        self.names.get(&(from, to, theirs)).copied()
    }

    /// The sessions of a life that have not ended.
    pub(crate) fn open(&self, life: LifeId) -> impl Iterator<Item = (SessionId, &Session)> {
        let of_life = (life, SessionId(0))..=(life, SessionId(u64::MAX));
        let open = self.sessions.range(of_life).filter(|(_, session)| !session.state.is_terminal());
        open.map(|((_, id), session)| (*id, session))
    }

    /// A number for a use of a block that nothing else has, or will have.
    pub(crate) fn new_hold(&mut self) -> HoldId {
        self.last_hold += 1;
        self.last_hold
    }
}

/// The name of a refusal that the oracle can judge.
pub(crate) fn refusal(cause: &PeerCause) -> Option<&'static str> {
    match cause {
        PeerCause::EntryMissing => Some("missing"),
        PeerCause::EntryNotReady => Some("not ready"),
        PeerCause::EntrySize { .. } => Some("size"),
        _ => None,
    }
}

/// True if another try at the same producer would be refused in the same way.
pub(crate) fn is_lasting(cause: &PeerCause) -> bool {
    matches!(
        cause,
        PeerCause::EntryMissing
            | PeerCause::EntrySize { .. }
            | PeerCause::Incompatible(_)
            | PeerCause::WorkerStopped
    )
}
