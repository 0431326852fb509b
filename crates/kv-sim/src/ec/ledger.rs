//! What is known of a world from outside of its machines: sessions, saves, entries in use, and requests.

use std::collections::{BTreeMap, BTreeSet};

use kv_core::machine::SessionStatus;
use kv_core::wire::ConversationId;
use kv_core::{ContentHash, PeerCause, PeerId, SessionId, Time};
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
    /// The last transfer that has filled each block, given up or not; zero for none.
    pub(crate) filled_by: Vec<u16>,
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

/// A request as its frame tells it: the consumer, the producer, what the producer calls their conversation, and the attempt.
pub(crate) type RequestInFrame = (LifeId, LifeId, ConversationId, u64);

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
    /// What a life has told a peer of its last to call their conversation. Two lives may have several conversations, one
    /// after another or over several ways. Each is with a peer of its own, and only by the peer is told which one a frame
    /// belongs to: what stands in the frame is the other side's name, and the other side may keep that name while this
    /// one forgets the peer and begins anew, perhaps without a welcome.
    names: BTreeMap<(LifeId, PeerId), ConversationId>,
    /// What the consumer of a request calls the conversation. Who has forgotten a peer goes on counting attempts, so that
    /// no two requests of a consumer are alike in a frame.
    asked_in: BTreeMap<RequestInFrame, ConversationId>,
    pub(crate) sent: BTreeMap<RequestId, Sent>,
    pub(crate) heard: BTreeMap<RequestId, Heard>,
    /// Transfers that consumers have given up, as producers have heard: consumer, producer, transfer.
    pub(crate) reads_given_up: BTreeSet<(LifeId, LifeId, u16)>,
    /// What producers said of entries: consumer, producer, entry, name of the cause.
    pub(crate) said: BTreeSet<(LifeId, LifeId, Item, &'static str)>,
    /// When sessions of a life had waited in vain for a producer that had come to the life itself, by a way that swallows what
    /// the life says: those under way at that moment fail, and no later ones. By life and by slot of the producer.
    in_vain: BTreeMap<(LifeId, Slot), u64>,
    /// When requests were sent that were refused for good: by consumer, producer, entry, blocks.
    pub(crate) refused: BTreeMap<(LifeId, LifeId, Item, u64), Vec<u64>>,
}

impl Ledger {
    /// A session has failed because its producer did not answer. It need not be served if it is among the first.
    pub(crate) fn excuse_vain_wait(&mut self, id: (LifeId, SessionId), now: u64) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if let Some(source) = session.source {
            session.must &= *self.in_vain.entry((id.0, source)).or_insert(now) != now;
        }
    }

    /// A life tells another one, which is this peer of its, to call their conversation so.
    pub(crate) fn tells_name(&mut self, way: (LifeId, LifeId), peer: PeerId, ours: ConversationId) {
        self.called.insert(way, ours);
        self.names.insert((way.0, peer), ours);
    }

    /// What a life calls the conversation in which it asks a peer for something; `None` if it has not named any.
    pub(crate) fn name_of_asker(&self, life: LifeId, peer: PeerId) -> Option<ConversationId> {
        self.names.get(&(life, peer)).copied()
    }

    /// Notes what the consumer calls the conversation of a request, in which stands what the producer calls it.
    pub(crate) fn asks_in(&mut self, request: RequestInFrame, ours: ConversationId) {
        self.asked_in.insert(request, ours);
    }

    /// What the consumer calls the conversation of a request that arrives; `None` if the request was not sent to this
    /// receiver.
    pub(crate) fn asked_in(&self, request: RequestInFrame) -> Option<ConversationId> {
        self.asked_in.get(&request).copied()
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

#[cfg(test)]
mod tests {
    use super::*;

    const CONSUMER: LifeId = 0;
    const PRODUCER: LifeId = 4;

    fn name(sequence: u32) -> ConversationId {
        ConversationId::new(sequence, 7)
    }

    /// Seed 8100076419: a consumer welcomes a producer, forgets the peer, and greets the producer as a new peer. The
    /// producer, which has not heard the welcome, repeats its hello, and the consumer asks by that: in the new
    /// conversation, with a name of the producer's that stood in the former one.
    #[test]
    fn a_request_belongs_to_the_conversation_of_the_peer_that_is_asked() {
        let mut ledger = Ledger::default();
        ledger.tells_name((CONSUMER, PRODUCER), PeerId(0), name(1));
        ledger.tells_name((CONSUMER, PRODUCER), PeerId(1), name(2));
        assert_eq!(ledger.name_of_asker(CONSUMER, PeerId(0)), Some(name(1)));
        assert_eq!(ledger.name_of_asker(CONSUMER, PeerId(1)), Some(name(2)));
        assert_eq!(ledger.name_of_asker(PRODUCER, PeerId(0)), None);
    }

    #[test]
    fn a_late_request_stays_in_the_conversation_in_which_it_was_sent() {
        let mut ledger = Ledger::default();
        let asked = |attempt| (CONSUMER, PRODUCER, name(9), attempt);
        ledger.asks_in(asked(1), name(1));
        ledger.asks_in(asked(2), name(2));
        assert_eq!(
            [1, 2, 3].map(|attempt| ledger.asked_in(asked(attempt))),
            [Some(name(1)), Some(name(2)), None]
        );
    }
}
