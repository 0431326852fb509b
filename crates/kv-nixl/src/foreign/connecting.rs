//! Opening a connection to a foreign agent.

use bytes::Bytes;
use kv_core::{PeerId, TransportError};
use kv_host::Life;

use crate::agent::name::{FORM, is_of_a_transport};
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
    /// The name of this transport's agent, by which foreign agents address the transport.
    pub fn agent_name(&self) -> String {
        self.name.clone()
    }

    /// The metadata of this transport's agent as NIXL writes it (the result of `get_agent_metadata` in
    /// Python), for the side channel of a foreign agent. From the first call on, no memory can be added to
    /// the transport.
    pub fn agent_metadata(&self) -> Result<Bytes, TransportError> {
        self.own_agent_metadata()
    }

    /// Connects a foreign agent whose metadata came through its side channel, and these regions of the
    /// agent's memory, at most [`MAX_REGIONS`](kv_core::MAX_REGIONS). For a connected peer, a second call
    /// with the same metadata and the same regions does nothing.
    ///
    /// After an error the connections are as before, and NIXL has not seen metadata that NIXL would not
    /// write.
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

    /// The oldest notification of a foreign agent that has not been taken. The agent is a connected one, or
    /// one of which only the name is known. `None` while [`foreign_bytes`](crate::NixlConfig::foreign_bytes)
    /// is zero. [`poll`](kv_core::Transport::poll) brings notifications in.
    pub fn next_notification(&mut self) -> Option<RawNotification> {
        self.inbox.take()
    }

    /// The name of a connected peer's agent, under which the peer's notifications are reported; of a
    /// transport of this crate or of a foreign agent.
    pub fn agent_of(&self, peer: PeerId) -> Option<&str> {
        Some(&self.remotes.get(self.peers.get(&peer)?)?.name)
    }

    /// The connection to this agent, if this peer may use a connection that exists.
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
