//! The same over NIXL, beside plain `nixl-sys` code with the same descriptors in the same memory.
//!
//! Both processes hold two agents that register the same pool: that of a plane, and one that is used
//! directly. Plain code puts all descriptors of a transfer into one request, posts it, and asks for
//! its status until it is done.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use kv_transfer::nixl::{HostPool, Nixl, NixlConfig, NixlPlane, Search};
use kv_transfer::{Desc, Op, PeerId, Plane, PlaneEvent, PlaneWait, Post, PostId, Region, RegionRole, Time};
use nixl_sys::{
    Agent, AgentConfig, MemType, MemoryRegion, NixlDescriptor, NotificationMap, OptArgs, RegistrationHandle,
    XferDescList, XferOp, XferStatus,
};

use crate::{Error, Moves, timed};

const PEER: &str = "KV_BENCH_NIXL_PEER_REGION";
const CHILD: PeerId = PeerId(1);
const ROUNDS: usize = 9;

/// To be called first in `main`. Says why there will be no figures.
pub(crate) fn prepare() -> Option<Nixl> {
    Nixl::load(&Search::default()).inspect_err(|error| println!("no NIXL figures: {error}")).ok()
}

pub(crate) fn is_peer() -> bool {
    std::env::var_os(PEER).is_some()
}

/// The child: prints the metadata of both agents, and serves until its standard input ends.
pub(crate) fn serve(nixl: &Nixl) -> Result<(), Error> {
    let region = std::env::var(PEER)?.parse()?;
    let mut side = Ends::new(nixl, "raw-child", region)?;
    println!("{} {}", hex(&side.plane.metadata()?), hex(&side.raw.agent.get_local_md()?));
    std::io::stdout().flush()?;
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let mut notifications = NotificationMap::new()?;
    loop {
        side.plane.poll(Time::ZERO, &mut Vec::new());
        side.raw.agent.get_notifications(&mut notifications, None)?;
        if side.plane.wait() != PlaneWait::Now {
            std::thread::sleep(Duration::from_micros(500));
        }
    }
}

/// Prints the table.
pub(crate) fn ratios(nixl: &Nixl, region: usize) -> Result<(), Error> {
    let mut pair = Pair::start(nixl, region)?;
    println!("\nNIXL: plane / plain nixl-sys, GB/s, median of {ROUNDS} rounds taken in turn");
    println!("{:>20} {:>16} {:>7} {:>16} {:>7}", "blocks", "WRITE", "ratio", "READ", "ratio");
    let sizes =
        [(64 << 10, 1), (64 << 10, 512), (16 << 10, 2048), (64 << 10, 4096), (1 << 20, 64), (1 << 20, 512)];
    for (block, count) in sizes {
        if block * count > region {
            continue;
        }
        let moves = Moves::random(block, count, region);
        let write = pair.compare(Op::Write, &moves)?;
        let read = pair.compare(Op::Read, &moves)?;
        let rate = |seconds: f64| (block * count) as f64 / seconds / 1e9;
        let cell = |times: &Times| format!("{:.2} / {:.2}", rate(times.plane), rate(times.raw));
        println!(
            "{:>13} x {:>4} K {:>16} {:>7.2} {:>16} {:>7.2}",
            count,
            block >> 10,
            cell(&write),
            write.ratio,
            cell(&read),
            read.ratio
        );
    }
    pair.small_requests(region)?;
    println!("{:?}", pair.ends.plane.stats());
    Ok(())
}

/// Medians of a comparison.
struct Times {
    plane: f64,
    raw: f64,
    /// Of the throughputs, plane over plain code.
    ratio: f64,
}

/// Both agents of one process, over the same pool.
struct Ends {
    plane: NixlPlane,
    raw: Raw,
    pool: HostPool,
}

impl Ends {
    fn new(nixl: &Nixl, name: &str, region: usize) -> Result<Ends, Error> {
        let pool = HostPool::new(region)?;
        let mut plane = NixlPlane::new(nixl, NixlConfig::default())?;
        plane.add_pool(&pool)?;
        plane.register(&Region::dram(RegionRole::Kv, pool.addr(), region as u64, 4096))?;
        Ok(Ends { plane, raw: Raw::new(name, &pool)?, pool })
    }
}

