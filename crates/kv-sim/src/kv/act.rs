//! What schedulers and checks of the KV service do at a moment of virtual time, beside what the network does.

use crate::kv::fact::Check;
use crate::kv::ledger::LegId;

/// Something that happens at one moment in a world of the KV service.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KvAct {
    /// A scheduler does something with one of its sessions.
    Do { leg: LegId, act: Act },
    /// The invariants check something that must be true at this moment.
    Check(Check),
    /// The healed world gets its next request.
    Serve,
}

/// What a scheduler does with a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Open,
    Init { tries: u32 },
    Chunk { tries: u32 },
    Layers,
    Abort,
    Misuse,
}
