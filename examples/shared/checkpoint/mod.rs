//! Loads published checkpoints of models of the Llama architecture.

mod config;
mod tensors;
mod tokenizer;

use std::path::{Path, PathBuf};

pub use config::read_config;
pub use tensors::TensorFiles;
pub use tokenizer::Tokenizer;

use super::model::{LayerWeights, Model, ModelConfig, Weights};

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file cannot be read.
    #[error("{file}: {source}")]
    Read {
        /// The path of the file.
        file: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// A file is not JSON, or has other content than it should have.
    #[error("{file}: {source}")]
    Json {
        /// The path of the file.
        file: PathBuf,
        /// The error of the JSON parser.
        source: serde_json::Error,
    },
    /// A file is no safetensors file.
    #[error("{file}: {source}")]
    Safetensors {
        /// The path of the file.
        file: PathBuf,
        /// The error of the safetensors library.
        source: safetensors::SafeTensorError,
    },
    /// The tokenizer library failed.
    #[error("{file}: {source}")]
    Tokenizer {
        /// The path of the file.
        file: PathBuf,
        /// The error of the tokenizer library.
        source: tokenizers::Error,
    },
    /// A field of config.json has a value that the example's decoder does not do.
    #[error("config.json: {field} is {got}; supported: {supported}")]
    Unsupported {
        /// The name of the field in `config.json`.
        field: &'static str,
        /// The value of the field.
        got: String,
        /// The values that are supported.
        supported: &'static str,
    },
    /// A tensor is in none of the files.
    #[error("no file has the tensor {name}")]
    Missing {
        /// The name of the tensor.
        name: String,
    },
    /// A tensor has another shape than config.json implies.
    #[error("tensor {name} has shape {got:?}, config.json implies {expected:?}")]
    Shape {
        /// The name of the tensor.
        name: String,
        /// The shape of the tensor in the file.
        got: Vec<usize>,
        /// The shape that `config.json` implies.
        expected: Vec<usize>,
    },
    /// A tensor has a type other than f32, f16 or bf16.
    #[error("tensor {name} has type {got:?}; supported: F32, F16, BF16")]
    Type {
        /// The name of the tensor.
        name: String,
        /// The element type in the file.
        got: safetensors::Dtype,
    },
}

/// Loads config.json and the weights in `dir`, all as f32.
pub fn load_model(dir: &Path) -> Result<Model, CheckpointError> {
    let config = read_config(&dir.join("config.json"))?;
    let mut files = TensorFiles::open(dir)?;
    let weights = read_weights(&config, &mut files)?;
    Ok(Model::new(config, weights))
}

fn read_weights(config: &ModelConfig, files: &mut TensorFiles) -> Result<Weights, CheckpointError> {
    let (hidden, inner, vocab) = (config.hidden_size, config.intermediate_size, config.vocab_size);
    let (query, kv) = (config.query_dim(), config.key_dim());
    let mut layers = Vec::new();
    for i in 0..config.num_hidden_layers {
        let mut tensor =
            |name: &str, shape: &[usize]| files.read(&format!("model.layers.{i}.{name}.weight"), shape);
        layers.push(LayerWeights {
            input_norm: tensor("input_layernorm", &[hidden])?,
            q: tensor("self_attn.q_proj", &[query, hidden])?,
            k: tensor("self_attn.k_proj", &[kv, hidden])?,
            v: tensor("self_attn.v_proj", &[kv, hidden])?,
            o: tensor("self_attn.o_proj", &[hidden, query])?,
            post_norm: tensor("post_attention_layernorm", &[hidden])?,
            gate: tensor("mlp.gate_proj", &[inner, hidden])?,
            up: tensor("mlp.up_proj", &[inner, hidden])?,
            down: tensor("mlp.down_proj", &[hidden, inner])?,
        });
    }
    Ok(Weights {
        embed: files.read("model.embed_tokens.weight", &[vocab, hidden])?,
        layers,
        norm: files.read("model.norm.weight", &[hidden])?,
        head: match config.tie_word_embeddings {
            true => None,
            false => Some(files.read("lm_head.weight", &[vocab, hidden])?),
        },
    })
}

#[cfg(test)]
mod tests;
