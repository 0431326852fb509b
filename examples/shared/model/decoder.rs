//! The forward pass: a batch of segments, each reading and writing its own KV cache.

use kv_math::{Columns, add, argmax, attend, matmul, rms_norm, swiglu};
use kv_transfer::unstable::hash::Fnv1a;
use serde::{Deserialize, Serialize};

use super::config::ModelConfig;
use super::rope::Rope;
use super::weights::{LayerWeights, Weights};
use crate::error::ExampleError;

/// The keys and values of one request. Each token has a row, in order: of [`key_dim`](ModelConfig::key_dim)
/// elements for keys, and of [`value_dim`](ModelConfig::value_dim) elements for values.
pub trait KvCache {
    /// Stores the rows of consecutive tokens, of which the first has position `start`.
    fn store(&mut self, layer: usize, start: usize, keys: &[f32], values: &[f32])
    -> Result<(), ExampleError>;

    /// Fills `keys` and `values` with the rows of the tokens before `len`.
    fn load(
        &self,
        layer: usize,
        len: usize,
        keys: &mut Vec<f32>,
        values: &mut Vec<f32>,
    ) -> Result<(), ExampleError>;
}

/// Rows that take the place of the embeddings of consecutive tokens of a request, such as those of an image.
#[derive(Debug, Clone, PartialEq)]
pub struct InputRows {
    /// The position of the first of these tokens in the request.
    pub start: usize,
    /// One row of [`hidden_size`](ModelConfig::hidden_size) elements for each token.
    pub rows: Vec<f32>,
}

/// Consecutive tokens of one request: a chunk of its prompt, or the token generated last.
pub struct Segment<'a> {
    /// The tokens of the segment, at least one.
    pub tokens: &'a [u32],
    /// The position of the first token. All earlier tokens are in the cache.
    pub start: usize,
    /// The cache of the request.
    pub cache: &'a mut dyn KvCache,
    /// Rows for tokens of the request that are no text; positions outside the segment are skipped.
    pub inputs: &'a [InputRows],
}

impl InputRows {
    /// The row for the token at `position`, if it is one of these.
    fn row(&self, position: usize, hidden: usize) -> Option<&[f32]> {
        self.rows.chunks_exact(hidden).nth(position.checked_sub(self.start)?)
    }
}

/// What the model computes after the last token of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// The most likely token.
    pub token: u32,
    /// A digest of all bits of all logits. Wrong bytes in the cache change the digest even if the most likely
    /// token stays the same.
    pub digest: u64,
}

/// A model that is ready to run.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    weights: Weights,
    rope: Rope,
}

impl Model {
    /// A model from its parts. The sizes of `weights` must be those that `config` asks for.
    pub fn new(config: ModelConfig, weights: Weights) -> Model {
        let rope = Rope::new(&config);
        Model { config, weights, rope }
    }

    /// The shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// A name that differs for models of different shapes or weights. Both engines tell each other the name
    /// before they exchange pages.
    pub fn fingerprint(&self) -> String {
        let tensors = self.weights.layers.iter().flat_map(|layer| [&layer.q, &layer.down]);
        let heads = tensors.chain([&self.weights.embed]).flat_map(|tensor| tensor.iter().take(256));
        let kind = if self.config.latent.is_some() { "latent" } else { "llama" };
        let (layers, hidden) = (self.config.num_hidden_layers, self.config.hidden_size);
        format!("{kind}-{layers}x{hidden}-{:016x}", digest(heads))
    }

