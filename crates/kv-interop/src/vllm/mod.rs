//! vLLM's dialect: the protocol of vLLM 0.33's NixlConnector, in pull and in push mode.

mod geometry;
mod hash;
mod metadata;
mod notification;

pub use geometry::CacheError;
pub use hash::{Compatibility, Factors, NIXL_CONNECTOR_VERSION};
pub use metadata::{MetadataError, NixlAgentMetadata, NixlHandshakePayload};
