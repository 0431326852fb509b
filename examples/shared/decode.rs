//! A decode rank: prealloc queue → transfer queue → waiting queue → running batch.
//!
//! Push and pull differ only in the options with which receivers are opened. What the rank keeps of a
//! chat for the next turn is in [`kept`](super::kept).

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use kv_transfer::allocator::RunAllocator;
use kv_transfer::consensus::{RequestKey, SingleRank};
use kv_transfer::params::{Fetch, FetchPolicy, TransferParams};
use kv_transfer::queue::{
    DecodeConfig, DecodeCounts, DecodeQueues, Demand, Incoming, Origin, PushError, PushRefusal, Ready,
};
use kv_transfer::{EngineDraining, EngineGroup, KvManager, OpenError, Pages, Room, SessionOptions, Worker};
use serde_json::Value;

use super::aux::FirstToken;
use super::control::{Accounting, Command, Decoded, Event, NamedError, millis};
use super::error::ExampleError;
use super::kept::KeptCaches;
use super::link::Link;
use super::model::{Model, Sample, Segment};
use super::paged::{self, PagedKv};
use super::phases::{Timelines, WatchedManager};
use super::rank::{IDLE, RETRY, RankSpec, SetUp, close};
use super::recording::Recording;
use super::wire::{Wire, WireLog};

/// Most requests decoded side by side.
const MAX_RUNNING: usize = 32;
/// The number of tokens by which every admitted request may grow before another request is admitted.
pub const RESERVED_TOKENS: u32 = 64;

/// A request on a decode rank.
pub struct Continuation {
    room: u64,
    /// The room under which the side that has the KV knows the request.
    source: Room,
    prompt: Vec<u32>,
    max_new_tokens: usize,
    bootstrap: String,
    options: SessionOptions,
    retractions: u32,
    /// The room under which the chat is kept for the next turn.
    keep_as: Option<u64>,
    /// What the transfer of the request has moved.
    wire: Wire,
    /// The tokens so far. The first token comes from the prefill rank, in the aux row.
    samples: Vec<Sample>,
    /// The first token, if the aux row has it without the digest of its logits.
    told: Option<u32>,
    /// Tokens of the prompt that the prefill rank did not compute.
    cached_tokens: u32,
}

impl Continuation {
    /// Notes the first token, which the prefill rank has computed. Without a digest, and in dialects without aux
    /// rows, the first step of this rank computes the logits of the prompt's last token again.
    pub fn begin_with(&mut self, first: FirstToken) {
        self.cached_tokens = first.cached_tokens;
        match first {
            FirstToken { token, digest: Some(digest), .. } => self.samples.push(Sample { token, digest }),
            FirstToken { token, digest: None, .. } => self.told = Some(token),
        }
    }

    /// The room of the request.
    pub fn room(&self) -> u64 {
        self.room
    }

    /// The token to compute next: the one generated last, or the last token of the prompt.
    fn next_token(&self) -> u32 {
        let last = self.samples.last().map(|sample| sample.token);
        last.or(self.prompt.last().copied()).unwrap_or(0)
    }

    /// Takes what the model has generated. The first token is what the prefill rank has told.
    fn generated(&mut self, sample: Sample) {
        let token = self.told.take().unwrap_or(sample.token);
        self.samples.push(Sample { token, ..sample });
    }
}

/// A request in the running batch.
struct Running {
    key: RequestKey,
    request: Continuation,
    pages: Pages,
    numbers: Vec<u32>,
}

/// A decode rank: its queues, its running batch, and its worker.
pub struct DecodeRank {
    model: Model,
    kv: PagedKv,
    /// Tokens in a page of the prefill ranks.
    peer_page_size: u32,
    workers: Vec<Worker>,
    manager: EngineGroup,
    recording: Recording,
    /// Requests for which the worker had no room yet.
    arrived: VecDeque<Continuation>,
    queues: DecodeQueues<Continuation, WatchedManager<EngineGroup>>,
    timelines: Timelines,
    log: WireLog,
    running: Vec<Running>,
    kept: KeptCaches,
    /// Events that the router has yet to be sent.
    events: Vec<Event>,
    finish_by: Option<Instant>,
    /// True if the router wants the rank to drain; `draining` once no request waits for its session.
    leaves: bool,
    draining: Option<EngineDraining>,
    /// How long the rank waits at the end for pages that are still in a transfer.
    finish_within: Duration,
}