    /// Runs all segments as one batch and fills their caches. Returns what comes after each segment.
    pub fn forward(&self, segments: &mut [Segment<'_>]) -> Result<Vec<Sample>, ExampleError> {
        self.forward_by_layer(segments, |_| {})
    }

    /// The same, and calls `done` for each layer when the layer's part of the caches is final.
    pub fn forward_by_layer(
        &self,
        segments: &mut [Segment<'_>],
        mut stored: impl FnMut(u32),
    ) -> Result<Vec<Sample>, ExampleError> {
        let hidden = self.config.hidden_size;
        let mut stream = self.embed(segments)?;
        let angles: Vec<Vec<(f32, f32)>> = segments
            .iter()
            .flat_map(|segment| segment.start..segment.start + segment.tokens.len())
            .map(|position| self.rope.angles(position))
            .collect();
        let mut scratch = Scratch::default();
        for (number, layer) in self.weights.layers.iter().enumerate() {
            self.attention(number, layer, &angles, segments, &mut stream, &mut scratch)?;
            stored(number as u32);
            self.feed_forward(layer, &mut stream, &mut scratch);
        }
        let mut end = 0;
        let mut last = Vec::with_capacity(segments.len() * hidden);
        for segment in segments.iter() {
            end += segment.tokens.len();
            last.extend_from_slice(&stream[(end - 1) * hidden..end * hidden]);
        }
        Ok(self.sample(&last))
    }

    fn embed(&self, segments: &[Segment<'_>]) -> Result<Vec<f32>, ExampleError> {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let mut stream = Vec::new();
        for segment in segments {
            let first = stream.len();
            for &token in segment.tokens {
                let row = self.weights.embed.chunks_exact(hidden).nth(token as usize);
                stream.extend_from_slice(row.ok_or(ExampleError::Token { token, vocab })?);
            }
            let rows = stream[first..].chunks_exact_mut(hidden);
            for (position, row) in (segment.start..).zip(rows) {
                let given = segment.inputs.iter().find_map(|input| input.row(position, hidden));
                if let Some(given) = given {
                    row.copy_from_slice(given);
                }
            }
        }
        Ok(stream)
    }

    fn attention(
        &self,
        number: usize,
        layer: &LayerWeights,
        angles: &[Vec<(f32, f32)>],
        segments: &mut [Segment<'_>],
        stream: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<(), ExampleError> {
        let config = &self.config;
        let (hidden, query_dim, attention_dim) =
            (config.hidden_size, config.query_dim(), config.attention_dim());
        let (key_dim, value_dim) = (config.key_dim(), config.value_dim());
        let tokens = angles.len();
        let Scratch { normed, queries, keys, values, mixed, out, past_keys, past_values, .. } = scratch;
        for (buffer, width) in [
            (&mut *normed, hidden),
            (&mut *queries, query_dim),
            (&mut *keys, key_dim),
            (&mut *values, value_dim),
            (&mut *out, hidden),
        ] {
            buffer.resize(tokens * width, 0.0);
        }
        rms_norm(stream, &layer.input_norm, config.rms_norm_eps, normed);
        matmul(normed, &layer.q, hidden, queries);
        matmul(normed, &layer.k, hidden, keys);
        if config.latent.is_none() {
            matmul(normed, &layer.v, hidden, values);
        }
        for (t, angles) in angles.iter().enumerate() {
            let query = &mut queries[t * query_dim..(t + 1) * query_dim];
            let key = &mut keys[t * key_dim..(t + 1) * key_dim];
            match &config.latent {
                Some(latent) => latent.rotate(config.head_dim, angles, query, key),
                None => {
                    Rope::rotate(angles, query);
                    Rope::rotate(angles, key);
                }
            }
        }
        mixed.clear();
        mixed.resize(tokens * attention_dim, 0.0);
        let mut first = 0;
        for segment in segments.iter_mut() {
            let rows = first..first + segment.tokens.len();
            let keys = &keys[rows.start * key_dim..rows.end * key_dim];
            let values = &values[rows.start * value_dim..rows.end * value_dim];
            segment.cache.store(number, segment.start, keys, values)?;
            segment.cache.load(number, segment.start + rows.len(), past_keys, past_values)?;
            for (i, t) in rows.clone().enumerate() {
                let query = &queries[t * query_dim..(t + 1) * query_dim];
                let mix = &mut mixed[t * attention_dim..(t + 1) * attention_dim];
                let seen = segment.start + i + 1;
                let keys = &past_keys[..seen * key_dim];
                match &config.latent {
                    Some(latent) => latent.attend(config.head_dim, &layer.v, query, keys, mix),
                    None => self.attend(query, keys, &past_values[..seen * value_dim], mix),
                }
            }
            first = rows.end;
        }
        matmul(mixed, &layer.o, attention_dim, out);
        add(stream, out);
        Ok(())
    }

    /// The attention of one token over all keys up to its own.
    fn attend(&self, query: &[f32], keys: &[f32], values: &[f32], mix: &mut [f32]) {
        let (dim, kv_dim) = (self.config.head_dim, self.config.key_dim());
        let queries_per_kv = self.config.num_attention_heads / self.config.num_key_value_heads;
        let scale = (dim as f32).sqrt().recip();
        for (head, (query, mix)) in query.chunks_exact(dim).zip(mix.chunks_exact_mut(dim)).enumerate() {
            let of_head = |rows| Columns { rows, width: kv_dim, first: head / queries_per_kv * dim };
            attend(query, scale, of_head(keys), of_head(values), mix);
        }
    }

    fn feed_forward(&self, layer: &LayerWeights, stream: &mut [f32], scratch: &mut Scratch) {
        let (hidden, inner) = (self.config.hidden_size, self.config.intermediate_size);
        let Scratch { normed, gate, up, out, .. } = scratch;
        gate.resize(stream.len() / hidden * inner, 0.0);
        up.resize(gate.len(), 0.0);
        rms_norm(stream, &layer.post_norm, self.config.rms_norm_eps, normed);
        matmul(normed, &layer.gate, hidden, gate);
        matmul(normed, &layer.up, hidden, up);
        swiglu(gate, up);
        matmul(gate, &layer.down, inner, out);
        add(stream, out);
    }

    fn sample(&self, last: &[f32]) -> Vec<Sample> {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let mut normed = vec![0.0; last.len()];
        let mut logits = vec![0.0; last.len() / hidden * vocab];
        rms_norm(last, &self.weights.norm, self.config.rms_norm_eps, &mut normed);
        let head = self.weights.head.as_ref().unwrap_or(&self.weights.embed);
        matmul(&normed, head, hidden, &mut logits);
        let rows = logits.chunks_exact(vocab);
        rows.map(|row| Sample { token: argmax(row) as u32, digest: digest(row) }).collect()
    }
}

/// Buffers for one forward pass.
#[derive(Default)]
struct Scratch {
    normed: Vec<f32>,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    mixed: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    out: Vec<f32>,
    past_keys: Vec<f32>,
    past_values: Vec<f32>,
}

/// A hash of all bits of the values.
fn digest<'a>(values: impl IntoIterator<Item = &'a f32>) -> u64 {
    let mut hash = Fnv1a::new();
    values.into_iter().for_each(|value| hash.write(&value.to_bits().to_le_bytes()));
    hash.finish()
}
