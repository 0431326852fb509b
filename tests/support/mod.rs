//! The parts that tests of all crates together share: hosts with real workers and real shared memory, an
//! oracle of every byte, random traffic, and processes that can be killed.
//!
//! Each test binary uses some of these parts.
#![allow(dead_code)]

pub mod host;
pub mod hybrid;
pub mod memory;
pub mod netns;
pub mod overheard;
pub mod pair;
pub mod process;
pub mod store;
pub mod traffic;

use std::process::Command;
use std::time::{Duration, Instant};

use kv_transfer::prelude::*;

/// How long anything may take that must happen. Tests run beside others, on few cores.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A bootstrap server on a free port, and its address.
pub fn server() -> (KvBootstrapServer, String) {
    let server = KvBootstrapServer::start("127.0.0.1:0").unwrap();
    let addr = server.local_addr().to_string();
    (server, addr)
}

/// The arguments with which this program runs this test and no other. A program that knows no test of the name would run
/// none, and succeed.
pub fn only(test: &str) -> [&str; 4] {
    let program = std::env::current_exe().unwrap();
    let listed = Command::new(program).args(["--exact", test, "--list"]).output().unwrap().stdout;
    let known = String::from_utf8_lossy(&listed).lines().any(|line| line == format!("{test}: test"));
    assert!(known, "this program has no test named {test}");
    ["--exact", test, "--nocapture", "--test-threads=1"]
}

/// Waits until `done` is true; panics with `what` if that takes too long.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{what}: waited in vain");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the end of a session.
pub fn ended<S: KvSession>(session: &S) -> KvPoll {
    let deadline = Instant::now() + PATIENCE;
    while !session.poll().is_terminal() {
        assert!(Instant::now() < deadline, "room {} is still {}", session.room(), session.poll());
        std::thread::sleep(Duration::from_millis(1));
    }
    session.poll()
}

/// Waits for the failure of a session, and returns its cause.
pub fn failed<S: KvSession>(session: &S) -> kv_transfer::Cause {
    assert_eq!(ended(session), KvPoll::Failed, "room {}", session.room());
    session.failure().unwrap().cause
}

/// Waits until a session gives its pages back.
pub fn reclaimed<S: KvSession>(mut session: S) -> Pages {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(back) = session.reclaim() {
            return back.pages;
        }
        assert!(Instant::now() < deadline, "room {}: pages do not come back", session.room());
        std::thread::sleep(Duration::from_millis(1));
    }
}
