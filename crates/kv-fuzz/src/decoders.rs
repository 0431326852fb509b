//! The decoders of bytes from outside, each with a check of what it accepts. Each returns true if it accepts the bytes.

use kv_core::wire::{Body, Frame, hello_transport};
use kv_core::{MAX_FRAME, Room, TransportOffer};
use kv_ec::params::EcTransferParams;
use kv_poll::queue::{AuxLayout, AuxRow, AuxRowError, aux_tag};
use kv_timeline::{Record, Timeline};
use kv_transfer::params::TransferParams;

pub use kv_bootstrap::fuzz::{record as rank_record, requests as http_requests, responses as http_responses};
pub use kv_ec::host::fuzz::messages as ec_host;
#[cfg(feature = "fabric")]
pub use kv_fabric::fuzz::{messages as fabric_messages, metadata as fabric_metadata};
pub use kv_interop::fuzz::{sglang_message, side_channel, vllm_answer, vllm_notification, zmtp};
pub use kv_local::fuzz::{hello as local_hello, messages as local_messages, metadata as local_metadata};
#[cfg(feature = "nixl")]
pub use kv_nixl::fuzz::{
    agent_metadata as nixl_agent, datagram as nixl_datagram, metadata as nixl_metadata,
    notification as nixl_notification,
};
pub use kv_tcp::fuzz::{
    greetings as tcp_greetings, metadata as tcp_metadata, replies as tcp_replies, requests as tcp_requests,
};
#[cfg(feature = "ucx")]
pub use kv_ucx::fuzz::{messages as ucx_messages, metadata as ucx_metadata};

/// How many times larger a geometry may be with the names of its fields than without them.
const NAMED: usize = 8;

/// A frame. An accepted frame, encoded again, must mean the same.
pub fn wire(bytes: &[u8]) -> bool {
    let Ok(frame) = Frame::decode(bytes) else { return false };
    if let Body::Hello(hello) = &frame.body {
        // What the transport is asked about is what the machine goes by.
        let said = TransportOffer::new(&hello.transport, hello.metadata.clone());
        assert_eq!(hello_transport(bytes), Some(said));
    }
    let Ok(again) = frame.encode() else {
        // The fields of a cache may have been written without their names.
        assert!(matches!(frame.body, Body::Hello(_)) && bytes.len() > MAX_FRAME / NAMED);
        return true;
    };
    // Numbers may have been written longer than needed, never shorter.
    let named = if matches!(frame.body, Body::Hello(_)) { NAMED } else { 1 };
    assert!(again.len() <= named * bytes.len() + 64, "{again:?}");
    assert_eq!(Frame::decode(&again), Ok(frame));
    true
}

/// An aux row, after the three numbers of the reader's layout and a byte that is odd if the row is sealed: a row with
/// the tag and the checksum that fit is refused or understood, too. An accepted row, written again, must mean the same.
pub fn aux_row(bytes: &[u8]) -> bool {
    let Some((&[logprobs, top_logprobs, hidden, seal], content)) = bytes.split_first_chunk() else {
        return false;
    };
    let (logprobs, top_logprobs) = (u16::from(logprobs % 8), u16::from(top_logprobs % 8));
    let layout = AuxLayout { logprobs, top_logprobs, hidden_bytes: hidden.into() };
    let room = Room::Number(7);
    let of_any_length = AuxRow::decode(&layout, &room, content);
    let mut row = content.to_vec();
    row.resize(layout.row_len() as usize, 0);
    assert!(of_any_length.is_err() || row == content);
    if seal % 2 == 1 {
        row[..8].copy_from_slice(&aux_tag(&room).to_le_bytes());
        if let Err(AuxRowError::Checksum { computed, .. }) = layout.tag(&row) {
            row[8..16].copy_from_slice(&computed.to_le_bytes());
        }
    }
    let Ok(read) = AuxRow::decode(&layout, &room, &row) else { return false };
    let mut again = vec![0xee; row.len()];
    assert_eq!(read.encode(&layout, &room, &mut again), Ok(()));
    assert_eq!((&row[..8], &row[16..40]), (&again[..8], &again[16..40]));
    // Log-probabilities may be no numbers, which do not equal themselves: bytes are compared.
    let mut third = vec![0; row.len()];
    let twice = AuxRow::decode(&layout, &room, &again).map(|twice| twice.encode(&layout, &room, &mut third));
    assert_eq!((twice, third), (Ok(Ok(())), again));
    true
}

/// Transfer parameters. Accepted parameters, written again, must mean the same.
pub fn params(bytes: &[u8]) -> bool {
    let params = std::str::from_utf8(bytes).ok().and_then(|text| TransferParams::parse(text).ok());
    let Some(params) = params else { return false };
    assert_eq!(TransferParams::parse(&params.to_json()), Ok(params));
    true
}

/// Transfer parameters of the encoder cache. Accepted parameters, written again, must mean the same.
pub fn ec_params(bytes: &[u8]) -> bool {
    let params = std::str::from_utf8(bytes).ok().and_then(|text| EcTransferParams::parse(text).ok());
    let Some(params) = params else { return false };
    assert_eq!(EcTransferParams::parse(&params.to_json()), Ok(params));
    true
}

/// Records of workers, one a line, of which at most eight are read. Accepted records, written again, must mean the same,
/// and a timeline of any records is drawn.
pub fn timeline(bytes: &[u8]) -> bool {
    let Ok(records) = Record::from_lines(bytes, 8) else { return false };
    for record in &records {
        let again = record.to_json().map(|json| Record::from_json(json.as_bytes()));
        assert!(again.is_ok_and(|again| again.is_ok_and(|again| again == *record)), "{record:?}");
    }
    let Ok(timeline) = Timeline::join(records) else { return false };
    assert!(timeline.html().is_ok() && timeline.perfetto().is_ok());
    true
}
