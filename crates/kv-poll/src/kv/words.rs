//! The types of the worker with the types of the KV cache filled in.

use kv_core::machine::Machine;
use kv_core::proto::{Command, Resource};
use kv_core::trace::KvWhat;
use kv_core::{KvPoll, Quarantine, TransferError};

use crate::worker;

/// A machine that takes the commands of the KV cache: [`Node`](kv_core::proto::Node), or another machine that
/// the same handles can drive.
pub type KvMachine = Box<
    dyn Machine<
            Command = Command,
            Status = KvPoll,
            Resource = Resource,
            Failure = TransferError,
            Quarantine = Quarantine,
            Trace = KvWhat,
        >,
>;

/// Is told each event of a worker of the KV cache; see [`worker::Listener`].
pub type Listener = worker::Listener<KvWhat>;

/// A worker of the KV cache that drains; see [`worker::Draining`].
pub type Draining = worker::Draining<KvMachine>;

/// One session of the KV cache that has changed; see [`worker::Change`].
pub type Change = worker::Change<KvPoll>;

/// The changes of a worker's sessions as a stream; see [`worker::Changes`].
pub type Changes = worker::Changes<KvMachine>;

/// Resolves when a worker of the KV cache has room for a command; see [`worker::CommandRoom`].
pub type CommandRoom = worker::CommandRoom<KvMachine>;

/// The sessions of one worker of the KV cache that have changed; see [`worker::PollSet`].
pub type PollSet = worker::PollSet<KvMachine>;
