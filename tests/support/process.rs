//! Hosts in processes of their own, which can be killed and stopped.
//!
//! A child is the test binary again, running only its test `child` with a variable set. It is told
//! what to do line by line on its standard input, and answers on its standard output. It dies with
//! the test: by its end of input, or, even when stopped, by a signal from the kernel.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

use kv_transfer::Timing;
use kv_transfer::params::{RemoteKv, TransferParams};
use kv_transfer::prelude::*;
use kv_transfer::{Lease, Receiver as KvReceiverSession, Reclaimed, Sender, TransferMode};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

use super::PATIENCE;
use super::host::{Host, Setup};
use super::memory::Shape;
use super::store::{Place, TransportKind};

const ROLE: &str = "KV_TRANSFER_TEST_CHILD";
/// The mark at the beginning of every line that a child writes; other lines are of the test harness.
const MARK: &str = "child says: ";

/// A host in another process, which is killed when the handle is dropped.
pub struct Process {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    /// The incarnation of its worker.
    pub incarnation: String,
}

impl Process {
    /// Starts a worker of `role` in a process of its own, and waits until peers can find it.
    pub fn start(role: WorkerRole, addr: &str) -> Process {
        Process::start_as(Kind::Usual, role, addr)
    }

    /// The same, for a host of another kind.
    pub fn start_as(kind: Kind, role: WorkerRole, addr: &str) -> Process {
        Process::start_by(&[], kind, role, addr)
    }

    /// The same, started by a program that puts the process elsewhere: `nsenter` or `unshare`, with its options.
    pub fn start_by(by: &[&str], kind: Kind, role: WorkerRole, addr: &str) -> Process {
        let exe = std::env::current_exe().unwrap();
        let mut command = match by {
            [] => Command::new(exe),
            [program, options @ ..] => {
                let mut command = Command::new(program);
                command.args(options).arg(exe);
                command
            }
        };
        let mut child = command
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(ROLE, format!("{role:?} {} {addr}", kind.name()))
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

    /// Sends the child a line.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// Waits for a line that begins with `word`. Returns its other words.
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

    /// The other words of a line that begins with `word`, if there is one.
    pub fn hear(&mut self, word: &str) -> Option<Vec<String>> {
        loop {
            let line = match self.lines.try_recv() {
                Ok(line) => line,
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Disconnected) => panic!("the child is dead; {word:?} was to come"),
            };
            let mut words = line.split(' ').map(str::to_owned);
            if words.next().as_deref() == Some(word) {
                return Some(words.collect());
            }
        }
    }

    /// How a session of the child has ended: `Success`, or the cause in words.
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

    /// Kills the process by SIGKILL, and returns when it is dead.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Ends the process. The child checks that everything has come back.
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

/// How hosts of process tests, and their children alike, are set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A host with small pages.
    Usual,
    /// A host with small pages, over two transports as one.
    Several,
    /// A host with small pages, over TCP on an address of the test's choice.
    Placed(Place),
    /// A host with large pages, of which one request takes milliseconds to copy, and with timeouts below a
    /// second.
    Stopped(TransportKind),
}

impl Kind {
    fn name(self) -> String {
        match self {
            Kind::Usual => "Usual".to_owned(),
            Kind::Several => "Several-ways".to_owned(),
            Kind::Placed(place) => place.word(),
            Kind::Stopped(transport) => format!("{transport:?}"),
        }
    }

    fn named(name: &str) -> Kind {
        match name {
            "Usual" => Kind::Usual,
            "Several-ways" => Kind::Several,
            _ => match Place::of_word(name) {
                Some(place) => Kind::Placed(place),
                None => Kind::Stopped(TransportKind::named(name)),
            },
        }
    }

