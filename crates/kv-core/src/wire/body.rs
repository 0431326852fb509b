//! The kinds of messages and their fields.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::codec::Unreadable;
use super::link::Link;
use super::tolerant::{Fields, read};
use super::versions::Versions;
use crate::error::PeerCause;
use crate::groups::GroupLists;
use crate::id::{Attempt, AuxIndex, Incarnation, Room, SessionId, WorkerId};
use crate::layout::Geometry;
use crate::pages::PageList;

/// Declares the messages: each is a struct, a variant of [`Body`], and a number that never changes.
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
                link: Link,
                out: S,
            ) -> Result<S::Ok, S::Error> {
                match self { $(Body::$name(body) => (version, self.kind(), link, body).serialize(out)),* }
            }

            pub(super) fn read(kind: u8, bytes: &[u8]) -> Result<(Link, Body), Unreadable> {
                let read = match kind {
                    $($kind => read(bytes).map(|(_, _, link, Fields(body)): Outer<$name>| (link, Body::$name(body))),)*
                    got => return Err(Unreadable::Kind { got }),
                };
                read.ok_or(Unreadable::Malformed { kind })
            }
        }
    };
}

type Outer<T> = (u8, u8, Link, Fields<T>);

impl Body {
    pub(super) const HELLO: u8 = 1;

    /// True for the kinds by which two workers meet and part: every version reads them.
    pub(super) fn is_for_every_version(kind: u8) -> bool {
        matches!(kind, Body::HELLO | 2 | 3 | 9 | 10)
    }
}

