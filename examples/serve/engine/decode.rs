//! A decode engine: each request is a task that takes pages, receives the KV of its prompt, and joins the batch.

use std::sync::Arc;

use kv_transfer::params::{Fetch, FetchPolicy, RemoteKv};
use kv_transfer::queue::aux_tag;
use kv_transfer::{
    AwaitSession, Backpressure, EngineReceiver, KvManager, KvReceiver, KvSession, OpenError, Room,
    SessionOptions, TransferMode,
};
use tokio::sync::mpsc;

use super::batch::{self, Running};
use super::pull_back::let_go;
use super::store::Taken;
use super::{Engine, EngineError};
use crate::ids;

/// A decode engine.
pub struct DecodeEngine {
    /// Model, cache and workers.
    pub engine: Engine,
    batch: mpsc::UnboundedSender<Running>,
}

/// A request whose prompt another engine computes.
pub struct Continue {
    /// The tokens of the prompt, at least one.
    pub tokens: Vec<u32>,
    /// The number of tokens to generate. With 0, the KV of the prompt is given up unread.
    pub max_tokens: usize,
    /// Where the KV is.
    pub remote: Box<RemoteKv>,
    /// The room under which the other engine knows the request.
    pub room: Room,
    /// Which side moves the bytes.
    pub mode: TransferMode,
}

/// What becomes of a request.
#[derive(Debug)]
pub enum Event {
    /// The KV has arrived, except for this many tokens that were here.
    Begun {
        /// The number of tokens that were not moved.
        cached_tokens: usize,
    },
    /// One more token.
    Token(u32),
    /// All tokens were told.
    Done(FinishReason),
    /// There are no more tokens.
    Failed(EngineError),
}

/// Why a request got no more tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model has ended its answer.
    Stop,
    /// The answer has as many tokens as were wanted.
    Length,
}

impl DecodeEngine {
    /// Starts the running batch of an engine.
    pub fn new(engine: Engine) -> Arc<DecodeEngine> {
        let batch = batch::start(Arc::clone(&engine.model), engine.kv.clone());
        Arc::new(DecodeEngine { engine, batch })
    }

    /// Continues a prompt. The last event is [`Event::Done`] or [`Event::Failed`]. If the receiver is dropped before,
    /// the request is aborted: nothing more is moved or computed, and the pages come back on both sides.
    pub fn begin(self: &Arc<Self>, request: Continue) -> mpsc::UnboundedReceiver<Event> {
        let (events, received) = mpsc::unbounded_channel();
        tokio::spawn(Arc::clone(self).run(request, events));
        received
    }

    async fn run(self: Arc<Self>, request: Continue, events: mpsc::UnboundedSender<Event>) {
        let got = match request.max_tokens {
            0 => self.give_up(&request).await.map(|()| None),
            _ => self.receive(&request, &events).await.map(Some),
        };
        let _ = match got {
            Ok(None) => events.send(Event::Done(FinishReason::Length)),
            Err(error) => events.send(Event::Failed(error)),
            Ok(Some((taken, first))) => {
                let cached_tokens = taken.prefix_pages() * self.engine.kv.page_tokens();
                let _ = events.send(Event::Begun { cached_tokens });
                let _ = events.send(Event::Token(first));
                let (mut tokens, left) = (request.tokens, request.max_tokens - 1);
                let prompt_tokens = tokens.len();
                tokens.push(first);
                let running = Running { taken, tokens, prompt_tokens, left, events };
                let eos = &self.engine.model.config().eos_token_ids;
                return match running.is_done(eos) {
                    true => running.end(eos),
                    // Refused only when the process ends.
                    false => drop(self.batch.send(running)),
                };
            }
        };
    }

