//! The ranks of vLLM engines that this worker writes to: how each is found, checked and reached.
//!
//! ```text
//! needed ─▶ Queued ─ few are asked at once ─▶ Asking ─ metadata fit ─▶ Connecting ─▶ Reached
//! no answer, another engine, a cache that does not fit, a lost way ─▶ forgotten, and those that need the rank fail
//! ```
//!
//! Everybody can name any address in a registration. So an address is dialed only while a session needs it, at most
//! [`MAX_DIALS`] addresses are dialed at once, and nothing is sent there but the question for the metadata.
//!
//! A rank that was reached stays known, because most requests of an engine come from the same engine.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use kv_core::plan::{PlanError, RegionMap, Side};
use kv_core::{Cause, KvArgs, PeerId, SessionId, Time, TransferMode, TransportError};

use crate::cache::{ForeignCache, differs};
use crate::message::{Way, host_port};
use crate::vllm::config::VllmConfig;
use crate::vllm::context::Context;
use crate::vllm::geometry::{CacheError, OwnCache, Place};
use crate::vllm::hash::Compatibility;
use crate::vllm::metadata::{NixlAgentMetadata, answer, question};
use crate::vllm::notification::PushRegistration;

/// Most side channels that are asked at once.
const MAX_DIALS: usize = 32;
/// Most ranks of one engine that one rank writes to.
const MAX_TARGETS: u32 = 64;
/// Most maps of single layers that are kept for one rank.
const MAX_LAYER_MAPS: usize = 256;

/// The number of a rank in the table, never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RankNo(u64);

/// Where a rank is to be found.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    addr: String,
    engine: String,
    tp_size: u32,
    tp_rank: u32,
}

/// All ranks that are known.
#[derive(Debug)]
pub(super) struct Ranks {
    cache: OwnCache,
    compatibility: Compatibility,
    timeout: Duration,
    limit: usize,
    last: u64,
    known: BTreeMap<Key, RankNo>,
    ranks: BTreeMap<RankNo, Rank>,
    peers: BTreeMap<PeerId, RankNo>,
    queue: VecDeque<RankNo>,
    /// When each rank that has not been reached is given up.
    timers: BTreeSet<(Time, RankNo)>,
}

#[derive(Debug)]
struct Rank {
    key: Key,
    state: State,
    users: BTreeSet<SessionId>,
}

#[derive(Debug)]
enum State {
    Queued,
    Asking { channel: PeerId, until: Time },
    Connecting { reached: Box<Reached>, until: Time },
    Reached(Box<Reached>),
}

/// A rank that can be written to.
#[derive(Debug)]
pub(super) struct Reached {
    pub(super) peer: PeerId,
    /// The name of the rank's agent: another one under the same address is another process.
    pub(super) agent: String,
    pub(super) cache: ForeignCache,
    pub(super) map: RegionMap,
    layers: BTreeMap<(u32, u32), RegionMap>,
}

/// What has become of a rank, and the sessions that need the rank: the rank was reached, or is forgotten for this
/// cause. When the sessions know, the next ranks may be [asked](Ranks::dial).
pub(super) type News = (BTreeSet<SessionId>, Result<(), Cause>);

impl Ranks {
    pub(super) fn new(args: &KvArgs, config: &VllmConfig) -> Result<Ranks, CacheError> {
        Ok(Ranks {
            cache: OwnCache::new(args)?,
            compatibility: config.compatibility.clone(),
            timeout: config.timing.handshake_timeout,
            limit: config.limits.max_engines,
            last: 0,
            known: BTreeMap::new(),
            ranks: BTreeMap::new(),
            peers: BTreeMap::new(),
            queue: VecDeque::new(),
            timers: BTreeSet::new(),
        })
    }

    /// The ranks that a receiver with this registration needs this worker to write to.
    pub(super) fn need(
        &mut self,
        cx: &mut Context,
        session: SessionId,
        registration: &PushRegistration,
    ) -> Result<Vec<RankNo>, Cause> {
        let tp_size = registration.decode_tp_size;
        let targets = self.cache.peers(tp_size).map_err(Cause::Incompatible)?;
        if targets.len() > MAX_TARGETS as usize {
            let most = format!("at most {MAX_TARGETS} for each rank here");
            return Err(Cause::Incompatible(differs("decode_tp_size", most, tp_size)));
        }
        let addr = host_port(&registration.decode_host, registration.decode_port);
        let mut needed = Vec::new();
        for tp_rank in targets {
            let engine = registration.decode_engine_id.clone();
            let key = Key { addr: addr.clone(), engine, tp_size, tp_rank };
            match self.one(key) {
                Ok(no) => needed.push(no),
                Err(cause) => {
                    self.leave(cx, session, &needed);
                    return Err(cause);
                }
            }
            if let Some(rank) = needed.last().and_then(|no| self.ranks.get_mut(no)) {
                rank.users.insert(session);
            }
        }
        self.dial(cx);
        Ok(needed)
    }

