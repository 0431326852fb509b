//! Peers in processes of their own that are killed, stopped, come back, or are not what they seem; and what is refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod workers;

use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_conformance::process::{self, Process};
use kv_conformance::{Harness, Job, Other, Side, boottime, connect, heard, pattern, rest, snapshot};
use kv_core::{
    Descriptor, Directions, MemoryKind, Op, PeerId, Post, PostId, Region, RegionRole, Transport,
    TransportError, TransportEvent, WayEnd, WriteFence,
};
use kv_ucx::{HostMemory, MemoryError, Ucx, UcxConfig, UcxError, UcxTransport};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use workers::{Kind, ucx, worker};

const PEER: PeerId = PeerId(1);

/// The other process. Without its variable it is no test at all.
#[test]
fn child() {
    process::child(|kind| worker(Kind::named(kind).config(), &[Kind::FAR_LEN]));
}

/// Makes a transport, so that UCX has something to log. In the test's own process it does nothing.
#[test]
fn logging() {
    if std::env::var_os(LOGGING).is_some() && ucx().is_some() {
        drop(worker(Kind::Usual.config(), &[4096]));
    }
}

/// The variable of a process that lets UCX log.
const LOGGING: &str = "KV_UCX_TEST_LOGGING";

#[test]
fn the_log_of_ucx_stays_out_of_the_standard_output_unless_the_environment_wants_it_there() {
    if ucx().is_none() {
        return;
    }
    let logged = |place: Option<&str>| {
        let mut program = std::process::Command::new(std::env::current_exe().unwrap());
        program.args(["--exact", "logging", "--nocapture"]).env(LOGGING, "yes").env("UCX_LOG_LEVEL", "info");
        program.env_remove("UCX_LOG_FILE").envs(place.map(|place| ("UCX_LOG_FILE", place)));
        let output = program.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).contains("UCX  INFO"))
    };
    assert_eq!(logged(None), [false, true]);
    assert_eq!(logged(Some("stdout")), [true, false]);
}

fn post(id: u64, op: Op, len: u64) -> Post {
    let descriptor = Descriptor { local_region: 0, remote_region: 0, local_offset: 0, remote_offset: 0, len };
    Post { id: PostId(id), op, descriptors: vec![descriptor], notify: None }
}

/// Polls until `done` returns true of the events so far.
fn until(
    what: &str,
    here: &mut Side<UcxTransport>,
    events: &mut Vec<TransportEvent>,
    done: impl Fn(&[TransportEvent]) -> bool,
) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done(events) {
        assert!(Instant::now() < deadline, "{what}: {events:?}");
        here.transport.poll(boottime(), events);
        if !done(events) {
            rest(&here.transport, Duration::from_millis(2));
        }
    }
}

