//! The run that everything is compared with: one process, one contiguous cache, no transfer.

use super::error::ExampleError;
use super::model::{InputRows, KvCache, Model, ModelConfig, Sample, Segment};

/// Continues `prompt` by at most `max_new_tokens` tokens, with the prompt in one piece and the cache in one
/// piece. `inputs` are the rows of tokens that are no text.
pub fn generate(
    model: &Model,
    prompt: &[u32],
    inputs: &[InputRows],
    max_new_tokens: usize,
) -> Result<Vec<Sample>, ExampleError> {
    let mut cache = ContiguousCache::new(model.config());
    let mut samples = Vec::with_capacity(max_new_tokens);
    let mut position = 0;
    let mut tokens = prompt.to_vec();
    while samples.len() < max_new_tokens {
        let mut batch = [Segment { tokens: &tokens, start: position, cache: &mut cache, inputs }];
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

/// A cache in the memory of one process: one growing list of rows for each layer.
pub struct ContiguousCache {
    /// Elements of a row of keys, and of values.
    widths: [usize; 2],
    layers: Vec<[Vec<f32>; 2]>,
}

impl ContiguousCache {
    /// A cache without tokens.
    pub fn new(config: &ModelConfig) -> ContiguousCache {
        let layers = vec![[Vec::new(), Vec::new()]; config.num_hidden_layers];
        ContiguousCache { widths: [config.key_dim(), config.value_dim()], layers }
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
        for ((all, rows), width) in self.layers[layer].iter_mut().zip([keys, values]).zip(self.widths) {
            all.truncate(start * width);
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
        for ((all, rows), width) in self.layers[layer].iter().zip([keys, values]).zip(self.widths) {
            rows.clear();
            rows.extend_from_slice(&all[..len * width]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Rng, Weights};

    /// Chunked prompts, and requests decoded in one batch, give bit for bit the logits of whole prompts that
    /// are decoded alone.
    #[test]
    fn chunks_and_batches_change_no_bit_of_any_logit() {
        chunks_and_batches(ModelConfig { num_hidden_layers: 2, ..ModelConfig::small() });
        chunks_and_batches(ModelConfig { num_hidden_layers: 2, ..ModelConfig::small_latent() });
    }

    fn chunks_and_batches(config: ModelConfig) {
        let model = Model::new(config.clone(), Weights::random(&config, 3));
        let mut rng = Rng::new(11);
        let mut prompt = |len: usize| (0..len).map(|_| rng.below(1024) as u32).collect::<Vec<u32>>();
        let prompts = [prompt(50), prompt(7), prompt(33)];
        let alone: Vec<_> = prompts.iter().map(|prompt| generate(&model, prompt, &[], 6).unwrap()).collect();

        let new_cache = || ContiguousCache::new(&config);
        let mut caches = [new_cache(), new_cache(), new_cache()];
        let mut together: Vec<Vec<Sample>> = Vec::new();
        for (prompt, cache) in prompts.iter().zip(&mut caches) {
            let mut last = Vec::new();
            for (i, chunk) in prompt.chunks(13).enumerate() {
                last = model
                    .forward(&mut [Segment { tokens: chunk, start: i * 13, cache, inputs: &[] }])
                    .unwrap();
            }
            together.push(last);
        }
        for step in 0..5 {
            let tokens: Vec<[u32; 1]> = together.iter().map(|samples| [samples[step].token]).collect();
            let mut batch: Vec<Segment<'_>> = Vec::new();
            for ((tokens, cache), prompt) in tokens.iter().zip(&mut caches).zip(&prompts) {
                batch.push(Segment { tokens, start: prompt.len() + step, cache, inputs: &[] });
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
            let mut cache = ContiguousCache::new(&config);
            let prompt: Vec<u32> = (0..40).collect();
            model
                .forward(&mut [Segment { tokens: &prompt, start: 0, cache: &mut cache, inputs: &[] }])
                .unwrap();
            if flip {
                cache.layers[0][1][5] += 0.125;
            }
            model.forward(&mut [Segment { tokens: &[9], start: 40, cache: &mut cache, inputs: &[] }]).unwrap()
        };
        assert_ne!(sample(false)[0].digest, sample(true)[0].digest);
    }

    #[test]
    fn rows_that_are_given_stand_for_the_embeddings_of_their_tokens() {
        let config = ModelConfig { num_hidden_layers: 2, ..ModelConfig::small() };
        let weights = Weights::random(&config, 3);
        let embedding = |token: usize| &weights.embed[token * config.hidden_size..][..config.hidden_size];
        let inputs = &[InputRows { start: 2, rows: [embedding(7), embedding(8)].concat() }];
        let model = Model::new(config.clone(), weights.clone());
        let expected = generate(&model, &[1, 2, 7, 8, 5], &[], 4).unwrap();
        assert_eq!(generate(&model, &[1, 2, 0, 0, 5], inputs, 4).unwrap(), expected);
        assert_ne!(generate(&model, &[1, 2, 0, 0, 5], &[], 4).unwrap(), expected);
        // Chunks whose borders cut the rows.
        let mut cache = ContiguousCache::new(&config);
        let mut last = Vec::new();
        for (start, tokens) in [(0, &[1, 2, 0][..]), (3, &[0, 5])] {
            last = model.forward(&mut [Segment { tokens, start, cache: &mut cache, inputs }]).unwrap();
        }
        assert_eq!(last, expected[..1]);
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_an_error() {
        let config = ModelConfig::small();
        let model = Model::new(config.clone(), Weights::random(&config, 3));
        let error = generate(&model, &[1, 1024], &[], 1).unwrap_err();
        assert_eq!(error.to_string(), "token 1024 is out of range: the model knows 1024 tokens");
    }
}
