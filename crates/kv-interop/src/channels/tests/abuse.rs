//! Peers that send as much, as slowly and as wrongly as they can, beside one that behaves.

use std::io::Write;
use std::net::TcpStream;
use std::thread::JoinHandle;

use super::hostile::{is_closed, ready, server};
use super::*;
use crate::vllm::side_channel::{SideChannel, SideChannelGauges};
use crate::zmtp::write_message;

/// How many messages without any bytes one peer sends.
const TINY: usize = 100_000;
/// How many of them a peer sends beside one that must be heard: several turns take what one turn may read.
const FLOOD: usize = 800_000;
/// What a peer announces: 100 MB.
const ANNOUNCED: u64 = 100_000_000;
const QUESTION: &[u8] = b"\x93\xc4\x0cget_meta_msg\0\0";

/// The beginning of a frame of 100 MB.
fn announcement() -> Vec<u8> {
    [&[2][..], &ANNOUNCED.to_be_bytes()].concat()
}

/// Peers that are closed for what they send: a message of 100 MB, and one of 100 000 parts.
fn greedy(addr: &str, socket_type: &str) -> [TcpStream; 2] {
    [[announcement(), vec![7; 1000]].concat(), b"\x01\0".repeat(TINY)].map(|bytes| {
        let mut stream = ready(addr, socket_type);
        // The other side may have closed the connection meanwhile.
        let _ = stream.write_all(&bytes);
        stream
    })
}

/// A peer that sends this many messages of one empty part. The stream comes back once all are sent.
fn flood(addr: &str, socket_type: &str, messages: usize) -> JoinHandle<TcpStream> {
    let mut stream = ready(addr, socket_type);
    std::thread::spawn(move || {
        stream.write_all(&b"\0\0".repeat(messages)).unwrap();
        stream
    })
}

/// Peers that have sent half of a frame, and send no more.
fn halves(addr: &str, socket_type: &str) -> Vec<TcpStream> {
    let half = |bytes: &[u8]| {
        let mut stream = ready(addr, socket_type);
        stream.write_all(bytes).unwrap();
        stream
    };
    [&b"\0"[..], b"\0\x14abc", b"\x02\0\0\0", b"\x01\0\x01"].into_iter().map(half).collect()
}

#[test]
fn a_side_channel_refuses_floods_and_nonsense_and_answers_the_peer_beside_them() {
    let side_channel = SideChannel::bind("127.0.0.1:0").unwrap();
    side_channel.publish(0, 0, Bytes::from_static(b"payload"));
    let addr = side_channel.local_addr().to_string();
    let (mut greedy, halves) = (greedy(&addr, "DEALER"), halves(&addr, "DEALER"));
    let flood = flood(&addr, "DEALER", TINY);
    // Wrong numbers of parts, and msgpack that is as deep as it is long or announces four thousand million elements.
    let (none, question) = (Bytes::new(), Bytes::from_static(QUESTION));
    let nonsense = [
        vec![none.clone()],
        vec![question.clone()],
        vec![none.clone(), question.clone(), question.clone()],
        vec![question.clone(), none.clone()],
        vec![none.clone(); 60],
        vec![none.clone(), Bytes::from(vec![0x91; 4000])],
        vec![none.clone(), Bytes::from(vec![0x81; 4000])],
        vec![none.clone(), Bytes::from_static(b"\xdd\xff\xff\xff\xff")],
        vec![none.clone(), Bytes::from_static(b"\x93\xc6\xff\xff\xff\xff")],
        vec![none, Bytes::from_static(b"\x93\xc4\x0cget_meta_msg\0\0\0")],
    ];
    let mut wrong = ready(&addr, "DEALER");
    nonsense.iter().for_each(|parts| wrong.write_all(&write_message(parts).concat()).unwrap());

    let mut worker = Worker::quiet();
    worker.channels.request(PEER, &addr).unwrap();
    for asked in 1..=3 {
        worker.channels.send(PEER, Some(vec![question.clone()])).unwrap();
        let Event::Answer { parts, .. } = worker.next() else { panic!("no answer") };
        assert_eq!((parts.len(), &parts[0][..]), (2, &b"payload"[..]), "the answer to question {asked}");
    }
    let flood = flood.join().unwrap();
    let malformed = (TINY + nonsense.len()) as u64;
    worker.until("all is counted", |_| side_channel.gauges().malformed >= malformed);
    worker.until("the greedy are closed", |_| greedy.iter_mut().all(is_closed));
    // The halves, the flood, the one with nonsense, and the one that behaves.
    let connections = halves.len() + 3;
    worker.until("the others stay", |_| side_channel.gauges().connections == connections);
    let expected = SideChannelGauges { answered: 3, refused: 0, malformed, connections };
    assert_eq!(side_channel.gauges(), expected);
    drop((flood, wrong, halves));
}

/// The next event. A turn is taken only after all events of the turn before, so that the sockets read no further ahead.
fn after_others(worker: &mut Worker) -> Event {
    worker.events.pop_front().unwrap_or_else(|| worker.next())
}

#[test]
fn a_pull_socket_holds_little_under_floods_and_hears_the_peer_beside_them() {
    let mut worker = Worker::listening(|_| ());
    let addr = worker.addr();
    let (mut greedy, halves) = (greedy(&addr, "PUSH"), halves(&addr, "PUSH"));
    let flood = flood(&addr, "PUSH", FLOOD);
    let mut healthy = ready(&addr, "PUSH");
    let (mut tiny, mut heard) = (0, 0);
    while tiny < FLOOD || heard < 5 {
        // The peer that behaves says something at all times of the flood.
        if tiny >= heard * FLOOD / 5 && heard < 5 {
            healthy.write_all(&write_message(&message(1 + heard)).concat()).unwrap();
            let before = tiny;
            loop {
                match after_others(&mut worker) {
                    Event::Message { parts, .. } if parts == [Bytes::new()] => tiny += 1,
                    Event::Message { parts, .. } => break assert_eq!(parts, message(1 + heard)),
                    other => panic!("{other:?}"),
                }
                assert!(tiny <= before + FLOOD / 2, "a message is not heard");
            }
            heard += 1;
        } else {
            assert!(
                matches!(after_others(&mut worker), Event::Message { parts, .. } if parts == [Bytes::new()])
            );
            tiny += 1;
        }
        assert!(server(&worker).buffered() < 1 << 20, "{} bytes", server(&worker).buffered());
    }
    assert_eq!((tiny, heard), (FLOOD, 5));
    worker.until("the greedy are closed", |_| greedy.iter_mut().all(is_closed));
    worker.until("the others stay", |worker| server(worker).connections() == halves.len() + 2);
    drop((flood.join().unwrap(), healthy, halves));
}
