//! Tests that strangers, impostors and broken peers cannot harm a transport. This file has what they share.

mod cut;
mod impostors;
mod lives;
mod peers;
mod starving;
mod strangers;
mod waking;

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Duration;

use bytes::Bytes;
use kv_conformance::{connect as befriend, heard};
use kv_core::{
    Descriptor, Op, PeerId, Post, PostId, Region, RegionRole, Time, Transport, TransportError,
    TransportEvent, WayEnd,
};
use kv_host::{Arena, Host, ProcessIdentity, Token};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::config::LocalConfig;
use crate::handshake::Hello;
use crate::metadata::{Metadata, Place, random_socket_name};
use crate::revoking::DYING;
use crate::right::Right;
use crate::transport::LocalTransport;

const LEN: usize = 1 << 20;
const DEAD: WayEnd = WayEnd::Dead { quiet_after: Duration::ZERO };

fn transport_with(config: LocalConfig, name: String) -> (LocalTransport, Arena) {
    let arena = Arena::new(LEN).unwrap();
    let mut transport = LocalTransport::with_socket_name(config, name).unwrap();
    transport.add_arena(&arena).unwrap();
    transport.register(&Region::dram(RegionRole::Kv, arena.addr(), LEN as u64, 4096)).unwrap();
    (transport, arena)
}

fn transport() -> (LocalTransport, Arena) {
    transport_with(LocalConfig::default(), random_socket_name().unwrap())
}

fn dial_raw(transport: &LocalTransport) -> UnixStream {
    let address = SocketAddr::from_abstract_name(transport.given.socket_name()).unwrap();
    let stream = UnixStream::connect_addr(&address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

fn poll_at(transport: &mut LocalTransport, now: Duration) -> Vec<TransportEvent> {
    let mut events = Vec::new();
    for _ in 0..20 {
        transport.poll(Time::ZERO + now, &mut events);
    }
    events
}

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.push(kind);
    bytes.extend_from_slice(body);
    bytes
}

fn write_post(id: u64, len: usize) -> Post {
    let descriptor =
        Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len: len as u64 };
    Post { id: PostId(id), op: Op::Write, descriptors: vec![descriptor], notify: None }
}

/// Two transports that move a page and a frame: the service that no other process may disturb.
fn assert_serves(transport: &mut LocalTransport, arena: &Arena) {
    let (mut other, source) = self::transport();
    source.write(0, b"good page").unwrap();
    let peer = PeerId(other.links.made() + 1);
    befriend(&mut other, peer, &transport.metadata().unwrap()).unwrap();
    other.post(peer, Post { notify: Some(Bytes::from_static(b"there")), ..write_post(1, 4096) }).unwrap();
    let mut events = Vec::new();
    for _ in 0..1000 {
        other.poll(Time::ZERO, &mut Vec::new());
        transport.poll(transport.now, &mut events);
    }
    assert!(heard(&events, b"there"), "{events:?}");
    let mut page = [0; 9];
    arena.read(0, &mut page).unwrap();
    assert_eq!(&page, b"good page");
    drop(other);
    poll_at(transport, transport.now - Time::ZERO);
}

/// A hand-made peer: its metadata, and a hello for `transport`.
fn forged(transport: &LocalTransport, arenas: Vec<u64>) -> (Bytes, Vec<u8>) {
    let start = 0;
    let metadata = Metadata {
        host: Host::here().unwrap(),
        token: Token::random().unwrap(),
        process: ProcessIdentity::here().unwrap(),
        socket: random_socket_name().unwrap(),
        regions: vec![Place { arena: (!arenas.is_empty()).then_some(0), start, len: 4096 }],
        arenas,
    };
    let metadata = metadata.encode().unwrap();
    let hello = hello_for(transport, &metadata);
    (metadata, hello)
}

fn hello_for(transport: &LocalTransport, metadata: &Bytes) -> Vec<u8> {
    let hello = Hello { expected: transport.given.token(), metadata: metadata.clone() };
    message(1, &hello.encode())
}

/// Sends a hello, and the descriptors of a page for the right to write and of these arenas. Returns the page.
fn greet(stream: &UnixStream, hello: &[u8], arenas: &[&OwnedFd]) -> Right {
    let (right, page) = Right::grant().unwrap();
    let page = page.into();
    let lent: Vec<&OwnedFd> = [&page].into_iter().chain(arenas.iter().copied()).collect();
    (&*stream).write_all(hello).unwrap();
    send_with_fds(stream, &message(4, b""), &lent);
    right
}

fn memory_file(len: u64, seals: SealFlags) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, len).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn send_with_fds(stream: &UnixStream, bytes: &[u8], fds: &[&OwnedFd]) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let sent = sendmsg(stream, &[io::IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
    assert_eq!(sent, bytes.len());
}

fn is_closed(stream: &mut UnixStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
        }
    }
}
