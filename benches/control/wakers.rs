//! What tasks that await sessions cost: a change of state while nobody waits, and while a task waits for each session.
//! Measured in CPU time of the one thread.

use std::collections::VecDeque;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use criterion::{Criterion, Throughput};
use kv_transfer::prelude::*;
use kv_transfer::trace::KvWhat;
use kv_transfer::unstable::machine::Machine;
use kv_transfer::unstable::proto::{Command, Input, Output, Resource};
use kv_transfer::unstable::worker::{BootTime, Driver, Handle, Setup, Waiting};
use kv_transfer::{EngineId, Quarantine, SessionId, Time, TransferError, WorkerId};
use rustix::time::{ClockId, clock_gettime};

/// Sessions whose state changes in one turn of the worker.
const SESSIONS: u64 = 1000;

/// A machine that changes the state of every session to and fro, in each turn that is asked for.
struct Pendulum {
    sessions: Vec<SessionId>,
    is_transferring: bool,
    wanted: Arc<AtomicBool>,
    outputs: VecDeque<Output>,
}

impl Machine for Pendulum {
    type Command = Command;
    type Status = KvPoll;
    type Resource = Resource;
    type Failure = TransferError;
    type Quarantine = Quarantine;
    type Trace = KvWhat;

    fn handle(&mut self, _now: Time, input: Input) {
        match input {
            Input::Command(Command::OpenSender { session, .. }) => self.sessions.push(session),
            Input::Timeout => {
                self.wanted.store(false, Ordering::Relaxed);
                self.is_transferring = !self.is_transferring;
                let poll = if self.is_transferring { KvPoll::Transferring } else { KvPoll::WaitingForInput };
                let changes = self.sessions.iter().map(|session| Output::Status {
                    session: *session,
                    poll,
                    failure: None,
                });
                self.outputs.extend(changes);
            }
            _ => {}
        }
    }

    fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        self.wanted.load(Ordering::Relaxed).then_some(Time::from_nanos(0))
    }
}

/// A worker without a thread, and its sessions.
struct Bench {
    driver: Driver<Pendulum>,
    wanted: Arc<AtomicBool>,
    handles: Vec<Handle<Pendulum>>,
}

impl Bench {
    fn new() -> Result<Bench, Box<dyn Error>> {
        let wanted = Arc::new(AtomicBool::new(false));
        let machine = Pendulum {
            sessions: Vec::new(),
            is_transferring: false,
            wanted: Arc::clone(&wanted),
            outputs: VecDeque::new(),
        };
        let setup = Setup::new(WorkerId { engine: EngineId::new("prefill")?, rank: 0 });
        let transport = Box::new(LocalTransport::new(LocalConfig::default())?);
        let client = Box::new(HttpBootstrapClient::new(ClientConfig::default())?);
        let mut driver = Driver::new(machine, setup, transport, client, Box::new(BootTime))?;
        let mut handles = Vec::new();
        for number in 0..SESSIONS {
            let open = |session| Command::OpenSender {
                session,
                room: Room::from(number),
                receivers: 0,
                options: Box::default(),
            };
            handles.push(driver.port().open(open)?);
        }
        for _ in 0..SESSIONS {
            driver.turn();
        }
        Ok(Bench { driver, wanted, handles })
    }

    /// The CPU time of one turn in which every session changes; before it, the poll set is drained.
    fn turn(&mut self) -> Duration {
        self.driver.port().poll_set().drain(|_| {});
        self.wanted.store(true, Ordering::Relaxed);
        let start = cpu_time();
        self.driver.turn();
        let time = cpu_time() - start;
        assert!(!self.wanted.load(Ordering::Relaxed), "nothing has changed");
        time
    }

    fn waiting(&self) -> Vec<Waiting> {
        self.handles.iter().map(Handle::waiting).collect()
    }
}

/// The CPU time of this thread, in which other programs have no share.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Has a task wait for each session.
fn wait(all: &mut [Waiting]) {
    let cx = Context::from_waker(Waker::noop());
    for waiting in all {
        let _: Poll<()> = waiting.look(&cx, || Poll::Pending);
    }
}

pub(crate) fn changes(criterion: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut bench = Bench::new()?;
    let mut group = criterion.benchmark_group("1000 changes of state");
    group.throughput(Throughput::Elements(SESSIONS));
    group.bench_function("nobody waits", |b| {
        b.iter_custom(|turns| (0..turns).map(|_| bench.turn()).sum());
    });
    let mut waiting = bench.waiting();
    group.bench_function("a task waits for each", |b| {
        b.iter_custom(|turns| {
            let turn = |_| {
                wait(&mut waiting);
                bench.turn()
            };
            (0..turns).map(turn).sum()
        });
    });
    group.finish();
    let mut group = criterion.benchmark_group("1000 tasks begin to wait");
    group.throughput(Throughput::Elements(SESSIONS));
    group.bench_function("each for one session", |b| {
        b.iter_custom(|turns| {
            let turn = |_| {
                bench.turn();
                let start = cpu_time();
                wait(&mut waiting);
                cpu_time() - start
            };
            (0..turns).map(turn).sum()
        });
    });
    group.finish();
    Ok(())
}
