//! Worlds of the dialects: this library's own prefill and decode machines of vLLM's or SGLang's protocol, over
//! ZeroMQ's side channels and NIXL's agents as those behave.
//!
//! A world is a few engines of one or two ranks. First comes a phase of faults: engines are killed and come back
//! at the same addresses, hosts are stopped and continued, ways are parted, connections break, posts fail or last
//! long, threads of side channels end in engines that live, schedulers abort and are slow. Then the world is healed,
//! and must serve requests. At the end all prefill engines are restarted: whatever waited for the end of a process must
//! then come back.
//!
//! | promise | in words |
//! |---|---|
//! | `dialect_bytes_are_right` | a receiver that succeeds has the bytes that the sender's pages had when they were given, and the aux row |
//! | `dialect_pages_are_quiet` | pages and rows that have come back are touched by no later operation of anybody |
//! | `dialect_sessions_end_once` | each session ends exactly once, inside its deadline, and nothing comes back before |
//! | `dialect_pages_come_back` | everything that was lent comes back, once |
//! | `dialect_machines_are_bounded` | no machine panics, spins, floods its transport, or gathers peers |
//! | `dialect_lives_are_apart` | what a restarted peer says or writes completes no session that was opened with its forerunner |
//! | `dialect_requests_are_served` | once faults stop, requests succeed |
//!
//! What the protocols cannot promise, and what is therefore no violation:
//!
//! - vLLM pull: a reader is told nothing of the end of a lease. A read that is under way when the holder's machine
//!   has waited for `read_bound` after the end of the session may read what the holder does next. The reader must
//!   not succeed.
//! - vLLM pull: transfer parameters name the engine, not the process that gave them. Where a process that takes the
//!   place of another has the same engine id, a reader that had no connection to the first one since the session
//!   was opened reads what the second one has in those pages, and may succeed. Engine ids must be new for each
//!   process, as vLLM's are by default.
//! - vLLM pull: no message tells when the lease began. The transfer parameters must be at most a sixth of the lease
//!   old when the reader opens its session; the router of these worlds drops older ones.
//! - vLLM push: no message takes a registration back. The pages of a receiver that has failed stay in quarantine
//!   until the sender has written them after all, or until its process has ended.
//! - vLLM push: an engine whose side channel has ended with its thread or its first process, and to whose agents the
//!   network then loses the way, cannot be told from a dead one. In these worlds, no way to the agents of such an engine
//!   is lost while the engine lives.
//! - Both engines: the death of a process is looked for only once another process is at its port, or a side channel
//!   has ended that was open. Pages that a dead process may have written stay in quarantine until one of both is
//!   seen.

mod agents;
mod channels;
mod driver;
mod endings;
mod hosts;
mod lookups;
mod memory;
pub mod params;
mod promises;
mod requests;
mod router;
mod scheduler;
pub mod stats;
mod strikes;
mod world;

pub(crate) use world::{Outcome, run};

/// The number of one life of a host, counted over the whole world.
pub(crate) type LifeId = usize;
/// The number of one leg: one rank's session for one request.
pub(crate) type LegId = usize;

/// The protocol that all hosts of a world speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// vLLM's NixlConnector; receivers read.
    VllmPull,
    /// vLLM's NixlConnector; senders write.
    VllmPush,
    /// SGLang's NIXL backend; senders write.
    Sglang,
}

impl Dialect {
    /// All three dialects: pull of vLLM, push of vLLM, SGLang.
    pub const ALL: [Dialect; 3] = [Dialect::VllmPull, Dialect::VllmPush, Dialect::Sglang];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Dialect::VllmPull => "vllm-pull",
            Dialect::VllmPush => "vllm-push",
            Dialect::Sglang => "sglang",
        }
    }
}
