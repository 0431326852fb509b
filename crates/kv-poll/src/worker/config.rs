//! What a worker is started with, and why it may not start.

use kv_core::proto::{Limits, Timing};
use kv_core::{KvArgs, PlaneError, RecordError, WorkerRole};

/// What a worker is started with.
///
/// The fields may be set directly or in a chain: `WorkerConfig::new(args, role).bootstrap(addr)`.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// Memory, geometry, limits.
    pub args: KvArgs,
    /// What it does in the service.
    pub role: WorkerRole,
    /// The bootstrap server (`host:port`) that it registers with, if any. Prefill workers do;
    /// decode workers need not.
    pub bootstrap: Option<String>,
    /// How long things may take.
    pub timing: Timing,
    /// Bounds on what peers can make it remember.
    pub limits: Limits,
    /// Most sessions open at once (default 131 072).
    pub max_sessions: usize,
    /// Commands that wait for the worker before session handles see backpressure (default 4096).
    pub command_queue: usize,
    /// Seed of the protocol's own random numbers; `None` draws one. The incarnation is drawn in
    /// any case: a restarted worker must be a different one.
    pub seed: Option<u64>,
}

impl WorkerConfig {
    /// The defaults.
    pub fn new(args: KvArgs, role: WorkerRole) -> WorkerConfig {
        WorkerConfig {
            args,
            role,
            bootstrap: None,
            timing: Timing::default(),
            limits: Limits::default(),
            max_sessions: 131_072,
            command_queue: 4096,
            seed: None,
        }
    }

    /// Registers the worker with this bootstrap server.
    pub fn bootstrap(mut self, addr: &str) -> Self {
        self.bootstrap = Some(addr.to_owned());
        self
    }

    /// How long things may take.
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// Bounds on what peers can make it remember.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Most sessions open at once.
    pub fn max_sessions(mut self, max_sessions: usize) -> Self {
        self.max_sessions = max_sessions;
        self
    }

    /// Commands that wait for the worker before session handles see backpressure.
    pub fn command_queue(mut self, command_queue: usize) -> Self {
        self.command_queue = command_queue;
        self
    }

    /// Seed of the protocol's own random numbers.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }
}

/// Why a worker did not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A size that the queues cannot have.
    #[error("{field} is {got}; it must be 1 to {max}")]
    Range {
        /// The field of the configuration.
        field: &'static str,
        /// Its value.
        got: usize,
        /// Largest allowed.
        max: usize,
    },
    /// The plane cannot use a region. Give it the memory first.
    #[error("region {region} of the KvArgs cannot be registered: {error}")]
    Register {
        /// Position in the list of regions.
        region: usize,
        /// Why.
        error: PlaneError,
    },
    /// The plane has no metadata for peers.
    #[error("the plane has no metadata: {0}")]
    Metadata(PlaneError),
    /// What the worker would tell the bootstrap server is too long. Use fewer regions.
    #[error("the worker cannot be registered: {0}")]
    Record(#[from] RecordError),
    /// The operating system has no descriptors or threads left.
    #[error("{call} failed: {kind}")]
    Os {
        /// The call.
        call: &'static str,
        /// The error.
        kind: std::io::ErrorKind,
    },
}
