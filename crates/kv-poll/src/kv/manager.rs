//! The manager: opens sessions on a worker of the KV cache, and tells how the worker is doing.

use std::sync::Arc;

use kv_core::proto::{Command, Resource};
use kv_core::{
    Incarnation, KvArgs, KvManager, OpenError, Pages, Quarantine, QuarantineReason, Reclaimed,
    RequestCacheGroups, Room, SessionOptions,
};

use super::gauges::Gauges;
use super::session::{Receiver, Sender, Session};
use super::words::{Changes, CommandRoom, Draining, KvMachine, PollSet};
use crate::worker::waiters::Awaited;
use crate::worker::{Port, Publication};

/// Opens sessions on a worker of the KV cache and tells how the worker is doing. Cheap to clone, and usable from
/// any thread. A manager does not keep the worker running.
#[derive(Debug, Clone)]
pub struct Manager {
    port: Port<KvMachine>,
    args: Arc<KvArgs>,
    incarnation: Incarnation,
}

impl Manager {
    pub(crate) fn new(port: Port<KvMachine>, args: KvArgs, incarnation: Incarnation) -> Manager {
        Manager { port, args: Arc::new(args), incarnation }
    }

    pub(super) fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The set of sessions that have changed.
    pub fn poll_set(&self) -> &PollSet {
        self.port.poll_set()
    }

    /// The changes of the sessions as a stream, for servers that await them instead of draining the set.
    pub fn changes(&self) -> Changes {
        self.port.changes()
    }

    /// Resolves when the worker takes a command again, after [`Backpressure`](kv_core::Backpressure).
    pub fn command_room(&self) -> CommandRoom {
        self.port.command_room()
    }

    /// True if the worker's ring has room for a command now.
    pub(crate) fn has_room(&self) -> bool {
        self.port.has_room()
    }

    /// The worker's ring, as a thing that tasks wait for.
    pub(crate) fn awaited(&self) -> Arc<dyn Awaited> {
        self.port.awaited()
    }

    /// The poll set, as a thing that tasks wait for.
    pub(crate) fn awaited_changes(&self) -> Arc<dyn Awaited> {
        self.port.awaited_changes()
    }

    /// Takes the pages that came back after the handle of their session was dropped. No data operation
    /// touches these pages any more.
    pub fn orphans(&self) -> Vec<Pages> {
        let orphans = self.port.take_orphans(|resource| matches!(resource, Resource::Pages(_)));
        let pages = |orphan| match orphan {
            Resource::Pages(pages) => Some(pages),
            Resource::RequestCacheGroups { .. } => None,
        };
        orphans.into_iter().filter_map(pages).collect()
    }

    /// Takes the items of cache groups that came back after their session's handle was dropped. No data
    /// operation touches these items any more.
    pub fn orphan_groups(&self) -> Vec<RequestCacheGroups> {
        let orphans =
            self.port.take_orphans(|resource| matches!(resource, Resource::RequestCacheGroups { .. }));
        let groups = |orphan| match orphan {
            Resource::RequestCacheGroups { groups, .. } => Some(groups),
            Resource::Pages(_) => None,
        };
        orphans.into_iter().filter_map(groups).collect()
    }

    /// The numbers of the worker.
    pub fn gauges(&self) -> Gauges {
        Gauges { worker: self.port.gauges(), bytes_per_page: self.args.geometry().bytes_per_page() }
    }

    /// Whether peers can find the worker at the bootstrap server.
    pub fn publication(&self) -> Publication {
        self.port.publication()
    }

    /// Tells the worker to take no new requests and to serve those that it has, and returns at once.
    /// [`worker::Draining`](crate::worker::Draining) says what holds meanwhile, and when the worker is empty.
    pub fn begin_drain(&self) -> Draining {
        self.port.begin_drain()
    }

    /// True once the worker runs no session any more, after a stop or a panic. The transport may still be
    /// closing: only [`Stopping::poll`](crate::Stopping::poll) says when memory is out of its reach.
    pub fn is_stopped(&self) -> bool {
        self.port.is_stopped()
    }
}

impl KvManager for Manager {
    type Sender = Sender;
    type Receiver = Receiver;

    fn args(&self) -> &KvArgs {
        &self.args
    }

    /// The address is not used: the worker was registered when it started, at the server that its
    /// configuration names. The address is not compared with that server either, because one server has
    /// several addresses.
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
        let opened = room.clone();
        let handle =
            self.port.open(|session| Command::OpenSender { session, room: opened, receivers, options })?;
        Ok(Session::new(handle, room, self.incarnation))
    }

    fn receiver(
        &self,
        bootstrap_addr: &str,
        room: Room,
        options: SessionOptions,
    ) -> Result<Receiver, OpenError> {
        let (bootstrap_addr, options) = (bootstrap_addr.to_owned(), Box::new(options));
        let opened = room.clone();
        let command = |session| Command::OpenReceiver { session, room: opened, bootstrap_addr, options };
        Ok(Session::new(self.port.open(command)?, room, self.incarnation))
    }

    /// The quarantine as the worker saw it 50 ms ago at most. The number of pages in quarantine right now is
    /// [`pages_quarantined`](Gauges::pages_quarantined).
    fn quarantine(&self) -> Vec<Quarantine> {
        let mut quarantine = self.port.quarantine();
        let gauges = self.port.gauges();
        if gauges.sessions_lost > 0 {
            let (reason, pages) = (QuarantineReason::WorkerStopped, gauges.quarantined(Resource::PAGES));
            let mut lost = Quarantine::new(None, reason, gauges.sessions_lost, pages);
            lost.items = gauges.quarantined(Resource::ITEMS);
            quarantine.push(lost);
        }
        quarantine
    }

    fn leave_behind(&self, left: Reclaimed) {
        self.port.leave_behind(left.pages.into());
        self.port.leave_behind(left.groups.into());
    }
}
