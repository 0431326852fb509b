//! The transport's side of the contract of the [`Transport`] trait.

use std::hash::BuildHasher;
use std::mem;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{
    Directions, MemoryKind, Op, Origin, PeerId, Post, PostId, Region, Time, Transport, TransportError,
    TransportEvent, TransportWait, WayEnd, WriteFence,
};
use kv_host::check;

use crate::agent::name::agent_name;
use crate::connections::id::RemoteId;
use crate::connections::remote::{Remote, Stage};
use crate::connections::route::{NO_GPU, NO_READS, Route};
use crate::connections::transport_metadata::TransportMetadata;
use crate::ffi::memory::Memory;
use crate::regions::storage;
use crate::transfers::transfer::{self, Transfer};
use crate::transport::NixlTransport;

/// How long a dropped transport waits for its requests.
const FAREWELL: Duration = Duration::from_secs(2);

impl Transport for NixlTransport {
    fn name(&self) -> &'static str {
        "nixl"
    }

    fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        let number = self.frozen.next_region(self.regions.len())?;
        let part = |memory: &Memory| memory.part(region.memory, region.device, region.addr, region.len);
        let memory = self.memories.iter().find_map(part).ok_or(TransportError::UnknownMemory {
            region: number,
            addr: region.addr,
            len: region.len,
        })?;
        self.engine.register(&memory)?;
        self.regions.push(memory);
        self.item_lens.push(region.item_len);
        Ok(())
    }

    fn directions(&self, peer: Option<PeerId>) -> Directions {
        let known = peer.and_then(|peer| self.route(peer));
        known.unwrap_or_else(|| self.reach.to_anybody()).directions()
    }

    fn metadata(&self) -> Result<Bytes, TransportError> {
        let (nixl, process) = (self.own_agent_metadata()?, self.process);
        TransportMetadata::new(self.token, &self.config.backend, process, self.reach, self.places(), nixl)
            .encode()
    }

    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError> {
        // What we registered is part of what the peer may need; it cannot change from now on.
        self.own_agent_metadata()?;
        let hash = self.same.hash_one(metadata);
        let metadata = TransportMetadata::decode(metadata)?;
        if let Some(remote) = self.peers.get(&peer).and_then(|id| self.remotes.get(id)) {
            return if remote.is_open() && remote.name == agent_name(metadata.token) {
                remote.check_same(hash)
            } else {
                Err(TransportError::Unsupported(
                    "the id is that of a connected peer, which has another agent",
                ))
            };
        }
        if self.peers.len() >= self.config.max_peers {
            return Err(TransportError::WouldBlock);
        }
        self.pace.stir();
        let Some(id) = self.open(peer, metadata, hash)? else {
            let end = WayEnd::Dead { quiet_after: Duration::ZERO };
            self.events.push(TransportEvent::PeerGone { peer, end });
            return Ok(());
        };
        self.peers.insert(peer, id);
        self.confirm_arrivals_to(id);
        Ok(())
    }

    fn may_speak_for(&self, from: Origin, metadata: &[u8]) -> bool {
        let Ok(metadata) = TransportMetadata::decode(metadata) else { return false };
        let name = agent_name(metadata.token);
        let remote = self.names.get(&name).and_then(|id| self.remotes.get(id));
        remote.map(|remote| remote.origin).or_else(|| self.origins.known(&name)) == Some(from)
    }

    fn disconnect(&mut self, peer: PeerId) {
        let Some(id) = self.peers.remove(&peer) else { return };
        self.send_datagram(id);
        self.permissions.remove(&peer);
        let posts: Vec<PostId> = self
            .transfers
            .iter()
            .filter(|(_, transfer)| transfer.peer == peer)
            .map(|(post, _)| *post)
            .collect();
        for post in posts {
            self.cancel(post);
        }
        if let Some(remote) = self.remotes.get_mut(&id) {
            remote.users.retain(|user| *user != peer);
            if remote.users.is_empty() && remote.is_open() {
                remote.stage = Stage::Left;
                self.ending.push(id);
            }
        }
        self.pace.stir();
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError> {
        check::frame("frame.len", frame.len())?;
        let (id, remote) = self.open_remote(peer)?;
        // Notify frames that wait for room go first.
        if !remote.parked.is_empty() || !remote.speech.has_room(frame.len(), self.config.outbound_bytes) {
            return Err(TransportError::WouldBlock);
        }
        if self.transmit(id, frame) { Ok(()) } else { Err(TransportError::PeerGone) }
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), TransportError> {
        if let Some(notify) = &post.notify {
            check::frame("notify.len", notify.len())?;
        }
        let (id, remote) = self.open_remote(peer)?;
        transfer::check(&post.descriptors, &self.regions, &remote.regions)?;
        storage::check(remote.route == Route::Storage, &post, &self.regions, &remote.regions)?;
        if post.op == Op::Read && !remote.route.directions().read && !self.config.reads_over_tcp {
            return Err(TransportError::Unsupported(NO_READS));
        }
        if post.op == Op::Write && !self.config.gpu_over_tcp && self.writes_by_software(remote, &post) {
            return Err(TransportError::Unsupported(NO_GPU));
        }
        if self.transfers.len() + self.events.len() >= self.config.max_posts {
            return Err(TransportError::WouldBlock);
        }
        if self.transfers.contains_key(&post.id) {
            return Err(TransportError::Unsupported("the id is that of a post that has not ended"));
        }
        let number = post.id;
        let transfer = Transfer::new(id, peer, post);
        self.transfers.insert(number, transfer);
        self.enqueue(id, number);
        Ok(())
    }

    fn cancel(&mut self, post: PostId) {
        let Some(transfer) = self.transfers.get_mut(&post) else { return };
        // What is on its way cannot be stopped: the post ends when that has ended.
        transfer.stop(TransportError::Cancelled);
        if transfer.in_flight == 0 {
            if let Some(remote) = self.remotes.get_mut(&transfer.remote) {
                remote.parked.cancel(post);
                remote.held.retain(|held| *held != post);
            }
            self.end(post, Err(TransportError::Cancelled));
        }
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        self.permitted(peer, until);
    }

    fn write_fence(&self, peer: PeerId) -> WriteFence {
        let way = self.route(peer);
        way.map_or(WriteFence::AtDeath, |way| self.reach.write_fence(way, self.config.rdma_bound))
    }

    fn poll(&mut self, _now: Time, events: &mut Vec<TransportEvent>) {
        let begun = Instant::now();
        self.send_datagrams();
        self.take_deaths();
        self.take_notifications();
        self.check_requests();
        self.start_requests();
        self.send_datagrams();
        self.ring_for_requests(begun);
        self.probe(begun);
        self.end_connections(begun);
        events.append(&mut self.events);
        self.stats.longest_poll = self.stats.longest_poll.max(begun.elapsed());
    }

    fn wait(&self) -> TransportWait {
        if !(self.events.is_empty()
            && self.line.is_empty()
            && self.inbox.is_empty()
            && self.unsent.is_empty())
            || self.announced.is_awaited()
        {
            return TransportWait::Now;
        }
        let sleep = self.pace.sleep(!self.requests.is_empty() || !self.ending.is_empty());
        if sleep.is_zero() {
            return TransportWait::Now;
        }
        TransportWait::ReadableOrAfter(vec![self.wakes.as_fd().as_raw_fd()], sleep)
    }
}

