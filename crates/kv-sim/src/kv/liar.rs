//! A peer that lies. It greets a host as any peer may, and then sends valid frames under the right
//! conversation, of every size and with every number that a frame can hold. No frame is about a request of
//! another peer, so that the lies may cost no one but the liar.

use std::collections::BTreeMap;

use bytes::Bytes;
use kv_core::wire::{
    Abort, AbortAck, Acquire, Body, ConversationId, Delivery, Destination, Failed, Frame, Granted, Heartbeat,
    HeartbeatAck, Hello, Progress, Register, Registered, Release, Released,
};
use kv_core::{Attempt, Incarnation, Mismatch, PageList, PageRun, PeerCause, Room, SessionId};

use crate::clock::{Clock, MS, US};
use crate::kv::host::{Stock, new_host};
use crate::kv::memory::Memory;
use crate::kv::service::KvWorld;
use crate::net::calendar::Event;
use crate::net::host::Engine;
use crate::net::lives::{LifeId, Slot, metadata};

/// The longest list in a frame, and the longest text.
const LONGEST: u64 = 1 << 15;
/// Numbers at the limits of fields and tables.
const EDGES: [u64; 10] = [0, 1, 2, 63, 4096, 1 << 16, u32::MAX as u64, 1 << 32, u64::MAX - 1, u64::MAX];

impl KvWorld {
    /// A liar greets a host with the hello of another host, under a name of its own.
    pub(crate) fn greet_as_liar(&mut self, slot: Slot, to: LifeId, bytes: &Bytes) {
        let Ok(Frame { conversation, body: Body::Hello(hello) }) = Frame::decode(bytes) else { return };
        let (salt, bits) = (self.rng.bits(), self.rng.bits());
        let shape = Memory::new(1, 1, 8, 0, salt);
        let clock = Clock::new(self.now, 0, 1_000_000);
        let life = self.hosts.len();
        let host = new_host(&self.service.params, (slot, life), (bits, clock), &shape, None);
        let Ok(mut host) = host else { return };
        host.engine = Engine::Stranger(BTreeMap::new());
        self.service.stock.push(Stock::default());
        self.add_host(host, shape, clock);
        self.service.counters.liars += 1;
        let mut hello = Hello {
            incarnation: Incarnation::from_random(self.rng.bits()),
            conversation: ConversationId(self.rng.bits() | 1),
            metadata: metadata(life),
            ..hello
        };
        hello.worker.rank += 1000;
        let delay = self.rng.below(5 * MS);
        self.lie_later(life, to, delay, Frame { conversation, body: Body::Hello(hello) });
    }

    /// Delivers an answer to a liar. If the answer welcomes the liar, the lies begin.
    pub(crate) fn tell_liar(&mut self, from: LifeId, life: LifeId, bytes: &Bytes) {
        let Ok(Frame { body: Body::Welcome(welcome), .. }) = Frame::decode(bytes) else { return };
        let Engine::Stranger(conversations) = &mut self.hosts[life].engine else { return };
        if conversations.insert(from, welcome.conversation).is_some() {
            return;
        }
        let count = 1 + self.rng.below(40);
        for _ in 0..count {
            let delay = self.rng.tail(100 * US, 200 * MS);
            let body = self.lie();
            self.lie_later(life, from, delay, Frame { conversation: welcome.conversation, body });
        }
    }

    fn lie_later(&mut self, from: LifeId, to: LifeId, delay: u64, frame: Frame) {
        let Ok(mut bytes) = frame.encode() else { return };
        if self.rng.chance(50) {
            let mut broken = bytes.to_vec();
            let at = self.rng.index(broken.len());
            broken[at] = self.rng.bits() as u8;
            bytes = broken.into();
        }
        self.service.counters.lies += 1;
        self.calendar.enter(self.now + delay, Event::Frame { from, to, road: 0, bytes });
    }

    /// The liars die when the world is healed.
    pub(crate) fn end_liars(&mut self) {
        for life in 0..self.hosts.len() {
            if matches!(self.hosts[life].engine, Engine::Stranger(_)) {
                self.hosts[life].engine = Engine::Dead;
                self.die(life);
            }
        }
    }

    fn number(&mut self) -> u64 {
        if self.rng.chance(300) { self.rng.pick(&EDGES) } else { self.rng.below(100) }
    }

    fn short_number(&mut self) -> u32 {
        self.number().min(u32::MAX.into()) as u32
    }

