//! Limits of side channels.

use std::time::Duration;

/// Where a worker listens, and the bounds of its side channels.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChannelConfig {
    /// The address (`host:port`; with port 0 the system picks a port) of the worker's PULL socket, to which
    /// peers push messages; `None` (default) for a worker that does not listen.
    pub listen: Option<String>,
    /// Most peers that are connected at once through REQ and PUSH sockets (default 4096).
    pub max_ways: usize,
    /// Most bytes of messages that wait for one such peer; beyond, sending answers `WouldBlock` (default
    /// 4 MiB).
    pub max_queue: usize,
    /// Most connections to the listening socket (default 1024). A connection for which there is no place takes
    /// the place of the oldest connection that has not finished its handshake. If all have finished theirs, the
    /// new connection is closed.
    pub max_connections: usize,
    /// Most bytes of unfinished messages on all connections to the listening socket (default 64 MiB). Beyond,
    /// the connection that holds the most is closed.
    pub max_buffered: usize,
    /// How long a name may take to be resolved and a connection to be made (default 5 s).
    pub connect_timeout: Duration,
    /// How long a connection may take from its beginning until both sides are ready (default 10 s).
    pub handshake_timeout: Duration,
    /// How long the last writes of a peer may still arrive once the death of the peer is proven (default 2 s):
    /// the time for which [`WayEnd::Dead`](kv_core::WayEnd::Dead) asks.
    pub quiet_after: Duration,
    /// How long a port is tried whose connection has ended: 2 s, but for tests.
    pub(super) probing: Duration,
}

impl Default for ChannelConfig {
    fn default() -> ChannelConfig {
        ChannelConfig {
            listen: None,
            max_ways: 4096,
            max_queue: 4 << 20,
            max_connections: 1024,
            max_buffered: 64 << 20,
            connect_timeout: Duration::from_secs(5),
            handshake_timeout: Duration::from_secs(10),
            quiet_after: Duration::from_secs(2),
            probing: Duration::from_secs(2),
        }
    }
}

impl ChannelConfig {
    /// The same with some fields changed: `ChannelConfig::default().with(|config| config.max_ways = 64)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}
