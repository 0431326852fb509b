//! vLLM's dialect: the protocol of vLLM 0.33's NixlConnector, in pull and in push mode.

mod config;
mod consumer;
mod context;
mod expiring;
mod geometry;
mod hash;
mod machine;
mod metadata;
#[cfg(feature = "model")]
pub mod model;
mod notification;
mod producer;
#[cfg(test)]
mod recordings;
#[cfg(test)]
mod rig;
pub(crate) mod side_channel;
mod start;

pub use config::{SideChannelAddr, VllmConfig, VllmLimits, VllmReader, VllmTiming};
pub use geometry::CacheError;
pub use hash::{Compatibility, Factors, NIXL_CONNECTOR_VERSION};
pub use metadata::{MetadataError, NixlAgentMetadata, NixlHandshakePayload};
#[cfg(feature = "fuzz")]
pub(crate) use metadata::{answer, asked, question};
#[cfg(feature = "fuzz")]
pub(crate) use notification::{Notification, PushRegistration, written_again};
pub use start::{VllmStartError, start};
