//! The [`Transport`] trait.

use std::os::fd::AsRawFd;
use std::path::Path;

use bytes::Bytes;
use kv_core::{
    Descriptor, Directions, Op, Origin, PeerId, Post, PostId, Region, Time, Transport, TransportError,
    TransportEvent, TransportWait, WriteFence,
};
use kv_host::{Life, check, clock};

use crate::metadata::{Metadata, Place};
use crate::remote::RemoteId;
use crate::transfer::Transfer;
use crate::transport::UcxTransport;
use crate::way::{Way, WayId};

/// The reason with which a post to read is refused over TCP.
const NO_READS: &str = "READ over TCP: UCX may end the process that is read from when the reader dies; let the other \
                        side write, or set `reads_over_tcp`. GPU memory of one host is read without TCP only if all \
                        memory of both sides is GPU memory, UCX has its transport `cuda_ipc`, and \
                        `UCX_CUDA_IPC_ENABLE_GET_ZCOPY` is `on`";
/// The reason with which a post to write is refused over TCP if one of its ends is GPU memory.
const NO_GPU: &str = "WRITE over TCP from or into GPU memory: UCX may end the process that is written to when the \
                      writer dies; let the pages pass through host memory, or set `gpu_over_tcp`";
/// UCX's transport that copies between the GPU memory of two processes.
const CUDA_IPC: &str = "cuda_ipc";

impl Transport for UcxTransport {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        let range = self.given.next_region(region)?;
        self.engine.register(range.clone()).map_err(|failure| self.backend(failure))?;
        self.given.registered(&range);
        Ok(())
    }

    fn metadata(&self) -> Result<Bytes, TransportError> {
        self.given.metadata()
    }

    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError> {
        self.now = clock::now();
        self.open_way(peer, metadata)
    }

    fn may_speak_for(&self, from: Origin, metadata: &[u8]) -> bool {
        let Ok(decoded) = Metadata::decode(metadata) else { return false };
        self.remotes.get(from.0).is_some_and(|remote| remote.name == decoded.name)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.now = clock::now();
        self.leave(peer);
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError> {
        check::frame("frame.len", frame.len())?;
        let id = self.usable(peer)?;
        let queued = self.frame_bytes(id);
        let Some(way) = self.ways.get_mut(&id) else { return Err(TransportError::PeerGone) };
        // Notify frames that wait for room go first.
        if !way.parked.is_empty() || queued + frame.len() > self.config.outbound_bytes {
            return Err(TransportError::WouldBlock);
        }
        way.frame_bytes += frame.len();
        way.frames.push_back(frame);
        self.stirred.insert(id);
        Ok(())
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), TransportError> {
        if let Some(notify) = &post.notify {
            check::frame("notify.len", notify.len())?;
        }
        let id = self.usable(peer)?;
        let Some(way) = self.ways.get(&id) else { return Err(TransportError::PeerGone) };
        check::descriptors(
            &post.descriptors,
            |region| self.given.len_of(region),
            |region| way.len_of(region),
        )?;
        if post.op == Op::Read && !self.may_read(way) {
            return Err(TransportError::Unsupported(NO_READS));
        }
        if post.op == Op::Write && !self.may_write(way, &post) {
            return Err(TransportError::Unsupported(NO_GPU));
        }
        self.posts.check(post.id, self.config.max_posts)?;
        let transfer = self.posts.accept(Transfer::new(id, post));
        if let Some(way) = self.ways.get_mut(&id) {
            way.turns.push(transfer, &self.posts);
        }
        self.stirred.insert(id);
        Ok(())
    }

    fn cancel(&mut self, post: PostId) {
        if let Some(transfer) = self.posts.id_of(post) {
            self.give_up(transfer, TransportError::Cancelled);
        }
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        let Some(id) = self.peers.get(&peer).copied() else { return };
        if let Some(way) = self.ways.get_mut(&id) {
            way.permitted = until;
            self.stirred.insert(id);
        }
    }

    /// Whatever UCX has chosen, a processor copies the bytes or hands them to a device, and goes on after a stop where
    /// it was.
    fn write_fence(&self, _peer: PeerId) -> WriteFence {
        WriteFence::AtDeath
    }

    fn poll(&mut self, _now: Time, events: &mut Vec<TransportEvent>) {
        self.now = clock::now();
        self.processes_ended();
        // An answer that has come while this process was paused is in time.
        self.serve();
        self.look_at_opening(self.now);
        self.end_remotes();
        self.posts.hand_over(events);
    }

    fn wait(&self) -> TransportWait {
        if self.posts.events() > 0 || !self.stirred.is_empty() || !self.engine.arm() {
            return TransportWait::Now;
        }
        let fd = vec![self.watch.fd().as_raw_fd()];
        match self.next_timer() {
            Some(sleep) if sleep.is_zero() => TransportWait::Now,
            Some(sleep) => TransportWait::ReadableOrAfter(fd, sleep),
            None => TransportWait::Readable(fd),
        }
    }

    fn directions(&self, peer: Option<PeerId>) -> Directions {
        let way = peer.and_then(|peer| self.ways.get(self.peers.get(&peer)?));
        let both = match way {
            Some(way) => self.may_read(way),
            None => self.config.reads_over_tcp || has_infiniband(),
        };
        if both { Directions::BOTH } else { Directions::WRITE }
    }
}

