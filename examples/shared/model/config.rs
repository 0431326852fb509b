//! The shape of a model.

/// The shape and constants of a Llama-style decoder; the names are those of `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Tokens known.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward block.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; a divisor of the query heads.
    pub num_key_value_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// The small number inside RMSNorm's root.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Llama 3's stretching of the rotary frequencies, if used.
    pub rope_scaling: Option<Llama3Scaling>,
    /// Whether the output head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Tokens that end a generation.
    pub eos_token_ids: Vec<u32>,
}

/// Parameters of `rope_type: llama3`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// How much longer the context became.
    pub factor: f64,
    /// Wavelengths longer than the old context over this are stretched in full.
    pub low_freq_factor: f64,
    /// Wavelengths shorter than the old context over this stay as they are.
    pub high_freq_factor: f64,
    /// The context before stretching, in tokens.
    pub original_max_position_embeddings: f64,
}

impl ModelConfig {
    /// The model of the examples: 2.5 million parameters, 2 KiB of KV a token, some thousand prompt
    /// tokens a second on one core.
    pub fn small() -> ModelConfig {
        ModelConfig {
            vocab_size: 1024,
            hidden_size: 256,
            intermediate_size: 512,
            num_hidden_layers: 4,
            num_attention_heads: 8,
            num_key_value_heads: 2,
            head_dim: 32,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: None,
            tie_word_embeddings: false,
            eos_token_ids: Vec::new(),
        }
    }

    /// Elements of all query heads of a token.
    pub fn query_dim(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Elements of one token's keys (or values) in one layer.
    pub fn kv_dim(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }
}
