//! Workers in containers, as far as one machine can show it: a decode worker here, and a prefill process in another
//! PID namespace, with a `/dev/shm` of its own, without memory that it may lock, or under another user. Each has local and TCP;
//! what local cannot do, TCP does. (Another network namespace is in `tests/network.rs`.) A test is skipped with the
//! reason where its container is not permitted.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use std::path::{Path, PathBuf};

use kv_transfer::params::TransferParams;
use kv_transfer::prelude::*;
use kv_transfer::{Cause, TransportError};
use support::host::Host;
use support::netns::tried;
use support::process::{Kind, Process, reader};
use support::store::{Members, Place, Store};
use support::{ended, failed, reclaimed, server, until};

/// Pages of a request: 3 MiB.
const PAGES: usize = 48;
/// Pages of a long request: 12 MiB.
const MANY: usize = 192;

/// The entry point of the other process. In the test's own process it does nothing.
#[test]
fn child() {
    support::process::child();
}

/// True if processes can be started by this program with these options; otherwise prints why a test is skipped.
fn permitted(test: &str, by: &[&str]) -> bool {
    match tried(&format!("{} true", by.join(" "))) {
        Ok(()) => true,
        Err(why) => {
            println!("SKIPPED: {test}: {why}");
            false
        }
    }
}

/// A decode worker here, and a prefill process in a container.
struct Pair {
    _server: KvBootstrapServer,
    decode: Host,
    prefill: Process,
    rooms: u64,
}

impl Pair {
    fn start(by: &[&str]) -> Pair {
        Pair::over(Members::LocalTcp, by)
    }

    fn over(members: Members, by: &[&str]) -> Pair {
        let (server, addr) = server();
        let kind = Kind::Placed(Place::at(([127, 0, 0, 1], 0).into(), members));
        let decode = kind.setup(WorkerRole::Decode, &addr).start();
        let prefill = Process::start_by(by, kind, WorkerRole::Prefill, &addr);
        Pair { _server: server, decode, prefill, rooms: 0 }
    }

    /// A request in push mode, and one in pull mode.
    fn both_modes(&mut self) {
        self.rooms += 1;
        let (room, content, addr) = (self.rooms, 5 * self.rooms, self.decode.addr.clone());
        self.prefill.tell(&format!("send {room} {PAGES} 0 {content}"));
        let mut receiver = self.decode.receiver(&addr, room, SessionOptions::default());
        receiver.init(self.decode.room_for(PAGES), None).unwrap();
        self.arrives(receiver, room, content);

        self.rooms += 1;
        let (room, content) = (self.rooms, 5 * self.rooms);
        self.prefill.tell(&format!("keep {room} {PAGES} {content} 30000"));
        let params = self.prefill.expect("kept").join(" ");
        let (_, mut receiver) = reader(&self.decode, &TransferParams::parse(&params).unwrap());
        receiver.init(self.decode.room_for(PAGES), None).unwrap();
        self.arrives(receiver, room, content);
    }

    fn arrives(&mut self, receiver: kv_transfer::Receiver, room: u64, content: u64) {
        assert_eq!(ended(&receiver), KvPoll::Success, "{:?}", receiver.failure());
        let pages = reclaimed(receiver);
        self.decode.arrived(pages.list(), content, &format!("room {room}"));
        self.decode.free(pages);
        assert_eq!(self.prefill.end_of(room), "Success");
    }

    /// By which transports the prefill worker was reached.
    fn opened(&self) -> Vec<String> {
        let Store::Placed(_, _, log) = &self.decode.memory.store else { panic!("another transport") };
        let lines = log.lock().unwrap();
        lines.iter().filter(|line| line.starts_with("connect ")).cloned().collect()
    }

    fn close(self) {
        self.decode.check_idle("at the end");
        self.prefill.close();
        self.decode.close("decode");
    }
}

