//! Transfers that the transport refuses for good.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod support;

use bytes::Bytes;
use kv_core::{
    Cause, Directions, Origin, PeerId, Post, PostId, Region, Time, TransferMode, Transport, TransportError,
    TransportEvent, TransportWait, WriteFence,
};
use kv_ec::{EcError, EcRegion};
use kv_local::{LocalConfig, LocalTransport};
use support::{BLOCK, Host, Server};

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

#[test]
fn a_fetch_ends_at_once_where_the_transport_never_does_what_is_posted() {
    let server = Server::start();
    let producer = Host::producer(&server, "encoder", 32);
    producer.save(1, 4 * BLOCK);
    let region = EcRegion::create(16, BLOCK as u32).unwrap();
    let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
    transport.add_arena(region.arena().unwrap()).unwrap();
    let consumer = Host::over("prefill", region, Never(transport), |_| ());
    let want = server.want(1, 4 * BLOCK).with(|want| want.mode = Some(TransferMode::Pull));
    let error = consumer.refused(want);
    let EcError::Transfer(transfer) = &error else { panic!("{error}") };
    assert_eq!(transfer.cause, Cause::Post(TransportError::Unsupported(WHAT)));
    assert_eq!(consumer.connector.gauges().traffic.failed_tries, 1);
    consumer.until_cached(0);
}
