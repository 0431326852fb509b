//! What the examples share: `pd`, `prefill`, `decode` and `epd` all of it, `serve` and `port` what is below the
//! scheduler. In the order in which to read the modules:
//!
//! 1. [`prefill`] and [`decode`] are the scheduler loop of each side, over the queues of `kv_transfer::queue`: what a
//!    server with a loop would copy. (`serve` has a task per request, and `port` a scheduler with states of its own.)
//!    [`inputs`] are the rows of a prompt that are no text.
//! 2. [`rank`] sets up a worker, whose protocol is a [`dialect`]; [`paged`] keeps a model's KV in registered pages,
//!    beside the [`aux`] rows. [`kept`] and [`pull_back`] are the way back, from one turn of a chat to the next.
//!    [`phases`], [`wire`], [`heartbeats`] and [`held`] measure, for the report; [`recording`] keeps events, for a
//!    picture. [`transport`] has all that differs between transports.
//! 3. [`router`] decides which rank gets which request; [`process`] is a process that it has started, and
//!    [`control`] and [`link`] carry its messages to the ranks.
//! 4. [`model`] is the decoder, and [`monolithic`] the run in one process that everything is compared with.

pub mod aux;
#[cfg(feature = "checkpoint")]
pub mod checkpoint;
pub mod cli;
pub mod control;
pub mod decode;
pub mod dialect;
pub mod error;
pub mod heartbeats;
pub mod held;
pub mod inputs;
pub mod kept;
pub mod link;
pub mod loading;
pub mod model;
pub mod monolithic;
pub mod paged;
pub mod phases;
pub mod prefill;
pub mod process;
pub mod progress;
pub mod pull_back;
pub mod rank;
pub mod rank_kv;
pub mod recording;
pub mod report;
pub mod router;
pub mod transport;
pub mod verdict;
pub mod wire;
pub mod workload;