    /// Gets the KV of a prompt into pages, and the first token.
    async fn receive(
        &self,
        request: &Continue,
        events: &mpsc::UnboundedSender<Event>,
    ) -> Result<(Taken, u32), EngineError> {
        // In pull mode the session is opened at once: its heartbeats renew the lease of the pages while the request
        // waits for pages here. In push mode a session must know how much of the prompt is here when it is opened.
        let opened = match request.mode {
            TransferMode::Pull => Some(self.open(request, 0)?),
            _ => None,
        };
        let (tokens, total) = (&request.tokens, request.tokens.len() + request.max_tokens);
        let taken = tokio::select! {
            taken = self.engine.store.take(tokens, total) => taken,
            () = events.closed() => {
                let_go(&self.engine, match opened {
                    Some(receiver) => receiver,
                    None => self.open(request, 0)?,
                }).await;
                return Err(EngineError::HungUp);
            }
        };
        let mut receiver = match opened {
            Some(receiver) => receiver,
            None => self.open(request, taken.prefix_pages())?,
        };
        self.engine.kv.clear_aux(taken.aux()).map_err(EngineError::model)?;
        let prompt_pages = self.engine.kv.pages_for(tokens.len());
        let mut pages = taken.lend(prompt_pages.saturating_sub(taken.prefix_pages()));
        while let Err(Backpressure(refused)) = receiver.init(pages, Some(taken.aux())) {
            pages = refused;
            self.engine.manager.command_room().await;
        }
        let received = tokio::select! {
            received = receiver.finished() => received.map(drop).map_err(EngineError::from),
            () = events.closed() => Err(EngineError::HungUp),
        };
        if received.is_err() {
            receiver.abort();
        }
        // Nothing comes back if the worker has stopped; the pages are then out for ever, as they must be.
        let reclaimed = receiver.reclaimed().await.ok_or(EngineError::Stopping)?;
        taken.restore(reclaimed.pages);
        received?;
        let first = self.first_token(request, &taken)?;
        Ok((taken, first))
    }

    fn open(&self, request: &Continue, prefix_pages: usize) -> Result<EngineReceiver, OpenError> {
        let options = request.remote.reader_options(SessionOptions::default().with(|options| {
            options.deadline = Some(self.engine.spec.deadline);
            options.mode = Some(request.mode);
            options.tokens = Some(request.tokens.len());
            options.prefix_pages = prefix_pages;
        }));
        self.engine.manager.receiver(&request.remote.bootstrap_addr(), request.room.clone(), options)
    }

    /// Gives up the KV of a request unread.
    async fn give_up(&self, request: &Continue) -> Result<(), EngineError> {
        let_go(&self.engine, self.open(request, 0)?).await;
        Ok(())
    }

    /// The first token of the answer, from the aux row, if the row is that of the request and of its prompt.
    fn first_token(&self, request: &Continue, taken: &Taken) -> Result<u32, EngineError> {
        let kv = &self.engine.kv;
        let row = kv.read_aux(taken.aux()).unwrap_or_default();
        let name = ids::of_row(&request.room, &request.tokens).map_err(EngineError::model)?;
        let (expected, found) = (aux_tag(&name), kv.aux().tag(&row));
        match kv.aux().first(&name, &row) {
            Some(first) if expected == found => Ok(first.token),
            _ => Err(EngineError::OtherRequest { room: request.room.to_string(), expected, found }),
        }
    }
}

/// Why the KV that parameters describe cannot be read, if it cannot.
pub fn refusal(remote: &RemoteKv, tokens: usize, page_tokens: usize) -> Option<String> {
    let page_tokens = u32::try_from(page_tokens).unwrap_or(u32::MAX);
    let policy = FetchPolicy::decode(page_tokens).with(|policy| policy.holder_page_size = Some(page_tokens));
    let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
    match remote.fetch(tokens, 0, remote.remaining(None), &policy) {
        Ok(Fetch::Read { first: 0, .. }) => None,
        Ok(other) => Some(format!("nothing to read: {other:?}")),
        Err(error) => Some(error.to_string()),
    }
}
