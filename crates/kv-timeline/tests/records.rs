//! Recorders keep to their memory, and records that are read are checked.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use kv_core::trace::{Half, KvWhat, Log, Message, Who};
use kv_core::{Incarnation, PeerId, Room, SessionId, Time};
use kv_timeline::{MAX_RECORD, MAX_TEXT, Record, RecordError, Recorder, Text, Timeline, VERSION, What};
use support::{id, pair, push};

const LIFE: Incarnation = Incarnation::from_random(5);

/// Gives the recorder one event, as a worker would.
fn hear(recorder: &Recorder, at: u64, who: Who, what: KvWhat) {
    let mut log = Log::default();
    log.listen(true);
    log.tell(Time::from_nanos(at), who, || what);
    recorder.hear(&log.next().unwrap());
}

fn opened(room: Room) -> KvWhat {
    KvWhat::Opened { room, half: Half::Sender }
}

#[test]
fn a_full_recorder_drops_the_oldest_whole_sessions_and_counts_them() {
    const BOUND: usize = 256 << 10;
    let recorder = Recorder::with_bytes(&id("prefill", 0), BOUND);
    let long = "x".repeat(900);
    hear(&recorder, 0, SessionId(0).into(), opened(Room::Number(0)));
    let all = 3000u64;
    for session in 1..all {
        let room = Room::request(&format!("{session}-{long}")).unwrap();
        hear(&recorder, session, SessionId(session).into(), opened(room));
        for chunk in 0..4 {
            let given = KvWhat::ChunkGiven { chunk: kv_core::ChunkId(chunk), pages: 1 };
            hear(&recorder, session, SessionId(session).into(), given);
        }
        hear(&recorder, session, SessionId(session).into(), KvWhat::Closed);
        assert!(recorder.bytes() <= BOUND, "{} bytes after session {session}", recorder.bytes());
    }
    let record = recorder.record(LIFE);
    let kept: Vec<u64> = record.sessions.iter().map(|session| session.session).collect();
    let first = all - (kept.len() as u64 - 1);
    let latest: Vec<u64> = std::iter::once(0).chain(first..all).collect();
    assert_eq!(kept, latest, "the latest ones, and the one that is still open");
    assert!(record.sessions[1..].iter().all(|session| session.notes.len() == 6), "each is whole");
    assert_eq!(record.lost.sessions, all - kept.len() as u64);
    assert_eq!(record.lost.session_events, 6 * record.lost.sessions);
    assert!(kept.len() > 50, "{} sessions in {BOUND} bytes", kept.len());
}

#[test]
fn open_sessions_and_a_flood_of_peers_do_not_grow_a_recorder_either() {
    const BOUND: usize = 64 << 10;
    let recorder = Recorder::with_bytes(&id("prefill", 0), BOUND);
    for number in 0..5000 {
        hear(&recorder, number, SessionId(number).into(), opened(Room::Number(number)));
        let (worker, incarnation) = (id(&"e".repeat(500), 0), LIFE);
        hear(&recorder, number, PeerId(number).into(), KvWhat::PeerMet { worker, incarnation });
        hear(&recorder, number, PeerId(number).into(), KvWhat::Said(Message::Hello));
        assert!(recorder.bytes() <= BOUND);
    }
    // The rest of a session that is not kept any more is counted, and begins no half session.
    hear(&recorder, 9999, SessionId(0).into(), KvWhat::Closed);
    let record = recorder.record(LIFE);
    assert!(record.sessions.iter().all(|session| session.session > 4000 && session.notes.len() == 1));
    assert_eq!(record.lost.sessions + record.sessions.len() as u64, 5000);
    assert_eq!(record.lost.session_events, record.lost.sessions + 1);
    assert_eq!(record.lost.other_events + record.others.len() as u64, 10_000);
    assert_eq!(record.peers.len(), kv_timeline::MAX_PEERS);
    assert_eq!(record.peers.last().unwrap().hello_said, Some(4999));
}

#[test]
fn a_record_is_the_same_after_it_was_sent() {
    let mut made = pair([0, 0]);
    push(&mut made, &Room::request("a \"quoted\" </script> room").unwrap(), 3, 1000, [5, 6]);
    for made in made {
        let json = made.record.to_json().unwrap();
        assert!(!json.contains('\n'), "a record is one line");
        assert_eq!(Record::from_json(json.as_bytes()).unwrap(), made.record);
    }
}

