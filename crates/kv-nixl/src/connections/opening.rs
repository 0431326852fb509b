//! Opening the way to another transport of this crate.

use kv_core::{MemoryKind, PeerId, TransportError};
use kv_host::Life;
use rustix::event::epoll;

use crate::agent::name::agent_name;
use crate::connections::id::RemoteId;
use crate::connections::remote::{Remote, Stage};
use crate::connections::route::{GpuShare, Route};
use crate::connections::transport_metadata::TransportMetadata;
use crate::notifications::datagrams::PeerSocket;
use crate::notifications::speech::Speech;
use crate::regions::place::Place;
use crate::regions::prepared::Grid;
use crate::transport::NixlTransport;

impl NixlTransport {
    /// The connection to the agent that the metadata describes: a new one, unless there is one already. `None` if the
    /// agent's process has ended.
    pub(crate) fn open(
        &mut self,
        peer: PeerId,
        metadata: TransportMetadata,
        hash: u64,
    ) -> Result<Option<RemoteId>, TransportError> {
        let ours = metadata.token == self.token;
        if ours && self.regions.iter().all(|region| region.kind() != MemoryKind::File) {
            return Err(TransportError::Metadata(
                "the metadata is the transport's own, and the transport has no files",
            ));
        }
        if metadata.backend != self.config.backend {
            return Err(TransportError::Metadata("the peer uses another backend of NIXL"));
        }
        let name = agent_name(metadata.token);
        if let Some(id) = self.names.get(&name)
            && let Some(remote) = self.remotes.get_mut(id)
        {
            if let Stage::Broken(_) = remote.stage {
                return Err(TransportError::PeerGone);
            }
            remote.check_same(hash)?;
            remote.stage = Stage::Open;
            remote.users.push(peer);
            return Ok(Some(*id));
        }
        let id = RemoteId::random()?;
        let life = metadata.process.watch(&metadata.host);
        if life.is_over() {
            return Ok(None);
        }
        let loaded = if ours { name.clone() } else { self.engine.load(&metadata.nixl)? };
        if loaded != name {
            self.engine.forget(&loaded);
            return Err(TransportError::Metadata("NIXL's part describes another agent than the rest"));
        }
        if let Life::Watched(process) = &life {
            // Without it the death is seen later, by an error.
            let data = epoll::EventData::new_u64(id.0);
            let _ = epoll::add(&self.wakes, process, data, epoll::EventFlags::IN);
        }
        let near = matches!(life, Life::Watched(_) | Life::Ours);
        let gpu = [&self.places(), &metadata.regions].map(|places| GpuShare::of(places));
        let route = self.reach.to(metadata.reach, near, gpu);
        // Without one, as where the peer is in another network namespace, all goes by NIXL.
        let socket = (near && self.datagrams.is_some()).then(|| {
            PeerSocket::new(self.token, metadata.token, self.reach.speaks_over_tcp(metadata.reach)).ok()
        });
        let speech = Speech::ours(metadata.token, socket.flatten());
        let slice = (self.config.slice_time, self.config.slice_bytes);
        let mut remote = Remote::new(name.clone(), speech, metadata.regions, life, peer, slice);
        remote.metadata = hash;
        remote.route = if ours { Route::Storage } else { route };
        remote.origin = self.origins.of(&name);
        if !ours {
            remote.lists = self.prepare(&name, &remote.regions);
        }
        self.names.insert(name, id);
        self.remotes.insert(id, remote);
        if !ours {
            self.greet(id);
        }
        Ok(Some(id))
    }

    /// Has NIXL prepare the list of a peer's items, and of this transport's items before the first peer's.
    /// Without lists, requests name addresses.
    pub(crate) fn prepare(&mut self, name: &str, regions: &[Place]) -> Option<Grid> {
        let most = self.config.prepared_items;
        if self.lists.is_none() {
            let places = self.places();
            let grid = Grid::new(&places, most)?;
            self.engine.prepare(None, grid.kind, grid.items(&places)).ok()?;
            self.lists = Some(grid);
        }
        let grid = Grid::new(regions, most)?;
        self.engine.prepare(Some(name), grid.kind, grid.items(regions)).ok()?;
        Some(grid)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use kv_core::{MemoryKind, Transport};

    use super::*;
    use crate::regions::place::Place;
    use crate::testing::{PEER, nixl, pass, worker};

    #[test]
    fn other_metadata_in_the_name_of_a_connected_agent_is_refused() {
        let Some(nixl) = nixl() else { return };
        let ((mut here, _), (there, _)) = (worker(nixl), worker(nixl));
        let genuine = there.metadata().unwrap();
        let mut changed = TransportMetadata::decode(&genuine).unwrap();
        let (addr, len, item_len) = (1 << 20, 1 << 20, 4096);
        changed.regions[0] = Place { addr, len, item_len, kind: MemoryKind::Dram, device: 0 };
        let changed = changed.encode().unwrap();
        here.connect(PEER, &genuine).unwrap();
        let other = PeerId(PEER.0 + 1);
        for peer in [PEER, other] {
            let refused = here.connect(peer, &changed);
            assert!(matches!(refused, Err(TransportError::Metadata(_))), "{peer:?}: {refused:?}");
        }
        assert_eq!(here.connect(other, &genuine), Ok(()));
        assert_eq!(here.connect(PEER, &genuine), Ok(()));
        assert_eq!((here.remotes.len(), here.peers.len()), (1, 2));
        // The agent stays connected under the id that is left.
        here.disconnect(other);
        assert_eq!(here.send(PEER, Bytes::new()), Ok(()));
        pass(&mut [&mut here], Duration::from_millis(20));
        assert_eq!((here.remotes.len(), here.peers.len()), (1, 1));
    }
}
