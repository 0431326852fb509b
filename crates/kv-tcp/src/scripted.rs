//! A peer that answers as a test likes, and a transport that has connected it.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use kv_core::{
    Descriptor, Op, PeerId, Post, PostId, Region, RegionRole, Time, Transport, TransportError, TransportEvent,
};
use kv_host::{Arena, Token, clock};

use crate::config::TcpConfig;
use crate::hello::{HELLO, Hello, Welcome};
use crate::message::{Asked, Reply, Request, Verdict};
use crate::metadata::{Identity, Metadata};
use crate::transport::TcpTransport;
use crate::way::Stage;

pub(crate) const LEN: u64 = 1 << 20;

/// A peer that answers as the test likes: what it says it is, and its connection once a transport has dialed.
pub(crate) struct Peer {
    pub(crate) metadata: Metadata,
    pub(crate) listener: TcpListener,
    pub(crate) stream: Option<TcpStream>,
    pub(crate) got: BytesMut,
    /// By how much its clock is ahead of this host's.
    pub(crate) ahead: Duration,
    /// What it says in place of the truth when it welcomes a transport.
    pub(crate) welcomes: fn(Welcome) -> Welcome,
}

impl Peer {
    pub(crate) fn new() -> Peer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let addresses = vec![listener.local_addr().unwrap()];
        let metadata =
            Metadata { token: Token::random().unwrap(), addresses, regions: vec![LEN], tls: false };
        let (got, ahead) = (BytesMut::new(), Duration::ZERO);
        Peer { metadata, listener, stream: None, got, ahead, welcomes: |welcome| welcome }
    }

    /// The next slice to read that the transport asks for, if one has come.
    pub(crate) fn next(&mut self) -> Option<Asked> {
        self.next_request().map(|request| match request {
            Request::Read(asked) => asked,
            other => panic!("{other:?}"),
        })
    }

    /// What the transport asks for next, if it has come.
    pub(crate) fn next_request(&mut self) -> Option<Request> {
        self.fill();
        Request::next(&mut self.got, |_| Some(LEN)).unwrap()
    }

    pub(crate) fn clock(&self) -> Time {
        clock::now() + self.ahead
    }

    /// Takes what has come, and answers the hello.
    pub(crate) fn fill(&mut self) {
        let now = self.clock();
        let Some(stream) = &mut self.stream else {
            let Ok((stream, _)) = self.listener.accept() else { return };
            stream.set_nonblocking(true).unwrap();
            self.stream = Some(stream);
            return;
        };
        let mut bytes = [0; 4096];
        match stream.read(&mut bytes) {
            Ok(count) => self.got.extend_from_slice(&bytes[..count]),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        if let Some(hello) = self.got.first_chunk::<HELLO>().and_then(Hello::decode) {
            let from = Identity::of(self.metadata.token, &self.metadata.encode().unwrap());
            let welcome = (self.welcomes)(Welcome { from, way: hello.way, clock: now });
            stream.write_all(&welcome.encode()).unwrap();
            let _ = self.got.split_to(HELLO);
        }
    }

    pub(crate) fn answer(&mut self, number: u32, verdict: Verdict) {
        let answer = Reply::Answer { number, verdict, clock: self.clock() };
        self.stream.as_mut().unwrap().write_all(&answer.encode()).unwrap();
    }
}

/// A transport with one connection to the peer and a region of [`LEN`] bytes, which asks for all bytes of the
/// peer's region in so many posts.
pub(crate) fn reader(peer: &Peer, posts: u64) -> (TcpTransport, Arena) {
    reader_with(peer, posts, |_| {})
}

/// The same, with a configuration that is changed.
pub(crate) fn reader_with(
    peer: &Peer,
    posts: u64,
    change: impl FnOnce(&mut TcpConfig),
) -> (TcpTransport, Arena) {
    let config = TcpConfig::new("127.0.0.1:0".parse().unwrap());
    let config = config.with(|config| (config.data_connections, config.slice_bytes) = (0, 4096));
    let config = config.with(change);
    let (mut transport, arena) = (TcpTransport::new(config).unwrap(), Arena::new(LEN as usize).unwrap());
    transport.add_memory(&arena).unwrap();
    transport.register(&Region::dram(RegionRole::Kv, arena.addr(), LEN, 1)).unwrap();
    transport.connect(PeerId(1), &peer.metadata.encode().unwrap()).unwrap();
    let len = LEN / posts.max(1);
    for post in 0..posts {
        let (local_offset, remote_offset) = (len * post, len * post);
        let descriptor = Descriptor { local_region: 0, remote_region: 0, local_offset, remote_offset, len };
        let post = Post { id: PostId(post), op: Op::Read, descriptors: vec![descriptor], notify: None };
        transport.post(PeerId(1), post).unwrap();
    }
    (transport, arena)
}

/// A write of the first 100 bytes.
pub(crate) fn write_of(id: u64, notify: Option<Bytes>) -> Post {
    let descriptor =
        Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: 100 };
    Post { id: PostId(id), op: Op::Write, descriptors: vec![descriptor], notify }
}

/// Sends frames of 64 KiB that the peer does not read, until none fits any more. Returns how many.
pub(crate) fn fill_with_frames(transport: &mut TcpTransport, events: &mut Vec<TransportEvent>) -> usize {
    let (mut sent, mut refused, frame) = (0, 0, Bytes::from(vec![7; 64 << 10]));
    while refused < 100 {
        match transport.send(PeerId(1), frame.clone()) {
            Ok(()) => (sent, refused) = (sent + 1, 0),
            Err(error) => {
                assert_eq!(error, TransportError::WouldBlock);
                refused += 1;
            }
        }
        transport.poll(Time::ZERO, events);
    }
    sent
}

/// Polls until the way to the peer is open.
pub(crate) fn opened(peer: &mut Peer, transport: &mut TcpTransport) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !transport.ways.values().any(|way| matches!(way.stage, Stage::Open)) {
        assert!(Instant::now() < deadline, "the way does not open");
        peer.fill();
        transport.poll(Time::ZERO, &mut Vec::new());
    }
}

/// Polls until the transport asks the peer for something.
pub(crate) fn asked(peer: &mut Peer, transport: &mut TcpTransport) -> Request {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        assert!(Instant::now() < deadline, "nothing is asked for");
        transport.poll(Time::ZERO, &mut Vec::new());
        if let Some(request) = peer.next_request() {
            return request;
        }
    }
}
