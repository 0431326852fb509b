//! One vLLM engine as a receiver knows it: its ranks, its side channel, its clock, and the sessions that need it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use kv_core::plan::RegionMap;
use kv_core::{EngineId, PeerId, SessionId, Time, WorkerId};

use super::super::metadata::NixlAgentMetadata;
use super::lease::EngineClock;
use crate::cache::ForeignCache;

/// The number of an engine here. An engine that was lost and is met again has another number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EngineNo(u64);

/// What a router says of an engine. Two sessions share a handshake if all of this is the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) engine: EngineId,
    /// The side channel, as `host:port`.
    pub(super) addr: String,
    pub(super) tp_size: u32,
    pub(super) pp_size: u32,
    /// True if the engine writes, and its memory is not read.
    pub(super) push: bool,
}

/// How far the handshake has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// The metadata of a rank, by the rank's position, were asked for at `asked`; the answer must come before `until`.
    Asking { rank: usize, asked: Time, until: Time },
    /// The agents are being connected, which must be over before `until`.
    Joining { until: Time },
    /// The next try begins at `until`.
    Resting { until: Time },
    /// All agents are connected.
    Ready,
    /// The side channel is dead, and the agents are tested. The last bytes of an agent arrive within `quiet_after` of
    /// the agent's end.
    Dying { quiet_after: Duration },
    /// The side channel is dead, and all agents have ended.
    Dead,
}

#[derive(Debug)]
pub(super) struct Engine {
    pub(super) key: Key,
    /// How often the engine had registered its memory, as far as parameters have told.
    pub(super) generation: u64,
    pub(super) stage: Stage,
    pub(super) channel: Option<PeerId>,
    pub(super) ranks: Vec<Rank>,
    /// How many tries of the handshake have failed in a row.
    pub(super) tries: u32,
    /// The sessions that have not ended.
    pub(super) users: BTreeSet<SessionId>,
    /// The sessions that have ended and whose pages are not free.
    pub(super) ended: BTreeSet<SessionId>,
    /// Notifications for all ranks that wait for the end of the handshake.
    pub(super) farewells: Vec<Bytes>,
    pub(super) clock: Option<EngineClock>,
    pub(super) last_beat: Option<Time>,
    /// When the last session ended.
    pub(super) idle_since: Time,
    /// True once the engine was lost: no further session gets it.
    pub(super) lost: bool,
}

/// One rank of an engine.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) worker: WorkerId,
    pub(super) pp_rank: u32,
    pub(super) tp_rank: u32,
    pub(super) metadata: Option<NixlAgentMetadata>,
    pub(super) agent: Option<PeerId>,
    pub(super) connected: bool,
    /// True once the way to the connected agent has ended.
    pub(super) ended: bool,
    /// The agent of another process in this rank's place to which a way has ended since the engine was first asked.
    pub(super) forerunner: Option<Bytes>,
    /// Since when reads are in flight and none has ended; `None` while no read is in flight.
    pub(super) silent_since: Option<Time>,
    /// Where the rank's pages are; `None` for a rank from which nothing is read.
    pub(super) pages: Option<(ForeignCache, RegionMap)>,
}

/// Most notifications of one engine that wait for its handshake.
const MAX_FAREWELLS: usize = 4096;

impl Engine {
    /// Keeps a notification until all agents are connected. A notification beyond the bound is dropped: the engine
    /// frees its request when the lease ends.
    pub(super) fn keep(&mut self, farewell: Bytes) {
        if self.farewells.len() < MAX_FAREWELLS {
            self.farewells.push(farewell);
        }
    }

