//! A small Llama-style decoder in plain Rust: what computes the KV cache that the examples hand over.
//!
//! It is here to be correct and readable, not to be fast. One property matters more than any other:
//! **a token's arithmetic does not depend on its neighbours in the batch.** Every dot product adds
//! its terms in one fixed order, whatever the chunk of a prompt or the batch of requests it sits in,
//! so a prompt computed in chunks by one process and continued by another gives, bit for bit, the
//! logits of a run that never left its process.

mod config;
mod decoder;
mod latent;
mod math;
mod rng;
mod rope;
mod weights;

#[cfg(any(test, feature = "checkpoint"))]
pub use config::Llama3Scaling;
pub use config::ModelConfig;
pub use decoder::{KvCache, Model, Sample, Segment};
pub use rng::Rng;
#[cfg(feature = "checkpoint")]
pub use weights::LayerWeights;
pub use weights::Weights;
