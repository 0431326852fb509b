//! The process's surroundings: its environment, and what the kernel lets it do.

use std::ptr;

use crate::library::guards;

/// Sets variables if this is the only thread of the process; else says how many there are.
pub(crate) fn set_variables_alone(pairs: &[(&'static str, String)]) -> Result<(), usize> {
    // Without /proc there is no proof.
    let threads = std::fs::read_dir("/proc/self/task").map_or(usize::MAX, Iterator::count);
    if threads != 1 {
        return Err(threads);
    }
    for (name, value) in pairs {
        // SAFETY: no other thread exists that could read the environment, and none can come into
        // being but through this one.
        unsafe { std::env::set_var(name, value) };
    }
    Ok(())
}

/// Whether the kernel lets processes of this host copy each other's memory, as far as one process can
/// see: a filter of system calls would stop it, and Yama's stricter settings.
pub(crate) fn may_copy_between_processes() -> bool {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    if !matches!(scope.trim(), "" | "0" | "1") {
        return false;
    }
    let (from, mut into) = (1_u8, 0_u8);
    let local = libc::iovec { iov_base: ptr::from_mut(&mut into).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: ptr::from_ref(&from).cast_mut().cast(), iov_len: 1 };
    // SAFETY: both ranges are one byte of a variable that lives through the call; only `into` is
    // written, through a pointer made from an exclusive borrow.
    let copied =
        unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    copied == 1
}

/// Puts the missing [`guards`](crate::guards::guards) into the environment although other threads
/// run: for test harnesses and the like, which start threads before anything else can happen.
///
/// # Safety
///
/// During the call no other thread reads or changes the environment other than through
/// `std::env`: no C library looks up a time zone, a host name or a locale.
pub unsafe fn apply_among_threads() {
    for guard in guards::missing() {
        // SAFETY: the caller excludes readers that do not take the lock of `std::env`.
        unsafe { std::env::set_var(guard.name, guard.value) };
    }
}