impl NixlTransport {
    /// Cancels all posts, starts nothing more, and waits for requests on their way. True if no request of
    /// this transport touches memory any more: the transport can be dropped, and adopted memory be freed.
    pub fn shutdown(&mut self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        self.send_datagrams();
        let posts: Vec<PostId> = self.transfers.keys().copied().collect();
        for post in posts {
            self.cancel(post);
        }
        while !self.requests.is_empty() && Instant::now() < deadline {
            let _ = self.engine.receive(|_, _| {});
            self.check_requests();
            self.end_connections(Instant::now());
            std::thread::sleep(self.pace.sleep(true));
        }
        self.requests.is_empty()
    }

    /// True if the peer's processor puts bytes of this WRITE in place.
    fn writes_by_software(&self, remote: &Remote, post: &Post) -> bool {
        // Without GPU memory no route does.
        let is_gpu = |kind| kind == MemoryKind::Vram;
        let has_gpu = self.regions.iter().any(|region| is_gpu(region.kind()))
            || remote.regions.iter().any(|place| is_gpu(place.kind));
        has_gpu
            && post.descriptors.iter().any(|descriptor| {
                let here = self.regions.get(descriptor.local_region as usize).map(Memory::kind);
                let there = remote.regions.get(descriptor.remote_region as usize).map(|place| place.kind);
                let kinds = here.zip(there);
                kinds.is_some_and(|(here, there)| remote.route.writes_by_software(here, there))
            })
    }

    fn open_remote(&self, peer: PeerId) -> Result<(RemoteId, &Remote), TransportError> {
        let id = *self.peers.get(&peer).ok_or(TransportError::PeerGone)?;
        let remote = self.remotes.get(&id).filter(|remote| remote.is_open());
        Ok((id, remote.ok_or(TransportError::PeerGone)?))
    }
}

impl Drop for NixlTransport {
    /// Waits up to two seconds for requests on their way, and tells the peers. Requests that are
    /// still on their way then keep the agent, and the memory that they may touch, until the process ends.
    fn drop(&mut self) {
        if self.shutdown(FAREWELL) {
            self.say_farewell();
        } else {
            // Each request keeps the agent.
            mem::forget(mem::take(&mut self.requests));
            mem::forget(mem::take(&mut self.memories));
            self.engine.abandon();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{PEER, config, nixl, whole, worker, worker_with};

    #[test]
    fn a_write_into_gpu_memory_over_tcp_is_refused_unless_the_owner_allows_it() {
        let Some(nixl) = nixl() else { return };
        for (gpu_over_tcp, wanted) in [(false, Err(TransportError::Unsupported(NO_GPU))), (true, Ok(()))] {
            let (here, there) = (crate::NixlConfig { gpu_over_tcp, ..config() }, worker(nixl).0);
            let mut here = worker_with(nixl, here).0;
            let mut metadata = TransportMetadata::decode(&there.metadata().unwrap()).unwrap();
            metadata.regions[0].kind = MemoryKind::Vram;
            here.connect(PEER, &metadata.encode().unwrap()).unwrap();
            assert_eq!(here.post(PEER, whole(1, Op::Write)), wanted);
        }
    }
}
