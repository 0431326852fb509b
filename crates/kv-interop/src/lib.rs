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
//! | [`vllm`] | vLLM's dialect |
//! | [`sglang`] | SGLang's protocol, as prefill and as decode side |
//! | [`agents`](Agents) | what the data transport must do with foreign NIXL agents |
//! | [`transport`](InteropTransport) | NIXL agents and side channels as one transport |
//! | [`side_channel`](SideChannel) | the server from which vLLM workers fetch the metadata of our ranks |
//! | `channels`, `zmtp` | ZeroMQ sockets on a worker's poll, and their protocol |
#![forbid(unsafe_code)]

mod agents;
mod cache;
mod channels;
mod effects;
mod flows;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod gauges;
pub mod message;
#[cfg(test)]
mod replay;
mod sessions;
pub mod sglang;
mod side_channel;
mod starting;
mod telling;
mod transport;
pub mod vllm;
mod zmtp;

pub use agents::Agents;
pub use channels::{ChannelConfig, ChannelCounts, ChannelError, ChannelGauges};
pub use gauges::{Ignored, IgnoredGauges};
pub use side_channel::{SideChannel, SideChannelGauges};
pub use transport::InteropTransport;
pub use zmtp::ZmtpError;
