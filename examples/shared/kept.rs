//! What a decode rank keeps of a chat. The pages wait, under a lease for a fixed time, for the
//! prefill rank that gets the next turn.

use std::collections::VecDeque;
use std::time::Duration;

use kv_transfer::consensus::{RequestKey, SingleRank};
use kv_transfer::params::{RemoteKv, TransferParams};
use kv_transfer::queue::{Outgoing, PrefillConfig, PrefillPolicy, PrefillQueues};
use kv_transfer::{Change, EngineGroup, KvManager, Lease, Pages, Room, SessionOptions, TransferMode};
use serde_json::Value;

use super::dialect::Presence;
use super::rank::RankSpec;

/// How much longer than the lease the session may take to end.
const GRACE: Duration = Duration::from_secs(30);

/// The chats that a decode rank keeps. They are sent like prompts, only that nothing has to
/// be computed: hence the queues of a prefill rank.
pub struct KeptCaches {
    queues: PrefillQueues<(), EngineGroup>,
    manager: EngineGroup,
    /// The kept requests, oldest first. Requests that have ended are dropped from the front.
    order: VecDeque<RequestKey>,
    presence: Presence,
    lease: Lease,
}

impl KeptCaches {
    /// A keeper that keeps nothing yet.
    pub fn new(manager: &EngineGroup, presence: Presence, spec: &RankSpec) -> KeptCaches {
        KeptCaches {
            // Nobody has to be there yet: the next turn may come in minutes.
            queues: PrefillQueues::new(
                manager.clone(),
                SingleRank::default(),
                PrefillConfig::new(PrefillPolicy::Eager),
            ),
            manager: manager.clone(),
            order: VecDeque::new(),
            presence,
            lease: spec.hand_over.kept(),
        }
    }

    /// Keeps the pages of `tokens` tokens, and returns the `kv_transfer_params` for the next turn. If the
    /// worker has no room for another session, the pages come back.
    pub fn keep(&mut self, room: u64, tokens: usize, pages: Pages) -> Result<Value, Pages> {
        let room = Room::Number(room);
        let options = SessionOptions::default().with(|options| {
            options.mode = Some(TransferMode::Pull);
            options.lease = Some(self.lease);
            options.tokens = Some(tokens);
            options.deadline = Some(self.lease.duration() + GRACE);
        });
        let mut outgoing = Outgoing::new(&self.presence.addr, room.clone());
        outgoing.options = options;
        let Ok(key) = self.queues.push((), outgoing) else { return Err(pages) };
        self.order.push_back(key);
        let list = pages.list().clone();
        let lease_refs = self.queues.lease_refs(key).filter(|_| {
            self.queues.pop_waiting(|_, ()| true) == Some(key)
                && self.queues.init(key, pages.len(), None).is_ok()
        });
        let Some(lease_refs) = lease_refs else {
            self.queues.abort(key);
            return Err(pages);
        };
        self.queues.send_chunk(key, pages).map_err(|refused| refused.pages)?;
        // Refused only if the session has failed, which `step` reports.
        let _ = self.queues.finish(key);
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        let (args, addr) = (self.manager.args(), &self.presence.addr);
        let offer = RemoteKv::granted(args, addr, room, tokens, &list, &lease_refs, self.lease);
        // An address that nobody can use: the pages come back when the session has ended.
        let expiry_time = self.presence.expiry_time(self.lease.duration());
        let Ok(offer) = offer.map(|offer| offer.with(|offer| offer.expiry_time = expiry_time)) else {
            self.queues.abort(key);
            return Ok(Value::Null);
        };
        Ok(TransferParams::next_turn(offer).to_value())
    }

    /// Handles changes of sessions. Returns the pages that are free again, whether they were read or not.
    pub fn step(&mut self, changes: &[Change]) -> Vec<Pages> {
        let Ok(()) = self.queues.step(changes.iter().copied());
        let finished = std::iter::from_fn(|| self.queues.drain_finished());
        let free = finished.map(|finished| finished.pages).collect();
        while self.order.front().is_some_and(|key| self.queues.request(*key).is_none()) {
            self.order.pop_front();
        }
        free
    }

    /// Gives up the oldest chat to make room; false if none is left. Its pages come back from
    /// [`step`](Self::step).
    pub fn evict(&mut self) -> bool {
        while let Some(key) = self.order.pop_front() {
            if self.queues.abort(key) {
                return true;
            }
        }
        false
    }

    /// True if the rank keeps no chat.
    pub fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }
}
