//! Peers that connect to a listening socket, and do not behave.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use super::*;
use crate::SideChannel;
use crate::zmtp::{Heard, Session, write_message};

fn connect(addr: &str) -> TcpStream {
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

/// A connection that plays a socket of this type, and is ready.
pub(super) fn ready(addr: &str, socket_type: &str) -> TcpStream {
    let mut stream = connect(addr);
    let mut command = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    command.push(socket_type.len() as u8);
    command.extend(socket_type.as_bytes());
    let opening = [&crate::zmtp::Session::opening()[..], &[4, command.len() as u8], &command].concat();
    stream.write_all(&opening).unwrap();
    stream
}

/// True once the other side has closed the connection.
pub(super) fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    loop {
        match stream.read(&mut [0; 4096]) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != ErrorKind::WouldBlock,
        }
    }
}

pub(super) fn server(worker: &Worker) -> &Server {
    worker.channels.server.as_ref().unwrap()
}

fn refused(worker: &Worker) -> u64 {
    worker.channels.counts().gauges().refused
}

#[test]
fn idle_connections_hold_no_places_and_ready_ones_keep_theirs() {
    let mut worker = Worker::listening(|config| config.max_connections = 4);
    let addr = worker.addr();
    let mut idle: Vec<TcpStream> = (0..4)
        .map(|at| {
            let stream = connect(&addr);
            worker.until("it is accepted", |worker| server(worker).connections() == at + 1);
            stream
        })
        .collect();
    // Each one that is ready takes the place of the oldest one that is not.
    let mut pushers = Vec::new();
    for at in 0..4 {
        let mut stream = ready(&addr, "PUSH");
        stream.write_all(&write_message(&message(at)).concat()).unwrap();
        let Event::Message { parts, .. } = worker.next() else { panic!("no message") };
        assert_eq!(parts, message(at));
        assert_eq!(idle.iter_mut().map(is_closed).filter(|closed| *closed).count(), at + 1);
        assert!(is_closed(&mut idle[at]), "the oldest leaves first");
        pushers.push(stream);
    }
    assert_eq!(refused(&worker), 4);
    let mut late = ready(&addr, "PUSH");
    worker.until("it is refused", |worker| refused(worker) == 5);
    assert!(is_closed(&mut late));
    for (at, stream) in (10..).zip(&mut pushers) {
        stream.write_all(&write_message(&message(at)).concat()).unwrap();
        let Event::Message { parts, .. } = worker.next() else { panic!("no message") };
        assert_eq!(parts, message(at));
    }
}

#[test]
fn a_connection_that_does_not_shake_hands_is_closed_in_time() {
    // Long enough for a handshake on a busy machine.
    let limit = Duration::from_secs(2);
    let mut worker = Worker::listening(|config| config.handshake_timeout = limit);
    let (mut silent, mut half) = (connect(&worker.addr()), connect(&worker.addr()));
    let begun = Instant::now();
    half.write_all(&crate::zmtp::Session::opening()[..40]).unwrap();
    let mut done = ready(&worker.addr(), "PUSH");
    worker.until("both are closed", |worker| refused(worker) == 2);
    assert!(begun.elapsed() >= limit, "{:?}", begun.elapsed());
    assert_eq!([&mut silent, &mut half, &mut done].map(is_closed), [true, true, false]);
    assert_eq!(server(&worker).connections(), 1);
}

#[test]
fn connections_that_come_and_go_behind_an_idle_one_leave_nothing_behind() {
    let mut worker = Worker::listening(|config| config.max_connections = 4);
    let addr = worker.addr();
    let _idle = connect(&addr);
    worker.until("it is accepted", |worker| server(worker).connections() == 1);
    for _ in 0..100 {
        drop(connect(&addr));
        worker.until("it is gone", |worker| server(worker).connections() == 1);
        worker.turn();
        assert!(server(&worker).shaking() <= 10, "{}", server(&worker).shaking());
    }
}

#[test]
fn unfinished_messages_take_what_has_come_and_the_greediest_leaves_when_all_take_too_much() {
    let mut worker = Worker::listening(|config| config.max_buffered = 100_000);
    let addr = worker.addr();
    let announce = |len: u64| [&[2][..], &len.to_be_bytes()].concat();
    // What is announced takes nothing; what is too long is refused.
    let mut streams: Vec<TcpStream> = (0..50).map(|_| ready(&addr, "PUSH")).collect();
    for stream in &mut streams {
        stream.write_all(&announce(MAX_MESSAGE as u64)).unwrap();
        stream.write_all(b"x").unwrap();
    }
    worker.until("a byte of each has come", |worker| server(worker).buffered() == 50);
    let mut long = ready(&addr, "PUSH");
    long.write_all(&announce(MAX_MESSAGE as u64 + 1)).unwrap();
    worker.until("it is refused", |worker| worker.channels.counts().gauges().violated == 1);
    assert!(is_closed(&mut long));

    let (mut greedy, mut modest) = (ready(&addr, "PUSH"), ready(&addr, "PUSH"));
    let parts = vec![Bytes::from(vec![1; 40_000])];
    let bytes = write_message(&parts).concat();
    modest.write_all(&bytes[..30_000]).unwrap();
    greedy.write_all(&announce(MAX_MESSAGE as u64)).unwrap();
    greedy.write_all(&vec![0; 60_000]).unwrap();
    worker.until("both have come", |worker| server(worker).buffered() > 89_000);
    assert_eq!(refused(&worker), 0);
    greedy.write_all(&vec![0; 20_000]).unwrap();
    worker.until("one leaves", |worker| refused(worker) == 1);
    assert!(is_closed(&mut greedy) && server(&worker).buffered() < 31_000);
    modest.write_all(&bytes[30_000..]).unwrap();
    let Event::Message { parts: came, .. } = worker.next() else { panic!("no message") };
    assert_eq!(came, parts);
    drop((streams, modest));
    worker.until("all are gone", |worker| server(worker).connections() == 0);
    assert_eq!(server(&worker).buffered(), 0);
}

