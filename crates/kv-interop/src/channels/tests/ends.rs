//! What the end of a connection says of the peer: of processes that are killed and stopped, and of sockets that
//! are closed.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;

use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_parent_process_death_signal, waitpid};

use super::*;
use crate::SideChannel;

const CHILD: &str = "KV_INTEROP_CHILD";
const MARK: &str = "listens at: ";
const DEAD: WayEnd = WayEnd::Dead { quiet_after: Duration::from_secs(2) };

/// The entry point of the other process. In the test's own process it does nothing.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let side_channel = SideChannel::bind("127.0.0.1:0").unwrap();
    side_channel.publish(0, 0, Bytes::from_static(b"payload"));
    let mut worker = Worker::listening(|_| ());
    println!("{MARK}{} {}", side_channel.local_addr(), worker.addr());
    std::io::stdout().flush().unwrap();
    thread::spawn(|| {
        let _ = std::io::stdin().read_line(&mut String::new());
        std::process::exit(0);
    });
    loop {
        worker.turn();
        worker.sleep(SOON);
    }
}

/// A process with a ROUTER and a PULL socket. It dies with its handle.
struct Process {
    child: Child,
    router: String,
    pull: String,
}

impl Process {
    fn start() -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "channels::tests::ends::child", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let line = lines.find(|line| line.contains(MARK)).expect("the other process listens");
        let addrs = line.split(MARK).nth(1).unwrap().split_once(' ').unwrap();
        Process { child, router: addrs.0.to_owned(), pull: addrs.1.to_owned() }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops the process, and returns when all its threads stand still.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let stopped = waitpid(Some(Pid::from_child(&self.child)), WaitOptions::UNTRACED).unwrap();
        assert!(stopped.is_some_and(|(_, status)| status.stopped()), "{stopped:?}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn question() -> Vec<Bytes> {
    vec![Bytes::from_static(b"\x93\xc4\x0cget_meta_msg\0\0")]
}

/// A worker with a way to both sockets of a process, both of which are open.
fn connected(process: &Process) -> (Worker, [PeerId; 2]) {
    let (mut worker, [request, push]) = (Worker::probing(), [PeerId(1), PeerId(2)]);
    worker.channels.request(request, &process.router).unwrap();
    worker.channels.push(push, &process.pull).unwrap();
    ask(&mut worker, request);
    worker.until("the handshake", |worker| {
        worker.channels.clients.iter().all(|(_, way)| way.deadline.is_none())
    });
    (worker, [request, push])
}

fn ask(worker: &mut Worker, peer: PeerId) {
    worker.channels.send(peer, Some(question())).unwrap();
    let Event::Answer { peer: from, parts } = worker.next() else { panic!("no answer") };
    assert_eq!((from, &parts[0][..]), (peer, &b"payload"[..]));
}

#[test]
fn the_death_of_a_silent_process_is_noticed_and_proven_on_both_kinds_of_ways() {
    for stopped in [false, true] {
        let mut process = Process::start();
        let (mut worker, peers) = connected(&process);
        if stopped {
            process.stop();
        }
        process.child.kill().unwrap();
        let mut gone = [worker.next(), worker.next()];
        gone.sort_by_key(|event| matches!(event, Event::Gone { peer, .. } if *peer == peers[1]));
        assert_eq!(gone, peers.map(|peer| Event::Gone { peer, end: DEAD }));
        process.child.wait().unwrap();

        // The ids can be used again. A first connection that is refused proves nothing of a socket that nobody may
        // have bound yet, and the same as a connection that ends of a socket that was bound.
        worker.channels.request(peers[0], &process.router).unwrap();
        assert_eq!(worker.next(), Event::Gone { peer: peers[0], end: WayEnd::Lost });
        worker.channels.push(peers[1], &process.pull).unwrap();
        assert_eq!(worker.next(), Event::Gone { peer: peers[1], end: DEAD });
    }
}

#[test]
fn a_process_that_is_stopped_is_not_gone_and_answers_when_it_continues() {
    let process = Process::start();
    let (mut worker, [request, _]) = connected(&process);
    process.stop();
    worker.channels.send(request, Some(question())).unwrap();
    let stopped = Instant::now();
    while stopped.elapsed() < Duration::from_millis(700) {
        worker.sleep(Duration::from_millis(10));
        worker.turn();
    }
    assert_eq!(worker.events, []);
    process.signal(Signal::CONT);
    let Event::Answer { .. } = worker.next() else { panic!("no answer") };
    ask(&mut worker, request);
}

/// What a ROUTER socket of libzmq sends first.
fn opening() -> Vec<u8> {
    let ready = b"\x04\x29\x05READY\x0bSocket-Type\0\0\0\x06ROUTER\x08Identity\0\0\0\0";
    [&crate::zmtp::Session::opening()[..], ready].concat()
}

/// Accepts a connection, and plays a ROUTER socket until the other side is ready.
fn accept(listener: &TcpListener) -> TcpStream {
    let (mut stream, _) = listener.accept().unwrap();
    stream.write_all(&opening()).unwrap();
    // Greeting and READY.
    stream.read_exact(&mut [0; 64 + 40]).unwrap();
    stream
}

/// A worker with an open way to a listener of this process.
fn talking(mut worker: Worker) -> (Worker, TcpListener, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    worker.channels.request(PEER, &addr).unwrap();
    let accepting = thread::spawn(move || {
        let stream = accept(&listener);
        (listener, stream)
    });
    worker.until("the handshake", |worker| {
        worker.channels.clients.iter().all(|(_, way)| way.deadline.is_none())
    });
    let (listener, stream) = accepting.join().unwrap();
    (worker, listener, stream)
}

#[test]
fn a_peer_that_only_closes_the_connection_is_lost_and_not_dead() {
    // The system accepts for a process that does nothing; a living one greets, which is known at once.
    for greets in [false, true] {
        // Only the greeting can end the tries of a worker that tries for so long.
        let worker = if greets { Worker::probing() } else { Worker::quiet() };
        let (mut worker, listener, stream) = talking(worker);
        drop(stream);
        let closed = Instant::now();
        let greeting = greets.then(|| {
            let listener = listener.try_clone().unwrap();
            thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(&opening()).unwrap();
                stream
            })
        });
        assert_eq!(worker.next(), Event::Gone { peer: PEER, end: WayEnd::Lost });
        assert!(greets || closed.elapsed() >= worker.channels.config.probing, "{:?}", closed.elapsed());
        greeting.map(|greeting| greeting.join().unwrap());
    }
}

