//! A transport that notes how peers are reached, and which ends of ways it reports.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use kv_transfer::unstable::{
    Directions, Origin, Post, Transport, TransportEvent, TransportOffer, TransportWait, WayEnd, WriteFence,
};
use kv_transfer::{PeerId, PostId, Region, Time, TransportError};

/// The notes, in order: `connect NAME`, `dead`, `lost`.
pub type Log = Arc<Mutex<Vec<String>>>;

/// A transport, with the notes on it.
pub struct Overheard<P> {
    pub inner: P,
    pub log: Log,
}

impl<P> Overheard<P> {
    fn note(&self, line: String) {
        self.log.lock().unwrap().push(line);
    }
}

impl<P: Transport> Transport for Overheard<P> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        self.inner.register(region)
    }

    fn metadata(&self) -> Result<Bytes, TransportError> {
        self.inner.metadata()
    }

    fn offers(&self) -> Result<Vec<TransportOffer>, TransportError> {
        self.inner.offers()
    }

    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError> {
        self.inner.connect(peer, metadata)
    }

    fn connect_by(&mut self, peer: PeerId, transport: &TransportOffer) -> Result<(), TransportError> {
        self.note(format!("connect {}", transport.name));
        self.inner.connect_by(peer, transport)
    }

    fn may_speak_for(&self, from: Origin, metadata: &[u8]) -> bool {
        self.inner.may_speak_for(from, metadata)
    }

    fn may_speak_by(&self, from: Origin, transport: &TransportOffer) -> bool {
        self.inner.may_speak_by(from, transport)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.inner.disconnect(peer);
    }

    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError> {
        self.inner.send(peer, frame)
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), TransportError> {
        self.inner.post(peer, post)
    }

    fn cancel(&mut self, post: PostId) {
        self.inner.cancel(post);
    }

    fn permit(&mut self, peer: PeerId, until: Time) {
        self.inner.permit(peer, until);
    }

    fn write_fence(&self, peer: PeerId) -> WriteFence {
        self.inner.write_fence(peer)
    }

    fn revoke(&mut self, peer: PeerId) {
        self.inner.revoke(peer);
    }

    fn poll(&mut self, now: Time, events: &mut Vec<TransportEvent>) {
        let before = events.len();
        self.inner.poll(now, events);
        for event in &events[before..] {
            match event {
                TransportEvent::PeerGone { end: WayEnd::Dead { .. }, .. } => self.note("dead".to_owned()),
                TransportEvent::PeerGone { end: WayEnd::Lost, .. } => self.note("lost".to_owned()),
                _ => {}
            }
        }
    }

    fn wait(&self) -> TransportWait {
        self.inner.wait()
    }

    fn directions(&self, peer: Option<PeerId>) -> Directions {
        self.inner.directions(peer)
    }
}
