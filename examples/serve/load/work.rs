//! The requests of a load, all drawn from one seed, and the tokens that their answers must have.

use kv_examples::error::ExampleError;
use kv_examples::model::{Model, Rng};
use kv_examples::monolithic;

use super::LoadOptions;

/// Tokens of the beginnings that prompts share, of which there are a few.
const SHARED_TOKENS: usize = 32;
const BEGINNINGS: u64 = 4;

/// The requests of a load.
pub struct Work {
    seed: u64,
    requests: usize,
    hang_ups: u64,
    prompts: Vec<Prompt>,
}

/// A prompt, and what must come after it.
struct Prompt {
    tokens: Vec<u32>,
    expected: Vec<u32>,
}

/// One request.
pub struct Request<'a> {
    /// The tokens of the prompt.
    pub prompt: &'a [u32],
    /// The tokens of the answer.
    pub expected: &'a [u32],
    /// When the client hangs up, if it does.
    pub hang_up: Option<HangUp>,
}

/// When a client hangs up.
#[derive(Debug, Clone, Copy)]
pub enum HangUp {
    /// So many milliseconds after it has sent the request.
    After(u64),
    /// When it has so many tokens.
    With(usize),
}

impl Work {
    /// Draws the prompts, and computes their answers in this process.
    pub fn new(options: &LoadOptions, seed: u64, model: &Model) -> Result<Work, ExampleError> {
        let vocab = model.config().vocab_size as u64;
        let draw =
            |rng: &mut Rng, len: usize| -> Vec<u32> { (0..len).map(|_| rng.below(vocab) as u32).collect() };
        let prompt = |number: u32| {
            let mut rng = Rng::named(seed, &format!("load prompt {number}"));
            let beginning = rng.below(BEGINNINGS);
            let most = options.prompt_tokens as usize;
            let mut tokens = draw(&mut Rng::named(seed, &format!("beginning {beginning}")), SHARED_TOKENS);
            tokens.truncate(most / 2);
            let own = 1 + rng.below((most - tokens.len()) as u64) as usize;
            tokens.extend(draw(&mut rng, own));
            let wanted = 1 + rng.below(u64::from(options.max_tokens)) as usize;
            let samples = monolithic::generate(model, &tokens, &[], wanted)?;
            Ok(Prompt { tokens, expected: samples.iter().map(|sample| sample.token).collect() })
        };
        let prompts = (0..options.prompts).map(prompt).collect::<Result<_, ExampleError>>()?;
        Ok(Work { seed, requests: options.requests as usize, hang_ups: options.hang_ups, prompts })
    }

    /// The request with this number; `None` after the last.
    pub fn request(&self, number: usize) -> Option<Request<'_>> {
        let mut rng = Rng::named(self.seed, &format!("request {number}"));
        let prompt = self.prompts.get(rng.below(self.prompts.len() as u64) as usize);
        let Prompt { tokens, expected } = prompt.filter(|_| number < self.requests)?;
        let hangs_up = rng.below(100) < self.hang_ups;
        let hang_up = match rng.below(2) {
            _ if !hangs_up => None,
            0 => Some(HangUp::After(rng.below(200))),
            _ => Some(HangUp::With(1 + rng.below(expected.len() as u64) as usize)),
        };
        Some(Request { prompt: tokens, expected, hang_up })
    }
}
