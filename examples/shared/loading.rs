//! The model that the examples run: a small one made from a seed, or a checkpoint.

use clap::Args;
use serde::{Deserialize, Serialize};

use super::error::ExampleError;
use super::model::{Model, ModelConfig, Weights};
use super::router::Run;
use super::workload::{self, Chat, Workload};

/// Options that choose the model. Every process of a run must get the same ones.
#[derive(Debug, Clone, Args, Serialize, Deserialize)]
pub struct ModelOptions {
    /// The seed of the model's weights and of the prompts.
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    pub seed: u64,

    /// Use a model with multi-head latent attention (MLA): every tensor-parallel rank holds the whole cache,
    /// which is not divided by heads.
    #[arg(long)]
    pub mla: bool,

    /// Use this checkpoint of the Llama architecture: a directory with config.json, *.safetensors and
    /// tokenizer.json.
    #[cfg(feature = "checkpoint")]
    #[arg(long, value_name = "DIR", conflicts_with = "mla")]
    pub model: Option<std::path::PathBuf>,
}

impl ModelOptions {
    /// Loads the checkpoint, or makes the model from the seed.
    pub fn load(&self) -> Result<Model, ExampleError> {
        #[cfg(feature = "checkpoint")]
        if let Some(dir) = &self.model {
            return Ok(super::checkpoint::load_model(dir)?);
        }
        let config = if self.mla { ModelConfig::small_latent() } else { ModelConfig::small() };
        let weights = Weights::random(&config, self.seed);
        Ok(Model::new(config, weights))
    }

    /// The prompts of a run: random tokens or, for a checkpoint, parts of a text.
    pub fn prompts(&self, model: &Model, workload: Workload) -> Result<Vec<Chat>, ExampleError> {
        #[cfg(feature = "checkpoint")]
        if let Some(dir) = &self.model {
            let tokenizer = super::checkpoint::Tokenizer::load(dir)?;
            let text = tokenizer.encode(workload::TEXT)?;
            return Ok(workload::from_text(self.seed, workload, &text));
        }
        Ok(workload::random(self.seed, workload, model.config().vocab_size))
    }

    /// The text that the decode side has generated for the first prompt; `None` without a tokenizer.
    pub fn first_answer(&self, run: &Run) -> Result<Option<String>, ExampleError> {
        #[cfg(feature = "checkpoint")]
        if let Some(dir) = &self.model
            && let Some(decoded) = run.requests.first().and_then(|request| request.decoded.as_ref())
        {
            let tokens: Vec<u32> = decoded.samples.iter().map(|sample| sample.token).collect();
            return Ok(Some(super::checkpoint::Tokenizer::load(dir)?.decode(&tokens)?));
        }
        let _ = run;
        Ok(None)
    }
}
