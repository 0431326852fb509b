//! Frames that a peer may send, and the peers that send them.

use bytes::Bytes;
use kv_core::wire::{
    Abort, AbortAck, Acquire, Body, ConversationId, Delivery, Destination, Failed, Granted, Heartbeat,
    HeartbeatAck, Hello, Progress, Refused, Register, Registered, Release, Released, VERSIONS, Versions,
    Welcome, XferReq,
};
use kv_core::{
    Attempt, AuxIndex, CacheGroupList, CacheGroupLists, ContentHash, Incarnation, Mismatch, PageList,
    PeerCause, Room, SessionId, TransferMode, WorkerId,
};

use super::caches::{PAGES, cache, variant};
use super::entries::BLOCK;
use super::script::Script;

/// What entries must have in common with those of the worker to be interchangeable.
pub(super) const COMPATIBILITY: &str = "one";
/// The longest text in a frame, in bytes.
const MAX_TEXT: usize = 1_000_000;
/// The number of runs in a frame, at most.
const MAX_RUNS: usize = 170_000;

/// A room: few that meet, ids that differ by their suffix only, and any other.
pub(super) fn room(script: &mut Script) -> Room {
    match script.byte() {
        kind @ 0..=119 => Room::Number(u64::from(kind % 4)),
        kind @ 120..=219 => named(&format!("request-{}-0000000{}", kind % 2, kind / 2 % 4)),
        220..=239 => named(&script.text(256)),
        _ => Room::Number(script.word()),
    }
}

fn named(id: &str) -> Room {
    Room::request(id).unwrap_or(Room::Number(1))
}

pub(super) fn pages(script: &mut Script) -> PageList {
    PageList::try_from(script.runs(MAX_RUNS, PAGES)).unwrap_or_default()
}

fn groups(script: &mut Script) -> CacheGroupLists {
    let numbers = (0..4).filter(|_| script.rarely()).collect::<Vec<u16>>();
    let list = |group| {
        let items = PageList::try_from(script.runs(MAX_RUNS, 4096)).unwrap_or_default();
        CacheGroupList { group, first: script.small(), items }
    };
    CacheGroupLists::try_from(numbers.into_iter().map(list).collect::<Vec<_>>()).unwrap_or_default()
}

fn skipped(script: &mut Script) -> Vec<u16> {
    let count = script.size(300_000) as u32;
    (0..count).map(|number| number as u16).collect()
}

pub(super) fn cause(script: &mut Script) -> PeerCause {
    match script.below(9) {
        0..=2 => PeerCause::Aborted,
        3 => PeerCause::Unknown,
        4 => PeerCause::LeaseExpired,
        5 => PeerCause::ReceiverCount { expected: script.small() as usize, told: script.small() as usize },
        6 => PeerCause::Mode { sender: TransferMode::Push, receiver: TransferMode::Pull },
        _ => PeerCause::Incompatible(Mismatch {
            field: script.text(MAX_TEXT / 3),
            ours: script.text(MAX_TEXT / 3),
            theirs: script.text(MAX_TEXT / 3),
        }),
    }
}

fn attempt(script: &mut Script) -> Attempt {
    Attempt(script.number())
}

fn low_watermark(script: &mut Script) -> Attempt {
    if script.rarely() { attempt(script) } else { Attempt(0) }
}

/// What a peer knows of the worker, and how the peer identifies itself.
pub(super) struct Peer {
    pub(super) incarnation: u64,
    /// The position of the peer among all peers.
    pub(super) number: u8,
    pub(super) variant: u8,
    /// The service that the peer says to be of.
    pub(super) service: &'static str,
    /// The numbers under which the worker wants to be addressed.
    pub(super) conversations: Vec<ConversationId>,
    /// The number of conversations that the peer has drawn itself.
    pub(super) drawn: u32,
    /// The nonce of the worker's last hello to the peer.
    pub(super) nonce: u64,
    /// The number of the worker's last heartbeat, or last message that acquires a lease, to the peer.
    pub(super) heard: u64,
    /// The number of the worker's last question whether it may write, in a welcome or a heartbeat.
    pub(super) ask: u64,
}

/// Four peers of a service, whose caches are chosen by these bytes.
pub(super) fn peers(variants: [u8; 4], service: &'static str) -> [Peer; 4] {
    let mut number = 0;
    variants.map(|byte| {
        number += 1;
        Peer {
            incarnation: number,
            number: number as u8 - 1,
            variant: variant(byte),
            service,
            conversations: Vec::new(),
            drawn: 0,
            nonce: 0,
            heard: 0,
            ask: 0,
        }
    })
}

