//! Hosts in processes of their own, which can be killed and stopped.
//!
//! A child is the test binary again, running only its test `child` with a variable set. It is told
//! what to do line by line on its standard input, and answers on its standard output. It dies with
//! the test: by its end of input, or, even when stopped, by a signal from the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

use kv_transfer::params::{RemoteKv, TransferParams};
use kv_transfer::prelude::*;
use kv_transfer::proto::Timing;
use kv_transfer::{Lease, Receiver as KvReceiverSession, Sender, TransferMode};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

use super::PATIENCE;
use super::host::{Host, Setup};
use super::memory::Shape;

const ROLE: &str = "KV_TRANSFER_TEST_CHILD";
/// Begins every line that a child says; the test harness says others.
const MARK: &str = "child says: ";

/// A host in another process. Killed with its handle.
pub struct Process {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    /// The life of its worker.
    pub incarnation: String,
}

impl Process {
    /// Starts a worker of `role` in its own process, and waits until peers can find it.
    pub fn start(role: WorkerRole, addr: &str) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{role:?} {addr}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (tell, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // The harness ends its own line before a test only if it feels like it.
                let Some((_, said)) = line.split_once(MARK) else { continue };
                if tell.send(said.to_owned()).is_err() {
                    return;
                }
            }
        });
        let mut process = Process { child, input, lines, incarnation: String::new() };
        process.incarnation = process.expect("ready").remove(0);
        process
    }

    /// Tells it something.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// Waits for a line that begins with `word`: the other words of it.
    pub fn expect(&mut self, word: &str) -> Vec<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = match self.lines.recv_timeout(left) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => panic!("the child does not say {word:?}"),
                Err(RecvTimeoutError::Disconnected) => panic!("the child is dead; {word:?} was to come"),
            };
            let mut words = line.split(' ').map(str::to_owned);
            if words.next().as_deref() == Some(word) {
                return words.collect();
            }
        }
    }

    /// How a session of it has ended: `Success`, or the cause in words.
    pub fn end_of(&mut self, room: u64) -> String {
        loop {
            let words = self.expect("ended");
            if words[0] == room.to_string() {
                return words[1..].join(" ");
            }
        }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// SIGKILL; returns when it is dead.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Ends it in peace: it checks that everything has come back.
    pub fn close(mut self) {
        self.tell("close");
        self.expect("closed");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What hosts of process tests have in common with their children.
pub fn setup(role: WorkerRole, addr: &str) -> Setup {
    let shape = Shape { rows: 0, aux_regions: 0, ..Shape::layer_major(256, 2, 32 << 10) };
    let timing = Timing {
        keepalive: Duration::from_millis(300),
        peer_timeout: Duration::from_secs(2),
        ..Timing::default()
    };
    Setup { timing, ..Setup::new(role, addr, shape) }
}

/// The life of a child. Returns at once in a process that is none.
pub fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let (role, addr) = role.split_once(' ').unwrap();
    let role = if role == "Prefill" { WorkerRole::Prefill } else { WorkerRole::Decode };
    let mut here = Here {
        host: setup(role, addr).start(),
        addr: addr.to_owned(),
        senders: BTreeMap::new(),
        receivers: BTreeMap::new(),
        readers: BTreeSet::new(),
    };
    let (tell, lines) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let _ = tell.send(line);
        }
    });
    say(&format!("ready {}", here.host.worker.as_ref().unwrap().incarnation()));
    loop {
        match lines.try_recv() {
            Ok(line) if line == "close" => break,
            Ok(line) => here.obey(&line),
            Err(TryRecvError::Empty) => {
                here.reap();
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(TryRecvError::Disconnected) => std::process::exit(0),
        }
    }
    here.host.close("child");
    say("closed");
}

fn say(line: &str) {
    println!("{MARK}{line}");
    std::io::stdout().flush().unwrap();
}

/// What a child has. The content of a session stands with it.
struct Here {
    host: Host,
    addr: String,
    senders: BTreeMap<u64, (Sender, Pages)>,
    receivers: BTreeMap<u64, (KvReceiverSession, u64)>,
    /// Those of them that read.
    readers: BTreeSet<u64>,
}

