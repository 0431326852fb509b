//! kv-tcp beside NIXL, UCX and libfabric over TCP: WRITE and READ of the same blocks between two processes of one host.
//!
//! Each transport has two processes of its own, because a process can have one copy of UCX, and NIXL brings another. All
//! are there at once and measured in turn; while one is, the others wait. Its ends wait as a worker does: for as long as
//! the transport says. Posts are like those of a session.

use std::io::{BufRead, Write};
use std::time::Duration;

use kv_benches::{bytes, hex};
use kv_conformance::{boottime, rest};
use kv_transfer::tcp::{HostMemory, TcpConfig, TcpTransport};
use kv_transfer::unstable::{Op, Transport, TransportEvent};
use kv_transfer::{PeerId, Region, RegionRole, Time};

use crate::child::{Served, end_with_the_parent};
use crate::posts::in_posts;
use crate::{Error, Moves, timed};

/// The variable that tells a process to measure a transport: its name, and the length of its region.
const MEASURED: &str = "KV_BENCH_OVER_TCP";
/// The variable that tells the child of such a process the same, and the metadata of its parent.
const PEER: &str = "KV_BENCH_OVER_TCP_PEER";
/// The transports, kv-tcp first.
const TRANSPORTS: &[&str] = &[
    "kv-tcp",
    #[cfg(feature = "nixl")]
    "NIXL",
    #[cfg(feature = "ucx")]
    "UCX",
    #[cfg(feature = "fabric")]
    "libfabric",
];
const OTHER: PeerId = PeerId(1);
const ROUNDS: usize = 9;
/// Longest that an end waits.
const REST: Duration = Duration::from_secs(1);

/// Whether this process has a part in this table, in which no library may be loaded before its own is.
pub(crate) fn has_a_part() -> bool {
    [MEASURED, PEER].into_iter().any(|variable| std::env::var_os(variable).is_some())
}

/// Plays the part of this process, until standard input ends.
pub(crate) fn play() -> Result<(), Error> {
    if std::env::var_os(PEER).is_some() { serve() } else { measure() }
}

/// A transport with one region, over TCP on the loopback device.
struct End {
    transport: Box<dyn Transport>,
    /// Freed after the transport.
    _memory: HostMemory,
}

impl End {
    fn new(name: &str, len: usize) -> Result<End, Error> {
        let memory = HostMemory::new(len)?;
        let mut transport = transport(name, &memory)?;
        transport.register(&Region::dram(RegionRole::Kv, memory.addr(), len as u64, 4096))?;
        Ok(End { transport, _memory: memory })
    }
}

fn transport(name: &str, memory: &HostMemory) -> Result<Box<dyn Transport>, Error> {
    Ok(match name {
        "kv-tcp" => {
            let mut transport = TcpTransport::new(TcpConfig::new("127.0.0.1:0".parse()?))?;
            transport.add_memory(memory)?;
            Box::new(transport)
        }
        #[cfg(feature = "nixl")]
        "NIXL" => {
            use kv_transfer::nixl::{Nixl, NixlConfig, NixlTransport, Search};
            let config = NixlConfig::default().with(|config| {
                config.backend_params = vec![("engine_config".to_owned(), "TLS=tcp".to_owned())];
                config.reads_over_tcp = true;
            });
            let mut transport = NixlTransport::new(&Nixl::load(&Search::default())?, config)?;
            transport.add_memory(memory)?;
            Box::new(transport)
        }
        #[cfg(feature = "ucx")]
        "UCX" => {
            use kv_transfer::ucx::{Ucx, UcxConfig, UcxTransport};
            let config = UcxConfig::default().with(|config| {
                (config.devices, config.transports) = (vec!["lo".to_owned()], vec!["tcp".to_owned()]);
                config.reads_over_tcp = true;
            });
            let mut transport = UcxTransport::new(Ucx::load(None)?, config)?;
            transport.add_memory(memory)?;
            Box::new(transport)
        }
        #[cfg(feature = "fabric")]
        "libfabric" => {
            use kv_transfer::fabric::{FabricConfig, FabricTransport};
            let config = FabricConfig::new("127.0.0.1".parse()?)
                .with(|config| config.provider = "tcp;ofi_rxm".to_owned());
            let mut transport = FabricTransport::new(config)?;
            transport.add_memory(memory)?;
            Box::new(transport)
        }
        other => return Err(format!("this bench was built without {other}").into()),
    })
}

