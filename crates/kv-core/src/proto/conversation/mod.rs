//! Conversations with peers: who is there, since when nothing was heard, what each side has under way with the
//! other.
//!
//! | file | what it is about |
//! |---|---|
//! | `mod.rs` | one peer, and what can be asked about it |
//! | `contact.rs` | how a conversation stands: way, terms, voice |
//! | `peers.rs` | all peers, by every name that they have |
//! | `greeting.rs` | hello, welcome, refusal; `heard.rs` says what they mean for sessions |
//! | `touch.rs` | silence, lost ways, successors |
//! | `edge.rs` | frames become messages of a known conversation, and messages become frames: the only file that sees bytes |
//! | `said.rs` | messages to a peer, and what is repeated until it is acknowledged |
//! | `outgoing.rs` | attempts at a peer: it serves |
//! | `incoming.rs`, `registration.rs` | attempts of a peer: this worker serves |
//! | `write_rights.rs` | until when either side may write: what is known of it; `permitting.rs` asks and answers |
//! | `numbers.rs` | the one rule by which granted time is counted |
//! | `maps.rs` | what the caches of both make of each other |
//!
//! What follows for sessions is not decided here: the machine asks, and tells the sessions.

mod contact;
mod edge;
mod greeting;
mod heard;
mod incoming;
mod maps;
mod numbers;
mod outgoing;
mod peers;
mod permitting;
mod registration;
mod said;
mod touch;
mod write_rights;

use std::collections::VecDeque;

use self::contact::Contact;
use crate::error::{Cause, PeerCause};
use crate::id::{Attempt, Incarnation, Room, WorkerId};
use crate::layout::Geometry;
use crate::lease::LeaseRef;
use crate::meter::each;
use crate::record::TransportOffer;
use crate::time::Time;
use crate::transport::{Directions, Origin};
use crate::wire::{Abort, Codec, ConversationId};

pub(super) use heard::{AnswerHeard, Heard, HelloHeard, Silence, Unanswered};
pub(super) use incoming::{Attempts, Incoming};
pub(super) use maps::Maps;
use numbers::Numbers;
pub(super) use numbers::millis;
pub(super) use outgoing::Outgoing;
pub(super) use peers::Peers;
pub(super) use registration::Registration;
pub(super) use said::{Asks, Extended, MAX_ASKED, MAX_ASKING};
pub(super) use write_rights::{WritesIn, WritesOut};

/// One incarnation of a remote worker.
///
/// The conversation has a number on each side (`ours`, and the one in `contact`). Under it, two independent halves:
/// *outgoing* attempts, in which this node receives and the peer serves, and *incoming* ones, in
/// which the peer receives and this node serves.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    worker: WorkerId,
    incarnation: Incarnation,
    /// How to reach its memory: with the incarnation, what tells it from all others. One transport for the
    /// whole conversation.
    transport: TransportOffer,
    /// Others that both have, for as long as none has led to it.
    others: VecDeque<TransportOffer>,
    maps: Maps,
    /// What the way to it is good for.
    directions: Directions,
    /// How the conversation with it stands.
    contact: Contact,
    /// The transport connection that its frames come on, once it is proven that they do.
    origin: Option<Origin>,
    /// How it is spoken to: in no version before it has said which it speaks.
    codec: Codec,
    /// The number that the peer must put into its frames.
    ours: ConversationId,
    /// Its engine adds a suffix to the ids of requests.
    suffixed: bool,
    last_heard: Time,
    /// Posts to or from it that have not ended.
    posts: u32,
    outgoing: Outgoing,
    incoming: Attempts,
    /// Numbers of what it was asked: heartbeats, acquire messages, and a welcome's question.
    numbers: Numbers,
    /// What it lets this worker write into its memory.
    writes_out: WritesOut,
    /// What it may write into this worker's.
    writes_in: WritesIn,
}

/// What is needed to meet a peer.
#[derive(Debug, Clone)]
pub(super) struct Introduction {
    pub(super) worker: WorkerId,
    pub(super) incarnation: Incarnation,
    /// `None` for a cache that a version has described which is not spoken here: such a peer is refused.
    pub(super) geometry: Option<Geometry>,
    /// How to reach it, the preferred way first; at least one.
    pub(super) transports: VecDeque<TransportOffer>,
}

impl Peer {
    fn new(
        introduction: Introduction,
        transport: TransportOffer,
        here: &Geometry,
        ours: ConversationId,
        now: Time,
    ) -> Peer {
        let Introduction { worker, incarnation, geometry, transports: others } = introduction;
        Peer {
            worker,
            incarnation,
            transport,
            others,
            maps: Maps::new(geometry, here),
            directions: Directions::BOTH,
            contact: Contact::new(),
            origin: None,
            codec: Codec::MEETING,
            ours,
            suffixed: false,
            last_heard: now,
            posts: 0,
            outgoing: Outgoing::default(),
            incoming: Attempts::default(),
            numbers: Numbers::default(),
            writes_out: WritesOut::default(),
            writes_in: WritesIn::default(),
        }
    }

