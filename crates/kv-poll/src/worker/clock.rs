//! The clock of a worker.

use kv_core::Time;
use rustix::time::{ClockId, clock_gettime};

/// What a worker reads the time from.
pub trait Clock: Send {
    /// The time now, never less than at an earlier reading.
    fn now(&self) -> Time;
}

/// `CLOCK_BOOTTIME`, which goes on while the host is suspended.
///
/// Transports read it by themselves, and compare it with the times that the protocol tells them: a
/// [`Time`] of a worker is nanoseconds of this clock, and of no other.
#[derive(Debug, Clone, Copy)]
pub struct BootTime;

impl Clock for BootTime {
    fn now(&self) -> Time {
        let time = clock_gettime(ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
        Time::from_nanos(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
    }
}

#[cfg(test)]
#[allow(clippy::print_stdout)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_reads_the_clock_that_its_transport_reads() {
        let of_host = || {
            let time = clock_gettime(ClockId::Boottime);
            Time::from_nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
        };
        let (before, read, after) = (of_host(), BootTime.now(), of_host());
        assert!(before <= read && read <= after, "{before:?} {read:?} {after:?}");
    }

    /// In a time namespace whose boot was a day earlier, which `CLOCK_MONOTONIC` does not know of.
    #[test]
    fn the_time_that_a_host_was_suspended_counts() {
        let known = "worker::clock::tests::a_worker_reads_the_clock_that_its_transport_reads";
        let mut unshare = std::process::Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--time", "--boottime", "86400"]);
        let ran = unshare.arg(std::env::current_exe().unwrap()).args(["--exact", known]).output();
        let said =
            ran.map_or_else(|error| error.to_string(), |out| String::from_utf8_lossy(&out.stdout).into());
        assert!(!said.contains("test result: FAILED"), "{said}");
        if !said.contains("1 passed") {
            println!("NOT TESTED: this host allows no time namespaces");
        }
    }
}
