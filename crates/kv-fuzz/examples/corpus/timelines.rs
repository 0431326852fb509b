//! What two workers have recorded of a push that succeeds and a pull whose lease expires.

use kv_core::{EngineId, Incarnation, Phase, Room, WorkerId};
use kv_timeline::{Failure, Message, Note, PeerNote, Record, SessionNotes, Side, Text, What};

const MS: u64 = 1_000_000;

/// The records of both workers, one a line, and each record alone.
pub fn records() -> Vec<Vec<u8>> {
    let lines = [prefill(), decode()].map(|record| record.to_json().unwrap());
    let [first, second] = lines.clone().map(String::into_bytes);
    vec![lines.join("\n").into_bytes(), first, second]
}

fn id(engine: &str) -> WorkerId {
    WorkerId { engine: EngineId::new(engine).unwrap(), rank: 0 }
}

fn note(at: u64, what: What) -> Note {
    Note { at: at * MS, peer: Some(1), attempt: Some(1), what }
}

fn peer(worker: WorkerId, life: u64) -> PeerNote {
    PeerNote {
        peer: 1,
        worker,
        incarnation: Incarnation::from_random(life),
        transport: Some(Text::new("tcp")),
        hello_said: Some(MS),
        hello_heard: None,
        welcome_said: Some(2 * MS),
        welcome_heard: Some(3 * MS),
    }
}

fn opened(room: u64, side: Side) -> What {
    What::Opened { room: Room::Number(room), side }
}

fn register() -> Message {
    Message::Register { room: Room::Number(7), pages: 2 }
}

fn answer() -> Message {
    Message::HeartbeatAnswered { number: 1, leases: 1, lease: 30_000 * MS, permission: 0 }
}

fn prefill() -> Record {
    let mut record = Record::new(id("prefill"), Incarnation::from_random(11));
    record.peers = vec![peer(id("decode"), 22)];
    let push = vec![
        note(4, opened(7, Side::Sender)),
        note(5, What::ChunkGiven { chunk: 0, pages: 2 }),
        note(6, What::Heard(register())),
        note(6, What::Transferring),
        note(6, What::PostStarted { post: 1, write: true, bytes: 8192, descriptors: 2 }),
        note(9, What::PostEnded { post: 1, bytes: 8192, took: 3 * MS, error: None }),
        note(9, What::Ended),
        note(9, What::PagesBack { pages: 2 }),
        note(10, What::Closed),
    ];
    let pull = vec![
        note(5, opened(8, Side::Sender)),
        note(20, What::LeaseExpired),
        note(20, What::Failed(Box::new(failure("LeaseExpired")))),
        note(20, What::QuarantineBegan { pages: 2, items: 0, why: Text::new("a read may go on") }),
        note(25, What::QuarantineEnded { lasted: 5 * MS }),
    ];
    record.sessions =
        vec![SessionNotes { session: 0, notes: push }, SessionNotes { session: 1, notes: pull }];
    record.others = vec![
        note(3, What::PeerMet { worker: id("decode"), incarnation: Incarnation::from_random(22) }),
        note(12, What::Said(answer())),
        note(30, What::PeerSilent { silent_for: 18 * MS }),
        note(40, What::PeerDead),
    ];
    record.lost.sessions = 3;
    record
}

fn decode() -> Record {
    let mut record = Record::new(id("decode"), Incarnation::from_random(22));
    record.peers = vec![peer(id("prefill"), 11)];
    let push = vec![
        note(1004, opened(7, Side::Receiver)),
        note(1004, What::Asked { again: false }),
        note(1005, What::Answered { ranks: 1 }),
        note(1005, What::PagesGiven { pages: 2 }),
        note(1006, What::Said(register())),
        note(1009, What::Heard(Message::InPlace { parts: 1, total: Some(1) })),
        note(1009, What::Ended),
    ];
    let pull = vec![
        note(1006, opened(8, Side::Receiver)),
        note(1007, What::Said(Message::Acquire { room: Room::Number(8) })),
        note(1008, What::Heard(Message::Granted { pages: 2, lease: 10 * MS })),
        note(1022, What::Heard(Message::Failed { why: Text::new("the lease has expired"), quiet: true })),
        note(1022, What::Failed(Box::new(failure("PeerFailed")))),
    ];
    record.sessions =
        vec![SessionNotes { session: 5, notes: push }, SessionNotes { session: 6, notes: pull }];
    record.others = vec![
        note(1011, What::Said(Message::Heartbeat { number: 1, leases: 1, asked: 0, writes: false })),
        note(1012, What::Heard(answer())),
    ];
    record
}

fn failure(name: &str) -> Failure {
    Failure {
        phase: Phase::Transfer,
        peer: Some(id("decode")),
        name: Text::new(name),
        why: Text::new("the lease on the sender's pages has expired"),
        advice: Text::new("send the request again"),
    }
}