    // ---- who it is ------------------------------------------------------------------------------

    pub(super) fn worker(&self) -> &WorkerId {
        &self.worker
    }

    pub(super) fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// What its cache and this worker's make of each other.
    pub(super) fn maps(&self) -> &Maps {
        &self.maps
    }

    pub(super) fn maps_mut(&mut self) -> &mut Maps {
        &mut self.maps
    }

    /// What the way to it is good for.
    pub(super) fn directions(&self) -> Directions {
        self.directions
    }

    /// The transport connection that its frames come on, once it is proven that they do.
    pub(super) fn origin(&self) -> Option<Origin> {
        self.origin
    }

    /// True if its engine adds a suffix to the ids of requests.
    pub(super) fn suffixes_requests(&self) -> bool {
        self.suffixed
    }

    /// The number of the conversation that the peer puts into its frames.
    pub(super) fn conversation(&self) -> ConversationId {
        self.ours
    }

    // ---- how it is ------------------------------------------------------------------------------

    /// True if it has been met and answers.
    pub(super) fn is_up(&self) -> bool {
        self.contact.is_good() && !self.writes_in.is_revoking()
    }

    /// True if this side's way to it is lost, and is being opened again.
    pub(super) fn is_lost(&self) -> bool {
        self.contact.is_lost()
    }

    /// True if the way to it is lost, or it was silent for so long that it was given up.
    pub(super) fn is_out_of_touch(&self) -> bool {
        self.contact.is_out_of_touch()
    }

    /// True if it was told that its cache does not fit.
    pub(super) fn is_refused(&self) -> bool {
        self.contact.is_refused()
    }

    /// Why it refuses this worker, if it does.
    pub(super) fn refuses(&self) -> Option<&Cause> {
        self.contact.refuses()
    }

    /// True if nothing here depends on it.
    pub(super) fn is_idle(&self) -> bool {
        !self.outgoing.is_needed() && self.posts == 0 && !self.serves()
    }

    /// True if an attempt of its matters here. Results kept for a peer that does not answer any more
    /// do not.
    fn serves(&self) -> bool {
        self.incoming.live_len() > 0 || self.incoming.results_len() > 0 && !self.contact.is_given_up()
    }

    // ---- what is under way with it --------------------------------------------------------------

    /// Attempts at it.
    pub(super) fn outgoing(&self) -> &Outgoing {
        &self.outgoing
    }

    pub(super) fn outgoing_mut(&mut self) -> &mut Outgoing {
        &mut self.outgoing
    }

    /// Its attempts at this worker.
    pub(super) fn incoming(&self) -> &Attempts {
        &self.incoming
    }

    pub(super) fn incoming_mut(&mut self) -> &mut Attempts {
        &mut self.incoming
    }

    /// The number of a question that it is asked now.
    pub(super) fn number(&mut self, now: Time) -> u64 {
        self.numbers.number(now)
    }

    /// Until when its answer to the question with this number grants so many milliseconds; `None` if it was not
    /// asked, or long ago.
    pub(super) fn granted_until(&self, number: u64, millis: u64) -> Option<Time> {
        self.numbers.granted_until(number, millis)
    }

    /// How many questions may still be answered.
    pub(super) fn numbers_len(&self) -> usize {
        self.numbers.len()
    }

    /// What it lets this worker write.
    pub(super) fn writes_out(&self) -> &WritesOut {
        &self.writes_out
    }

    /// What this worker lets it write.
    pub(super) fn writes_in(&self) -> &WritesIn {
        &self.writes_in
    }

    /// Ends an attempt at it that has failed. The abort is to be said until it is acknowledged.
    pub(super) fn abort(
        &mut self,
        attempt: Attempt,
        room: &Room,
        lease_refs: &[LeaseRef],
        cause: &PeerCause,
    ) -> Abort {
        let lease_id = of_life(lease_refs, self.incarnation).map(|lease| lease.lease_id);
        let low_watermark = self.outgoing.low_watermark();
        let abort = Abort { attempt, room: room.clone(), lease_id, cause: cause.clone(), low_watermark };
        self.outgoing.end_aborted(abort.clone());
        abort
    }

    /// Aborts a room at it once it answers. Nothing, if it is not being greeted any more, or the request is
    /// another sender's.
    pub(super) fn abort_when_met(&mut self, room: &Room, lease_refs: &[LeaseRef], cause: &PeerCause) {
        let lease_id = of_life(lease_refs, self.incarnation).map(|lease| lease.lease_id);
        if self.contact.hello().is_some() && (lease_refs.is_empty() || lease_id.is_some()) {
            let (room, cause, low_watermark) = (room.clone(), cause.clone(), self.outgoing.low_watermark());
            self.outgoing.abort_unopened(|attempt| Abort { attempt, room, lease_id, cause, low_watermark });
        }
    }
}

/// The one of these that names a session of a worker in this life.
pub(super) fn of_life(lease_refs: &[LeaseRef], life: Incarnation) -> Option<&LeaseRef> {
    each(lease_refs).find(|lease| lease.incarnation == life)
}
