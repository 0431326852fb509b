//! One process of the example: an engine with its ranks, and the loop that gives its scheduler time.
use std::fmt;
use std::io::{BufRead, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use kv_examples::cli::{Pace, TransportKind};
use kv_examples::process::end_with_parent;
use kv_examples::transport;
use kv_transfer::bootstrap::{ClientConfig, HttpBootstrapClient, KvBootstrapServer};
use kv_transfer::{EngineGroup, KvArgs, Worker, WorkerConfig, WorkerRole};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::Outcome;
use super::cache::{KvCache, Shape};
use super::decode::Decode;
use super::prefill::Prefill;

/// How long an engine sleeps if nothing happens.
const IDLE: Duration = Duration::from_micros(500);
/// What no call should take.
const BOUND_NS: u64 = 1_000_000;
/// How long a worker may take to end.
const STOP_WITHIN: Duration = Duration::from_secs(1);

/// What a process is started with.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Spec {
    pub name: String,
    pub shape: Shape,
    pub blocks: u32,
    pub tp: usize,
    pub transport: TransportKind,
    /// Of D: the request channels of the servers. None of them: this process is P.
    pub servers: Option<Vec<String>>,
    /// Most commands that wait for a worker; `None` for as many as workers have room for by themselves.
    pub command_queue: Option<usize>,
    /// Of D: how long a request may be at P before D computes the prompt itself.
    pub deadline_ms: u64,
    /// Compare every byte that D receives.
    pub check: bool,
}

/// What the parent tells a process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Command {
    /// To D: answer this prompt with so many tokens.
    Request { id: u64, prompt: Vec<u32>, answer: usize },
    /// Tell how things are.
    Report,
    /// To P: compute this prompt, and send its KV by the way of comparison to whoever connects.
    PlainSend { prompt: Vec<u32> },
    /// To D: receive the KV of this prompt by the way of comparison.
    PlainReceive { addr: String, prompt: Vec<u32> },
}

/// What a process tells its parent. Times are of `CLOCK_MONOTONIC`, in nanoseconds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Event {
    /// The process serves. P is reached at this address.
    Ready { addr: String },
    /// From D: the answer, and how the prompt's KV came to be.
    Done { id: u64, answer: Vec<u32>, remote: bool, cached: u32, lost: Option<String>, received_at: u64 },
    /// From P: the KV of a prompt is handed over.
    Handed { at: u64 },
    /// From P: the KV of a prompt waits at this address.
    Plain { addr: String },
    /// How things are.
    Report(State),
}

/// How things are in a process.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct State {
    pub free_blocks: usize,
    pub blocks: usize,
    pub lost_blocks: usize,
    pub open: usize,
    pub swapped: u64,
    pub resident_kib: u64,
    pub calls: Calls,
}

/// The scheduler's calls of the adapter: how many, and the longest of them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Calls {
    pub count: u64,
    /// The longest call by the clock, and how many took more than a millisecond.
    pub wall_ns: u64,
    pub wall_over: u64,
    /// The same by the processor time of the scheduler's thread.
    pub cpu_ns: u64,
    pub cpu_over: u64,
    /// The name of the call with the most processor time.
    pub longest: String,
    /// The longest time in a call that the thread neither had a processor nor was in line for one: that it was blocked.
    pub blocked_ns: u64,
}

impl Calls {
    /// Calls `f`, and notes how long the call took.
    pub fn time<T>(&mut self, name: &str, f: impl FnOnce() -> T) -> T {
        let (in_line, wall, cpu) = (in_line(), Instant::now(), nanos(ClockId::ThreadCPUTime));
        let result = f();
        let (wall, cpu) = (wall.elapsed().as_nanos() as u64, nanos(ClockId::ThreadCPUTime) - cpu);
        let in_line = self::in_line().saturating_sub(in_line);
        self.count += 1;
        self.blocked_ns = self.blocked_ns.max(wall.saturating_sub(cpu + in_line));
        self.wall_ns = self.wall_ns.max(wall);
        self.wall_over += u64::from(wall > BOUND_NS);
        self.cpu_over += u64::from(cpu > BOUND_NS);
        if cpu > self.cpu_ns {
            (self.cpu_ns, self.longest) = (cpu, name.to_owned());
        }
        result
    }

