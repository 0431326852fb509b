//! Reads `config.json`, as far as a model of the Llama architecture needs it.

use std::path::Path;

use serde::Deserialize;

use super::CheckpointError;
use crate::model::{Llama3Scaling, ModelConfig};

/// The largest value of a size field, which bounds what a broken file can make the loader allocate.
const MAX_SIZE: usize = 1 << 20;

/// Reads and checks a `config.json`.
pub fn read_config(file: &Path) -> Result<ModelConfig, CheckpointError> {
    let bytes = std::fs::read(file).map_err(|source| CheckpointError::Read { file: file.into(), source })?;
    let raw: RawConfig = serde_json::from_slice(&bytes)
        .map_err(|source| CheckpointError::Json { file: file.into(), source })?;
    raw.check()
}

/// The file, field by field. Fields that are not listed change nothing in the forward pass.
#[derive(Deserialize)]
struct RawConfig {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rms_norm_eps: f32,
    #[serde(default = "default_activation")]
    hidden_act: String,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    rope_theta: Option<f64>,
    /// How the rotary frequencies are scaled.
    rope_scaling: Option<RawRope>,
    /// The same as `rope_scaling`, and the base, in files of transformers 5.
    rope_parameters: Option<RawRope>,
    #[serde(default)]
    tie_word_embeddings: bool,
    eos_token_id: Option<OneOrMany>,
}

#[derive(Deserialize)]
struct RawRope {
    #[serde(alias = "type")]
    rope_type: String,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

fn default_activation() -> String {
    "silu".to_owned()
}

impl RawConfig {
    fn check(self) -> Result<ModelConfig, CheckpointError> {
        supported("model_type", &self.model_type, self.model_type == "llama", "llama")?;
        supported("hidden_act", &self.hidden_act, self.hidden_act == "silu", "silu")?;
        supported("attention_bias", &self.attention_bias, !self.attention_bias, "false")?;
        supported("mlp_bias", &self.mlp_bias, !self.mlp_bias, "false")?;
        for (field, size) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
        ] {
            supported(field, &size, (1..=MAX_SIZE).contains(&size), "1 to 1048576")?;
        }
        let kv_heads = self.num_key_value_heads.unwrap_or(self.num_attention_heads);
        let divides = kv_heads > 0 && self.num_attention_heads.is_multiple_of(kv_heads);
        supported("num_key_value_heads", &kv_heads, divides, "a divisor of num_attention_heads")?;
        let head_dim = self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads);
        let even = (2..=MAX_SIZE).contains(&head_dim) && head_dim.is_multiple_of(2);
        supported("head_dim", &head_dim, even, "even numbers")?;
        let rope = self.rope_parameters.or(self.rope_scaling);
        let rope_theta =
            rope.as_ref().and_then(|rope| rope.rope_theta).or(self.rope_theta).unwrap_or(10_000.0);
        supported("rope_theta", &rope_theta, rope_theta.is_finite() && rope_theta > 1.0, "numbers above 1")?;
        Ok(ModelConfig {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: kv_heads,
            latent: None,
            head_dim,
            rms_norm_eps: self.rms_norm_eps,
            rope_theta,
            rope_scaling: rope.map(RawRope::check).transpose()?.flatten(),
            tie_word_embeddings: self.tie_word_embeddings,
            eos_token_ids: match self.eos_token_id {
                None => Vec::new(),
                Some(OneOrMany::One(token)) => vec![token],
                Some(OneOrMany::Many(tokens)) => tokens,
            },
        })
    }
}

impl RawRope {
    fn check(self) -> Result<Option<Llama3Scaling>, CheckpointError> {
        if self.rope_type == "default" {
            return Ok(None);
        }
        supported("rope_scaling.rope_type", &self.rope_type, self.rope_type == "llama3", "default, llama3")?;
        let positive = |field: &'static str, value: Option<f64>| {
            let number = value.unwrap_or(f64::NAN);
            supported(field, &number, number.is_finite() && number > 0.0, "positive numbers")?;
            Ok::<f64, CheckpointError>(number)
        };
        let scaling = Llama3Scaling {
            factor: positive("rope_scaling.factor", self.factor)?,
            low_freq_factor: positive("rope_scaling.low_freq_factor", self.low_freq_factor)?,
            high_freq_factor: positive("rope_scaling.high_freq_factor", self.high_freq_factor)?,
            original_max_position_embeddings: positive(
                "rope_scaling.original_max_position_embeddings",
                self.original_max_position_embeddings,
            )?,
        };
        let ordered = scaling.high_freq_factor > scaling.low_freq_factor;
        let field = "rope_scaling.high_freq_factor";
        supported(field, &scaling.high_freq_factor, ordered, "numbers above low_freq_factor")?;
        Ok(Some(scaling))
    }
}

fn supported(
    field: &'static str,
    got: &impl ToString,
    ok: bool,
    supported: &'static str,
) -> Result<(), CheckpointError> {
    if ok { Ok(()) } else { Err(CheckpointError::Unsupported { field, got: got.to_string(), supported }) }
}
