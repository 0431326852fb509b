//! The running batch of a decode engine: a thread of its own, which computes one token of every request at a time.
//!
//! Requests join between two steps, and leave when they have all their tokens or when nobody listens any more.

use std::sync::Arc;

use kv_examples::model::{Model, Segment};
use kv_examples::paged::PagedKv;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::EngineError;
use super::decode::{Event, FinishReason};
use super::store::Taken;

/// A request whose KV has arrived.
pub struct Running {
    /// The pages of the prompt and of all tokens that the request may get.
    pub taken: Taken,
    /// The tokens of the prompt and those that were generated, of which the last has no KV yet.
    pub tokens: Vec<u32>,
    /// The number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// How many more tokens the request may get.
    pub left: usize,
    /// Hears of each token. It is read as fast as its client reads; what waits in it is bounded by `left`.
    pub events: UnboundedSender<Event>,
}

/// Starts the thread. It ends when the sender is dropped.
pub fn start(model: Arc<Model>, kv: PagedKv) -> UnboundedSender<Running> {
    let (sender, receiver) = unbounded_channel();
    std::thread::spawn(move || run(&model, &kv, receiver));
    sender
}

fn run(model: &Model, kv: &PagedKv, mut joining: UnboundedReceiver<Running>) {
    let mut batch: Vec<Running> = Vec::new();
    loop {
        if batch.is_empty() {
            let Some(running) = joining.blocking_recv() else { return };
            batch.push(running);
        }
        loop {
            match joining.try_recv() {
                Ok(running) => batch.push(running),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return,
            }
        }
        // A client that has hung up, or has a stop string, gets its pages back before they cost another step.
        let eos = &model.config().eos_token_ids;
        for running in batch.extract_if(.., |running| running.events.is_closed()) {
            running.end(eos);
        }
        metrics::gauge!("serve_batch_size").set(batch.len() as f64);
        if batch.is_empty() {
            continue;
        }
        if let Err(error) = step(model, kv, &mut batch) {
            for running in batch.drain(..) {
                let _ = running.events.send(Event::Failed(EngineError::model(&error)));
            }
        }
        for running in batch.extract_if(.., |running| running.is_done(eos)) {
            running.end(eos);
        }
    }
}

/// Generates one more token for every request.
fn step(model: &Model, kv: &PagedKv, batch: &mut [Running]) -> Result<(), kv_examples::error::ExampleError> {
    let mut caches: Vec<_> = batch.iter().map(|running| kv.of(running.taken.numbers())).collect();
    let mut segments: Vec<Segment<'_>> = Vec::with_capacity(batch.len());
    for (running, cache) in batch.iter().zip(&mut caches) {
        let start = running.tokens.len().saturating_sub(1);
        segments.push(Segment { tokens: &running.tokens[start..], start, cache, inputs: &[] });
    }
    let samples = model.forward(&mut segments)?;
    drop(segments);
    drop(caches);
    metrics::counter!("serve_generated_tokens_total").increment(samples.len() as u64);
    for (running, sample) in batch.iter_mut().zip(samples) {
        running.tokens.push(sample.token);
        running.left = running.left.saturating_sub(1);
        // Nobody listens: the request leaves before the next step.
        let _ = running.events.send(Event::Token(sample.token));
    }
    Ok(())
}

impl Running {
    /// True if the request gets no more tokens.
    pub fn is_done(&self, eos: &[u32]) -> bool {
        self.left == 0 || self.tokens.last().is_some_and(|token| eos.contains(token))
    }

    /// Leaves the KV of the request to later turns, and tells the end.
    pub fn end(self, eos: &[u32]) {
        let Running { taken, tokens, prompt_tokens, events, .. } = self;
        let stopped = tokens.last().is_some_and(|token| eos.contains(token));
        // The KV of the last token is not computed.
        if let Some((_, known)) = tokens.split_last() {
            taken.keep(known, prompt_tokens);
        }
        // Before the end is told, so that the next turn finds them.
        drop(taken);
        let _ = events.send(Event::Done(if stopped { FinishReason::Stop } else { FinishReason::Length }));
    }
}
