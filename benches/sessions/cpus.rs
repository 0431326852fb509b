//! Which CPUs the two processes run on: each has one of its own, where there are two. A wake-up of a CPU that sleeps takes
//! several times as long as one within a CPU, and how many a request or a relay meets would be the kernel's choice otherwise.

use std::io;
use std::sync::OnceLock;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Keeps the caller's thread, and the threads that it starts, on the first CPU of this process.
pub(crate) fn here() -> io::Result<()> {
    keep_on(0)
}

/// Starts a process that stays on the second CPU.
pub(crate) fn there<T>(start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    keep_on(1)?;
    let started = start();
    keep_on(0)?;
    started
}

fn keep_on(at: usize) -> io::Result<()> {
    static ALL: OnceLock<Vec<usize>> = OnceLock::new();
    let own = sched_getaffinity(None)?;
    let all = ALL.get_or_init(|| (0..CpuSet::MAX_CPU).filter(|cpu| own.is_set(*cpu)).collect());
    if let (Some(cpu), true) = (all.get(at), all.len() > 1) {
        let mut only = CpuSet::new();
        only.set(*cpu);
        sched_setaffinity(None, &only)?;
    }
    Ok(())
}
