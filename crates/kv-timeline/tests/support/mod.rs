//! Two or more workers with clocks of their own, and what they record of a made-up conversation.
#![allow(dead_code)] // Each test uses a part.

use kv_core::{EngineId, Incarnation, Room, WorkerId};
use kv_timeline::{Message, Note, PeerNote, Record, SessionNotes, Side, What};

pub const MS: u64 = 1_000_000;
pub const HOUR: i64 = 3_600_000_000_000;
/// Where the true time begins: late enough for clocks that are hours behind.
pub const START: u64 = 100 * HOUR as u64;

pub fn id(engine: &str, rank: u32) -> WorkerId {
    WorkerId { engine: EngineId::new(engine).unwrap(), rank }
}

/// A worker whose clock is ahead of the true time by `ahead` nanoseconds.
pub struct Made {
    pub record: Record,
    pub ahead: i64,
}

impl Made {
    pub fn new(engine: &str, rank: u32, life: u64, ahead: i64) -> Made {
        Made { record: Record::new(id(engine, rank), Incarnation::from_random(life)), ahead }
    }

    /// The time on the worker's clock, at a true time.
    pub fn clock(&self, truth: u64) -> u64 {
        (truth as i64 + self.ahead) as u64
    }

    /// The worker knows the other one by this number.
    pub fn meets(&mut self, peer: u64, other: &Made) {
        let (worker, incarnation) = (other.record.worker.clone(), other.record.incarnation);
        let (hello_said, hello_heard, welcome_said, welcome_heard) = (None, None, None, None);
        self.record.peers.push(PeerNote {
            peer,
            worker,
            incarnation,
            transport: None,
            hello_said,
            hello_heard,
            welcome_said,
            welcome_heard,
        });
    }

    /// Opens a session.
    pub fn opens(&mut self, session: u64, room: &Room, side: Side, truth: u64) {
        self.record.sessions.push(SessionNotes { session, notes: Vec::new() });
        self.notes(session, None, truth, What::Opened { room: room.clone(), side });
    }

    /// An event of a session.
    pub fn notes(&mut self, session: u64, about: Option<(u64, u64)>, truth: u64, what: What) {
        let at = self.clock(truth);
        let (peer, attempt) = (about.map(|about| about.0), about.map(|about| about.1));
        let of = self.record.sessions.iter_mut().find(|one| one.session == session).unwrap();
        of.notes.push(Note { at, peer, attempt, what });
    }

    /// An event of no session.
    pub fn other(&mut self, peer: Option<u64>, truth: u64, what: What) {
        let at = self.clock(truth);
        self.record.others.push(Note { at, peer, attempt: None, what });
    }
}

/// Two workers that know each other as peer 1, the sender first.
pub fn pair(ahead: [i64; 2]) -> [Made; 2] {
    let (mut sender, mut receiver) =
        (Made::new("prefill", 0, 11, ahead[0]), Made::new("decode", 0, 22, ahead[1]));
    sender.meets(1, &receiver);
    receiver.meets(1, &sender);
    [sender, receiver]
}

/// A push from the first worker to the second, with the delays of messages there and back. Returns the true end.
pub fn push(pair: &mut [Made; 2], room: &Room, number: u64, from: u64, [there, back]: [u64; 2]) -> u64 {
    let [sender, receiver] = pair;
    let about = Some((1, number));
    receiver.opens(number, room, Side::Receiver, from);
    sender.opens(number, room, Side::Sender, from + MS);
    let register = || Message::Register { room: room.clone(), pages: 2 };
    let said = from + 2 * MS;
    receiver.notes(number, about, said, What::Said(register()));
    let heard = said + back;
    sender.notes(number, about, heard, What::Heard(register()));
    sender.notes(number, about, heard + MS, What::Transferring);
    let post = What::PostStarted { post: number, write: true, bytes: 8192, descriptors: 2 };
    sender.notes(number, about, heard + MS, post);
    let done = heard + 3 * MS;
    let post = What::PostEnded { post: number, bytes: 8192, took: 2 * MS, error: None };
    sender.notes(number, about, done, post);
    // The transport says that the bytes are in place; the clocks are compared by the answers to heartbeats.
    receiver.notes(number, about, done + there, What::Heard(Message::InPlace { parts: 1, total: Some(1) }));
    let answer = || Message::HeartbeatAnswered { number, leases: 0, lease: 0, permission: 0 };
    sender.other(Some(1), done, What::Said(answer()));
    receiver.other(Some(1), done + there, What::Heard(answer()));
    sender.notes(number, None, done + MS, What::Ended);
    sender.notes(number, None, done + MS, What::Closed);
    receiver.notes(number, None, done + there, What::Ended);
    receiver.notes(number, None, done + there, What::Closed);
    done + there + MS
}

/// Random numbers from a seed that is printed; the variable `SEED` overrides it.
pub struct Random(u64);

impl Random {
    pub fn new(what: &str) -> Random {
        use std::hash::{BuildHasher, RandomState};
        let fresh = || RandomState::new().hash_one(0);
        let seed = std::env::var("SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(fresh);
        println!("{what}: SEED={seed}");
        Random(seed)
    }

    /// Random numbers from this seed.
    pub fn from(seed: u64) -> Random {
        Random(seed)
    }

    /// A number from 0 to `below` - 1, by SplitMix64.
    pub fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ (bits >> 31)) % below
    }
}
