//! Bounds on what peers, strangers and the owner can make a transport hold.

use std::time::Duration;

use kv_core::MAX_FRAME;
use kv_host::{Limit, check};

use crate::framing::HEADER;
use crate::metadata::MAX_ARENAS;

/// Limits and switches of a [`LocalTransport`](crate::LocalTransport).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalConfig {
    /// Peers connected at once (default 1024).
    pub max_peers: usize,
    /// Connections open at once, whoever opened them (default 2048). Each takes two file
    /// descriptors.
    pub max_connections: usize,
    /// Accepted connections that have not said who they are (default 64). When one more comes, the
    /// oldest is dropped.
    pub max_strangers: usize,
    /// Accepted connections of transports that know this one's metadata, but to which `connect` has not
    /// been called (default 256). When one more comes, the most silent is closed.
    pub max_unclaimed: usize,
    /// How long a stranger may take to say who it is (default 5 s).
    pub handshake_timeout: Duration,
    /// Descriptors that all unclaimed connections together may have lent: each has lent one, and one more
    /// for each of its arenas (default 512). When one more comes, the most silent connection is closed.
    pub max_lent: usize,
    /// Bytes of one peer's registered memory that may be mapped although the peer has not allocated them
    /// (default 16 GiB). Whatever a peer has really allocated and registered may be mapped.
    pub max_sparse: u64,
    /// How long an unclaimed connection may be silent, and its peer copy nothing through it, before it is
    /// closed (default 60 s).
    pub unclaimed_timeout: Duration,
    /// Bytes queued for one peer before `send` answers `WouldBlock` (default 4 MiB).
    pub outbound_bytes: usize,
    /// Posts accepted and not yet reported as ended (default 65 536).
    pub max_posts: usize,
    /// Lets every process of the same user reach this process' adopted memory on hosts where the
    /// Yama security module restricts that to ancestors (`kernel.yama.ptrace_scope = 1`; default
    /// off). It also lets them attach a debugger. Arenas never need it.
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