bodies! {
    /// Decode → prefill, first of all: who I am, what I speak, and how to reach my memory.
    1 Hello {
        /// What the speaker speaks.
        versions: Versions,
        /// The metadata of the speaker's transport.
        metadata: Bytes,
        /// Name of the speaker's transport.
        plane: String,
        /// The incarnation that is meant; another one refuses.
        to: Incarnation,
        /// Which life of the speaker's worker it is.
        incarnation: Incarnation,
        /// The number under which the speaker wants to be answered.
        link: Link,
        /// Repeated in the answer, so that a late answer to an earlier hello is known as such.
        nonce: u64,
        /// The speaker's worker.
        worker: WorkerId,
        /// The speaker's cache; `None` if it has something that the reader's version does not know.
        #[serde(with = "super::tolerant::geometry")]
        geometry: Option<Geometry>,
        /// The speaker's engine adds a suffix to the ids of requests, see
        /// [`RequestId::base`](crate::RequestId::base). False if missing.
        #[serde(default)]
        suffixed: bool,
    }
    /// Prefill → decode: the hello is accepted.
    2 Welcome {
        /// What the speaker speaks.
        versions: Versions,
        /// The hello's nonce.
        nonce: u64,
        /// The number under which the speaker wants to be addressed.
        link: Link,
        /// The number of a question whether the speaker may write, as in [`AskWrite`]. 0 if missing.
        #[serde(default)]
        ask: u64,
    }
    /// Prefill → decode: the hello is refused.
    3 Refused {
        /// What the speaker speaks.
        versions: Versions,
        /// The hello's nonce.
        nonce: u64,
        /// The number under which the speaker wants to be addressed: a receiver that is refused still
        /// aborts its rooms, so that their senders do not wait for it.
        link: Link,
        /// Why; `Unknown` if another incarnation was meant.
        #[serde(with = "super::tolerant::cause")]
        cause: PeerCause,
    }
    /// Decode → prefill: here are the pages for a room. Repeated until answered.
    4 Register {
        /// A number of the receiver's for this attempt at this peer.
        attempt: Attempt,
        /// All attempts below are over for the receiver.
        floor: Attempt,
        /// The request.
        room: Room,
        /// Where the pages shall go that this sender is asked for, in request order.
        pages: PageList,
        /// The number of the first of them in the request; before it the receiver has a prefix, or other
        /// ranks send.
        first: u32,
        /// How many pages the request has at the receiver, with those that it has, and those of others.
        whole: u32,
        /// The aux row to fill.
        aux: Option<AuxIndex>,
        /// True if this sender is to fill it, and not another rank of its engine.
        aux_here: bool,
        /// How many ranks of the receiver's engine this sender has to serve for the request.
        ranks: u32,
        /// How long to keep it, in milliseconds from sending: a little longer than the receiver waits.
        ttl_ms: u64,
        /// Where the items of its state groups shall go. None if missing.
        #[serde(default)]
        groups: GroupLists,
        /// The last question of the sender's that was heard, answered as in [`MayWrite`]; 0 for none, and if
        /// missing.
        #[serde(default)]
        ask: u64,
        /// How long the sender may begin writes, in milliseconds from that question. 0 if missing.
        #[serde(default)]
        permit_ms: u64,
    }
    /// Prefill → decode: the registration has arrived.
    5 Registered {
        /// The attempt.
        attempt: Attempt,
    }
    /// Prefill → decode: the bytes of one part are in place. Delivered by the plane after them.
    6 Done {
        /// The attempt.
        attempt: Attempt,
        /// Which part, from 0.
        part: u32,
        /// How many parts there are, once that is known; always with the last one. Not known if missing.
        #[serde(default)]
        total: Option<u32>,
        /// With `total`: registered groups, all optional, that the sender does not have. None if missing.
        #[serde(default)]
        skipped: Vec<u16>,
    }
    /// Prefill → decode, when asked by a [`Ping`]: what is in place so far.
    7 Progress {
        /// The attempt.
        attempt: Attempt,
        /// Runs (first part, number of parts) that are in place; maybe not all of them.
        done: Vec<(u32, u32)>,
        /// How many parts there are, once that is known. Not known if missing.
        #[serde(default)]
        total: Option<u32>,
        /// With `total`: registered groups, all optional, that the sender does not have. None if missing.
        #[serde(default)]
        skipped: Vec<u16>,
    }
    /// Prefill → decode: the attempt has failed.
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
    /// Decode → prefill: the attempt is over, stop writing. Repeated until acknowledged.
    9 Abort {
        /// The attempt.
        attempt: Attempt,
        /// The request, for a prefill side that has not seen the registration.
        room: Room,
        /// Which sender of it was meant; any, if not given.
        grant: Option<SessionId>,
        /// Why.
        #[serde(with = "super::tolerant::cause")]
        cause: PeerCause,
    }
    /// Prefill → decode: no write of the attempt is in flight, and none will be posted.
    10 AbortAck {
        /// The attempt.
        attempt: Attempt,
    }
    /// Decode → prefill: everything has arrived, or the failure is understood. Forget the attempt.
    11 Finish {
        /// The attempt.
        attempt: Attempt,
        /// All attempts below are over for the receiver.
        floor: Attempt,
    }
    /// Are you there? And what about these attempts?
    12 Ping {
        /// All attempts of the speaker below are over.
        floor: Attempt,
        /// Runs (first attempt, number) about which the speaker has heard nothing for a while.
        attempts: Vec<(u64, u32)>,
    }
    /// I am here.
    13 Pong {
        /// All attempts of the speaker below are over.
        floor: Attempt,
    }
    /// Decode → prefill: I shall read the pages of a room. Repeated until answered.
    14 Claim {
        /// A number of the receiver's for this attempt at this peer.
        attempt: Attempt,
        /// All attempts below are over for the receiver.
        floor: Attempt,
        /// The request.
        room: Room,
        /// Which sender of it is meant; any, if not given.
        grant: Option<SessionId>,
        /// Repeated in a grant that answers this claim.
        beat: u64,
        /// How many ranks of the receiver's engine this sender has to serve for the request.
        ranks: u32,
        /// How long to keep it, in milliseconds from sending: a little longer than the receiver waits.
        ttl_ms: u64,
    }
    /// Prefill → decode: the pages are complete and stay as they are while the lease lasts.
    15 Granted {
        /// The attempt.
        attempt: Attempt,
        /// The `beat` of the receiver's last claim.
        beat: u64,
        /// The nonce of the grant.
        grant: SessionId,
        /// The sender's pages, in request order.
        pages: PageList,
        /// The sender's aux row.
        aux: Option<AuxIndex>,
        /// What is left of the lease, in milliseconds.
        lease_ms: u64,
        /// How often heartbeats are wanted, in milliseconds; 0 if the lease is not renewed.
        interval_ms: u64,
        /// The sender's items of its state groups. None if missing.
        #[serde(default)]
        groups: GroupLists,
    }
    /// Decode → prefill: these attempts are alive, extend their leases. One frame for all of them.
    16 Heartbeat {
        /// A number of the speaker's, repeated in the answer.
        beat: u64,
        /// All attempts below are over for the receiver.
        floor: Attempt,
        /// Runs (first attempt, number), rising.
        attempts: Vec<(u64, u32)>,
    }
    /// Prefill → decode: those of them whose pages were still as they were when the heartbeat came,
    /// and stay so.
    17 HeartbeatAck {
        /// The heartbeat's number.
        beat: u64,
        /// For how long from its arrival, in milliseconds.
        lease_ms: u64,
        /// Runs (first attempt, number), rising.
        attempts: Vec<(u64, u32)>,
    }
    /// Decode → prefill: these attempts need the pages no more. Repeated until acknowledged.
    18 Release {
        /// All attempts below are over for the receiver.
        floor: Attempt,
        /// Runs (first attempt, number), rising.
        attempts: Vec<(u64, u32)>,
    }
    /// Prefill → decode: these attempts were released.
    19 Released {
        /// Runs (first attempt, number), rising.
        attempts: Vec<(u64, u32)>,
    }
    /// Prefill → decode: may I go on writing? Asked while a registration is open.
    20 AskWrite {
        /// Numbers of the speaker's, repeated in the answer.
        ask: u64,
    }
    /// Decode → prefill: yes, for so long from the moment at which that was asked.
    21 MayWrite {
        /// The number of the question.
        ask: u64,
        /// How long, in milliseconds.
        permit_ms: u64,
    }
}
