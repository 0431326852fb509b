//! WRITE and READ where one side's pages, or those of both, lie in the memory of a GPU: over NIXL, and over UCX in a
//! process of its own, beside `cuMemcpyAsync` of the same pages in one process in the same run.

use std::io::Write;
use std::process::Command;

use kv_benches::{bytes, hex};
use kv_conformance::{Gpu, Vram, boottime};
use kv_transfer::unstable::{Op, Post, Transport, TransportEvent, TransportWait};
use kv_transfer::{MemoryKind, PeerId, PostId, Region, RegionRole, Time};

use crate::child::{Served, end_with_the_parent};
use crate::posts::posted;
use crate::{Error, Moves, median, timed};

/// The variable that tells the child its library and its memory, the length of that, and the metadata of its parent.
const PEER: &str = "KV_BENCH_GPU_PEER";
/// The variable that tells a process of this bench which library to measure.
const LIBRARY: &str = "KV_BENCH_GPU_LIBRARY";
const LIBRARIES: &[&str] = &[
    #[cfg(feature = "nixl")]
    "nixl",
    #[cfg(feature = "ucx")]
    "ucx",
];
const OTHER: PeerId = PeerId(1);
/// Pairs of measurements behind each ratio.
const ROUNDS: usize = 9;
/// The same where one measurement takes longer than this many seconds, as over TCP.
const FEW_ROUNDS: usize = 2;
const LONG: f64 = 0.3;

pub(crate) fn is_peer() -> bool {
    std::env::var_os(PEER).is_some()
}

/// True if this process is to measure GPU memory alone.
pub(crate) fn is_asked_for() -> bool {
    std::env::var_os(LIBRARY).is_some() || std::env::args().skip(1).any(|arg| arg == "gpu")
}

/// Prints the table of each library; or why there is none.
pub(crate) fn tables(region: usize) -> Result<(), Error> {
    let gpu = match Gpu::first() {
        Ok(gpu) => gpu,
        Err(reason) => {
            println!("GPU memory is not measured: {reason}");
            return Ok(());
        }
    };
    if let Ok(library) = std::env::var(LIBRARY) {
        return table(gpu, &library, region);
    }
    // A process has one copy of UCX, and NIXL brings its own.
    for library in LIBRARIES {
        let arguments = std::env::args().skip(1);
        let status = Command::new(std::env::current_exe()?).args(arguments).env(LIBRARY, library).status()?;
        if !status.success() {
            return Err(format!("the figures of {library} failed: {status}").into());
        }
    }
    Ok(())
}

/// Memory of one side.
enum Memory {
    Gpu(Vram),
    Host(kv_transfer::local::Arena),
}

impl Memory {
    fn addr(&self) -> u64 {
        match self {
            Memory::Gpu(memory) => memory.addr(),
            Memory::Host(memory) => memory.addr(),
        }
    }
}

/// A transport with one region.
struct End {
    transport: Box<dyn Transport>,
    memory: Memory,
}

impl End {
    fn new(library: &str, place: &str, len: usize) -> Result<End, Error> {
        let memory = match place {
            "GPU" => Memory::Gpu(Vram::new(Gpu::first()?, len)),
            _ => Memory::Host(kv_transfer::local::Arena::new(len)?),
        };
        let kind = if place == "GPU" { MemoryKind::Vram } else { MemoryKind::Dram };
        let region = Region::dram(RegionRole::Kv, memory.addr(), len as u64, 4096).memory(kind, 0);
        let mut transport = transport(library, &region)?;
        transport.register(&region)?;
        Ok(End { transport, memory })
    }
}

#[allow(unsafe_code)]
fn transport(library: &str, region: &Region) -> Result<Box<dyn Transport>, Error> {
    match library {
        #[cfg(feature = "ucx")]
        "ucx" => {
            use kv_transfer::ucx::{Ucx, UcxConfig, UcxTransport};
            let allow = |config: &mut UcxConfig| (config.reads_over_tcp, config.gpu_over_tcp) = (true, true);
            let config = UcxConfig::default().with(allow);
            let mut transport = UcxTransport::new(Ucx::load(None)?, config)?;
            // SAFETY: the memory is freed after the transport, with the value that owns both.
            unsafe { transport.adopt_regions([region]) }?;
            Ok(Box::new(transport))
        }
        #[cfg(feature = "nixl")]
        "nixl" => {
            use kv_transfer::nixl::{Nixl, NixlConfig, NixlTransport, Search};
            let allow = |config: &mut NixlConfig| (config.reads_over_tcp, config.gpu_over_tcp) = (true, true);
            let config = NixlConfig::default().with(allow);
            let mut transport = NixlTransport::new(&Nixl::load(&Search::default())?, config)?;
            // SAFETY: as above.
            unsafe { transport.adopt_regions([region]) }?;
            Ok(Box::new(transport))
        }
        other => Err(format!("this program was built without {other}, and not measured").into()),
    }
}

