//! Bounds of a server and of a client: time, connections, memory.

use std::time::Duration;

use crate::secret::Secret;

/// Settings and bounds of a [`KvBootstrapServer`](crate::KvBootstrapServer).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Most open connections (default 1024). For one more, the connection that has been idle longest is
    /// closed; if none is idle, the new connection is answered with 503.
    pub max_connections: usize,
    /// Most open connections from one client address (default 768). For one more, the client's connection that
    /// has been idle longest is closed; if none is idle, the new connection is answered with 503.
    pub max_connections_per_client: usize,
    /// Longest request line with all header fields, in bytes (default 16 KiB). A longer one is answered with
    /// 431.
    pub max_head: usize,
    /// Longest request body, in bytes (default 1 MiB). A longer one is answered with 413, so a rank record
    /// whose JSON is longer cannot be registered.
    pub max_body: usize,
    /// Most bytes of unfinished requests, over all connections (default 64 MiB). A request beyond that is
    /// answered with 503.
    pub max_buffered: usize,
    /// Most bytes of unfinished requests, over the connections of one client address (default 48 MiB). A
    /// request beyond that is answered with 503.
    pub max_buffered_per_client: usize,
    /// Longest time from the first byte of a request to the end of its header fields (default 10 s). A slower
    /// request is answered with 408.
    pub head_timeout: Duration,
    /// Longest time from the end of the header fields to the end of the body (default 30 s). A slower request
    /// is answered with 408.
    pub body_timeout: Duration,
    /// How long a connection may rest between requests before it is closed (default 75 s).
    pub idle_timeout: Duration,
    /// How long a client may take to read its answers before the connection is closed (default 30 s).
    pub write_timeout: Duration,
    /// The secret that requests to `/v1/ranks` must carry as `Authorization: Bearer …` (401 otherwise). With
    /// `None`, every client that can connect may use these routes.
    pub secret: Option<Secret>,
    /// Bounds of this library's own rank records.
    pub registry: RegistryConfig,
    /// True to serve SGLang's routes (the default). These have no credentials: every client that can connect
    /// can register there, with or without [`secret`](Self::secret).
    pub sglang: bool,
    /// Most ranks of an engine in SGLang's `/route` table, which holds one engine and its successor (default
    /// 16 384).
    pub max_route_ranks: usize,
    /// Most ranks of each of these engines that one client address may have registered (default 4096). A
    /// registration beyond that is answered with 429.
    pub max_route_ranks_per_client: usize,
    /// Most bytes of the `/route` table (default 32 MiB). A registration beyond that is answered with 507.
    pub max_route_bytes: usize,
    /// Most rooms of SGLang's `/register_dp_rank` (default 262 144). For one more, the client's own oldest room
    /// is forgotten; a client without rooms is answered with 507.
    pub max_dp_ranks: usize,
    /// Most rooms of one client address (default 65 536). For one more, the client's own oldest room is
    /// forgotten.
    pub max_dp_ranks_per_client: usize,
    /// How long a room of `/register_dp_rank` is remembered (default 120 s, as in SGLang).
    pub dp_rank_ttl: Duration,
    /// Further addresses (`host:port`) to listen on, one for each further SGLang engine (default none). Each
    /// address has SGLang's tables, with the bounds above, and `/health` for itself; `/v1/ranks` is the same at
    /// all of them.
    pub engine_addrs: Vec<String>,
    /// How the ports of SGLang's ranks are watched, so that `/health` and `/route` stand for the engine (the
    /// default); `None` leaves them unwatched, and `/health` then answers for leased ranks only.
    pub watch: Option<WatchConfig>,
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
            engine_addrs: Vec::new(),
            watch: Some(WatchConfig::default()),
        }
    }
}

