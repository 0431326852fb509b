//! What the owner of a plane can choose.

use std::time::Duration;

use kv_core::MAX_FRAME;

use crate::error::NixlError;

/// Choices and limits of a [`NixlPlane`](crate::NixlPlane).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NixlConfig {
    /// NIXL's backend: `UCX` (default), or another one that is installed and does notifications,
    /// such as `LIBFABRIC`. Both ends of a connection use the same.
    pub backend: String,
    /// Parameters of the backend, over its defaults: for UCX, say, `("num_workers", "2")`.
    pub backend_params: Vec<(String, String)>,
    /// Network devices to use, as the backend names them (`mlx5_0:1`, `eth0`); empty: all. The
    /// `ib_device` of the `KvArgs` belongs here.
    pub devices: Vec<String>,
    /// How long one request to NIXL should take (default 1.5 ms). Long posts are cut accordingly, at
    /// the speed that each connection has shown. UCX may copy all of a request inside one call, so
    /// this is most of what a turn takes; two such requests are in flight to a peer at most, so that
    /// a small post is not behind a large one in UCX's queues.
    pub slice_time: Duration,
    /// Bytes of one request at most, where each descriptor counts 8 KiB more than it has (default
    /// 64 MiB).
    pub slice_bytes: u64,
    /// Bytes of frames sent to one peer that it has not confirmed, before `send` answers
    /// `WouldBlock` (default 4 MiB).
    pub outbound_bytes: usize,
    /// Posts accepted and not yet reported as ended (default 65 536).
    pub max_posts: usize,
    /// Allows READ over TCP (default no): it is slow, and a reader that dies in the middle may take the
    /// process down that it reads from. See [`Transport::Tcp`](crate::Transport::Tcp).
    pub reads_over_tcp: bool,
    /// Peers connected at once (default 1024).
    pub max_peers: usize,
    /// Longest sleep between two looks for frames when nothing is going on (default 10 ms). NIXL has
    /// no descriptor to wait on; peers on the same host wake each other, so this is for others.
    pub idle_poll: Duration,
    /// After the connection to a peer has failed whose death cannot be seen from here (it is on
    /// another host): how long its last writes may still arrive (default 20 s, more than an
    /// InfiniBand card retries by UCX's defaults).
    pub quiet_after: Duration,
}

impl Default for NixlConfig {
    fn default() -> NixlConfig {
        NixlConfig {
            backend: "UCX".to_owned(),
            backend_params: Vec::new(),
            devices: Vec::new(),
            slice_time: Duration::from_micros(1500),
            slice_bytes: 64 << 20,
            outbound_bytes: 4 << 20,
            max_posts: 1 << 16,
            reads_over_tcp: false,
            max_peers: 1024,
            idle_poll: Duration::from_millis(10),
            quiet_after: Duration::from_secs(20),
        }
    }
}

impl NixlConfig {
    pub(crate) fn check(&self) -> Result<(), NixlError> {
        let millis = |duration: Duration| usize::try_from(duration.as_millis()).unwrap_or(usize::MAX);
        let micros = usize::try_from(self.slice_time.as_micros()).unwrap_or(usize::MAX);
        for (field, got, min, max) in [
            ("slice_time (µs)", micros, 100, 1_000_000),
            ("slice_bytes", self.slice_bytes as usize, 64 << 10, 1 << 40),
            ("outbound_bytes", self.outbound_bytes, 2 * MAX_FRAME, 1 << 30),
            ("max_posts", self.max_posts, 1, 1 << 24),
            ("max_peers", self.max_peers, 1, 1 << 16),
            ("idle_poll (ms)", millis(self.idle_poll), 1, 1000),
        ] {
            if !(min..=max).contains(&got) {
                return Err(NixlError::Limit { field, got, min, max });
            }
        }
        Ok(())
    }
}
