//! The decoders, each with what must hold of whatever it accepts.

use kv_core::wire::Frame;
use kv_transfer::params::TransferParams;

pub use kv_bootstrap::fuzz::{record as rank_record, requests as http_requests, responses as http_responses};
pub use kv_local::fuzz::{hello as local_hello, messages as local_messages, metadata as local_metadata};
#[cfg(feature = "nixl")]
pub use kv_nixl::fuzz::{
    agent_metadata as nixl_agent, metadata as nixl_metadata, notification as nixl_notification,
};

/// A frame: what is accepted encodes again to something that means the same.
pub fn wire(bytes: &[u8]) {
    let Ok(frame) = Frame::decode(bytes) else { return };
    // Numbers may have been written longer than needed, never shorter: so it fits.
    let again = frame.encode();
    assert!(again.as_ref().is_ok_and(|again| again.len() <= bytes.len() + 64), "{again:?}");
    assert_eq!(again.and_then(|again| Frame::decode(&again)), Ok(frame));
}

/// Transfer parameters: what is accepted is written again with the same meaning.
pub fn params(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(params) = TransferParams::parse(text) {
        assert_eq!(TransferParams::parse(&params.to_json()), Ok(params));
    }
}
