//! One event as a record keeps it: the typed event of a worker's trace without what no picture shows.

use kv_core::trace::{self, Event, KvWhat};
use kv_core::{Cause, Incarnation, KvPoll, Op, PeerCause, Phase, Room, WorkerId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

use crate::text::Text;

/// One event of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// When the event happened, in nanoseconds of the worker's clock.
    #[serde(rename = "t")]
    pub at: u64,
    /// The peer, by the worker's own number for the peer.
    #[serde(rename = "p", default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<u64>,
    /// The attempt of the receiver at the sender.
    #[serde(rename = "a", default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u64>,
    /// What happened, in the words of the trace.
    #[serde(rename = "e")]
    pub what: What,
}

/// The two sides of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The side that has the pages.
    Sender,
    /// The side that wants the pages.
    Receiver,
}

/// What happened; see [`KvWhat`] for each of the events. Times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "each event is documented in kv_core::trace::KvWhat, whose names these are")]
pub enum What {
    Opened {
        room: Room,
        side: Side,
    },
    Bootstrapping,
    WaitingForInput,
    Transferring,
    Asked {
        again: bool,
    },
    Answered {
        ranks: u64,
    },
    NotAnswered {
        why: Text,
    },
    ReceiverCame,
    ChunkGiven {
        chunk: u32,
        pages: u64,
    },
    PagesGiven {
        pages: u64,
    },
    PostStarted {
        post: u64,
        write: bool,
        bytes: u64,
        descriptors: u64,
    },
    PostEnded {
        post: u64,
        bytes: u64,
        took: u64,
        error: Option<Text>,
    },
    LeaseExpired,
    Ended,
    Failed(Box<Failure>),
    QuarantineBegan {
        pages: u64,
        items: u64,
        why: Text,
    },
    QuarantineEnded {
        lasted: u64,
    },
    PagesBack {
        pages: u64,
    },
    ItemsBack {
        items: u64,
    },
    Closed,
    Said(Message),
    Heard(Message),
    Dropped {
        why: Text,
    },
    PeerMet {
        worker: WorkerId,
        incarnation: Incarnation,
    },
    WayChosen {
        transport: Text,
    },
    PeerAnswers,
    PeerRefuses {
        why: Text,
    },
    WayOpened,
    ConnectFailed {
        why: Text,
    },
    WayFailed {
        transport: Text,
        why: Text,
        pause: Option<u64>,
    },
    WayLost,
    PeerSilent {
        silent_for: u64,
    },
    PeerGivenUp {
        silent_for: u64,
    },
    PeerBack,
    PeerDead,
    PeerRestarted,
    PeerForgotten,
    PermissionBegan {
        lasts: u64,
    },
    PermissionEnded,
    Revoking,
    WritesOver,
    /// An event that is newer than this crate, by its name.
    Other {
        name: Text,
    },
}

/// Why a session failed; see [`TransferError`](kv_core::TransferError).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// How far the session had come.
    pub phase: Phase,
    /// The peer of the session, if a single one is known.
    pub peer: Option<WorkerId>,
    /// The name of the cause, without its values: `PeerLost`.
    pub name: Text,
    /// The cause with its values.
    pub why: Text,
    /// What an operator can do about the cause.
    pub advice: Text,
}

/// A message between two workers; see [`trace::Message`]. Times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(
    missing_docs,
    reason = "each message is documented in kv_core::trace::Message, whose names these are"
)]
pub enum Message {
    Hello,
    Welcome,
    Refused {
        why: Text,
    },
    Register {
        room: Room,
        pages: u64,
    },
    Acquire {
        room: Room,
    },
    Registered,
    InPlace {
        parts: u64,
        total: Option<u32>,
    },
    Failed {
        why: Text,
        quiet: bool,
    },
    Abort {
        why: Text,
    },
    AbortAcknowledged,
    Granted {
        pages: u64,
        lease: u64,
    },
    Heartbeat {
        number: u64,
        leases: u64,
        asked: u64,
        writes: bool,
    },
    HeartbeatAnswered {
        number: u64,
        leases: u64,
        lease: u64,
        permission: u64,
    },
    Release {
        attempts: u64,
    },
    Released {
        attempts: u64,
    },
    /// A message that is newer than this crate, or of another service, by its name.
    Other {
        name: Text,
    },
}

