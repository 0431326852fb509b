//! Transfers that the transport refuses for good.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use bytes::Bytes;
use kv_core::{
    Cause, Directions, Origin, PeerId, Post, PostId, Region, Time, TransferMode, Transport, TransportError,
    TransportEvent, TransportWait, WriteFence,
};
use kv_ec::{EcError, EcPoll, EcRegion};
use kv_local::{LocalConfig, LocalTransport};
use support::{BLOCK, Host, Server, content, until};

const WHAT: &str = "READ over TCP";

/// A transport that never does what is posted.
struct Never(LocalTransport);

impl Transport for Never {
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn register(&mut self, region: &Region) -> Result<(), TransportError> {
        self.0.register(region)
    }
    fn metadata(&self) -> Result<Bytes, TransportError> {
        self.0.metadata()
    }
    fn connect(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransportError> {
        self.0.connect(peer, metadata)
    }
    fn may_speak_for(&self, from: Origin, metadata: &[u8]) -> bool {
        self.0.may_speak_for(from, metadata)
    }
    fn disconnect(&mut self, peer: PeerId) {
        self.0.disconnect(peer);
    }
    fn send(&mut self, peer: PeerId, frame: Bytes) -> Result<(), TransportError> {
        self.0.send(peer, frame)
    }
    fn post(&mut self, _: PeerId, _: Post) -> Result<(), TransportError> {
        Err(TransportError::Unsupported(WHAT))
    }
    fn cancel(&mut self, post: PostId) {
        self.0.cancel(post);
    }
    fn permit(&mut self, peer: PeerId, until: Time) {
        self.0.permit(peer, until);
    }
    fn write_fence(&self, peer: PeerId) -> WriteFence {
        self.0.write_fence(peer)
    }
    fn revoke(&mut self, peer: PeerId) {
        self.0.revoke(peer);
    }
    fn poll(&mut self, now: Time, events: &mut Vec<TransportEvent>) {
        self.0.poll(now, events);
    }
    fn wait(&self) -> TransportWait {
        self.0.wait()
    }
    fn directions(&self, peer: Option<PeerId>) -> Directions {
        self.0.directions(peer)
    }
}

/// A host whose transport does nothing that the host itself posts. Peers write to the host as ever.
fn consumer() -> Host {
    let region = EcRegion::create(16, BLOCK as u32).unwrap();
    let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
    transport.add_arena(region.arena().unwrap()).unwrap();
    Host::over("prefill", region, Never(transport), |_| ())
}

#[test]
fn a_fetch_ends_at_once_where_the_transport_never_does_what_is_posted() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 32);
    producer.save(1, 4 * BLOCK);
    let consumer = consumer();
    let want = server.want(1, 4 * BLOCK).with(|want| want.mode = Some(TransferMode::Pull));
    let error = consumer.refused(want);
    let EcError::Transfer(transfer) = &error else { panic!("{error}") };
    assert_eq!(transfer.cause, Cause::Post(TransportError::Unsupported(WHAT)));
    assert_eq!(consumer.connector.gauges().traffic.failed_tries, 1);
    consumer.until_cached(0);
}

#[test]
fn a_session_that_wants_a_mode_which_the_transport_refuses_fails_no_session_that_wants_the_other() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 32);
    let entry = producer.written(1, 4 * BLOCK);
    let consumer = consumer();
    let by = |mode| consumer.deferred(server.want(1, 4 * BLOCK).with(|want| want.mode = Some(mode)));
    let (mut read, mut written) = (by(TransferMode::Pull), by(TransferMode::Push));
    // Both sessions wait before a try can fail for good.
    let tries = || consumer.connector.gauges().traffic.failed_tries;
    let before = tries();
    until("a try for both", || tries() > before);
    producer.connector.save(entry).unwrap();
    until("the entry", || {
        assert_ne!(written.poll(), EcPoll::Failed, "{:?}", written.failure());
        written.poll() == EcPoll::Ready
    });
    assert!(consumer.bytes(&written.entry().unwrap()) == content(1, 4 * BLOCK));
    until("the refusal", || read.poll() == EcPoll::Failed);
}
