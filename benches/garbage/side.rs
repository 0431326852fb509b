//! Workers that make requests: the worker that serves, in a process of its own, and its healthy peer.

use std::collections::VecDeque;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kv_transfer::prelude::*;
use kv_transfer::{Manager, Publication, Receiver, Sender};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::Error;

/// The variable that makes a process the serving worker: its role, and the address of the bootstrap server.
pub(crate) const SERVE: &str = "KV_BENCH_GARBAGE_SERVE";
/// The size of a page in bytes. A request has one page.
const PAGE: u64 = 64 << 10;
const PAGES: u32 = 64;
/// The number of rooms that the serving worker opens before its peer does.
const AHEAD: usize = 4;
/// How long a request may take that must end.
const PATIENCE: Duration = Duration::from_secs(60);

/// The role of a worker's peer.
pub(crate) fn other(role: WorkerRole) -> WorkerRole {
    if role == WorkerRole::Prefill { WorkerRole::Decode } else { WorkerRole::Prefill }
}

/// The arguments that all workers here have in common.
pub(crate) fn args(engine: &str, addr: u64) -> Result<KvArgs, Error> {
    let region = Region::dram(RegionRole::Kv, addr, u64::from(PAGES) * PAGE, PAGE);
    Ok(KvArgs::builder(engine, 0).pages(PAGES, 16).region(region).build()?)
}

/// A transport, with its memory.
pub(crate) fn transport() -> Result<(LocalTransport, Arena), Error> {
    let arena = Arena::new(PAGES as usize * PAGE as usize)?;
    let mut transport = LocalTransport::new(LocalConfig::default())?;
    transport.add_arena(&arena)?;
    Ok((transport, arena))
}

/// A worker, with its scheduler.
pub(crate) struct Side {
    manager: Manager,
    role: WorkerRole,
    addr: String,
    arena: Arena,
    pool: PagePool,
    room: u64,
    _worker: Worker,
}

/// One side's end of a request.
enum Half {
    Sends(Sender),
    Receives(Receiver),
}

