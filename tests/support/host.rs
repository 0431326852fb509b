//! A worker with its memory, its page allocator and its aux rows.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_conformance::Random;
use kv_transfer::allocator::{FreeList, PageAllocator, RunAllocator};
use kv_transfer::bootstrap::ClientConfig;
use kv_transfer::prelude::*;
use kv_transfer::queue::AuxRows;
use kv_transfer::{AuxIndex, Limits, Listener, Manager, Parallel, Spoken, Timing};
use kv_transfer::{Gauges, Layout, Publication, Receiver, Sender, StopReport};

use super::memory::{Memory, Shape, page_content, row_content};
use super::store::TransportKind;
use super::{PATIENCE, until};

/// The settings of a host, whose fields tests change as they need.
#[derive(Debug, Clone)]
pub struct Setup {
    pub engine: String,
    pub rank: u32,
    pub role: WorkerRole,
    pub addr: String,
    pub shape: Shape,
    pub transport: TransportKind,
    pub page_size: u32,
    pub parallel: Parallel,
    /// The number of tensor-parallel ranks that hold pages in turn.
    pub dcp_size: u32,
    pub receivers: u32,
    pub max_sge: usize,
    pub max_inflight: usize,
    pub limits: Limits,
    pub timing: Timing,
    pub versions: Spoken,
    pub command_queue: usize,
    pub max_sessions: usize,
    pub lease: Duration,
    /// True for a few long runs of pages, instead of single pages in random order.
    pub runs: bool,
    /// Who is told each event of the worker.
    pub listener: Option<Listener>,
}

impl Setup {
    /// A host of `role`, which is also the name of its engine, at the bootstrap server `addr`.
    pub fn new(role: WorkerRole, addr: &str, shape: Shape) -> Setup {
        Setup {
            engine: format!("{role:?}").to_lowercase(),
            rank: 0,
            role,
            addr: addr.to_owned(),
            shape,
            transport: TransportKind::Local,
            page_size: 16,
            parallel: Parallel::default(),
            dcp_size: 1,
            receivers: 1,
            max_sge: 1024,
            max_inflight: 64,
            limits: Limits::default(),
            timing: Timing::default(),
            versions: Spoken::ALL,
            command_queue: 4096,
            max_sessions: 4096,
            lease: Duration::from_secs(30),
            runs: false,
            listener: None,
        }
    }

    /// A prefill host of the engine `prefill`.
    pub fn prefill(addr: &str, shape: Shape) -> Setup {
        Setup::new(WorkerRole::Prefill, addr, shape)
    }

    /// A decode host of the engine `decode`.
    pub fn decode(addr: &str, shape: Shape) -> Setup {
        Setup::new(WorkerRole::Decode, addr, shape)
    }

    /// Starts the host, and waits until its peers can find it.
    pub fn start(self) -> Host {
        let memory = Memory::new(self.shape, self.transport);
        let dcp_rank = self.parallel.tp_rank % self.dcp_size;
        let layout = Layout::default().with(|layout| {
            layout.dcp_size = self.dcp_size;
            layout.dcp_rank = dcp_rank;
        });
        let mut args = KvArgs::builder(&self.engine, self.rank)
            .pages(self.shape.pages, self.page_size)
            .parallel(self.parallel)
            .layout(layout)
            .num_receivers(self.receivers)
            // Each side opens a request under an id with a suffix of its own.
            .suffixes_requests(true)
            .max_sge(self.max_sge)
            .max_inflight(self.max_inflight);
        for region in memory.regions() {
            args = args.region(region);
        }
        let client = ClientConfig::default().with(|config| config.lease = self.lease);
        let client = HttpBootstrapClient::new(client).unwrap();
        let config = WorkerConfig::new(args.build().unwrap(), self.role).with(|config| {
            config.bootstrap = Some(self.addr.clone());
            config.timing = self.timing;
            config.limits = self.limits;
            config.versions = self.versions;
            config.command_queue = self.command_queue;
            config.max_sessions = self.max_sessions;
            config.listener = self.listener;
        });
        let worker = memory.store.start(config, client);
        let manager = worker.manager();
        until("registration", || manager.publication() == Publication::Published);
        let cache: Box<dyn PageAllocator + Send> = match self.runs {
            true => Box::new(RunAllocator::new(self.shape.pages)),
            false => Box::new(scattered(self.shape.pages)),
        };
        let rows = AuxRows::new(self.shape.rows);
        Host {
            worker: Some(worker),
            manager,
            memory,
            cache,
            rows,
            addr: self.addr,
            replica: self.parallel.dp_rank,
            limbo: BTreeMap::new(),
            limbo_rows: Vec::new(),
        }
    }
}

/// A free list whose pages are in random order.
fn scattered(pages: u32) -> FreeList {
    let mut list = FreeList::new(pages);
    let mut singles: Vec<Pages> = (0..pages).map(|_| list.allocate(1).unwrap()).collect();
    Random::from_seed(u64::from(pages)).shuffle(&mut singles);
    for single in singles {
        list.free(single).unwrap();
    }
    list
}

/// A worker, and what a server has beside it.
pub struct Host {
    /// The worker; `None` once it has been stopped.
    pub worker: Option<Worker>,
    pub manager: Manager,
    pub memory: Memory,
    pub cache: Box<dyn PageAllocator + Send>,
    pub rows: AuxRows,
    pub addr: String,
    pub replica: u32,
    /// Pages of dropped receivers and senders: the content and the position that they may hold.
    pub limbo: BTreeMap<u32, Option<(u64, usize)>>,
    /// Aux rows likewise. When they are quiet is known only once all sessions are gone.
    pub limbo_rows: Vec<(AuxIndex, Option<u64>)>,
}

