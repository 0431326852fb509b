//! Foreign dialects: a worker that speaks vLLM's or SGLang's protocol to unmodified vLLM 0.33 and SGLang 0.5.23
//! engines, behind the same sessions as the native protocol.
//!
//! What this crate is: one sans-IO machine per dialect, which takes the commands and gives the events of a
//! worker of the KV cache; the side channels of both engines (ZeroMQ); and a transport that joins side channels
//! and NIXL. What this crate is not: a router, a NIXL binding, or a translation between vLLM and SGLang.
//!
//! `docs/INTEROP.md` in the repository says which settings the engines need, what works, and what their protocols
//! cannot promise. Servers need the feature `nixl`, with which `kv_nixl::NixlTransport` implements [`Agents`].
//!
//! ```
//! use std::error::Error;
//!
//! use kv_bootstrap::{ClientConfig, HttpBootstrapClient};
//! use kv_core::{AuxIndex, KvArgs, WorkerRole};
//! use kv_interop::sglang::{self, SglangConfig};
//! use kv_interop::vllm::{self, Compatibility, VllmConfig};
//! use kv_interop::{Agents, ChannelConfig, InteropTransport, SideChannel};
//! use kv_poll::Worker;
//!
//! /// The worker of one rank among vLLM's. All ranks of the process share a side channel:
//! /// `SideChannel::bind("10.0.0.7:5600")`.
//! fn among_vllm<A: Agents + Send + 'static>(
//!     nixl: A,
//!     args: KvArgs,
//!     side_channel: &SideChannel,
//!     hash: String,
//! ) -> Result<Worker, Box<dyn Error>> {
//!     let transport = InteropTransport::new(nixl, ChannelConfig::default())?;
//!     let config = VllmConfig::default().with(|config| config.compatibility = Compatibility::Hash(hash));
//!     Ok(vllm::start(config, args, transport, Some(side_channel))?)
//! }
//!
//! /// The worker of one decode rank among SGLang's. `room_in` reads the room in an aux row of the worker's memory.
//! fn among_sglang<A: Agents + Send + 'static>(
//!     nixl: A,
//!     args: KvArgs,
//!     room_in: impl Fn(AuxIndex) -> u64 + Send + 'static,
//! ) -> Result<Worker, Box<dyn Error>> {
//!     let channels = ChannelConfig::default().with(|config| config.listen = Some("10.0.0.7:0".to_owned()));
//!     let transport = InteropTransport::new(nixl, channels)?;
//!     let config = SglangConfig::new(WorkerRole::Decode);
//!     let config = config.with(|config| config.aux_rooms = Some(Box::new(room_in)));
//!     let client = HttpBootstrapClient::new(ClientConfig::default())?;
//!     Ok(sglang::start(config, args, transport, Box::new(client))?)
//! }
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`message`] | what a machine and its transport say to each other |
//! | [`vllm`] | vLLM's dialect: prefill and decode side, pull and push |
//! | [`sglang`] | SGLang's dialect: prefill and decode side |
//! | [`agents`](Agents) | what the data transport must do with foreign NIXL agents |
//! | [`transport`](InteropTransport) | NIXL agents and side channels as one transport |
//! | [`vllm::side_channel`](SideChannel) | the server from which vLLM workers fetch the metadata of our ranks |
//! | `channels`, `zmtp` | ZeroMQ sockets on a worker's poll, and their protocol |
//! | `sessions`, `flows`, `cache`, `effects`, `telling` | what both machines are made of |
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
mod starting;
mod telling;
mod transport;
pub mod vllm;
mod zmtp;

pub use agents::Agents;
pub use channels::{ChannelConfig, ChannelCounts, ChannelError, ChannelGauges};
pub use gauges::{Ignored, IgnoredGauges};
pub use transport::InteropTransport;
pub use vllm::side_channel::{SideChannel, SideChannelGauges};
pub use zmtp::ZmtpError;
