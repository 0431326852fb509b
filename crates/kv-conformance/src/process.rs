//! Workers elsewhere that are processes: the test binary is started again and runs only its test `child`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kv_core::{Op, PeerId, PostId, Transport, TransportEvent};
use rustix::process::{Pid, Signal, kill_process};

use crate::other::whole;
use crate::{Harness, Job, Other, Puppet, Side, boottime, connect, pattern, rest, snapshot};

const ROLE: &str = "KV_CONFORMANCE_CHILD";
const MARK: &str = "metadata:";

/// A worker in a process of its own. Dropping the value kills the process.
#[derive(Debug)]
pub struct Process {
    child: Child,
    metadata: Vec<u8>,
}

impl Process {
    /// Starts the process, whose worker does `job` with the worker of the metadata `partner`. The test
    /// `child` there is given `kind`, one word, by which it makes the worker.
    pub fn start(kind: &str, job: Job, partner: &[u8]) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{kind} {} {}", job.name(), to_hex(partner)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.map_while(Result::ok).find(|line| line.contains(MARK));
        let line = line.expect("the other process ended before it told its metadata");
        let metadata = from_hex(line.split(MARK).nth(1).unwrap());
        Process { child, metadata }
    }

    /// The process, for tests that stop it and let it continue.
    pub fn child(&self) -> &Child {
        &self.child
    }
}

impl Other for Process {
    fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    fn turn(&mut self) {}

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads the memory of another process, stops that process, and reads the memory again. A check for routes on which a READ
/// needs nothing of the process that is read from.
pub fn pages_are_read_from_a_process_that_stands_still<H: Harness<Other = Process>>(harness: &H) {
    let mut here = harness.worker(&[H::FAR_LEN]);
    let other = harness.other(Job::Serve, &here.transport.metadata().unwrap());
    connect(&mut here.transport, PeerId(1), other.metadata()).unwrap();
    for id in [1, 2] {
        here.memory.write(0, 0, &vec![0; H::FAR_LEN]);
        here.transport.post(PeerId(1), whole(id, Op::Read, H::FAR_LEN)).unwrap();
        let (mut events, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(20));
        while !events.contains(&TransportEvent::Posted { post: PostId(id), result: Ok(()) }) {
            assert!(Instant::now() < deadline, "READ {id} has not ended: {events:?}");
            here.transport.poll(boottime(), &mut events);
        }
        assert!(snapshot(&here)[0] == pattern(H::FAR_LEN), "READ {id}");
        kill_process(Pid::from_child(other.child()), Signal::STOP).unwrap();
    }
}

/// The body of the test `child`, which does nothing unless this process was started by [`Process::start`].
/// `make` makes the worker from the word that `start` was given.
pub fn child<P: Transport>(make: impl FnOnce(&str) -> Side<P>) {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let [kind, job, partner] = words[..] else { panic!("{role}") };
    let mut puppet = Puppet::new(make(kind), Job::named(job).unwrap(), &from_hex(partner));
    // This process ends when the parent's end of the pipe is closed.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_line(&mut String::new());
        std::process::exit(0);
    });
    println!("{MARK}{}", to_hex(&puppet.side.transport.metadata().unwrap()));
    std::io::stdout().flush().unwrap();
    loop {
        puppet.turn(boottime());
        rest(&puppet.side.transport, Duration::from_secs(1));
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