impl ServerConfig {
    /// The same with some fields changed: `ServerConfig::default().with(|config| config.sglang = false)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// How the server watches the ports (`rank_ip:rank_port`) that SGLang's ranks have registered without a lease.
///
/// The server holds one idle connection to each port, says nothing on the connection, and takes no byte of what
/// the peer says. A ZeroMQ socket greets every connection at once; the greeting stays in the kernel. Only
/// numeric addresses of one host are dialled, and only while they are registered. Registrations come from
/// everybody who can reach the port, so that everybody can have the server dial other hosts of its network, and
/// learn from `/health` whether a port there is open: the bounds below limit how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WatchConfig {
    /// Shortest time between two connections to a port (default 1 s). A port that refuses two connections in a
    /// row, or resets them, is dead.
    pub interval: Duration,
    /// After which time a connection is replaced by a new one, so that a process that is stopped is noticed too
    /// (default 3 s). A ZeroMQ socket itself ends such a connection after 30 s.
    pub hold: Duration,
    /// How long a port may take to accept a connection and to greet (default 2 s). A port that fails to do so
    /// twice in a row, or cannot be reached, is silent: its engine is not answered until the port greets again.
    pub silence: Duration,
    /// Most ports that are watched at the same time, each with a connection (default 1024). Further ports are not
    /// watched.
    pub max_ports: usize,
    /// Most ports that are watched for one client address (default 256).
    pub max_ports_per_client: usize,
    /// Most connections that are begun in a second (default 512).
    pub max_dials: usize,
    /// Most connections that are begun in a second for one client address (default 256).
    pub max_dials_per_client: usize,
}

impl Default for WatchConfig {
    fn default() -> WatchConfig {
        WatchConfig {
            interval: Duration::from_secs(1),
            hold: Duration::from_secs(3),
            silence: Duration::from_secs(2),
            max_ports: 1024,
            max_ports_per_client: 256,
            max_dials: 512,
            max_dials_per_client: 256,
        }
    }
}

impl WatchConfig {
    /// The same with some fields changed: `WatchConfig::default().with(|config| config.max_ports = 64)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Bounds of a [`Registry`](crate::Registry).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegistryConfig {
    /// Most ranks, over all engines (default 16 384). A registration beyond that is answered with 507.
    pub max_ranks: usize,
    /// Most bytes of all records (default 256 MiB). A record counts with its JSON text, 2 KiB, and 1 KiB for
    /// each service. A registration beyond that is answered with 507.
    pub max_bytes: usize,
    /// Most bytes of the records of one client address (default 64 MiB). A registration beyond that is
    /// answered with 429.
    pub max_bytes_per_client: usize,
    /// Longest lease (default one hour). A longer lease is shortened, and the answer says so.
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

impl RegistryConfig {
    /// The same with some fields changed: `RegistryConfig::default().with(|config| config.max_ranks = 64)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// Settings and bounds of an [`HttpBootstrapClient`](crate::HttpBootstrapClient).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClientConfig {
    /// How long a registration lasts unless the client renews it (default 5 s). The client renews its
    /// registrations after every third of this time.
    pub lease: Duration,
    /// The secret that is sent as `Authorization: Bearer …` to every server, in clear text.
    pub secret: Option<Secret>,
    /// Longest time from a request to its answer or failure, the time to connect included (default 2 s).
    pub request_timeout: Duration,
    /// Pause after the first failed attempt to register (default 100 ms); each further failure doubles the
    /// pause.
    pub retry_first: Duration,
    /// Longest pause after a failed registration (default 2 s).
    pub retry_max: Duration,
    /// How long a connection without requests is kept (default 30 s).
    pub idle_timeout: Duration,
    /// How long the addresses of a host name are remembered (default 60 s).
    pub resolve_ttl: Duration,
    /// Most servers with requests or a connection at the same time (default 1024). Requests to one more server
    /// fail at once.
    pub max_servers: usize,
    /// Most requests that wait for one server (default 4096). One more request fails at once.
    pub max_queue: usize,
    /// Most requests sent to one server before the first of them is answered (default 16).
    pub max_pipeline: usize,
    /// Longest body of an answer, in bytes (default 16 MiB). A longer answer fails its request.
    pub max_response: usize,
    /// Time between two questions whether an SGLang engine lives (default 5 s, as in SGLang); for
    /// [`SglangQuery::Lives`](crate::SglangQuery::Lives), and between two questions whether SGLang's
    /// own server still has a registration.
    pub heartbeat: Duration,
    /// Heartbeats in a row without the answer 200 after which an SGLang engine is dead (default 2, as in SGLang).
    pub max_failures: u32,
    /// How long one [`SglangQuery::Lives`](crate::SglangQuery::Lives) lasts (default 60 s).
    pub watch: Duration,
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
            heartbeat: Duration::from_secs(5),
            max_failures: 2,
            watch: Duration::from_secs(60),
        }
    }
}

impl ClientConfig {
    /// The same with some fields changed: `ClientConfig::default().with(|config| config.max_servers = 8)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}
