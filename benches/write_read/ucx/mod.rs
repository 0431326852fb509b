//! WRITE over UCX: our transport beside plain calls of UCX, with the same descriptors in the same memory.
//!
//! Each of the two processes has two UCX workers with the same settings and the same memory: that of a transport, and one
//! that plain code uses. Plain code hands all descriptors of a transfer to UCX at once, one put each, then a flush, and
//! lets UCX work until the flush has ended.

mod raw;

use std::io::Write;
use std::process::Command;

use kv_benches::{bytes, hex};
use kv_conformance::boottime;
use kv_transfer::ucx::{HostMemory, Ucx, UcxConfig, UcxTransport};
use kv_transfer::unstable::{Descriptor, Op, Post, Transport, TransportEvent};
use kv_transfer::{PeerId, PostId, Region, RegionRole, Time};

use crate::child::{Served, end_with_the_parent};
use crate::posts::posted;
use crate::{Error, Moves, median, timed};
use raw::Raw;

/// The variable that tells the child its route, the length of its region, and the metadata of its parent.
const PEER: &str = "KV_BENCH_UCX_PEER";
const OTHER: PeerId = PeerId(1);
/// Pairs of measurements behind each ratio, at least; short transfers have more.
const ROUNDS: usize = 9;

pub(crate) fn is_peer() -> bool {
    std::env::var_os(PEER).is_some()
}

/// Runs this program once more for the tables of UCX alone, because this process may have loaded NIXL.
pub(crate) fn in_a_process_of_its_own() -> Result<(), Error> {
    let arguments = std::env::args().skip(1).chain(["ucx".to_owned()]);
    let status = Command::new(std::env::current_exe()?).args(arguments).status()?;
    if status.success() { Ok(()) } else { Err("the figures of UCX failed".into()) }
}

/// Measures and prints all tables.
pub(crate) fn tables(region: usize) -> Result<(), Error> {
    let ucx = match Ucx::load(None) {
        Ok(ucx) => ucx,
        Err(error) => {
            println!("UCX is not measured: {error}");
            return Ok(());
        }
    };
    [Route::Tcp, Route::All].into_iter().try_for_each(|route| table(ucx, route, region))
}

/// The ways that UCX may choose from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    /// TCP over the loopback device.
    Tcp,
    /// All: between processes of one host, UCX takes a copy by the kernel.
    All,
}

impl Route {
    fn name(self) -> &'static str {
        match self {
            Route::Tcp => "tcp",
            Route::All => "all",
        }
    }

    fn config(self) -> UcxConfig {
        UcxConfig::default().with(|config| {
            if self == Route::Tcp {
                (config.devices, config.transports) = (vec!["lo".to_owned()], vec!["tcp".to_owned()]);
            }
        })
    }

    /// The same settings for plain code.
    fn settings(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Route::Tcp => &[("RNDV_THRESH", "inf"), ("NET_DEVICES", "lo"), ("TLS", "tcp")],
            Route::All => &[("RNDV_THRESH", "inf")],
        }
    }
}

/// Both workers of one process, over the same memory.
struct Ends {
    transport: UcxTransport,
    raw: Raw,
    _memory: HostMemory,
}

impl Ends {
    fn new(ucx: Ucx, route: Route, region: usize) -> Result<Ends, Error> {
        let memory = HostMemory::new(region)?;
        let mut transport = UcxTransport::new(ucx, route.config())?;
        transport.add_memory(&memory)?;
        transport.register(&Region::dram(RegionRole::Kv, memory.addr(), region as u64, 4096))?;
        let raw = Raw::new(ucx, route.settings(), &memory)?;
        Ok(Ends { transport, raw, _memory: memory })
    }
}

