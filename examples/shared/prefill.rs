//! A prefill rank: bootstrap queue → waiting queue → forward pass in chunks → inflight queue.
//!
//! Push and pull differ in one place: in pull mode the rank tells the router where the KV is, and the router
//! passes that on to the decode rank.

mod prompt;

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_transfer::allocator::{PageAllocator, RunAllocator};
use kv_transfer::consensus::{RequestKey, SingleRank};
use kv_transfer::params::{RemoteKv, TransferParams};
use kv_transfer::queue::{
    AuxRows, Finished, Outgoing, PrefillConfig, PrefillPolicy, PrefillQueues, PushError, PushRefusal,
};
use kv_transfer::{
    EngineDraining, EngineGroup, EngineReceiver, FinalLayers, KvManager, KvSession, OpenError, PageList,
    Room, SessionOptions, TransferMode, Worker,
};

use super::aux::{AuxForm, row_of};
use super::cli::HandOver;
use super::control::{Accounting, Command, Event, History, NamedError, Prefilled, millis};
use super::dialect::Presence;
use super::error::ExampleError;
use super::heartbeats::Heartbeats;
use super::held::HeldPages;
use super::inputs::Inputs;
use super::link::Link;
use super::model::{Model, Segment};
use super::paged::{self, PagedKv};
use super::pull_back::{PullBack, Way};
use super::rank::{AUX_ROWS, IDLE, RETRY, RankSpec, SetUp, close};
use super::recording::Recording;
use super::wire::WireLog;
use prompt::Prompt;

type Queues = PrefillQueues<Prompt, EngineGroup>;

/// A prefill rank: its queues, its forward pass, and its worker.
pub struct PrefillRank {
    model: Model,
    kv: PagedKv,
    workers: Vec<Worker>,
    manager: EngineGroup,
    log: WireLog,
    heartbeats: Heartbeats,
    held: Option<HeldPages>,
    recording: Recording,
    /// Prompts for which the worker had no room yet.
    arrived: VecDeque<Prompt>,
    queues: Queues,
    /// The keys of all prompts in the queues.
    live: BTreeSet<RequestKey>,
    allocator: RunAllocator,
    aux_rows: AuxRows,
    /// Prompts that have their pages, and wait for the KV of earlier turns.
    fetching: Vec<RequestKey>,
    /// The keys of prompts that may be computed now.
    fetched: VecDeque<RequestKey>,
    /// Sessions that read earlier turns, and whose prompt has ended before them.
    leaving: Vec<PullBack>,
    /// Sessions that only tell a decode rank to let go.
    releases: Vec<EngineReceiver>,
    /// The prompt in the forward pass.
    current: Option<RequestKey>,
    /// The first event that a router is sent.
    ready: Event,
    /// Events that the router has yet to be sent.
    events: Vec<Event>,
    presence: Presence,
    chunk_tokens: usize,
    /// The rows of prompts that are not only text.
    inputs: Inputs,
    /// True if each layer is sent while the next layer is computed.
    layer_wise: bool,
    hand_over: HandOver,
    finish_by: Option<Instant>,
    /// True if the router wants the rank to drain; `draining` once no request waits for its session.
    leaves: bool,
    draining: Option<EngineDraining>,
    /// How long the rank waits at the end for pages that are still in a transfer.
    finish_within: Duration,
}