    /// The settings of a host of this kind.
    pub fn setup(self, role: WorkerRole, addr: &str) -> Setup {
        let millis = Duration::from_millis;
        match self {
            Kind::Usual => {
                let shape = Shape { rows: 0, aux_regions: 0, ..Shape::layer_major(256, 2, 32 << 10) };
                let timing = Timing::default().with(|timing| {
                    timing.keepalive = millis(300);
                    timing.peer_timeout = Duration::from_secs(2);
                });
                Setup { timing, ..Setup::new(role, addr, shape) }
            }
            Kind::Several => Setup { transport: TransportKind::Several, ..Kind::Usual.setup(role, addr) },
            Kind::Placed(place) => {
                let mut setup =
                    Setup { transport: TransportKind::Placed(place), ..Kind::Usual.setup(role, addr) };
                // A link that is cut stays so for longer than a permission.
                setup.timing.write_permission = Duration::from_secs(2);
                setup
            }
            Kind::Stopped(transport) => {
                let shape = Shape { rows: 0, aux_regions: 0, ..Shape::layer_major(160, 2, 256 << 10) };
                let timing = Timing::default().with(|timing| {
                    timing.retry_first = millis(20);
                    timing.retry_max = millis(200);
                    timing.keepalive = millis(100);
                    timing.peer_timeout = millis(500);
                    timing.write_permission = millis(600);
                    timing.lookup_retry = millis(20);
                    timing.failed_room_ttl = millis(500);
                    timing.kv_lease_duration = millis(500);
                });
                Setup { timing, transport, lease: millis(900), ..Setup::new(role, addr, shape) }
            }
        }
    }
}

/// A host of the usual kind.
pub fn setup(role: WorkerRole, addr: &str) -> Setup {
    Kind::Usual.setup(role, addr)
}

/// Runs a child. Returns at once in a process that is none.
pub fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let [role, kind, addr] = role.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
    let role = if role == "Prefill" { WorkerRole::Prefill } else { WorkerRole::Decode };
    let mut actor = Actor::start(Kind::named(kind), role, addr);
    let (tell, lines) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let _ = tell.send(line);
        }
    });
    say(&format!("ready {}", actor.host.worker.as_ref().unwrap().incarnation()));
    loop {
        match lines.try_recv() {
            Ok(line) if line == "close" => break,
            Ok(line) => actor.obey(&line),
            Err(TryRecvError::Empty) => {
                actor.step();
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(TryRecvError::Disconnected) => std::process::exit(0),
        }
        for line in actor.said.drain(..) {
            say(&line);
        }
    }
    actor.host.close("child");
    say("closed");
}

fn say(line: &str) {
    println!("{MARK}{line}");
    std::io::stdout().flush().unwrap();
}

/// A host that obeys lines of commands, in a child or in this process. Each session is kept with its content.
pub struct Actor {
    pub host: Host,
    /// The answers of the host.
    pub said: VecDeque<String>,
    addr: String,
    senders: BTreeMap<u64, (Sender, Pages)>,
    receivers: BTreeMap<u64, (KvReceiverSession, u64)>,
    /// How senders have ended whose pages are back.
    ends: BTreeMap<u64, String>,
    /// The rooms of sessions that read.
    readers: BTreeSet<u64>,
    /// How long sessions may take that are opened from now on.
    deadline: Option<Duration>,
    /// Pages that were given back are not free, but filled with a pattern and watched.
    watch: Option<Watch>,
}

/// Pages that sessions have given back, and when all of them were checked last.
#[derive(Default)]
struct Watch {
    pages: Pages,
    looked: Option<Instant>,
    /// The pattern to write into the next pages.
    pattern: u8,
}

/// The least time between two checks of watched pages. A write into such a page stays visible.
const LOOK_EVERY: Duration = Duration::from_millis(40);

impl Actor {
    /// Starts the host.
    pub fn start(kind: Kind, role: WorkerRole, addr: &str) -> Actor {
        Actor {
            host: kind.setup(role, addr).start(),
            said: VecDeque::new(),
            addr: addr.to_owned(),
            senders: BTreeMap::new(),
            receivers: BTreeMap::new(),
            ends: BTreeMap::new(),
            readers: BTreeSet::new(),
            deadline: None,
            watch: None,
        }
    }

