//! The shape and the constants of a model.

/// The shape and constants of a Llama-style decoder; the names are those of `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The width inside the feed-forward block.
    pub intermediate_size: usize,
    /// The number of layers.
    pub num_hidden_layers: usize,
    /// The number of query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; a divisor of the query heads.
    pub num_key_value_heads: usize,
    /// The number of elements of one head.
    pub head_dim: usize,
    /// Multi-head latent attention instead of keys and values for each head.
    pub latent: Option<Latent>,
    /// The small number inside RMSNorm's root.
    pub rms_norm_eps: f32,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// Llama 3's stretching of the rotary frequencies, if used.
    pub rope_scaling: Option<Llama3Scaling>,
    /// Whether the output head is the embedding table.
    pub tie_word_embeddings: bool,
    /// The tokens that end a generation.
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

/// The shape of multi-head latent attention (DeepSeek V2, arXiv 2405.04434). The cache of a token is one
/// vector, from which the keys and values of all heads are computed, and one rotated key for all heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// The number of elements of the vector.
    pub kv_lora_rank: usize,
    /// The number of elements of the rotated key.
    pub qk_rope_head_dim: usize,
}

impl Latent {
    /// The number of elements in the cache of one token in one layer.
    pub fn width(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }
}

impl ModelConfig {
    /// The model of the examples: 2.6 million parameters, 4 KiB of KV a token, some thousand prompt
    /// tokens a second on one core.
    pub fn small() -> ModelConfig {
        ModelConfig {
            vocab_size: 1024,
            hidden_size: 256,
            intermediate_size: 512,
            num_hidden_layers: 4,
            num_attention_heads: 8,
            num_key_value_heads: 4,
            head_dim: 32,
            latent: None,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: None,
            tie_word_embeddings: false,
            eos_token_ids: Vec::new(),
        }
    }

    /// The same model with multi-head latent attention: 1 KiB of KV a token.
    pub fn small_latent() -> ModelConfig {
        let latent = Latent { kv_lora_rank: 48, qk_rope_head_dim: 16 };
        ModelConfig { latent: Some(latent), ..ModelConfig::small() }
    }

    /// Elements of all query heads of a token.
    pub fn query_dim(&self) -> usize {
        self.num_attention_heads * (self.head_dim + self.latent.map_or(0, |latent| latent.qk_rope_head_dim))
    }

    /// The number of elements of the attention output of a token.
    pub fn attention_dim(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// The number of elements of one token's keys in one layer; with latent attention, of its whole cache.
    pub fn key_dim(&self) -> usize {
        self.latent.map_or(self.num_key_value_heads * self.head_dim, |latent| latent.width())
    }

    /// The number of elements of one token's values in one layer, as they are cached.
    pub fn value_dim(&self) -> usize {
        if self.latent.is_some() { 0 } else { self.num_key_value_heads * self.head_dim }
    }

    /// Elements that are rotated, of each head that is.
    pub fn rope_dim(&self) -> usize {
        self.latent.map_or(self.head_dim, |latent| latent.qk_rope_head_dim)
    }
}
