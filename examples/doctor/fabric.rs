//! What the libfabric transport finds on this host, in a process of its own: NIXL may bring another copy of libfabric.

#[cfg(feature = "fabric")]
pub use there::{report, role};

/// This process is no part of a trial of libfabric.
#[cfg(not(feature = "fabric"))]
pub fn role() -> Option<Result<(), super::Error>> {
    None
}

/// Prints why there is nothing to say.
#[cfg(not(feature = "fabric"))]
pub fn report() -> Result<(), super::Error> {
    println!("libfabric: not looked for, because this example was built without `--features fabric`. Try");
    println!("  scripts/setup-fabric.sh && source target/fabric/env.sh");
    println!("  cargo run --release --features fabric --example doctor");
    Ok(())
}

#[cfg(feature = "fabric")]
mod there {
    use kv_examples::cli::Pace;
    use kv_examples::transport;
    use kv_transfer::Time;
    use kv_transfer::fabric::{FabricConfig, FabricTransport, HostMemory, installed};
    use kv_transfer::unstable::{Op, Transport};

    use crate::speed::{self, PEER, REGION};
    use crate::{Error, apart};

    const ROLE: &str = "KV_DOCTOR_FABRIC";

    /// Tries libfabric out, if this process was started for that.
    pub fn role() -> Option<Result<(), Error>> {
        std::env::var_os(ROLE).map(|_| trial())
    }

    /// Starts the process that prints what it finds.
    pub fn report() -> Result<(), Error> {
        println!("libfabric");
        apart::run("libfabric", ROLE)
    }

    fn side() -> Result<(FabricTransport, HostMemory), Error> {
        let (memory, region) = speed::memory()?;
        let mut transport = transport::fabric(Pace::Normal)?;
        transport.add_memory(&memory)?;
        transport.register(&region)?;
        Ok((transport, memory))
    }

    fn trial() -> Result<(), Error> {
        let installed = installed().inspect_err(|_| {
            println!("  to get it   scripts/setup-fabric.sh && source target/fabric/env.sh, which needs no root;");
            println!("              or apt-get install libfabric1; or set KV_FABRIC_LIB to the path of libfabric.so.1");
        })?;
        let (major, minor) = installed.version;
        println!("  library     {}, version {major}.{minor}", installed.library.display());
        let providers = installed.providers()?;
        for (name, devices) in &providers {
            let tested =
                if *name == FabricConfig::default().provider { "" } else { ", which was not tested" };
            println!("  provider    {name}{tested}, on {}", devices.join(", "));
        }
        if providers.is_empty() {
            println!("  provider    none has here what a transport needs; `fi_info` lists all");
        }
        let config = transport::fabric_config(Pace::Normal)?;
        let ((mut here, _ours), (there, _theirs)) = (side()?, side()?);
        for (asked, used) in config.devices.iter().zip(here.devices()) {
            let address = asked
                .address
                .map_or_else(|| "the provider's choice".to_owned(), |address| address.to_string());
            let node = used.node.map_or_else(|| "unknown".to_owned(), |node| node.to_string());
            let (provider, name) = (&config.provider, used.name);
            println!("  chosen      {provider}, device: {name}, address: {address}, NUMA node: {node}");
        }
        println!(
            "              (others by KV_FABRIC_PROVIDER, KV_FABRIC_DEVICE, KV_FABRIC_ADDRESS and KV_FABRIC_GPU)"
        );
        here.connect(PEER, &there.metadata()?)?;
        here.permit(PEER, Time::MAX);
        println!("  directions  push or pull");
        let told = if here.counts_writes() { "by the writes themselves" } else { "by a message after them" };
        println!("  arrivals    are told {told}");
        let [write, read] = speed::between(&mut here, there, [Op::Write, Op::Read])?;
        println!(
            "  speed       WRITE {write:.2} GB/s, READ {read:.2} GB/s within this host, {} MiB in blocks of 64 KiB",
            REGION >> 20
        );
        Ok(())
    }
}