/// How many processes are killed: a few, or as many as `KV_UCX_KILLS` says.
fn kills() -> u64 {
    std::env::var("KV_UCX_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(4)
}

#[test]
fn killed_writers_leave_the_process_they_write_to_in_service() {
    if ucx().is_none() {
        return;
    }
    let kills = kills();
    // Reads the target, too, in the end.
    let mut here = worker(Kind::Reads.config(), &[Kind::FAR_LEN]);
    let metadata = here.transport.metadata().unwrap();
    // Written to in another process, because its end would end this test, too.
    let mut target = Process::start("Usual", Job::Serve, &metadata);
    for round in 0..kills {
        let mut writer = Process::start("Usual", Job::Write, target.metadata());
        std::thread::sleep(Duration::from_millis(20 + 7 * round % 60));
        writer.kill();
        std::thread::sleep(Duration::from_millis(50));
        assert!(target.is_alive(), "round {round}: the target died with its writer");
    }
    println!("{kills} writers were killed");
    connect(&mut here.transport, PEER, target.metadata()).unwrap();
    // All of them have written what was there before.
    let written = pattern(Kind::FAR_LEN);
    assert!(read(&mut here, 1) == written, "a killed writer has left other bytes than it wrote");
    let ours = vec![7; Kind::FAR_LEN];
    here.memory.write(0, 0, &ours);
    here.transport.post(PEER, post(2, Op::Write, Kind::FAR_LEN as u64)).unwrap();
    let mut events = Vec::new();
    let ended = TransportEvent::Posted { post: PostId(2), result: Ok(()) };
    until("a write", &mut here, &mut events, |events| events.contains(&ended));
    here.memory.write(0, 0, &written);
    assert!(read(&mut here, 3) == ours, "what was written after the kills is not there");
    here.transport.send(PEER, Bytes::from_static(b"echo")).unwrap();
    until("an echo", &mut here, &mut events, |events| heard(events, b"echo"));
}

/// All bytes of the peer's region.
fn read(here: &mut Side<UcxTransport>, id: u64) -> Vec<u8> {
    here.transport.post(PEER, post(id, Op::Read, Kind::FAR_LEN as u64)).unwrap();
    let mut events = Vec::new();
    let ended = TransportEvent::Posted { post: PostId(id), result: Ok(()) };
    until("a read", here, &mut events, |events| events.contains(&ended));
    snapshot(here).remove(0)
}

#[test]
fn what_a_killed_writer_has_left_in_sockets_arrives_before_its_death_is_told() {
    if ucx().is_none() {
        return;
    }
    for round in 0..3 {
        let mut here = worker(Kind::Usual.config(), &[Kind::FAR_LEN]);
        let mut writer = Process::start("Usual", Job::Write, &here.transport.metadata().unwrap());
        connect(&mut here.transport, PEER, writer.metadata()).unwrap();
        let (mut events, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        let mut word = [0; 8];
        while word == [0; 8] {
            assert!(Instant::now() < deadline, "nothing is written");
            here.transport.poll(boottime(), &mut events);
            here.memory.read(0, 1 << 20, &mut word);
        }
        // The buffers of the sockets are filled while nobody reads them.
        std::thread::sleep(Duration::from_millis(300));
        writer.kill();
        let dead = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Dead { quiet_after: Duration::ZERO } };
        until("the end of the writer", &mut here, &mut events, |events| events.contains(&dead));
        here.memory.write(0, 0, &vec![0xee; Kind::FAR_LEN]);
        let until = Instant::now() + Duration::from_millis(100);
        while Instant::now() < until {
            here.transport.poll(boottime(), &mut events);
        }
        let memory = snapshot(&here);
        let written = memory[0].iter().filter(|byte| **byte != 0xee).count();
        assert_eq!(written, 0, "round {round}: bytes were written after the death was told");
    }
}

/// Stops a process, and returns when it does nothing any more.
fn stop(process: &Process) {
    let pid = Pid::from_child(process.child());
    kill_process(pid, Signal::STOP).unwrap();
    let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
    assert!(status.stopped());
}

fn resume(process: &Process) {
    kill_process(Pid::from_child(process.child()), Signal::CONT).unwrap();
}

/// A worker that may read, and processes that serve, to which it is connected as `PeerId(1)`, `PeerId(2)` and so on.
fn served_by<const N: usize>() -> (Side<UcxTransport>, [Process; N]) {
    let mut here = worker(Kind::Reads.config(), &[Kind::FAR_LEN]);
    let metadata = here.transport.metadata().unwrap();
    let others = [(); N].map(|()| Process::start("Usual", Job::Serve, &metadata));
    for (number, other) in (1..).zip(&others) {
        connect(&mut here.transport, PeerId(number), other.metadata()).unwrap();
    }
    (here, others)
}

/// How a post has ended, if it has.
fn end_of(events: &[TransportEvent], id: u64) -> Option<Result<(), TransportError>> {
    events.iter().find_map(|event| match event {
        TransportEvent::Posted { post, result } if *post == PostId(id) => Some(result.clone()),
        _ => None,
    })
}

#[test]
fn a_death_is_told_beside_a_connection_that_nobody_accepts() {
    if ucx().is_none() {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let _waiting = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut here, [mut peer]) = served_by();
    read(&mut here, 1);
    peer.kill();
    let mut events = Vec::new();
    until("the end of the peer", &mut here, &mut events, |events| !events.is_empty());
    let dead = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Dead { quiet_after: Duration::ZERO } };
    assert_eq!(events, [dead]);
}

