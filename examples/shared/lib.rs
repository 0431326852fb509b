//! What the examples `pd`, `prefill`, `decode` and `epd` share, in the order in which to read the modules:
//!
//! 1. [`prefill`] and [`decode`] are the scheduler loop of each side, which a server would copy.
//!    [`inputs`] are the rows of a prompt that are no text.
//! 2. [`rank`] sets up a worker, whose protocol is a [`dialect`]; [`paged`] keeps a model's KV in registered pages,
//!    beside the [`aux`] rows. [`kept`] and [`pull_back`]
//!    are the way back, from one turn of a chat to the next. [`phases`], [`wire`], [`heartbeats`] and
//!    [`held`] measure, for the report; [`recording`] keeps events, for a picture.
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
pub mod prompt;
pub mod prompts;
pub mod pull_back;
pub mod rank;
pub mod rank_kv;
pub mod recording;
pub mod report;
pub mod router;
pub mod transport;
pub mod verdict;
pub mod wire;
