//! The run that everything is compared with: one process, no pages, no transfer.

use super::error::ExampleError;
use super::model::{KvCache, Model, Sample, Segment};

/// Continues `prompt` by at most `max_new_tokens` tokens, prompt in one piece, cache in one piece.
pub fn generate(model: &Model, prompt: &[u32], max_new_tokens: usize) -> Result<Vec<Sample>, ExampleError> {
    let mut cache = ContiguousCache::new(model.config().num_hidden_layers, model.config().kv_dim());
    let mut samples = Vec::with_capacity(max_new_tokens);
    let mut position = 0;
    let mut tokens = prompt.to_vec();
    while samples.len() < max_new_tokens {
        let mut batch = [Segment { tokens: &tokens, start: position, cache: &mut cache }];
        let Some(&sample) = model.forward(&mut batch)?.first() else { break };
        samples.push(sample);
        position += tokens.len();
        tokens = vec![sample.token];
        if model.config().eos_token_ids.contains(&sample.token) {
            break;
        }
    }
    Ok(samples)
}

/// A cache that is nobody's business: one growing list of rows for each layer.
pub struct ContiguousCache {
    kv_dim: usize,
    layers: Vec<(Vec<f32>, Vec<f32>)>,
}

impl ContiguousCache {
    /// An empty cache.
    pub fn new(layers: usize, kv_dim: usize) -> ContiguousCache {
        ContiguousCache { kv_dim, layers: vec![(Vec::new(), Vec::new()); layers] }
    }
}

impl KvCache for ContiguousCache {
    fn store(
        &mut self,
        layer: usize,
        start: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), ExampleError> {
        let (all_keys, all_values) = &mut self.layers[layer];
        for (all, rows) in [(all_keys, keys), (all_values, values)] {
            all.truncate(start * self.kv_dim);
            all.extend_from_slice(rows);
        }
        Ok(())
    }

    fn load(
        &self,
        layer: usize,
        len: usize,
        keys: &mut Vec<f32>,
        values: &mut Vec<f32>,
    ) -> Result<(), ExampleError> {
        let (all_keys, all_values) = &self.layers[layer];
        keys.clear();
        values.clear();
        keys.extend_from_slice(&all_keys[..len * self.kv_dim]);
        values.extend_from_slice(&all_values[..len * self.kv_dim]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::model::{ModelConfig, Rng, Weights};

    /// Chunked prompts, and requests decoded side by side, give bit for bit what whole prompts,
    /// decoded alone, give.
    #[test]
    fn chunks_and_batches_change_no_bit_of_any_logit() {
        let config = ModelConfig { num_hidden_layers: 2, ..ModelConfig::small() };
        let model = Model::new(config.clone(), Weights::random(&config, 3));
        let mut rng = Rng::new(11);
        let mut prompt = |len: usize| (0..len).map(|_| rng.below(1024) as u32).collect::<Vec<u32>>();
        let prompts = [prompt(50), prompt(7), prompt(33)];
        let alone: Vec<_> = prompts.iter().map(|prompt| generate(&model, prompt, 6).unwrap()).collect();

        let new_cache = || ContiguousCache::new(config.num_hidden_layers, config.kv_dim());
        let mut caches = [new_cache(), new_cache(), new_cache()];
        let mut together: Vec<Vec<Sample>> = Vec::new();
        for (prompt, cache) in prompts.iter().zip(&mut caches) {
            let mut last = Vec::new();
            for (i, chunk) in prompt.chunks(13).enumerate() {
                last = model.forward(&mut [Segment { tokens: chunk, start: i * 13, cache }]).unwrap();
            }
            together.push(last);
        }
        for step in 0..5 {
            let tokens: Vec<[u32; 1]> = together.iter().map(|samples| [samples[step].token]).collect();
            let mut batch: Vec<Segment<'_>> = Vec::new();
            for ((tokens, cache), prompt) in tokens.iter().zip(&mut caches).zip(&prompts) {
                batch.push(Segment { tokens, start: prompt.len() + step, cache });
            }
            for (samples, sample) in together.iter_mut().zip(model.forward(&mut batch).unwrap()) {
                samples.push(sample);
            }
        }
        assert_eq!(alone, together);
    }

    #[test]
    fn a_wrong_bit_far_back_in_the_cache_changes_the_digest() {
        let config = ModelConfig { num_hidden_layers: 2, ..ModelConfig::small() };
        let model = Model::new(config.clone(), Weights::random(&config, 3));
        let sample = |flip: bool| {
            let mut cache = ContiguousCache::new(config.num_hidden_layers, config.kv_dim());
            let prompt: Vec<u32> = (0..40).collect();
            model.forward(&mut [Segment { tokens: &prompt, start: 0, cache: &mut cache }]).unwrap();
            if flip {
                cache.layers[0].1[5] += 0.125;
            }
            model.forward(&mut [Segment { tokens: &[9], start: 40, cache: &mut cache }]).unwrap()
        };
        assert_ne!(sample(false)[0].digest, sample(true)[0].digest);
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_an_error() {
        let config = ModelConfig::small();
        let model = Model::new(config.clone(), Weights::random(&config, 3));
        let error = generate(&model, &[1, 1024], 1).unwrap_err();
        assert_eq!(error.to_string(), "token 1024 is out of range: the model knows 1024 tokens");
    }
}