impl DecodeRank {
    /// Starts the rank that `spec` describes.
    pub fn start(spec: &RankSpec) -> Result<DecodeRank, ExampleError> {
        let SetUp { model, kv, workers, manager, presence, log, recording, ready, .. } = SetUp::new(spec)?;
        let timelines = Timelines::default();
        let watched = WatchedManager::new(manager.clone(), timelines.clone());
        let mut config = DecodeConfig::for_args(manager.args());
        config.rule.reserved_tokens = RESERVED_TOKENS;
        Ok(DecodeRank {
            arrived: VecDeque::new(),
            queues: DecodeQueues::new(
                watched,
                SingleRank::default(),
                RunAllocator::new(spec.cache.pages),
                config,
            ),
            timelines,
            log,
            running: Vec::new(),
            peer_page_size: spec.peer_page_size,
            kept: KeptCaches::new(&manager, presence, spec),
            events: vec![ready],
            finish_by: None,
            leaves: false,
            draining: None,
            finish_within: spec.finish_within(),
            model,
            kv,
            workers,
            manager,
            recording,
        })
    }

    /// Serves one router until the router sends the end of requests or disconnects; then stops the worker.
    pub fn run(mut self, mut link: Link) -> Result<(), ExampleError> {
        let result = self.serve(&mut link);
        close(self.workers, result)
    }

    /// The scheduler loop. It blocks only in the model, and while there is nothing to do.
    fn serve(&mut self, link: &mut Link) -> Result<(), ExampleError> {
        loop {
            for command in link.receive()? {
                self.accept(command);
            }
            self.push_arrived();
            self.drain_if_told();
            let mut changes = Vec::new();
            self.manager.drain(|change| changes.push(change));
            let begun = self.timelines.note(&changes);
            self.events.extend(begun.into_iter().filter_map(reading));
            for pages in self.kept.step(&changes) {
                self.queues.release(pages)?;
            }
            let Ok(()) = self.queues.step(changes, &mut self.kv);
            if self.queues.blocked().is_some() {
                // Requests that are here go before those that may come.
                self.kept.evict();
            }
            while let Some(failed) = self.queues.drain_failed() {
                self.tell(failed.request, None, Some(NamedError::from(&failed.error)));
            }
            while self.running.len() < MAX_RUNNING
                && let Some(ready) = self.queues.pop_waiting()
            {
                self.join(ready)?;
            }
            if !self.running.is_empty() {
                self.decode_batch()?;
            }
            for event in self.events.drain(..) {
                link.send(&event)?;
            }
            if self.finished() {
                for event in self.recording.events(&self.workers)? {
                    link.send(&event)?;
                }
                return link.send(&Event::Finished(self.accounting()));
            }
            if self.running.is_empty() {
                let patience = if self.is_idle() && !self.leaves { IDLE } else { RETRY };
                link.wait(&[self.manager.as_fd()], patience)?;
            }
        }
    }

    fn accept(&mut self, command: Command) {
        match command {
            Command::Decode { room, prompt, max_new_tokens, deadline_ms, params, keep_as } => {
                let params = match TransferParams::from_value(&params) {
                    Ok(params) => params,
                    Err(error) => return self.refuse(room, error),
                };
                let Some(remote) = params.remote().filter(|_| !params.is_prefill()) else {
                    return self.refuse(room, "nothing says where its KV comes from");
                };
                let tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
                let policy = FetchPolicy::decode(self.manager.args().geometry().page_tokens())
                    .with(|policy| policy.holder_page_size = Some(self.peer_page_size));
                match remote.fetch(tokens, 0, remote.remaining(None), &policy) {
                    Ok(Fetch::Read { first: 0, .. }) => {}
                    Ok(other) => return self.refuse(room, format_args!("nothing to read: {other:?}")),
                    Err(error) => return self.refuse(room, error),
                }
                let bootstrap = remote.bootstrap_addr();
                // The digits of the router's number may have come as a text.
                let named = remote.room.clone().filter(|other| other.to_string() != room.to_string());
                let source = named.unwrap_or(Room::Number(room));
                let options = remote.reader_options(SessionOptions::default().with(|options| {
                    options.deadline = Some(Duration::from_millis(deadline_ms));
                    options.mode = params.mode;
                    options.tokens = Some(prompt.len());
                }));
                if prompt.is_empty() || max_new_tokens == 0 {
                    return self.refuse(room, "no prompt, or no tokens wanted");
                }
                self.arrived.push_back(Continuation {
                    room,
                    source,
                    prompt,
                    max_new_tokens,
                    bootstrap,
                    options,
                    retractions: 0,
                    keep_as,
                    wire: Wire::default(),
                    samples: Vec::new(),
                    told: None,
                    cached_tokens: 0,
                });
            }
            Command::Prefill { room, .. } | Command::Cancel { room } => {
                self.refuse(room, "this is a decode rank");
            }
            Command::Drain => {
                // Whoever comes back for it computes it again.
                while self.kept.evict() {}
                self.leaves = true;
            }
            Command::Finish => {
                while self.kept.evict() {}
                self.finish_by = Some(Instant::now() + self.finish_within);
            }
        }
    }

