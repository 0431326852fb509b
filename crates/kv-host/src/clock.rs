//! The host's clock, in which leases and permissions to write are measured, and the clock of a thread's work.
//!
//! Every transport that moves real bytes reads [`now`] and compares the result with times that the protocol
//! sets. So a worker must read the same clock: a [`Time`] is a number of nanoseconds of this clock.

use std::time::Duration;

use kv_core::Time;
use rustix::time::{ClockId, clock_gettime};

/// The time since the host's boot (`CLOCK_BOOTTIME`), which goes on while the host is suspended.
#[inline]
pub fn now() -> Time {
    Time::ZERO + read(ClockId::Boottime)
}

/// The processor time that the calling thread has used (`CLOCK_THREAD_CPUTIME_ID`).
pub fn thread_time() -> Duration {
    read(ClockId::ThreadCPUTime)
}

#[inline]
fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(seconds, nanos)
}

#[cfg(test)]
#[allow(clippy::print_stdout)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_the_clock_of_the_conformance_suite() {
        let before = kv_conformance::boottime();
        let now = now();
        assert!(before <= now && now <= kv_conformance::boottime());
        assert!(now > Time::ZERO);
    }

    #[test]
    fn the_clock_shows_the_uptime_of_the_kernel() {
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let uptime: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        assert!((now().since(Time::ZERO).as_secs_f64() - uptime).abs() < 5.0);
    }

    #[test]
    fn the_processor_time_grows_with_work_of_this_thread_only() {
        let work = Duration::from_millis(20);
        let begun = thread_time();
        while thread_time() - begun < work {
            std::hint::spin_loop();
        }
        let other = std::thread::spawn(thread_time).join().unwrap();
        assert!(other < work, "{other:?} of a thread that has done nothing");
    }

    /// Runs in a time namespace whose boot was a day earlier, which `CLOCK_MONOTONIC` does not show.
    #[test]
    fn the_clock_counts_the_time_of_a_suspended_host() {
        let known = "clock::tests::the_clock_is_the_clock_of_the_conformance_suite";
        let mut unshare = std::process::Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--time", "--boottime", "86400"]);
        let ran = unshare.arg(std::env::current_exe().unwrap()).args(["--exact", known]).output();
        let said =
            ran.map_or_else(|error| error.to_string(), |out| String::from_utf8_lossy(&out.stdout).into());
        assert!(!said.contains("test result: FAILED"), "{said}");
        assert!(!said.contains(" 0 passed"), "this program has no test named {known}");
        if !said.contains("1 passed") {
            println!("NOT TESTED: this host allows no time namespaces");
        }
    }
}
