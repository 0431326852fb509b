//! A decode rank: prealloc queue → transfer queue → waiting queue → running batch.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use kv_transfer::allocator::RunAllocator;
use kv_transfer::consensus::{RequestKey, SingleRank};
use kv_transfer::queue::{
    DecodeConfig, DecodeCounts, DecodeQueues, Demand, Incoming, Origin, PushError, PushRefusal, Ready,
};
use kv_transfer::{KvManager, Manager, OpenError, Pages, Room, SessionOptions, Worker};

use super::control::{Accounting, Command, Decoded, Event, NamedError, millis};
use super::error::ExampleError;
use super::link::Link;
use super::model::{Model, Sample, Segment};
use super::paged::{self, PAGE_TOKENS, PagedKv};
use super::phases::{Timelines, WatchedManager};
use super::rank::{FINISH_WITHIN, IDLE, RETRY, RankSpec, SetUp, close};

/// Most requests decoded side by side.
const MAX_RUNNING: usize = 32;
/// Tokens that every admitted request may grow by before another one is admitted.
pub const RESERVED_TOKENS: u32 = 64;

/// A request on a decode rank.
pub struct Continuation {
    room: u64,
    prompt: Vec<u32>,
    max_new_tokens: usize,
    bootstrap: String,
    options: SessionOptions,
    retractions: u32,
    /// What has been generated; the first comes from the prefill rank, in the aux row.
    pub samples: Vec<Sample>,
}

/// A request in the running batch.
struct Running {
    key: RequestKey,
    request: Continuation,
    pages: Pages,
    numbers: Vec<u32>,
}

/// A decode rank.
pub struct DecodeRank {
    model: Model,
    kv: PagedKv,
    worker: Worker,
    manager: Manager,
    /// Requests for which the worker had no room yet.
    arrived: VecDeque<Continuation>,
    queues: DecodeQueues<Continuation, WatchedManager<Manager>>,
    timelines: Timelines,
    running: Vec<Running>,
    /// What the router has to be told.
    events: Vec<Event>,
    finish_by: Option<Instant>,
}

