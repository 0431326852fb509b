//! Agreement among the ranks that hold one request: the minimum of their states.
//!
//! Each rank of a parallel group has its own session for a request, and its own queues. A request may go on
//! only as far as the slowest rank's session has come, and fails if one rank's session fails: with the order
//! of [`KvPoll`](kv_core::KvPoll), in which `Failed` is lowest, both are the minimum. A queue proposes the
//! states of its own sessions and acts on the states that are agreed. The ranks also have to admit requests in
//! one order ([`turn`](RankConsensus::turn)): ranks that have given their room to different requests would wait
//! for each other for ever.
//!
//! | implementation | ranks | agreement comes | pages come back |
//! |---|---|---|---|
//! | [`SingleRank`] | one | at once | when the session gives them back |
//! | [`ThreadConsensus`] | threads of one process, each at its own speed | as soon as the last rank has proposed | when the rank's own session gives them back |
//! | [`CollectiveConsensus`] | in lock-step, connected by the server's own collective | in the same step on all ranks | in the same step on all ranks |
//!
//! A server whose ranks must build identical batches without talking to each other needs
//! [`CollectiveConsensus`]: with [`ThreadConsensus`], all ranks get the same agreements and admit the same
//! requests in the same order, but not in the same step.

mod agreement;
mod collective;
mod order;
mod single;
mod thread;

pub(crate) use agreement::OPENING;
pub use agreement::{Agreed, RankConsensus, RequestKey, RoomBusy, Standing};
pub use collective::{Collective, CollectiveConsensus, CollectiveError};
pub use single::SingleRank;
pub use thread::ThreadConsensus;
