//! SGLang's dialect: the protocol of SGLang 0.5.23's NIXL backend (`--disaggregation-transfer-backend nixl`), in which
//! the prefill rank always writes.

mod aux_rows;
mod cache;
mod codec;
mod config;
mod machine;
#[cfg(feature = "model")]
pub mod model;
mod ranks;
mod receiver;
#[cfg(test)]
mod recordings;
mod sender;
mod start;
#[cfg(test)]
mod tests;

pub use aux_rows::{AUX_ITEM_LENS, AuxBuffers, AuxRooms, room_of_row, write_room};
#[cfg(feature = "fuzz")]
pub(crate) use codec::{MAX_REASON, SglangMessage};
pub use config::{SglangConfig, SglangConfigError, SglangLimits, SglangTiming};
pub use start::{SglangStartError, start};
