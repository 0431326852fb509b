//! The members of [`Ways`](crate::Ways), and which of them have been left out.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use kv_core::{Transport, TransportError};

/// One of the transports that [`Ways`](crate::Ways) combines, with the name by which peers know it.
pub struct Member {
    pub(crate) name: &'static str,
    pub(crate) transport: Box<dyn Transport + Send>,
}

impl Member {
    /// A transport under its own [`name`](Transport::name): peers that have only this transport reach it too.
    pub fn new(transport: Box<dyn Transport + Send>) -> Member {
        Member { name: transport.name(), transport }
    }

    /// Gives the transport back, without the name.
    pub fn into_transport(self) -> Box<dyn Transport + Send> {
        self.transport
    }

    /// A transport under another name, for the second of two members of the same kind. Both ends must use the
    /// same name.
    pub fn named(name: &'static str, transport: Box<dyn Transport + Send>) -> Member {
        Member { name, transport }
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Tells which members have been left out, also while a worker's thread owns the transport. Clones see the
/// same members.
#[derive(Debug, Clone, Default)]
pub struct Standing {
    refusals: Arc<Mutex<Vec<(&'static str, TransportError)>>>,
}

impl Standing {
    /// The members that were left out, by name, each with its first error: why it refused a region, or could
    /// not tell its metadata. Peers are not told of these members.
    pub fn refusals(&self) -> Vec<(&'static str, TransportError)> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn note(&self, member: &'static str, error: TransportError) {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        if refusals.iter().all(|(known, _)| *known != member) {
            refusals.push((member, error));
        }
    }
}