/// Runs the child: serves until standard input ends.
pub(crate) fn serve() -> Result<(), Error> {
    let told = std::env::var(PEER)?;
    let [library, place, len, parent] = told.split(' ').collect::<Vec<_>>()[..] else {
        return Err("the parent has told too little".into());
    };
    let mut end = End::new(library, place, len.parse()?)?;
    println!("{}", hex(&end.transport.metadata()?));
    std::io::stdout().flush()?;
    end.transport.connect(OTHER, &bytes(parent)?)?;
    end_with_the_parent();
    let mut events = Vec::new();
    loop {
        end.transport.poll(boottime(), &mut events);
        if let Some(TransportEvent::PeerGone { .. }) = events.pop() {
            return Ok(());
        }
        if end.transport.wait() != TransportWait::Now {
            std::thread::yield_now();
        }
    }
}

fn table(gpu: &'static Gpu, library: &str, region: usize) -> Result<(), Error> {
    println!("\n{library}, memory of a GPU: our transport / cuMemcpyAsync, medians of pairs of measurements");
    println!(
        "{:>14} {:>10} {:>9} {:>12} {:>12} {:>9}",
        "", "pages", "CUDA GB/s", "ours GB/s", "", "ours/CUDA"
    );
    for (here, there) in [("GPU", "GPU"), ("GPU", "host"), ("host", "GPU")] {
        let mut end = End::new(library, here, region)?;
        let told = format!("{library} {there} {region} {}", hex(&end.transport.metadata()?));
        let (_child, line) = Served::start(PEER, told)?;
        end.transport.connect(OTHER, &bytes(&line)?)?;
        end.transport.permit(OTHER, Time::MAX);
        // CUDA's own copies go between the same memory here and memory like that of the child.
        let like = match there {
            "GPU" => Memory::Gpu(Vram::new(gpu, region)),
            _ => Memory::Host(kv_transfer::local::Arena::new(region)?),
        };
        let _pinned = [&end.memory, &like].map(|memory| match memory {
            Memory::Host(arena) => gpu.pin(arena.addr(), arena.len()),
            Memory::Gpu(_) => None,
        });
        let mut next = 0;
        for op in [Op::Write, Op::Read] {
            for block in [64 << 10, 1 << 20] {
                let moves = Moves::random(block, region / block, region);
                let (ours, theirs) = (end.memory.addr(), like.addr());
                let mut pairs = Vec::new();
                let mut rounds = 0..=ROUNDS;
                while let Some(round) = rounds.next() {
                    let plain = timed(|| {
                        let ends = moves.descriptors().iter().map(|descriptor| {
                            (ours + descriptor.local_offset, theirs + descriptor.remote_offset)
                        });
                        // SAFETY: all blocks are in the memory of these two, which nobody else uses meanwhile.
                        #[allow(unsafe_code)]
                        unsafe {
                            match op {
                                Op::Write => gpu.copy(block, ends),
                                Op::Read => gpu.copy(block, ends.map(|(ours, theirs)| (theirs, ours))),
                            }
                        }
                        Ok(())
                    })?;
                    next += 1;
                    let descriptors = moves.descriptors().to_vec();
                    let post = Post { id: PostId(next), op, descriptors, notify: None };
                    let ours = timed(|| {
                        end.transport.post(OTHER, post)?;
                        posted(end.transport.as_mut())
                    })?;
                    if round > 0 {
                        pairs.push([plain, ours]);
                    } else if ours > LONG {
                        rounds = 1..=FEW_ROUNDS;
                    }
                }
                let median = |value: &dyn Fn(&[f64; 2]) -> f64| median(pairs.iter().map(value));
                let rate = |at: usize| region as f64 / median(&|pair| pair[at]) / 1e9;
                println!(
                    "{here:>5} {} {there:<5} {:>6} KiB {:>10.2} {:>10.2} {:>10.2}",
                    if op == Op::Write { "->" } else { "<-" },
                    block >> 10,
                    rate(0),
                    rate(1),
                    median(&|pair| pair[0] / pair[1]),
                );
            }
        }
    }
    Ok(())
}