impl Side {
    pub(crate) fn start(role: WorkerRole, addr: &str) -> Result<Side, Error> {
        let (transport, arena) = transport()?;
        let engine = format!("{role:?}").to_lowercase();
        let client = HttpBootstrapClient::new(ClientConfig::default())?;
        let config = WorkerConfig::new(args(&engine, arena.addr())?, role)
            .with(|config| config.bootstrap = Some(addr.to_owned()));
        let worker = Worker::start(config, transport, Box::new(client))?;
        let manager = worker.manager();
        let start = Instant::now();
        while manager.publication() != Publication::Published {
            if start.elapsed() > PATIENCE {
                return Err(format!("not registered: {:?}", manager.publication()).into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(Side {
            manager,
            role,
            addr: addr.to_owned(),
            arena,
            pool: PagePool::new(PAGES),
            room: 0,
            _worker: worker,
        })
    }

    /// Makes requests one after the other for `time`, and at least one. Returns how long each took, in
    /// milliseconds.
    pub(crate) fn requests(&mut self, time: Duration) -> Result<Vec<f64>, Error> {
        let start = Instant::now();
        let mut latencies = Vec::new();
        while latencies.is_empty() || start.elapsed() < time {
            let begun = Instant::now();
            let (room, half) = self.open()?;
            self.end(room, half, Some(begun + PATIENCE), || {
                latencies.push(begun.elapsed().as_secs_f64() * 1e3);
            })?;
        }
        Ok(latencies)
    }

    /// Begins this side's half of the next request.
    fn open(&mut self) -> Result<(u64, Half), Error> {
        let room = self.room;
        self.room += 1;
        let page = (room % u64::from(PAGES)) as u32;
        let pages = self.pool.adopt(PageList::from_pages([page])?)?;
        // A room that waits for its peer must not end before the program does.
        let options = || SessionOptions::default().with(|options| options.deadline = Some(PATIENCE * 60));
        let no_room = "no room for a command";
        if self.role == WorkerRole::Prefill {
            self.arena.write(u64::from(page) as usize * PAGE as usize, &room.to_le_bytes())?;
            let mut sender = self.manager.sender(&self.addr, Room::Number(room), &[], options())?;
            sender.init(1, None).map_err(|_| no_room)?;
            sender.send(pages).map_err(|_| no_room)?;
            Ok((room, Half::Sends(sender)))
        } else {
            let mut receiver = self.manager.receiver(&self.addr, Room::Number(room), options())?;
            receiver.init(pages, None).map_err(|_| no_room)?;
            Ok((room, Half::Receives(receiver)))
        }
    }

    /// Waits until a request has succeeded, and until its pages are back.
    fn end(
        &self,
        room: u64,
        half: Half,
        until: Option<Instant>,
        succeeded: impl FnOnce(),
    ) -> Result<(), Error> {
        match half {
            Half::Sends(sender) => self.end_session(sender, until, succeeded),
            Half::Receives(receiver) => {
                self.end_session(receiver, until, succeeded)?;
                let mut got = [0; 8];
                self.arena.read((room % u64::from(PAGES)) as usize * PAGE as usize, &mut got)?;
                if u64::from_le_bytes(got) != room {
                    return Err(format!("room {room} has the bytes of {}", u64::from_le_bytes(got)).into());
                }
                Ok(())
            }
        }
    }

    fn end_session<S: KvSession>(
        &self,
        mut session: S,
        until: Option<Instant>,
        succeeded: impl FnOnce(),
    ) -> Result<(), Error> {
        while !session.poll().is_terminal() {
            self.sleep(until)?;
        }
        if let Some(failure) = session.failure() {
            return Err(failure.into());
        }
        succeeded();
        loop {
            if let Some(back) = session.reclaim() {
                self.pool.release(back.pages)?;
                return Ok(());
            }
            self.sleep(until)?;
        }
    }

    /// Sleeps until a session changes, or until a moment.
    fn sleep(&self, until: Option<Instant>) -> Result<(), Error> {
        if until.is_some_and(|until| Instant::now() > until) {
            return Err(format!("a request took longer than {PATIENCE:?}").into());
        }
        let set = self.manager.poll_set();
        let second = Timespec { tv_sec: 1, tv_nsec: 0 };
        poll(&mut [PollFd::new(set, PollFlags::IN)], Some(&second))?;
        set.drain(|_| {});
        Ok(())
    }
}

/// Runs the serving process until its standard input ends.
pub(crate) fn serve(told: &str) -> Result<(), Error> {
    let (role, addr) = told.split_once(' ').ok_or("the parent has told too little")?;
    end_with_parent();
    let mut side = Side::start(role_of(role)?, addr)?;
    let mut open = VecDeque::new();
    loop {
        while open.len() < AHEAD {
            open.push_back(side.open()?);
        }
        if let Some((room, half)) = open.pop_front() {
            side.end(room, half, None, || ())?;
        }
    }
}

pub(crate) fn role_of(name: &str) -> Result<WorkerRole, Error> {
    match name {
        "Prefill" => Ok(WorkerRole::Prefill),
        "Decode" => Ok(WorkerRole::Decode),
        _ => Err(format!("no role {name}").into()),
    }
}

fn end_with_parent() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
}

/// The serving process, as its parent sees it.
pub(crate) struct Served(Child);

impl Served {
    pub(crate) fn start(role: WorkerRole, addr: &str) -> Result<Served, Error> {
        let child = Command::new(std::env::current_exe()?)
            .env(SERVE, format!("{role:?} {addr}"))
            .stdin(Stdio::piped())
            .spawn()?;
        Ok(Served(child))
    }

    /// The processor time that the process has used, in seconds.
    pub(crate) fn used(&self) -> Result<f64, Error> {
        let mut nanos = 0;
        for task in std::fs::read_dir(format!("/proc/{}/task", self.0.id()))? {
            let told = std::fs::read_to_string(task?.path().join("schedstat"))?;
            nanos += told.split(' ').next().unwrap_or_default().parse::<u64>()?;
        }
        Ok(nanos as f64 / 1e9)
    }

    /// Checks that the process still serves.
    pub(crate) fn check(&mut self) -> Result<(), Error> {
        match self.0.try_wait()? {
            Some(status) => Err(format!("the serving process has ended: {status}").into()),
            None => Ok(()),
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
