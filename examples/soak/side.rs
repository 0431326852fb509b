//! A worker with its pages, for either side, and the content of every request.

use std::time::{Duration, Instant};

use kv_transfer::allocator::{FreeList, PageAllocator};
use kv_transfer::local::Arena;
#[cfg(feature = "nixl")]
use kv_transfer::nixl::{Nixl, NixlConfig, NixlTransport};
use kv_transfer::prelude::*;
use kv_transfer::tcp::{HostMemory, TcpConfig, TcpTransport};
use kv_transfer::unstable::random::SplitMix64;
use kv_transfer::{Manager, Publication, Receiver, Sender};

use super::TransportKind;

pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// Bytes of a page, and pages of a worker.
pub const PAGE: usize = 64 << 10;
const PAGES: u32 = 256;
/// How long anything may take that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// Loads what the transport needs, which must be done first: NIXL sets UCX's environment, while there is one
/// thread.
pub fn prepare(kind: TransportKind) -> Result<(), Error> {
    match kind {
        TransportKind::Local | TransportKind::Tcp => Ok(()),
        #[cfg(feature = "nixl")]
        TransportKind::Nixl => {
            Nixl::load(&kv_transfer::nixl::Search::default())?;
            Ok(())
        }
        #[cfg(not(feature = "nixl"))]
        TransportKind::Nixl => Err("this example was built without `--features nixl`".into()),
        #[cfg(feature = "ucx")]
        TransportKind::Ucx => Ok(kv_transfer::ucx::Ucx::load(None).map(drop)?),
        #[cfg(not(feature = "ucx"))]
        TransportKind::Ucx => Err("this example was built without `--features ucx`".into()),
        #[cfg(feature = "fabric")]
        TransportKind::Fabric => Ok(kv_transfer::fabric::installed().map(drop)?),
        #[cfg(not(feature = "fabric"))]
        TransportKind::Fabric => Err("this example was built without `--features fabric`".into()),
    }
}

/// Memory that a transport reaches.
enum Memory {
    Arena(Arena),
    Pool(HostMemory),
}

/// A worker, its pages, and counts of what it has done.
pub struct Side {
    pub manager: Manager,
    pub addr: String,
    worker: Worker,
    memory: Memory,
    cache: FreeList,
    /// Senders that have ended, and whose pages are not back.
    limbo: Vec<(Sender, Instant)>,
    pub requests: u64,
    pub bytes: u64,
    started: usize,
}

impl Side {
    pub fn start(kind: TransportKind, role: WorkerRole, addr: &str) -> Result<Side, Error> {
        let len = PAGE * PAGES as usize;
        let engine = format!("{role:?}").to_lowercase();
        let config = |base: u64| -> Result<WorkerConfig, Error> {
            let region = Region::dram(RegionRole::Kv, base, len as u64, PAGE as u64);
            let args = KvArgs::builder(&engine, 0).pages(PAGES, 16).region(region).build()?;
            // Nobody looks for decode workers.
            let bootstrap = (role == WorkerRole::Prefill).then(|| addr.to_owned());
            Ok(WorkerConfig::new(args, role).with(|config| config.bootstrap = bootstrap))
        };
        let client = Box::new(HttpBootstrapClient::new(ClientConfig::default())?);
        let (memory, worker) = match kind {
            TransportKind::Local => {
                let arena = Arena::new(len)?;
                let mut transport = LocalTransport::new(LocalConfig::default())?;
                transport.add_arena(&arena)?;
                let worker = Worker::start(config(arena.addr())?, transport, client)?;
                (Memory::Arena(arena), worker)
            }
            TransportKind::Tcp => {
                let pool = HostMemory::new(len)?;
                let mut transport = TcpTransport::new(TcpConfig::new("127.0.0.1:0".parse()?))?;
                transport.add_memory(&pool)?;
                let worker = Worker::start(config(pool.addr())?, transport, client)?;
                (Memory::Pool(pool), worker)
            }
            #[cfg(feature = "nixl")]
            TransportKind::Nixl => {
                let pool = HostMemory::new(len)?;
                let nixl = Nixl::load(&kv_transfer::nixl::Search::default())?;
                let mut transport = NixlTransport::new(&nixl, NixlConfig::default())?;
                transport.add_memory(&pool)?;
                let worker = Worker::start(config(pool.addr())?, transport, client)?;
                (Memory::Pool(pool), worker)
            }
            #[cfg(not(feature = "nixl"))]
            TransportKind::Nixl => return Err("this example was built without `--features nixl`".into()),
            #[cfg(feature = "ucx")]
            TransportKind::Ucx => {
                use kv_transfer::ucx::{Ucx, UcxConfig, UcxTransport};
                let pool = HostMemory::new(len)?;
                let mut transport = UcxTransport::new(Ucx::load(None)?, UcxConfig::default())?;
                transport.add_memory(&pool)?;
                let worker = Worker::start(config(pool.addr())?, transport, client)?;
                (Memory::Pool(pool), worker)
            }
            #[cfg(not(feature = "ucx"))]
            TransportKind::Ucx => return Err("this example was built without `--features ucx`".into()),
            #[cfg(feature = "fabric")]
            TransportKind::Fabric => {
                use kv_transfer::fabric::{FabricConfig, FabricTransport};
                let pool = HostMemory::new(len)?;
                let mut transport = FabricTransport::new(FabricConfig::new("127.0.0.1".parse()?))?;
                transport.add_memory(&pool)?;
                let worker = Worker::start(config(pool.addr())?, transport, client)?;
                (Memory::Pool(pool), worker)
            }
            #[cfg(not(feature = "fabric"))]
            TransportKind::Fabric => return Err("this example was built without `--features fabric`".into()),
        };
        let manager = worker.manager();
        if role == WorkerRole::Prefill {
            until("the registration", || manager.publication() == Publication::Published)?;
        }
        let cache = FreeList::new(PAGES);
        Ok(Side {
            manager,
            addr: addr.to_owned(),
            worker,
            memory,
            cache,
            limbo: Vec::new(),
            requests: 0,
            bytes: 0,
            // With its first connection, UCX opens the timer of its probes.
            started: handles()? + usize::from(kind == TransportKind::Ucx),
        })
    }