impl Note {
    /// The note of an event.
    pub fn of(event: &Event<KvWhat>) -> Note {
        Note {
            at: event.at.as_nanos(),
            peer: event.who.peer.map(|peer| peer.0),
            attempt: event.who.attempt.map(|attempt| attempt.0),
            what: What::of(&event.what),
        }
    }

    /// Bytes that the note occupies on the heap, beside its own size.
    pub(crate) fn heap_bytes(&self) -> usize {
        let room = |room: &Room| if let Room::Request(id) = room { id.as_str().len() + 16 } else { 0 };
        let worker = |worker: &WorkerId| worker.engine.as_str().len() + 16;
        let message = |message: &Message| match message {
            Message::Register { room: id, .. } | Message::Acquire { room: id } => room(id),
            Message::Refused { why } | Message::Failed { why, .. } | Message::Abort { why } => {
                why.as_str().len()
            }
            Message::Other { name } => name.as_str().len(),
            _ => 0,
        };
        match &self.what {
            What::Opened { room: id, .. } => room(id),
            What::NotAnswered { why }
            | What::QuarantineBegan { why, .. }
            | What::Dropped { why }
            | What::PeerRefuses { why }
            | What::ConnectFailed { why } => why.as_str().len(),
            What::WayChosen { transport } => transport.as_str().len(),
            What::WayFailed { transport, why, .. } => transport.as_str().len() + why.as_str().len(),
            What::PostEnded { error: Some(why), .. } => why.as_str().len(),
            What::Failed(failure) => {
                let Failure { peer, name, why, advice, .. } = &**failure;
                let texts = [name, why, advice].map(|text| text.as_str().len());
                size_of::<Failure>() + texts.iter().sum::<usize>() + peer.as_ref().map_or(0, worker)
            }
            What::Said(said) | What::Heard(said) => message(said),
            What::PeerMet { worker: id, .. } => worker(id),
            What::Other { name } => name.as_str().len(),
            _ => 0,
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The name of the variant that a value is.
fn variant(value: &dyn fmt::Debug) -> String {
    let mut text = format!("{value:?}");
    text.truncate(text.find(|letter: char| !letter.is_ascii_alphanumeric()).unwrap_or(text.len()));
    text
}

fn cause_name(cause: &Cause) -> Text {
    Text::from(match cause {
        Cause::ByPeer(PeerCause::Other { name }) => format!("ByPeer: {name}"),
        Cause::ByPeer(cause) => format!("ByPeer: {}", variant(cause)),
        cause => variant(cause),
    })
}

impl What {
    fn of(what: &KvWhat) -> What {
        match what {
            KvWhat::Opened { room, half } => What::Opened {
                room: room.clone(),
                side: match half {
                    trace::Half::Sender => Side::Sender,
                    trace::Half::Receiver => Side::Receiver,
                },
            },
            KvWhat::State(KvPoll::Bootstrapping) => What::Bootstrapping,
            KvWhat::State(KvPoll::WaitingForInput) => What::WaitingForInput,
            KvWhat::State(KvPoll::Transferring) => What::Transferring,
            KvWhat::Asked { again } => What::Asked { again: *again },
            KvWhat::Answered { ranks, .. } => What::Answered { ranks: *ranks as u64 },
            KvWhat::NotAnswered(error) => What::NotAnswered { why: Text::new(error) },
            KvWhat::ReceiverCame => What::ReceiverCame,
            KvWhat::ChunkGiven { chunk, pages } => What::ChunkGiven { chunk: chunk.0, pages: *pages as u64 },
            KvWhat::PagesGiven { pages } => What::PagesGiven { pages: *pages as u64 },
            KvWhat::PostStarted { post, op, bytes, descriptors } => What::PostStarted {
                post: post.0,
                write: *op == Op::Write,
                bytes: *bytes,
                descriptors: *descriptors as u64,
            },
            KvWhat::PostEnded { post, bytes, took, error } => What::PostEnded {
                post: post.0,
                bytes: *bytes,
                took: nanos(*took),
                error: error.as_ref().map(Text::new),
            },
            KvWhat::LeaseExpired => What::LeaseExpired,
            KvWhat::Ended => What::Ended,
            KvWhat::Failed(failure) => What::Failed(Box::new(Failure {
                phase: failure.phase,
                peer: failure.peer.clone(),
                name: cause_name(&failure.cause),
                why: Text::new(&failure.cause),
                advice: Text::new(failure.cause.advice()),
            })),
            KvWhat::QuarantineBegan { reason, pages, items } => {
                What::QuarantineBegan { pages: *pages as u64, items: *items as u64, why: Text::new(reason) }
            }
            KvWhat::QuarantineEnded { lasted, .. } => What::QuarantineEnded { lasted: nanos(*lasted) },
            KvWhat::PagesBack { pages } => What::PagesBack { pages: *pages as u64 },
            KvWhat::ItemsBack { items } => What::ItemsBack { items: *items as u64 },
            KvWhat::Closed => What::Closed,
            KvWhat::Said(message) => What::Said(Message::of(message)),
            KvWhat::Heard(message) => What::Heard(Message::of(message)),
            KvWhat::Dropped(why) => What::Dropped { why: Text::new(why) },
            KvWhat::PeerMet { worker, incarnation } => {
                What::PeerMet { worker: worker.clone(), incarnation: *incarnation }
            }
            KvWhat::WayChosen { transport } => What::WayChosen { transport: Text::new(transport) },
            KvWhat::PeerAnswers => What::PeerAnswers,
            KvWhat::PeerRefuses(cause) => What::PeerRefuses { why: Text::new(cause) },
            KvWhat::WayOpened => What::WayOpened,
            KvWhat::ConnectFailed(error) => What::ConnectFailed { why: Text::new(error) },
            KvWhat::WayFailed { transport, fault, pause } => What::WayFailed {
                transport: Text::new(transport),
                why: Text::new(fault),
                pause: pause.map(nanos),
            },
            KvWhat::WayLost => What::WayLost,
            KvWhat::PeerSilent { silent_for } => What::PeerSilent { silent_for: nanos(*silent_for) },
            KvWhat::PeerGivenUp { silent_for } => What::PeerGivenUp { silent_for: nanos(*silent_for) },
            KvWhat::PeerBack => What::PeerBack,
            KvWhat::PeerDead { .. } => What::PeerDead,
            KvWhat::PeerRestarted => What::PeerRestarted,
            KvWhat::PeerForgotten => What::PeerForgotten,
            KvWhat::PermissionBegan { lasts } => What::PermissionBegan { lasts: nanos(*lasts) },
            KvWhat::PermissionEnded => What::PermissionEnded,
            KvWhat::Revoking => What::Revoking,
            KvWhat::WritesOver => What::WritesOver,
            other => What::Other { name: Text::new(other.name()) },
        }
    }
}

impl Message {
    fn of(message: &trace::Message) -> Message {
        match message {
            trace::Message::Hello => Message::Hello,
            trace::Message::Welcome => Message::Welcome,
            trace::Message::Refused(why) => Message::Refused { why: Text::new(why) },
            trace::Message::Register { room, pages, .. } => {
                Message::Register { room: room.clone(), pages: *pages as u64 }
            }
            trace::Message::Acquire { room } => Message::Acquire { room: room.clone() },
            trace::Message::Registered => Message::Registered,
            trace::Message::InPlace { parts, total } => Message::InPlace { parts: *parts, total: *total },
            trace::Message::Failed { cause, quiet } => {
                Message::Failed { why: Text::new(cause), quiet: *quiet }
            }
            trace::Message::Abort(why) => Message::Abort { why: Text::new(why) },
            trace::Message::AbortAcknowledged => Message::AbortAcknowledged,
            trace::Message::Granted { pages, lease } => {
                Message::Granted { pages: *pages as u64, lease: nanos(*lease) }
            }
            &trace::Message::Heartbeat { number, leases, asked, writes } => {
                Message::Heartbeat { number, leases, asked, writes }
            }
            &trace::Message::HeartbeatAnswered { number, leases, lease, permission } => {
                let (lease, permission) = (nanos(lease), nanos(permission));
                Message::HeartbeatAnswered { number, leases, lease, permission }
            }
            trace::Message::Release { attempts } => Message::Release { attempts: *attempts },
            trace::Message::Released { attempts } => Message::Released { attempts: *attempts },
            other => Message::Other { name: Text::new(other.name()) },
        }
    }
}
