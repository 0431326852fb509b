//! Frames in words, for the trace.

use kv_core::wire::{Body, Frame};

/// The content of a frame in one line, or the reason why it cannot be decoded.
pub(crate) fn show(bytes: &[u8]) -> String {
    match Frame::decode(bytes) {
        Ok(Frame { conversation, body: Body::Hello(hello) }) => {
            format!(
                "{:x} Hello {{ to: {}, conversation: {:x}, nonce: {:x} }}",
                conversation.0, hello.to, hello.conversation.0, hello.nonce
            )
        }
        Ok(frame) => format!("{:x} {:?}", frame.conversation.0, frame.body),
        Err(error) => format!("{error}"),
    }
}
