//! The words of the KV cache, put into the places that a worker leaves open.

use kv_core::machine::Machine;
use kv_core::proto::{Command, Resource};
use kv_core::trace::KvWhat;
use kv_core::{KvPoll, Quarantine, TransferError};

use crate::worker;

/// Any machine that speaks the words of the KV cache: [`Node`](kv_core::proto::Node), or another one that
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

/// Is told each event of a worker.
pub type Listener = worker::Listener<KvWhat>;

/// One session that has changed.
pub type Change = worker::Change<KvPoll>;

/// The sessions of one worker that have changed.
pub type PollSet = worker::PollSet<KvMachine>;
