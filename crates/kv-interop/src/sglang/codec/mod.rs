//! SGLang's messages, which its workers push to each other's PULL sockets, in both directions.
//!
//! Numbers are decimal text, and lists are packed little-endian integers. SGLang adds fields at the end of its
//! messages, so that a longer message than SGLang 0.5.23 sends is read up to the known fields. Every text and
//! every list is bounded.

mod ending;
mod fields;
mod registration;
mod request;
#[cfg(test)]
mod tests;

use bytes::Bytes;

pub(crate) use ending::{Abort, AbortAck, FAILED, KvStatus, SUCCESS};
pub(crate) use fields::Malformed;
pub(crate) use registration::Registration;
pub(crate) use request::Request;

/// The first frame of registrations and requests. SGLang's prefill rank stops to serve at any other first frame
/// that names no message.
const GUARD: &[u8] = b"NixlMsgGuard";
/// Longest host name or address, in bytes.
pub(crate) const MAX_HOST: usize = 255;
/// Longest agent name, in bytes.
const MAX_AGENT: usize = 128;
/// Longest metadata of an agent, in bytes.
const MAX_METADATA: usize = 1 << 20;
/// Most regions of one decode worker.
const MAX_REGIONS: usize = 4096;

/// A message that has arrived at a worker's PULL socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SglangMessage {
    /// From a decode worker to a prefill worker.
    Registration(Box<Registration>),
    /// From a decode worker to a prefill worker.
    Request(Request),
    /// From a decode worker to a prefill worker.
    Abort(Abort),
    /// From a prefill worker to a decode worker.
    Status(KvStatus),
    /// From a prefill worker to a decode worker.
    AbortAck(AbortAck),
}

impl SglangMessage {
    pub(crate) fn decode(frames: &[Bytes]) -> Result<SglangMessage, Malformed> {
        let first = frames.first().map_or(&[][..], |frame| frame);
        let second = frames.get(1).map_or(&[][..], |frame| frame);
        Ok(match (first, second) {
            (GUARD, b"None") => SglangMessage::Registration(Box::new(Registration::decode(frames)?)),
            (GUARD, _) => SglangMessage::Request(Request::decode(frames)?),
            (ending::ABORT, _) => SglangMessage::Abort(Abort::decode(frames)?),
            (ending::KV_STATUS, _) => SglangMessage::Status(KvStatus::decode(frames)?),
            (ending::ABORT_ACK, _) => SglangMessage::AbortAck(AbortAck::decode(frames)?),
            _ => return Err(Malformed::Name { got: fields::shown(first) }),
        })
    }
}
