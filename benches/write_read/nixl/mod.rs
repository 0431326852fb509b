//! WRITE and READ over NIXL: our transport beside plain `nixl-sys` code, with the same descriptors in the
//! same memory.
//!
//! Each of the two processes has two NIXL agents that register the same pool: the agent of a transport, and
//! an agent that plain code uses directly. Plain code puts all descriptors of a transfer into one request,
//! posts it, and polls the status until the transfer is done.

mod beside;
mod ratios;
mod raw;

use std::io::Write;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use kv_benches::{bytes, hex};
use kv_transfer::nixl::{HostMemory, Nixl, NixlConfig, NixlTransport, Search};
use kv_transfer::unstable::{Descriptor, Op, Post, Transport, TransportEvent, TransportWait};
use kv_transfer::{PeerId, PostId, Region, RegionRole, Time};
use nixl_sys::NotificationMap;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::child::{Served, end_with_the_parent};
use crate::{Error, Moves};
use raw::Raw;

/// The variable that tells the child its transport, the length of its region, and how to reach its parent.
const PEER: &str = "KV_BENCH_NIXL_PEER";
/// The peer id that parent and child give to each other.
const OTHER: PeerId = PeerId(1);

/// Loads NIXL, which must be done first in `main`. Prints why there will be no figures if NIXL cannot be
/// loaded.
pub(crate) fn prepare() -> Option<Nixl> {
    Nixl::load(&Search::default()).inspect_err(|error| println!("NIXL is not measured: {error}")).ok()
}

pub(crate) fn is_peer() -> bool {
    std::env::var_os(PEER).is_some()
}

/// Measures and prints all tables.
pub(crate) fn tables(nixl: &Nixl, region: usize) -> Result<(), Error> {
    let mut pair = Pair::start(nixl, region, Route::Default, 16 << 10)?;
    ratios::large(&mut pair, region)?;
    beside::delays(&mut pair, region)?;
    drop(pair);
    // All of it fits into caches; most of it does not.
    for region in [region / 16, region] {
        ratios::small(nixl, region, Route::Default)?;
    }
    ratios::small(nixl, region, Route::Tcp)
}

/// The routes that UCX may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    /// All routes; between processes of one host, UCX takes one copy by the kernel.
    Default,
    /// Only TCP, the route between hosts without RDMA.
    Tcp,
}

impl Route {
    /// The backend parameters of NIXL that select the route.
    fn params(self) -> Vec<(String, String)> {
        match self {
            Route::Default => Vec::new(),
            Route::Tcp => vec![("engine_config".to_owned(), "TLS=tcp".to_owned())],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Route::Default => "all transports",
            Route::Tcp => "TCP",
        }
    }
}

/// Runs the child: prints the metadata of both agents, and serves until standard input ends.
pub(crate) fn serve(nixl: &Nixl) -> Result<(), Error> {
    let told = std::env::var(PEER)?;
    let mut told = told.split(' ');
    let mut next = || told.next().ok_or("the parent has told too little");
    let route = if next()? == "tcp" { Route::Tcp } else { Route::Default };
    let (region, item) = (next()?.parse()?, next()?.parse()?);
    let parent = bytes(next()?)?;
    let mut ends = Ends::new(nixl, "raw-child", region, route, item)?;
    println!("{} {}", hex(&ends.transport.metadata()?), hex(&ends.raw.metadata()?));
    std::io::stdout().flush()?;
    ends.transport.connect(OTHER, &parent)?;
    end_with_the_parent();
    let mut notifications = NotificationMap::new()?;
    let mut events = Vec::new();
    loop {
        ends.transport.poll(Time::ZERO, &mut events);
        for event in events.drain(..) {
            match event {
                TransportEvent::Frame { frame, .. } => ends.transport.send(OTHER, beside::answer(&frame))?,
                TransportEvent::PeerGone { .. } => return Ok(()),
                TransportEvent::Posted { .. } | TransportEvent::Revoked { .. } => {}
            }
        }
        ends.raw.receive(&mut notifications)?;
        // Over TCP the target takes part, and plain code does not wake it.
        if route == Route::Default {
            sleep(&ends.transport)?;
        }
    }
}

