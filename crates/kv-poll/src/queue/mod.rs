//! The queues of a disaggregated scheduler: what a server's loop does with sessions, without blocking the
//! loop.
//!
//! [`PrefillQueues`] and [`DecodeQueues`] hold the requests of one rank from arrival until their pages are
//! free again, as SGLang's bootstrap, prealloc, transfer and inflight queues do. The queues are generic over
//! the server's request type, open sessions with a [`KvManager`](kv_core::KvManager), and are driven by one
//! `step` per scheduler iteration with the [`Change`](crate::Change)s that the worker's `PollSet` reports.
//! They are not a scheduler: the server decides which requests run and how batches are made. They have no
//! threads, no locks and no clock. SGLang's prealloc queue is two stages here, which counts and metrics name:
//! `handshake` until the prefill side is known, then `ready` until there are pages.
//!
//! ```text
//! prefill   push → bootstrap → waiting → pop_waiting → forward: init, send_chunk…, finish → inflight → drain_finished
//! decode    push → prealloc → (admission) transfer → (gate) waiting → pop_waiting → running → finish
//!                                                                 ↖ (pages) retracted ← retract ↙
//! ```
//!
//! # What happens on each failure
//!
//! | what fails | prefill | decode |
//! |---|---|---|
//! | session cannot be opened | `push` returns the request; the other ranks' sessions of the request fail | the same |
//! | room held by another request | `push` returns the request | the same |
//! | larger than the cache | – | `push` returns the request |
//! | session fails before `pop_waiting` / admission | leaves its queue; `newly_failed` at once; `drain_finished` without pages | `drain_failed` at once |
//! | session fails during the forward pass | as in the row before; `send_chunk` returns the chunk with `Refusal::Ended` | – |
//! | session fails with pages | `newly_failed` at once; `drain_finished` when no data operation can touch the pages | `drain_failed` at once; pages and aux row are quarantined, then freed by the queue |
//! | session fails before the worker's ring took its pages | as a session that fails with pages | pages, aux row and items are free at once; where ranks are in lock-step, as a session that fails with pages |
//! | another rank fails | this rank's session is aborted, then as in the rows before, with `RequestError::OtherRank` | the same |
//! | aux row names another room, or none | – | `RequestError::Gate` on all ranks; pages are freed |
//! | worker's ring is full | `init` and chunks are kept in order, retried each step | pages are kept, retried each step |
//! | cache or aux rows are full | – | the first in line waits, see `blocked`; nothing overtakes it |
//! | so much of the cache is in quarantine that admission stops | `pop_waiting` offers no request, see `stopped` | new requests wait, see `stopped`; retracted ones go on |
//! | too few items of cache groups | – | the first in line waits, see `blocked` |
//! | session fails with items of cache groups | the items come back with the pages | `drain_groups` when no data operation can touch the items |
//! | `abort` before the end | as a failing session | the same |
//! | `abort` of a waiting or retracted request | – | `drain_failed` at once, pages freed at once |
//! | session reports success too early | `RequestError::OutOfOrder` on all ranks | the same |
//! | session gives back another number of pages | `RequestError::PagesLost` | the same; counted in `Accounting::lost` |
//! | ranks cannot agree | `step` returns the error and moves nothing on | the same |
//!
//! # A prefill iteration
//!
//! ```
//! use kv_core::{KvManager, Pages, Room};
//! use kv_poll::Change;
//! use kv_poll::queue::{PrefillQueues, Outgoing, aux_tag};
//!
//! struct Prompt { tokens: Vec<u32> }
//!
//! fn iteration<M: KvManager>(
//!     queues: &mut PrefillQueues<Prompt, M>,
//!     arrived: Vec<(Prompt, Room)>,
//!     changes: Vec<Change>,
//!     mut forward: impl FnMut(&Prompt) -> Pages,
//!     mut free: impl FnMut(Pages),
//! ) -> Result<(), Box<dyn std::error::Error>> {
//!     for (prompt, room) in arrived {
//!         queues.push(prompt, Outgoing::new("10.0.0.1:8998", room))?;
//!     }
//!     queues.step(changes)?;
//!     let mut budget = 8192;
//!     while let Some(key) = queues.pop_waiting(|_, prompt| {
//!         let fits = prompt.tokens.len() <= budget;
//!         budget -= if fits { prompt.tokens.len() } else { 0 };
//!         fits
//!     }) {
//!         let Some(prompt) = queues.request(key) else { continue };
//!         let pages = forward(prompt);
//!         queues.init(key, pages.len(), None)?;
//!         queues.send_chunk(key, pages)?;
//!         queues.finish(key)?;
//!     }
//!     while let Some(done) = queues.drain_finished() {
//!         free(done.pages);
//!     }
//!     Ok(())
//! }
//! ```

mod admission;
mod aux_row;
mod aux_rows;
mod decode;
mod desk;
mod error;
mod gate;
mod line;
mod prefill;
mod quarantine;

pub use admission::{AdmissionRule, Demand, Load};
pub use aux_row::{AuxLayout, AuxRow, AuxRowError, Logprob};
pub use aux_rows::AuxRows;
pub use decode::{
    Accounting, Blocked, DecodeConfig, DecodeCounts, DecodeQueues, Failed, Incoming, Origin, Ready,
    RetractError, RetractRefusal, Shortage,
};
pub use error::{CacheGroupsRefused, ChunkError, PushError, PushRefusal, Refusal, RequestError};
pub use gate::{AuxMemory, GateError, NoAux, aux_tag};
pub use prefill::{Finished, Outgoing, PrefillConfig, PrefillCounts, PrefillPolicy, PrefillQueues};
pub use quarantine::{QuarantineRule, Stopped};
