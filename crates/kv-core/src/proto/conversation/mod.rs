//! Conversations with peers: which peers there are, how long each has been silent, and what each
//! side has under way with the other.
//!
//! | file | what it is about |
//! |---|---|
//! | `mod.rs` | one peer, and the questions about its state |
//! | `contact.rs` | how a conversation stands: way, terms, voice |
//! | `peers.rs` | all peers, by id, conversation and identity |
//! | `choosing.rs` | by which transport a peer is met; `detours.rs` remembers which have failed |
//! | `greeting.rs` | hello, welcome, refusal; `heard.rs` says what received frames mean for sessions |
//! | `touch.rs` | silence, lost ways, successors |
//! | `edge.rs` | frames become messages of a known conversation, and messages become frames: the only file that sees bytes |
//! | `said.rs` | messages to a peer, and what is repeated until it is acknowledged |
//! | `outgoing.rs` | attempts at a peer: the peer serves, this worker receives |
//! | `incoming.rs`, `registration.rs` | attempts of a peer: this worker serves, the peer receives |
//! | `write_rights.rs` | until when either side may write, as far as known; `permitting.rs` asks and answers |
//! | `numbers.rs` | the one rule by which granted time is counted |
//! | `maps.rs` | which bytes of the two caches correspond |
//!
//! This directory does not decide what follows for sessions: the machine asks, and tells the
//! sessions.

mod choosing;
mod contact;
mod detours;
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

use self::contact::{Contact, Event};
use crate::error::{Cause, PeerCause};
use crate::id::{Attempt, Incarnation, Room, SessionId, WorkerId};
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
pub(super) use peers::{NextWay, Peers};
pub(super) use registration::Registration;
pub(super) use said::{Asks, Extended, MAX_ASKED, MAX_ASKING};
pub(super) use write_rights::{WritesIn, WritesOut};

/// A peer: one incarnation of a remote worker.
///
/// The conversation has an id on each side: `ours`, and the id in `contact`. In a conversation
/// there are two independent halves: *outgoing* attempts, in which this worker receives and the
/// peer sends, and *incoming* attempts, in which the peer receives and this worker sends.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    worker: WorkerId,
    incarnation: Incarnation,
    /// The transport by which the peer is reached, one for the whole conversation. Together with
    /// the incarnation, it tells the peer from all others.
    transport: TransportOffer,
    /// Further transports that both sides have, in the order in which they are tried; empty once
    /// the peer has answered.
    others: VecDeque<TransportOffer>,
    /// A transport that was opened, and over which no answer has come in time: the last one that is tried, if
    /// the others lead nowhere. `None` once the peer has answered.
    slow: Option<TransportOffer>,
    /// All transports that both sides have, in this worker's order; empty if no session here has looked
    /// for the peer.
    ways: Vec<TransportOffer>,
    maps: Maps,
    /// The directions that the transport recommends for the peer.
    directions: Directions,
    /// The state of the conversation.
    contact: Contact,
    /// The connection on which the peer's frames come, once that is proven.
    origin: Option<Origin>,
    /// Encodes and decodes the peer's messages. It has no version before the peer has told its
    /// versions.
    codec: Codec,
    /// The id that the peer must put into its frames.
    ours: ConversationId,
    /// True if the peer's engine appends a suffix to the ids of requests.
    suffixed: bool,
    /// True once the peer has said that it takes no new requests.
    leaving: bool,
    last_heard: Time,
    /// How often the way to the peer was lost since the peer has last answered a hello of ours, for which this side's way must
    /// work.
    losses_unanswered: u32,
    /// How many posts to or from the peer have not ended.
    posts: u32,
    outgoing: Outgoing,
    incoming: Attempts,
    /// The numbers of heartbeats, acquire messages and welcomes that the peer may still answer.
    numbers: Numbers,
    /// What the peer lets this worker write into its memory.
    writes_out: WritesOut,
    /// What this worker lets the peer write into its memory.
    writes_in: WritesIn,
}

