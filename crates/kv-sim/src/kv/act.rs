//! What happens at a moment in a world of the KV service, beside what its network does.

use crate::kv::fact::Check;
use crate::kv::ledger::LegId;

/// One such thing.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KvAct {
    /// A scheduler does something with one of its sessions.
    Do { leg: LegId, act: Act },
    /// An oracle looks.
    Check(Check),
    /// The healed world gets its next request.
    Serve,
}

/// What a scheduler does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Open,
    Init { tries: u32 },
    Chunk { tries: u32 },
    Layers,
    Abort,
    Misuse,
}
