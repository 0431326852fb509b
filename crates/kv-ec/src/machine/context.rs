//! What both parts of the machine use: the inner machine, the cache, the time, and the outputs.

use std::collections::VecDeque;

use kv_core::machine::Output;
use kv_core::proto::{self, Node};
use kv_core::{Asked, Pages, PeerCause, SessionId, Time};

use super::command::{EcPoll, Resource};
use super::config::MachineConfig;
use super::error::EcError;
use crate::cache::Reservation;
use crate::store::{EntryGuard, SharedStore};

/// What the machine asks its worker to do.
pub(super) type Out = Output<EcPoll, Resource, EcError>;

pub(super) struct Context {
    pub(super) now: Time,
    pub(super) config: MachineConfig,
    pub(super) store: SharedStore,
    /// The machine that meets peers and moves blocks.
    pub(super) node: Node,
    pub(super) outputs: VecDeque<Out>,
    /// Sessions of the inner machine that were opened so far.
    opened: u64,
}

impl Context {
    pub(super) fn new(config: MachineConfig, store: SharedStore, node: Node) -> Context {
        Context { now: Time::ZERO, config, store, node, outputs: VecDeque::new(), opened: 0 }
    }

    /// The number of a new session of the inner machine.
    pub(super) fn inner_session(&mut self) -> SessionId {
        self.opened += 1;
        SessionId(self.opened)
    }

    /// Gives the inner machine a command.
    pub(super) fn command(&mut self, command: proto::Command) {
        self.node.handle(self.now, proto::Input::Command(command));
    }

    /// Refuses a peer's request.
    pub(super) fn refuse(&mut self, asked: &Asked, cause: PeerCause) {
        self.node.refuse_asked(self.now, asked, cause);
    }

    /// Frees blocks whose transfer was given up.
    pub(super) fn give_back(&mut self, pages: Pages) {
        let foreign = self.store.give_back(pages).err();
        debug_assert!(foreign.is_none(), "the inner machine is given this cache's blocks only");
    }

    /// Tells a session how far its entry is.
    pub(super) fn tell(&mut self, session: SessionId, poll: EcPoll) {
        self.outputs.push_back(Output::Status { session, poll, failure: None });
    }

    /// Ends a session that wanted an entry, with the entry or with the reason.
    pub(super) fn end_fetch(&mut self, session: SessionId, result: Result<EntryGuard, EcError>) {
        let (entry, failure) = match result {
            Ok(entry) => (Some(entry), None),
            Err(error) => {
                self.store.counters().failed.add(1);
                (None, Some(error))
            }
        };
        self.end(session, failure);
        self.outputs.push_back(Output::Release { session, resource: Resource::Slot(entry) });
    }

    /// Ends a session.
    pub(super) fn end(&mut self, session: SessionId, failure: Option<EcError>) {
        let poll = if failure.is_some() { EcPoll::Failed } else { EcPoll::Ready };
        self.outputs.push_back(Output::Status { session, poll, failure: failure.map(Box::new) });
    }

    /// Hands back what a session that saves an entry was lent.
    pub(super) fn return_reservation(&mut self, session: SessionId, reservation: Option<Box<Reservation>>) {
        self.outputs.push_back(Output::Release { session, resource: Resource::Reservation(reservation) });
    }
}
