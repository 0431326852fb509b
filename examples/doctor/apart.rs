//! Trials in a process of their own, which is this program once more: libraries of transports do not go together in one.

use std::process::Command;

/// Runs this program with this variable. It prints what it finds.
pub fn run(variable: &str) {
    let program = std::env::current_exe();
    let tried = program.and_then(|program| Command::new(program).env(variable, "trial").status());
    if !tried.is_ok_and(|status| status.success()) {
        println!("  not usable, for the reason that is printed above");
    }
}