#[test]
fn a_message_that_trickles_in_byte_by_byte_arrives_and_pings_are_answered() {
    let mut worker = Worker::listening(|_| ());
    let mut stream = ready(&worker.addr(), "PUSH");
    for byte in write_message(&message(3)).concat().into_iter().take(2000) {
        stream.write_all(&[byte]).unwrap();
        worker.turn();
    }
    stream.write_all(&write_message(&message(3)).concat()[2000..]).unwrap();
    let Event::Message { parts, .. } = worker.next() else { panic!("no message") };
    assert_eq!(parts, message(3));
    // Greeting and READY, and then the answer.
    stream.write_all(b"\x04\x0a\x04PING\0\x0aabc").unwrap();
    let answer = b"\x04\x08\x04PONGabc";
    let mut came = vec![0; 64 + 41 + answer.len()];
    let reader = std::thread::spawn(move || {
        stream.read_exact(&mut came).unwrap();
        came
    });
    worker.until("the answer is read", |_| reader.is_finished());
    let came = reader.join().unwrap();
    assert!(came.ends_with(answer), "{came:?}");
}

#[test]
fn a_peer_that_asks_and_never_reads_is_not_answered_without_end() {
    const ASKED: u64 = 200;
    let side_channel = SideChannel::bind("127.0.0.1:0").unwrap();
    side_channel.publish(0, 0, Bytes::from(vec![7; 1_000_000]));
    let addr = side_channel.local_addr().to_string();
    let question =
        write_message(&[Bytes::new(), Bytes::from_static(b"\x93\xc4\x0cget_meta_msg\0\0")]).concat();
    let mut greedy = ready(&addr, "DEALER");
    greedy.write_all(&question.repeat(ASKED as usize)).unwrap();
    let deadline = Instant::now() + SOON;
    while side_channel.gauges().answered + side_channel.gauges().refused < ASKED {
        assert!(Instant::now() < deadline, "{:?}", side_channel.gauges());
        std::thread::yield_now();
    }
    // Four wait here, and the system takes some.
    let gauges = side_channel.gauges();
    assert!(gauges.answered < ASKED / 2, "{gauges:?}");
    // Others are served meanwhile.
    let mut worker = Worker::quiet();
    worker.channels.request(PEER, &addr).unwrap();
    worker.channels.send(PEER, Some(vec![Bytes::from_static(b"\x93\xc4\x0cget_meta_msg\0\0")])).unwrap();
    let Event::Answer { parts, .. } = worker.next() else { panic!("no answer") };
    assert_eq!(parts[0].len(), 1_000_000);
}

#[test]
fn a_side_channel_answers_behind_an_empty_part_what_came_behind_one_empty_part() {
    let side_channel = SideChannel::bind("127.0.0.1:0").unwrap();
    side_channel.publish(0, 0, Bytes::from_static(b"payload"));
    let (none, question) = (Bytes::new(), Bytes::from_static(b"\x93\xc4\x0cget_meta_msg\0\0"));
    let mut asker = ready(&side_channel.local_addr().to_string(), "DEALER");
    let malformed = [
        vec![question.clone()],
        vec![question.clone(), question.clone()],
        vec![none.clone(), question.clone(), none.clone()],
        vec![none.clone(), none.clone(), question.clone()],
    ];
    for parts in malformed.iter().chain([&vec![none.clone(), question]]) {
        asker.write_all(&write_message(parts).concat()).unwrap();
    }
    let (mut session, mut bytes) = (Session::new(SocketType::Req, MAX_MESSAGE), [0; 4096]);
    let parts = loop {
        let came = asker.read(&mut bytes).unwrap();
        assert!(came > 0, "the connection stays");
        let mut left = &bytes[..came];
        if let Some(Heard::Message(parts)) = std::iter::from_fn(|| session.take(&mut left).unwrap()).last() {
            break parts;
        }
    };
    assert_eq!((parts.len(), &parts[0], &parts[1][..]), (3, &none, &b"payload"[..]));
    let gauges = side_channel.gauges();
    assert_eq!((gauges.answered, gauges.malformed), (1, malformed.len() as u64));
}
