//! Trials in a process of their own, which is this program once more: libraries of transports do not go together in one.

use std::process::Command;

use crate::Error;

/// Runs this program with this variable, for the trial of this library. It prints what it finds.
pub fn run(library: &str, variable: &str) -> Result<(), Error> {
    let status = Command::new(std::env::current_exe()?).env(variable, "trial").status()?;
    if status.success() {
        return Ok(());
    }
    println!("  not usable, for the reason that is printed above");
    Err(format!("{library} is not usable").into())
}