/// A frame, in some cases damaged.
pub(super) fn damaged(mut script: Script<'_>, frame: &Bytes) -> Bytes {
    if script.byte() >= 6 {
        return frame.clone();
    }
    let mut bytes = frame.to_vec();
    let at = script.word() as usize % bytes.len().max(1);
    match script.below(3) {
        0 => bytes.truncate(at),
        1 => bytes.insert(at, script.byte()),
        _ => bytes.splice(at..at, [0xdd, 0xff, 0xff, 0xff, 0xff]).for_each(drop),
    }
    bytes.into()
}

impl Peer {
    /// Lets the peer learn from a frame of the machine.
    pub(super) fn hears(&mut self, body: &Body) {
        match body {
            Body::Welcome(welcome) => {
                self.ask = welcome.ask;
                self.conversations.push(welcome.conversation);
            }
            Body::Hello(hello) => {
                self.nonce = hello.nonce;
                self.conversations.push(hello.conversation);
            }
            Body::Register(Register { delivery: Delivery::Read(acquire), .. })
            | Body::XferReq(XferReq { delivery: Delivery::Read(acquire), .. }) => self.heard = acquire.number,
            Body::Heartbeat(asks) if asks.writes => (self.ask, self.heard) = (asks.number, asks.number),
            Body::Heartbeat(asks) => self.heard = asks.number,
            _ => {}
        }
    }

    /// The peer's metadata, which names the peer and its cache.
    pub(super) fn metadata(&self, padding: usize) -> Bytes {
        let mut metadata = vec![self.variant, self.number];
        metadata.resize(2 + padding, 0);
        metadata.into()
    }

    pub(super) fn worker(&self, text: &str) -> Option<WorkerId> {
        let engine = format!("peer-{}{text}", self.incarnation % 16);
        Some(WorkerId { engine: engine.as_str().try_into().ok()?, rank: 0 })
    }

    pub(super) fn hello(&mut self, script: &mut Script, us: Incarnation) -> Option<Hello> {
        let to = if script.byte() < 16 { Incarnation::from_random(script.number()) } else { us };
        let again = script.rarely();
        self.drawn += u32::from(again);
        let conversation = if script.byte() < 8 {
            ConversationId(script.number())
        } else {
            ConversationId::new(1 + self.drawn, 7)
        };
        let strange = script.byte();
        let versions = match strange {
            8..12 => Versions { min: VERSIONS.max + 1, max: 127 },
            12..16 => Versions { min: VERSIONS.min, max: VERSIONS.max + 1 },
            _ => VERSIONS,
        };
        let transport = if strange < 8 { script.text(MAX_TEXT) } else { "test".to_owned() };
        let mut geometry = cache(self.variant)?.geometry.clone();
        if script.byte() < 8 {
            geometry.model = script.text(256);
        }
        Some(Hello {
            versions,
            to,
            worker: self.worker("")?,
            incarnation: Incarnation::from_random(self.incarnation),
            conversation,
            nonce: script.number(),
            transport,
            suffixed: script.rarely(),
            service: if script.rarely() { script.text(600) } else { self.service.to_owned() },
            metadata: self.metadata(if script.byte() < 8 { script.size(900_000) } else { 0 }),
            geometry: Some(Box::new(geometry)),
        })
    }

    /// A frame of any kind but a hello.
    pub(super) fn says(&self, script: &mut Script) -> Body {
        match script.below(20) {
            0 => {
                let nonce = if script.rarely() { script.number() } else { self.nonce };
                let ask = script.number();
                Body::Welcome(Welcome {
                    versions: VERSIONS,
                    nonce,
                    conversation: ConversationId::new(script.small().max(1), 9),
                    ask,
                })
            }
            1 if script.rarely() => {
                let nonce = if script.rarely() { script.number() } else { self.nonce };
                Body::Refused(Refused {
                    versions: VERSIONS,
                    nonce,
                    cause: cause(script),
                    conversation: ConversationId::new(script.small().max(1), 9),
                })
            }
            2..=7 if self.service == "ec" && !script.rarely() => self.asks_for_entry(script),
            2 if script.rarely() => self.asks_for_entry(script),
            2..=7 => Body::Register(Register {
                attempt: attempt(script),
                low_watermark: low_watermark(script),
                room: room(script),
                ranks: if script.flag() { 1 } else { script.small() },
                ttl_ms: if script.flag() { 60_000 } else { script.number() },
                delivery: self.delivery(script),
            }),
            8 | 9 => Body::Progress(Progress {
                attempt: attempt(script),
                done: done(script),
                total: script.option(Script::small),
                skipped: skipped(script),
            }),
            10 => Body::Registered(Registered { attempt: attempt(script) }),
            11 => {
                Body::Failed(Failed { attempt: attempt(script), cause: cause(script), quiet: script.flag() })
            }
            12 | 13 => Body::Abort(Abort {
                attempt: attempt(script),
                room: room(script),
                lease_id: script.option(|script| SessionId(script.number())),
                cause: cause(script),
                low_watermark: attempt(script),
                failed_ms_ago: script.option(|script| script.number()),
            }),
            14 => Body::AbortAck(AbortAck { attempt: attempt(script) }),
            15 => Body::Granted(Granted {
                attempt: attempt(script),
                number: if script.flag() { self.heard } else { script.number() },
                lease_id: SessionId(script.number()),
                pages: pages(script),
                aux: if script.rarely() { Some(AuxIndex(script.small())) } else { None },
                lease_ms: if script.flag() { 30_000 } else { script.number() },
                interval_ms: if script.flag() { 5000 } else { script.number() },
                groups: groups(script),
            }),
            16 | 17 => {
                let (leases, asked) = (script.attempts(MAX_RUNS), script.attempts(MAX_RUNS));
                let (leases, asked) = if script.flag() { (leases, asked) } else { (asked, leases) };
                let (number, low_watermark, writes) = (script.number(), low_watermark(script), script.flag());
                Body::Heartbeat(Heartbeat { number, low_watermark, leases, asked, writes })
            }
            18 => Body::HeartbeatAck(HeartbeatAck {
                number: if script.flag() { self.heard } else { script.number() },
                low_watermark: low_watermark(script),
                lease_ms: if script.flag() { 30_000 } else { script.number() },
                leases: script.attempts(MAX_RUNS),
                permit_ms: if script.flag() { 10_000 } else { script.number() },
            }),
            _ if script.flag() => {
                let (low_watermark, answer) = (low_watermark(script), script.flag());
                Body::Release(Release { low_watermark, attempts: script.attempts(MAX_RUNS), answer })
            }
            _ => Body::Released(Released { attempts: script.attempts(MAX_RUNS) }),
        }
    }

