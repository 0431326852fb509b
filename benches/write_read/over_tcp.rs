//! kv-tcp beside NIXL, UCX and libfabric over TCP: WRITE and READ of the same blocks between two processes of one host.
//!
//! Each transport has two processes of its own, because a process can have one copy of UCX, and NIXL brings another. All
//! are there at once (which takes 4 GiB of memory for four transports) and measured in turn; while one is, the others have
//! nothing to do. Its ends wait as a worker does: for as long as the transport says. Posts are like those of a session.

use std::io::{BufRead, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use kv_benches::{bytes, hex};
use kv_conformance::{boottime, rest};
use kv_transfer::tcp::{HostMemory, TcpConfig, TcpTransport};
use kv_transfer::unstable::{Op, Transport};
use kv_transfer::{PeerId, Region, RegionRole, Time};

use crate::child::{Served, end_with_the_parent};
use crate::posts::{REST, in_posts};
use crate::{Error, Moves, median, timed};

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
/// How often a process that measures lets its transport work while it is asked nothing.
const PAUSE: Duration = Duration::from_millis(10);

/// Whether this process has a part in this table. Such a process loads one library only: ask before any is loaded.
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

/// Looks for the library of a transport.
fn look(name: &str) -> Result<(), Error> {
    match name {
        "kv-tcp" => {}
        #[cfg(feature = "nixl")]
        "NIXL" => drop(kv_transfer::nixl::Nixl::load(&kv_transfer::nixl::Search::default())?),
        #[cfg(feature = "ucx")]
        "UCX" => drop(kv_transfer::ucx::Ucx::load(None)?),
        #[cfg(feature = "fabric")]
        "libfabric" => drop(kv_transfer::fabric::installed()?),
        other => return Err(format!("this bench was built without {other}").into()),
    }
    Ok(())
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
                config.devices = vec!["lo".to_owned()];
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
        // The end of the way is seen by the process that measures, whose end ends this one.
        events.clear();
        rest(end.transport.as_ref(), REST);
    }
}

/// Measures one transport: for each line of standard input, the letter of an operation and the size of a block, a line
/// with seconds. Before the first it prints an empty line, or why the library is not there.
fn measure() -> Result<(), Error> {
    let told = std::env::var(MEASURED)?;
    let (name, len) = told.split_once(' ').ok_or("the parent has told too little")?;
    if let Err(reason) = look(name) {
        println!("{reason}");
        return Ok(());
    }
    let len = len.parse()?;
    let mut pair = Pair::start(name, len)?;
    println!();
    let (asked, questions) = mpsc::channel();
    std::thread::spawn(move || {
        let lines = std::io::stdin().lock().lines();
        lines.map_while(Result::ok).try_for_each(|line| asked.send(line).ok())
    });
    let mut events = Vec::new();
    loop {
        let line = match questions.recv_timeout(PAUSE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                pair.end.transport.poll(boottime(), &mut events);
                if let Some(event) = events.pop() {
                    return Err(format!("{event:?} while nothing was asked").into());
                }
                continue;
            }
        };
        let (op, block) = line.split_once(' ').ok_or("the parent has asked too little")?;
        let block = block.parse()?;
        let moves = Moves::random(block, len / block, len);
        let op = if op == "w" { Op::Write } else { Op::Read };
        println!("{}", timed(|| pair.run(op, &moves))?);
    }
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
        // Opens the connections now, so that no measurement does.
        pair.run(Op::Write, &Moves::random(64 << 10, 16, len))?;
        Ok(pair)
    }

    fn run(&mut self, op: Op, moves: &Moves) -> Result<(), Error> {
        in_posts(self.end.transport.as_mut(), OTHER, &mut self.next, op, moves.descriptors())
    }
}

/// Prints the throughput of each transport, and how many times as fast kv-tcp is as the fastest of the others.
pub(crate) fn table(region: usize) -> Result<(), Error> {
    if TRANSPORTS.len() == 1 {
        println!("kv-tcp has no other transport beside it: --features nixl,ucx,fabric builds them in");
        return Ok(());
    }
    let mut measured = Vec::new();
    for &name in TRANSPORTS {
        let (process, reason) = Served::start(MEASURED, format!("{name} {region}"))
            .map_err(|error| format!("{name} over TCP: {error}"))?;
        if reason.is_empty() {
            measured.push((name, process));
        } else {
            println!("{name} is not measured over TCP: {reason}");
        }
    }
    println!(
        "\nOver TCP: {} MiB in blocks at random places, GB/s, medians of {ROUNDS} rounds, in which each transport has its turn",
        region >> 20
    );
    let names: Vec<_> = measured.iter().map(|(name, _)| format!("{name:>10}")).collect();
    println!("{:>9} {:>6} {} {:>20}", "block", "", names.join(" "), "kv-tcp / the fastest");
    for block in [16 << 10, 64 << 10, 256 << 10, 1 << 20] {
        for op in ["WRITE", "READ"] {
            let question = format!("{} {block}\n", if op == "WRITE" { "w" } else { "r" });
            let mut rounds = Vec::new();
            for round in 0..=ROUNDS {
                let mut took = vec![f64::NAN; measured.len()];
                for turn in 0..measured.len() {
                    // Another one is the first in each round.
                    let at = (turn + round) % measured.len();
                    let (name, process) = &mut measured[at];
                    let seconds = process.ask(&question).map_err(|error| format!("{name}: {error}"))?;
                    took[at] = seconds.parse()?;
                }
                if round > 0 {
                    rounds.push(took);
                }
            }
            let rate =
                |at: usize| region as f64 / median(rounds.iter().map(|took: &Vec<f64>| took[at])) / 1e9;
            let cells: Vec<_> = (0..measured.len()).map(|at| format!("{:>10.2}", rate(at))).collect();
            // Against whichever of the others was the fastest in the round.
            let fastest = |took: &Vec<f64>| took.iter().skip(1).copied().fold(f64::INFINITY, f64::min);
            let ratio = median(rounds.iter().map(|took| fastest(took) / took[0]));
            println!("{:>5} KiB {op:>6} {} {ratio:>20.2}", block >> 10, cells.join(" "));
        }
    }
    Ok(())
}
