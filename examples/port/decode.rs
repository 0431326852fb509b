//! D's scheduler, as far as the hand-over concerns it. Its sequences are waiting, transferred to P, running, swapped
//! out to host memory while there are no blocks for them, and finished.
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kv_transfer::allocator::{PageAllocator, RunAllocator};
use kv_transfer::{EngineGroup, Incarnation, Pages};

use super::Outcome;
use super::adapter::{Client, Remote};
use super::cache::{self, KvCache};
use super::engine::{Calls, Command, Event, Scheduler, Spec, State, now, tell};
use super::plain;

/// Shorter prompts are computed here.
const THRESHOLD: usize = 128;

/// A sequence.
struct Sequence {
    id: u64,
    tokens: Vec<u32>,
    prompt: usize,
    answer: usize,
    pages: Pages,
    /// How many positions have their KV in the blocks.
    computed: usize,
    /// The content of the blocks, while the sequence is swapped out: for each layer, of keys and of values.
    swapped: Vec<Vec<u8>>,
    remote: bool,
    cached: u32,
    lost: Option<String>,
    received_at: u64,
}

/// D's scheduler.
pub struct Decode {
    client: Client,
    cache: Arc<KvCache>,
    blocks: RunAllocator,
    check: bool,
    /// How many servers must be there before D says that it is ready.
    servers: Option<usize>,
    waiting: VecDeque<Sequence>,
    transferred: VecDeque<Sequence>,
    running: VecDeque<Sequence>,
    swapped: VecDeque<Sequence>,
    swaps: u64,
    calls: Calls,
}

impl Decode {
    pub fn new(
        spec: &Spec,
        servers: &[String],
        ranks: EngineGroup,
        life: Incarnation,
        cache: Arc<KvCache>,
    ) -> Decode {
        let deadline = Duration::from_millis(spec.deadline_ms);
        Decode {
            client: Client::new(ranks, life, Arc::clone(&cache), servers, deadline),
            blocks: RunAllocator::new(cache.blocks),
            cache,
            check: spec.check,
            servers: Some(servers.len()),
            waiting: VecDeque::new(),
            transferred: VecDeque::new(),
            running: VecDeque::new(),
            swapped: VecDeque::new(),
            swaps: 0,
            calls: Calls::default(),
        }
    }

    /// Waiting sequences go to P, or are computed here: short ones, those that P has no room for, and lost ones.
    fn admit(&mut self) -> Outcome<bool> {
        let Some(mut sequence) = self.waiting.pop_front() else { return Ok(false) };
        let (client, tokens) = (&mut self.client, &sequence.tokens);
        let short = sequence.lost.is_some() || tokens.len() < THRESHOLD;
        if !short && self.calls.time("transfer_prefill", || client.transfer_prefill(sequence.id, tokens)) {
            self.transferred.push_back(sequence);
        } else if let Some(pages) = self.blocks.allocate(self.cache.blocks_of(tokens.len())) {
            sequence.pages = pages;
            self.running.push_back(sequence);
        } else {
            self.waiting.push_front(sequence);
            return Ok(false);
        }
        Ok(true)
    }

    /// Transferred sequences run as soon as their KV is here.
    fn receive(&mut self) -> Outcome<bool> {
        let mut busy = false;
        for _ in 0..self.transferred.len() {
            let Some(mut sequence) = self.transferred.pop_front() else { break };
            let (client, id) = (&mut self.client, sequence.id);
            if !self.calls.time("check_prefill_finished", || client.check_prefill_finished(id)) {
                self.transferred.push_back(sequence);
                continue;
            }
            let blocks = &mut self.blocks;
            match self.calls.time("receive_kv_cache", || client.receive_kv_cache(id, blocks)) {
                Remote::Waiting => self.transferred.push_back(sequence),
                Remote::Lost(cause) => {
                    sequence.lost = Some(cause);
                    self.waiting.push_front(sequence);
                    busy = true;
                }
                Remote::Received(first, pages) => {
                    sequence.received_at = now();
                    if self.check {
                        self.cache.check(&pages, &cache::keys(&sequence.tokens))?;
                    }
                    (sequence.pages, sequence.computed) = (pages, sequence.tokens.len());
                    (sequence.remote, sequence.cached) = (true, first.cached_tokens);
                    sequence.tokens.push(first.first_token);
                    self.running.push_back(sequence);
                    busy = true;
                }
            }
        }
        Ok(busy)
    }