#[test]
fn a_stopped_peer_slows_nobody_and_goes_on_afterwards() {
    if ucx().is_none() {
        return;
    }
    let (stuck, well, len) = (PeerId(1), PeerId(2), Kind::FAR_LEN as u64);
    let (mut here, [stopped, _healthy]) = served_by();
    assert!(read(&mut here, 1) == pattern(Kind::FAR_LEN));
    stop(&stopped);
    here.memory.write(0, 0, &[7; Kind::FAR_LEN]);
    let mut events = Vec::new();
    for id in 10..14 {
        here.transport.post(stuck, post(id, Op::Write, len)).unwrap();
    }
    for id in 20..30 {
        here.transport.post(well, post(id, Op::Write, len)).unwrap();
        until("a write to the healthy peer", &mut here, &mut events, |events| end_of(events, id).is_some());
    }
    assert!((20..30).all(|id| end_of(&events, id) == Some(Ok(()))), "{events:?}");
    assert!(
        (10..14).all(|id| end_of(&events, id).is_none()),
        "a write to a stopped peer has ended: {events:?}"
    );
    here.transport.cancel(PostId(13));
    resume(&stopped);
    until("the other writes", &mut here, &mut events, |events| {
        (10..14).all(|id| end_of(events, id).is_some())
    });
    assert!((10..13).all(|id| end_of(&events, id) == Some(Ok(()))), "{events:?}");
    here.memory.write(0, 0, &[0; Kind::FAR_LEN]);
    assert!(read(&mut here, 2) == [7; Kind::FAR_LEN]);
}

#[test]
fn a_cancelled_write_to_a_stopped_peer_ends_once_the_peer_moves_and_no_byte_comes_later() {
    if ucx().is_none() {
        return;
    }
    let (mut here, [peer]) = served_by();
    assert!(read(&mut here, 1) == pattern(Kind::FAR_LEN));
    stop(&peer);
    here.memory.write(0, 0, &[7; Kind::FAR_LEN]);
    here.transport.post(PEER, post(2, Op::Write, Kind::FAR_LEN as u64)).unwrap();
    let mut events = Vec::new();
    let turns = |here: &mut Side<UcxTransport>, events: &mut Vec<TransportEvent>, span| {
        let end = Instant::now() + Duration::from_millis(span);
        while Instant::now() < end {
            here.transport.poll(boottime(), events);
            rest(&here.transport, Duration::from_millis(2));
        }
    };
    turns(&mut here, &mut events, 300);
    here.transport.cancel(PostId(2));
    turns(&mut here, &mut events, 700);
    assert_eq!(events, [], "the bytes are still on their way to the stopped peer");
    resume(&peer);
    until("the end of the write", &mut here, &mut events, |events| !events.is_empty());
    assert_eq!(end_of(&events, 2), Some(Err(TransportError::Cancelled)));
    let then = read(&mut here, 3);
    turns(&mut here, &mut events, 300);
    assert!(then.contains(&7) && read(&mut here, 4) == then, "bytes came after the end of their post");
}

#[test]
fn a_peer_that_is_killed_while_it_is_stopped_is_dead_and_its_posts_end() {
    if ucx().is_none() {
        return;
    }
    let (mut here, [mut peer]) = served_by();
    read(&mut here, 1);
    stop(&peer);
    here.transport.post(PEER, post(2, Op::Write, Kind::FAR_LEN as u64)).unwrap();
    let (mut events, begun) = (Vec::new(), Instant::now());
    while begun.elapsed() < Duration::from_millis(300) {
        here.transport.poll(boottime(), &mut events);
        rest(&here.transport, Duration::from_millis(2));
    }
    assert_eq!(events, []);
    peer.kill();
    let dead = TransportEvent::PeerGone { peer: PEER, end: WayEnd::Dead { quiet_after: Duration::ZERO } };
    until("the death", &mut here, &mut events, |events| events.contains(&dead));
    let ended = TransportEvent::Posted { post: PostId(2), result: Err(TransportError::PeerGone) };
    assert_eq!(events, [ended, dead]);
}