impl PrefillRank {
    /// Starts the rank that `spec` describes.
    pub fn start(spec: &RankSpec) -> Result<PrefillRank, ExampleError> {
        let SetUp { model, kv, workers, manager, presence, log, heartbeats, recording, ready } =
            SetUp::new(spec)?;
        let held = spec.watch_pages.then(|| HeldPages::watch(manager.clone()));
        Ok(PrefillRank {
            arrived: VecDeque::new(),
            queues: PrefillQueues::new(
                manager.clone(),
                SingleRank::default(),
                PrefillConfig::new(PrefillPolicy::AfterBootstrap),
            ),
            live: BTreeSet::new(),
            allocator: RunAllocator::new(spec.cache.pages),
            aux_rows: AuxRows::new(AUX_ROWS),
            fetching: Vec::new(),
            fetched: VecDeque::new(),
            leaving: Vec::new(),
            releases: Vec::new(),
            current: None,
            ready,
            events: Vec::new(),
            presence,
            chunk_tokens: spec.chunk_tokens as usize,
            inputs: Inputs::default(),
            layer_wise: spec.layer_wise,
            hand_over: spec.hand_over.clone(),
            finish_by: None,
            leaves: false,
            draining: None,
            finish_within: spec.finish_within(),
            model,
            kv,
            workers,
            manager,
            log,
            heartbeats,
            held,
            recording,
        })
    }

    /// The engine as the other side finds it.
    pub fn presence(&self) -> &Presence {
        &self.presence
    }

    /// Computes prompts with the rows that are in `inputs` when the prompts arrive.
    pub fn with_inputs(mut self, inputs: Inputs) -> PrefillRank {
        self.inputs = inputs;
        self
    }

    /// Serves one router until the router sends the end of requests or disconnects; then stops the worker.
    pub fn run(mut self, mut link: Link) -> Result<(), ExampleError> {
        let result = self.serve(&mut link);
        close(self.workers, result)
    }

    /// The scheduler loop. It blocks only in the model, and while there is nothing to do.
    pub fn serve(&mut self, link: &mut Link) -> Result<(), ExampleError> {
        link.send(&self.ready)?;
        loop {
            for command in link.receive()? {
                self.accept(command);
            }
            self.push_arrived();
            self.drain_if_told();
            let mut changes = Vec::new();
            self.manager.drain(|change| changes.push(change));
            let Ok(()) = self.queues.step(changes);
            while let Some(finished) = self.queues.drain_finished() {
                self.end(finished)?;
            }
            self.step_pull_backs()?;
            if self.current.is_none() {
                self.begin_next();
            }
            if let Some(key) = self.current {
                self.compute_chunk(key)?;
            }
            for event in self.events.drain(..) {
                link.send(&event)?;
            }
            if self.finished() {
                self.finish_by = None;
                for event in self.recording.events(&self.workers)? {
                    link.send(&event)?;
                }
                return link.send(&Event::Finished(self.accounting()));
            }
            if self.current.is_none() {
                let patience = if self.is_idle() && !self.leaves { IDLE } else { RETRY };
                link.wait(&[self.manager.as_fd()], patience)?;
            }
        }
    }

    /// Aborts all requests, because their router is gone. Their pages come back in the next
    /// [`serve`](Self::serve).
    pub fn abort_all(&mut self) {
        // Their pull-backs have no pages yet: dropping them ends them.
        self.arrived.clear();
        self.finish_by = None;
        for key in &self.live {
            self.queues.abort(*key);
        }
    }

    fn accept(&mut self, command: Command) {
        match command {
            Command::Prefill { room, prompt: tokens, deadline_ms, params } => {
                let (needed, capacity) = (self.kv.pages_for(tokens.len()), self.allocator.capacity());
                if tokens.is_empty() || needed > capacity {
                    return self
                        .refuse(room, format_args!("{needed} pages are needed, the cache has {capacity}"));
                }
                if let Some(token) =
                    tokens.iter().find(|token| **token as usize >= self.model.config().vocab_size)
                {
                    return self.refuse(room, format_args!("the model does not know token {token}"));
                }
                let params = match TransferParams::from_value(&params) {
                    Ok(params) => params,
                    Err(error) => return self.refuse(room, error),
                };
                // With a history it says how that is fetched, else how this is handed over.
                let mode = params.mode.filter(|_| params.remote().is_none());
                let count = Some(tokens.len());
                let mut prompt = Prompt::new(
                    room,
                    tokens,
                    SessionOptions::default().with(|options| {
                        options.tokens = count;
                        options.deadline = Some(Duration::from_millis(deadline_ms));
                        options.mode = Some(mode.unwrap_or(self.hand_over.mode.into()));
                        options.lease = Some(self.hand_over.lease());
                    }),
                );
                prompt.inputs = self.inputs.take(room);
                if let Some(remote) = params.remote() {
                    self.find_history(&mut prompt, remote);
                }
                self.arrived.push_back(prompt);
            }
            Command::Cancel { room } => self.cancel(room),
            Command::Decode { room, .. } => self.refuse(room, "this is a prefill rank"),
            Command::Drain => self.leaves = true,
            Command::Finish => self.finish_by = Some(Instant::now() + self.finish_within),
        }
    }

