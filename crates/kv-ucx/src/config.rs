//! [`UcxConfig`]: UCX's devices and settings, and bounds on what peers and the owner can make a transport hold.

use std::time::Duration;

use kv_core::MAX_FRAME;
use kv_host::{Limit, check};

use crate::error::UcxError;

/// A setting that the transport makes unless the environment has it: a name without the prefix `UCX_`, and a value. UCX
/// 1.22 puts over TCP without a copy, and by the kernel within a host, only if rendezvous is switched off, which this
/// transport never uses; otherwise a put is a message that the peer's processor copies.
const RENDEZVOUS: (&str, &str) = ("RNDV_THRESH", "inf");
/// The same, for a UCX that has loaded its CUDA module; others refuse the setting, and do not need it. With its cache, UCX
/// keeps its mappings of a peer's GPU memory after the peer has ended, and may write to them, and read from them, when a later
/// peer has the same process number.
const IPC_CACHE: (&str, &str) = ("CUDA_IPC_CACHE", "n");
/// Another setting for a UCX with its CUDA module. Without it, a READ from GPU memory into GPU memory of this host goes over
/// TCP where UCX sees no NVLink.
const GPU_READS: (&str, &str) = ("CUDA_IPC_ENABLE_GET_ZCOPY", "on");

/// Devices, settings and limits of a [`UcxTransport`](crate::UcxTransport).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct UcxConfig {
    /// The network devices to use and to listen on (`mlx5_0:1`, `eth0`, `lo`); all devices if empty (the default).
    /// The `ib_device` of the `KvArgs` is not read: give it here.
    pub devices: Vec<String>,
    /// UCX's transports to choose from (`tcp`, `rc`, `cuda_ipc`); all if empty (the default). UCX takes those of
    /// them that can tell the failure of a peer.
    pub transports: Vec<String>,
    /// Further settings of UCX: names without the prefix `UCX_`, and values. They win over UCX's environment
    /// variables.
    pub settings: Vec<(String, String)>,
    /// Bytes of one slice of a post, where each descriptor counts 8 KiB beside its own bytes (default 1 MiB, 64 KiB to 1
    /// GiB); a quarter more if that keeps a descriptor whole. Posts take turns slice by slice.
    pub slice_bytes: usize,
    /// Most bytes of slices that are under way to one peer, counted as in `slice_bytes` (default 4 MiB, 64 KiB to 1
    /// GiB).
    pub window_bytes: usize,
    /// Allows READ over TCP (default no). UCX serves such a READ by software at the peer, and a reader that is killed may
    /// take down the process that is read from. Within a host TCP is also the way of a READ between GPU memory and host
    /// memory.
    pub reads_over_tcp: bool,
    /// Allows WRITE over TCP from or into GPU memory, which within a host is the way between GPU memory and host memory
    /// (default no). UCX has the peer's processor put the bytes of such a WRITE in place, and a writer that is killed may
    /// take down the process that is written to.
    pub gpu_over_tcp: bool,
    /// How long the way to a peer may take to open (default 10 s, 10 ms to 1 minute).
    pub handshake_timeout: Duration,
    /// How long bytes of a connection that has failed may still be on their way to a peer that is not seen to be dead
    /// (default 20 s, 1 ms to 1 hour). Posts that were under way end after this time.
    pub settle: Duration,
    /// Most peers that this side has connected (default 1024, 1 to 2^20).
    pub max_peers: usize,
    /// Most transports that this one knows: peers that this side has connected, and peers that have connected this
    /// side (default 2048, 1 to 2^20). When the limit is reached, a new one takes the place of the oldest that has no
    /// business here; if all have, `connect` returns `WouldBlock`, and a peer that asks is not answered.
    pub max_known: usize,
    /// Most bytes of frames queued for one peer; beyond that `send` returns `WouldBlock` (default 4 MiB, 2 MiB
    /// to 1 GiB).
    pub outbound_bytes: usize,
    /// Most posts that are accepted and not reported as ended; beyond that `post` returns `WouldBlock` (default 65
    /// 536, 1 to 2^24).
    pub max_posts: usize,
}

impl Default for UcxConfig {
    fn default() -> UcxConfig {
        UcxConfig {
            devices: Vec::new(),
            transports: Vec::new(),
            settings: Vec::new(),
            slice_bytes: 1 << 20,
            window_bytes: 4 << 20,
            reads_over_tcp: false,
            gpu_over_tcp: false,
            handshake_timeout: Duration::from_secs(10),
            settle: Duration::from_secs(20),
            max_peers: 1024,
            max_known: 2048,
            outbound_bytes: 4 << 20,
            max_posts: 1 << 16,
        }
    }
}

impl UcxConfig {
    /// The same with some fields changed: `UcxConfig::default().with(|config| config.max_peers = 64)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// The settings that UCX is given first, if it knows them.
    pub(crate) fn settings_if_known() -> Vec<(String, String)> {
        [IPC_CACHE, GPU_READS].into_iter().filter_map(missing).collect()
    }

