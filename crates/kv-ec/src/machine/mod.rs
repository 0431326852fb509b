//! The machine of the encoder cache, on the machine of the KV cache.
//!
//! ```text
//! EcMachine          routes inputs: commands to the parts, everything else to the inner machine
//! ├ serving.rs       the producer: a peer asks for an entry → pin → a sending session of the inner machine
//! ├ fetching.rs      the consumer: a session wants an entry → blocks → a receiving session of the inner machine
//! ├ fetch.rs         one fetch: who waits for the entry, and what brings the entry
//! ├ turns.rs         which waiting sessions to begin or to end, as their requests are decided
//! ├ context.rs       what both use: the cache, the inner machine, the outputs
//! └ Node (kv-core)   conversations, leases, posts, permissions to write, quarantine, deadlines
//! ```
//!
//! `command.rs`, `error.rs` and `config.rs` are the words of the machine.

mod command;
mod config;
mod context;
mod error;
mod fetch;
mod fetching;
#[cfg(feature = "model")]
mod model;
mod serving;
mod turns;

pub use command::{Command, EcPoll, Resource, Want};
pub use config::MachineConfig;
pub use error::EcError;

use std::collections::BTreeSet;

use kv_core::machine::{Input, Machine, OfSession};
use kv_core::proto::{self, Node, NodeConfig, NodeGauges};
use kv_core::trace::{Event, KvWhat};
use kv_core::{PeerCause, Quarantine, Service, SessionId, Time, TransportOffer};

use self::context::{Context, Out};
use self::fetching::Fetching;
use self::serving::Serving;
use crate::store::SharedStore;

/// The name of the encoder cache in rank records.
pub const EC_SERVICE: &str = "ec";

/// The sans-IO machine of one worker of the encoder cache: producer and consumer in one.
pub struct EcMachine {
    cx: Context,
    serving: Serving,
    fetching: Fetching,
    /// Sessions that save an entry, and whose commit has not come.
    saving: BTreeSet<SessionId>,
    /// Why no session is opened any more, and no request of a peer is served: the worker drains, or stops.
    closed: Option<EcError>,
}

/// How much the machine holds at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct EcMachineGauges {
    /// Sessions that wait for an entry.
    pub waiting: usize,
    /// Transfers from producers. Transfers that were given up count until their blocks are back.
    pub transfers: usize,
    /// Requests of peers that are being answered.
    pub answers: usize,
    /// What the inner machine, the [`Node`], holds.
    pub node: NodeGauges,
}

impl EcMachine {
    /// A machine that serves the entries of `store`. `node` describes the region of the cache as the memory of
    /// a worker; `new` sets the node's service.
    pub fn new(config: MachineConfig, node: NodeConfig, store: SharedStore) -> EcMachine {
        let service = Service::by_content(EC_SERVICE, &config.compatibility);
        let node = Node::new(node.with(|node| node.service = service));
        EcMachine {
            cx: Context::new(config, store, node),
            serving: Serving::default(),
            fetching: Fetching::default(),
            saving: BTreeSet::new(),
            closed: None,
        }
    }

