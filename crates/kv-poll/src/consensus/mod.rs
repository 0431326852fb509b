//! Agreement among the ranks that hold one request: the minimum of their states.
//!
//! Each rank of a parallel group has its own session for a request, and its own queues. A request
//! may go on only as far as the slowest rank's session has come, and one failed rank fails it: the
//! order of [`KvPoll`](kv_core::KvPoll) makes that the minimum. A queue proposes what its own sessions do and acts on
//! what is agreed.
//!
//! | implementation | ranks are | agreement comes | pages come back |
//! |---|---|---|---|
//! | [`SingleRank`] | one | at once | when the session allows it |
//! | [`ThreadConsensus`] | threads of one process, each at its own speed | as soon as the last rank has proposed | likewise, on each rank for itself |
//! | [`CollectiveConsensus`] | in lock-step, joined by the server's own collective | in the same step on all ranks | in the same step on all ranks |
//!
//! A server whose ranks must build identical batches without talking to each other needs the last
//! one: with threads, all ranks see the same agreements in the same order, but not in the same step.

mod agreement;
mod collective;
mod single;
mod thread;

pub(crate) use agreement::OPENING;
pub use agreement::{Agreed, RankConsensus, RequestKey, RoomBusy, Standing};
pub use collective::{Collective, CollectiveConsensus, CollectiveError};
pub use single::SingleRank;
pub use thread::ThreadConsensus;
