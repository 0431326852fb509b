//! The environment of the process, and what the kernel lets the process do.

use std::ptr;

/// Sets variables if the calling thread is the only one of the process. `Err` is the number of threads
/// otherwise.
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

/// Whether the kernel lets processes of this host copy each other's memory, as far as one process can see. A
/// filter of system calls would stop the copy, and so would Yama's stricter settings.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_left_alone_beside_other_threads() {
        // A second thread for certain, whatever the harness does.
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || stopped.recv());
        assert!(set_variables_alone(&[("KV_NIXL_NEVER_SET", "1".to_owned())]).is_err());
        assert!(std::env::var_os("KV_NIXL_NEVER_SET").is_none());
        drop(stop);
        let _ = other.join();
    }
}
