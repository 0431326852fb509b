//! A worker with its cache and its scheduler: the part of a pair that lives in one process.

use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use kv_transfer::local::Memory;
use kv_transfer::prelude::*;
use kv_transfer::unstable::random::SplitMix64;
use kv_transfer::{Manager, Pages, Publication, Receiver, Sender, SessionId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::Error;
use crate::way::Way;

/// How long anything may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How a cache lies in memory: `regions` regions, each with `item` bytes of each of `pages` pages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) pages: u32,
    pub(crate) regions: usize,
    pub(crate) item: usize,
}

impl Shape {
    /// Bytes of the whole cache.
    pub(crate) fn len(&self) -> usize {
        self.regions * self.region()
    }

    /// Bytes of a region.
    pub(crate) fn region(&self) -> usize {
        self.pages as usize * self.item
    }
}

/// The pages of a cache in a random order, which is the order in which requests take them.
pub(crate) fn order(shape: &Shape, seed: u64) -> Vec<u32> {
    let mut random = SplitMix64::new(seed);
    let mut order: Vec<u32> = (0..shape.pages).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at as u64 + 1) as usize);
    }
    order
}

/// Requests that are made together: their rooms, and the pages of each.
#[derive(Debug, Clone)]
pub(crate) struct Batch {
    pub(crate) rooms: Range<u64>,
    pub(crate) each: usize,
}

/// A worker, with its scheduler.
pub(crate) struct Side {
    pub(crate) manager: Manager,
    memory: Memory,
    shape: Shape,
    order: Vec<u32>,
    pool: PagePool,
    next_room: Cell<u64>,
    _worker: Worker,
}

