//! Settings of UCX that a long-running server wants, put into the environment before UCX starts.
//!
//! UCX reads its global settings from the environment, once. What the user has set stays.

use std::path::Path;

use crate::error::DiscoveryError;
use crate::ffi::environment::set_variables_alone;

/// One variable, its value, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guard {
    /// The variable.
    pub name: &'static str,
    /// The value it gets if it has none.
    pub value: String,
    /// What it prevents.
    pub why: &'static str,
}

/// All guards that apply to this host.
pub fn guards() -> Vec<Guard> {
    let guard = |name, value: &str, why| Guard { name, value: value.to_owned(), why };
    let mut guards = vec![
        guard(
            "UCX_MEM_MMAP_HOOK_MODE",
            "none",
            "UCX would intercept every mmap and munmap of the process, which leaked 400 MB a minute in decode \
             workers, and takes 400 ms to install",
        ),
        guard("UCX_RCACHE_MAX_UNRELEASED", "1024", "the queue of released memory would have no bound"),
        guard("UCX_LOG_FILE", "stderr", "UCX would write its log to the standard output"),
    ];
    if !has_infiniband(Path::new("/sys/class/infiniband")) {
        guards.push(guard(
            "UCX_MODULES",
            "^ib",
            "without an InfiniBand card the module is of no use, and one of its libraries crashes at the \
             end of the process",
        ));
    }
    if Path::new("/dev/nvidiactl").exists() {
        guards.push(guard(
            "UCX_CUDA_IPC_CACHE",
            "n",
            "mappings of a peer's GPU memory would outlive the peer: its memory stays taken, and a peer that comes \
             back under the same process number would be written to where the old one was",
        ));
    }
    guards
}

/// Those that are not in the environment yet, whatever their value there.
pub fn missing() -> Vec<Guard> {
    guards().into_iter().filter(|guard| std::env::var_os(guard.name).is_none()).collect()
}

/// Puts the missing ones into the environment. Refused while other threads run.
pub(crate) fn apply() -> Result<(), DiscoveryError> {
    let missing = missing();
    if missing.is_empty() {
        return Ok(());
    }
    let pairs: Vec<_> = missing.into_iter().map(|guard| (guard.name, guard.value)).collect();
    set_variables_alone(&pairs).map_err(|threads| DiscoveryError::Threads { missing: pairs, threads })
}

pub use crate::ffi::environment::apply_among_threads;

pub(crate) fn has_infiniband(class: &Path) -> bool {
    std::fs::read_dir(class).is_ok_and(|mut entries| entries.next().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infiniband_is_a_class_with_a_device_in_it() {
        let dir = std::env::temp_dir().join(format!("kv-nixl-ib-{}", std::process::id()));
        assert!(!has_infiniband(&dir));
        std::fs::create_dir_all(&dir).unwrap();
        assert!(!has_infiniband(&dir));
        std::fs::create_dir_all(dir.join("mlx5_0")).unwrap();
        assert!(has_infiniband(&dir));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_test_harness_has_threads_so_the_environment_is_left_alone() {
        // A second thread for certain, whatever the harness does.
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || stopped.recv());
        assert!(set_variables_alone(&[("KV_NIXL_NEVER_SET", "1".to_owned())]).is_err());
        assert!(std::env::var_os("KV_NIXL_NEVER_SET").is_none());
        drop(stop);
        let _ = other.join();
    }
}
