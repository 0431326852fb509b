//! The kinds of messages and their fields.

use std::fmt;

use bytes::Bytes;
use serde::de::{Error, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::codec::Unreadable;
use super::conversation_id::ConversationId;
use super::tolerant::{Fields, read_bounded};
use super::versions::Versions;
use crate::error::PeerCause;
use crate::groups::GroupLists;
use crate::id::{Attempt, AuxIndex, Incarnation, Room, SessionId, WorkerId};
use crate::layout::Geometry;
use crate::pages::PageList;

/// Declares the messages: each is a struct, a variant of [`Body`], and a number that never changes. The numbers 6, 11
/// to 14, 20 and 21 were those of messages of version 4. No field makes room for a list before its items are there.
macro_rules! bodies {
    ($($(#[$doc:meta])* $kind:literal $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
            pub struct $name { $($(#[$field_doc])* pub $field: $type),* }
        )*

        /// What a frame says.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub enum Body {
            $($(#[$doc])* $name($name)),*
        }

        impl Body {
            /// The number of its kind on the wire.
            pub fn kind(&self) -> u8 {
                match self { $(Body::$name(_) => $kind),* }
            }

            pub(super) fn write<S: serde::Serializer>(
                &self,
                version: u8,
                conversation: ConversationId,
                out: S,
            ) -> Result<S::Ok, S::Error> {
                match self { $(Body::$name(body) => (version, self.kind(), conversation, body).serialize(out)),* }
            }

            /// The message of this kind with these fields.
            pub(super) fn read(kind: u8, fields: &[u8]) -> Result<Body, Unreadable> {
                let read = match kind {
                    $($kind => read_bounded(fields).map(|Fields(body)| Body::$name(body)),)*
                    got => return Err(Unreadable::Kind { got }),
                };
                read.ok_or(Unreadable::Malformed { kind })
            }
        }
    };
}

impl Body {
    pub(super) const HELLO: u8 = 1;

    /// True for the kinds by which two workers meet and part: every version reads them.
    pub(super) fn is_for_every_version(kind: u8) -> bool {
        matches!(kind, Body::HELLO | 2 | 3 | 9 | 10)
    }
}

bodies! {
    /// Decode → prefill, first of all: who I am, what I speak, and how to reach my memory. Repeated until
    /// [`Welcome`] or [`Refused`] answers it, and said again when a peer may have forgotten the conversation.
    1 Hello {
        /// What the speaker speaks.
        versions: Versions,
        /// The metadata of the speaker's transport.
        metadata: Bytes,
        /// Name of the speaker's transport.
        transport: String,
        /// The incarnation that is meant; another one refuses.
        to: Incarnation,
        /// Which life of the speaker's worker it is.
        incarnation: Incarnation,
        /// The number under which the speaker wants to be answered.
        conversation: ConversationId,
        /// Repeated in the answer, so that a late answer to an earlier hello is known as such.
        nonce: u64,
        /// The speaker's worker.
        worker: WorkerId,
        /// The speaker's cache; `None` if it has something that the reader's version does not know.
        #[serde(with = "super::tolerant::geometry")]
        geometry: Option<Box<Geometry>>,
        /// The speaker's engine adds a suffix to the ids of requests, see
        /// [`RequestId::base`](crate::RequestId::base). False if missing.
        #[serde(default)]
        suffixed: bool,
    }
    /// Prefill → decode, once for each [`Hello`]: it is accepted.
    2 Welcome {
        /// What the speaker speaks.
        versions: Versions,
        /// The hello's nonce.
        nonce: u64,
        /// The number under which the speaker wants to be addressed.
        conversation: ConversationId,
        /// The number of a question whether the speaker may write, as [`Heartbeat::number`]: a registration
        /// answers it. 0 if missing.
        #[serde(default)]
        ask: u64,
    }
    /// Prefill → decode, once for each [`Hello`]: it is refused.
    3 Refused {
        /// What the speaker speaks.
        versions: Versions,
        /// The hello's nonce.
        nonce: u64,
        /// The number under which the speaker wants to be addressed: a receiver that is refused still
        /// aborts its rooms, so that their senders do not wait for it.
        conversation: ConversationId,
        /// Why; `Unknown` if another incarnation was meant.
        #[serde(with = "super::tolerant::cause")]
        cause: PeerCause,
    }
    /// Decode → prefill: a receiver wants the pages of a room. Repeated until anything is heard about the attempt:
    /// [`Registered`], [`Progress`], [`Granted`] or [`Failed`].
    4 Register {
        /// A number of the receiver's for this attempt at this peer.
        attempt: Attempt,
        /// All attempts below are over for the receiver.
        low_watermark: Attempt,
        /// The request.
        room: Room,
        /// How many ranks of the receiver's engine this sender has to serve for the request.
        ranks: u32,
        /// How long to keep it, in milliseconds from sending: a little longer than the receiver waits.
        ttl_ms: u64,
        /// How the pages are to come.
        delivery: Delivery,
    }
    /// Prefill → decode, once for each [`Register`] whose pages are still to come: it has arrived.
    5 Registered {
        /// The attempt.
        attempt: Attempt,
    }
    /// Prefill → decode: what is in place so far. Delivered by the transport after the bytes of each part, naming
    /// that part, and said once more for each [`Heartbeat`] that asks. Nothing acknowledges it.
    7 Progress {
        /// The attempt.
        attempt: Attempt,
        /// Runs (first part, number of parts) that are in place; maybe not all of them. Parts count from 0.
        #[serde(with = "crate::packed")]
        done: Vec<(u32, u32)>,
        /// How many parts there are, once that is known; always with the last one. Not known if missing.
        #[serde(default)]
        total: Option<u32>,
        /// With `total`: registered groups, all optional, that the sender does not have. None if missing.
        #[serde(default, deserialize_with = "crate::growing::list")]
        skipped: Vec<u16>,
    }
    /// Prefill → decode: the attempt has failed. Said when it fails, when it is quiet, and for each [`Register`]
    /// and [`Heartbeat`] about it after that. Acknowledged by [`Release`], or by [`Abort`] if it is not quiet.
    8 Failed {
        /// The attempt.
        attempt: Attempt,
        /// Why.
        #[serde(with = "super::tolerant::cause")]
        cause: PeerCause,
        /// True once no write can arrive any more. False if missing.
        #[serde(default)]
        quiet: bool,
    }
    /// Decode → prefill: the attempt is over, stop writing. Repeated until [`AbortAck`] acknowledges it.
    9 Abort {
        /// The attempt.
        attempt: Attempt,
        /// The request, for a prefill side that has not seen the registration.
        room: Room,
        /// Which sender of it was meant; any, if not given.
        lease_id: Option<SessionId>,
        /// Why.
        #[serde(with = "super::tolerant::cause")]
        cause: PeerCause,
        /// All attempts below are over for the receiver. A missing low watermark says this of none.
        #[serde(default = "first")]
        low_watermark: Attempt,
    }
    /// Prefill → decode, once for each [`Abort`]: no write of the attempt is in flight, and none will be posted.
    10 AbortAck {
        /// The attempt.
        attempt: Attempt,
    }
    /// Prefill → decode: the pages are complete and stay as they are while the lease lasts. Said when they are
    /// complete, and once for each [`Register`] and [`Heartbeat`] that asks after that. The receiver's
    /// heartbeats acknowledge it.
    15 Granted {
        /// The attempt.
        attempt: Attempt,
        /// The `number` of the receiver's last acquire message.
        number: u64,
        /// The sender's session whose pages these are: the id of the lease.
        lease_id: SessionId,
        /// The sender's pages, in request order.
        pages: PageList,
        /// The sender's aux row.
        aux: Option<AuxIndex>,
        /// What is left of the lease, in milliseconds.
        lease_ms: u64,
        /// How often heartbeats are wanted, in milliseconds; 0 if the lease is not renewed.
        interval_ms: u64,
        /// The sender's items of its cache groups. None if missing.
        #[serde(default)]
        groups: GroupLists,
    }
    /// Either side: I am here; are you? A decode side has its leases extended with it, one frame for all of them,
    /// and asks about attempts that have been quiet; a prefill side asks whether it may write. Said again, with
    /// another number, for as long as its speaker needs an answer. Acknowledged by [`HeartbeatAck`].
    16 Heartbeat {
        /// A number of the speaker's, repeated in the answer. The time that an answer grants is counted by who
        /// grants it from the answer on, and by who asked from the question on, which is earlier.
        number: u64,
        /// All attempts of the speaker below are over.
        low_watermark: Attempt,
        /// Runs (first attempt, number), rising: they read, and their leases are to be extended.
        #[serde(with = "crate::packed")]
        leases: Vec<(u64, u32)>,
        /// Runs (first attempt, number), rising: nothing was heard about them for a while. Each is answered as its
        /// registration would be.
        #[serde(with = "crate::packed")]
        asked: Vec<(u64, u32)>,
        /// The speaker has something to write for the hearer, and asks how long it may.
        writes: bool,
    }
    /// Once for each [`Heartbeat`], and once more for each 65536 runs of leases: I am here.
    17 HeartbeatAck {
        /// The heartbeat's number.
        number: u64,
        /// All attempts of the speaker below are over.
        low_watermark: Attempt,
        /// For how long the shortest of the leases holds, in milliseconds; see [`Heartbeat::number`]. 0 without leases.
        lease_ms: u64,
        /// Runs (first attempt, number), rising: the attempts whose pages were still as they were when the
        /// heartbeat came, and stay so.
        #[serde(with = "crate::packed")]
        leases: Vec<(u64, u32)>,
        /// For how long the speaker of the heartbeat may begin writes, in milliseconds; see [`Heartbeat::number`].
        /// 0 if it may not.
        permit_ms: u64,
    }
    /// Decode → prefill: these attempts are over. Everything has arrived, or was read, or the failure is
    /// understood. If that holds pages of the hearer, it is repeated until [`Released`] acknowledges it; otherwise
    /// it is said once, and the low watermark of a later frame says it again.
    18 Release {
        /// All attempts below are over for the receiver.
        low_watermark: Attempt,
        /// Runs (first attempt, number), rising.
        #[serde(with = "crate::packed")]
        attempts: Vec<(u64, u32)>,
        /// An acknowledgement is wanted.
        answer: bool,
    }
    /// Prefill → decode, once for each [`Release`] that wants it: these attempts are forgotten.
    19 Released {
        /// Runs (first attempt, number), rising.
        #[serde(with = "crate::packed")]
        attempts: Vec<(u64, u32)>,
    }
}

/// The low watermark that says nothing.
fn first() -> Attempt {
    Attempt(0)
}

/// How a receiver wants its pages to come: a number that says which, and fields, of which a newer version may have
/// more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delivery {
    /// 0: the sender writes them.
    Write(Destination),
    /// 1: the receiver reads them, once they are granted.
    Read(Acquire),
}

impl Serialize for Delivery {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        match self {
            Delivery::Write(to) => (0, to).serialize(out),
            Delivery::Read(acquire) => (1, acquire).serialize(out),
        }
    }
}

impl<'de> Deserialize<'de> for Delivery {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Delivery, D::Error> {
        from.deserialize_tuple(2, DeliveryVisitor)
    }
}

struct DeliveryVisitor;

impl<'de> Visitor<'de> for DeliveryVisitor {
    type Value = Delivery;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("0 or 1, and the fields of that delivery")
    }

    #[inline]
    fn visit_seq<A: SeqAccess<'de>>(self, mut delivery: A) -> Result<Delivery, A::Error> {
        let cut = |at| A::Error::invalid_length(at, &self);
        match delivery.next_element()?.ok_or_else(|| cut(0))? {
            0 => delivery.next_element()?.map(|Fields(to)| Delivery::Write(to)).ok_or_else(|| cut(1)),
            1 => {
                delivery.next_element()?.map(|Fields(acquire)| Delivery::Read(acquire)).ok_or_else(|| cut(1))
            }
            other => Err(A::Error::invalid_value(Unexpected::Unsigned(other), &self)),
        }
    }
}

/// Where the pages of a request shall be written.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Destination {
    /// Where the pages shall go that this sender is asked for, in request order.
    pub pages: PageList,
    /// The number of the first of them in the request; before it the receiver has a prefix, or other
    /// ranks send.
    pub first_page: u32,
    /// How many pages the request has at the receiver, with those that it has, and those of others.
    pub total_pages: u32,
    /// The aux row to fill.
    pub aux: Option<AuxIndex>,
    /// True if this sender is to fill it, and not another rank of its engine.
    pub aux_here: bool,
    /// Where the items of its cache groups shall go. None if missing.
    #[serde(default)]
    pub groups: GroupLists,
    /// The last question of the sender's whether it may write that was heard, answered with `permit_ms`; 0 for
    /// none, and if missing.
    #[serde(default)]
    pub ask: u64,
    /// How long the sender may begin writes, in milliseconds: it counts from when it asked that question. 0 if it
    /// may not, and if missing.
    #[serde(default)]
    pub permit_ms: u64,
}

/// Which pages shall be granted to a receiver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acquire {
    /// Which sender of the room is meant; any, if not given.
    pub lease_id: Option<SessionId>,
    /// Repeated in the [`Granted`] that answers this message.
    pub number: u64,
}