impl Here {
    /// `send ROOM PAGES HELD CONTENT` sends a prompt but for the last HELD pages;
    /// `rest ROOM` sends those;
    /// `receive ROOM PAGES CONTENT` opens a receiver, and checks what comes;
    /// `grant ROOM PAGES CONTENT LEASE_MS` keeps a prompt for a reader, and says the parameters;
    /// `claim CONTENT PARAMS` opens a reader, and says when its claim was heard;
    /// `read ROOM PAGES AFTER_MS` gives it pages, after that time, and checks what comes.
    fn obey(&mut self, line: &str) {
        let (what, numbers) = line.split_once(' ').unwrap();
        if what == "claim" {
            let (content, params) = numbers.split_once(' ').unwrap();
            let (room, receiver) = reader(&self.host, &TransferParams::parse(params).unwrap());
            super::until("a claim", || receiver.poll() == KvPoll::WaitingForInput);
            say(&format!("claimed {room}"));
            self.receivers.insert(room, (receiver, content.parse().unwrap()));
            self.readers.insert(room);
            return;
        }
        let numbers: Vec<u64> = numbers.split(' ').map(|word| word.parse().unwrap()).collect();
        match (what, &numbers[..]) {
            ("send", &[room, pages, held, content]) => {
                let mut sender = self.host.sender(room, SessionOptions::default());
                sender.init(pages as usize, None).unwrap();
                let mut all = self.host.prompt(pages as usize, content);
                let rest = all.split_off((pages - held) as usize);
                sender.send(all).unwrap();
                self.senders.insert(room, (sender, rest));
            }
            ("rest", &[room]) => {
                let (sender, rest) = self.senders.get_mut(&room).unwrap();
                sender.send(std::mem::take(rest)).unwrap();
            }
            ("receive", &[room, pages, content]) => {
                let mut receiver = self.host.receiver(&self.addr, room, SessionOptions::default());
                receiver.init(self.host.room_for(pages as usize), None).unwrap();
                self.receivers.insert(room, (receiver, content));
            }
            ("grant", &[room, pages, content, lease_ms]) => {
                let lease = Lease::Renewable(Duration::from_millis(lease_ms));
                let (sender, params) = grant(&mut self.host, room, pages as usize, content, lease);
                say(&format!("granted {}", params.to_json()));
                self.senders.insert(room, (sender, Pages::none()));
            }
            ("read", &[room, pages, after_ms]) => {
                std::thread::sleep(Duration::from_millis(after_ms));
                // It may have failed before, and its end has been said.
                let Some((receiver, _)) = self.receivers.get_mut(&room) else { return };
                receiver.init(self.host.room_for(pages as usize), None).unwrap();
            }
            _ => panic!("no such command: {line}"),
        }
    }

    /// Sessions that have ended and given their pages back.
    fn reap(&mut self) {
        for (room, (sender, mut rest)) in std::mem::take(&mut self.senders) {
            let end = end(&sender);
            match sender.reclaim() {
                Ok(pages) => {
                    rest.append(pages).unwrap();
                    self.host.free(rest);
                    say(&format!("ended {room} {end}"));
                }
                Err(sender) => drop(self.senders.insert(room, (sender, rest))),
            }
        }
        for (room, (receiver, content)) in std::mem::take(&mut self.receivers) {
            let end = end(&receiver);
            match receiver.reclaim() {
                Ok(pages) => {
                    match end.as_str() {
                        "Success" => self.host.arrived(pages.list(), content, &format!("room {room}")),
                        // A reader that fails may have read anything by then.
                        _ if self.readers.remove(&room) => self.host.rewrite(pages.list()),
                        _ => self.host.missed(pages.list(), content, &format!("room {room}")),
                    }
                    self.host.free(pages);
                    say(&format!("ended {room} {end}"));
                }
                Err(receiver) => drop(self.receivers.insert(room, (receiver, content))),
            }
        }
    }
}

/// Keeps a prompt for a reader: what a prefill worker answers in pull mode.
pub fn grant(
    host: &mut Host,
    room: u64,
    pages: usize,
    content: u64,
    lease: Lease,
) -> (Sender, TransferParams) {
    let (mode, given) = (Some(TransferMode::Pull), Some(lease));
    let options = SessionOptions { mode, lease: given, ..SessionOptions::default() };
    let mut sender = host.sender(room, options);
    sender.init(pages, None).unwrap();
    let prompt = host.prompt(pages, content);
    let list = prompt.list().clone();
    sender.send(prompt).unwrap();
    let (args, tokens) = (host.manager.args(), 16 * pages as u32);
    let kept =
        RemoteKv::granted(args, &host.addr, room.into(), tokens, &list, &sender.grants(), lease).unwrap();
    (sender, TransferParams::decode(TransferMode::Pull, kept))
}

/// Opens a reader of what the parameters say, and its room.
pub fn reader(host: &Host, params: &TransferParams) -> (u64, KvReceiverSession) {
    let remote = params.remote().unwrap();
    let Room::Number(room) = remote.room else { panic!("room {}", remote.room) };
    let options = SessionOptions { mode: params.mode, ..SessionOptions::default() };
    (room, host.receiver(&remote.bootstrap_addr(), room, remote.reader_options(options)))
}

fn end<S: KvSession>(session: &S) -> String {
    match session.failure() {
        Some(failure) => format!("{:?}", failure.cause),
        None => session.poll().to_string(),
    }
}