    fn asks_for_entry(&self, script: &mut Script) -> Body {
        let (attempt, low_watermark) = (attempt(script), low_watermark(script));
        let (ours, image) = (self.service == "ec", u32::from(script.below(4)));
        let text = if script.rarely() { script.text(256) } else { format!("image-{image}") };
        let Ok(hash) = ContentHash::new(&text) else { return Body::Registered(Registered { attempt }) };
        Body::XferReq(XferReq {
            attempt,
            low_watermark,
            hash,
            compatibility: match ours && !script.rarely() {
                true => COMPATIBILITY.to_owned(),
                false => script.text(600),
            },
            bytes: if ours && !script.rarely() { u64::from((1 + image) * BLOCK) } else { script.number() },
            ttl_ms: if script.flag() { 60_000 } else { script.number() },
            delivery: match ours && script.flag() {
                true => self.deliver(script, PageList::from_pages(0..=image).unwrap_or_default()),
                false => self.delivery(script),
            },
        })
    }

    fn delivery(&self, script: &mut Script) -> Delivery {
        if script.below(3) == 0 {
            let lease_id = script.option(|script| SessionId(script.number()));
            return Delivery::Read(Acquire { lease_id, number: script.number() });
        }
        let pages = pages(script);
        self.deliver(script, pages)
    }

    fn deliver(&self, script: &mut Script, pages: PageList) -> Delivery {
        let fits = !script.rarely();
        let (first_page, total_pages) =
            if fits { (0, pages.len() as u32) } else { (script.small(), script.small()) };
        Delivery::Write(Destination {
            pages,
            first_page,
            total_pages,
            aux: if script.rarely() { Some(AuxIndex(script.small())) } else { None },
            aux_here: script.flag(),
            groups: groups(script),
            ask: if script.rarely() { script.number() } else { self.ask },
            permit_ms: if script.rarely() { script.number() } else { 10_000 },
        })
    }
}

/// Runs of parts that are in place: one part, as in a completion notice, or any parts.
fn done(script: &mut Script) -> Vec<(u32, u32)> {
    if script.flag() {
        return vec![(script.small(), 1)];
    }
    script.attempts(MAX_RUNS).into_iter().map(|(start, count)| (start as u32, count)).collect()
}

/// The name of a frame's kind, for messages.
pub(super) fn name(body: &Body) -> &'static str {
    match body {
        Body::Hello(_) => "Hello",
        Body::Welcome(_) => "Welcome",
        Body::Refused(_) => "Refused",
        Body::Register(Register { delivery: Delivery::Write(_), .. }) => "Register",
        Body::Register(_) => "Acquire",
        Body::XferReq(_) => "XferReq",
        Body::Registered(_) => "Registered",
        Body::Progress(_) => "Progress",
        Body::Failed(_) => "Failed",
        Body::Abort(_) => "Abort frame",
        Body::AbortAck(_) => "AbortAck",
        Body::Granted(_) => "Granted",
        Body::Heartbeat(_) => "Heartbeat",
        Body::HeartbeatAck(_) => "HeartbeatAck",
        Body::Release(_) => "Release",
        Body::Released(_) => "Released",
    }
}