    /// Obeys a line. `send ROOM PAGES HELD CONTENT` sends a prompt but for its last HELD pages, and `rest
    /// ROOM` sends those. `receive ROOM PAGES CONTENT` opens a receiver, and checks what arrives. `keep ROOM
    /// PAGES CONTENT LEASE_MS` keeps a prompt for a reader, and answers with the parameters. `acquire CONTENT
    /// PARAMS` opens a reader, and answers when its lease was acquired. `read ROOM PAGES AFTER_MS` gives the
    /// reader pages after that time, and checks what arrives. `ask ROOM` answers whether a sender is open, owns its pages
    /// after its end, or has given them back. `deadline MS` sets the deadline of later
    /// sessions. `watch PATTERN` keeps all pages that come back from now on, and panics when one is written
    /// into. `free` ends the watch when all sessions have ended, and answers with the number of pages.
    pub fn obey(&mut self, line: &str) {
        let (what, numbers) = line.split_once(' ').unwrap_or((line, ""));
        if what == "acquire" {
            let (content, params) = numbers.split_once(' ').unwrap();
            let (room, receiver) = reader(&self.host, &TransferParams::parse(params).unwrap());
            super::until("the lease of a reader", || receiver.poll() == KvPoll::WaitingForInput);
            self.said.push_back(format!("acquired {room}"));
            self.receivers.insert(room, (receiver, content.parse().unwrap()));
            self.readers.insert(room);
            return;
        }
        let options = SessionOptions::default().with(|options| options.deadline = self.deadline);
        let numbers: Vec<u64> = numbers.split_terminator(' ').map(|word| word.parse().unwrap()).collect();
        match (what, &numbers[..]) {
            ("send", &[room, pages, held, content]) => {
                let mut sender = self.host.sender(room, options);
                sender.init(pages as usize, None).unwrap();
                let mut all = self.host.prompt(pages as usize, content);
                let rest = all.split_off((pages - held) as usize);
                sender.send(all).unwrap();
                self.senders.insert(room, (sender, rest));
            }
            ("rest", &[room]) => {
                // It may have failed before, and its end has been said.
                let Some((sender, rest)) = self.senders.get_mut(&room) else { return };
                sender.send(std::mem::take(rest)).unwrap();
            }
            ("receive", &[room, pages, content]) => {
                let mut receiver = self.host.receiver(&self.addr, room, options);
                receiver.init(self.host.room_for(pages as usize), None).unwrap();
                self.receivers.insert(room, (receiver, content));
            }
            ("keep", &[room, pages, content, lease_ms]) => {
                let lease = Lease::Renewable(Duration::from_millis(lease_ms));
                let (sender, params) = keep(&mut self.host, room, pages as usize, content, lease);
                self.said.push_back(format!("kept {}", params.to_json()));
                self.senders.insert(room, (sender, Pages::none()));
            }
            ("read", &[room, pages, after_ms]) => {
                if after_ms > 0 {
                    say("asleep");
                    std::thread::sleep(Duration::from_millis(after_ms));
                }
                // It may have failed before, and its end has been said.
                let Some((receiver, _)) = self.receivers.get_mut(&room) else { return };
                receiver.init(self.host.room_for(pages as usize), None).unwrap();
            }
            ("ask", &[room]) => {
                let answer = match self.senders.get(&room) {
                    Some((sender, _)) if !sender.poll().is_terminal() => "open".to_owned(),
                    Some((sender, _)) => format!("owns {}", end(sender)),
                    None => format!("back {}", self.ends[&room]),
                };
                self.said.push_back(format!("asked {answer}"));
            }
            ("deadline", &[ms]) => self.deadline = Some(Duration::from_millis(ms)),
            ("watch", &[pattern]) => self.watch = Some(Watch { pattern: pattern as u8, ..Watch::default() }),
            ("free", []) => {
                let open = self.senders.keys().chain(self.receivers.keys()).collect::<Vec<_>>();
                assert!(open.is_empty(), "rooms {open:?} have not given their pages back");
                self.look();
                let pages = self.watch.take().map_or(Pages::none(), |watch| watch.pages);
                self.said.push_back(format!("freed {}", pages.len()));
                self.host.free(pages);
                self.host.check_idle("when all pages are free");
            }
            _ => panic!("no such command: {line}"),
        }
    }

    /// Takes back what has ended, and checks watched pages.
    pub fn step(&mut self) {
        self.reap();
        let due = |watch: &Watch| watch.looked.is_none_or(|looked| looked.elapsed() >= LOOK_EVERY);
        if self.watch.as_ref().is_some_and(due) {
            self.look();
        }
    }

    /// Checks that nothing was written into pages that were given back.
    fn look(&mut self) {
        let Some(watch) = &mut self.watch else { return };
        for page in watch.pages.list().iter() {
            self.host.memory.check_page(page, &"a page that was given back");
        }
        watch.looked = Some(Instant::now());
    }

