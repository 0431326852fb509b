//! Opening the way to a foreign agent.

use bytes::Bytes;
use kv_core::{PeerId, TransportError};
use kv_host::Life;

use crate::agent::name::{FORM, agent_name, is_of_a_transport};
use crate::connections::id::RemoteId;
use crate::connections::remote::{Remote, Stage};
use crate::foreign::agent_metadata::{AgentMetadata, Digests};
use crate::foreign::error::ForeignError;
use crate::foreign::region::ForeignRegion;
use crate::foreign::registered;
use crate::notifications::inbox::RawNotification;
use crate::notifications::speech::Speech;
use crate::regions::place::Place;
use crate::transport::NixlTransport;

impl NixlTransport {
    /// The name of our agent, which foreign agents address.
    pub fn agent_name(&self) -> String {
        agent_name(self.token)
    }

    /// The metadata of our agent as NIXL writes it (what `get_agent_metadata` returns in Python), for
    /// the side channel of a foreign agent. From the first call on, our memory does not change any more.
    pub fn agent_metadata(&self) -> Result<Bytes, TransportError> {
        self.own_agent_metadata()
    }

    /// Opens the way to a foreign agent whose metadata came through its side channel, to these regions of
    /// its memory, at most [`MAX_REGIONS`](kv_core::MAX_REGIONS). Done again for a connected peer, with the
    /// same metadata and the same regions, this does nothing.
    ///
    /// On an error nothing is connected that was not before, and NIXL has seen nothing of metadata that is not
    /// what NIXL writes.
    pub fn connect_foreign(
        &mut self,
        peer: PeerId,
        metadata: &[u8],
        regions: &[ForeignRegion],
    ) -> Result<(), ForeignError> {
        // As with our own peers: what we registered may be part of what the agent needs.
        self.own_agent_metadata()?;
        let agent = AgentMetadata::parse(metadata)?;
        if is_of_a_transport(agent.name) {
            return Err(ForeignError::Reserved { found: agent.name.to_owned(), reserved: FORM });
        }
        if !agent.backends.contains(&self.config.backend.as_str()) {
            let theirs = agent.backends.iter().map(|backend| (*backend).to_owned()).collect();
            return Err(ForeignError::Backend { ours: self.config.backend.clone(), theirs });
        }
        let places = registered::places(&agent.memory, regions)?;
        if let Some(id) = self.foreign_known(peer, &agent, &places)? {
            self.reopen_foreign(id, peer);
            return Ok(());
        }
        if self.peers.len() >= self.config.max_peers {
            let (got, max) = (self.peers.len() + 1, self.config.max_peers);
            return Err(ForeignError::Size { field: "peers", got, min: 0, max });
        }
        let name = agent.name.to_owned();
        let loaded = self.engine.load(metadata).map_err(|error| {
            // NIXL keeps what it had read before it failed.
            self.engine.forget(&name);
            TransportError::from(error)
        })?;
        if loaded != name {
            self.engine.forget(&loaded);
            return Err(ForeignError::Name { asked: name, found: loaded });
        }
        let speech = Speech::foreign(agent.digests);
        let slice = (self.config.slice_time, self.config.slice_bytes);
        let mut remote = Remote::new(name.clone(), speech, places, Life::Unseen, peer, slice);
        remote.origin = self.origins.of(&name);
        remote.lists = self.prepare(&name, &remote.regions);
        let id = RemoteId::random()?;
        self.names.insert(name, id);
        self.remotes.insert(id, remote);
        self.peers.insert(peer, id);
        self.pace.stir();
        Ok(())
    }

    /// The oldest notification of a foreign agent that has not been taken: of one that is connected, or
    /// of one that we know only by its name. `None` while
    /// [`foreign_bytes`](crate::NixlConfig::foreign_bytes) is zero. [`poll`](kv_core::Transport::poll) brings them in.
    pub fn next_notification(&mut self) -> Option<RawNotification> {
        self.inbox.take()
    }

    /// The name of the agent under which a connected peer's notifications come, ours or foreign.
    pub fn agent_of(&self, peer: PeerId) -> Option<&str> {
        Some(&self.remotes.get(self.peers.get(&peer)?)?.name)
    }

    /// The connection to this agent, if there is one that this peer may use.
    fn foreign_known(
        &self,
        peer: PeerId,
        agent: &AgentMetadata,
        places: &[Place],
    ) -> Result<Option<RemoteId>, ForeignError> {
        let name = agent.name;
        if let Some(remote) = self.peers.get(&peer).and_then(|id| self.remotes.get(id))
            && remote.name != name
        {
            return Err(ForeignError::Name { asked: remote.name.clone(), found: name.to_owned() });
        }
        let Some(id) = self.names.get(name) else { return Ok(None) };
        let Some(remote) = self.remotes.get(id) else { return Ok(None) };
        if let Stage::Broken(_) = remote.stage {
            return Err(ForeignError::Transport(TransportError::PeerGone));
        }
        if let Speech::Foreign(known) = &remote.speech {
            same_life(name, known.digests, agent.digests)?;
        }
        same_regions(name, &remote.regions, places)?;
        Ok(Some(*id))
    }

    fn reopen_foreign(&mut self, id: RemoteId, peer: PeerId) {
        let Some(remote) = self.remotes.get_mut(&id) else { return };
        remote.stage = Stage::Open;
        if !remote.users.contains(&peer) {
            remote.users.push(peer);
        }
        self.peers.insert(peer, id);
        self.pace.stir();
    }
}

/// Checks that the metadata of an agent is what it was when the agent was connected.
fn same_life(name: &str, connected: Digests, found: Digests) -> Result<(), ForeignError> {
    let name = || name.to_owned();
    if connected.addresses != found.addresses {
        let (connected, found) = (connected.addresses, found.addresses);
        return Err(ForeignError::Restarted { name: name(), connected, found });
    }
    if connected.registrations != found.registrations {
        let (connected, found) = (connected.registrations, found.registrations);
        return Err(ForeignError::Reregistered { name: name(), connected, found });
    }
    Ok(())
}

fn same_regions(name: &str, connected: &[Place], asked: &[Place]) -> Result<(), ForeignError> {
    let most = connected.len().max(asked.len());
    let Some(region) = (0..most).find(|&region| connected.get(region) != asked.get(region)) else {
        return Ok(());
    };
    let [connected, asked] = [connected, asked].map(|places| places.get(region).map(ForeignRegion::of));
    Err(ForeignError::Differs { name: name.to_owned(), region, connected, asked })
}