struct Raw {
    agent: Agent,
    args: OptArgs,
    _registered: RegistrationHandle,
}

impl Raw {
    fn new(name: &str, pool: &HostPool) -> Result<Raw, Error> {
        let config = AgentConfig { enable_prog_thread: false, ..AgentConfig::default() };
        let agent = Agent::new_configured(name, &config)?;
        let (_, params) = agent.get_plugin_params("UCX")?;
        let backend = agent.create_backend("UCX", &params)?;
        let mut args = OptArgs::new()?;
        args.add_backend(&backend)?;
        let registered = agent.register_memory(&Whole(pool.clone()), Some(&args))?;
        Ok(Raw { agent, args, _registered: registered })
    }

    fn run(&self, op: Op, descs: &[Desc], here: u64, there: u64) -> Result<(), Error> {
        let mut local = XferDescList::new(MemType::Dram)?;
        let mut remote = XferDescList::new(MemType::Dram)?;
        for desc in descs {
            local.add_desc((here + desc.local_offset) as usize, desc.len as usize, 0);
            remote.add_desc((there + desc.remote_offset) as usize, desc.len as usize, 0);
        }
        let op = match op {
            Op::Write => XferOp::Write,
            Op::Read => XferOp::Read,
        };
        let request = self.agent.create_xfer_req(op, &local, &remote, "raw-child", Some(&self.args))?;
        if self.agent.post_xfer_req(&request, Some(&self.args))? {
            while self.agent.get_xfer_status(&request)? == XferStatus::InProgress {}
        }
        Ok(())
    }
}

/// A pool as `nixl-sys` wants it.
#[derive(Debug)]
struct Whole(HostPool);

impl MemoryRegion for Whole {
    #[allow(unsafe_code)]
    unsafe fn as_ptr(&self) -> *const u8 {
        self.0.addr() as *const u8
    }

    fn size(&self) -> usize {
        self.0.len()
    }
}

impl NixlDescriptor for Whole {
    fn mem_type(&self) -> MemType {
        MemType::Dram
    }

    fn device_id(&self) -> u64 {
        0
    }
}

struct Pair {
    ends: Ends,
    /// Where the child's pool is.
    there: u64,
    child: Child,
    _stdin: Option<ChildStdin>,
    next: u64,
}

