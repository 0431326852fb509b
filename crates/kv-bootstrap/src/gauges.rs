//! What a server keeps.

/// What a [`KvBootstrapServer`](crate::KvBootstrapServer) keeps: each of these has a bound in
/// [`ServerConfig`](crate::ServerConfig). Bytes are upper bounds: texts as they are, and a generous
/// flat share of the maps for each entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct BootstrapGauges {
    /// Ranks of `/v1/ranks`.
    pub ranks: usize,
    /// Bytes of their records, those that left but are still being sent included.
    pub rank_bytes: usize,
    /// Engines and ranks that all lookups so far have looked at. Only rises.
    pub lookup_steps: u64,
    /// Places of SGLang's `/route`.
    pub route_ranks: usize,
    /// Their bytes.
    pub route_bytes: usize,
    /// Rooms of SGLang's `/register_dp_rank`.
    pub rooms: usize,
    /// Their bytes.
    pub room_bytes: usize,
    /// Open connections.
    pub connections: usize,
    /// Bytes of unfinished requests over all connections.
    pub buffered: usize,
}
