//! WRITE and READ over libfabric: our transport beside plain calls of libfabric, with the same descriptors in the same
//! memory, over the same provider.
//!
//! Each of the two processes has two endpoints: that of a transport, and one that plain code uses. The process that serves
//! makes progress on the one that is measured, and on no other. Plain code begins one operation for each block as long as
//! libfabric takes them, each with as much proof as the transport's have (`FI_DELIVERY_COMPLETE`), and reads the
//! completion queue until all have ended.

use std::io::Write;
use std::sync::atomic::Ordering;

use kv_benches::fabric::Raw;
use kv_benches::{bytes, hex};
use kv_conformance::boottime;
use kv_transfer::fabric::{FabricConfig, FabricError, FabricTransport, HostMemory, installed};
use kv_transfer::unstable::{Descriptor, Op, Post, Transport, TransportEvent};
use kv_transfer::{PeerId, PostId, Region, RegionRole, Time};

use crate::child::{Served, heard};
use crate::posts::posted;
use crate::{Error, Moves, median, timed};

/// The variable that tells the child the length of its region, and the metadata of its parent.
const PEER: &str = "KV_BENCH_FABRIC_PEER";
const OTHER: PeerId = PeerId(1);
/// Pairs of measurements behind each ratio, at least; short transfers have more.
const ROUNDS: usize = 9;
/// The provider of both endpoints, and the address of their interface.
const PROVIDER: &str = "tcp;ofi_rxm";
const ADDRESS: &str = "127.0.0.1";
/// The blocks of the summary.
const PAGE: usize = 64 << 10;

pub(crate) fn is_peer() -> bool {
    std::env::var_os(PEER).is_some()
}

/// Which endpoints move the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ours {
    Plain,
    Transport,
}

/// Both endpoints of one process, over the same memory.
struct Ends {
    transport: FabricTransport,
    raw: Raw,
    _memory: HostMemory,
}

impl Ends {
    fn new(region: usize) -> Result<Ends, Error> {
        let memory = HostMemory::new(region)?;
        let config = FabricConfig::new(ADDRESS.parse()?).with(|config| config.provider = PROVIDER.to_owned());
        let mut transport = FabricTransport::new(config)?;
        transport.add_memory(&memory)?;
        transport.register(&Region::dram(RegionRole::Kv, memory.addr(), region as u64, 4096))?;
        let raw = Raw::new(PROVIDER, ADDRESS, &memory)?;
        Ok(Ends { transport, raw, _memory: memory })
    }
}

/// Runs the child: the endpoint that the parent names serves, until standard input ends.
pub(crate) fn serve() -> Result<(), Error> {
    let told = std::env::var(PEER)?;
    let (region, parent) = told.split_once(' ').ok_or("the parent has told too little")?;
    let mut ends = Ends::new(region.parse()?)?;
    println!("{} {}", hex(&ends.transport.metadata()?), ends.raw.describe()?);
    std::io::stdout().flush()?;
    ends.transport.connect(OTHER, &bytes(parent)?)?;
    let heard = heard();
    let mut events = Vec::new();
    loop {
        if heard.load(Ordering::Relaxed) == Ours::Plain as u8 {
            ends.raw.progress()?;
            continue;
        }
        ends.transport.poll(boottime(), &mut events);
        if let Some(TransportEvent::PeerGone { .. }) = events.pop() {
            return Ok(());
        }
    }
}

/// This process and its child.
struct Pair {
    /// First, so that it ends before what it reaches.
    child: Served,
    ends: Ends,
    next: u64,
    /// One block, which shows that the child serves what it was told to.
    first: Moves,
}

impl Pair {
    fn start(region: usize) -> Result<Pair, Error> {
        let mut ends = Ends::new(region)?;
        let told = format!("{region} {}", hex(&ends.transport.metadata()?));
        let (child, line) = Served::start(PEER, told)?;
        let (metadata, raw) = line.split_once(' ').ok_or("the child has told too little")?;
        ends.raw.connect(raw)?;
        let mut pair = Pair { ends, next: 0, first: Moves::random(4 << 10, 1, region), child };
        pair.child.tell(Ours::Transport as u8)?;
        pair.ends.transport.connect(OTHER, &bytes(metadata)?)?;
        pair.ends.transport.permit(OTHER, Time::MAX);
        Ok(pair)
    }

