//! Our sockets against those of the crate `zeromq`, which is no code of this project.

use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};

use zeromq::{PullSocket, PushSocket, ReqSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::*;
use crate::SideChannel;

const MESSAGES: usize = 500;

/// Runs the other side on a thread of its own.
fn other<T: Send + 'static>(run: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    thread::spawn(move || runtime.block_on(run))
}

fn theirs(parts: Vec<Bytes>) -> ZmqMessage {
    ZmqMessage::try_from(parts).unwrap()
}

#[test]
fn five_hundred_questions_get_their_answers_from_a_router() {
    let (tell, addr) = channel();
    let router = other(async move {
        let mut socket = RouterSocket::new();
        tell.send(socket.bind("tcp://127.0.0.1:0").await.unwrap().to_string()).unwrap();
        for number in 0..MESSAGES {
            let mut parts = socket.recv().await.unwrap().into_vec();
            assert!(parts[1].is_empty() && parts[2..] == message(number), "question {number}");
            parts.truncate(2);
            parts.extend(message(number + 1));
            socket.send(theirs(parts)).await.unwrap();
        }
        // The socket stays until the last answer has been read.
        socket
    });
    let mut worker = Worker::quiet();
    let addr = addr.recv().unwrap().trim_start_matches("tcp://").to_owned();
    worker.channels.request(PEER, &addr).unwrap();
    // All at once: each is sent when the one before is answered.
    let mut sent = 0;
    for number in 0..MESSAGES {
        while sent < MESSAGES && worker.channels.send(PEER, Some(message(sent))).is_ok() {
            sent += 1;
        }
        assert!(sent > number.min(MESSAGES - 1));
        assert_eq!(worker.next(), Event::Answer { peer: PEER, parts: message(number + 1) });
    }
    drop(router.join().unwrap());
    assert_eq!(worker.channels.counts().gauges().dropped, 0);
}

#[test]
fn five_hundred_pushed_messages_arrive_at_a_pull_socket_of_others_in_order() {
    let (tell, addr) = channel();
    let pull = other(async move {
        let mut socket = PullSocket::new();
        tell.send(socket.bind("tcp://127.0.0.1:0").await.unwrap().to_string()).unwrap();
        for number in 0..MESSAGES {
            assert_eq!(socket.recv().await.unwrap().into_vec(), message(number), "message {number}");
        }
    });
    let mut worker = Worker::quiet();
    let addr = addr.recv().unwrap().trim_start_matches("tcp://").to_owned();
    worker.channels.push(PEER, &addr).unwrap();
    for number in 0..MESSAGES {
        // What is sent before the connection is there waits.
        while worker.channels.send(PEER, Some(message(number))) == Err(TransportError::WouldBlock) {
            worker.sleep(SOON);
            worker.turn();
        }
    }
    // What was sent before still goes out.
    worker.channels.disconnect(PEER);
    worker.until("all is sent", |worker| worker.channels.clients.is_empty());
    pull.join().unwrap();
    assert_eq!(worker.events, []);
}

#[test]
fn five_hundred_messages_of_two_push_sockets_of_others_arrive_in_their_order() {
    let mut worker = Worker::listening(|_| ());
    let addr = format!("tcp://{}", worker.addr());
    let pushers = [0, 1].map(|half| {
        let addr = addr.clone();
        other(async move {
            let mut socket = PushSocket::new();
            socket.connect(&addr).await.unwrap();
            for number in (half..MESSAGES).step_by(2) {
                socket.send(theirs(message(number))).await.unwrap();
            }
            socket
        })
    });
    let mut expected = BTreeMap::new();
    for _ in 0..MESSAGES {
        let Event::Message { connection, parts } = worker.next() else { panic!("another event") };
        // The connection that sends the even ones is known by its first message.
        let next = expected.entry(connection).or_insert(if parts == message(0) { 0 } else { 1 });
        assert_eq!(parts, message(*next), "message {next} of connection {connection}");
        *next += 2;
    }
    assert_eq!(expected.into_values().collect::<BTreeSet<_>>(), [MESSAGES, MESSAGES + 1].into());
    let sockets = pushers.map(|pusher| pusher.join().unwrap());
    assert_eq!(worker.channels.counts().gauges().messages, MESSAGES as u64);
    drop(sockets);
    worker.until("both are gone", |worker| worker.channels.server.as_ref().unwrap().connections() == 0);
}

#[test]
fn the_side_channel_answers_req_sockets_of_others_and_of_ours_with_payload_and_clock() {
    let side_channel = SideChannel::bind("127.0.0.1:0").unwrap();
    let payload = |tp: u32| Bytes::from(vec![tp as u8; 100_000]);
    (0..2).for_each(|tp| side_channel.clone().publish(0, tp, payload(tp)));
    let question =
        |tp: u32| Bytes::from(rmp_serde::to_vec(&(Bytes::from_static(b"get_meta_msg"), 0, tp)).unwrap());
    let before = SideChannel::seconds(kv_host::clock::now());
    let addr = format!("tcp://{}", side_channel.local_addr());
    let answers = other(async move {
        let mut socket = ReqSocket::new();
        socket.connect(&addr).await.unwrap();
        let mut answers = Vec::new();
        for number in 0..50 {
            socket.send(theirs(vec![question(number % 2)])).await.unwrap();
            answers.push(socket.recv().await.unwrap().into_vec());
        }
        answers
    });
    let answers = answers.join().unwrap();
    let after = SideChannel::seconds(kv_host::clock::now());
    for (tp, answer) in (0..).zip(&answers) {
        let [first, clock] = &answer[..] else { panic!("{} parts", answer.len()) };
        assert_eq!(*first, payload(tp % 2));
        let clock: f64 = rmp_serde::from_slice(clock).unwrap();
        assert!((before..=after).contains(&clock), "{before} {clock} {after}");
    }

    let mut worker = Worker::quiet();
    worker.channels.request(PEER, &side_channel.local_addr().to_string()).unwrap();
    let malformed = [&b"x"[..], b"", b"\x93\xc4\x0cget_meta_msG\0\0", b"\x93\xc4\x0cget_meta_msg\0\0\0"];
    for (at, malformed) in (1..).zip(malformed) {
        worker.channels.send(PEER, Some(vec![Bytes::from_static(malformed)])).unwrap();
        worker.until("it is counted", |_| side_channel.gauges().malformed == at);
        // Without an answer, a REQ socket says nothing more: another one takes its place.
        worker.channels.disconnect(PEER);
        worker.channels.request(PEER, &side_channel.local_addr().to_string()).unwrap();
    }
    worker.channels.send(PEER, Some(vec![question(2)])).unwrap();
    worker.until("it is refused", |_| side_channel.gauges().refused == 1);
    side_channel.publish(0, 2, payload(2));
    worker.channels.disconnect(PEER);
    worker.channels.request(PEER, &side_channel.local_addr().to_string()).unwrap();
    worker.channels.send(PEER, Some(vec![question(2)])).unwrap();
    let Event::Answer { parts, .. } = worker.next() else { panic!("no answer") };
    assert_eq!((parts.len(), &parts[0]), (2, &payload(2)));
    assert_eq!(side_channel.gauges().answered, 51);

    // The last handle ends the server.
    drop(side_channel);
    assert_eq!(
        worker.next(),
        Event::Gone { peer: PEER, end: WayEnd::Dead { quiet_after: Duration::from_secs(2) } }
    );
}
