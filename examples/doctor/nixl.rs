//! What the NIXL transport finds on this host.

#[cfg(feature = "nixl")]
pub use there::{report, role};

/// This process is no part of a trial of NIXL.
#[cfg(not(feature = "nixl"))]
pub fn role() -> Option<Result<(), super::Error>> {
    None
}

/// Prints why there is nothing to say.
#[cfg(not(feature = "nixl"))]
pub fn report() -> Result<(), super::Error> {
    println!("NIXL: not looked for, because this example was built without `--features nixl`. Try");
    println!("  scripts/setup-nixl.sh && source target/nixl/env.sh");
    println!("  cargo run --release --features nixl --example doctor");
    Ok(())
}

#[cfg(feature = "nixl")]
mod there {
    use kv_transfer::nixl::guards::{self, Guard};
    use kv_transfer::nixl::{Nixl, Search};

    use crate::Error;
    use crate::trial;
    pub use crate::trial::role;

    /// Prints what NIXL finds, and tries it out.
    pub fn report() -> Result<(), Error> {
        println!("NIXL");
        // Read before loading NIXL adds variables.
        let missing = guards::missing();
        let nixl = Nixl::load(&Search::default())?;
        let version = nixl.version().unwrap_or("unknown, because the library is in no Python package");
        println!("  library     {}", nixl.library().display());
        println!("  version     {version}");
        println!("  backends    {}", nixl.plugins().join(", "));
        for (backend, what) in
            [("UCX", "peers"), ("POSIX", "files"), ("LIBFABRIC", "peers, if NixlConfig::backend names it")]
        {
            let state =
                nixl.why_not(backend).map_or_else(|| "usable".to_owned(), |why| format!("not usable: {why}"));
            println!("  {backend:<10}  for {what}; {state}");
        }
        settings(&nixl, &missing);
        println!(
            "\nTrial transfer between two processes: {} MiB in blocks of 64 KiB at random places",
            trial::REGION >> 20
        );
        trial::run().map_err(|error| format!("the trial transfer failed: {error}").into())
    }

    fn settings(nixl: &Nixl, missing: &[Guard]) {
        println!("\nSettings of UCX that the transport needs");
        for guard in guards::guards() {
            let value = std::env::var(guard.name).unwrap_or_else(|_| "(see ucx.conf)".to_owned());
            let by = if missing.contains(&guard) { "set by this program" } else { "set by you" };
            println!("  {}={value}  ({by})\n      {}", guard.name, guard.why);
        }
        for warning in nixl.warnings() {
            println!("  WARNING: {warning}");
        }
    }
}
