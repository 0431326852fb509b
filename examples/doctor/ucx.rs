//! What the UCX transport finds on this host, in a process of its own: NIXL brings another copy of UCX, and a process has
//! one copy.

#[cfg(feature = "ucx")]
pub use there::{report, role};

/// This process is no part of a trial of UCX.
#[cfg(not(feature = "ucx"))]
pub fn role() -> Option<Result<(), super::Error>> {
    None
}

/// Prints why there is nothing to say.
#[cfg(not(feature = "ucx"))]
pub fn report() -> Result<(), super::Error> {
    println!("UCX: not looked for, because this example was built without `--features ucx`. Try");
    println!("  scripts/setup-ucx.sh && source target/ucx/env.sh");
    println!("  cargo run --release --features ucx --example doctor");
    Ok(())
}

#[cfg(feature = "ucx")]
mod there {
    use kv_transfer::Time;
    use kv_transfer::ucx::{HostMemory, Ucx, UcxConfig, UcxTransport};
    use kv_transfer::unstable::{Directions, Op, Transport};

    use crate::speed::{self, PEER, REGION};
    use crate::{Error, apart, host};

    const ROLE: &str = "KV_DOCTOR_UCX";

    /// Tries UCX out, if this process was started for that.
    pub fn role() -> Option<Result<(), Error>> {
        std::env::var_os(ROLE).map(|_| trial())
    }

    /// Starts the process that prints what it finds.
    pub fn report() -> Result<(), Error> {
        println!("UCX");
        apart::run("UCX", ROLE)
    }

    fn side(ucx: Ucx) -> Result<(UcxTransport, HostMemory), Error> {
        let (memory, region) = speed::memory()?;
        let mut transport = UcxTransport::new(ucx, UcxConfig::default())?;
        transport.add_memory(&memory)?;
        transport.register(&region)?;
        Ok((transport, memory))
    }

    fn trial() -> Result<(), Error> {
        let ucx = Ucx::load(None)?;
        let (major, minor, release) = ucx.version();
        println!("  library     {}, version {major}.{minor}.{release}", ucx.library().display());
        println!("  devices     {}: all, or those in UcxConfig::devices", host::devices().join(", "));
        let ((mut here, _ours), (there, _theirs)) = (side(ucx)?, side(ucx)?);
        here.connect(PEER, &there.metadata()?)?;
        here.permit(PEER, Time::MAX);
        let lanes: Vec<String> =
            here.lanes(PEER).iter().map(|(transport, device)| format!("{transport} over {device}")).collect();
        println!("  chosen      {} between two threads of this process", lanes.join(", "));
        println!("              (workers of other processes and other hosts may be reached in other ways)");
        let directions = match here.directions(Some(PEER)) {
            Directions::BOTH => "push or pull",
            _ => "push; READ over TCP is refused, because a killed reader may take down its source",
        };
        println!("  directions  {directions}");
        let [write] = speed::between(&mut here, there, [Op::Write])?;
        println!(
            "  speed       WRITE {write:.2} GB/s within this host, {} MiB in blocks of 64 KiB",
            REGION >> 20
        );
        Ok(())
    }
}