#[test]
fn frames_for_a_stopped_peer_are_bounded_and_it_hears_them_in_order_once_it_moves() {
    if ucx().is_none() {
        return;
    }
    let (mut here, [peer]) = served_by();
    read(&mut here, 1);
    stop(&peer);
    let (mut sent, mut events, begun) = (0_u32, Vec::new(), Instant::now());
    let frame = |number: u32| Bytes::from([&number.to_le_bytes()[..], &[7; 60_000]].concat());
    // The kernel's buffers take some. What is refused for a second is refused until the peer moves.
    let mut taken = begun;
    while taken.elapsed() < Duration::from_secs(1) {
        assert!(begun.elapsed() < Duration::from_secs(60), "{sent} frames were taken");
        match here.transport.send(PEER, frame(sent)) {
            Ok(()) => (sent, taken) = (sent + 1, Instant::now()),
            Err(error) => assert_eq!(error, TransportError::WouldBlock),
        }
        here.transport.poll(boottime(), &mut events);
        rest(&here.transport, Duration::from_millis(2));
    }
    assert_eq!(events, []);
    resume(&peer);
    // The peer drops echoes for which it has no room.
    let (mut echoes, begun) = (Vec::new(), Instant::now());
    while !heard(&events, b"last") {
        assert!(begun.elapsed() < Duration::from_secs(60), "{sent} frames were taken, echoes: {echoes:?}");
        let _ = here.transport.send(PEER, Bytes::from_static(b"last"));
        events.clear();
        here.transport.poll(boottime(), &mut events);
        for event in &events {
            let TransportEvent::Frame { frame: echo, .. } = event else { panic!("{event:?}") };
            if echo != "last" {
                let number = u32::from_le_bytes(echo[..4].try_into().unwrap());
                assert!(*echo == frame(number), "frame {number} is damaged");
                echoes.push(number);
            }
        }
        rest(&here.transport, Duration::from_millis(2));
    }
    println!("{sent} frames were taken, and {} came back", echoes.len());
    assert!(!echoes.is_empty() && echoes.is_sorted_by(|a, b| a < b) && echoes[0] == 0, "{echoes:?}");
}

#[test]
fn a_peer_that_is_silent_from_the_beginning_is_lost_and_can_be_connected_once_it_answers() {
    if ucx().is_none() {
        return;
    }
    let config = Kind::Reads.config().with(|config| config.handshake_timeout = Duration::from_millis(500));
    let mut here = worker(config, &[Kind::FAR_LEN]);
    let peer = Process::start("Usual", Job::Serve, &here.transport.metadata().unwrap());
    stop(&peer);
    connect(&mut here.transport, PEER, peer.metadata()).unwrap();
    here.transport.post(PEER, post(2, Op::Write, Kind::FAR_LEN as u64)).unwrap();
    here.transport.send(PEER, Bytes::from_static(b"hello")).unwrap();
    let mut events = Vec::new();
    until("the end of the way", &mut here, &mut events, |events| events.len() == 2);
    let ended = TransportEvent::Posted { post: PostId(2), result: Err(TransportError::PeerGone) };
    assert_eq!(events, [ended, TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost }]);
    let refused = here.transport.send(PEER, Bytes::from_static(b"hello"));
    assert_eq!(refused, Err(TransportError::PeerGone));
    resume(&peer);
    let begun = Instant::now();
    while !heard(&events, b"echo") {
        assert!(begun.elapsed() < Duration::from_secs(60), "no way opens: {events:?}");
        connect(&mut here.transport, PEER, peer.metadata()).unwrap();
        here.transport.send(PEER, Bytes::from_static(b"echo")).unwrap();
        let told = events.len();
        // Where the processors are busy, half a second may be too short.
        until("an echo or an end", &mut here, &mut events, |events| events.len() > told);
    }
    assert!(read(&mut here, 3) == pattern(Kind::FAR_LEN), "a write of the lost way has moved bytes");
}