/// Answers the transfers of the process that measures.
fn serve() -> Result<(), Error> {
    let told = std::env::var(PEER)?;
    let [name, len, parent] = told.split(' ').collect::<Vec<_>>()[..] else {
        return Err("the parent has told too little".into());
    };
    let mut end = End::new(name, len.parse()?)?;
    println!("{}", hex(&end.transport.metadata()?));
    std::io::stdout().flush()?;
    end.transport.connect(OTHER, &bytes(parent)?)?;
    end_with_the_parent();
    let mut events = Vec::new();
    loop {
        end.transport.poll(boottime(), &mut events);
        // The other process has ended, or sees the end of the way itself.
        if let Some(TransportEvent::PeerGone { .. }) = events.pop() {
            return Ok(());
        }
        rest(end.transport.as_ref(), REST);
    }
}

/// Measures one transport: for each line of standard input, the letter of an operation and the size of a block, a line
/// with seconds. Before the first it prints an empty line, or why there is nothing to measure.
fn measure() -> Result<(), Error> {
    let told = std::env::var(MEASURED)?;
    let (name, len) = told.split_once(' ').ok_or("the parent has told too little")?;
    let len = len.parse()?;
    let mut pair = match Pair::start(name, len) {
        Ok(pair) => pair,
        Err(error) => {
            println!("{error}");
            return Ok(());
        }
    };
    println!();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (op, block) = line.split_once(' ').ok_or("the parent has asked too little")?;
        let block = block.parse()?;
        let moves = Moves::random(block, len / block, len);
        let op = if op == "w" { Op::Write } else { Op::Read };
        println!("{}", timed(|| pair.run(op, &moves))?);
    }
    Ok(())
}

/// A process that measures, and its child.
struct Pair {
    /// First, so that it ends before what it reaches.
    _child: Served,
    end: End,
    next: u64,
}

impl Pair {
    fn start(name: &str, len: usize) -> Result<Pair, Error> {
        let mut end = End::new(name, len)?;
        let metadata = hex(&end.transport.metadata()?);
        let (child, line) = Served::start(PEER, format!("{name} {len} {metadata}"))?;
        end.transport.connect(OTHER, &bytes(&line)?)?;
        end.transport.permit(OTHER, Time::MAX);
        let mut pair = Pair { end, next: 0, _child: child };
        // Opens the connections, which are not attended to until the first measurement.
        pair.run(Op::Write, &Moves::random(64 << 10, 16, len))?;
        Ok(pair)
    }

    fn run(&mut self, op: Op, moves: &Moves) -> Result<(), Error> {
        in_posts(self.end.transport.as_mut(), OTHER, &mut self.next, op, moves.descriptors())
    }
}

/// Prints the throughput of each transport, and how many times as fast kv-tcp is as the best of the others.
pub(crate) fn table(region: usize) -> Result<(), Error> {
    let mut measured = Vec::new();
    for &name in TRANSPORTS {
        let (process, reason) = Served::start(MEASURED, format!("{name} {region}"))?;
        if reason.is_empty() {
            measured.push((name, process));
        } else {
            println!("{name} is not measured over TCP: {reason}");
        }
    }
    if measured.len() < 2 {
        println!("kv-tcp has no other transport beside it: --features nixl,ucx,fabric builds them in");
        return Ok(());
    }
    println!(
        "\nOver TCP: {} MiB in blocks at random places, GB/s, medians of {ROUNDS} rounds, in which each transport has its turn",
        region >> 20
    );
    let names: Vec<_> = measured.iter().map(|(name, _)| format!("{name:>10}")).collect();
    println!("{:>9} {:>6} {} {:>16}", "block", "", names.join(" "), "kv-tcp/best");
    for block in [16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        for op in ["WRITE", "READ"] {
            let question = format!("{} {block}\n", if op == "WRITE" { "w" } else { "r" });
            let mut took = vec![Vec::new(); measured.len()];
            for round in 0..=ROUNDS {
                for ((_, process), took) in measured.iter_mut().zip(&mut took) {
                    let seconds: f64 = process.ask(&question)?.parse()?;
                    if round > 0 {
                        took.push(seconds);
                    }
                }
            }
            let rates: Vec<f64> = took
                .iter_mut()
                .map(|took| {
                    took.sort_by(f64::total_cmp);
                    region as f64 / took[took.len() / 2] / 1e9
                })
                .collect();
            let others = rates.iter().skip(1).copied().fold(0.0, f64::max);
            let cells: Vec<_> = rates.iter().map(|rate| format!("{rate:>10.2}")).collect();
            println!("{:>5} KiB {op:>6} {} {:>16.2}", block >> 10, cells.join(" "), rates[0] / others);
        }
    }
    Ok(())
}