/// Another PID namespace, in which this process is not seen. The process that is started dies with the program that
/// starts it.
const OTHER_PIDS: [&str; 5] = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"];

#[test]
fn a_process_in_another_pid_namespace_is_reached_locally_and_its_death_is_seen() {
    if !permitted("another PID namespace", &OTHER_PIDS) {
        return;
    }
    let mut pair = Pair::start(&OTHER_PIDS);
    pair.both_modes();
    assert_eq!(pair.opened(), ["connect local"]);

    let addr = pair.decode.addr.clone();
    pair.prefill.tell(&format!("send 9 {MANY} 1 99"));
    let mut cut = pair.decode.receiver(&addr, 9, SessionOptions::default());
    let room = pair.decode.room_for(MANY);
    let first = room.list().iter().next().unwrap();
    let before = pair.decode.memory.page(first);
    cut.init(room, None).unwrap();
    until("the first bytes", || pair.decode.memory.page(first) != before);
    pair.prefill.kill();
    let lost = [Cause::PeerLost, Cause::Post(TransportError::PeerGone)];
    assert!(lost.contains(&failed(&cut)), "{:?}", cut.failure());
    let pages = reclaimed(cut);
    pair.decode.missed(pages.list(), 99, &"a request that was cut off");
    pair.decode.rewrite(pages.list());
    pair.decode.free(pages);
    pair.decode.close("decode");
}

#[test]
fn adopted_memory_in_another_pid_namespace_is_reached_by_tcp() {
    if !permitted("another PID namespace", &OTHER_PIDS) {
        return;
    }
    let mut pair = Pair::over(Members::AdoptedTcp, &OTHER_PIDS);
    pair.both_modes();
    let opened = pair.opened();
    assert!(opened.starts_with(&["connect local".to_owned(), "connect tcp".to_owned()]), "{opened:?}");
    pair.close();
}

#[test]
fn a_process_with_a_private_and_tiny_dev_shm_is_reached_locally() {
    let by =
        ["unshare", "--mount", "sh", "-c", "mount -t tmpfs -o size=64k none /dev/shm && exec \"$0\" \"$@\""];
    if !permitted("a /dev/shm of its own", &["unshare", "--mount"]) {
        return;
    }
    let mut pair = Pair::start(&by);
    pair.both_modes();
    assert_eq!(pair.opened(), ["connect local"]);
    pair.close();
}

#[test]
fn a_process_that_may_lock_no_memory_is_reached_locally() {
    let by = ["prlimit", "--memlock=0:0"];
    if !permitted("no locked memory", &by) {
        return;
    }
    let mut pair = Pair::start(&by);
    pair.both_modes();
    assert_eq!(pair.opened(), ["connect local"]);
    pair.close();
}

#[test]
fn a_process_of_another_user_is_reached_by_tcp() {
    let by = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    if !permitted("another user", &by) {
        return;
    }
    // The other user may not be allowed to enter the directories of the build.
    let program = std::env::current_exe().unwrap();
    let Some(copy) = Copied::of(&program) else { return println!("SKIPPED: no directory for other users") };
    if let Err(why) = tried(&format!("{} test -x {}", by.join(" "), copy.0.display())) {
        return println!("SKIPPED: another user cannot run this program: {why}");
    }
    let shell = format!("exec {} \"$@\"", copy.0.display());
    let mut pair = Pair::start(&[&by[..], &["sh", "-c", &shell]].concat());
    pair.both_modes();
    assert_eq!(
        pair.opened(),
        ["connect local", "connect tcp"],
        "one attempt that is refused, and no later one"
    );
    pair.close();
}

/// A copy of this program where every user can run it, removed at the end.
struct Copied(PathBuf);

impl Copied {
    fn of(program: &Path) -> Option<Copied> {
        let copy =
            Copied(std::env::temp_dir().join(format!("kv-transfer-containers-{}", std::process::id())));
        std::fs::copy(program, &copy.0).ok()?;
        Some(copy)
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
