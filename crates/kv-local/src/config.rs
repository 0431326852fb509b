//! [`LocalConfig`]: bounds on what peers, strangers and the owner can make a transport hold.

use std::time::Duration;

use kv_core::MAX_FRAME;
use kv_host::{Limit, check};

use crate::framing::HEADER;
use crate::metadata::MAX_ARENAS;

/// Limits and switches of a [`LocalTransport`](crate::LocalTransport).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LocalConfig {
    /// Most connected peers (default 1024, 1 to 2^20).
    pub max_peers: usize,
    /// Most open connections, opened by either side (default 2048, 1 to 2^20). A connection takes two file
    /// descriptors, and three to a peer with adopted memory.
    pub max_connections: usize,
    /// Most strangers: accepted connections whose hello has not arrived (default 64, 1 to 65 536). When the
    /// limit is reached, a new one takes the place of the oldest.
    pub max_strangers: usize,
    /// Most unclaimed connections: accepted from transports that know this one's metadata, and that the owner
    /// has not named in `connect` yet (default 256, 1 to 65 536). When the limit is reached, a new one takes the
    /// place of the one that has been silent for longest.
    pub max_unclaimed: usize,
    /// How long after its acceptance a stranger's hello may arrive, and how long the kernel may be without the means to
    /// write to a peer before the connection is lost (default 5 s).
    pub handshake_timeout: Duration,
    /// Most file descriptors that all unclaimed connections together may have sent (default 512, 65 to 2^20).
    /// A connection sends one, and one more for each arena. When the limit is reached, the connection that has been
    /// silent for longest is closed.
    pub max_lent: usize,
    /// Most bytes of one peer's registered memory that are mapped although the peer has not allocated them
    /// (default 16 GiB). Memory that a peer has really allocated and registered is mapped without a bound.
    pub max_sparse: u64,
    /// How long an unclaimed connection may be silent, with its peer copying nothing, before it is closed
    /// (default 60 s).
    pub unclaimed_timeout: Duration,
    /// Most bytes queued for one peer; beyond that `send` returns `WouldBlock` (default 4 MiB, 1 MiB and 5 bytes to
    /// 1 GiB).
    pub outbound_bytes: usize,
    /// Most posts that are accepted and not reported as ended; beyond that `post` returns `WouldBlock`
    /// (default 65 536, 1 to 2^24).
    pub max_posts: usize,
    /// True to let every process of the same user reach this process' adopted memory on hosts where the Yama
    /// security module restricts that to ancestors (`kernel.yama.ptrace_scope = 1`). The default is false,
    /// because those processes may then attach a debugger, too. Arenas never need this.
    pub permit_tracing: bool,
}

impl Default for LocalConfig {
    fn default() -> LocalConfig {
        LocalConfig {
            max_peers: 1024,
            max_connections: 2048,
            max_strangers: 64,
            max_unclaimed: 256,
            max_lent: 512,
            max_sparse: 16 << 30,
            handshake_timeout: Duration::from_secs(5),
            unclaimed_timeout: Duration::from_secs(60),
            outbound_bytes: 4 << 20,
            max_posts: 1 << 16,
            permit_tracing: false,
        }
    }
}

impl LocalConfig {
    /// The same with some fields changed: `LocalConfig::default().with(|config| config.max_peers = 64)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub(crate) fn check(&self) -> Result<(), Limit> {
        check::limits([
            ("max_peers", self.max_peers, 1, 1 << 20),
            ("max_connections", self.max_connections, 1, 1 << 20),
            ("max_strangers", self.max_strangers, 1, 1 << 16),
            ("max_unclaimed", self.max_unclaimed, 1, 1 << 16),
            ("max_lent", self.max_lent, 1 + MAX_ARENAS, 1 << 20),
            ("outbound_bytes", self.outbound_bytes, MAX_FRAME + HEADER, 1 << 30),
            ("max_posts", self.max_posts, 1, 1 << 24),
        ])
    }
}
