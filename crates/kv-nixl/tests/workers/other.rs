//! Another process with a plane of its own: this test binary again, running only the test `child`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kv_core::{PeerId, Plane, PlaneEvent, PlaneWait, Time};
use kv_nixl::{Nixl, NixlConfig, NixlPlane};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};

use super::worker_with;
use crate::conformance::Side;

/// Length of the one region of each side.
pub const LEN: usize = 32 << 20;
/// The other side, as each knows it.
pub const PEER: PeerId = PeerId(1);

const ROLE: &str = "KV_NIXL_TEST_CHILD";
const MARK: &str = "metadata:";
const PATIENCE: Duration = Duration::from_secs(60);

/// The other process; killed with its handle.
pub struct Other {
    process: Child,
    /// Of its plane.
    pub metadata: Vec<u8>,
}

impl Other {
    /// Starts it; `job` is what `child` gets.
    pub fn start(job: &str, ours: &NixlPlane) -> Other {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{job} {}", to_hex(&ours.metadata().unwrap())))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let line = lines.map(Result::unwrap).find(|line| line.contains(MARK)).unwrap();
        let hex = line.split(MARK).nth(1).unwrap();
        Other { process, metadata: from_hex(hex) }
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// SIGKILL, without waiting for its end.
    pub fn kill_soon(&mut self) {
        self.process.kill().unwrap();
    }

    /// SIGSTOP or SIGCONT.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.process);
        kill_process(pid, signal).unwrap();
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.process.try_wait().unwrap().is_some()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The body of the test `child`: a worker whose region holds its own offsets, word by word. What
/// `turn` is given: the job, the worker, the parent's metadata, and what was reported.
pub fn child(nixl: Option<&Nixl>, mut turn: impl FnMut(&str, &mut Side<NixlPlane>, &[u8], Vec<PlaneEvent>)) {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let (job, parent) = role.split_once(' ').unwrap();
    let parent = from_hex(parent);
    let mut side = worker_with(nixl.unwrap(), &[LEN], NixlConfig::default());
    side.memory.write(0, 0, &pattern());
    // If the parent dies, so does this.
    std::thread::spawn(|| {
        let mut line = String::new();
        let _ = std::io::stdin().read_line(&mut line);
        std::process::exit(0);
    });
    println!("{MARK}{}", to_hex(&side.plane.metadata().unwrap()));
    std::io::stdout().flush().unwrap();
    loop {
        let mut events = Vec::new();
        side.plane.poll(Time::ZERO, &mut events);
        turn(job, &mut side, &parent, events);
        sleep(&side.plane);
    }
}

/// What a child's region holds at first.
pub fn pattern() -> Vec<u8> {
    (0..LEN).step_by(8).flat_map(|at| (at as u64).to_le_bytes()).collect()
}

/// Sleeps as the plane allows.
pub fn sleep(plane: &NixlPlane) {
    let (fds, most) = match plane.wait() {
        PlaneWait::Now => return,
        PlaneWait::Readable(fds) => (fds, Duration::from_secs(1)),
        PlaneWait::ReadableOrAfter(fds, after) => (fds, after),
    };
    // SAFETY: the plane keeps its descriptors open while it is borrowed.
    let fds: Vec<_> = fds.iter().map(|fd| unsafe { std::os::fd::BorrowedFd::borrow_raw(*fd) }).collect();
    let mut polls: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
    let _ = poll(&mut polls, Some(&timeout));
}

/// Polls until `done`.
pub fn until(
    side: &mut Side<NixlPlane>,
    events: &mut Vec<PlaneEvent>,
    what: &str,
    done: impl Fn(&[PlaneEvent]) -> bool,
) {
    let deadline = Instant::now() + PATIENCE;
    while !done(events) {
        assert!(Instant::now() < deadline, "{what}: {} events, {:?}", events.len(), side.plane);
        side.plane.poll(Time::ZERO, events);
        if !done(events) {
            sleep(&side.plane);
        }
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        hex.trim().chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}