/// What must be known of a worker to meet it as a peer.
#[derive(Debug, Clone)]
pub(super) struct Introduction {
    pub(super) worker: WorkerId,
    pub(super) incarnation: Incarnation,
    /// The geometry; `None` if a version of the wire has described it that is not spoken here. Such
    /// a peer is refused.
    pub(super) geometry: Option<Geometry>,
    /// The transports by which the worker can be reached, the preferred one first; at least one.
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
            slow: None,
            ways: Vec::new(),
            maps: Maps::new(geometry, here),
            directions: Directions::BOTH,
            contact: Contact::new(),
            origin: None,
            codec: Codec::MEETING,
            ours,
            suffixed: false,
            leaving: false,
            last_heard: now,
            losses_unanswered: 0,
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

    /// The transports that this worker prefers to the one by which the peer is reached.
    fn preferred(&self) -> impl Iterator<Item = &TransportOffer> {
        self.ways.iter().take_while(|way| **way != self.transport)
    }

    /// Which bytes of the peer's cache and of this worker's cache correspond.
    pub(super) fn maps(&self) -> &Maps {
        &self.maps
    }

    pub(super) fn maps_mut(&mut self) -> &mut Maps {
        &mut self.maps
    }

    /// The directions that the transport recommends for the peer.
    pub(super) fn directions(&self) -> Directions {
        self.directions
    }

    /// The connection on which the peer's frames come, once that is proven.
    pub(super) fn origin(&self) -> Option<Origin> {
        self.origin
    }

    /// True if the peer's engine appends a suffix to the ids of requests.
    pub(super) fn suffixes_requests(&self) -> bool {
        self.suffixed
    }

    /// The id that the peer puts into its frames.
    pub(super) fn conversation(&self) -> ConversationId {
        self.ours
    }

    // ---- how it is ------------------------------------------------------------------------------

    /// True if one of the two sides has accepted or refused a hello of the other.
    pub(super) fn has_met(&self) -> bool {
        self.contact.conversation().is_some()
    }

    /// True if the two sides have met, the peer fits and is heard, the way to it is not lost, and its right to write is
    /// not being revoked.
    fn is_in_touch(&self) -> bool {
        self.contact.is_good() && !self.writes_in.is_revoking()
    }

    /// True if a session of this worker can go to the peer: the peer is in touch, and both sides use the same
    /// conversation.
    pub(super) fn is_up(&self) -> bool {
        self.is_in_touch() && self.contact.has_agreed()
    }

    /// True if this side's way to the peer is lost, and is being opened again.
    pub(super) fn is_lost(&self) -> bool {
        self.contact.is_lost()
    }

    /// True if the way to the peer is lost, or if the peer was given up after a long silence.
    pub(super) fn is_out_of_touch(&self) -> bool {
        self.contact.is_out_of_touch()
    }

    /// True if the two sides have met, and the peer is out of touch since.
    fn has_fallen_silent(&self) -> bool {
        self.has_met() && self.is_out_of_touch()
    }

    /// True if the peer was told that its cache does not fit.
    pub(super) fn is_refused(&self) -> bool {
        self.contact.is_refused()
    }

    /// True once the peer has said that it takes no new requests. Each later session asks the bootstrap
    /// server whether to go there.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// The peer has said that it takes no new requests.
    pub(super) fn leave(&mut self) {
        self.leaving = true;
    }

    /// Why the peer refuses this worker; `None` if it does not.
    pub(super) fn refuses(&self) -> Option<&Cause> {
        self.contact.refuses()
    }

    /// True if nothing on this worker depends on the peer.
    pub(super) fn is_idle(&self) -> bool {
        !self.outgoing.is_needed() && self.posts == 0 && !self.serves()
    }

    /// True if the peer has yet to hear that an attempt was served, or to acknowledge the end of one.
    fn has_unheard_ends(&self) -> bool {
        self.outgoing.is_closing() || self.outgoing.ended_len() > 0 || self.incoming.has_served()
    }

    /// True if the peer has attempts here that are not over, or whose result it may not have heard.
    fn has_attempts(&self) -> bool {
        self.incoming.live_len() + self.incoming.results_len() > 0
    }