    /// The agents that are connected, and whose way has not ended.
    pub(super) fn agents(&self) -> impl Iterator<Item = PeerId> + '_ {
        self.ranks.iter().filter(|rank| rank.connected && !rank.ended).filter_map(|rank| rank.agent)
    }

    /// True if parameters of pull that name this engine may mean the other one.
    fn has_place_of(&self, other: &Engine) -> bool {
        let place = |engine: &Engine| (engine.key.engine.clone(), engine.key.addr.clone(), engine.generation);
        !self.key.push && !other.key.push && place(self) == place(other)
    }

    /// True if the side channel is dead.
    pub(super) fn is_dead(&self) -> bool {
        matches!(self.stage, Stage::Dying { .. } | Stage::Dead)
    }

    /// True if no session needs the engine.
    pub(super) fn is_idle(&self) -> bool {
        self.users.is_empty() && self.ended.is_empty() && self.farewells.is_empty()
    }
}

/// All engines that a receiver knows.
#[derive(Debug)]
pub(super) struct Engines {
    max: usize,
    last: u64,
    engines: BTreeMap<EngineNo, Engine>,
    /// The engine that a new session gets.
    current: BTreeMap<Key, EngineNo>,
    channels: BTreeMap<PeerId, EngineNo>,
    agents: BTreeMap<PeerId, (EngineNo, usize)>,
    timers: BTreeSet<(Time, EngineNo)>,
    times: BTreeMap<EngineNo, Time>,
}

impl Engines {
    pub(super) fn new(max: usize) -> Engines {
        Engines {
            max,
            last: 0,
            engines: BTreeMap::new(),
            current: BTreeMap::new(),
            channels: BTreeMap::new(),
            agents: BTreeMap::new(),
            timers: BTreeSet::new(),
            times: BTreeMap::new(),
        }
    }

    pub(super) fn max(&self) -> usize {
        self.max
    }

    pub(super) fn is_full(&self) -> bool {
        self.engines.len() >= self.max
    }

    pub(super) fn get(&mut self, no: EngineNo) -> Option<&mut Engine> {
        self.engines.get_mut(&no)
    }

    pub(super) fn current(&self, key: &Key) -> Option<EngineNo> {
        self.current.get(key).copied()
    }

    /// The engine without sessions that has been without them for the longest time.
    pub(super) fn idlest(&self) -> Option<EngineNo> {
        let idle = self.engines.iter().filter(|(_, engine)| engine.is_idle());
        idle.min_by_key(|(_, engine)| engine.idle_since).map(|(no, _)| *no)
    }

    pub(super) fn add(&mut self, key: Key, generation: u64, ranks: Vec<Rank>, now: Time) -> EngineNo {
        self.last += 1;
        let no = EngineNo(self.last);
        self.current.insert(key.clone(), no);
        let engine = Engine {
            key,
            generation,
            stage: Stage::Resting { until: now },
            channel: None,
            ranks,
            tries: 0,
            users: BTreeSet::new(),
            ended: BTreeSet::new(),
            farewells: Vec::new(),
            clock: None,
            last_beat: None,
            idle_since: now,
            lost: false,
        };
        self.engines.insert(no, engine);
        no
    }

    /// No further session gets the engine.
    pub(super) fn give_to_nobody(&mut self, no: EngineNo) {
        let Some(engine) = self.engines.get_mut(&no) else { return };
        engine.lost = true;
        if self.current.get(&engine.key) == Some(&no) {
            self.current.remove(&engine.key);
        }
    }

    /// Forgets the engine, and returns the peers that are to be disconnected.
    pub(super) fn remove(&mut self, no: EngineNo) -> Vec<PeerId> {
        self.give_to_nobody(no);
        self.set_due(no, None);
        for rank in 0..self.engines.get(&no).map_or(0, |engine| engine.ranks.len()) {
            self.way_ends(no, rank);
        }
        let Some(engine) = self.engines.remove(&no) else { return Vec::new() };
        let agents = engine.ranks.iter().filter_map(|rank| rank.agent);
        let peers: Vec<PeerId> = engine.channel.into_iter().chain(agents).collect();
        for peer in &peers {
            self.forget_peer(*peer);
        }
        peers
    }

