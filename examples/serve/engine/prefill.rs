//! A prefill engine: each prompt is a task that takes pages, has them computed, and hands them over.

use std::sync::Arc;

use kv_examples::aux::row_of;
use kv_transfer::params::{RemoteKv, TransferParams};
use kv_transfer::{
    AwaitSession, Backpressure, EngineSender, KvManager, KvSender, KvSession, PageList, PagePool, Room,
    SessionOptions, TransferMode,
};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use super::forward::{self, Job};
use super::pull_back;
use super::store::Taken;
use super::{Engine, EngineError};
use crate::ids;

/// A prefill engine.
pub struct PrefillEngine {
    /// Model, cache and workers.
    pub engine: Engine,
    forward: mpsc::UnboundedSender<Job>,
}

/// A prompt for a prefill engine.
pub struct Prompt {
    /// The room of the request.
    pub room: Room,
    /// The tokens, at least one.
    pub tokens: Arc<[u32]>,
    /// Which side moves the bytes.
    pub mode: TransferMode,
    /// True if a decode engine has been given the request at the same time, so that it will ask for the pages by
    /// itself.
    pub paired: bool,
    /// What a decode engine keeps of the KV of these tokens.
    pub elsewhere: Option<Box<RemoteKv>>,
}

/// A prompt that was computed.
pub struct Computed {
    /// The `kv_transfer_params` for the decode engine.
    pub params: Value,
    /// The first token of the answer.
    pub first: u32,
    /// How many tokens were not computed, because their KV was here.
    pub cached_tokens: usize,
}

impl PrefillEngine {
    /// Starts the forward pass of an engine.
    pub fn new(engine: Engine) -> Arc<PrefillEngine> {
        let chunk_tokens = engine.spec.chunk_tokens as usize;
        let forward = forward::start(Arc::clone(&engine.model), engine.kv.clone(), chunk_tokens);
        Arc::new(PrefillEngine { engine, forward })
    }

    /// Computes a prompt. Ready when the decode engine can have the pages; they stay until it has them. If the
    /// future is dropped before, the request is aborted: nothing more is computed, and the pages come back.
    pub async fn compute(self: &Arc<Self>, prompt: Prompt) -> Result<Computed, EngineError> {
        let (answer, answered) = oneshot::channel();
        tokio::spawn(Arc::clone(self).run(prompt, answer));
        let (computed, taken) = answered.await.unwrap_or(Err(EngineError::Stopping))?;
        let _ = taken.send(());
        Ok(computed)
    }

    async fn run(self: Arc<Self>, prompt: Prompt, mut answer: Answer) {
        if let Some(remote) = &prompt.elsewhere {
            // Whatever comes of it: what is not read is computed.
            let _ = pull_back::read(&self.engine, remote, &prompt.tokens, answer.closed()).await;
        }
        let options = SessionOptions::default().with(|options| {
            options.deadline = Some(self.engine.spec.deadline);
            options.mode = Some(prompt.mode);
            options.lease = Some(self.engine.spec.hand_over.lease());
            options.tokens = Some(prompt.tokens.len());
        });
        let addr = &self.engine.spec.bootstrap;
        let mut sender = match self.engine.manager.sender(addr, prompt.room.clone(), &[], options) {
            Ok(sender) => sender,
            Err(error) => return drop(answer.send(Err(error.into()))),
        };
        let mut handed = HandedOver::default();
        let computed = tokio::select! {
            () = answer.closed() => Err(EngineError::HungUp),
            computed = self.hand_over(&prompt, &mut sender, &mut handed) => computed,
        };
        let (taken, answer_taken) = oneshot::channel();
        // Dropped with an answer that reaches nobody.
        let _ = answer.send(computed.map(|computed| (computed, taken)));
        if answer_taken.await.is_err() {
            // There is no answer, or nobody has it: nobody will come for the pages.
            sender.abort();
        }
        // The pages are the engine's again when no reader or writer can touch them.
        if let Some(reclaimed) = sender.reclaimed().await {
            drop(handed.lender.map(|lender| lender.release(reclaimed.pages)));
        }
        drop(handed.taken);
    }

    /// Takes pages for the prompt, and gives them to the session as they are computed.
    async fn hand_over(
        &self,
        prompt: &Prompt,
        sender: &mut EngineSender,
        handed: &mut HandedOver,
    ) -> Result<Computed, EngineError> {
        let Engine { store, kv, spec, .. } = &self.engine;
        if prompt.paired {
            // The pages of the decode engine are reserved first. Otherwise prompts here could wait for requests
            // there that wait for prompts here.
            sender.ready().await?;
        }
        let tokens = &prompt.tokens;
        let taken = handed.taken.insert(Arc::new(store.take(tokens, tokens.len()).await));
        let list = PageList::from_pages(taken.numbers().iter().copied()).unwrap_or_default();
        // The session only reads the pages, and others may read those of a prefix at the same time. The real owner
        // of the pages is the store, which keeps them until the session is reclaimed.
        let lender = handed.lender.insert(PagePool::new(spec.cache.pages));
        let mut unsent = lender.adopt(list.clone()).unwrap_or_default();
        let start = taken.prefix_pages() * kv.page_tokens();
        while sender.init(unsent.len(), Some(taken.aux())).is_err() {
            self.engine.manager.command_room().await;
        }
        let (progress, mut chunks) = mpsc::unbounded_channel();
        let job = Job { taken: Arc::clone(taken), tokens: Arc::clone(tokens), start, progress };
        self.forward.send(job).map_err(|_| EngineError::Stopping)?;
        let mut first = None;
        while let Some(chunk) = chunks.recv().await {
            let chunk = chunk?;
            let last = chunk.computed == tokens.len();
            if let Some(sample) = chunk.sample.filter(|_| last) {
                let told = row_of(sample, tokens.len(), start);
                let name = ids::of_row(&prompt.room, tokens).map_err(EngineError::model)?;
                kv.write_aux(taken.aux(), &name, &told).map_err(EngineError::model)?;
                first = Some(sample.token);
            }
            let sent = list.len() - unsent.len();
            let ready = if last { list.len() } else { chunk.computed / kv.page_tokens() };
            let rest = unsent.split_off(ready.saturating_sub(sent));
            let mut pages = std::mem::replace(&mut unsent, rest);
            while let Err(Backpressure(refused)) = sender.send(pages) {
                pages = refused;
                self.engine.manager.command_room().await;
            }
        }
        let first = first.ok_or(EngineError::Stopping)?;
        taken.keep(tokens, tokens.len());
        let (args, lease) = (self.engine.manager.args(), spec.hand_over.lease());
        let (room, count) = (prompt.room.clone(), u32::try_from(tokens.len()).unwrap_or(u32::MAX));
        let kept = RemoteKv::granted(args, &spec.bootstrap, room, count, &list, &sender.lease_refs(), lease)
            .map_err(EngineError::model)?;
        let params = TransferParams::decode(prompt.mode, kept).to_value();
        Ok(Computed { params, first, cached_tokens: start })
    }
}

/// Where the answer to a prompt goes, and with it what is told that it has been taken.
type Answer = oneshot::Sender<Result<(Computed, oneshot::Sender<()>), EngineError>>;

/// What a prompt has lent to its session.
#[derive(Default)]
struct HandedOver {
    taken: Option<Arc<Taken>>,
    lender: Option<PagePool>,
}

#[cfg(test)]
mod tests;
