//! What a server and a client may spend: time, connections, memory.

use std::time::Duration;

use crate::secret::Secret;

/// Bounds of a [`KvBootstrapServer`](crate::KvBootstrapServer).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerConfig {
    /// Connections at once. One more closes the one that has been idle longest; if none is idle,
    /// the new one is answered with 503.
    pub max_connections: usize,
    /// Connections at once from one client address. One more closes the client's own that has been
    /// idle longest; if none is idle, the new one is answered with 503.
    pub max_connections_per_client: usize,
    /// Bytes of a request line with all header fields.
    pub max_head: usize,
    /// Bytes of a request body. A rank record whose JSON is longer is refused with 413, whatever its pieces.
    pub max_body: usize,
    /// Bytes of unfinished requests, over all connections. A request beyond that gets 503.
    pub max_buffered: usize,
    /// The same over the connections of one client address.
    pub max_buffered_per_client: usize,
    /// From the first byte of a request to the end of its header.
    pub head_timeout: Duration,
    /// From the end of the header to the end of the body.
    pub body_timeout: Duration,
    /// How long a connection may rest between requests.
    pub idle_timeout: Duration,
    /// How long a client may take to read what it was sent.
    pub write_timeout: Duration,
    /// What requests to `/v1/ranks` must carry as `Authorization: Bearer …`; 401 otherwise. `None`
    /// lets everybody in who can connect.
    pub secret: Option<Secret>,
    /// Bounds of the framework's own rank records.
    pub registry: RegistryConfig,
    /// Whether SGLang's routes are served. They have no credentials: whoever can connect can register
    /// there, with or without [`secret`](Self::secret).
    pub sglang: bool,
    /// Ranks of an engine in SGLang's `/route` table, which holds one engine and its successor.
    pub max_route_ranks: usize,
    /// Places of each of these that one client address may hold. One more gets 429.
    pub max_route_ranks_per_client: usize,
    /// Bytes of that table. A registration beyond that gets 507.
    pub max_route_bytes: usize,
    /// Rooms of SGLang's `/register_dp_rank`. One more forgets the client's own oldest, or gets 507.
    pub max_dp_ranks: usize,
    /// Rooms of one client address. One more forgets the client's own oldest.
    pub max_dp_ranks_per_client: usize,
    /// How long a room of `/register_dp_rank` is remembered (SGLang: 120 s).
    pub dp_rank_ttl: Duration,
}

impl Default for ServerConfig {
    fn default() -> ServerConfig {
        ServerConfig {
            max_connections: 1024,
            max_connections_per_client: 768,
            max_head: 16 << 10,
            max_body: 1 << 20,
            max_buffered: 64 << 20,
            max_buffered_per_client: 48 << 20,
            head_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(75),
            write_timeout: Duration::from_secs(30),
            registry: RegistryConfig::default(),
            secret: None,
            sglang: true,
            max_route_ranks: 1 << 14,
            max_route_ranks_per_client: 1 << 12,
            max_route_bytes: 32 << 20,
            max_dp_ranks: 1 << 18,
            max_dp_ranks_per_client: 1 << 16,
            dp_rank_ttl: Duration::from_secs(120),
        }
    }
}

/// Bounds of a [`Registry`](crate::Registry).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegistryConfig {
    /// Ranks, over all engines.
    pub max_ranks: usize,
    /// Bytes of all records: their JSON, and for the maps 2 KiB each and 1 KiB for each service. A
    /// registration beyond that gets 507.
    pub max_bytes: usize,
    /// The same for the records of one client address. A registration beyond that gets 429.
    pub max_bytes_per_client: usize,
    /// Longest lease; longer ones are shortened to it.
    pub max_lease: Duration,
}

impl Default for RegistryConfig {
    fn default() -> RegistryConfig {
        RegistryConfig {
            max_ranks: 1 << 14,
            max_bytes: 256 << 20,
            max_bytes_per_client: 64 << 20,
            max_lease: Duration::from_secs(3600),
        }
    }
}

/// Timing and bounds of an [`HttpBootstrapClient`](crate::HttpBootstrapClient).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientConfig {
    /// How long a registration lives without being renewed. It is renewed every third of it.
    pub lease: Duration,
    /// What is sent as `Authorization: Bearer …` to every server, in clear text.
    pub secret: Option<Secret>,
    /// From a question to its answer or failure, connecting included.
    pub request_timeout: Duration,
    /// First pause after a failed registration; doubles from there on.
    pub retry_first: Duration,
    /// Longest pause after a failed registration.
    pub retry_max: Duration,
    /// How long a connection without requests is kept.
    pub idle_timeout: Duration,
    /// How long the addresses of a host name are remembered.
    pub resolve_ttl: Duration,
    /// Servers talked to at once.
    pub max_servers: usize,
    /// Requests waiting for one server. A lookup beyond that fails at once.
    pub max_queue: usize,
    /// Requests sent to one server before the first is answered.
    pub max_pipeline: usize,
    /// Bytes of one answer.
    pub max_response: usize,
}

impl Default for ClientConfig {
    fn default() -> ClientConfig {
        ClientConfig {
            lease: Duration::from_secs(5),
            secret: None,
            request_timeout: Duration::from_secs(2),
            retry_first: Duration::from_millis(100),
            retry_max: Duration::from_secs(2),
            idle_timeout: Duration::from_secs(30),
            resolve_ttl: Duration::from_secs(60),
            max_servers: 1024,
            max_queue: 4096,
            max_pipeline: 16,
            max_response: 16 << 20,
        }
    }
}
