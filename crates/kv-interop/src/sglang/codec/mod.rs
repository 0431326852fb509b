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

#[cfg(feature = "fuzz")]
pub(crate) use ending::MAX_REASON;
pub(crate) use ending::{Abort, AbortAck, FAILED, KvStatus, SUCCESS};
use fields::GUARD;
pub(crate) use fields::{MAX_HOST, Malformed};
pub(crate) use registration::Registration;
pub(crate) use request::Request;

/// A message that has arrived at a worker's PULL socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SglangMessage {
    /// A decode worker tells a prefill worker about its memory.
    Registration(Box<Registration>),
    /// A decode worker names the pages of a request to a prefill worker.
    Request(Request),
    /// A decode worker gives a request up, and tells a prefill worker.
    Abort(Abort),
    /// A prefill worker tells a decode worker how a request has ended.
    Status(KvStatus),
    /// A prefill worker tells a decode worker that nothing more is written for an aborted request.
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

    /// The frames that SGLang 0.5.23 sends.
    #[cfg(feature = "fuzz")]
    pub(crate) fn encode(&self) -> Vec<Bytes> {
        match self {
            SglangMessage::Registration(registration) => registration.encode(),
            SglangMessage::Request(request) => request.encode(),
            SglangMessage::Abort(abort) => abort.encode(),
            SglangMessage::Status(status) => status.encode(),
            SglangMessage::AbortAck(ack) => ack.encode(),
        }
    }
}