impl DecodeRank {
    /// Starts the rank that `spec` describes.
    pub fn start(spec: &RankSpec) -> Result<DecodeRank, ExampleError> {
        let SetUp { model, kv, worker, ready, .. } = SetUp::new(spec)?;
        let manager = worker.manager();
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
            running: Vec::new(),
            events: vec![ready],
            finish_by: None,
            model,
            kv,
            worker,
            manager,
        })
    }

    /// Serves one router until that says that no more requests come, or goes away; then stops.
    pub fn run(mut self, mut link: Link) -> Result<(), ExampleError> {
        let result = self.serve(&mut link);
        close(self.worker, result)
    }

    /// The scheduler loop. Nothing in it blocks but the model, and the wait when there is nothing
    /// to do.
    fn serve(&mut self, link: &mut Link) -> Result<(), ExampleError> {
        loop {
            for command in link.receive()? {
                self.accept(command);
            }
            self.push_arrived();
            let mut changes = Vec::new();
            self.manager.poll_set().drain(|change| changes.push(change));
            self.timelines.note(&changes);
            let Ok(()) = self.queues.step(changes, &mut self.kv);
            while let Some(failed) = self.queues.drain_failed() {
                self.tell(failed.request, Some(NamedError::from(&failed.error)));
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
                return link.send(&Event::Finished(self.accounting()));
            }
            if self.running.is_empty() {
                let patience = if self.is_idle() { IDLE } else { RETRY };
                link.wait(self.manager.poll_set(), patience)?;
            }
        }
    }

    fn accept(&mut self, command: Command) {
        match command {
            Command::Decode { room, prompt, max_new_tokens, deadline_ms, bootstrap, prefill_dp_rank } => {
                let options = SessionOptions {
                    deadline: Some(Duration::from_millis(deadline_ms)),
                    prefill_dp_rank: Some(prefill_dp_rank),
                    ..SessionOptions::default()
                };
                if prompt.is_empty() || max_new_tokens == 0 {
                    return self.refuse(room, "no prompt, or no tokens wanted");
                }
                let (samples, retractions) = (Vec::new(), 0);
                self.arrived.push_back(Continuation {
                    room,
                    prompt,
                    max_new_tokens,
                    bootstrap,
                    options,
                    retractions,
                    samples,
                });
            }
            Command::Prefill { room, .. } | Command::Cancel { room } => {
                self.refuse(room, "this is a decode rank");
            }
            Command::Finish => self.finish_by = Some(Instant::now() + FINISH_WITHIN),
        }
    }

    /// Requests open their receivers; they get pages when the handshake is done and some are free.
    fn push_arrived(&mut self) {
        while let Some(request) = self.arrived.pop_front() {
            let demand = Demand {
                pages: PagedKv::pages_for(request.prompt.len()),
                max_new_tokens: u32::try_from(request.max_new_tokens).unwrap_or(u32::MAX),
            };
            let (options, bootstrap) = (request.options.clone(), request.bootstrap.clone());
            let incoming = Incoming::new(&bootstrap, Room::Number(request.room), demand);
            match self.queues.push(request, Incoming { options, ..incoming }) {
                Ok(_) => {}
                Err(PushError {
                    request,
                    reason: PushRefusal::Open(OpenError::Backpressure | OpenError::TooManySessions { .. }),
                }) => return self.arrived.push_front(request),
                Err(refused) => self.refuse(refused.request.room, &refused.reason),
            }
        }
    }

    /// A request enters the running batch: no forward pass for its prompt, its KV is there.
    fn join(&mut self, ready: Ready<Continuation>) -> Result<(), ExampleError> {
        let Ready { key, request, pages, origin } = ready;
        let running = Running { key, request, numbers: paged::numbers(&pages), pages };
        if origin == Origin::Retracted {
            // Its pages were given away when the cache was full; these are new ones.
            let tokens = running.tokens();
            let (_, known) = tokens.split_last().ok_or(ExampleError::Position { position: 0, pages: 0 })?;
            let mut cache = self.kv.of(&running.numbers);
            self.model.forward(&mut [Segment { tokens: known, start: 0, cache: &mut cache }])?;
        }
        self.running.push(running);
        self.part_with_the_done()
    }

    /// One more token for every running request.
    fn decode_batch(&mut self) -> Result<(), ExampleError> {
        self.make_room()?;
        let tokens: Vec<[u32; 1]> = self
            .running
            .iter()
            .map(|running| [running.request.samples.last().map_or(0, |sample| sample.token)])
            .collect();
        let mut caches: Vec<_> = self.running.iter().map(|running| self.kv.of(&running.numbers)).collect();
        let mut batch: Vec<Segment<'_>> = Vec::with_capacity(self.running.len());
        for ((running, tokens), cache) in self.running.iter().zip(&tokens).zip(&mut caches) {
            batch.push(Segment { tokens, start: running.position(), cache });
        }
        let samples = self.model.forward(&mut batch)?;
        for (running, sample) in self.running.iter_mut().zip(samples) {
            running.request.samples.push(sample);
        }
        self.part_with_the_done()
    }

    /// Every running request gets a page for its next token if it needs one. When there are none,
    /// the request that came last gives its pages back and waits.
    fn make_room(&mut self) -> Result<(), ExampleError> {
        let mut i = 0;
        while i < self.running.len() {
            let running = &mut self.running[i];
            if running.position() < running.numbers.len() * PAGE_TOKENS {
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
        let needed = PagedKv::pages_for(request.prompt.len() + request.samples.len());
        match self.queues.retract(key, request, pages, needed) {
            Ok(()) => Ok(()),
            Err(refused) => {
                self.queues.finish(key, refused.pages)?;
                self.tell(refused.request, Some(NamedError::new("Refused", &refused.reason)));
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
        for Running { key, request, pages, .. } in done {
            self.queues.finish(key, pages)?;
            self.tell(request, None);
        }
        Ok(())
    }

    fn tell(&mut self, request: Continuation, error: Option<NamedError>) {
        let Continuation { room, samples, retractions, .. } = request;
        let mut decoded = Decoded { room, samples, retractions, error, ..Decoded::default() };
        if let Some(timeline) = self.timelines.take(&Room::Number(room)) {
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
        self.arrived.is_empty() && self.running.is_empty() && self.queues.counts() == DecodeCounts::default()
    }

    fn finished(&self) -> bool {
        self.finish_by.is_some_and(|end| self.is_idle() || Instant::now() >= end)
    }

    fn accounting(&self) -> Accounting {
        let pages = self.queues.accounting();
        Accounting { pages: pages.capacity, free_pages: pages.free }
    }
}

impl Running {
    /// Everything that has been said so far.
    fn tokens(&self) -> Vec<u32> {
        let generated = self.request.samples.iter().map(|sample| sample.token);
        self.request.prompt.iter().copied().chain(generated).collect()
    }

    /// Where the token generated last goes: its KV is not computed yet.
    fn position(&self) -> usize {
        (self.request.prompt.len() + self.request.samples.len()).saturating_sub(1)
    }
}