    pub(super) fn add_channel(&mut self, no: EngineNo, peer: PeerId) {
        self.channels.insert(peer, no);
    }

    pub(super) fn add_agent(&mut self, no: EngineNo, rank: usize, peer: PeerId) {
        self.agents.insert(peer, (no, rank));
    }

    pub(super) fn forget_peer(&mut self, peer: PeerId) {
        self.channels.remove(&peer);
        self.agents.remove(&peer);
    }

    pub(super) fn of_channel(&self, peer: PeerId) -> Option<EngineNo> {
        self.channels.get(&peer).copied()
    }

    pub(super) fn of_agent(&self, peer: PeerId) -> Option<(EngineNo, usize)> {
        self.agents.get(&peer).copied()
    }

    /// The rank with this agent.
    pub(super) fn rank_of(&mut self, agent: PeerId) -> Option<&mut Rank> {
        let (no, rank) = self.of_agent(agent)?;
        self.engines.get_mut(&no)?.ranks.get_mut(rank)
    }

    /// Agents that were met in the place of a rank of an engine, are not known to have ended, and are not this one: the
    /// sessions of the engine may want the pages of either. Lost engines are known for as long as their agents are read.
    pub(super) fn rivals(&self, no: EngineNo, worker: &WorkerId, metadata: &Bytes) -> Vec<PeerId> {
        let Some(engine) = self.engines.get(&no).filter(|engine| !engine.key.push) else { return Vec::new() };
        let others = self.engines.values().filter(|other| other.has_place_of(engine));
        let ranks =
            others.flat_map(|other| &other.ranks).filter(|rank| rank.worker == *worker && !rank.ended);
        let differs =
            |rank: &&Rank| rank.metadata.as_ref().is_some_and(|known| known.agent_metadata != *metadata);
        ranks.filter(differs).filter_map(|rank| rank.agent).collect()
    }

    /// The way to a rank's agent ends. Engines in the same place that are being asked remember the agent: their
    /// sessions were opened before.
    pub(super) fn way_ends(&mut self, no: EngineNo, number: usize) {
        let Some(mut engine) = self.engines.remove(&no) else { return };
        let rank = engine.ranks.get(number).filter(|rank| rank.agent.is_some() && !rank.ended);
        if let Some((worker, known)) = rank.and_then(|rank| Some((&rank.worker, rank.metadata.as_ref()?))) {
            let others = self.engines.values_mut().filter(|other| other.has_place_of(&engine));
            let same = others.flat_map(|other| &mut other.ranks).filter(|other| other.worker == *worker);
            for other in same.filter(|other| !other.connected) {
                other.forerunner = Some(known.agent_metadata.clone());
            }
        }
        if let Some(rank) = engine.ranks.get_mut(number) {
            rank.ended = true;
        }
        self.engines.insert(no, engine);
    }

    pub(super) fn of_peer(&self, peer: PeerId) -> Option<EngineNo> {
        self.of_channel(peer).or_else(|| self.of_agent(peer).map(|(no, _)| no))
    }

    /// When the engine has to be looked at next.
    pub(super) fn set_due(&mut self, no: EngineNo, at: Option<Time>) {
        if let Some(before) = self.times.remove(&no) {
            self.timers.remove(&(before, no));
        }
        if let Some(at) = at {
            self.times.insert(no, at);
            self.timers.insert((at, no));
        }
    }

    pub(super) fn next_due(&self) -> Option<Time> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// The engines for which the time has come.
    pub(super) fn due(&self, now: Time) -> Vec<EngineNo> {
        self.timers.iter().take_while(|(at, _)| *at <= now).map(|(_, no)| *no).collect()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.engines.len()
    }
}

/// How long to rest before the next try, after this many that have failed.
pub(super) fn rest(tries: u32) -> Duration {
    Duration::from_millis(500) * 2_u32.pow(tries.clamp(1, 8) - 1)
}
