//! Settings of UCX that a long-running server wants. What the operator has set stays: a variable in the
//! environment, and a setting in any of UCX's files, wherever it came from. UCX reads `ucx.conf` in these
//! directories: `/etc/ucx`; `../etc/ucx` beside UCX's library; `$HOME`; `$UCX_CONFIG_DIR`; the working directory.
//!
//! [`Nixl::load`](crate::Nixl::load) gives UCX the settings. If no other thread runs, they go into the
//! environment. Beside threads the environment cannot be changed: another thread may be reading it. But UCX
//! also reads a file `ucx.conf` of its working directory when it is loaded. So NIXL and UCX are loaded
//! by a thread whose own working directory contains such a file. The file holds the operator's files too, and
//! UCX's log is opened again afterwards if its path is relative, so that relative paths begin at the process's
//! own working directory. Where the system refuses such a thread (the default profile of Docker does), and where
//! UCX can be loaded from the process's own working directory only (`LD_LIBRARY_PATH` is relative), UCX's own
//! calls make the settings, after UCX is loaded and before UCX is used.
//!
//! ```text
//! setting                       alone        beside threads  file refused             without the setting
//! UCX_MEM_MMAP_HOOK_MODE=none   environment  ucx.conf        impossible (1)           UCX intercepts mmap
//! UCX_RCACHE_MAX_UNRELEASED=1K  environment  ucx.conf        parse_config_file (2)    a queue without bound
//! UCX_LOG_FILE=stderr           environment  ucx.conf        set_value, log_init (3)  log on standard output
//! UCX_MODULES=^ib               environment  ucx.conf        set_value (4)            crash at the end (5)
//! UCX_CUDA_IPC_CACHE=n          environment  ucx.conf        parse_config_file (2)    memory stays taken
//! UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on
//!                               environment  ucx.conf        parse_config_file (2)    READ goes over TCP (7)
//! UCX_MEMTYPE_CACHE=n           environment  ucx.conf        set_value (6)            GPU memory is refused
//! ```
//!
//! 1. UCX's initializers overwrite the code of `mmap` and its like, before any call can be made. Other
//!    threads may be running that code: a server that cannot have the file should have the variable in its
//!    environment.
//! 2. `ucs_config_parse_config_file` adds a file; UCX reads these settings when an agent is made.
//! 3. `ucs_global_opts_set_value` changes what UCX has read; `ucs_log_cleanup` and `ucs_log_init` open the
//!    log anew.
//! 4. UCX loads its modules when an agent is made.
//! 5. On some hosts without an InfiniBand card, for which the setting is meant: with a card it is not made.
//!    The last three settings are made on hosts with a GPU only.
//! 6. UCX looks at this setting when memory is registered.
//! 7. A READ from GPU memory into GPU memory of one host, where UCX sees no NVLink.
//!
//! Where UCX's own calls make the settings, `UCX_RCACHE_MAX_UNRELEASED` is what shows that UCX has read the file. If the
//! operator has set that variable, nothing shows it: both `UCX_CUDA_IPC_` settings are reported as unconfirmed, and READ
//! from GPU to GPU is refused.
//!
//! If another part of the process has loaded the same copy of UCX before, the environment still reaches the
//! settings of memory caches if no other thread runs, and nothing else is possible.
//!
//! `Nixl::load` then looks whether UCX has the settings. UCX prints the values of all but three. The value of
//! `UCX_MEM_MMAP_HOOK_MODE` shows in the code of libc's `mmap`, which UCX overwrites or leaves alone. The two
//! `UCX_CUDA_IPC_` settings show nowhere: they are taken to be made if a setting that came by the same file shows.
//! Each setting that UCX lacks is reported as a [`SettingWarning`](crate::SettingWarning); NIXL works all the same.
//! The table holds for UCX 1.23 of NIXL 1.5.1.

use std::path::Path;

use crate::library::ucx_files::UcxFiles;

/// The setting whose effect is seen in the code of libc.
pub(crate) const HOOKS: &str = "UCX_MEM_MMAP_HOOK_MODE";
/// The setting that shows whether UCX has read our file: UCX prints its value, and only the environment or the file makes it.
pub(crate) const RCACHE: &str = "UCX_RCACHE_MAX_UNRELEASED";
/// The setting with which a GPU copies what is read, too.
pub(crate) const GPU_READS: &str = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY";

/// A setting of UCX: a variable, its value, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guard {
    /// The name of the environment variable.
    pub name: &'static str,
    /// The value that the setting gets if the operator has set none, as UCX writes the value.
    pub value: String,
    /// What happens without the setting.
    pub why: &'static str,
}

/// All settings that this host should have: some depend on its InfiniBand cards and GPUs.
pub fn guards() -> Vec<Guard> {
    let guard = |name, value: &str, why| Guard { name, value: value.to_owned(), why };
    let mut guards = vec![
        guard(
            HOOKS,
            "none",
            "UCX intercepts every mmap and munmap of the process, which leaked 400 MB a minute in decode \
             workers, and takes 400 ms to install",
        ),
        guard(RCACHE, "1K", "the queue of released memory has no bound"),
        guard("UCX_LOG_FILE", "stderr", "UCX writes its log to the standard output"),
    ];
    if !has_infiniband(Path::new("/sys/class/infiniband")) {
        guards.push(guard(
            "UCX_MODULES",
            "^ib",
            "UCX loads its InfiniBand module, which is of no use without a card, and one of whose libraries \
             crashed at the end of the process on some hosts",
        ));
    }
    if Path::new("/dev/nvidiactl").exists() {
        guards.push(guard(
            "UCX_CUDA_IPC_CACHE",
            "n",
            "mappings of a peer's GPU memory outlive the peer: the memory stays taken, and a new peer with \
             the same process number is written to, and read from, where the old peer's memory was",
        ));
        guards.push(guard(
            GPU_READS,
            "on",
            "a READ from GPU memory into GPU memory of this host is refused, because UCX sends it over TCP where it \
             sees no NVLink",
        ));
        guards.push(guard(
            "UCX_MEMTYPE_CACHE",
            "n",
            "UCX takes GPU memory for host memory unless it has intercepted the allocation, and NIXL refuses to \
             register the memory",
        ));
    }
    guards
}

/// The settings of [`guards`] that the operator has set neither in the environment nor in a file of UCX. Only
/// [`Nixl::load`](crate::Nixl::load) knows where UCX's library is, and reads the file beside it too.
pub fn missing() -> Vec<Guard> {
    missing_in(&UcxFiles::read(None))
}

/// The settings of [`guards`] that are neither in the environment nor in these files.
pub(crate) fn missing_in(files: &UcxFiles) -> Vec<Guard> {
    let is_missing = |guard: &Guard| std::env::var_os(guard.name).is_none() && !files.name(guard.name);
    guards().into_iter().filter(is_missing).collect()
}

/// Whether the directory of InfiniBand's device class has a device.
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
}
