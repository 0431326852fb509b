//! A transport that moves nothing: its events are written by the test, from the other end of its wire.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use kv_core::{
    Origin, PeerId, Post, PostId, Region, Time, Transport, TransportError, TransportEvent, TransportWait,
    WriteFence,
};
use rustix::event::{EventfdFlags, eventfd};

use super::{Log, Seen};

/// A transport whose events a test writes. Peer 1 exists, peer 2 refuses everything.
pub(super) struct FakeTransport {
    log: Log,
    wire: Arc<Wire>,
    ended: Vec<TransportEvent>,
    regions: usize,
}

pub(super) fn fake_transport(log: &Log, wire: &Arc<Wire>) -> FakeTransport {
    FakeTransport { log: Arc::clone(log), wire: Arc::clone(wire), ended: Vec::new(), regions: 1 }
}

impl Transport for FakeTransport {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        self.regions += 1;
        match region.addr {
            0xbad000 => Err(TransportError::UnknownMemory { region: 1, addr: region.addr, len: region.len }),
            _ => Ok(()),
        }
    }

    fn metadata(&self) -> Result<Bytes, TransportError> {
        assert!(self.regions > 0, "regions come first");
        Ok(Bytes::from_static(b"metadata"))
    }

    fn connect(&mut self, _: PeerId, _: &[u8]) -> Result<(), TransportError> {
        Err(TransportError::Metadata("bad"))
    }

    fn may_speak_for(&self, from: Origin, metadata: &[u8]) -> bool {
        (from, metadata) == (Origin(3), b"memory of 3")
    }

    fn disconnect(&mut self, _: PeerId) {
        self.log.lock().unwrap().push(Seen::Disconnected);
    }

    fn send(&mut self, peer: PeerId, _: Bytes) -> Result<(), TransportError> {
        if peer == PeerId(2) {
            return Err(TransportError::WouldBlock);
        }
        self.log.lock().unwrap().push(Seen::TransportSend);
        Ok(())
    }

    fn rouse(&mut self, peer: PeerId, bytes: u64) {
        self.log.lock().unwrap().push(Seen::Roused(peer.0, bytes));
    }

    fn post(&mut self, peer: PeerId, post: Post) -> Result<(), TransportError> {
        if peer == PeerId(2) {
            return Err(TransportError::PeerGone);
        }
        self.ended.push(TransportEvent::Posted { post: post.id, result: Ok(()) });
        Ok(())
    }

    fn cancel(&mut self, _: PostId) {
        self.log.lock().unwrap().push(Seen::Cancelled);
    }

    fn permit(&mut self, _: PeerId, _: Time) {}

    fn write_fence(&self, _: PeerId) -> WriteFence {
        WriteFence::AtDeath
    }

    fn poll(&mut self, _: Time, events: &mut Vec<TransportEvent>) {
        let _ = rustix::io::read(&self.wire.event, &mut [0; 8]);
        if let Some(act) = self.wire.during_poll.lock().unwrap().take() {
            act();
        }
        events.append(&mut self.ended);
        events.append(&mut self.wire.events.lock().unwrap());
    }

    fn begin_handling(&mut self) {
        self.log.lock().unwrap().push(Seen::BegunHandling);
    }

    fn wait(&self) -> TransportWait {
        if let Some(act) = self.wire.before_sleep.lock().unwrap().take() {
            act();
        }
        match self.ended.is_empty() {
            true => TransportWait::Readable(vec![self.wire.event.as_raw_fd()]),
            false => TransportWait::Now,
        }
    }
}

impl Drop for FakeTransport {
    fn drop(&mut self) {
        if let Some(act) = self.wire.at_close.lock().unwrap().take() {
            act();
        }
    }
}

/// The test's end of a fake transport.
pub(super) struct Wire {
    event: OwnedFd,
    events: Mutex<Vec<TransportEvent>>,
    /// Done once on the worker's thread, before the transport reports the events that it has.
    pub(super) during_poll: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Done once on the worker's thread, between its last look at the commands and its sleep.
    pub(super) before_sleep: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Done when the transport is dropped.
    pub(super) at_close: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Wire {
    pub(super) fn new() -> Arc<Wire> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        Arc::new(Wire {
            event,
            events: Mutex::default(),
            during_poll: Mutex::default(),
            before_sleep: Mutex::default(),
            at_close: Mutex::default(),
        })
    }

    pub(super) fn deliver(&self, event: TransportEvent) {
        self.events.lock().unwrap().push(event);
        rustix::io::write(&self.event, &1_u64.to_ne_bytes()).unwrap();
    }

    pub(super) fn say(&self, word: &'static str) {
        self.deliver(TransportEvent::Frame { from: Origin(0), frame: Bytes::from_static(word.as_bytes()) });
    }
}
