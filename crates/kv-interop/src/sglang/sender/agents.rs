//! The decode workers that have registered: at most one registration for each agent name.

use std::collections::BTreeMap;

use kv_core::plan::RegionMap;
use kv_core::{Cause, EngineId, PeerId, WorkerId};

use super::foreign::foreign;
use super::pushes::Endpoint;
use crate::cache::ForeignCache;
use crate::effects::Effects;
use crate::message::Way;
use crate::sglang::cache::OurCache;
use crate::sglang::codec::Registration;

/// All registered agents, by name.
#[derive(Debug)]
pub(super) struct Agents {
    agents: BTreeMap<String, Agent>,
    peers: BTreeMap<PeerId, String>,
    max: usize,
    /// Counts registrations and requests.
    clock: u64,
}

/// One registered decode worker.
#[derive(Debug)]
pub(super) struct Agent {
    registration: Registration,
    /// The worker's cache, or why nothing can be written to the worker.
    pub(super) cache: Result<(ForeignCache, RegionMap), Cause>,
    /// The agent's peer, while a way is open.
    way: Option<PeerId>,
    /// When the agent was heard last, by the clock of the table.
    heard: u64,
}

/// What a registration meant.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Registered {
    /// A registration that is known, or the first one of the name.
    Taken,
    /// The agent had registered other memory. The former peer is gone.
    Replaced,
    /// There is no room for another agent.
    Full,
}

impl Agents {
    pub(super) fn new(max: usize) -> Agents {
        Agents { agents: BTreeMap::new(), peers: BTreeMap::new(), max, clock: 0 }
    }

    pub(super) fn get(&self, name: &str) -> Option<&Agent> {
        self.agents.get(name)
    }

    /// Notes that the agent asks for something, so that a full table keeps the agent.
    pub(super) fn hear(&mut self, name: &str) {
        self.clock += 1;
        if let Some(agent) = self.agents.get_mut(name) {
            agent.heard = self.clock;
        }
    }

    /// True if a registered worker has this PULL socket.
    pub(super) fn has_endpoint(&self, endpoint: &Endpoint) -> bool {
        self.agents.values().any(|agent| agent.endpoint() == *endpoint)
    }

    /// Takes a registration. If the table is full, the agent makes room that was heard least recently of those that
    /// are not `used`: a decode rank registers once in its life, and is lost for this worker when it is forgotten.
    pub(super) fn register(
        &mut self,
        effects: &mut Effects,
        ours: &OurCache,
        registration: Registration,
        used: impl Fn(&str) -> bool,
    ) -> Registered {
        let name = registration.agent.clone();
        // A refusal is looked at again, because the transport may have refused for the moment.
        let same = |agent: &Agent| agent.registration == registration && agent.cache.is_ok();
        let known = self.agents.get(&name).map(same);
        if known == Some(true) {
            return Registered::Taken;
        }
        if known.is_none() && self.agents.len() >= self.max {
            let unused = self.agents.iter().filter(|(name, _)| !used(name));
            let unused = unused.min_by_key(|(_, agent)| agent.heard).map(|(name, _)| name.clone());
            let Some(unused) = unused else { return Registered::Full };
            self.remove(effects, &unused);
        }
        self.remove(effects, &name);
        let cache = foreign(ours, &registration).map_err(Cause::Incompatible);
        self.clock += 1;
        self.agents.insert(name, Agent { registration, cache, way: None, heard: self.clock });
        if known.is_some() { Registered::Replaced } else { Registered::Taken }
    }

    /// The peer of an agent, whose way is opened if necessary.
    pub(super) fn open(&mut self, effects: &mut Effects, name: &str) -> Option<PeerId> {
        let agent = self.agents.get_mut(name)?;
        let (cache, _) = agent.cache.as_ref().ok()?;
        if agent.way.is_none() {
            let metadata = agent.registration.metadata.clone();
            let peer = effects.connect(&Way::Agent { metadata, regions: cache.agent_regions() });
            effects.permit(peer);
            agent.way = Some(peer);
            self.peers.insert(peer, name.to_owned());
        }
        agent.way
    }

    /// The agent whose way has ended. The way is opened again for the next request.
    pub(super) fn gone(&mut self, peer: PeerId) -> Option<String> {
        let name = self.peers.remove(&peer)?;
        if let Some(agent) = self.agents.get_mut(&name) {
            agent.way = None;
        }
        Some(name)
    }

    /// The agents with this PULL socket.
    pub(super) fn at(&self, endpoint: &Endpoint) -> Vec<String> {
        let there = self.agents.iter().filter(|(_, agent)| agent.endpoint() == *endpoint);
        there.map(|(name, _)| name.clone()).collect()
    }

    pub(super) fn remove(&mut self, effects: &mut Effects, name: &str) {
        let Some(agent) = self.agents.remove(name) else { return };
        if let Some(peer) = agent.way {
            self.peers.remove(&peer);
            effects.disconnect(peer);
        }
    }

    /// The agent's metadata or memory were refused by the transport.
    pub(super) fn refuse(&mut self, name: &str, cause: Cause) {
        if let Some(agent) = self.agents.get_mut(name) {
            agent.cache = Err(cause);
        }
    }
}

impl Agent {
    pub(super) fn endpoint(&self) -> Endpoint {
        (self.registration.ip.clone(), self.registration.port)
    }

    /// How many pages each region of the worker holds.
    pub(super) fn slots(&self) -> u32 {
        self.registration.slots
    }

    /// The worker's name in errors: its agent's name, and its tensor-parallel rank.
    pub(super) fn worker(&self) -> Option<WorkerId> {
        let engine = EngineId::new(&self.registration.agent).ok()?;
        Some(WorkerId { engine, rank: self.registration.tp_rank })
    }
}
