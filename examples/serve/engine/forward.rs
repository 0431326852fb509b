//! The forward pass of prompts: a thread of its own, which computes one chunk after the other.

use std::sync::Arc;

use kv_examples::model::{Model, Sample, Segment};
use kv_examples::paged::PagedKv;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::EngineError;
use super::store::Taken;

/// A prompt whose pages wait for their KV.
pub struct Job {
    /// The pages. They stay with the thread until the thread writes them no more.
    pub taken: Arc<Taken>,
    /// The tokens of the prompt.
    pub tokens: Arc<[u32]>,
    /// How many of the tokens have their KV in the pages already.
    pub start: usize,
    /// Hears of each chunk. If nobody listens any more, the rest is not computed.
    pub progress: UnboundedSender<Result<Progress, EngineError>>,
}

/// What is computed of a prompt.
pub struct Progress {
    /// The number of tokens whose KV is in the pages.
    pub computed: usize,
    /// What comes after the last of them.
    pub sample: Option<Sample>,
}

/// Starts the thread. It ends when the sender is dropped. The number of jobs is bounded by the number of requests
/// that have pages.
pub fn start(model: Arc<Model>, kv: PagedKv, chunk_tokens: usize) -> UnboundedSender<Job> {
    let (sender, receiver) = unbounded_channel();
    std::thread::spawn(move || run(&model, &kv, chunk_tokens, receiver));
    sender
}

fn run(model: &Model, kv: &PagedKv, chunk_tokens: usize, mut jobs: UnboundedReceiver<Job>) {
    while let Some(job) = jobs.blocking_recv() {
        let mut computed = job.start;
        while computed < job.tokens.len() && !job.progress.is_closed() {
            let end = job.tokens.len().min(computed + chunk_tokens.max(1));
            let mut cache = kv.of(job.taken.numbers());
            let tokens = &job.tokens[computed..end];
            let mut chunk = [Segment { tokens, start: computed, cache: &mut cache, inputs: &[] }];
            let done = model.forward(&mut chunk);
            metrics::counter!("serve_computed_tokens_total").increment(tokens.len() as u64);
            computed = end;
            let progress = done.map(|samples| Progress { computed, sample: samples.first().copied() });
            let failed = progress.is_err();
            let told = job.progress.send(progress.map_err(EngineError::model));
            if failed || told.is_err() {
                break;
            }
        }
    }
}