    /// Adds the calls of another scheduler.
    pub fn add(&mut self, other: &Calls) {
        self.count += other.count;
        self.wall_ns = self.wall_ns.max(other.wall_ns);
        self.wall_over += other.wall_over;
        self.cpu_over += other.cpu_over;
        self.blocked_ns = self.blocked_ns.max(other.blocked_ns);
        if other.cpu_ns > self.cpu_ns {
            (self.cpu_ns, self.longest) = (other.cpu_ns, other.longest.clone());
        }
    }
}

impl fmt::Display for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Calls { count, wall_ns, wall_over, cpu_ns, cpu_over, longest, blocked_ns } = self;
        let [wall, cpu, blocked] = [wall_ns, cpu_ns, blocked_ns].map(|ns| ns / 1000);
        write!(f, "longest of {count} scheduler calls: {wall} µs by the clock ({wall_over} over 1 ms), ")?;
        write!(f, "{cpu} µs of processor time ({longest}; {cpu_over} over 1 ms), {blocked} µs blocked")
    }
}

/// Nanoseconds for which this thread has been ready to run while others had the processors; 0 where the kernel does not
/// count them.
fn in_line() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().nth(1).and_then(|nanos| nanos.parse().ok()).unwrap_or(0)
}

/// The time of a clock.
pub fn nanos(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Now, by the clock that all processes of the host share.
pub fn now() -> u64 {
    nanos(ClockId::Monotonic)
}

/// What both schedulers do.
pub trait Scheduler {
    /// Takes a command.
    fn command(&mut self, command: Command) -> Outcome<()>;
    /// One step; true if something happened.
    fn step(&mut self) -> Outcome<bool>;
    fn state(&self) -> State;
}

/// Runs the process until its parent closes its standard input.
pub fn run(spec: Spec) -> Outcome<()> {
    end_with_parent()?;
    let cache = Arc::new(KvCache::new(spec.shape, spec.blocks, spec.tp, "port", spec.transport)?);
    let server = match spec.servers {
        Some(_) => None,
        None => Some(KvBootstrapServer::start("127.0.0.1:0")?),
    };
    let bootstrap = server.as_ref().map(|server| server.local_addr().to_string());
    let role = if server.is_some() { WorkerRole::Prefill } else { WorkerRole::Decode };
    let mut workers = Vec::new();
    for (rank, memory) in cache.ranks().iter().enumerate() {
        let args = cache.describe(rank, KvArgs::builder(&spec.name, rank as u32)).build()?;
        let config = WorkerConfig::new(args, role).with(|config| {
            config.bootstrap = bootstrap.clone();
            config.command_queue = spec.command_queue.unwrap_or(config.command_queue);
        });
        let client = HttpBootstrapClient::new(ClientConfig::default())?;
        let (worker, _) = transport::start(memory, config, None, client, Pace::Normal)?;
        workers.push(worker);
    }
    let life = workers.first().map(Worker::incarnation).ok_or("an engine has a rank")?;
    let ranks = EngineGroup::new(workers.iter().map(Worker::manager).collect())?;
    match (&spec.servers, bootstrap) {
        (Some(servers), _) => serve(Decode::new(&spec, servers, ranks, life, cache))?,
        (None, Some(bootstrap)) => {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            tell(&Event::Ready { addr: listener.local_addr()?.to_string() });
            serve(Prefill::new(ranks, cache, bootstrap, listener))?;
        }
        (None, None) => {}
    }
    for worker in workers {
        worker.stop(STOP_WITHIN);
    }
    Ok(())
}

fn serve(mut scheduler: impl Scheduler) -> Outcome<()> {
    let commands = commands();
    loop {
        let mut busy = false;
        loop {
            match commands.try_recv() {
                Ok(Command::Report) => {
                    let state = State { resident_kib: resident_kib(), ..scheduler.state() };
                    tell(&Event::Report(state));
                }
                Ok(command) => scheduler.command(command)?,
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
            busy = true;
        }
        if !(scheduler.step()? || busy) {
            thread::sleep(IDLE);
        }
    }
}

/// The commands of the parent.
fn commands() -> Receiver<Command> {
    let (sender, commands) = channel();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let Ok(command) = serde_json::from_str(&line) else { break };
            if sender.send(command).is_err() {
                break;
            }
        }
    });
    commands
}

/// Tells the parent.
pub fn tell(event: &Event) {
    let mut out = std::io::stdout().lock();
    if let Ok(line) = serde_json::to_string(event) {
        let _ = writeln!(out, "{line}");
    }
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