    /// The other words of an answer that begins with `word`, if there is one.
    pub fn hear(&mut self, word: &str) -> Option<Vec<String>> {
        while let Some(line) = self.said.pop_front() {
            let mut words = line.split(' ').map(str::to_owned);
            if words.next().as_deref() == Some(word) {
                return Some(words.collect());
            }
        }
        None
    }

    /// True once bytes have arrived in a page that this host has not written since it was free.
    pub fn sees_bytes(&self) -> bool {
        (0..self.host.memory.shape.pages).any(|page| self.host.memory.is_touched(page))
    }

    /// Pages that a session has given back are their owner's again.
    fn back(&mut self, pages: Pages) {
        let Some(watch) = &mut self.watch else { return self.host.free(pages) };
        let numbers: Vec<u32> = pages.list().iter().collect();
        // From the end: what is still copied arrives there last.
        for page in numbers.iter().rev() {
            let mine = vec![watch.pattern ^ *page as u8; self.host.memory.shape.page_len()];
            self.host.memory.write_page(*page, &mine);
        }
        watch.pattern = watch.pattern.wrapping_add(1);
        watch.pages.append(pages).unwrap();
    }

    /// Sessions that have ended and given their pages back. How a session ended is read after its pages came
    /// back: before, the worker's thread may end it between the two calls.
    fn reap(&mut self) {
        for (room, (mut sender, mut rest)) in std::mem::take(&mut self.senders) {
            match sender.reclaim() {
                Some(back) => {
                    let end = end(&sender);
                    rest.append(back.pages).unwrap();
                    self.back(rest);
                    self.said.push_back(format!("ended {room} {end}"));
                    self.ends.insert(room, end);
                }
                None => drop(self.senders.insert(room, (sender, rest))),
            }
        }
        for (room, (mut receiver, content)) in std::mem::take(&mut self.receivers) {
            match receiver.reclaim() {
                Some(Reclaimed { pages, .. }) => {
                    let end = end(&receiver);
                    let reader = self.readers.remove(&room);
                    match end.as_str() {
                        "Success" => self.host.arrived(pages.list(), content, &format!("room {room}")),
                        // They are written on at once, before anything could hide what comes late.
                        _ if self.watch.is_some() => {}
                        // A reader that fails may have read anything by then.
                        _ if reader => self.host.rewrite(pages.list()),
                        _ => self.host.missed(pages.list(), content, &format!("room {room}")),
                    }
                    self.back(pages);
                    self.said.push_back(format!("ended {room} {end}"));
                }
                None => drop(self.receivers.insert(room, (receiver, content))),
            }
        }
    }
}

/// Keeps a prompt for a reader, and returns what a prefill worker answers in pull mode.
pub fn keep(
    host: &mut Host,
    room: u64,
    pages: usize,
    content: u64,
    lease: Lease,
) -> (Sender, TransferParams) {
    let (mode, given) = (Some(TransferMode::Pull), Some(lease));
    let options = SessionOptions::default().with(|options| {
        options.mode = mode;
        options.lease = given;
    });
    let mut sender = host.sender(room, options);
    sender.init(pages, None).unwrap();
    let prompt = host.prompt(pages, content);
    let list = prompt.list().clone();
    sender.send(prompt).unwrap();
    let (args, tokens) = (host.manager.args(), 16 * pages as u32);
    let kept =
        RemoteKv::granted(args, &host.addr, room.into(), tokens, &list, &sender.lease_refs(), lease).unwrap();
    (sender, TransferParams::decode(TransferMode::Pull, kept))
}

/// Opens a reader of what the parameters name. Returns it with its room.
pub fn reader(host: &Host, params: &TransferParams) -> (u64, KvReceiverSession) {
    let remote = params.remote().unwrap();
    let Some(Room::Number(room)) = remote.room else { panic!("room {:?}", remote.room) };
    let options = SessionOptions::default().with(|options| options.mode = params.mode);
    (room, host.receiver(&remote.bootstrap_addr(), room, remote.reader_options(options)))
}

fn end<S: KvSession>(session: &S) -> String {
    match session.failure() {
        Some(failure) => format!("{:?}", failure.cause),
        None => session.poll().to_string(),
    }
}