    /// Whether UCX is told to let a GPU copy what is read: by the owner, else by the environment, else by this transport.
    pub(crate) fn reads_by_gpu(&self, variable: impl Fn(&str) -> Option<String>) -> bool {
        let (name, ours) = GPU_READS;
        let own = self.settings.iter().rev().find(|(of, _)| of == name).map(|(_, value)| value.clone());
        let value = own.or_else(|| variable(&format!("UCX_{name}")));
        let value = value.as_deref().unwrap_or(ours);
        ["on", "yes", "y", "1"].iter().any(|on| value.eq_ignore_ascii_case(on))
    }

    /// The settings that UCX is given after these, in their order.
    pub(crate) fn all_settings(&self) -> Vec<(String, String)> {
        let mut all: Vec<_> = missing(RENDEZVOUS).into_iter().collect();
        for (name, list) in [("NET_DEVICES", &self.devices), ("TLS", &self.transports)] {
            if !list.is_empty() {
                all.push((name.to_owned(), list.join(",")));
            }
        }
        all.extend(self.settings.iter().cloned());
        all
    }

    /// Refuses a device that this host does not have. A name with a port (`mlx5_0:1`) is that of a card.
    pub(crate) fn check_devices(&self) -> Result<(), UcxError> {
        let has = devices();
        let there = |device: &str| has.iter().any(|name| *name == device.split(':').next().unwrap_or(device));
        match self.devices.iter().find(|device| !has.is_empty() && !there(device)) {
            Some(device) => Err(UcxError::Device { device: device.clone(), has }),
            None => Ok(()),
        }
    }

    pub(crate) fn check(&self) -> Result<(), Limit> {
        let millis = |span: Duration| usize::try_from(span.as_millis()).unwrap_or(usize::MAX);
        check::limits([
            ("slice_bytes", self.slice_bytes, 64 << 10, 1 << 30),
            ("window_bytes", self.window_bytes, 64 << 10, 1 << 30),
            ("handshake_timeout in ms", millis(self.handshake_timeout), 10, 60_000),
            ("settle in ms", millis(self.settle), 1, 3_600_000),
            ("max_peers", self.max_peers, 1, 1 << 20),
            ("max_known", self.max_known, 1, 1 << 20),
            ("outbound_bytes", self.outbound_bytes, 2 * MAX_FRAME, 1 << 30),
            ("max_posts", self.max_posts, 1, 1 << 24),
        ])
    }
}

/// The setting, unless the environment has it.
fn missing((name, value): (&str, &str)) -> Option<(String, String)> {
    let is_set = std::env::var_os(format!("UCX_{name}")).is_some();
    (!is_set).then(|| (name.to_owned(), value.to_owned()))
}

/// The names of this host's network devices and cards; empty if the kernel does not tell.
fn devices() -> Vec<String> {
    let class = |path| std::fs::read_dir(path).into_iter().flatten().flatten();
    let all = class("/sys/class/net").chain(class("/sys/class/infiniband"));
    let mut names: Vec<String> = all.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_transports_become_settings_that_further_settings_may_override() {
        let config = UcxConfig::default().with(|config| {
            config.devices = vec!["eth0".to_owned(), "lo".to_owned()];
            config.transports = vec!["tcp".to_owned()];
            config.settings = vec![("TLS".to_owned(), "all".to_owned())];
        });
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let first = pair("RNDV_THRESH", "inf");
        let wanted = [first.clone(), pair("NET_DEVICES", "eth0,lo"), pair("TLS", "tcp"), pair("TLS", "all")];
        assert_eq!(config.all_settings(), wanted);
        assert_eq!(UcxConfig::default().all_settings(), [first]);
    }

    #[test]
    fn a_gpu_copies_what_is_read_unless_the_owner_says_otherwise() {
        let told = |values: &[&str], variable: Option<&str>| {
            let settings = values.iter().map(|value| (GPU_READS.0.to_owned(), (*value).to_owned()));
            let config = UcxConfig::default().with(|config| config.settings = settings.collect());
            config.reads_by_gpu(|name| {
                variable.filter(|_| name == "UCX_CUDA_IPC_ENABLE_GET_ZCOPY").map(str::to_owned)
            })
        };
        for on in ["on", "Yes", "y", "1"] {
            assert!(told(&[on], Some("off")) && told(&["off", on], None) && told(&[], Some(on)), "{on}");
        }
        for off in ["off", "auto", ""] {
            assert!(!told(&[off], Some("on")) && !told(&["on", off], None) && !told(&[], Some(off)), "{off}");
        }
        assert!(told(&[], None));
    }

    #[test]
    fn a_field_out_of_its_range_is_named_with_its_value() {
        assert_eq!(UcxConfig::default().check(), Ok(()));
        let refused = |change: fn(&mut UcxConfig)| {
            let Limit { field, got, .. } = UcxConfig::default().with(change).check().unwrap_err();
            (field, got)
        };
        assert_eq!(refused(|config| config.slice_bytes = 1), ("slice_bytes", 1));
        assert_eq!(refused(|config| config.settle = Duration::ZERO), ("settle in ms", 0));
        assert_eq!(refused(|config| config.max_known = 0), ("max_known", 0));
    }
}