    /// Prepares a prompt that is the next turn of a chat: a decode rank has the KV of the turns
    /// before.
    fn find_history(&mut self, prompt: &mut Prompt, remote: &RemoteKv) {
        match PullBack::open(&self.manager, remote, prompt.tokens.len(), &prompt.options) {
            Ok(Way::Pull(pull_back)) => prompt.pull_back = Some(pull_back),
            Ok(Way::Compute(history, release)) => {
                prompt.history = Some(history);
                self.releases.extend(release);
            }
            Err(error) => prompt.history = Some(History::Recomputed { why: error.to_string() }),
        }
    }

    fn cancel(&mut self, room: u64) {
        if let Some(at) = self.arrived.iter().position(|prompt| prompt.room == room) {
            self.arrived.remove(at);
            return self.refuse(room, "its decode rank is gone");
        }
        let of_room =
            |key: &&RequestKey| self.queues.request(**key).is_some_and(|prompt| prompt.room == room);
        if let Some(&key) = self.live.iter().find(of_room) {
            self.queues.abort(key);
        }
    }

    /// Opens senders for prompts that have arrived. The prompts wait until a decode rank has registered pages
    /// for them.
    fn push_arrived(&mut self) {
        while let Some(prompt) = self.arrived.pop_front() {
            let mut outgoing = Outgoing::new(&self.presence.addr, Room::Number(prompt.room));
            outgoing.options = prompt.options.clone();
            match self.queues.push(prompt, outgoing) {
                Ok(key) => {
                    self.live.insert(key);
                }
                Err(PushError {
                    request,
                    reason: PushRefusal::Open(OpenError::Backpressure | OpenError::TooManySessions { .. }),
                }) => return self.arrived.push_front(request),
                Err(refused) => self.refuse(refused.request.room, &refused.reason),
            }
        }
    }

    /// Takes the next prompt that may be computed, if there is room for its KV. In push mode, a decode rank
    /// must be waiting for it.
    fn begin_next(&mut self) {
        self.current = self.fetched.pop_front();
        if self.current.is_some() {
            return;
        }
        let (allocator, aux_rows, kv) = (&mut self.allocator, &mut self.aux_rows, &self.kv);
        let popped = self.queues.pop_waiting(|_, prompt| {
            let has_aux = kv.aux() != AuxForm::Nothing;
            if has_aux && aux_rows.available() == 0 {
                return false;
            }
            let Some(pages) = allocator.allocate(kv.pages_for(prompt.tokens.len())) else {
                return false;
            };
            prompt.pages = paged::numbers(&pages);
            prompt.unsent = pages;
            prompt.aux = if has_aux { aux_rows.take() } else { None };
            true
        });
        let Some(key) = popped else { return };
        let (pages, aux) =
            self.queues.request(key).map_or((0, None), |prompt| (prompt.pages.len(), prompt.aux));
        // Refused only if the request has failed, which `drain_finished` reports.
        if self.queues.init(key, pages, aux).is_err() {
            return;
        }
        let prompt = self.queues.request_mut(key);
        match prompt.and_then(|prompt| Some((prompt.pull_back.as_mut()?, &mut prompt.unsent))) {
            Some((pull_back, pages)) => {
                pull_back.begin(std::mem::take(pages));
                self.fetching.push(key);
            }
            None => self.current = Some(key),
        }
    }