    pub fn allocate(&mut self, pages: usize) -> Option<Pages> {
        self.cache.allocate(pages)
    }

    pub fn free(&mut self, pages: Pages) -> Result<(), Error> {
        self.cache.free(pages).map_err(|_| "the allocator refuses its own pages".into())
    }

    /// Writes the content of a room into its pages.
    pub fn fill(&self, pages: &Pages, room: u64) -> Result<(), Error> {
        let mut bytes = vec![0; PAGE];
        for (position, page) in pages.list().iter().enumerate() {
            content(room, position, &mut bytes);
            let offset = page as usize * PAGE;
            match &self.memory {
                Memory::Arena(arena) => arena.write(offset, &bytes)?,
                Memory::Pool(pool) => pool.write(offset, &bytes)?,
            }
        }
        Ok(())
    }

    /// Compares every byte of pages with the content of a room.
    pub fn compare(&self, pages: &Pages, room: u64) -> Result<(), Error> {
        let (mut bytes, mut wanted) = (vec![0; PAGE], vec![0; PAGE]);
        for (position, page) in pages.list().iter().enumerate() {
            let offset = page as usize * PAGE;
            match &self.memory {
                Memory::Arena(arena) => arena.read(offset, &mut bytes)?,
                Memory::Pool(pool) => pool.read(offset, &mut bytes)?,
            }
            content(room, position, &mut wanted);
            if bytes != wanted {
                let at = bytes.iter().zip(&wanted).position(|(is, wanted)| is != wanted).unwrap_or(0);
                return Err(format!("room {room}: page {position} has wrong bytes from byte {at} on").into());
            }
        }
        Ok(())
    }

    /// Takes a sender that has ended. Its pages come back now or later.
    pub fn give_up(&mut self, sender: Sender) {
        self.limbo.push((sender, Instant::now() + PATIENCE));
    }

    /// Takes back the pages of senders that have ended.
    pub fn take_back(&mut self) -> Result<(), Error> {
        for (mut sender, until) in std::mem::take(&mut self.limbo) {
            match sender.reclaim() {
                Some(back) => self.free(back.pages)?,
                None if Instant::now() < until => self.limbo.push((sender, until)),
                None => {
                    return Err(format!(
                        "the sender of {:?} has not given its pages back within {PATIENCE:?}",
                        sender.room()
                    )
                    .into());
                }
            }
        }
        Ok(())
    }

    /// Waits a moment for something to do.
    pub fn rest(&self) {
        self.manager.poll_set().drain(|_| ());
        std::thread::sleep(Duration::from_micros(200));
    }

    /// Waits until all pages are back and no session is open.
    pub fn settle(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.take_back()?;
            let gauges = self.manager.gauges();
            if (gauges.sessions_open == 0 && gauges.posts_in_flight == 0) || Instant::now() > deadline {
                return Ok(());
            }
            self.rest();
        }
    }

    /// What is left at the end and should not be, with the number of each.
    pub fn left(&self) -> Result<Vec<(&'static str, usize)>, Error> {
        let gauges = self.manager.gauges();
        let deadline = Instant::now() + Duration::from_secs(5);
        // The last peers' connections end with their processes.
        while handles()? > self.started && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
        let mut left = vec![
            ("sessions", gauges.sessions_open),
            ("pages in transfer", gauges.pages_in_transfer()),
            ("pages leased", gauges.pages_leased()),
            ("pages in quarantine", gauges.pages_quarantined()),
            ("pages without a session handle", gauges.pages_orphaned()),
            ("posts", gauges.posts_in_flight),
            ("senders", self.limbo.len()),
            ("pages that are not free", self.cache.capacity() - self.cache.available()),
            ("file descriptors of the process", handles()?.saturating_sub(self.started)),
        ];
        left.retain(|(_, count)| *count > 0);
        Ok(left)
    }

    pub fn stop(self) -> Result<(), Error> {
        let report = self.worker.stop(PATIENCE);
        if report.panicked || report.pages_quarantined > 0 || report.posts_in_flight > 0 {
            return Err(format!("the worker has not stopped cleanly: {report:?}").into());
        }
        Ok(())
    }
}

/// Waits for the pages of a receiver that has ended.
pub fn reclaimed(mut receiver: Receiver) -> Result<Pages, Error> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(back) = receiver.reclaim() {
            return Ok(back.pages);
        }
        if Instant::now() > deadline {
            return Err("a receiver has not given its pages back in time".into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The content of the page at this position of a room's prompt.
fn content(room: u64, position: usize, bytes: &mut [u8]) {
    let mut random = SplitMix64::new(room ^ (position as u64) << 48);
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&random.bits().to_le_bytes());
    }
}

/// Resident memory of this process, in KiB.
pub fn resident() -> Result<u64, Error> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

/// Descriptors that this process has open.
pub fn handles() -> Result<usize, Error> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}

pub fn until(what: &str, mut holds: impl FnMut() -> bool) -> Result<(), Error> {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        if Instant::now() > deadline {
            return Err(format!("{what} has not come within {PATIENCE:?}").into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