    /// How much the machine holds at the moment.
    pub fn gauges(&self) -> EcMachineGauges {
        EcMachineGauges {
            waiting: self.fetching.len(),
            transfers: self.fetching.transfers(),
            answers: self.serving.len(),
            node: self.cx.node.gauges(),
        }
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Fetch { session, want } => match self.closed.clone() {
                Some(why) => {
                    if let Some(claim) = &want.claim {
                        claim.give_up(&(want.hash.clone(), want.bytes));
                    }
                    self.cx.end_fetch(session, Err(want.ends(why)));
                }
                None => self.fetching.open(&mut self.cx, session, want),
            },
            Command::Save { session } => match self.closed.clone() {
                Some(why) => self.cx.end(session, Some(why)),
                None => drop(self.saving.insert(session)),
            },
            Command::Commit { session, reservation, ready: _ } if self.saving.remove(&session) => {
                let failure = self.cx.store.commit(*reservation).err().map(|reservation| {
                    self.cx.store.discard(reservation);
                    EcError::NotWhole
                });
                self.cx.end(session, failure);
                self.cx.return_reservation(session, None);
            }
            Command::CommitFailed { session, reservation, error } if self.saving.remove(&session) => {
                self.cx.store.discard(*reservation);
                self.cx.end(session, Some(EcError::NotReady(error)));
                self.cx.return_reservation(session, None);
            }
            // The session has ended. Whether a device still writes into the blocks, only the caller knows.
            Command::Commit { session, reservation, .. }
            | Command::CommitFailed { session, reservation, .. } => {
                self.cx.return_reservation(session, Some(reservation));
            }
            Command::Abort { session } => self.end(session, EcError::Aborted),
            Command::Drain => drop(self.closed.get_or_insert(EcError::Draining)),
            Command::Shutdown => {
                self.closed = Some(EcError::WorkerStopped);
                let sessions = self.saving.iter().copied().chain(self.fetching.sessions());
                for session in sessions.collect::<Vec<_>>() {
                    self.end(session, EcError::WorkerStopped);
                }
                self.cx.command(proto::Command::Shutdown);
            }
        }
    }

    fn end(&mut self, session: SessionId, why: EcError) {
        if self.saving.remove(&session) {
            self.cx.end(session, Some(why));
        } else {
            self.fetching.leave(&mut self.cx, session, why);
        }
    }

    /// Routes what the inner machine wants, and does what is due, until there is nothing more. Peers are
    /// answered last: an entry between two tries that follow each other at once is not missing.
    fn pump(&mut self) {
        loop {
            if let Some(output) = self.cx.node.poll_output() {
                match output.within() {
                    Ok(output) => self.cx.outputs.push_back(output),
                    Err(of) => self.on_inner(of),
                }
            } else if self.fetching.tick(&mut self.cx) {
                // The inner machine may want something more.
            } else if let Some(asked) = self.cx.node.poll_asked() {
                match self.closed {
                    Some(_) => self.cx.refuse(&asked, PeerCause::WorkerStopped),
                    None => self.serving.answer(&mut self.cx, &asked),
                }
            } else {
                return;
            }
        }
    }

    fn on_inner(&mut self, of: InnerOutput) {
        match of {
            OfSession::Status { session, poll, failure } => {
                if !self.serving.progressed(&self.cx, session, poll) {
                    self.fetching.progressed(&mut self.cx, session, poll, failure);
                }
            }
            OfSession::Release { session, resource } => {
                if self.serving.released(&mut self.cx, session) {
                    return;
                }
                if let proto::Resource::Pages(pages) = resource {
                    self.fetching.released(&mut self.cx, session, pages);
                }
            }
        }
    }
}

type InnerOutput = OfSession<kv_core::KvPoll, proto::Resource, kv_core::TransferError>;

impl Machine for EcMachine {
    type Command = Command;
    type Status = EcPoll;
    type Resource = Resource;
    type Failure = EcError;
    type Quarantine = Quarantine;
    type Trace = KvWhat;

    fn handle(&mut self, now: Time, input: Input<Command>) {
        self.cx.now = self.cx.now.max(now);
        self.fetching.begin_turn();
        match input.within() {
            Ok(input) => self.cx.node.handle(now, input),
            Err(command) => self.on_command(command),
        }
        self.pump();
    }

    fn poll_output(&mut self) -> Option<Out> {
        self.cx.outputs.pop_front()
    }

    fn next_timeout(&self) -> Option<Time> {
        [self.cx.node.next_timeout(), self.fetching.next_timeout()].into_iter().flatten().min()
    }

    fn leased(&self) -> usize {
        self.cx.node.pages_leased()
    }

    fn quarantine(&self) -> Vec<Quarantine> {
        self.cx.node.quarantine()
    }

    fn owes_answers(&self) -> bool {
        self.cx.node.owes_answers()
    }

    fn is_busy(&self) -> bool {
        self.serving.len() > 0 || self.fetching.transfers() > 0
    }

    fn listen(&mut self, on: bool) {
        self.cx.node.listen(on);
    }

    fn poll_trace(&mut self) -> Option<Event<KvWhat>> {
        self.cx.node.poll_trace()
    }

    fn transport_in(&self, frame: &[u8]) -> Option<TransportOffer> {
        Machine::transport_in(&self.cx.node, frame)
    }
}