#[test]
fn records_of_other_versions_and_broken_ones_are_refused_by_name() {
    // Nothing else is known of another version.
    let other = format!("{{\"version\":{},\"tracks\":[1,2]}}", VERSION + 1);
    let error = Record::from_json(other.as_bytes()).unwrap_err();
    let text = format!("version differs: the record has {}, this crate reads {VERSION}", VERSION + 1);
    assert!(matches!(error, RecordError::Version { .. }) && error.to_string() == text, "{error}");
    let json = Record::new(id("p", 0), LIFE).to_json().unwrap();
    for broken in ["", "{}", "[1]", "null", &json[..json.len() - 1], &json.replace("\"p\"", "\"\"")] {
        let error = Record::from_json(broken.as_bytes()).unwrap_err();
        assert!(matches!(error, RecordError::Malformed(_)), "{broken}: {error}");
    }
    let deep = format!("{{\"version\":1,\"worker\":{}", "[".repeat(1 << 20));
    assert!(matches!(Record::from_json(deep.as_bytes()), Err(RecordError::Malformed(_))));
    let long = vec![b' '; MAX_RECORD + 1];
    assert!(matches!(Record::from_json(&long), Err(RecordError::TooLong { .. })));
}

#[test]
fn every_record_that_can_be_read_can_be_joined_and_shown() {
    // Times at both ends of the clock, sessions without a beginning, peers that nobody has met.
    let mut made = pair([0, 0]);
    push(&mut made, &Room::Number(1), 1, 1000, [5, 6]);
    let [mut record, other] = made.map(|made| made.record);
    record.sessions[0].notes[1].at = u64::MAX;
    record.sessions[0].notes[2].at = 0;
    record.sessions.push(record.sessions[0].clone());
    record.sessions.push(kv_timeline::SessionNotes { session: 5, notes: Vec::new() });
    record
        .sessions
        .push(kv_timeline::SessionNotes { session: 6, notes: record.sessions[0].notes[1..].to_vec() });
    record.peers.push(record.peers[0].clone());
    record.others = record.sessions[0].notes.clone();
    record.others.iter_mut().for_each(|note| note.peer = Some(77));
    let timeline = Timeline::join(vec![record, other]).unwrap();
    assert_eq!(timeline.requests().len(), 1);
    assert!(timeline.html().unwrap().len() > 1000 && timeline.perfetto().unwrap().len() > 1000);
}

#[test]
fn long_texts_are_cut_where_they_are_made_and_where_they_are_read() {
    let text = Text::from("é".repeat(MAX_TEXT));
    assert_eq!(text.as_str().len(), MAX_TEXT);
    let json = format!("{{\"t\":1,\"e\":{{\"not_answered\":{{\"why\":\"{}\"}}}}}}", "y".repeat(9000));
    let note: kv_timeline::Note = serde_json::from_str(&json).unwrap();
    let What::NotAnswered { why } = note.what else { panic!("{note:?}") };
    assert_eq!(why.as_str().len(), MAX_TEXT);
}

#[test]
fn the_latest_of_a_recorder_are_open_sessions_and_then_the_newest() {
    let recorder = Recorder::new(&id("prefill", 0));
    for number in 0..50u64 {
        let at = number * 10;
        hear(&recorder, at, PeerId(1).into(), KvWhat::PeerBack);
        hear(&recorder, at + 1, SessionId(number).into(), opened(Room::Number(number)));
        if number != 7 {
            hear(&recorder, at + 2, SessionId(number).into(), KvWhat::Closed);
        }
    }
    let numbers = |count| -> Vec<u64> {
        recorder.latest(LIFE, count).sessions.iter().map(|session| session.session).collect()
    };
    assert_eq!(numbers(4), [7, 47, 48, 49]);
    assert_eq!(numbers(1), [7]);
    assert!(numbers(0).is_empty());
    let record = recorder.latest(LIFE, 4);
    assert_eq!((record.lost.sessions, record.lost.session_events), (46, 92));
    // What happened before the first of them is left out, and counted.
    assert_eq!((record.others.first().map(|note| note.at), record.lost.other_events), (Some(80), 8));
    assert_eq!(recorder.latest(LIFE, usize::MAX), recorder.record(LIFE));
}

#[test]
fn the_records_of_one_process_are_lines() {
    let [first, second] = pair([0, 0]).map(|made| made.record);
    let lines = format!("{}\n{}\n", first.to_json().unwrap(), second.to_json().unwrap());
    assert_eq!(Record::from_lines(lines.as_bytes(), 8).unwrap(), [first.clone(), second]);
    assert_eq!(Record::from_lines(lines.as_bytes(), 1).unwrap(), [first]);
    assert!(matches!(Record::from_lines(b"{}\n", 8), Err(RecordError::Malformed(_))));
}
