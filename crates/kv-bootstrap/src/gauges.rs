//! [`BootstrapGauges`]: how much a server keeps.

/// How much a [`KvBootstrapServer`](crate::KvBootstrapServer) keeps. Each number but `lookup_steps` has a
/// bound in [`ServerConfig`](crate::ServerConfig). Bytes are upper bounds: the length of texts, and a flat
/// share of the maps for each entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct BootstrapGauges {
    /// Ranks that are registered with `/v1/ranks`.
    pub ranks: usize,
    /// Bytes of the records of `/v1/ranks`. Records that were removed count while an answer with them is
    /// being sent.
    pub rank_bytes: usize,
    /// Engines and ranks that all lookups so far have looked at. This number only rises.
    pub lookup_steps: u64,
    /// Ranks that are registered with SGLang's `/route`.
    pub route_ranks: usize,
    /// Bytes of the table of SGLang's `/route`.
    pub route_bytes: usize,
    /// Rooms that are registered with SGLang's `/register_dp_rank`.
    pub rooms: usize,
    /// Bytes of the table of SGLang's `/register_dp_rank`.
    pub room_bytes: usize,
    /// Ports of SGLang's ranks that are watched.
    pub watched_ports: usize,
    /// Connections that are open, those that are being refused included.
    pub connections: usize,
    /// Bytes of unfinished requests, over all connections.
    pub buffered: usize,
}
