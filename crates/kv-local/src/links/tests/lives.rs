//! A process that executes another program keeps its id. No copy to or from it begins afterwards.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::slice;
use std::sync::mpsc::{TryRecvError, channel};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use super::*;

const LIFE: &str = "KV_LOCAL_LIFE";
/// Where both lives have their memory.
const PLACE: u64 = 0x2000_0000_0000;
const FIRST: u8 = 1;
const SECOND: u8 = 2;

/// Runs this test binary again, for its test `lives` only.
fn life(number: u8) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "links::tests::lives::lives", "--nocapture", "--test-threads=1"]);
    command.env(LIFE, number.to_string());
    command
}

/// Memory of `LEN` bytes at the place, each of them `byte`.
fn memory(byte: u8) -> &'static mut [u8] {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE);
    // SAFETY: nothing is mapped at the place, or the kernel refuses; the mapping is never unmapped.
    let bytes = unsafe {
        let at = mmap_anonymous(PLACE as *mut c_void, LEN, prot, flags).unwrap();
        slice::from_raw_parts_mut(at.cast::<u8>(), LEN)
    };
    bytes.fill(byte);
    bytes
}

/// The process with two lives. Without its variable, this test does nothing.
#[test]
fn lives() {
    let Ok(number) = std::env::var(LIFE) else { return };
    let (word, words) = channel();
    std::thread::spawn(move || {
        std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| word.send(line))
    });
    if number == SECOND.to_string() {
        let bytes = memory(SECOND);
        println!("second life");
        let _ = words.recv();
        println!("{} bytes were written", bytes.iter().filter(|byte| **byte != SECOND).count());
        return;
    }
    memory(FIRST);
    let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
    // SAFETY: the memory is never unmapped, and nobody refers to it.
    unsafe { transport.adopt(PLACE, LEN as u64) }.unwrap();
    transport.register(&Region::dram(RegionRole::Kv, PLACE, LEN as u64, 4096)).unwrap();
    let hex: String = transport.metadata().unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("metadata:{hex}");
    while words.try_recv() == Err(TryRecvError::Empty) {
        transport.poll(Time::ZERO, &mut Vec::new());
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{}", life(SECOND).exec());
}

#[test]
fn no_copy_begins_to_or_from_a_program_that_the_peer_has_executed() {
    let (mut us, arena) = transport();
    let mut process = life(FIRST).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut orders = process.stdin.take().unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut answer = |part: &str| lines.find(|line| line.contains(part)).unwrap();
    let metadata = answer("metadata:").split("metadata:").nth(1).unwrap().to_owned();
    let digits: Vec<u8> =
        metadata.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    let metadata: Vec<u8> = digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect();

    befriend(&mut us, PeerId(1), &metadata).unwrap();
    let read = |id| Post { op: Op::Read, ..write_post(id, LEN) };
    us.post(PeerId(1), read(1)).unwrap();
    let mut events = Vec::new();
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while events.is_empty() {
        us.poll(Time::ZERO, &mut events);
        assert!(std::time::Instant::now() < deadline);
    }
    assert_eq!(events, [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
    let page = |arena: &Arena| {
        let mut page = [0; 4096];
        arena.read(0, &mut page).unwrap();
        page
    };
    assert!(page(&arena) == [FIRST; 4096]);

    // The peer executes the program after this side has looked for the end of its stream.
    us.post(PeerId(1), read(2)).unwrap();
    us.post(PeerId(1), write_post(3, 4096)).unwrap();
    writeln!(orders, "live again").unwrap();
    answer("second life");
    us.copy_some();
    us.posts.hand_over(&mut events);
    let gone = |post| TransportEvent::Posted { post: PostId(post), result: Err(TransportError::PeerGone) };
    assert_eq!(events[1..], [gone(2), gone(3)]);
    assert!(page(&arena) == [FIRST; 4096]);
    writeln!(orders, "tell").unwrap();
    assert!(answer("bytes were written").starts_with("0 bytes"));
    process.wait().unwrap();
}