/// Runs the child: both workers serve until standard input ends.
pub(crate) fn serve() -> Result<(), Error> {
    let told = std::env::var(PEER)?;
    let mut told = told.split(' ');
    let mut next = || told.next().ok_or("the parent has told too little");
    let route = if next()? == Route::Tcp.name() { Route::Tcp } else { Route::All };
    let (region, parent) = (next()?.parse()?, bytes(next()?)?);
    let mut ends = Ends::new(Ucx::load(None)?, route, region)?;
    println!("{} {}", hex(&ends.transport.metadata()?), ends.raw.describe()?);
    std::io::stdout().flush()?;
    ends.transport.connect(OTHER, &parent)?;
    end_with_the_parent();
    let mut events = Vec::new();
    loop {
        ends.transport.poll(boottime(), &mut events);
        if let Some(TransportEvent::PeerGone { .. }) = events.pop() {
            return Ok(());
        }
        ends.raw.progress();
    }
}

/// This process and its child.
struct Pair {
    /// First, so that it ends before what it reaches.
    _child: Served,
    ends: Ends,
    next: u64,
}

impl Pair {
    fn start(ucx: Ucx, route: Route, region: usize) -> Result<Pair, Error> {
        let mut ends = Ends::new(ucx, route, region)?;
        let told = format!("{} {region} {}", route.name(), hex(&ends.transport.metadata()?));
        let (child, line) = Served::start(PEER, told)?;
        let (metadata, raw) = line.split_once(' ').ok_or("the child has told too little")?;
        ends.transport.connect(OTHER, &bytes(metadata)?)?;
        ends.transport.permit(OTHER, Time::MAX);
        ends.raw.connect(raw)?;
        let mut pair = Pair { ends, next: 0, _child: child };
        let first = Moves::random(64 << 10, 16, region);
        pair.transport(first.descriptors())?;
        pair.ends.raw.write(first.descriptors())?;
        Ok(pair)
    }

    /// Writes the blocks by the transport, in one post.
    fn transport(&mut self, descriptors: &[Descriptor]) -> Result<(), Error> {
        self.next += 1;
        let (id, descriptors) = (PostId(self.next), descriptors.to_vec());
        self.ends.transport.post(OTHER, Post { id, op: Op::Write, descriptors, notify: None })?;
        posted(&mut self.ends.transport)
    }
}

/// Medians of throughput and of the ratio to plain calls, measured in turn.
fn table(ucx: Ucx, route: Route, region: usize) -> Result<(), Error> {
    let mut pair = Pair::start(ucx, route, region)?;
    let lanes: Vec<String> = pair
        .ends
        .transport
        .lanes(OTHER)
        .iter()
        .map(|(transport, device)| format!("{transport}/{device}"))
        .collect();
    println!(
        "\nUCX over {}: our WRITE / plain puts and a flush, medians of pairs of measurements",
        lanes.join(", ")
    );
    println!("{:>9} {:>9} {:>12} {:>12} {:>12}", "bytes", "block", "plain GB/s", "WRITE GB/s", "WRITE/plain");
    for total in [(32 << 20).min(region), region] {
        for block in [16 << 10, 64 << 10, 256 << 10, 1 << 20] {
            let moves = Moves::random(block, total / block, region);
            let rounds = ROUNDS.max((256 << 20) / total * 3).min(41);
            let mut pairs = Vec::new();
            for round in 0..=rounds {
                let plain = timed(|| pair.ends.raw.write(moves.descriptors()))?;
                let ours = timed(|| pair.transport(moves.descriptors()))?;
                if round > 0 {
                    pairs.push([plain, ours]);
                }
            }
            let median = |value: &dyn Fn(&[f64; 2]) -> f64| median(pairs.iter().map(value));
            let rate = |at: usize| total as f64 / median(&|pair| pair[at]) / 1e9;
            println!(
                "{:>5} MiB {:>5} KiB {:>12.2} {:>12.2} {:>12.2}",
                total >> 20,
                block >> 10,
                rate(0),
                rate(1),
                median(&|pair| pair[0] / pair[1]),
            );
        }
    }
    Ok(())
}
