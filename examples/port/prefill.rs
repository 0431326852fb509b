//! P's scheduler, as far as the hand-over concerns it. Its sequences are waiting for blocks, running (which here takes
//! one step), cached until D has read their blocks, and then finished.
use std::collections::{BTreeMap, VecDeque};
use std::net::TcpListener;
use std::sync::Arc;

use kv_transfer::allocator::{PageAllocator, RunAllocator};
use kv_transfer::queue::AuxRow;
use kv_transfer::{EngineGroup, PageList, Pages};

use super::Outcome;
use super::adapter::Server;
use super::cache::{self, KvCache};
use super::engine::{Calls, Command, Event, Scheduler, State, now, tell};
use super::plain;

/// A sequence, by its status.
enum Sequence {
    /// Waits for blocks.
    Waiting(Vec<u32>),
    /// Is computed, and is handed over as soon as the worker takes it.
    Running(Vec<u32>, Pages, AuxRow),
    /// Waits for D to read these blocks.
    Cached(Vec<u32>, PageList),
}

/// P's scheduler.
pub struct Prefill {
    server: Server,
    cache: Arc<KvCache>,
    blocks: RunAllocator,
    sequences: BTreeMap<u64, Sequence>,
    waiting: VecDeque<u64>,
    calls: Calls,
}

impl Prefill {
    pub fn new(ranks: EngineGroup, cache: Arc<KvCache>, bootstrap: String, listener: TcpListener) -> Prefill {
        Prefill {
            server: Server::new(ranks, Arc::clone(&cache), bootstrap, listener),
            blocks: RunAllocator::new(cache.blocks),
            cache,
            sequences: BTreeMap::new(),
            waiting: VecDeque::new(),
            calls: Calls::default(),
        }
    }

    /// The KV of a prompt, and its first token. What a cached sequence has in common with the prompt is copied.
    fn compute(&self, prompt: &[u32], pages: &Pages) -> Outcome<AuxRow> {
        let block = self.cache.shape.block;
        let shared = |sequence: &Sequence| match sequence {
            Sequence::Cached(tokens, list) => {
                let equal = tokens.iter().zip(prompt).take_while(|(one, other)| one == other).count();
                Some((equal / block, list.clone()))
            }
            _ => None,
        };
        let best = self.sequences.values().filter_map(shared).max_by_key(|(blocks, _)| *blocks);
        let (hit, from) = best.unwrap_or_default();
        self.cache.copy_blocks(&from, pages, hit)?;
        self.cache.compute(pages, &cache::keys(prompt), hit * block)?;
        let first_token = self.cache.next_token(pages, prompt.len())?;
        let (prompt_tokens, cached_tokens) = (prompt.len() as u32, (hit * block) as u32);
        Ok(AuxRow { first_token, prompt_tokens, cached_tokens, ..AuxRow::default() })
    }
}

impl Scheduler for Prefill {
    fn command(&mut self, command: Command) -> Outcome<()> {
        let Command::PlainSend { prompt } = command else { return Ok(()) };
        let pages = self.blocks.allocate(self.cache.blocks_of(prompt.len())).ok_or("no blocks")?;
        self.compute(&prompt, &pages)?;
        let at = plain::send(&self.cache, &pages, |addr| tell(&Event::Plain { addr }))?;
        tell(&Event::Handed { at });
        Ok(self.blocks.free(pages)?)
    }

    fn step(&mut self) -> Outcome<bool> {
        let (mut busy, block) = (false, self.cache.shape.block);
        let promised = |sequence: &Sequence| match sequence {
            Sequence::Waiting(tokens) => self.cache.blocks_of(tokens.len()),
            _ => 0,
        };
        let promised: usize = self.sequences.values().map(promised).sum();
        let capacity = self.blocks.available().saturating_sub(promised) * block;
        let server = &mut self.server;
        if let Some((id, tokens)) =
            self.calls.time("try_receive_prefill", || server.try_receive_prefill(capacity))
        {
            if self.cache.blocks_of(tokens.len()) > self.blocks.capacity() {
                self.calls.time("refuse", || server.refuse(id));
            }
            self.sequences.insert(id, Sequence::Waiting(tokens));
            self.waiting.push_back(id);
            busy = true;
        }
        for (id, read) in self.calls.time("released", || self.server.released()) {
            busy = true;
            // A sequence that D has given up before it was handed over has its blocks here.
            if let Some(Sequence::Running(_, pages, _)) = self.sequences.remove(&id) {
                self.blocks.free(pages)?;
            }
            self.blocks.free(read)?;
        }
        self.waiting.retain(|id| self.sequences.contains_key(id));
        if let Some(&id) = self.waiting.front()
            && let Some(Sequence::Waiting(prompt)) = self.sequences.get(&id)
            && let Some(pages) = self.blocks.allocate(self.cache.blocks_of(prompt.len()))
        {
            let (first, prompt) = (self.compute(prompt, &pages)?, prompt.clone());
            self.sequences.insert(id, Sequence::Running(prompt, pages, first));
            self.waiting.pop_front();
            busy = true;
        }
        let running =
            |(id, sequence): (&u64, &Sequence)| matches!(sequence, Sequence::Running(..)).then_some(*id);
        for id in self.sequences.iter().filter_map(running).collect::<Vec<_>>() {
            let Some(Sequence::Running(prompt, pages, first)) = self.sequences.remove(&id) else { continue };
            let (list, at) = (pages.list().clone(), now());
            let handed =
                self.calls.time("transfer_kv_cache", || self.server.transfer_kv_cache(id, pages, &first));
            let sequence = match handed {
                Ok(()) => {
                    tell(&Event::Handed { at });
                    Sequence::Cached(prompt, list)
                }
                Err(pages) => Sequence::Running(prompt, pages, first),
            };
            self.sequences.insert(id, sequence);
        }
        Ok(busy)
    }

    fn state(&self) -> State {
        State {
            free_blocks: self.blocks.available(),
            blocks: self.blocks.capacity(),
            lost_blocks: self.blocks.lost().len(),
            open: self.sequences.len(),
            calls: self.calls.clone(),
            ..State::default()
        }
    }
}