    fn many(&mut self) -> usize {
        if self.rng.chance(20) {
            self.rng.below(LONGEST) as usize
        } else {
            self.rng.tail(4, LONGEST / 16) as usize
        }
    }

    fn runs(&mut self) -> Vec<(u64, u32)> {
        let (many, rising, step) = (self.many(), self.rng.chance(700), 1 + self.rng.below(5));
        let mut at = 0;
        let mut run = |world: &mut KvWorld| {
            at = if rising { at + step } else { world.number() };
            (at, if rising { 1 + world.rng.below(step) as u32 } else { world.short_number() })
        };
        (0..many).map(|_| run(self)).collect()
    }

    fn attempt(&mut self) -> Attempt {
        Attempt(self.number())
    }

    fn text(&mut self) -> String {
        "é".repeat(self.many())
    }

    fn liars_room(&mut self) -> Room {
        let filler = "x".repeat(self.rng.index(200));
        let id = format!("liar-{filler}-{:08x}", self.rng.below(8));
        Room::request(&id).unwrap_or(Room::Number(u64::MAX - self.rng.below(8)))
    }

    fn liars_cause(&mut self) -> PeerCause {
        match self.rng.below(3) {
            0 => PeerCause::Aborted,
            1 => PeerCause::PageCount { sent: self.number(), registered: self.number() },
            _ => PeerCause::Incompatible(Mismatch {
                field: self.text(),
                ours: self.text(),
                theirs: self.text(),
            }),
        }
    }

    fn liars_pages(&mut self) -> PageList {
        let (many, step) = (self.many(), 1 + self.rng.below(3) as u32);
        let runs = (0..many as u32).map(|number| PageRun { start: number * (step + 1), len: step });
        PageList::from_runs(runs).unwrap_or_default()
    }

    fn lie(&mut self) -> Body {
        let (attempt, low_watermark) = (self.attempt(), self.attempt());
        let (number, lease_ms) = (self.number(), self.number());
        let room = self.liars_room();
        match self.rng.below(14) {
            0 | 1 => {
                let (leases, asked) = (self.runs(), self.runs());
                let (leases, asked) =
                    if self.rng.chance(500) { (leases, Vec::new()) } else { (asked, leases) };
                Body::Heartbeat(Heartbeat {
                    number,
                    low_watermark,
                    leases,
                    asked,
                    writes: self.rng.chance(500),
                })
            }
            2 | 3 => {
                let (leases, permit_ms) = (self.runs(), self.number());
                Body::HeartbeatAck(HeartbeatAck { number, low_watermark, lease_ms, leases, permit_ms })
            }
            4 => Body::Abort(Abort {
                low_watermark: kv_core::Attempt(0),
                attempt,
                room,
                lease_id: None,
                cause: self.liars_cause(),
                failed_ms_ago: self.rng.chance(500).then(|| self.number()),
            }),
            5 => Body::AbortAck(AbortAck { attempt }),
            6 => {
                Body::Release(Release { low_watermark, attempts: self.runs(), answer: self.rng.chance(500) })
            }
            7 => Body::Released(Released { attempts: self.runs() }),
            8 => Body::Failed(Failed { attempt, cause: self.liars_cause(), quiet: self.rng.chance(500) }),
            9 => {
                let done = self.runs().into_iter().map(|(at, len)| (at as u32, len)).collect();
                let (total, skipped) = (Some(self.short_number()), vec![7; self.many()]);
                Body::Progress(Progress { attempt, done, total, skipped })
            }
            10 => Body::Registered(Registered { attempt }),
            11 => Body::Granted(Granted {
                attempt,
                number,
                lease_id: SessionId(self.number()),
                pages: self.liars_pages(),
                aux: None,
                lease_ms,
                interval_ms: self.number(),
                groups: Default::default(),
            }),
            _ => {
                let (ranks, delivery) = (self.short_number(), self.liars_delivery(number));
                Body::Register(Register { attempt, low_watermark, room, ranks, ttl_ms: lease_ms, delivery })
            }
        }
    }

    fn liars_delivery(&mut self, number: u64) -> Delivery {
        if self.rng.chance(500) {
            let lease_id = Some(SessionId(self.number())).filter(|lease| lease.0 > 1 << 20);
            return Delivery::Read(Acquire { lease_id, number });
        }
        let (pages, aux_here) = (self.liars_pages(), self.rng.chance(500));
        let (total_pages, permit_ms) = (pages.len() as u32, self.number());
        Delivery::Write(Destination {
            pages,
            total_pages,
            aux_here,
            ask: number,
            permit_ms,
            ..Destination::default()
        })
    }
}
