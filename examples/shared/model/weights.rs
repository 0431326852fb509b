//! The parameters of a model, and random ones from a seed.

use super::config::ModelConfig;
use super::rng::Rng;

/// All parameters, row-major, each matrix as (outputs × inputs).
#[derive(Debug, Clone, PartialEq)]
pub struct Weights {
    /// The embedding of each token.
    pub embed: Vec<f32>,
    /// The parameters of each layer.
    pub layers: Vec<LayerWeights>,
    /// The weights of the last norm.
    pub norm: Vec<f32>,
    /// The output head; `None` if it is the embedding table.
    pub head: Option<Vec<f32>>,
}

/// The parameters of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerWeights {
    /// The weights of the norm before attention.
    pub input_norm: Vec<f32>,
    /// The weights that compute queries.
    pub q: Vec<f32>,
    /// The weights that compute keys; with latent attention, the cached row.
    pub k: Vec<f32>,
    /// The weights that compute values; with latent attention, for each head those that compute its key, and
    /// then its value, from the latent vector.
    pub v: Vec<f32>,
    /// The weights of the attention output.
    pub o: Vec<f32>,
    /// The weights of the norm before the feed-forward block.
    pub post_norm: Vec<f32>,
    /// The weights of the feed-forward gate.
    pub gate: Vec<f32>,
    /// The weights of the feed-forward up projection.
    pub up: Vec<f32>,
    /// The weights of the feed-forward down projection.
    pub down: Vec<f32>,
}

impl Weights {
    /// Weights drawn from `seed`: nonsense, but reproducible nonsense with lively attention.
    pub fn random(config: &ModelConfig, seed: u64) -> Weights {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (query, key, attention) = (config.query_dim(), config.key_dim(), config.attention_dim());
        let (value, of) = match config.latent {
            Some(latent) => (2 * attention, latent.kv_lora_rank),
            None => (config.value_dim(), hidden),
        };
        // Uniform with unit variance over the inputs keeps activations near one.
        let matrix = |name: &str, outputs: usize, inputs: usize| {
            let bound = (3.0 / inputs as f32).sqrt();
            let mut rng = Rng::named(seed, name);
            (0..outputs * inputs).map(|_| rng.symmetric() * bound).collect::<Vec<f32>>()
        };
        let norm = |name: &str| {
            let mut rng = Rng::named(seed, name);
            (0..hidden).map(|_| 1.0 + 0.1 * rng.symmetric()).collect::<Vec<f32>>()
        };
        let layer = |i: usize| LayerWeights {
            input_norm: norm(&format!("{i}.input_norm")),
            q: matrix(&format!("{i}.q"), query, hidden),
            k: matrix(&format!("{i}.k"), key, hidden),
            v: matrix(&format!("{i}.v"), value, of),
            o: matrix(&format!("{i}.o"), hidden, attention),
            post_norm: norm(&format!("{i}.post_norm")),
            gate: matrix(&format!("{i}.gate"), inner, hidden),
            up: matrix(&format!("{i}.up"), inner, hidden),
            down: matrix(&format!("{i}.down"), hidden, inner),
        };
        Weights {
            embed: matrix("embed", config.vocab_size, hidden),
            layers: (0..config.num_hidden_layers).map(layer).collect(),
            norm: norm("norm"),
            head: (!config.tie_word_embeddings).then(|| matrix("head", config.vocab_size, hidden)),
        }
    }
}
