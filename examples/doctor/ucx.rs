//! What the UCX transport finds on this host, in a process of its own: NIXL brings another copy of UCX, and a process has
//! one copy.

#[cfg(feature = "ucx")]
pub use there::{report, role};

type Error = Box<dyn std::error::Error>;

/// This process is no part of a trial of UCX.
#[cfg(not(feature = "ucx"))]
pub fn role() -> Option<Result<(), Error>> {
    None
}

/// Prints why there is nothing to say.
#[cfg(not(feature = "ucx"))]
pub fn report() {
    println!("UCX: not looked for, because this example was built without `--features ucx`. Try");
    println!("  scripts/setup-ucx.sh && source target/ucx/env.sh");
    println!("  cargo run --release --features ucx --example doctor");
}

#[cfg(feature = "ucx")]
mod there {
    use std::process::Command;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use kv_transfer::ucx::{HostMemory, Ucx, UcxConfig, UcxTransport};
    use kv_transfer::unstable::{Descriptor, Directions, Op, Post, Transport, TransportEvent};
    use kv_transfer::{PeerId, PostId, Region, RegionRole, Time};

    use super::Error;

    const ROLE: &str = "KV_DOCTOR_UCX";
    const REGION: usize = 64 << 20;
    const BLOCK: usize = 64 << 10;
    const PEER: PeerId = PeerId(1);
    const ROUNDS: u64 = 5;
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Tries UCX out, if this process was started for that.
    pub fn role() -> Option<Result<(), Error>> {
        std::env::var_os(ROLE).map(|_| trial())
    }

    /// Starts the process that prints what it finds.
    pub fn report() {
        println!("UCX");
        let program = std::env::current_exe();
        let tried = program.and_then(|program| Command::new(program).env(ROLE, "trial").status());
        if !tried.is_ok_and(|status| status.success()) {
            println!("  not usable, for the reason that is printed above");
        }
    }

    fn side(ucx: Ucx) -> Result<(UcxTransport, HostMemory), Error> {
        let memory = HostMemory::new(REGION)?;
        let mut transport = UcxTransport::new(ucx, UcxConfig::default())?;
        transport.add_memory(&memory)?;
        transport.register(&Region::dram(RegionRole::Kv, memory.addr(), REGION as u64, BLOCK as u64))?;
        Ok((transport, memory))
    }

    fn trial() -> Result<(), Error> {
        let ucx = Ucx::load(None)?;
        let (major, minor, release) = ucx.version();
        println!("  library     {}, version {major}.{minor}.{release}", ucx.library().display());
        let ((mut here, _ours), (mut there, _theirs)) = (side(ucx)?, side(ucx)?);
        here.connect(PEER, &there.metadata()?)?;
        here.permit(PEER, Time::MAX);
        let lanes: Vec<String> =
            here.lanes(PEER).iter().map(|(transport, device)| format!("{transport} over {device}")).collect();
        println!("  chosen      {} between workers of this host", lanes.join(", "));
        let directions = match here.directions(Some(PEER)) {
            Directions::BOTH => "push or pull",
            _ => "push; READ over TCP is refused, because a killed reader may take down its source",
        };
        println!("  directions  {directions}");
        let over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&over);
        let server = std::thread::spawn(move || {
            let mut events = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                there.poll(Time::ZERO, &mut events);
                events.clear();
                std::thread::yield_now();
            }
        });
        let measured: Result<Vec<f64>, Error> = (0..=ROUNDS).map(|round| write(&mut here, round)).collect();
        over.store(true, Ordering::Relaxed);
        server.join().map_err(|_| "the other thread has ended early")?;
        let mut seconds = measured?.split_off(1);
        seconds.sort_by(f64::total_cmp);
        let median = seconds.get(seconds.len() / 2).copied().unwrap_or(f64::INFINITY);
        println!(
            "  speed       WRITE {:.2} GB/s within this host, {} MiB in blocks of 64 KiB",
            REGION as f64 / median / 1e9,
            REGION >> 20
        );
        Ok(())
    }

    /// Writes every block to another place. Returns the duration in seconds.
    fn write(transport: &mut UcxTransport, id: u64) -> Result<f64, Error> {
        let blocks = REGION / BLOCK;
        let descriptors = (0..blocks).map(|at| Descriptor {
            local_region: 0,
            remote_region: 0,
            local_offset: (at * BLOCK) as u64,
            remote_offset: ((at * 389 + 7) % blocks * BLOCK) as u64,
            len: BLOCK as u64,
        });
        let begun = Instant::now();
        let post = Post { id: PostId(id), op: Op::Write, descriptors: descriptors.collect(), notify: None };
        transport.post(PEER, post)?;
        let mut events = Vec::new();
        while begun.elapsed() < PATIENCE {
            transport.poll(Time::ZERO, &mut events);
            for event in events.drain(..) {
                match event {
                    TransportEvent::Posted { result, .. } => {
                        result?;
                        return Ok(begun.elapsed().as_secs_f64());
                    }
                    TransportEvent::PeerGone { end, .. } => {
                        return Err(format!("the way has ended: {end:?}").into());
                    }
                    TransportEvent::Frame { .. } | TransportEvent::Revoked { .. } => {}
                }
            }
            std::thread::yield_now();
        }
        Err(format!("a post has not ended within {PATIENCE:?}").into())
    }
}
