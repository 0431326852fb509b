//! Garbage for a worker: random bytes, damaged frames, and valid frames under the right conversation with
//! extreme fields.

use bytes::Bytes;
use kv_transfer::unstable::random::SplitMix64;
use kv_transfer::unstable::wire::{
    Abort, Acquire, Body, ConversationId, Delivery, Destination, Frame, Heartbeat, Hello, Progress, Register,
    Release,
};
use kv_transfer::{Attempt, Incarnation, Mismatch, PageList, PageRun, PeerCause, Room};

/// Frames that are kept and sent again and again.
const KEPT: usize = 256;
/// Only one frame in this many is made anew, so that making frames does not limit the sender.
const ANEW: u64 = 32;
/// The longest list in a frame.
const LONGEST: u64 = 1 << 15;

/// A source of garbage frames.
pub(crate) struct Garbage {
    hello: Hello,
    conversation: ConversationId,
    random: SplitMix64,
    attempt: u64,
    kept: Vec<Bytes>,
}

impl Garbage {
    /// Garbage for the worker that has received `hello`, and that wants to be addressed by `conversation`.
    pub(crate) fn new(hello: Hello, conversation: ConversationId) -> Garbage {
        let mut garbage = Garbage {
            hello,
            conversation,
            random: SplitMix64::new(conversation.0),
            attempt: 0,
            kept: Vec::new(),
        };
        for _ in 0..KEPT {
            let frame = garbage.make();
            garbage.kept.push(frame);
        }
        garbage
    }

    /// The next garbage frame.
    pub(crate) fn next(&mut self) -> Bytes {
        let at = self.below(KEPT as u64) as usize;
        if self.below(ANEW) == 0 {
            let frame = self.make();
            self.kept[at] = frame;
        }
        self.kept[at].clone()
    }

    fn bits(&mut self) -> u64 {
        self.random.bits()
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    /// A length: mostly short, and long now and then.
    fn many(&mut self) -> u64 {
        let most = LONGEST >> self.below(16);
        1 + self.below(most)
    }

    fn make(&mut self) -> Bytes {
        match self.below(4) {
            0 => {
                let len = self.many();
                (0..len).map(|_| self.bits() as u8).collect()
            }
            1 => {
                let mut bytes = self.valid().to_vec();
                let at = self.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << self.below(8);
                bytes.into()
            }
            _ => self.valid(),
        }
    }

    /// A valid frame with extreme fields; an empty frame where it would be too long.
    fn valid(&mut self) -> Bytes {
        let body = self.body();
        let conversation =
            if matches!(body, Body::Hello(_)) { ConversationId::NONE } else { self.conversation };
        Frame { conversation, body }.encode().unwrap_or_default()
    }

    /// Attempts that were made before, and others.
    fn runs(&mut self) -> Vec<(u64, u32)> {
        let (many, step) = (self.many(), 1 + self.below(2));
        let first = self.attempt.saturating_sub(self.below(2 * many * step));
        (0..many).map(|run| (first + step * run, 1)).collect()
    }

    fn text(&mut self) -> String {
        "x".repeat(self.many() as usize)
    }

    fn body(&mut self) -> Body {
        self.attempt += 1;
        let (attempt, low_watermark) = (Attempt(self.attempt), Attempt(self.attempt.saturating_sub(1000)));
        let room = Room::Number(u64::MAX - self.below(1 << 16));
        match self.below(10) {
            0 | 1 => {
                let (leases, asked) = (Vec::new(), self.runs());
                Body::Heartbeat(Heartbeat {
                    number: self.attempt,
                    low_watermark,
                    leases,
                    asked,
                    writes: false,
                })
            }
            2 | 3 => {
                let runs = self.many() as u32;
                let pages = PageList::from_runs((0..runs).map(|run| PageRun { start: 2 * run, len: 1 }));
                let to = Destination {
                    pages: pages.unwrap_or_default(),
                    total_pages: runs,
                    ask: 1,
                    permit_ms: u64::MAX,
                    ..Destination::default()
                };
                Body::Register(self.register(room, low_watermark, Delivery::Write(to)))
            }
            4 | 5 => {
                let (field, ours, theirs) = (self.text(), self.text(), self.text());
                let cause = PeerCause::Incompatible(Mismatch { field, ours, theirs });
                Body::Abort(Abort {
                    failed_ms_ago: None,
                    low_watermark: Attempt(0),
                    attempt,
                    room,
                    lease_id: None,
                    cause,
                })
            }
            6 => Body::Hello(Hello {
                incarnation: Incarnation::from_random(self.bits()),
                conversation: ConversationId(self.bits() | 1),
                nonce: self.bits(),
                ..self.hello.clone()
            }),
            7 => {
                let (leases, asked) = (self.runs(), Vec::new());
                Body::Heartbeat(Heartbeat {
                    number: self.attempt,
                    low_watermark,
                    leases,
                    asked,
                    writes: true,
                })
            }
            8 => Body::Release(Release { low_watermark, attempts: self.runs(), answer: true }),
            _ => match self.below(3) {
                0 | 1 => {
                    let (done, skipped) = (vec![(self.bits() as u32, 1)], vec![7; self.many() as usize]);
                    Body::Progress(Progress { attempt, done, total: Some(u32::MAX), skipped })
                }
                _ => {
                    let delivery = Delivery::Read(Acquire { lease_id: None, number: self.attempt });
                    Body::Register(self.register(room, low_watermark, delivery))
                }
            },
        }
    }

    fn register(&self, room: Room, low_watermark: Attempt, delivery: Delivery) -> Register {
        let attempt = Attempt(self.attempt);
        Register { attempt, low_watermark, room, ranks: u32::MAX, ttl_ms: u64::MAX, delivery }
    }
}