    /// True if an attempt of the peer matters here. Results that are kept for a peer that does not
    /// answer any more do not matter.
    fn serves(&self) -> bool {
        self.incoming.live_len() > 0 || self.incoming.results_len() > 0 && !self.contact.is_given_up()
    }

    /// This side's way to the peer is lost.
    fn way_lost(&mut self) {
        self.contact.turn(Event::WayLost);
        self.losses_unanswered = self.losses_unanswered.saturating_add(1);
    }

    // ---- what is under way with it --------------------------------------------------------------

    /// The attempts of this worker at the peer.
    pub(super) fn outgoing(&self) -> &Outgoing {
        &self.outgoing
    }

    pub(super) fn outgoing_mut(&mut self) -> &mut Outgoing {
        &mut self.outgoing
    }

    /// The attempts of the peer at this worker.
    pub(super) fn incoming(&self) -> &Attempts {
        &self.incoming
    }

    pub(super) fn incoming_mut(&mut self) -> &mut Attempts {
        &mut self.incoming
    }

    /// The number for a question that is sent to the peer now.
    pub(super) fn number(&mut self, now: Time) -> u64 {
        self.numbers.number(now)
    }

    /// Until when the peer's answer to the question with this number grants `millis` milliseconds;
    /// `None` if no such question was sent, or too long ago.
    pub(super) fn granted_until(&self, number: u64, millis: u64) -> Option<Time> {
        self.numbers.granted_until(number, millis)
    }

    /// How many questions the peer may still answer.
    pub(super) fn numbers_len(&self) -> usize {
        self.numbers.len()
    }

    /// What the peer lets this worker write into its memory.
    pub(super) fn writes_out(&self) -> &WritesOut {
        &self.writes_out
    }

    /// What this worker lets the peer write into its memory.
    pub(super) fn writes_in(&self) -> &WritesIn {
        &self.writes_in
    }

    /// Ends an attempt of a session that has failed. The abort is repeated until the peer
    /// acknowledges it. `unanswered` is the time of the failure if the peer has not spoken of the attempt.
    pub(super) fn abort(
        &mut self,
        (attempt, unanswered): (Attempt, Option<Time>),
        room: &Room,
        lease_refs: &[LeaseRef],
        cause: &PeerCause,
    ) -> Abort {
        let lease_id = of_incarnation(lease_refs, self.incarnation).map(|lease| lease.lease_id);
        let low_watermark = self.outgoing.low_watermark();
        let abort = Abort { attempt, low_watermark, ..unnumbered(room, lease_id, cause) };
        self.outgoing.end_aborted(abort.clone(), unanswered);
        abort
    }

    /// A session failed at `failed_at`, and the peer has not spoken of its attempt when the conversation ends: the peer
    /// is told again in the next one.
    pub(super) fn abort_again(&mut self, room: &Room, cause: &PeerCause, failed_at: Time) {
        self.outgoing.abort_again(unnumbered(room, None, cause), failed_at);
    }

    /// Aborts a room at the peer once the peer answers. Does nothing if this worker does not greet
    /// the peer any more, or if the request is for another sender.
    pub(super) fn abort_when_met(
        &mut self,
        room: &Room,
        lease_refs: &[LeaseRef],
        cause: &PeerCause,
        now: Time,
    ) {
        let lease_id = of_incarnation(lease_refs, self.incarnation).map(|lease| lease.lease_id);
        if self.contact.hello().is_some() && (lease_refs.is_empty() || lease_id.is_some()) {
            self.outgoing.abort_unopened(unnumbered(room, lease_id, cause), now);
        }
    }
}

/// An abort whose number and low watermark are yet to be filled in.
fn unnumbered(room: &Room, lease_id: Option<SessionId>, cause: &PeerCause) -> Abort {
    let (attempt, low_watermark) = (Attempt(0), Attempt(0));
    Abort { attempt, room: room.clone(), lease_id, cause: cause.clone(), low_watermark, failed_ms_ago: None }
}

/// The reference, among these, to a session of this incarnation.
pub(super) fn of_incarnation(lease_refs: &[LeaseRef], life: Incarnation) -> Option<&LeaseRef> {
    each(lease_refs).find(|lease| lease.incarnation == life)
}