#[test]
fn a_peer_that_listens_again_between_two_tries_is_not_dead() {
    let (mut worker, listener, stream) = talking(Worker::quiet());
    let addr = listener.local_addr().unwrap();
    drop((listener, stream));
    let refused = |worker: &Worker| worker.channels.clients.iter().any(|(_, way)| way.refusals() == Some(1));
    worker.until("the port refuses", refused);
    let successor = TcpListener::bind(addr).unwrap();
    assert_eq!(worker.next(), Event::Gone { peer: PEER, end: WayEnd::Lost });
    drop(successor);
}

#[test]
fn a_port_that_still_accepts_while_its_process_is_taken_apart_is_tried_again() {
    let (mut worker, listener, stream) = talking(Worker::probing());
    let ending = thread::spawn(move || {
        drop(stream);
        for _ in 0..3 {
            drop(listener.accept().unwrap());
        }
    });
    assert_eq!(worker.next(), Event::Gone { peer: PEER, end: DEAD });
    ending.join().unwrap();
}

#[test]
fn a_peer_that_breaks_the_protocol_is_lost_at_once_and_counted() {
    let (mut worker, _listener, mut stream) = talking(Worker::quiet());
    stream.write_all(b"\x02\xff\xff\xff\xff\xff\xff\xff\xff").unwrap();
    assert_eq!(worker.next(), Event::Gone { peer: PEER, end: WayEnd::Lost });
    assert_eq!(worker.channels.counts().gauges().violated, 1);
    // So is another kind of socket: a PUSH socket finds a ROUTER.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    worker.channels.push(PEER, &listener.local_addr().unwrap().to_string()).unwrap();
    let other = thread::spawn(move || listener.accept().unwrap().0.write_all(&opening()).unwrap());
    assert_eq!(worker.next(), Event::Gone { peer: PEER, end: WayEnd::Lost });
    assert_eq!(worker.channels.counts().gauges().violated, 2);
    other.join().unwrap();
}

#[test]
fn names_are_resolved_beside_the_worker_and_addresses_of_another_form_refused() {
    let process = Process::start();
    let mut worker = Worker::quiet();
    let port = process.router.rsplit_once(':').unwrap().1;
    worker.channels.request(PEER, &format!("localhost:{port}")).unwrap();
    ask(&mut worker, PEER);
    worker.channels.push(PeerId(9), "no-such-host.invalid:1").unwrap();
    assert_eq!(worker.next(), Event::Gone { peer: PeerId(9), end: WayEnd::Lost });
    for addr in ["tcp://127.0.0.1:1", "127.0.0.1", "127.0.0.1:0", ""] {
        let error = worker.channels.request(PeerId(9), addr).unwrap_err();
        assert_eq!(error, TransportError::Foreign(format!("the address is {addr:?}; it must be host:port")));
    }
}

#[test]
fn a_way_is_given_up_that_connects_or_shakes_hands_too_slowly() {
    let limit = Duration::from_millis(50);
    let slow = ChannelConfig { handshake_timeout: limit, ..ChannelConfig::default() };
    let mut worker = Worker::new(slow);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    worker.channels.push(PEER, &silent.local_addr().unwrap().to_string()).unwrap();
    let begun = Instant::now();
    assert_eq!(worker.next(), Event::Gone { peer: PEER, end: WayEnd::Lost });
    assert!(begun.elapsed() >= limit, "{:?}", begun.elapsed());
    // What waits for a peer is bounded.
    worker.channels.push(PEER, &silent.local_addr().unwrap().to_string()).unwrap();
    let sent = (0..100)
        .take_while(|_| worker.channels.send(PEER, Some(vec![Bytes::from(vec![0; 1 << 20])])).is_ok());
    assert_eq!(sent.count(), 3, "of the four MiB that may wait, with what each message counts beside");
    let more = worker.channels.send(PEER, Some(vec![Bytes::from(vec![0; 1 << 20])]));
    assert_eq!(more, Err(TransportError::WouldBlock));
    // A peer that is left with something unsent is forgotten after a while.
    worker.channels.disconnect(PEER);
    assert_eq!((worker.channels.has(PEER), worker.channels.clients.len()), (false, 1));
    worker.until("the rest is given up", |worker| worker.channels.clients.is_empty());
    assert_eq!((worker.events.len(), worker.channels.timers.len()), (0, 0));
}