impl Side {
    /// Starts a worker; one with an address of a bootstrap server registers there.
    pub(crate) fn start(
        way: &Way,
        role: WorkerRole,
        shape: Shape,
        bootstrap: Option<&str>,
    ) -> Result<Side, Error> {
        let engine = format!("{role:?}").to_lowercase();
        let (worker, memory) = way.start(shape.len(), |memory| {
            let mut args = KvArgs::builder(&engine, 0).pages(shape.pages, 16);
            for region in 0..shape.regions {
                let addr = memory.addr() + (region * shape.region()) as u64;
                args =
                    args.region(Region::dram(RegionRole::Kv, addr, shape.region() as u64, shape.item as u64));
            }
            let config = WorkerConfig::new(args.build()?, role);
            Ok(config.with(|config| config.bootstrap = bootstrap.map(str::to_owned)))
        })?;
        let manager = worker.manager();
        let start = Instant::now();
        while bootstrap.is_some() && manager.publication() != Publication::Published {
            if start.elapsed() > PATIENCE {
                return Err(format!("not registered: {:?}", manager.publication()).into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let order = order(&shape, role as u64);
        let pool = PagePool::new(shape.pages);
        Ok(Side { manager, memory, shape, order, pool, next_room: Cell::new(1), _worker: worker })
    }

    /// The next requests of this worker, in rooms that no other request has had.
    pub(crate) fn batch(&self, count: u64, each: usize) -> Batch {
        let first = self.next_room.get();
        self.next_room.set(first + count);
        Batch { rooms: first..first + count, each }
    }

    fn pages_of(&self, room: u64, each: usize) -> impl Iterator<Item = u32> {
        let first = room as usize * each;
        (first..first + each).map(|at| self.order[at % self.order.len()])
    }

    fn take(&self, batch: &Batch) -> Result<Vec<(Room, Pages)>, Error> {
        let take = |room| {
            let pages = PageList::from_pages(self.pages_of(room, batch.each))?;
            Ok((Room::Number(room), self.pool.adopt(pages)?))
        };
        batch.rooms.clone().map(take).collect()
    }

    /// Opens the sending halves of a batch, and gives each of them its pages now unless `later`.
    pub(crate) fn senders(&self, addr: &str, batch: &Batch, later: bool) -> Result<Sending, Error> {
        let mut sending = Sending { senders: Vec::new(), held: Vec::new() };
        for (room, pages) in self.take(batch)? {
            if let Room::Number(number) = room {
                for page in pages.list().iter() {
                    self.memory.write(page as usize * self.shape.item, &number.to_le_bytes())?;
                }
            }
            let mut sender = self.manager.sender(addr, room, &[], SessionOptions::default())?;
            sender.init(batch.each, None).map_err(|_| NO_ROOM)?;
            if later {
                sending.held.push(pages);
            } else {
                sender.send(pages).map_err(|_| NO_ROOM)?;
            }
            sending.senders.push(sender);
            // The ring has room for a thousand requests, and the worker must keep up with more.
            if sending.senders.len().is_multiple_of(500) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(sending)
    }

    /// Opens the receiving halves of a batch.
    pub(crate) fn receivers(&self, addr: &str, batch: &Batch) -> Result<Receiving, Error> {
        let pages = self.take(batch)?;
        let begun = now();
        let mut receiving =
            Receiving { batch: batch.clone(), receivers: HashMap::with_capacity(pages.len()), begun };
        for (room, pages) in pages {
            let mut receiver = self.manager.receiver(addr, room, SessionOptions::default())?;
            receiver.init(pages, None).map_err(|_| NO_ROOM)?;
            receiving.receivers.insert(receiver.id(), receiver);
        }
        Ok(receiving)
    }

    /// Waits until all of the requests are registered with their sender.
    pub(crate) fn registered(&self, receiving: &Receiving) -> Result<(), Error> {
        let deadline = Instant::now() + PATIENCE;
        while receiving.receivers.values().any(|receiver| receiver.poll() < KvPoll::Transferring) {
            self.sleep(deadline)?;
            self.manager.poll_set().drain(|_| {});
        }
        // The frame is on its way; the workers fall asleep after it.
        std::thread::sleep(Duration::from_millis(1));
        Ok(())
    }

    /// Waits until all requests have succeeded, and returns when: by the clock of [`now`]. Then waits until the
    /// pages are back, and checks their bytes.
    pub(crate) fn succeeded(&self, receiving: Receiving) -> Result<f64, Error> {
        let Receiving { batch, mut receivers, .. } = receiving;
        let deadline = Instant::now() + PATIENCE;
        let mut open = receivers.len();
        let mut ended = Vec::with_capacity(open);
        let mut failed = false;
        while open > 0 {
            self.sleep(deadline)?;
            self.manager.poll_set().drain(|change| {
                failed |= change.poll == KvPoll::Failed;
                if change.poll == KvPoll::Success && receivers.contains_key(&change.session) {
                    ended.push(change.session);
                }
            });
            // Most sessions change twice: they succeed, and their pages are back.
            if ended.len() >= open || failed {
                ended.sort_unstable();
                ended.dedup();
                open = receivers.len() - ended.len();
            }
            if failed {
                let failure = receivers.values().find_map(KvSession::failure);
                return Err(format!("a request has failed: {failure:?}").into());
            }
        }
        let at = now();
        while !receivers.is_empty() {
            receivers.retain(|_, receiver| {
                receiver.reclaim().is_none_or(|back| self.pool.release(back.pages).is_err())
            });
            if !receivers.is_empty() {
                self.sleep(deadline)?;
                self.manager.poll_set().drain(|_| {});
            }
        }
        self.check(&batch)?;
        Ok(at)
    }

    /// Checks that each page of each request has the bytes of its room.
    fn check(&self, batch: &Batch) -> Result<(), Error> {
        for room in batch.rooms.clone() {
            for page in self.pages_of(room, batch.each) {
                let mut got = [0; 8];
                self.memory.read(page as usize * self.shape.item, &mut got)?;
                if u64::from_le_bytes(got) != room {
                    return Err(format!("room {room} has the bytes of {}", u64::from_le_bytes(got)).into());
                }
            }
        }
        Ok(())
    }

    /// Waits until the sending halves have ended and their pages are back.
    pub(crate) fn settled(&self, sending: Sending) -> Result<(), Error> {
        let Sending { mut senders, .. } = sending;
        let deadline = Instant::now() + PATIENCE;
        loop {
            senders.retain_mut(|it| it.reclaim().is_none_or(|back| self.pool.release(back.pages).is_err()));
            if senders.is_empty() {
                return Ok(());
            }
            self.sleep(deadline)?;
            self.manager.poll_set().drain(|_| {});
        }
    }

    /// Sleeps until a session has changed.
    fn sleep(&self, deadline: Instant) -> Result<(), Error> {
        if !wait(&[self.manager.poll_set().as_fd()])? && Instant::now() > deadline {
            return Err("a request took longer than a minute".into());
        }
        Ok(())
    }
}

/// The sending halves of requests, with the pages that are not sent yet.
pub(crate) struct Sending {
    senders: Vec<Sender>,
    held: Vec<Pages>,
}

impl Sending {
    /// Gives the sessions their pages. Returns when the first of them was given its pages, by the clock of [`now`].
    pub(crate) fn send(&mut self) -> Result<f64, Error> {
        let begun = now();
        for (sender, pages) in self.senders.iter_mut().zip(self.held.drain(..)) {
            sender.send(pages).map_err(|_| NO_ROOM)?;
        }
        Ok(begun)
    }
}

/// The receiving halves of requests.
pub(crate) struct Receiving {
    batch: Batch,
    receivers: HashMap<SessionId, Receiver>,
    /// When the first of them was opened, by the clock of [`now`].
    pub(crate) begun: f64,
}

const NO_ROOM: &str = "no room for a command";

/// Sleeps until one of the descriptors is readable, for a second at most. True if one is.
pub(crate) fn wait(fds: &[BorrowedFd<'_>]) -> Result<bool, Error> {
    let mut fds: Vec<PollFd<'_>> =
        fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    Ok(poll(&mut fds, Some(&Timespec { tv_sec: 1, tv_nsec: 0 }))? > 0)
}

/// The time in seconds, by a clock that all processes share.
pub(crate) fn now() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