    /// Finds the prompts whose earlier turns have been read, or cannot be read: they may be computed.
    fn step_pull_backs(&mut self) -> Result<(), ExampleError> {
        for key in std::mem::take(&mut self.fetching) {
            let Some(prompt) = self.queues.request_mut(key) else { continue };
            let Some(pull_back) = &mut prompt.pull_back else { continue };
            match pull_back.end() {
                Some((pages, tokens, history)) => {
                    (prompt.unsent, prompt.computed, prompt.history) = (pages, tokens, Some(history));
                    prompt.pull_back = None;
                    self.fetched.push_back(key);
                }
                None => self.fetching.push(key),
            }
        }
        for mut pull_back in std::mem::take(&mut self.leaving) {
            match pull_back.end() {
                Some((pages, ..)) => self.allocator.free(pages)?,
                None => self.leaving.push(pull_back),
            }
        }
        // They were given no page.
        self.releases.retain_mut(|release| release.reclaim().is_none());
        Ok(())
    }

    /// Computes the next tokens of a prompt, and sends the pages that are final with them. Pages of the chunk
    /// before may still be in flight.
    fn compute_chunk(&mut self, key: RequestKey) -> Result<(), ExampleError> {
        if self.queues.failure(key).is_some() {
            self.current = None;
        }
        let Some(prompt) = self.queues.request_mut(key).filter(|_| self.current.is_some()) else {
            self.current = None;
            return Ok(());
        };
        let end = prompt.tokens.len().min(prompt.computed + self.chunk_tokens);
        let last = end == prompt.tokens.len();
        let sent = prompt.pages.len() - prompt.unsent.len();
        // A page is final when its last token is computed, and the last page with the prompt.
        let ready = if last { prompt.pages.len() } else { end / self.kv.page_tokens() };
        let rest = prompt.unsent.split_off(ready - sent);
        let chunk = std::mem::replace(&mut prompt.unsent, rest);
        let (room, of, aux, start) = (prompt.room, prompt.pages.len(), prompt.aux, prompt.computed);
        let (of_prompt, cached) = (prompt.tokens.len(), prompt.cached_tokens());
        let (tokens, pages) = (prompt.tokens[start..end].to_vec(), prompt.pages.clone());
        let inputs = Arc::clone(&prompt.inputs);

        // Given before it is computed: the transfer of each layer overlaps with the computation of the
        // next.
        let begun = match chunk.is_empty() {
            true => None,
            false => match self.queues.begin_chunk(key, chunk) {
                Ok(chunk) => Some(chunk),
                Err(refused) => {
                    // The request has failed: its other pages come with `drain_finished`.
                    self.current = None;
                    self.allocator.free(refused.pages)?;
                    return Ok(());
                }
            },
        };
        let final_layers = |queues: &mut Queues, layers: Range<u32>| {
            if let Some(chunk) = begun.filter(|_| !layers.is_empty()) {
                // Refused only if the request has failed, which `drain_finished` reports.
                let _ = queues.layers_final(key, FinalLayers::new(chunk, layers));
            }
        };
        let layers = self.model.config().num_hidden_layers as u32;
        // With the last layer of the prompt goes the aux row, which is final after it.
        let with_aux = if last { layers - 1 } else { layers };
        let early = if self.layer_wise { with_aux } else { 0 };
        let started = Instant::now();
        let mut cache = self.kv.of(&pages);
        let segment = Segment { tokens: &tokens, start, cache: &mut cache, inputs: &inputs };
        let samples = self.model.forward_by_layer(&mut [segment], |layer| {
            if layer < early {
                final_layers(&mut self.queues, layer..layer + 1);
            }
        })?;
        if let Some(prompt) = self.queues.request_mut(key) {
            prompt.computed = end;
            prompt.compute += started.elapsed();
        }
        if last {
            if let (Some(row), Some(sample)) = (aux, samples.first()) {
                self.kv.write_aux(row, &Room::Number(room), &row_of(*sample, of_prompt, cached))?;
            }
            self.current = None;
        }
        final_layers(&mut self.queues, early..layers);
        if last {
            // Refused only if the request has failed, which `drain_finished` reports.
            let _ = self.queues.finish(key);
            self.answer(key);
        }
        self.events.push(Event::Chunk { room, sent: ready, of });
        Ok(())
    }