#[test]
fn reads_over_tcp_are_refused_unless_the_owner_allows_them() {
    if ucx().is_none() {
        return;
    }
    let mut there = worker(Kind::Usual.config(), &[4096]);
    let metadata = there.transport.metadata().unwrap();
    let mut here = worker(Kind::Usual.config(), &[4096]);
    connect(&mut here.transport, PEER, &metadata).unwrap();
    let refused = here.transport.post(PEER, post(1, Op::Read, 1));
    assert!(matches!(refused, Err(TransportError::Unsupported(_))), "{refused:?}");
    assert_eq!(here.transport.directions(Some(PEER)), Directions::WRITE);
    assert_eq!(here.transport.write_fence(PEER), WriteFence::AtDeath);
    let lanes = here.transport.lanes(PEER);
    assert!(lanes.iter().all(|(transport, device)| transport == "tcp" && device == "lo"), "{lanes:?}");

    let mut reader = worker(Kind::Reads.config(), &[4096]);
    there.memory.write(0, 0, b"bytes");
    connect(&mut reader.transport, PEER, &metadata).unwrap();
    assert_eq!(reader.transport.directions(Some(PEER)), Directions::BOTH);
    reader.transport.post(PEER, post(1, Op::Read, 5)).unwrap();
    let mut events = Vec::new();
    while events.is_empty() {
        there.transport.poll(boottime(), &mut Vec::new());
        reader.transport.poll(boottime(), &mut events);
    }
    assert_eq!(events, [TransportEvent::Posted { post: PostId(1), result: Ok(()) }]);
    let mut bytes = [0; 5];
    reader.memory.read(0, 0, &mut bytes);
    assert_eq!(&bytes, b"bytes");
}

#[test]
fn writes_into_gpu_memory_over_tcp_are_refused_unless_the_owner_allows_them() {
    if ucx().is_none() {
        return;
    }
    let there = worker(Kind::Usual.config(), &[4096]);
    // The peer says that its region is in memory of a GPU.
    let mut metadata = there.transport.metadata().unwrap().to_vec();
    let at = metadata.windows(4).position(|bytes| bytes == b"Dram").unwrap();
    metadata[at..at + 4].copy_from_slice(b"Vram");
    for allowed in [false, true] {
        let mut here = worker(Kind::Usual.config().with(|config| config.gpu_over_tcp = allowed), &[4096]);
        connect(&mut here.transport, PEER, &metadata).unwrap();
        match here.transport.post(PEER, post(1, Op::Write, 1)) {
            Err(TransportError::Unsupported(why)) => {
                assert!(!allowed && why.contains("GPU memory") && why.contains("gpu_over_tcp"), "{why}");
            }
            taken => assert_eq!((allowed, taken), (true, Ok(()))),
        }
    }
}

#[test]
fn metadata_of_another_table_of_regions_open_no_way() {
    if ucx().is_none() {
        return;
    }
    let mut there = worker(Kind::Usual.config(), &[4096]);
    let mut metadata = there.transport.metadata().unwrap().to_vec();
    // The length of the region is the last number of the metadata: 4096 becomes 4097.
    *metadata.last_mut().unwrap() += 1;
    let short = Kind::Usual.config().with(|config| config.handshake_timeout = Duration::from_millis(300));
    let mut here = worker(short, &[4096]);
    connect(&mut here.transport, PEER, &metadata).unwrap();
    here.transport.post(PEER, post(1, Op::Write, 1)).unwrap();
    let (mut events, mut others) = (Vec::new(), Vec::new());
    let deadline = Instant::now() + Duration::from_secs(60);
    // The time for opening may be over before the hello has come.
    while events.len() < 2 || there.transport.stats().strangers == 0 {
        assert!(Instant::now() < deadline, "{events:?}, {:?}", there.transport.stats());
        there.transport.poll(boottime(), &mut others);
        here.transport.poll(boottime(), &mut events);
    }
    let ended = TransportEvent::Posted { post: PostId(1), result: Err(TransportError::PeerGone) };
    assert_eq!(events, [ended, TransportEvent::PeerGone { peer: PEER, end: WayEnd::Lost }]);
    assert_eq!(others, []);
}

