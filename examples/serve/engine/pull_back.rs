//! The way back: on the next turn of a chat, a prefill engine reads the KV of the answer from the decode engine that
//! has generated it.
//!
//! A decode engine [offers](DecodeEngine::offer) the full pages that it keeps of a prompt, under a lease. The prefill
//! engine reads those that it lacks into its own kept pages. Neither side waits for anything but the transfer: where no
//! page is free, the offer is given up and the prompt computed. So no request that waits for pages can wait for one that
//! holds an offer.

use std::sync::Arc;

use kv_transfer::params::{Fetch, FetchPolicy, KV_RECOMPUTE_THRESHOLD, RemoteKv, TransferParams};
use kv_transfer::{
    AwaitSession, Backpressure, EngineReceiver, KvManager, KvReceiver, KvSender, KvSession, PageList,
    PagePool, Pages, SessionOptions, TransferMode, WorkerRole,
};
use serde_json::Value;

use super::decode::DecodeEngine;
use super::{Engine, EngineError};
use crate::ids;

impl DecodeEngine {
    /// The `kv_transfer_params` with which a prefill engine reads what is kept of answers in these tokens; `None` if
    /// that is less than a transfer is worth, or if requests wait for pages. An offer of which nobody hears ends with
    /// its lease.
    pub async fn offer(self: &Arc<Self>, tokens: Vec<u32>) -> Result<Option<Value>, EngineError> {
        let engine = Arc::clone(self);
        // A task of its own: whoever asks may hang up, and the pages must outlive their session.
        let offered = tokio::spawn(async move { engine.open_offer(&tokens).await });
        offered.await.unwrap_or(Err(EngineError::Stopping))
    }

    async fn open_offer(&self, tokens: &[u32]) -> Result<Option<Value>, EngineError> {
        let Engine { store, spec, manager, .. } = &self.engine;
        // The logits of the last token are wanted, so it is computed in any case.
        let known = tokens.split_last().map_or(tokens, |(_, before)| before);
        let (held, generated) = store.answers(known);
        if generated < KV_RECOMPUTE_THRESHOLD as usize {
            return Ok(None);
        }
        let Some(taken) = store.take_now(&known[..held]) else { return Ok(None) };
        if taken.prefix_pages() < taken.numbers().len() {
            // Some pages were evicted meanwhile.
            return Ok(None);
        }
        let room = ids::of_offer(&known[..held]).map_err(EngineError::model)?;
        let lease = spec.hand_over.lease();
        let options = SessionOptions::default().with(|options| {
            options.deadline = Some(spec.deadline);
            options.mode = Some(TransferMode::Pull);
            options.lease = Some(lease);
            options.tokens = Some(held);
        });
        let mut sender = manager.sender(&spec.bootstrap, room.clone(), &[], options)?;
        // The session only reads the pages, which stay with `taken`.
        let list = PageList::from_pages(taken.numbers().iter().copied()).unwrap_or_default();
        let lender = PagePool::new(spec.cache.pages);
        let mut pages = lender.adopt(list.clone()).unwrap_or_default();
        while sender.init(pages.len(), None).is_err() {
            self.engine.manager.command_room().await;
        }
        while let Err(Backpressure(refused)) = sender.send(pages) {
            pages = refused;
            self.engine.manager.command_room().await;
        }
        let count = u32::try_from(held).unwrap_or(u32::MAX);
        let refs = sender.lease_refs();
        let offer = RemoteKv::granted(manager.args(), &spec.bootstrap, room, count, &list, &refs, lease);
        if offer.is_err() {
            sender.abort();
        }
        tokio::spawn(async move {
            if let Some(reclaimed) = sender.reclaimed().await {
                drop(lender.release(reclaimed.pages));
            }
            drop(taken);
        });
        Ok(Some(TransferParams::next_turn(offer.map_err(EngineError::model)?).to_value()))
    }
}

/// Reads the KV of the first of these tokens from a decode engine that has offered it, and keeps it for the prompt
/// that follows. If the future `gone` is ready before, the session is aborted.
pub async fn read(
    engine: &Engine,
    remote: &RemoteKv,
    tokens: &[u32],
    gone: impl Future<Output = ()>,
) -> Result<(), EngineError> {
    let Some(room) = remote.room.clone() else { return Ok(()) };
    let held = (remote.num_tokens.unwrap_or(0) as usize).min(tokens.len());
    // No aux row comes with the pages that could say whose they are.
    if !ids::is_of_offer(&room, &tokens[..held]) {
        return Err(EngineError::OtherPrompt { room: room.to_string() });
    }
    let options = remote.reader_options(SessionOptions::default().with(|options| {
        options.deadline = Some(engine.spec.deadline);
        options.source = Some(WorkerRole::Decode);
        options.mode = Some(TransferMode::Pull);
        options.tokens = Some(held);
    }));
    let mut receiver = engine.manager.receiver(&remote.bootstrap_addr(), room, options)?;
    let page_tokens = engine.kv.page_tokens();
    let whole = held - held % page_tokens.max(1);
    let taken = engine.store.take_now(&tokens[..whole]);
    let missing = taken.as_ref().map_or(0, |taken| taken.numbers().len() - taken.prefix_pages());
    let policy = FetchPolicy::next_turn(u32::try_from(page_tokens).unwrap_or(u32::MAX));
    // The lease is renewed from now on.
    let policy = policy.with(|policy| policy.expiry_margin = std::time::Duration::ZERO);
    let [all, here] =
        [tokens.len(), whole - missing * page_tokens].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
    let fetch = remote.fetch(all, here, remote.remaining(None), &policy).map_err(EngineError::model);
    let (Some(taken), Ok(Fetch::Read { pages, .. })) = (taken, &fetch) else {
        let_go(engine, receiver).await;
        return fetch.map(drop);
    };
    if *pages != missing {
        let_go(engine, receiver).await;
        return Ok(());
    }
    // The pages stay with `taken`, which outlives the session.
    let list = PageList::from_pages(taken.numbers().iter().copied().skip(taken.prefix_pages()));
    let lender = PagePool::new(engine.spec.cache.pages);
    let mut lent = lender.adopt(list.unwrap_or_default()).unwrap_or_default();
    while let Err(Backpressure(refused)) = receiver.init(lent, None) {
        lent = refused;
        engine.manager.command_room().await;
    }
    let read = tokio::select! {
        read = receiver.finished() => read.map(drop).map_err(EngineError::from),
        () = gone => Err(EngineError::HungUp),
    };
    if read.is_err() {
        receiver.abort();
    }
    match receiver.reclaimed().await {
        Some(reclaimed) => drop(lender.release(reclaimed.pages)),
        // The worker has stopped, and somebody may still write into the pages.
        None => return Err(EngineError::Stopping),
    }
    read?;
    metrics::counter!("serve_pulled_back_tokens_total").increment((missing * page_tokens) as u64);
    taken.keep(&tokens[..whole], whole);
    Ok(())
}

/// Ends a session that has no pages in a way of which the other engine hears at once, so that its pages are free.
pub async fn let_go(engine: &Engine, mut receiver: EngineReceiver) {
    while receiver.init(Pages::none(), None).is_err() {
        engine.manager.command_room().await;
    }
    // Success or failure: the session is over, and so is the other half.
    let _ = receiver.finished().await;
    let _ = receiver.reclaimed().await;
}
