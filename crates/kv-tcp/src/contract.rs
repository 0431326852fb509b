//! The [`Transport`] trait.

use std::os::fd::AsRawFd;

use bytes::Bytes;
use kv_core::{
    Op, Origin, PeerId, Post, PostId, Region, Time, Transport, TransportError, TransportEvent, TransportWait,
    WriteFence,
};
use kv_host::{check, clock};

use crate::message::HEADER;
use crate::metadata::{Identity, Metadata};
use crate::transfer::Transfer;
use crate::transport::TcpTransport;

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        self.given.register(region)
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
        let identity = Identity::of(decoded.token, metadata);
        self.guests.get(from.0).is_some_and(|guest| guest.from == identity)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.now = clock::now();
        let token = self.token_of(peer);
        self.lost.remove(&peer);
        if let Some(id) = self.peers.remove(&peer) {
            self.leave(id);
        }
        // Over connections whose right was revoked nothing can be written any more: the peer needs new ones.
        for guest in token.map(|token| self.guests.of(token)).unwrap_or_default() {
            if self.guests.get(guest).is_some_and(|guest| guest.revoked) {
                self.drop_guest(guest);
            }
        }
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError> {
        check::frame("frame.len", frame.len())?;
        let id = self.usable(peer)?;
        let queued = self.frame_bytes(id);
        let way = self.ways.get_mut(&id).ok_or(TransportError::PeerGone)?;
        // Parked notify frames, which wait for room, go first.
        if !way.parked.is_empty() || queued + HEADER + frame.len() > self.config.outbound_bytes {
            return Err(TransportError::WouldBlock);
        }
        way.frame_bytes += HEADER + frame.len();
        way.frames.push_back(frame);
        self.stirred.insert(id);
        Ok(())
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), TransportError> {
        if let Some(notify) = &post.notify {
            check::frame("notify.len", notify.len())?;
        }
        let id = self.usable(peer)?;
        let way = self.ways.get_mut(&id).ok_or(TransportError::PeerGone)?;
        let ours = self.given.regions();
        check::descriptors(
            &post.descriptors,
            |region| ours.get(region as usize).map(|memory| memory.len() as u64),
            |region| way.regions.get(region as usize).copied(),
        )?;
        self.posts.check(post.id, self.config.max_posts)?;
        let refused = post.op == Op::Write && way.revoked;
        let transfer = self.posts.accept(Transfer::new(id, post));
        if refused {
            self.posts.end(transfer, Err(TransportError::Revoked));
        }
        way.turns.push(transfer, &self.posts);
        self.stirred.insert(id);
        Ok(())
    }

    fn cancel(&mut self, post: PostId) {
        self.now = clock::now();
        if let Some(id) = self.posts.id_of(post) {
            self.give_up(id, TransportError::Cancelled);
        }
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        let Some(id) = self.peers.get(&peer) else { return };
        if let Some(way) = self.ways.get_mut(id) {
            way.permitted = until;
            self.stirred.insert(*id);
        }
    }

    fn write_fence(&self, peer: PeerId) -> WriteFence {
        let is_known = self.peers.contains_key(&peer) || self.lost.contains_key(&peer);
        if is_known { WriteFence::Revocable } else { WriteFence::AtDeath }
    }

    fn revoke(&mut self, peer: PeerId) {
        let token = self.token_of(peer);
        // This thread puts every byte in place, and it is here: nothing is under way.
        for id in token.map(|token| self.guests.of(token)).unwrap_or_default() {
            if let Some(guest) = self.guests.get_mut(id) {
                guest.revoked = true;
            }
        }
        self.posts.tell(TransportEvent::Revoked { peer });
    }

    fn poll(&mut self, _now: Time, events: &mut Vec<TransportEvent>) {
        self.now = clock::now();
        self.serve_sockets();
        self.serve_timers();
        self.posts.hand_over(events);
    }

    fn wait(&self) -> TransportWait {
        if !self.stirred.is_empty() || !self.unread.is_empty() || self.posts.events() > 0 {
            return TransportWait::Now;
        }
        let watch = vec![self.watch.fd().as_raw_fd()];
        match self.next_timer() {
            None => TransportWait::Readable(watch),
            Some(at) => TransportWait::ReadableOrAfter(watch, at.since(clock::now())),
        }
    }
}

impl Drop for TcpTransport {
    /// Writes what the sockets take at once. Peers see the end of the connections.
    fn drop(&mut self) {
        self.now = clock::now();
        self.send_last();
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::config::TcpConfig;

    fn transport() -> TcpTransport {
        TcpTransport::new(TcpConfig::new("127.0.0.1:0".parse().unwrap())).unwrap()
    }

    #[test]
    fn an_owner_does_not_sleep_while_there_is_something_to_do_or_to_tell() {
        assert!(matches!(transport().wait(), TransportWait::Readable(_)));
        let reasons: [fn(&mut TcpTransport); 3] = [
            |transport| transport.revoke(PeerId(1)),
            |transport| transport.unread.push_back(1),
            |transport| transport.stirred.extend([1]),
        ];
        for (number, reason) in reasons.into_iter().enumerate() {
            let mut transport = transport();
            reason(&mut transport);
            assert_eq!(transport.wait(), TransportWait::Now, "reason {number}");
        }
    }

    #[test]
    fn an_owner_is_woken_when_the_time_of_a_stranger_is_over() {
        let mut transport = transport();
        let _stranger = TcpStream::connect(transport.local_addr()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while transport.strangers.is_empty() {
            assert!(Instant::now() < deadline);
            transport.poll(Time::ZERO, &mut Vec::new());
        }
        let (wait, most) = (transport.wait(), transport.config.handshake_timeout);
        let wakes = matches!(&wait, TransportWait::ReadableOrAfter(_, after) if *after <= most);
        assert!(wakes, "{wait:?}: the stranger stays");
    }
}
