//! A small Llama-style decoder in plain Rust, which computes the KV cache that the examples hand over.
//!
//! The decoder is meant to be correct and readable, not fast. One property matters most: **the arithmetic of
//! a token does not depend on its neighbours in the batch.** Every dot product adds its terms in one fixed
//! order, whatever chunk of a prompt or batch of requests the token is in. So a prompt that one process
//! computes in chunks and another process continues gives, bit for bit, the logits of a run in one process.

mod config;
mod decoder;
mod latent;
mod rng;
mod rope;
mod weights;

#[cfg(any(test, feature = "checkpoint"))]
pub use config::Llama3Scaling;
pub use config::ModelConfig;
pub use decoder::{InputRows, KvCache, Model, Sample, Segment};
pub use rng::Rng;
#[cfg(feature = "checkpoint")]
pub use weights::LayerWeights;
pub use weights::Weights;