impl Pair {
    fn start(nixl: &Nixl, region: usize) -> Result<Pair, Error> {
        let mut child = Command::new(std::env::current_exe()?)
            .env(PEER, region.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no output of the peer")?).read_line(&mut line)?;
        let (plane, raw) = line.trim().split_once(' ').ok_or("no metadata from the peer")?;
        let (plane, raw) = (bytes(plane)?, bytes(raw)?);
        let mut ends = Ends::new(nixl, "raw-parent", region)?;
        ends.plane.connect(CHILD, &plane)?;
        ends.raw.agent.load_remote_md(&raw)?;
        // The one registered section of NIXL's metadata: its address is the child's pool.
        let there = address(&raw, region as u64).ok_or("the peer's metadata has no such section")?;
        let stdin = child.stdin.take();
        let mut pair = Pair { ends, there, child, _stdin: stdin, next: 0 };
        let first = Moves::random(64 << 10, 16, region);
        pair.plane(Op::Write, &first.descs)?;
        pair.raw(Op::Write, &first.descs)?;
        Ok(pair)
    }

    fn compare(&mut self, op: Op, moves: &Moves) -> Result<Times, Error> {
        let mut rounds = Vec::new();
        for round in 0..=ROUNDS {
            // Who comes first changes.
            let (plane, raw) = if round % 2 == 0 {
                let plane = timed(|| self.plane(op, &moves.descs))?;
                (plane, timed(|| self.raw(op, &moves.descs))?)
            } else {
                let raw = timed(|| self.raw(op, &moves.descs))?;
                (timed(|| self.plane(op, &moves.descs))?, raw)
            };
            if round > 0 {
                rounds.push((plane, raw));
            }
        }
        Ok(medians(&rounds))
    }

    /// A thousand requests of a random page each, 32 layers of 8 KiB: as many descriptors as layers
    /// where each layer is a region of its own, and one where a page holds all its layers.
    fn small_requests(&mut self, region: usize) -> Result<(), Error> {
        let (layers, piece, requests) = (32, 8 << 10, 1000);
        let pages = region / (layers * piece);
        if pages < 64 {
            return Ok(());
        }
        println!("\n{requests} requests of one page, {layers} layers of {} KiB, ms together", piece >> 10);
        for layout in ["layer-major", "page-major"] {
            let pick = |request: usize, salt: usize| (request * 7919 + salt * 104_729) % pages;
            let descs = |request: usize| -> Vec<Desc> {
                let (from, to) = (pick(request, 1), pick(request, 2));
                let desc = |local: usize, remote: usize, len: usize| Desc {
                    local_region: 0,
                    remote_region: 0,
                    local_offset: local as u64,
                    remote_offset: remote as u64,
                    len: len as u64,
                };
                if layout == "page-major" {
                    vec![desc(from * layers * piece, to * layers * piece, layers * piece)]
                } else {
                    let at = |layer: usize, page: usize| (layer * pages + page) * piece;
                    (0..layers).map(|layer| desc(at(layer, from), at(layer, to), piece)).collect()
                }
            };
            let posts: Vec<Vec<Desc>> = (0..requests).map(descs).collect();
            let mut rounds = Vec::new();
            for _ in 0..ROUNDS {
                let plane = timed(|| self.many(&posts))?;
                let raw = timed(|| posts.iter().try_for_each(|descs| self.raw(Op::Write, descs)))?;
                rounds.push((plane, raw));
            }
            let times = medians(&rounds);
            println!(
                "{layout:>12}: plane {:.1}, plain {:.1}, ratio {:.2}",
                times.plane * 1e3,
                times.raw * 1e3,
                times.ratio
            );
        }
        Ok(())
    }

    fn raw(&self, op: Op, descs: &[Desc]) -> Result<(), Error> {
        self.ends.raw.run(op, descs, self.ends.pool.addr(), self.there)
    }

    fn plane(&mut self, op: Op, descs: &[Desc]) -> Result<(), Error> {
        self.post(op, descs)?;
        self.await_posts(1)
    }

    fn many(&mut self, posts: &[Vec<Desc>]) -> Result<(), Error> {
        for descs in posts {
            self.post(Op::Write, descs)?;
        }
        self.await_posts(posts.len())
    }

    fn post(&mut self, op: Op, descs: &[Desc]) -> Result<(), Error> {
        let id = PostId(self.next);
        self.next += 1;
        Ok(self.ends.plane.post(CHILD, Post { id, op, descs: descs.to_vec(), notify: None })?)
    }

    fn await_posts(&mut self, mut count: usize) -> Result<(), Error> {
        let mut events = Vec::new();
        while count > 0 {
            self.ends.plane.poll(Time::ZERO, &mut events);
            for event in events.drain(..) {
                match event {
                    PlaneEvent::Posted { result, .. } => {
                        result?;
                        count -= 1;
                    }
                    PlaneEvent::PeerGone { .. } => return Err("the peer is gone".into()),
                    PlaneEvent::Frame(_) => {}
                }
            }
        }
        Ok(())
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn medians(rounds: &[(f64, f64)]) -> Times {
    let median = |value: &dyn Fn(&(f64, f64)) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    };
    Times {
        plane: median(&|round| round.0),
        raw: median(&|round| round.1),
        ratio: median(&|round| round.1 / round.0),
    }
}

/// The address before this length in NIXL's list of sections.
fn address(metadata: &[u8], len: u64) -> Option<u64> {
    let at = metadata.windows(8).rposition(|window| window == len.to_le_bytes())?;
    let before = metadata.get(at.checked_sub(8)?..at)?;
    Some(u64::from_le_bytes(before.try_into().ok()?))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Result<Vec<u8>, Error> {
    let byte = |at| u8::from_str_radix(hex.get(at..at + 2).unwrap_or_default(), 16);
    Ok((0..hex.len()).step_by(2).map(byte).collect::<Result<_, _>>()?)
}
