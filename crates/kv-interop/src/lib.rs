//! Foreign dialects: a worker that speaks vLLM's or SGLang's protocol to unmodified vLLM 0.33 and SGLang 0.5.23
//! engines, behind the same sessions as the native protocol.
//!
//! What this crate is: one sans-IO machine per dialect, which takes the commands and gives the events of a
//! worker of the KV cache; the side channels of both engines (ZeroMQ); and a transport that joins side channels
//! and NIXL. What this crate is not: a router, a NIXL binding, or a translation between vLLM and SGLang.
//!
//! | module | holds |
//! |---|---|
//! | [`message`] | what a machine and its transport say to each other |
//! | [`agents`](Agents) | what the data transport must do with foreign NIXL agents |
#![forbid(unsafe_code)]
#![allow(dead_code)]

mod agents;
mod cache;
mod effects;
mod flows;
pub mod message;
mod sessions;

pub use agents::Agents;
