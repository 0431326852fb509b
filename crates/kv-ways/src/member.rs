//! The transports that a transport is made of, and which of them are out.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use kv_core::{Transport, TransportError};

/// One of the transports that [`Ways`](crate::Ways) is made of.
pub struct Member {
    pub(crate) name: &'static str,
    pub(crate) transport: Box<dyn Transport + Send>,
}

impl Member {
    /// A transport under the transport's own name: peers that have only this one reach it.
    pub fn new(transport: Box<dyn Transport + Send>) -> Member {
        Member { name: transport.name(), transport }
    }

    /// The transport alone.
    pub fn into_transport(self) -> Box<dyn Transport + Send> {
        self.transport
    }

    /// A transport under another name, for the second of two that are alike. Both ends must name it so.
    pub fn named(name: &'static str, transport: Box<dyn Transport + Send>) -> Member {
        Member { name, transport }
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Tells which members of a transport are out, also while a worker's thread owns the transport.
#[derive(Debug, Clone, Default)]
pub struct Standing {
    refusals: Arc<Mutex<Vec<(&'static str, TransportError)>>>,
}

impl Standing {
    /// The members that no peer is told of, and why: each with the first error by which it refused a region,
    /// or could not say how it is reached.
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
