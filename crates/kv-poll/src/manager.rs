//! The manager: opens sessions on a worker, and tells how it is.

use std::sync::Arc;

use kv_core::proto::Command;
use kv_core::{
    BootstrapError, Groups, KvArgs, KvManager, OpenError, Pages, Quarantine, Room, SessionOptions,
};

use crate::gauges::Gauges;
use crate::link::Link;
use crate::poll_set::PollSet;
use crate::session::{Receiver, Sender, Session};

/// The way to a worker: cheap to clone, usable from any thread. It does not keep the worker
/// running; without one, sessions cannot be opened.
#[derive(Debug, Clone)]
pub struct Manager {
    link: Arc<Link>,
}

/// How the worker stands with the bootstrap server that it was told to register with.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Registration {
    /// It was told none.
    #[default]
    None,
    /// Not yet accepted; the worker keeps trying.
    Pending {
        /// Why the last try failed, if there was one.
        last: Option<BootstrapError>,
    },
    /// Accepted.
    Published,
}

impl Manager {
    pub(crate) fn new(link: Arc<Link>) -> Manager {
        Manager { link }
    }

    /// The sessions that have changed.
    pub fn poll_set(&self) -> &PollSet {
        &self.link.poll_set
    }

    /// Takes the pages that came back after their session's handle was dropped. No wire touches
    /// them any more.
    pub fn orphans(&self) -> Vec<Pages> {
        self.link.take_orphans()
    }

    /// Takes the items of state groups that came back after their session's handle was dropped, or was
    /// reclaimed without them. No wire touches them any more.
    pub fn orphan_groups(&self) -> Vec<Groups> {
        self.link.take_orphan_groups()
    }

    /// The worker's numbers.
    pub fn gauges(&self) -> Gauges {
        self.link.gauges()
    }

    /// Whether the worker can be found by its peers.
    pub fn registration(&self) -> Registration {
        self.link.registration()
    }

    /// True once the worker's thread has ended, whatever ended it.
    pub fn is_stopped(&self) -> bool {
        self.link.is_stopped()
    }
}

impl KvManager for Manager {
    type Sender = Sender;
    type Receiver = Receiver;

    fn args(&self) -> &KvArgs {
        &self.link.args
    }

    /// The worker was registered when it started, so `_bootstrap_addr` has nothing left to say.
    fn sender(
        &self,
        _bootstrap_addr: &str,
        room: Room,
        dest_ranks: &[u32],
        options: SessionOptions,
    ) -> Result<Sender, OpenError> {
        let receivers = match dest_ranks.len() {
            0 => self.args().num_receivers(),
            ranks => u32::try_from(ranks).unwrap_or(u32::MAX),
        };
        let options = Box::new(options);
        let command = |session, room| Command::OpenSender { session, room, receivers, options };
        let cell = self.link.open(room, command)?;
        Ok(Session::new(Arc::clone(&self.link), cell))
    }

    fn receiver(
        &self,
        bootstrap_addr: &str,
        room: Room,
        options: SessionOptions,
    ) -> Result<Receiver, OpenError> {
        let (bootstrap_addr, options) = (bootstrap_addr.to_owned(), Box::new(options));
        let command = |session, room| Command::OpenReceiver { session, room, bootstrap_addr, options };
        let cell = self.link.open(room, command)?;
        Ok(Session::new(Arc::clone(&self.link), cell))
    }

    /// As the worker saw it 50 ms ago at most; how many pages there are right now is
    /// [`pages_quarantined`](Gauges::pages_quarantined).
    fn quarantine(&self) -> Vec<Quarantine> {
        self.link.quarantine()
    }
}