impl UcxTransport {
    /// The way to a peer, if it has not ended.
    fn usable(&self, peer: PeerId) -> Result<WayId, TransportError> {
        let id = *self.peers.get(&peer).ok_or(TransportError::PeerGone)?;
        let remote = self.ways.get(&id).and_then(|way| self.remotes.get(way.remote));
        remote.filter(|remote| remote.is_standing()).map(|_| id).ok_or(TransportError::PeerGone)
    }

    /// True if nothing that is read goes over TCP, or reads over TCP are allowed.
    fn may_read(&self, way: &Way) -> bool {
        if self.config.reads_over_tcp {
            return true;
        }
        let lanes = self.lanes_to(way.remote);
        let is_all_gpu = || self.given.regions().iter().chain(&way.regions).all(Place::is_of_gpu);
        is_without_tcp(&lanes)
            || self.reads_by_gpu && is_all_gpu() && self.is_safe_between_gpus(way.remote, &lanes)
    }

    /// True if what goes between GPU memory here and GPU memory of the remote endangers neither process: the GPU copies the
    /// bytes, or both ends are in one process. There UCX sends over TCP, and neither end outlives the other.
    fn is_safe_between_gpus(&self, remote: RemoteId, lanes: &[(String, String)]) -> bool {
        let is_ours = self.remotes.get(remote).is_some_and(|remote| matches!(remote.life, Life::Ours));
        is_ours || lanes.iter().any(|(transport, _)| transport == CUDA_IPC)
    }

    /// True if nothing of the post goes over TCP from or into GPU memory, or that is allowed.
    fn may_write(&self, way: &Way, post: &Post) -> bool {
        // Most workers have no GPU memory, and posts have many descriptors.
        let has_gpu = self.given.regions().iter().chain(&way.regions).any(Place::is_of_gpu);
        if self.config.gpu_over_tcp || !has_gpu {
            return true;
        }
        let is_gpu = |place: Option<&Place>| place.is_some_and(Place::is_of_gpu);
        let ends = |descriptor: &Descriptor| {
            let here = self.given.place_of(descriptor.local_region);
            [is_gpu(here), is_gpu(way.place_of(descriptor.remote_region))]
        };
        let is_among = |wanted: &dyn Fn([bool; 2]) -> bool| post.descriptors.iter().map(ends).any(wanted);
        if !is_among(&|ends| ends != [false, false]) {
            return true;
        }
        let lanes = self.lanes_to(way.remote);
        let safe = self.is_safe_between_gpus(way.remote, &lanes);
        is_without_tcp(&lanes) || safe && !is_among(&|ends| ends[0] != ends[1])
    }
}

fn is_without_tcp(lanes: &[(String, String)]) -> bool {
    !lanes.is_empty() && lanes.iter().all(|(transport, _)| transport != "tcp")
}

/// True if this host has an RDMA card, so that peers can be expected to have one.
fn has_infiniband() -> bool {
    std::fs::read_dir(Path::new("/sys/class/infiniband")).is_ok_and(|mut cards| cards.next().is_some())
}
