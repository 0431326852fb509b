//! What a worker of the KV cache is started with.

use kv_core::proto::{Limits, Spoken, Timing};
use kv_core::trace::KvWhat;
use kv_core::{KvArgs, RankRecord, WorkerRole};

use super::words::Listener;
use crate::worker::Setup;

/// The settings of a worker of the KV cache. A field whose default does not fit is assigned:
/// `config.bootstrap = Some(addr)`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct WorkerConfig {
    /// The description of the rank and its cache: engine id, rank, regions, pages, parallel groups, layout.
    pub args: KvArgs,
    /// The worker's part in the service: prefill, decode or encode.
    pub role: WorkerRole,
    /// The bootstrap server (`host:port`, an IPv6 address in brackets: `[fd00::1]:8998`) with which the worker
    /// registers; `None` for a worker that does not register. Prefill workers must register, and so must decode workers whose pages are read on the next
    /// turn of a chat.
    pub bootstrap: Option<String>,
    /// Deadlines, intervals and retries of the protocol.
    pub timing: Timing,
    /// Bounds on what peers can make the worker remember.
    pub limits: Limits,
    /// The versions of the wire protocol that the worker offers to peers (default: all that this library
    /// speaks). While an upgrade may still be rolled back, offer only versions that the previous release speaks,
    /// too.
    pub versions: Spoken,
    /// Most sessions open at once (default 131 072).
    pub max_sessions: usize,
    /// Commands that wait for the worker before session handles see backpressure (default 4096). A frame of a peer waits
    /// until the commands that came before the frame are carried out.
    pub command_queue: usize,
    /// Seed of the protocol's own random numbers; `None` draws a seed. The incarnation is drawn in either case,
    /// because a restarted worker must have another incarnation.
    pub seed: Option<u64>,
    /// The listener to which the worker's thread gives each event; see
    /// [`worker::Listener`](crate::worker::Listener).
    pub listener: Option<Listener>,
}

impl WorkerConfig {
    /// The default settings for a worker with these arguments in this role.
    pub fn new(args: KvArgs, role: WorkerRole) -> WorkerConfig {
        WorkerConfig {
            args,
            role,
            bootstrap: None,
            timing: Timing::default(),
            limits: Limits::default(),
            versions: Spoken::ALL,
            max_sessions: 131_072,
            command_queue: 4096,
            seed: None,
            listener: None,
        }
    }

    /// What the worker's thread is started with; the record is published if a server was named.
    pub(crate) fn setup(self, record: RankRecord) -> Setup<KvWhat> {
        let verbose = self.args.verbose().then(Listener::stderr);
        Setup {
            worker: self.args.worker().clone(),
            listeners: verbose.into_iter().chain(self.listener).collect(),
            publish: self.bootstrap.map(|addr| (addr, record)),
            max_sessions: self.max_sessions,
            command_queue: self.command_queue,
        }
    }

    /// The same with some fields changed:
    /// `WorkerConfig::new(args, role).with(|config| config.max_sessions = 64)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}