    /// Moves the blocks by these endpoints. Returns the duration in seconds.
    fn measure(&mut self, ours: Ours, op: Op, descriptors: &[Descriptor]) -> Result<f64, Error> {
        self.child.tell(ours as u8)?;
        let first = self.first.descriptors().to_vec();
        match ours {
            Ours::Plain => {
                self.ends.raw.run(Op::Write, &first)?;
                timed(|| self.ends.raw.run(op, descriptors))
            }
            Ours::Transport => {
                self.transport(Op::Write, &first)?;
                timed(|| self.transport(op, descriptors))
            }
        }
    }

    /// Moves the blocks by the transport, in one post.
    fn transport(&mut self, op: Op, descriptors: &[Descriptor]) -> Result<(), Error> {
        self.next += 1;
        let (id, descriptors) = (PostId(self.next), descriptors.to_vec());
        self.ends.transport.post(OTHER, Post { id, op, descriptors, notify: None })?;
        posted(&mut self.ends.transport)
    }
}

/// Medians of throughput and of the ratio to plain calls, measured in turn.
pub(crate) fn table(region: usize) -> Result<(), Error> {
    let (major, minor) = match installed() {
        Ok(installed) => installed.version,
        Err(error @ FabricError::Library { .. }) => {
            println!("libfabric is not measured: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let mut pair = Pair::start(region)?;
    println!(
        "\n{PROVIDER} of libfabric {major}.{minor}: ours / plain calls, medians of pairs of measurements"
    );
    println!(
        "{:>9} {:>9} {:>6} {:>12} {:>12} {:>12}",
        "bytes", "block", "", "plain GB/s", "ours GB/s", "ours/plain"
    );
    let mut pages = Vec::new();
    for total in [(32 << 20).min(region), region] {
        for block in [16 << 10, PAGE, 256 << 10, 1 << 20] {
            let moves = Moves::random(block, total / block, region);
            for op in [Op::Write, Op::Read] {
                let [plain, ours, ratio] = medians(&mut pair, op, moves.descriptors(), total)?;
                println!(
                    "{:>5} MiB {:>5} KiB {:>6} {plain:>12.2} {ours:>12.2} {ratio:>12.2}",
                    total >> 20,
                    block >> 10,
                    if op == Op::Write { "WRITE" } else { "READ" },
                );
                if block == PAGE {
                    pages.push(ratio);
                }
            }
        }
    }
    let least = pages.into_iter().fold(f64::INFINITY, f64::min);
    println!("pages of {} KiB, 32 MiB and more: at least {least:.3} of plain calls", PAGE >> 10);
    Ok(())
}

/// GB/s of plain calls, of ours, and how many times as fast ours are.
fn medians(pair: &mut Pair, op: Op, descriptors: &[Descriptor], total: usize) -> Result<[f64; 3], Error> {
    let rounds = ROUNDS.max((256 << 20) / total * 3).min(41);
    let mut pairs = Vec::new();
    for round in 0..=rounds {
        // Each goes first as often as the other.
        let mut took = [0.0; 2];
        let mut turns = [Ours::Plain, Ours::Transport];
        turns.rotate_left(round % 2);
        for ours in turns {
            took[ours as usize] = pair.measure(ours, op, descriptors)?;
        }
        if round > 0 {
            pairs.push(took);
        }
    }
    let median = |value: &dyn Fn(&[f64; 2]) -> f64| median(pairs.iter().map(value));
    let rate = |at: usize| total as f64 / median(&|pair| pair[at]) / 1e9;
    Ok([rate(0), rate(1), median(&|pair| pair[0] / pair[1])])
}
