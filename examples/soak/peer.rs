//! A decode worker in a process of its own: the process, and its parent's view.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kv_transfer::Sender;
use kv_transfer::prelude::*;
use kv_transfer::unstable::random::SplitMix64;

use super::TransportKind;
use super::side::{Error, PAGE, Side, reclaimed, until};

/// The number of pages of the largest request.
const MOST: u64 = 32;

/// The room of a request of a decode worker.
fn room(peer: u64, request: u64) -> u64 {
    peer << 32 | request
}

/// The number of pages of the request in a room.
fn pages(room: u64) -> usize {
    1 + SplitMix64::new(room).below(MOST) as usize
}

/// A decode process, and the request that is on its way to it.
pub struct Peer {
    number: u64,
    process: Child,
    until: Option<Instant>,
    requests: u64,
    sender: Option<Sender>,
}

impl Peer {
    /// Starts a decode worker that lives for `life`, or until the end of the run.
    pub fn start(
        transport: TransportKind,
        addr: &str,
        number: u64,
        life: Option<Duration>,
    ) -> Result<Peer, Error> {
        let transport = match transport {
            TransportKind::Local => "local",
            TransportKind::Tcp => "tcp",
            TransportKind::Nixl => "nixl",
            TransportKind::Ucx => "ucx",
            TransportKind::Fabric => "fabric",
        };
        let process = Command::new(std::env::current_exe()?)
            .args(["--transport", transport, "--peer", addr, &number.to_string()])
            .stdin(Stdio::piped())
            .spawn()?;
        let until = life.map(|life| Instant::now() + life);
        Ok(Peer { number, process, until, requests: 0, sender: None })
    }

    pub fn is_due(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
    }

    /// Goes on with the requests of the decode worker.
    pub fn serve(&mut self, side: &mut Side) -> Result<(), Error> {
        if let Some(status) = self.process.try_wait()? {
            return Err(format!("decode worker {} has ended too early: {status}", self.number).into());
        }
        let room = room(self.number, self.requests);
        let Some(sender) = self.sender.take() else {
            let Some(pages) = side.allocate(pages(room)) else { return Ok(()) };
            side.fill(&pages, room)?;
            let mut sender =
                side.manager.sender(&side.addr, Room::Number(room), &[], SessionOptions::default())?;
            sender.init(pages.len(), None).map_err(|_| "the command queue is full")?;
            sender.send(pages).map_err(|_| "the command queue is full")?;
            self.sender = Some(sender);
            return Ok(());
        };
        match sender.poll() {
            KvPoll::Success => {
                side.requests += 1;
                side.bytes += (pages(room) * PAGE) as u64;
                self.requests += 1;
                side.give_up(sender);
            }
            KvPoll::Failed => {
                return Err(format!("room {room}: {:?}", sender.failure()).into());
            }
            _ => self.sender = Some(sender),
        }
        Ok(())
    }

    /// Ends the decode worker: by SIGKILL, or by closing its standard input, after which it must succeed.
    pub fn end(mut self, side: &mut Side, kill: bool) -> Result<(), Error> {
        if kill {
            self.process.kill()?;
            self.process.wait()?;
        } else {
            drop(self.process.stdin.take());
            let mut status = None;
            let process = &mut self.process;
            until("the end of a decode worker", || {
                status = process.try_wait().ok().flatten();
                status.is_some()
            })?;
            if !status.is_some_and(|status| status.success()) {
                return Err(format!("decode worker {} has failed: {status:?}", self.number).into());
            }
        }
        if let Some(mut sender) = self.sender.take() {
            sender.abort();
            side.give_up(sender);
        }
        Ok(())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs the decode worker: receives one room after the other until standard input ends.
pub fn receive(transport: TransportKind, addr: &str, number: u64) -> Result<(), Error> {
    let ending = Arc::new(AtomicBool::new(false));
    let mut side = Side::start(transport, WorkerRole::Decode, addr)?;
    let told = Arc::clone(&ending);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        told.store(true, Ordering::Relaxed);
    });
    for request in 0.. {
        let room = room(number, request);
        let pages = side.allocate(pages(room)).ok_or("no pages are free")?;
        let mut receiver = side.manager.receiver(addr, Room::Number(room), SessionOptions::default())?;
        receiver.init(pages, None).map_err(|_| "the command queue is full")?;
        while !receiver.poll().is_terminal() {
            if ending.load(Ordering::Relaxed) {
                receiver.abort();
            }
            side.rest();
        }
        let (poll, failure) = (receiver.poll(), receiver.failure());
        let pages = reclaimed(receiver)?;
        if poll == KvPoll::Success {
            side.compare(&pages, room)?;
        } else if !ending.load(Ordering::Relaxed) {
            return Err(format!("decode worker {number}, room {room}: {failure:?}").into());
        }
        side.free(pages)?;
        if ending.load(Ordering::Relaxed) {
            break;
        }
    }
    side.settle()?;
    if let Some((what, count)) =
        side.left()?.into_iter().find(|(what, _)| !what.starts_with("file descriptors"))
    {
        return Err(format!("decode worker {number} has {count} {what} left at its end").into());
    }
    side.stop()
}