/// Sleeps as the transport allows, as a worker does.
fn sleep(transport: &NixlTransport) -> Result<(), Error> {
    let (fds, at_most) = match transport.wait() {
        TransportWait::Now => return Ok(()),
        TransportWait::Readable(fds) => (fds, Duration::from_millis(100)),
        TransportWait::ReadableOrAfter(fds, at_most) => (fds, at_most),
    };
    // SAFETY: the transport has named them just now, and is not touched before the end of this function.
    #[allow(unsafe_code)]
    let fds: Vec<_> = fds.into_iter().map(|fd| unsafe { BorrowedFd::borrow_raw(fd) }).collect();
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    poll(&mut fds, Some(&Timespec::try_from(at_most)?))?;
    Ok(())
}

/// Both agents of one process, over the same pool.
struct Ends {
    transport: NixlTransport,
    raw: Raw,
    pool: HostMemory,
}

impl Ends {
    fn new(nixl: &Nixl, name: &str, region: usize, route: Route, item: u64) -> Result<Ends, Error> {
        let pool = HostMemory::new(region)?;
        let config = NixlConfig::default().with(|config| config.backend_params = route.params());
        let mut transport = NixlTransport::new(nixl, config)?;
        transport.add_memory(&pool)?;
        transport.register(&Region::dram(RegionRole::Kv, pool.addr(), region as u64, item))?;
        Ok(Ends { transport, raw: Raw::new(name, &pool, route)?, pool })
    }
}

/// This process and its child, connected in both directions.
struct Pair {
    /// First, so that it ends before what it reaches.
    _child: Served,
    ends: Ends,
    route: Route,
    /// The address of the child's pool.
    there: u64,
    next: u64,
}

impl Pair {
    /// Starts a pair. The transports are told that their region holds items of `item` bytes.
    fn start(nixl: &Nixl, region: usize, route: Route, item: u64) -> Result<Pair, Error> {
        let mut ends = Ends::new(nixl, "raw-parent", region, route, item)?;
        let name = if route == Route::Tcp { "tcp" } else { "default" };
        let (child, line) =
            Served::start(PEER, format!("{name} {region} {item} {}", hex(&ends.transport.metadata()?)))?;
        let (transport, raw) = line.split_once(' ').ok_or("no metadata from the peer")?;
        let raw = bytes(raw)?;
        ends.transport.connect(OTHER, &bytes(transport)?)?;
        ends.transport.permit(OTHER, Time::MAX);
        ends.raw.connect(&raw)?;
        // The one registered section of NIXL's metadata: its address is the child's pool.
        let there = address(&raw, region as u64).ok_or("the peer's metadata has no such section")?;
        let mut pair = Pair { ends, route, there, _child: child, next: 0 };
        let first = Moves::random(64 << 10, 16, region);
        pair.transport(Op::Write, first.descriptors())?;
        pair.raw(Op::Write, first.descriptors())?;
        Ok(pair)
    }

    fn raw(&self, op: Op, descriptors: &[Descriptor]) -> Result<(), Error> {
        self.ends.raw.run(op, descriptors, self.ends.pool.addr(), self.there)
    }

    fn transport(&mut self, op: Op, descriptors: &[Descriptor]) -> Result<(), Error> {
        self.post(op, descriptors.to_vec())?;
        self.await_posts(1)
    }

    fn post(&mut self, op: Op, descriptors: Vec<Descriptor>) -> Result<PostId, Error> {
        let id = PostId(self.next);
        self.next += 1;
        self.ends.transport.post(OTHER, Post { id, op, descriptors, notify: None })?;
        Ok(id)
    }

    fn await_posts(&mut self, mut count: usize) -> Result<(), Error> {
        let mut events = Vec::new();
        while count > 0 {
            self.ends.transport.poll(Time::ZERO, &mut events);
            for event in events.drain(..) {
                match event {
                    TransportEvent::Posted { result, .. } => {
                        result?;
                        count -= 1;
                    }
                    TransportEvent::PeerGone { end, .. } => {
                        return Err(format!("the way to the peer has ended: {end:?}").into());
                    }
                    TransportEvent::Frame { .. } | TransportEvent::Revoked { .. } => {}
                }
            }
        }
        Ok(())
    }
}

/// The address before this length in NIXL's list of sections.
fn address(metadata: &[u8], len: u64) -> Option<u64> {
    let at = metadata.windows(8).rposition(|window| window == len.to_le_bytes())?;
    let before = metadata.get(at.checked_sub(8)?..at)?;
    Some(u64::from_le_bytes(before.try_into().ok()?))
}
