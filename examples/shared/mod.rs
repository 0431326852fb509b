//! What the examples `pd`, `prefill` and `decode` have in common. Read it in this order:
//!
//! 1. [`prefill`] and [`decode`]: the scheduler loop of each side. They are what a server would copy.
//! 2. [`rank`]: how a worker is set up, and [`paged`]: how a model's KV lies in registered pages;
//!    [`kept`] and [`pull_back`] are the way back, from one turn of a conversation to the next;
//!    [`phases`], [`wire`], [`heartbeats`] and [`held`] are what the examples add to measure.
//! 3. [`router`]: who gets which request; [`control`] and [`link`]: what it tells the ranks.
//! 4. [`model`] and [`monolithic`]: the decoder itself, and the run that everything is compared with.
// Each example uses a part of it.
#![allow(dead_code, unreachable_pub, unused_imports)]

#[cfg(feature = "checkpoint")]
pub mod checkpoint;
pub mod cli;
pub mod control;
pub mod decode;
pub mod error;
pub mod heartbeats;
pub mod held;
pub mod kept;
pub mod link;
pub mod loading;
pub mod model;
pub mod monolithic;
pub mod paged;
pub mod phases;
pub mod prefill;
pub mod progress;
pub mod prompt;
pub mod prompts;
pub mod pull_back;
pub mod rank;
pub mod rank_kv;
pub mod report;
pub mod router;
pub mod transport;
pub mod verdict;
pub mod wire;
