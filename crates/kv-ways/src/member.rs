//! The members of [`Ways`](crate::Ways), and how each of them stands.

use std::fmt;

use kv_core::Transport;

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