    fn one(&mut self, key: Key) -> Result<RankNo, Cause> {
        if let Some(no) = self.known.get(&key) {
            return Ok(*no);
        }
        if self.ranks.len() >= self.limit {
            return Err(Cause::TooManyPeers { max: self.limit });
        }
        self.last += 1;
        let no = RankNo(self.last);
        self.known.insert(key.clone(), no);
        self.ranks.insert(no, Rank { key, state: State::Queued, users: BTreeSet::new() });
        self.queue.push_back(no);
        Ok(no)
    }

    /// Asks the side channels of ranks that wait, as many as may be asked at once.
    pub(super) fn dial(&mut self, cx: &mut Context) {
        while self.timers.len() < MAX_DIALS {
            let Some(no) = self.queue.pop_front() else { return };
            let Some(rank) = self.ranks.get_mut(&no) else { continue };
            let channel = cx.effects.connect(&Way::Request { addr: rank.key.addr.clone() });
            cx.effects.say(channel, vec![question(0, rank.key.tp_rank)]);
            let until = cx.now + self.timeout;
            rank.state = State::Asking { channel, until };
            self.peers.insert(channel, no);
            self.timers.insert((until, no));
        }
    }

    /// A session needs these ranks no more. What was not reached and is not needed is forgotten.
    pub(super) fn leave(&mut self, cx: &mut Context, session: SessionId, ranks: &[RankNo]) {
        for no in ranks {
            let Some(rank) = self.ranks.get_mut(no) else { continue };
            rank.users.remove(&session);
            let kept = matches!(rank.state, State::Reached(_)) && self.known.get(&rank.key) == Some(no);
            if rank.users.is_empty() && !kept {
                self.forget(cx, *no);
            }
        }
        self.make_room(cx);
        self.dial(cx);
    }

    /// Forgets ranks that nothing needs while the table is more than half full.
    fn make_room(&mut self, cx: &mut Context) {
        while self.ranks.len() > self.limit.div_ceil(2) {
            let idle = self.ranks.iter().find(|(_, rank)| rank.users.is_empty()).map(|(no, _)| *no);
            let Some(no) = idle else { return };
            self.forget(cx, no);
        }
    }

    /// The next session that needs a rank of this rank's engine asks the side channel again: other processes may
    /// answer there. An engine starts with all its ranks, so none of them is trusted any more.
    pub(super) fn distrust(&mut self, no: RankNo) {
        let Some(rank) = self.ranks.get(&no) else { return };
        if self.known.get(&rank.key) == Some(&no) {
            let (engine, addr) = (rank.key.engine.clone(), rank.key.addr.clone());
            self.known.retain(|key, _| key.engine != engine || key.addr != addr);
        }
    }

    fn forget(&mut self, cx: &mut Context, no: RankNo) -> BTreeSet<SessionId> {
        self.distrust(no);
        let Some(rank) = self.ranks.remove(&no) else { return BTreeSet::new() };
        let (peer, until) = match rank.state {
            State::Queued => (None, None),
            State::Asking { channel, until } => (Some(channel), Some(until)),
            State::Connecting { reached, until } => (Some(reached.peer), Some(until)),
            State::Reached(reached) => (Some(reached.peer), None),
        };
        if let Some(peer) = peer {
            self.peers.remove(&peer);
            cx.effects.disconnect(peer);
        }
        if let Some(until) = until {
            self.timers.remove(&(until, no));
        }
        rank.users
    }

    fn give_up(&mut self, cx: &mut Context, no: RankNo, cause: Cause) -> News {
        (self.forget(cx, no), Err(cause))
    }

    /// True if the rank is not forgotten.
    pub(super) fn has(&self, no: RankNo) -> bool {
        self.ranks.contains_key(&no)
    }

    pub(super) fn reached(&self, no: RankNo) -> Option<&Reached> {
        match &self.ranks.get(&no)?.state {
            State::Reached(reached) => Some(reached),
            _ => None,
        }
    }

    /// The map of these layers to a rank that was reached; `None` for all layers.
    pub(super) fn map(
        &mut self,
        no: RankNo,
        layers: Option<(u32, u32)>,
    ) -> Result<Option<RegionMap>, PlanError> {
        let Some(State::Reached(reached)) = self.ranks.get_mut(&no).map(|rank| &mut rank.state) else {
            return Ok(None);
        };
        let Some((start, end)) = layers else { return Ok(Some(reached.map.clone())) };
        if let Some(map) = reached.layers.get(&(start, end)) {
            return Ok(Some(map.clone()));
        }
        if reached.layers.len() >= MAX_LAYER_MAPS {
            reached.layers.clear();
        }
        let theirs = &reached.cache.geometry;
        let map = RegionMap::layers(&self.cache.geometry, theirs, Side::Local, start..end)?;
        reached.layers.insert((start, end), map.clone());
        Ok(Some(map))
    }