    /// Every running sequence gets its next token.
    fn decode(&mut self) -> Outcome<bool> {
        let busy = !self.running.is_empty();
        for _ in 0..self.running.len() {
            let Some(mut sequence) = self.running.pop_front() else { break };
            if sequence.tokens.len() >= sequence.prompt + sequence.answer {
                self.blocks.free(sequence.pages)?;
                let answer = sequence.tokens.split_off(sequence.prompt);
                let Sequence { id, remote, cached, lost, received_at, .. } = sequence;
                tell(&Event::Done { id, answer, remote, cached, lost, received_at });
                continue;
            }
            if sequence.pages.len() < self.cache.blocks_of(sequence.tokens.len()) {
                let Some(block) = self.blocks.allocate(1) else {
                    self.swap_out(sequence)?;
                    continue;
                };
                sequence.pages.append(block).map_err(|_| "blocks of another cache")?;
            }
            self.cache.compute(&sequence.pages, &cache::keys(&sequence.tokens), sequence.computed)?;
            sequence.computed = sequence.tokens.len();
            sequence.tokens.push(self.cache.next_token(&sequence.pages, sequence.computed)?);
            self.running.push_back(sequence);
        }
        Ok(busy)
    }

    fn swap_out(&mut self, mut sequence: Sequence) -> Outcome<()> {
        for layer in 0..self.cache.shape.layers {
            for part in [0, 1] {
                sequence.swapped.push(self.cache.gather(&sequence.pages, layer, part)?);
            }
        }
        self.blocks.free(std::mem::replace(&mut sequence.pages, Pages::none()))?;
        self.swapped.push_back(sequence);
        self.swaps += 1;
        Ok(())
    }

    /// Swapped sequences come back as soon as there are blocks for them and their next token.
    fn swap_in(&mut self) -> Outcome<bool> {
        let Some(mut sequence) = self.swapped.pop_front() else { return Ok(false) };
        let Some(pages) = self.blocks.allocate(self.cache.blocks_of(sequence.tokens.len())) else {
            self.swapped.push_front(sequence);
            return Ok(false);
        };
        for (number, bytes) in sequence.swapped.drain(..).enumerate() {
            self.cache.scatter(&pages, number / 2, number % 2, &bytes)?;
        }
        sequence.pages = pages;
        self.running.push_back(sequence);
        Ok(true)
    }
}

impl Scheduler for Decode {
    fn command(&mut self, command: Command) -> Outcome<()> {
        match command {
            Command::Request { id, prompt, answer } => self.waiting.push_back(Sequence {
                id,
                prompt: prompt.len(),
                tokens: prompt,
                answer,
                pages: Pages::none(),
                computed: 0,
                swapped: Vec::new(),
                remote: false,
                cached: 0,
                lost: None,
                received_at: 0,
            }),
            Command::PlainReceive { addr, prompt } => {
                let pages = self.blocks.allocate(self.cache.blocks_of(prompt.len())).ok_or("no blocks")?;
                let received_at = plain::receive(&self.cache, &pages, &addr)?;
                self.cache.check(&pages, &cache::keys(&prompt))?;
                self.blocks.free(pages)?;
                let (answer, lost) = (Vec::new(), None);
                tell(&Event::Done { id: 0, answer, remote: true, cached: 0, lost, received_at });
            }
            _ => {}
        }
        Ok(())
    }

    fn step(&mut self) -> Outcome<bool> {
        let (client, blocks) = (&mut self.client, &mut self.blocks);
        self.calls.time("step", || client.step(blocks));
        if self.servers.take_if(|servers| *servers == client.servers()).is_some() {
            tell(&Event::Ready { addr: String::new() });
        }
        let happened = [self.receive()?, self.admit()?, self.swap_in()?, self.decode()?];
        Ok(happened.contains(&true))
    }

    fn state(&self) -> State {
        State {
            free_blocks: self.blocks.available(),
            blocks: self.blocks.capacity(),
            lost_blocks: self.blocks.lost().len(),
            open: self.waiting.len() + self.transferred.len() + self.running.len() + self.swapped.len(),
            swapped: self.swaps,
            calls: self.calls.clone(),
            ..State::default()
        }
    }
}
