//! The [`Transport`] trait for [`LocalTransport`]: each call goes to the parts that it concerns.

use std::mem;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::{
    Origin, PeerId, Post, PostId, Region, Time, Transport, TransportError, TransportEvent, TransportWait,
    WriteFence,
};
use kv_host::{Memory, check, clock, wake};

use crate::link::LinkId;
use crate::remote::unmap_some;
use crate::transport::LocalTransport;

/// How long dropping a transport waits for sockets that are full.
const FAREWELL: Duration = Duration::from_millis(100);

impl Transport for LocalTransport {
    fn name(&self) -> &'static str {
        "local"
    }

    fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        self.given.register(region)
    }

    fn metadata(&self) -> Result<Bytes, TransportError> {
        self.given.metadata()
    }

    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError> {
        self.open_link(peer, metadata)
    }

    fn may_speak_for(&self, from: Origin, metadata: &[u8]) -> bool {
        let link = self.links.get(from.0);
        link.and_then(|link| link.identity.as_ref()).is_some_and(|identity| identity.bytes == metadata)
    }

    fn disconnect(&mut self, peer: PeerId) {
        match self.links.id_of(peer) {
            Some(id) => self.forget(id),
            None => self.forget_lost(peer),
        }
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError> {
        check::frame("frame.len", frame.len())?;
        let (id, link) = self.links.of_peer(peer)?;
        // Parked notify frames, which wait for room, go first.
        if !link.parked.is_empty() || !link.connection.outbound.queue_frame(frame) {
            return Err(TransportError::WouldBlock);
        }
        self.flush_soon(id);
        Ok(())
    }

    fn rouse(&mut self, peer: PeerId, bytes: u64) {
        if let Some(id) = self.links.id_of(peer).filter(|_| bytes <= *wake::LENGTHS.end())
            && self.posts.is_empty()
        {
            // The last call of `poll` may be long ago.
            self.now = self.now.max(clock::now());
            self.wake(id);
        }
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), TransportError> {
        if let Some(notify) = &post.notify {
            check::frame("notify.len", notify.len())?;
        }
        let (link_id, link) = self.links.of_peer(peer)?;
        let theirs = &link.identity.as_ref().ok_or(TransportError::PeerGone)?.metadata.regions;
        let ours = self.given.regions();
        check::descriptors(
            &post.descriptors,
            |region| ours.get(region as usize).map(|memory: &Memory| memory.len() as u64),
            |region| theirs.get(region as usize).map(|place| place.len),
        )?;
        self.posts.check(post.id, self.config.max_posts)?;
        if link.memory.is_some() {
            self.posts.run([post.id]);
        } else {
            link.waiting.push(post.id);
        }
        self.posts.accept(link_id, post);
        self.crowded_until = Time::ZERO;
        Ok(())
    }

    fn cancel(&mut self, post: PostId) {
        let link = self.posts.get_mut(post).map(|transfer| transfer.link);
        if let Some(link) = link.and_then(|link| self.links.get_mut(link)) {
            link.held.remove(&post);
            link.waiting.retain(|id| *id != post);
            link.parked.cancel(post);
        }
        // Every copy is made by this thread, inside `poll`: between slices the memory is quiet.
        self.posts.end(post, Err(TransportError::Cancelled));
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        if let Ok((_, link)) = self.links.of_peer(peer) {
            link.permitted = until;
            self.posts.run(mem::take(&mut link.held));
        }
    }

    fn write_fence(&self, peer: PeerId) -> WriteFence {
        let is_known = self.links.id_of(peer).is_some() || self.revoking.has_lost(peer);
        if is_known { WriteFence::Revocable } else { WriteFence::AtDeath }
    }

    fn revoke(&mut self, peer: PeerId) {
        self.revoking.ask(peer, &self.links, self.now);
        self.serve_revocations();
    }

    fn poll(&mut self, now: Time, events: &mut Vec<TransportEvent>) {
        self.now = now;
        self.wake_first();
        // Beside a short copy, the messages wait for its notify frame.
        if !self.posts.is_copying() {
            self.flush_all();
        }
        self.keep_pace();
        self.serve_sockets();
        self.pacing.end_reading();
        self.serve_timers();
        self.serve_revocations();
        self.copy_some();
        self.populate_some();
        unmap_some(&mut self.retired);
        self.posts.hand_over(events);
        self.pacing.hand_over();
    }

    fn begin_handling(&mut self) {
        self.pacing.hand_over();
    }

    fn wait(&self) -> TransportWait {
        self.pacing.handled();
        let busy = self.posts.is_busy()
            || !self.backlog.is_empty()
            || !self.unflushed.is_empty()
            || !self.unwatched.is_empty()
            || self.announced.is_awaited()
            || self.populate_at().is_some_and(|at| at <= self.now)
            || !self.retired.is_empty();
        if busy {
            return TransportWait::Now;
        }
        let pause = self.pause();
        let watch = if pause.is_some() { Vec::new() } else { vec![self.watch.fd().as_raw_fd()] };
        let timer = [self.next_timer(), self.populate_at(), pause].into_iter().flatten().min();
        let timer = timer.map(|at| at.since(self.now));
        match timer.into_iter().chain(self.pacing.next()).min() {
            None => TransportWait::Readable(watch),
            Some(after) => TransportWait::ReadableOrAfter(watch, after),
        }
    }
}

impl Drop for LocalTransport {
    /// Tells all peers that this side copies no more. Waits up to 100 ms for peers whose sockets are full.
    fn drop(&mut self) {
        let links: Vec<LinkId> = self.links.iter().map(|(id, _)| id).collect();
        for id in links {
            self.forget(id);
        }
        let deadline = Instant::now() + FAREWELL;
        while Instant::now() < deadline && self.wait_for_closing() {}
    }
}