    /// The answer of a side channel. `None` if the peer was not asked.
    pub(super) fn answered(&mut self, cx: &mut Context, peer: PeerId, parts: &[Bytes]) -> Option<News> {
        let no = *self.peers.get(&peer)?;
        let rank = self.ranks.get_mut(&no)?;
        let State::Asking { until, .. } = rank.state else { return None };
        let checked = check(&self.cache, &self.compatibility, &rank.key, parts);
        let (metadata, cache, map) = match checked {
            Ok(checked) => checked,
            Err(cause) => return Some(self.give_up(cx, no, cause)),
        };
        self.peers.remove(&peer);
        cx.effects.disconnect(peer);
        let way = Way::Agent { metadata: metadata.clone(), regions: cache.agent_regions() };
        let peer = cx.effects.connect(&way);
        self.peers.insert(peer, no);
        let agent = agent_name(&metadata).unwrap_or_default().to_owned();
        let reached = Box::new(Reached { peer, agent, cache, map, layers: BTreeMap::new() });
        rank.state = State::Connecting { reached, until };
        Some((BTreeSet::new(), Ok(())))
    }

    /// The way to a peer is open.
    pub(super) fn connected(&mut self, cx: &mut Context, peer: PeerId) -> Option<News> {
        let no = *self.peers.get(&peer)?;
        let rank = self.ranks.get_mut(&no)?;
        match std::mem::replace(&mut rank.state, State::Queued) {
            State::Connecting { reached, until } => {
                cx.effects.permit(reached.peer);
                rank.state = State::Reached(reached);
                self.timers.remove(&(until, no));
                Some((rank.users.clone(), Ok(())))
            }
            state => {
                rank.state = state;
                Some((BTreeSet::new(), Ok(())))
            }
        }
    }

    /// The way to a peer could not be opened, or has ended.
    pub(super) fn lost(
        &mut self,
        cx: &mut Context,
        peer: PeerId,
        error: Option<TransportError>,
    ) -> Option<News> {
        let no = *self.peers.get(&peer)?;
        let cause = error.map_or(Cause::WayLost, Cause::Connect);
        Some(self.give_up(cx, no, cause))
    }

    /// A rank that has not answered in time.
    pub(super) fn overdue(&mut self, cx: &mut Context) -> Option<News> {
        let no = self.timers.first().filter(|(until, _)| *until <= cx.now).map(|(_, no)| *no)?;
        Some(self.give_up(cx, no, Cause::PeerUnresponsive { silent_for: self.timeout }))
    }

    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.timers.first().map(|(at, _)| *at)
    }
}

type Checked = (Bytes, ForeignCache, RegionMap);

/// Compares what a rank tells of itself with what this worker needs: the hash first, as vLLM does, because
/// engines of another version may write other metadata.
fn check(
    ours: &OwnCache,
    compatibility: &Compatibility,
    key: &Key,
    parts: &[Bytes],
) -> Result<Checked, Cause> {
    let damaged = |_| Cause::Protocol("the answer of the side channel is no metadata of vLLM");
    let (payload, _) = answer(parts).map_err(damaged)?;
    compatibility.check(TransferMode::Push, &payload.compatibility_hash).map_err(Cause::Incompatible)?;
    let metadata = NixlAgentMetadata::decode(&payload.agent_metadata_bytes).map_err(damaged)?;
    if metadata.engine_id != key.engine {
        return Err(Cause::Incompatible(differs("engine_id", &key.engine, &metadata.engine_id)));
    }
    let place = Place { tp_size: key.tp_size, tp_rank: key.tp_rank, pp_size: 1, pp_rank: 0, first_layer: 0 };
    let cache = ours.foreign(&metadata, place).map_err(Cause::Incompatible)?;
    ours.check_receiver(&metadata).map_err(Cause::Incompatible)?;
    let map = RegionMap::directed(&ours.geometry, &cache.geometry, Side::Local).map_err(plan_cause)?;
    Ok((metadata.agent_metadata, cache, map))
}

/// The cause of a session that cannot be planned.
pub(super) fn plan_cause(error: PlanError) -> Cause {
    match error {
        PlanError::Incompatible(mismatch) => Cause::Incompatible(mismatch),
        PlanError::PageCount { local, remote } => Cause::PageCount { sent: local, registered: remote },
        PlanError::Pages { side: Side::Local, error } => Cause::BadPages(error),
        PlanError::Pages { .. } => {
            Cause::Protocol("the receiver has registered blocks that its cache does not have")
        }
        _ => Cause::Protocol("the registered blocks do not fit the two caches"),
    }
}

/// The name of the agent with this metadata, as NIXL writes them: `nixlSerDes|Agent`, the length of the name in
/// eight bytes, the name.
fn agent_name(metadata: &[u8]) -> Option<&str> {
    let rest = metadata.strip_prefix(b"nixlSerDes|Agent")?;
    let (len, rest) = rest.split_first_chunk::<8>()?;
    let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
    str::from_utf8(rest.get(..len)?).ok()
}