impl Host {
    /// Pages with the content of a prompt.
    pub fn prompt(&mut self, pages: usize, content: u64) -> Pages {
        let given = self.cache.allocate(pages).unwrap();
        let len = self.memory.shape.page_len();
        for (position, page) in given.list().iter().enumerate() {
            self.memory.check_page(page, &"a free page");
            self.memory.write_page(page, &page_content(content, position, len));
        }
        given
    }

    /// An aux row with the content of a prompt.
    pub fn prompt_row(&mut self, content: u64) -> AuxIndex {
        let row = self.rows.take().unwrap();
        self.memory.write_row(row.0, &row_content(content, self.memory.shape.row_len()));
        row
    }

    /// Pages for a prompt that is to come.
    pub fn room_for(&mut self, pages: usize) -> Pages {
        let given = self.cache.allocate(pages).unwrap();
        for page in given.list().iter() {
            self.memory.check_page(page, &"a free page");
        }
        given
    }

    /// Opens a sender in this room.
    pub fn sender(&self, room: impl Into<Room>, options: SessionOptions) -> Sender {
        self.manager.sender(&self.addr, room.into(), &[], options).unwrap()
    }

    /// Opens a receiver of a request that the prefill engine at `addr` sends.
    pub fn receiver(&self, addr: &str, room: impl Into<Room>, options: SessionOptions) -> Receiver {
        self.manager.receiver(addr, room.into(), options).unwrap()
    }

    /// A prompt has arrived in these pages, in this order.
    pub fn arrived(&mut self, pages: &PageList, content: u64, what: &dyn std::fmt::Display) {
        let len = self.memory.shape.page_len();
        for (position, page) in pages.iter().enumerate() {
            self.memory.page_arrived(page, &page_content(content, position, len), what);
        }
    }

    /// A prompt should have arrived in these pages, and did not.
    pub fn missed(&mut self, pages: &PageList, content: u64, what: &dyn std::fmt::Display) {
        let len = self.memory.shape.page_len();
        for (position, page) in pages.iter().enumerate() {
            self.memory.page_failed(page, &page_content(content, position, len), what);
        }
    }

    /// Overwrites the pages of a failed reader, whose content is not known, as their owner may.
    pub fn rewrite(&mut self, pages: &PageList) {
        for page in pages.iter() {
            let mine = vec![page as u8; self.memory.shape.page_len()];
            self.memory.write_page(page, &mine);
        }
    }

    /// Gives pages back to the allocator.
    pub fn free(&mut self, pages: Pages) {
        self.cache.free(pages).unwrap();
    }

    /// Takes the pages of dropped sessions back.
    pub fn take_orphans(&mut self) {
        let len = self.memory.shape.page_len();
        for orphan in self.manager.orphans() {
            for page in orphan.list().iter() {
                let content = self.limbo.remove(&page).expect("the page of a dropped session");
                match content {
                    Some((content, position)) => {
                        let content = page_content(content, position, len);
                        self.memory.page_failed(page, &content, &"a dropped receiver");
                    }
                    None => self.memory.check_page(page, &"a dropped sender"),
                }
            }
            self.free(orphan);
        }
    }

    /// Waits until all sessions are gone, and all pages of dropped sessions are back.
    pub fn settle(&mut self) {
        until("the end of all sessions", || self.gauges().sessions_open == 0);
        self.take_orphans();
        assert!(self.limbo.is_empty(), "pages of dropped sessions are missing: {:?}", self.limbo);
        let len = self.memory.shape.row_len();
        for (row, content) in std::mem::take(&mut self.limbo_rows) {
            if let Some(content) = content {
                self.memory.row_failed(row.0, &row_content(content, len), &"a dropped receiver");
            }
            assert!(self.rows.give(row));
        }
    }

    /// The counts of the worker.
    pub fn gauges(&self) -> Gauges {
        self.manager.gauges()
    }

    /// Everything has come back: pages, rows, sessions, posts; and every byte is right.
    pub fn check_idle(&self, what: &str) {
        assert_eq!(self.cache.available(), self.cache.capacity(), "{what}: free pages");
        assert_eq!(self.rows.available(), self.rows.capacity(), "{what}: free aux rows");
        // A session is closed right after its pages were given back.
        until(what, || self.gauges().sessions_open == 0 && self.gauges().posts_in_flight == 0);
        let gauges = self.gauges();
        let held = (gauges.pages_in_transfer(), gauges.pages_quarantined(), gauges.pages_orphaned());
        assert_eq!(held, (0, 0, 0), "{what}: pages in transfer, quarantined, orphaned");
        self.memory.check_all(what);
    }

    /// Stops the worker, with plenty of time for pages to come back.
    pub fn stop(&mut self) -> StopReport {
        self.worker.take().unwrap().stop(PATIENCE)
    }

    /// Stops an idle host.
    pub fn close(mut self, what: &str) {
        self.check_idle(what);
        let report = self.stop();
        assert_eq!(report.sessions_ended, 0, "{what}");
        assert_eq!((report.pages_quarantined, report.posts_in_flight), (0, 0), "{what}");
        assert!(!report.panicked, "{what}");
        self.memory.check_all(what);
    }
}