    /// Requests open their receivers; they get pages when the handshake is done and some are free.
    fn push_arrived(&mut self) {
        while let Some(request) = self.arrived.pop_front() {
            let max_new_tokens = u32::try_from(request.max_new_tokens).unwrap_or(u32::MAX);
            let demand = Demand::new(self.kv.pages_for(request.prompt.len()), max_new_tokens);
            let bootstrap = request.bootstrap.clone();
            let mut incoming = Incoming::new(&bootstrap, request.source.clone(), demand);
            incoming.options = request.options.clone();
            match self.queues.push(request, incoming) {
                Ok(_) => {}
                Err(PushError {
                    request,
                    reason: PushRefusal::Open(OpenError::Backpressure | OpenError::TooManySessions { .. }),
                }) => return self.arrived.push_front(request),
                Err(refused) => self.refuse(refused.request.room, &refused.reason),
            }
        }
    }

    /// A request enters the running batch. Its prompt needs no forward pass, because its KV has arrived.
    fn join(&mut self, ready: Ready<Continuation>) -> Result<(), ExampleError> {
        let Ready { key, request, pages, origin, .. } = ready;
        let mut running = Running { key, request, numbers: paged::numbers(&pages), pages };
        if origin == Origin::Transferred {
            let opened = self.timelines.opened(&running.request.source);
            running.request.wire = self.log.take(&running.numbers, opened);
        }
        if origin == Origin::Retracted {
            // Its pages were given away when the cache was full; these are new ones.
            let tokens = running.tokens();
            let (_, known) = tokens.split_last().ok_or(ExampleError::Position { position: 0, pages: 0 })?;
            let mut cache = self.kv.of(&running.numbers);
            self.model.forward(&mut [Segment { tokens: known, start: 0, cache: &mut cache, inputs: &[] }])?;
        }
        self.running.push(running);
        self.part_with_the_done()
    }

    /// Generates one more token for every running request.
    fn decode_batch(&mut self) -> Result<(), ExampleError> {
        self.make_room()?;
        let tokens: Vec<[u32; 1]> =
            self.running.iter().map(|running| [running.request.next_token()]).collect();
        let mut caches: Vec<_> = self.running.iter().map(|running| self.kv.of(&running.numbers)).collect();
        let mut batch: Vec<Segment<'_>> = Vec::with_capacity(self.running.len());
        for ((running, tokens), cache) in self.running.iter().zip(&tokens).zip(&mut caches) {
            batch.push(Segment { tokens, start: running.position(), cache, inputs: &[] });
        }
        let samples = self.model.forward(&mut batch)?;
        for (running, sample) in self.running.iter_mut().zip(samples) {
            running.request.generated(sample);
        }
        self.part_with_the_done()
    }

    /// Gives every running request a page for its next token if it needs one. If no page is free, the request
    /// that came last gives its pages back and waits.
    fn make_room(&mut self) -> Result<(), ExampleError> {
        let mut i = 0;
        while i < self.running.len() {
            let running = &mut self.running[i];
            if running.position() < running.numbers.len() * self.kv.page_tokens() {
                i += 1;
                continue;
            }
            match self.queues.allocate(1) {
                Some(page) => {
                    running.numbers.extend(page.list().iter());
                    if let Err(page) = running.pages.append(page) {
                        self.queues.release(page)?;
                        return Err(ExampleError::Position { position: i, pages: 0 });
                    }
                }
                None => self.retract_last()?,
            }
        }
        Ok(())
    }

