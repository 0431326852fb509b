//! What any worker is started with, and why it may not start.

use bytes::Bytes;
use kv_core::{OsError, RankRecord, RecordError, Region, Transport, TransportError, WorkerId};

use super::listeners::Listener;

/// Most sessions, and most queued commands, of one worker.
pub(super) const MAX_QUEUE: usize = 1 << 24;

/// What a worker is started with, whatever its service. `W` is what the service's machine tells of itself
/// ([`Machine::Trace`](kv_core::machine::Machine::Trace)).
#[derive(Debug)]
pub struct Setup<W> {
    /// Engine and rank: the name of the thread, and of the worker in what listeners are told.
    pub worker: WorkerId,
    /// The listeners that are told each event of the machine, on the worker's thread. None, and the machine records
    /// no events.
    pub listeners: Vec<Listener<W>>,
    /// The bootstrap server (`host:port`) that the worker registers with, and what it is to say of the
    /// worker. The record is the service's: the worker hands it on.
    pub publish: Option<(String, RankRecord)>,
    /// Most sessions open at once (default 131 072).
    pub max_sessions: usize,
    /// Commands that wait for the worker before session handles see backpressure (default 4096).
    pub command_queue: usize,
}

impl<W> Clone for Setup<W> {
    fn clone(&self) -> Setup<W> {
        Setup {
            worker: self.worker.clone(),
            listeners: self.listeners.clone(),
            publish: self.publish.clone(),
            ..*self
        }
    }
}

impl<W> Setup<W> {
    /// The defaults, without a registration.
    pub fn new(worker: WorkerId) -> Setup<W> {
        Setup { worker, listeners: Vec::new(), publish: None, max_sessions: 131_072, command_queue: 4096 }
    }

    /// Tells this listener each event of the machine, besides those that were added before.
    pub fn listener(mut self, listener: Listener<W>) -> Setup<W> {
        self.listeners.push(listener);
        self
    }

    pub(super) fn check(&self) -> Result<(), StartError> {
        for (field, got) in [("max_sessions", self.max_sessions), ("command_queue", self.command_queue)] {
            if !(1..=MAX_QUEUE).contains(&got) {
                return Err(StartError::Range { field, got, max: MAX_QUEUE });
            }
        }
        Ok(())
    }
}

/// Registers a service's regions with the transport, in order; the transport's metadata for peers. Comes before
/// the worker's start.
pub fn attach<'a>(
    transport: &mut impl Transport,
    regions: impl IntoIterator<Item = &'a Region>,
) -> Result<Bytes, StartError> {
    for (region, registered) in regions.into_iter().enumerate() {
        transport.register(registered).map_err(|error| StartError::Register { region, error })?;
    }
    transport.metadata().map_err(StartError::Metadata)
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
    /// The transport cannot use a region. Give it the memory first.
    #[error("region {region} cannot be registered: {error}")]
    Register {
        /// Position in the list of regions.
        region: usize,
        /// Why.
        error: TransportError,
    },
    /// The transport has no metadata for peers.
    #[error("the transport has no metadata: {0}")]
    Metadata(TransportError),
    /// What the worker would tell the bootstrap server is too long. Use fewer regions.
    #[error("the worker cannot be registered: {0}")]
    Record(#[from] RecordError),
    /// The operating system has no descriptors or threads left.
    #[error(transparent)]
    Os(#[from] OsError),
}
