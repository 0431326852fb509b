//! The decoders of bytes from outside, each with a check of what it accepts.

use kv_core::wire::{Body, Frame, hello_transport};
use kv_core::{MAX_FRAME, TransportOffer};
use kv_ec::params::EcTransferParams;
use kv_transfer::params::TransferParams;

pub use kv_bootstrap::fuzz::{record as rank_record, requests as http_requests, responses as http_responses};
pub use kv_ec::host::fuzz::messages as ec_host;
pub use kv_interop::fuzz::{sglang_message, side_channel, vllm_answer, vllm_notification, zmtp};
pub use kv_local::fuzz::{hello as local_hello, messages as local_messages, metadata as local_metadata};
#[cfg(feature = "nixl")]
pub use kv_nixl::fuzz::{
    agent_metadata as nixl_agent, metadata as nixl_metadata, notification as nixl_notification,
};

/// How many times larger a geometry may be with the names of its fields than without them.
const NAMED: usize = 8;

/// A frame. An accepted frame, encoded again, must mean the same.
pub fn wire(bytes: &[u8]) {
    let Ok(frame) = Frame::decode(bytes) else { return };
    if let Body::Hello(hello) = &frame.body {
        // What the transport is asked about is what the machine goes by.
        let said = TransportOffer::new(&hello.transport, hello.metadata.clone());
        assert_eq!(hello_transport(bytes), Some(said));
    }
    let Ok(again) = frame.encode() else {
        // The fields of a cache may have been written without their names.
        return assert!(matches!(frame.body, Body::Hello(_)) && bytes.len() > MAX_FRAME / NAMED);
    };
    // Numbers may have been written longer than needed, never shorter.
    let named = if matches!(frame.body, Body::Hello(_)) { NAMED } else { 1 };
    assert!(again.len() <= named * bytes.len() + 64, "{again:?}");
    assert_eq!(Frame::decode(&again), Ok(frame));
}

/// Transfer parameters. Accepted parameters, written again, must mean the same.
pub fn params(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(params) = TransferParams::parse(text) {
        assert_eq!(TransferParams::parse(&params.to_json()), Ok(params));
    }
}

/// Transfer parameters of the encoder cache. Accepted parameters, written again, must mean the same.
pub fn ec_params(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(params) = EcTransferParams::parse(text) {
        assert_eq!(EcTransferParams::parse(&params.to_json()), Ok(params));
    }
}