#[test]
fn a_worker_may_speak_only_for_the_name_at_its_address() {
    if ucx().is_none() {
        return;
    }
    let mut sides = [(); 3].map(|()| worker(Kind::Usual.config(), &[4096]));
    let [to, one, two] = &mut sides;
    let metadata = to.transport.metadata().unwrap();
    for (side, word) in [(&mut *one, &b"one"[..]), (&mut *two, &b"two"[..])] {
        connect(&mut side.transport, PEER, &metadata).unwrap();
        side.transport.send(PEER, Bytes::copy_from_slice(word)).unwrap();
    }
    let mut events = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(60);
    while !heard(&events, b"one") || !heard(&events, b"two") {
        assert!(Instant::now() < deadline, "{events:?}");
        to.transport.poll(boottime(), &mut events);
        for side in [&mut *one, &mut *two] {
            side.transport.poll(boottime(), &mut Vec::new());
        }
    }
    let (mine, theirs) = (one.transport.metadata().unwrap(), two.transport.metadata().unwrap());
    for event in &events {
        let TransportEvent::Frame { from, frame } = event else { panic!("{event:?}") };
        let is_one = &frame[..] == b"one";
        assert_eq!(to.transport.may_speak_for(*from, &mine), is_one);
        assert_eq!(to.transport.may_speak_for(*from, &theirs), !is_one);
        assert!(!to.transport.may_speak_for(*from, b"nonsense"));
    }
}

#[test]
fn devices_and_settings_that_ucx_does_not_have_are_named() {
    let Some(ucx) = ucx() else { return };
    let config = UcxConfig::default().with(|config| config.devices = vec!["no_such_device".to_owned()]);
    let error = UcxTransport::new(ucx, config).unwrap_err();
    let UcxError::Device { device, has } = &error else { panic!("{error}") };
    assert!(device == "no_such_device" && has.iter().any(|name| name == "lo"), "{error}");
    let setting = ("NO_SUCH_SETTING".to_owned(), "1".to_owned());
    let config = UcxConfig::default().with(|config| config.settings = vec![setting]);
    let error = UcxTransport::new(ucx, config).unwrap_err();
    assert!(matches!(&error, UcxError::Setting { name, .. } if name == "NO_SUCH_SETTING"), "{error}");
}

#[test]
fn memory_that_was_not_given_and_memory_of_no_known_kind_are_refused() {
    let Some(ucx) = ucx() else { return };
    let pool = HostMemory::new(1 << 20).unwrap();
    let mut transport = UcxTransport::new(ucx, Kind::Usual.config()).unwrap();
    let region = |addr, len| Region::dram(RegionRole::Kv, addr, len, 1);
    let whole = region(pool.addr(), 1 << 20);
    assert!(matches!(transport.register(&whole), Err(TransportError::UnknownMemory { region: 0, .. })));
    transport.add_memory(&pool).unwrap();
    for wrong in [
        region(pool.addr() - 1, 10),
        region(pool.addr() + 1, 1 << 20),
        region(pool.addr(), u64::MAX),
        whole.clone().memory(MemoryKind::Vram, 0),
        whole.clone().memory(MemoryKind::File, 0),
    ] {
        assert!(matches!(transport.register(&wrong), Err(TransportError::UnknownMemory { .. })), "{wrong:?}");
    }
    let file = whole.clone().memory(MemoryKind::File, 3);
    // SAFETY: refused, so never used.
    let refused = unsafe { transport.adopt_regions([&file]) };
    assert_eq!(refused, Err(UcxError::Kind { region: 0, memory: MemoryKind::File, device: 3 }));
    transport.register(&whole).unwrap();
    transport.metadata().unwrap();
    assert_eq!(transport.add_memory(&pool), Err(UcxError::Memory(MemoryError::Frozen)));
    assert!(transport.register(&whole).is_err());
}

#[test]
fn a_second_load_gives_the_same_library() {
    let Some(first) = ucx() else { return };
    let again = Ucx::load(None).unwrap();
    assert_eq!((first.library(), first.version()), (again.library(), again.version()));
}
