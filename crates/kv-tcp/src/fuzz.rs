//! Entry points for fuzzing: the functions that a stranger's and a peer's bytes pass through first. Each returns true
//! if the bytes are accepted as a whole. Not a public API.

pub mod samples;

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

use bytes::{Buf, BytesMut};
use kv_host::HostMemory;

use crate::hello::{HELLO, Hello, WELCOME, Welcome};
use crate::inbound::{Inbound, Landing, Received};
use crate::message::{self, Reply, Request};
use crate::metadata::Metadata;

/// Lengths of the regions that slices name.
const REGIONS: [usize; 2] = [1000, 70_000];

/// Decodes a transport's metadata. Asserts that accepted metadata stays the same when encoded and decoded
/// again.
pub fn metadata(bytes: &[u8]) -> bool {
    let Ok(read) = Metadata::decode(bytes) else { return false };
    let again = read.encode().and_then(|bytes| Metadata::decode(&bytes));
    assert_eq!(again.as_ref(), Ok(&read));
    true
}

/// Decodes both greetings. Asserts that an accepted greeting stays the same when encoded and decoded again.
pub fn greetings(bytes: &[u8]) -> bool {
    let hello = bytes.first_chunk::<HELLO>().and_then(Hello::decode);
    if let Some(hello) = hello {
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        assert!(Hello::may_begin_with(bytes));
    }
    let welcome = bytes.first_chunk::<WELCOME>().and_then(Welcome::decode);
    if let Some(welcome) = welcome {
        assert_eq!(Welcome::decode(&welcome.encode()), Some(welcome));
    }
    hello.is_some() || welcome.is_some()
}

/// Reads the stream of requests of a guest, in pieces whose length the first byte gives, with the pages in
/// their places. Asserts that a slice whose message is encoded again means the same.
pub fn requests(bytes: &[u8]) -> bool {
    let (Some((&cut, stream)), Ok((ours, mut theirs))) = (bytes.split_first(), UnixStream::pair()) else {
        return false;
    };
    static MEMORY: OnceLock<Option<HostMemory>> = OnceLock::new();
    let memory = MEMORY.get_or_init(|| HostMemory::new(REGIONS[0] + REGIONS[1]).ok());
    let Some(memory) = memory else { return false };
    let parts = [memory.part(0, REGIONS[0]), memory.part(REGIONS[0], REGIONS[1])];
    let regions: Vec<_> = parts.into_iter().flatten().collect();
    let len_of = |region: u32| regions.get(region as usize).map(|memory| memory.len() as u64);
    let (mut inbound, mut trailing) = (Inbound::default(), 0);
    let mut scratch = vec![0; 64 + 16 * usize::from(cut)];
    if ours.set_nonblocking(true).is_err() {
        return false;
    }
    for piece in stream.chunks(4096) {
        if theirs.write_all(piece).is_err() {
            return false;
        }
        let most = scratch.len();
        while let Ok(Received::Bytes(_) | Received::Last(_)) =
            inbound.receive(ours.as_fd(), &regions, &mut scratch, most)
        {
            if !take(&mut inbound, &mut trailing, &regions, len_of) {
                return false;
            }
        }
    }
    !stream.is_empty() && inbound.bytes.is_empty() && inbound.landing.is_none()
}

/// Takes all requests that have come. `trailing` bytes follow the pages that are being placed. False if the stream is broken.
fn take(
    inbound: &mut Inbound,
    trailing: &mut usize,
    regions: &[kv_host::Memory],
    len_of: impl Fn(u32) -> Option<u64>,
) -> bool {
    loop {
        match inbound.settle(regions) {
            Ok(true) => {
                inbound.landing = None;
                if inbound.bytes.len() < *trailing {
                    return true;
                }
                inbound.bytes.advance(std::mem::take(trailing));
            }
            Ok(false) => return true,
            Err(_) => return false,
        }
        match Request::next(&mut inbound.bytes, &len_of) {
            Ok(None) => return true,
            Err(_) => return false,
            Ok(Some(Request::Frame(_))) => {}
            Ok(Some(Request::Write(asked, frame))) => {
                let again = Request::next(&mut BytesMut::from(&message::write(&asked, frame)[..]), &len_of);
                assert_eq!(again, Ok(Some(Request::Write(asked.clone(), frame))));
                inbound.landing = Some(Landing::new(asked.ranges, asked.bytes));
                *trailing = 1 + frame;
            }
            Ok(Some(Request::Read(asked))) => {
                let again = Request::next(&mut BytesMut::from(&message::read(&asked)[..]), &len_of);
                assert_eq!(again, Ok(Some(Request::Read(asked))));
            }
        }
    }
}

/// Reads a stream of replies. Asserts that an accepted reply stays the same when encoded and decoded again.
pub fn replies(bytes: &[u8]) -> bool {
    let mut stream = BytesMut::from(bytes);
    while let Ok(Some(reply)) = Reply::next(&mut stream) {
        assert_eq!(Reply::next(&mut BytesMut::from(&reply.encode()[..])), Ok(Some(reply)));
    }
    !bytes.is_empty() && stream.is_empty()
}