    /// Tells the router where the KV of a prompt is, in pull mode.
    fn answer(&mut self, key: RequestKey) {
        let (Some(lease_refs), Some(prompt)) = (self.queues.lease_refs(key), self.queues.request(key)) else {
            return;
        };
        let Some(mode) = prompt.options.mode.filter(|mode| *mode != TransferMode::Push) else { return };
        let (room, tokens) = (prompt.room, u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX));
        let Ok(pages) = PageList::from_pages(prompt.pages.iter().copied()) else { return };
        let (args, lease) = (self.manager.args(), self.hand_over.lease());
        let addr = &self.presence.addr;
        let kept = RemoteKv::granted(args, addr, Room::Number(room), tokens, &pages, &lease_refs, lease);
        match kept {
            Ok(kept) => {
                let params = TransferParams::decode(mode, kept).to_value();
                self.events.push(Event::Answer { room, params });
            }
            // An address that nobody can use: there will be no reader.
            Err(_) => drop(self.queues.abort(key)),
        }
    }

    /// Reports a request that is over, and whose pages no operation can touch any more.
    fn end(&mut self, finished: Finished<Prompt>) -> Result<(), ExampleError> {
        let Finished { key, request, pages, outcome, .. } = finished;
        self.live.remove(&key);
        self.fetched.retain(|other| *other != key);
        if self.current == Some(key) {
            self.current = None;
        }
        let wire = self.log.take(&request.pages, None);
        let last_heard = self.heartbeats.take(&Room::Number(request.room));
        // Those of others may have come back since: then it is later than the truth, never earlier.
        let freed = self.held.as_ref().and_then(HeldPages::last_drop).unwrap_or_else(Instant::now);
        let freed_after = last_heard.map(|heard| freed.saturating_duration_since(heard));
        let freed_after_ms = freed_after.filter(|_| outcome.is_err()).map(millis);
        if let Some(mut pull_back) = request.pull_back {
            pull_back.abort();
            self.leaving.push(*pull_back);
        }
        self.allocator.free(pages)?;
        self.allocator.free(request.unsent)?;
        if let Some(row) = request.aux {
            self.aux_rows.give(row);
        }
        self.events.push(Event::Prefilled(Prefilled {
            room: request.room,
            compute_ms: millis(request.compute),
            bytes: wire.bytes,
            wire_ms: millis(wire.busy),
            history: request.history,
            freed_after_ms,
            error: outcome.err().as_ref().map(NamedError::from),
        }));
        Ok(())
    }

    fn refuse(&mut self, room: u64, why: impl std::fmt::Display) {
        let error = Some(NamedError::new("Refused", format_args!("room {room}: {why}")));
        self.events.push(Event::Prefilled(Prefilled { room, error, ..Prefilled::default() }));
    }

    /// True if no request is anywhere.
    fn is_idle(&self) -> bool {
        let sessions = self.leaving.len() + self.releases.len();
        self.arrived.is_empty() && self.queues.is_empty() && sessions == 0
    }

    /// Drains the ranks once every request that has arrived has its session.
    fn drain_if_told(&mut self) {
        if self.leaves && self.draining.is_none() && self.arrived.is_empty() {
            self.draining = Some(self.manager.begin_drain());
        }
    }

    fn finished(&self) -> bool {
        let drained = self.draining.as_ref().is_some_and(EngineDraining::is_empty) && self.is_idle();
        drained || self.finish_by.is_some_and(|end| self.is_idle() || Instant::now() >= end)
    }

    fn accounting(&self) -> Accounting {
        Accounting { pages: self.allocator.capacity(), free_pages: self.allocator.available() }
    }
}
