//! The kinds of messages, and the fields of each.

use std::fmt;

use bytes::Bytes;
use serde::de::{Error, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::codec::Unreadable;
use super::conversation_id::ConversationId;
use super::tolerant::{Fields, read_bounded};
use super::versions::Versions;
use crate::content::ContentHash;
use crate::error::PeerCause;
use crate::groups::CacheGroupLists;
use crate::id::{Attempt, AuxIndex, Incarnation, Room, SessionId, WorkerId};
use crate::kv_offer::KV_SERVICE;
use crate::layout::Geometry;
use crate::page_list::PageList;

/// Declares the messages: each is a struct, a variant of [`Body`], and a number that never changes.
/// Version 4 used the numbers 6, 11 to 14, 20 and 21. No field allocates room for the items of a
/// list before they are read.
macro_rules! bodies {
    ($($(#[$doc:meta])* $kind:literal $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
            pub struct $name { $($(#[$field_doc])* pub $field: $type),* }
        )*

        /// A message, of any kind.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub enum Body {
            $($(#[$doc])* $name($name)),*
        }

        impl Body {
            /// The number of the message's kind on the wire.
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

            /// Decodes the fields of a message of this kind.
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

    /// True for the kinds by which two workers meet and part, which every version reads.
    pub(super) fn is_for_every_version(kind: u8) -> bool {
        matches!(kind, Body::HELLO | 2 | 3 | 9 | 10)
    }
}

bodies! {
    /// Decode → prefill, before any other message: the worker introduces itself, its versions, its
    /// transport and its cache. Repeated until [`Welcome`] or [`Refused`] answers, and sent again
    /// when the peer may have forgotten the conversation.
    1 Hello {
        /// The versions that the speaker speaks.
        versions: Versions,
        /// The metadata of the speaker's transport.
        metadata: Bytes,
        /// The name of the speaker's transport.
        transport: String,
        /// The incarnation that the speaker wants to reach. A worker of another incarnation
        /// refuses.
        to: Incarnation,
        /// The incarnation of the speaker's worker.
        incarnation: Incarnation,
        /// The id under which the speaker wants to be addressed.
        conversation: ConversationId,
        /// A random number that the answer repeats, so that a late answer to an earlier hello is
        /// recognized.
        nonce: u64,
        /// The engine and the rank of the speaker.
        worker: WorkerId,
        /// The geometry of the speaker's cache; `None` if it holds a value that the reader's
        /// version does not know.
        #[serde(with = "super::tolerant::geometry")]
        geometry: Option<Box<Geometry>>,
        /// True if the speaker's engine appends a suffix to the ids of requests, see
        /// [`RequestId::base`](crate::RequestId::base). False if missing.
        #[serde(default)]
        suffixed: bool,
        /// The service of the speaker's worker, see [`Service::name`](crate::Service::name). `kv` if
        /// missing.
        #[serde(default = "kv")]
        service: String,
    }
    /// Prefill → decode, once for each [`Hello`]: the hello is accepted.
    2 Welcome {
        /// The versions that the speaker speaks.
        versions: Versions,
        /// The nonce of the hello that is answered.
        nonce: u64,
        /// The id under which the speaker wants to be addressed.
        conversation: ConversationId,
        /// The number of a request for permission to write, drawn like [`Heartbeat::number`]; a
        /// registration answers it. 0 (no request) if missing.
        #[serde(default)]
        ask: u64,
    }
    /// Prefill → decode, once for each [`Hello`]: the hello is refused.
    3 Refused {
        /// The versions that the speaker speaks.
        versions: Versions,
        /// The nonce of the hello that is answered.
        nonce: u64,
        /// The id under which the speaker wants to be addressed. A receiver that was refused still
        /// aborts its rooms, so that their senders do not wait for it.
        conversation: ConversationId,
        /// The reason; `Unknown` if the hello was meant for another incarnation.
        #[serde(with = "super::tolerant::cause")]
        cause: PeerCause,
    }
    /// Decode → prefill: a receiver asks for the pages of a room, either by registering its own
    /// pages or by asking for a lease. Repeated until [`Registered`], [`Progress`], [`Granted`] or
    /// [`Failed`] is heard about the attempt.
    4 Register {
        /// The attempt at this peer, drawn by the receiver.
        attempt: Attempt,
        /// All attempts below this number are over at the receiver.
        low_watermark: Attempt,
        /// The room of the request.
        room: Room,
        /// How many ranks of the receiver's engine the sender has to serve for this request.
        ranks: u32,
        /// For how long the sender should keep the message, in milliseconds from sending: a little
        /// longer than the receiver waits.
        ttl_ms: u64,
        /// Whether the sender writes the pages or the receiver reads them, and where.
        delivery: Delivery,
    }
    /// Prefill → decode, once for each [`Register`] whose pages are still to come: the registration
    /// has arrived. Not sent for a first [`Register`] if all pages are final and the first part can be
    /// written at once: its [`Progress`] says the same.
    5 Registered {
        /// The attempt that was registered.
        attempt: Attempt,
    }
    /// Prefill → decode: the parts that are in place so far. The transport delivers this message
    /// after the bytes of each part; it then names that part. The sender repeats it for each
    /// [`Heartbeat`] that asks. No message acknowledges it.
    7 Progress {
        /// The attempt to which the parts belong.
        attempt: Attempt,
        /// Runs (first part, length) of parts that are in place; there may be more. Parts are
        /// numbered from 0.
        #[serde(with = "crate::packed")]
        done: Vec<(u32, u32)>,
        /// How many parts there are in all, once the sender knows; always given with the last part.
        /// Unknown if missing.
        #[serde(default)]
        total: Option<u32>,
        /// Given with `total`: the optional groups that the receiver registered and the sender does
        /// not have. None if missing.
        #[serde(default, deserialize_with = "crate::growing::list")]
        skipped: Vec<u16>,
    }
    /// Prefill → decode: the attempt has failed. Sent when it fails, when no write of it is in
    /// flight any more, and afterwards for each [`Register`] and [`Heartbeat`] about it.
    /// Acknowledged by [`Release`], or by [`Abort`] while `quiet` is false.
    ///
    /// A worker that drains also says so about attempts to come ([`Attempt::LATER`], with the cause
    /// `WorkerStopped`): once to each peer, and not acknowledged. No attempt fails of it.
    8 Failed {
        /// The attempt that has failed.
        attempt: Attempt,
        /// The cause of the failure.
        #[serde(with = "super::tolerant::cause")]
        cause: PeerCause,
        /// True once no write can arrive any more. False if missing.
        #[serde(default)]
        quiet: bool,
    }
    /// Decode → prefill: the attempt is over, and the sender must stop writing. Repeated until
    /// [`AbortAck`] acknowledges it, and said again in the next conversation if nothing was heard about the attempt in
    /// this one.
    9 Abort {
        /// The attempt that is over.
        attempt: Attempt,
        /// The room of the request, for a sender that has not heard the registration.
        room: Room,
        /// The lease id of the sender that is meant; any sender of the room if not given.
        lease_id: Option<SessionId>,
        /// The cause of the failure.
        #[serde(with = "super::tolerant::cause")]
        cause: PeerCause,
        /// All attempts below this number are over at the receiver. 0 (none is known to be over) if
        /// missing.
        #[serde(default = "first")]
        low_watermark: Attempt,
        /// Given if the abort was, or should have been, said in a conversation that is over: how long before this frame was
        /// sent the receiver failed, in milliseconds. Ends only a sender that has been open for at least as long when the
        /// frame arrives, and is not kept for one that comes later. Ignored if `lease_id` is given. If missing, the abort is
        /// of this conversation, and is kept for a sender that comes later. A worker that does not know this field takes the
        /// abort for a new one.
        #[serde(default)]
        failed_ms_ago: Option<u64>,
    }
    /// Prefill → decode, once for each [`Abort`]: no write of the attempt is in flight, and none will be
    /// posted.
    10 AbortAck {
        /// The attempt that was aborted.
        attempt: Attempt,
    }
    /// Prefill → decode: the pages are complete, and nothing writes them while the lease lasts.
    /// Sent when the pages are complete, and afterwards once for each [`Register`] and
    /// [`Heartbeat`] that asks. The receiver's heartbeats acknowledge it.
    15 Granted {
        /// The attempt that gets the lease.
        attempt: Attempt,
        /// The [`Acquire::number`] of the last acquire message that the sender has heard.
        number: u64,
        /// The lease id: the sender's session that holds the pages.
        lease_id: SessionId,
        /// The sender's pages, in the order of the request.
        pages: PageList,
        /// The sender's aux row, if the request has one.
        aux: Option<AuxIndex>,
        /// How long the lease still lasts, in milliseconds.
        lease_ms: u64,
        /// How often the reader should send heartbeats, in milliseconds; 0 if heartbeats do not
        /// extend the lease.
        interval_ms: u64,
        /// The sender's items of its cache groups. No items if missing.
        #[serde(default)]
        groups: CacheGroupLists,
    }
    /// Either side: asks the peer for a sign of life. A receiver asks in the same frame to extend
    /// all of its leases, and asks about attempts of which it has heard nothing for a while. A
    /// sender asks for permission to write. Repeated, with another number, as long as the speaker
    /// needs an answer. Acknowledged by [`HeartbeatAck`].
    16 Heartbeat {
        /// The heartbeat number, drawn by the speaker and repeated in the answer. The side that
        /// grants time counts it from its answer; the side that asked counts it from its question,
        /// which is earlier.
        number: u64,
        /// All attempts of the speaker below this number are over.
        low_watermark: Attempt,
        /// Runs (first attempt, length), rising: attempts that read, and whose leases are to be
        /// extended.
        #[serde(with = "crate::packed")]
        leases: Vec<(u64, u32)>,
        /// Runs (first attempt, length), rising: attempts of which nothing was heard for a while.
        /// The addressee answers for each as for its registration.
        #[serde(with = "crate::packed")]
        asked: Vec<(u64, u32)>,
        /// True if the speaker has something to write into the addressee's memory, and asks for how
        /// long it may.
        writes: bool,
    }
    /// Once for each [`Heartbeat`], and once more for each 65536 runs of leases: the answer.
    17 HeartbeatAck {
        /// The number of the heartbeat that is answered.
        number: u64,
        /// All attempts of the speaker below this number are over.
        low_watermark: Attempt,
        /// How long the shortest of these leases lasts, in milliseconds; see [`Heartbeat::number`].
        /// 0 without leases.
        lease_ms: u64,
        /// Runs (first attempt, length), rising: attempts whose pages were still complete and
        /// unchanged when the heartbeat came, and whose leases are extended.
        #[serde(with = "crate::packed")]
        leases: Vec<(u64, u32)>,
        /// For how long the speaker of the heartbeat may begin writes, in milliseconds; see
        /// [`Heartbeat::number`]. 0 if it may not.
        permit_ms: u64,
    }
    /// Decode → prefill: these attempts are over at the receiver. All pages have arrived or were
    /// read, or the receiver has heard of the failure. If the sender still holds pages for one of
    /// these attempts, the message is repeated until [`Released`] acknowledges it. Otherwise it is
    /// sent once, and the low watermark of a later frame says the same.
    18 Release {
        /// All attempts below this number are over at the receiver.
        low_watermark: Attempt,
        /// Runs (first attempt, length), rising, of attempts that are over.
        #[serde(with = "crate::packed")]
        attempts: Vec<(u64, u32)>,
        /// True if the speaker wants [`Released`] as an acknowledgement.
        answer: bool,
    }
    /// Prefill → decode, once for each [`Release`] that wants an acknowledgement: the sender has
    /// forgotten these attempts.
    19 Released {
        /// Runs (first attempt, length), rising, of attempts that are forgotten.
        #[serde(with = "crate::packed")]
        attempts: Vec<(u64, u32)>,
    }
    /// Consumer → producer: a receiver asks for an entry by the hash of its content, as [`Register`]
    /// does for a room. Repeated until an answer about the attempt is heard. The answers carry the
    /// attempt: [`Granted`] with the pages of the entry under a lease, [`Progress`] once the bytes are
    /// in the receiver's pages, or [`Failed`] with the reason of a refusal.
    22 XferReq {
        /// The attempt at this peer, drawn by the receiver.
        attempt: Attempt,
        /// All attempts below this number are over at the receiver.
        low_watermark: Attempt,
        /// The hash of the entry's content.
        hash: ContentHash,
        /// The receiver's compatibility text; see
        /// [`ContentRequest::compatibility`](crate::ContentRequest::compatibility).
        compatibility: String,
        /// The length of the entry that the receiver expects, in bytes.
        bytes: u64,
        /// As in [`Register::ttl_ms`].
        ttl_ms: u64,
        /// Whether the sender writes the pages or the receiver reads them, and where. A lease id in it
        /// is ignored.
        delivery: Delivery,
    }
}

/// The service of a speaker that names none.
fn kv() -> String {
    KV_SERVICE.to_owned()
}

/// The low watermark of a speaker that has told none: no attempt is known to be over.
fn first() -> Attempt {
    Attempt(0)
}

/// How the pages get from the sender to the receiver. On the wire: the number of the variant, then
/// its fields, to which a newer version may append more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delivery {
    /// Variant 0: the sender writes the pages into the receiver's memory.
    Write(Destination),
    /// Variant 1: the receiver reads the pages, once the sender has granted a lease.
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

/// Where in the receiver's memory the pages of a request go.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Destination {
    /// The receiver's pages that this sender is to write, in the order of the request.
    pub pages: PageList,
    /// The number of the first of these pages in the request. The receiver has the pages before it
    /// already, or gets them from other ranks.
    pub first_page: u32,
    /// How many pages the request has at the receiver in all, with its prefix and with the pages of
    /// other senders.
    pub total_pages: u32,
    /// The receiver's aux row to fill, if the request has one.
    pub aux: Option<AuxIndex>,
    /// True if this sender is to fill the aux row, and not another rank of its engine.
    pub aux_here: bool,
    /// The receiver's items of its cache groups. No items if missing.
    #[serde(default)]
    pub groups: CacheGroupLists,
    /// The number of the sender's last request for permission to write that the receiver has heard;
    /// `permit_ms` answers it. 0 (no request) if missing.
    #[serde(default)]
    pub ask: u64,
    /// For how long the sender may begin writes, in milliseconds, counted from the moment at which
    /// the sender asked. 0 (no permission) if missing.
    #[serde(default)]
    pub permit_ms: u64,
}

/// A receiver's request for a lease on the sender's pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acquire {
    /// The lease id of the sender that is meant; any sender of the room if not given.
    pub lease_id: Option<SessionId>,
    /// The number of this acquire message, which [`Granted`] repeats.
    pub number: u64,
}
