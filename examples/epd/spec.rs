//! What the router tells a process at its start.

use kv_examples::cli::{Mode, Pace, TransportKind};
use kv_examples::loading::ModelOptions;
use kv_examples::rank::RankSpec;
use serde::{Deserialize, Serialize};

/// A process of the service.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "process", rename_all = "snake_case")]
pub enum Spec {
    /// An encode process (`encode.rs`).
    Encoder(EncoderSpec),
    /// The prefill process (`gate.rs`).
    Prefill(Box<PrefillSpec>),
    /// The decode process, which is that of the example `pd`.
    Decode(Box<RankSpec>),
}

/// The parts of an encode process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EncoderSpec {
    /// The options that choose the models.
    pub model: ModelOptions,
    /// The encoder cache of the process.
    pub store: StoreSpec,
}

/// The parts of the prefill process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PrefillSpec {
    /// The prefill rank behind the gate.
    pub rank: RankSpec,
    /// The encoder cache of the process.
    pub store: StoreSpec,
    /// True if the process computes embeddings that it cannot fetch.
    pub encode_here: bool,
}

/// The encoder cache of a process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StoreSpec {
    /// The name of the process, such as `encode-0`.
    pub name: String,
    /// True if the process serves others.
    pub serves: bool,
    /// The transport that moves embeddings.
    pub transport: TransportKind,
    /// The number of blocks of the region. A block holds one row of an embedding.
    pub blocks: u32,
    /// The most tokens of an image, which is a setting of the processor of images.
    pub image_tokens: u32,
    /// Which side moves embeddings.
    pub mode: Mode,
    /// How long a fetch may take, all tries together, in seconds.
    pub budget_seconds: u64,
    /// How long timeouts are.
    pub timing: Pace,
}

impl Spec {
    /// The transport of the process.
    pub fn transport(&self) -> TransportKind {
        match self {
            Spec::Encoder(spec) => spec.store.transport,
            Spec::Prefill(spec) => spec.store.transport,
            Spec::Decode(spec) => spec.cache.transport,
        }
    }
}