    fn retract_last(&mut self) -> Result<(), ExampleError> {
        let Some(Running { key, mut request, pages, .. }) = self.running.pop() else { return Ok(()) };
        request.retractions += 1;
        let needed = self.kv.pages_for(request.prompt.len() + request.samples.len());
        match self.queues.retract(key, request, pages, needed) {
            Ok(()) => Ok(()),
            Err(refused) => {
                self.queues.finish(key, refused.pages)?;
                self.tell(refused.request, None, Some(NamedError::new("Refused", &refused.reason)));
                Ok(())
            }
        }
    }

    fn part_with_the_done(&mut self) -> Result<(), ExampleError> {
        let eos = &self.model.config().eos_token_ids;
        let done = |running: &mut Running| {
            let Continuation { samples, max_new_tokens, .. } = &running.request;
            samples.len() >= *max_new_tokens
                || samples.last().is_some_and(|sample| eos.contains(&sample.token))
        };
        let done: Vec<Running> = self.running.extract_if(.., done).collect();
        for mut running in done {
            let params = self.keep(&mut running)?;
            self.queues.finish(running.key, running.pages)?;
            self.tell(running.request, params, None);
        }
        Ok(())
    }

    /// Leaves the pages of a chat that goes on to the next turn.
    fn keep(&mut self, running: &mut Running) -> Result<Option<Value>, ExampleError> {
        let Some(room) = running.request.keep_as else { return Ok(None) };
        // The KV of the last token is not computed, and nor is that of pages that wait for more.
        let tokens = running.position();
        let surplus = running.pages.split_off(self.kv.pages_for(tokens));
        self.queues.release(surplus)?;
        match self.kept.keep(room, tokens, std::mem::take(&mut running.pages)) {
            Ok(params) => Ok(Some(params)),
            Err(pages) => {
                running.pages = pages;
                Ok(None)
            }
        }
    }

    fn tell(&mut self, request: Continuation, params: Option<Value>, error: Option<NamedError>) {
        let Continuation { room, source, samples, retractions, wire, cached_tokens, .. } = request;
        let (bytes, wire_ms) = (wire.bytes, millis(wire.busy));
        let mut decoded = Decoded { room, samples, retractions, bytes, wire_ms, ..Decoded::default() };
        (decoded.cached_tokens, decoded.params, decoded.error) = (cached_tokens, params, error);
        if let Some(timeline) = self.timelines.take(&source) {
            decoded.bootstrap_ms = millis(timeline.bootstrap());
            decoded.prealloc_ms = millis(timeline.prealloc());
            decoded.transfer_ms = millis(timeline.transfer());
        }
        self.events.push(Event::Decoded(decoded));
    }

    fn refuse(&mut self, room: u64, why: impl std::fmt::Display) {
        let error = Some(NamedError::new("Refused", format_args!("room {room}: {why}")));
        self.events.push(Event::Decoded(Decoded { room, error, ..Decoded::default() }));
    }

    /// True if no request is anywhere.
    fn is_idle(&self) -> bool {
        let queued = self.queues.counts() != DecodeCounts::default();
        self.arrived.is_empty() && self.running.is_empty() && self.kept.is_empty() && !queued
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
        let pages = self.queues.accounting();
        Accounting { pages: pages.capacity, free_pages: pages.free }
    }
}

/// The event that tells the router that a transfer has begun.
fn reading(room: Room) -> Option<Event> {
    match room {
        Room::Number(room) => Some(Event::Reading { room }),
        Room::Request(_) => None,
    }
}

impl Running {
    /// All tokens so far: the prompt, and what was generated.
    fn tokens(&self) -> Vec<u32> {
        let generated = self.request.samples.iter().map(|sample| sample.token);
        self.request.prompt.iter().copied().chain(generated).collect()
    }

    /// The position of the token to compute next: the one generated last, or the last one of the prompt.
    fn position(&self) -> usize {
        (self.request.prompt.len() + self.request.samples.len()).saturating_sub(1)
    }
}
