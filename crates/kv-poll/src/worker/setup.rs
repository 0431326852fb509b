//! What a worker of any service is started with, and why a worker may not start.

use bytes::Bytes;
use kv_core::{OsError, RankRecord, RecordError, Region, Transport, TransportError, WorkerId};

use super::listeners::Listener;

/// Most sessions, and most queued commands, of one worker.
pub(super) const MAX_QUEUE: usize = 1 << 24;

/// What a worker is started with, whatever the service. `W` is the type of the events that the service's
/// machine tells listeners ([`Machine::Trace`](kv_core::machine::Machine::Trace)).
#[derive(Debug)]
#[non_exhaustive]
pub struct Setup<W> {
    /// Engine and rank of the worker. The rank is in the name of the thread, and listeners are told both.
    pub worker: WorkerId,
    /// The listeners to which the worker's thread gives each event of the machine. Without listeners, the
    /// machine records no events.
    pub listeners: Vec<Listener<W>>,
    /// The bootstrap server (`host:port`) with which the worker registers, and the record that the server
    /// gives to peers. The service makes the record, and the worker hands the record on. `None` for a worker
    /// that does not register.
    pub publish: Option<(String, RankRecord)>,
    /// Most sessions open at once: 1 to 16 777 216 (default 131 072).
    pub max_sessions: usize,
    /// Most commands that wait for the worker before session handles see backpressure: 1 to 16 777 216
    /// (default 4096). A frame of a peer waits until the commands that came before the frame are carried out.
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
    /// A setup with the defaults, without listeners and without a publication.
    pub fn new(worker: WorkerId) -> Setup<W> {
        Setup { worker, listeners: Vec::new(), publish: None, max_sessions: 131_072, command_queue: 4096 }
    }

    /// The same with some fields changed: `Setup::new(worker).with(|setup| setup.max_sessions = 64)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
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

/// Registers the regions of a service with the transport, in order, and returns the transport's metadata for
/// peers. Comes before [`Worker::start`](super::Worker::start).
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
    /// A queue cannot have this size.
    #[error("{field} is {got}; it must be 1 to {max}")]
    Range {
        /// Name of the field of the configuration.
        field: &'static str,
        /// Value of the field.
        got: usize,
        /// Largest value allowed; the smallest is 1.
        max: usize,
    },
    /// The transport cannot use a region. Give the memory of the region to the transport before the worker
    /// starts.
    #[error("region {region} cannot be registered: {error}")]
    Register {
        /// Position of the region in the list of regions.
        region: usize,
        /// Why the transport refuses the region.
        error: TransportError,
    },
    /// The transport cannot say how peers reach it.
    #[error("the transport has no metadata: {0}")]
    Metadata(TransportError),
    /// The record for the bootstrap server is too long. Use fewer regions.
    #[error("the worker cannot be registered: {0}")]
    Record(#[from] RecordError),
    /// The operating system has no descriptors or threads left. Raise the limits of the process.
    #[error(transparent)]
    Os(#[from] OsError),
}
