//! The edge of the machine. Frames become messages of a known conversation, and messages become
//! frames, with the codec of that conversation. No other file of the protocol writes or reads the
//! bytes of messages, except that `node/service.rs` reads the transport in a hello.

use bytes::Bytes;

use super::Peer;
use super::heard::Heard;
use crate::id::PeerId;
use crate::proto::context::Context;
use crate::proto::io::Output;
use crate::trace::Dropped;
use crate::transport::Origin;
use crate::wire::{Body, Codec, ConversationId, Frame, Unreadable, Unspeakable};

impl Context {
    // ---- in -------------------------------------------------------------------------------------

    /// The message of a frame. `None` if the frame is ignored, and then counted: it is in another
    /// version than its conversation, cannot be read, or comes on a connection that has no right to
    /// its conversation.
    pub(in crate::proto) fn hear_frame(&mut self, from: Origin, frame: &[u8]) -> Option<Heard> {
        let named =
            Frame::conversation_of(frame).and_then(|conversation| self.peers.with_conversation(conversation));
        let codec =
            named.and_then(|(peer, _)| self.peers.get(peer)).map_or(Codec::MEETING, |peer| peer.codec);
        let author =
            named.filter(|(_, origin)| origin.is_none_or(|origin| origin == from)).map(|(peer, _)| peer);
        let body = match codec.decode(frame) {
            Ok(frame) => frame.body,
            Err(why) => {
                let why = match why {
                    Unreadable::Version { .. } => Dropped::OtherVersion,
                    // A peer that was forgotten goes on in the version of before.
                    Unreadable::NotMet { .. } if named.is_none() => Dropped::UnknownConversation,
                    Unreadable::NotMet { .. } => Dropped::OtherVersion,
                    Unreadable::Kind { .. } => Dropped::UnknownKind,
                    Unreadable::TooLong { .. } | Unreadable::Malformed { .. } => Dropped::Damaged,
                };
                self.fx.drop_frame(author, why);
                return None;
            }
        };
        match (body, named) {
            (Body::Hello(hello), _) => Some(Heard::Hello(hello)),
            // The answers to a hello are recognized by their nonce, and may come on another
            // connection. Every other message must come on the connection of its conversation.
            (body, Some((peer, origin)))
                if matches!(body, Body::Welcome(_) | Body::Refused(_))
                    || origin.is_none_or(|origin| origin == from) =>
            {
                Some(Heard::From(peer, body))
            }
            (_, Some((peer, _))) => {
                self.fx.drop_frame(Some(peer), Dropped::WrongOrigin);
                None
            }
            (_, None) => {
                self.fx.drop_frame(None, Dropped::UnknownConversation);
                None
            }
        }
    }

    // ---- out ------------------------------------------------------------------------------------

    /// Sends a message to a peer that has been met and to which the way is not lost. To any other peer the message is
    /// lost, as frames may be.
    pub(in crate::proto) fn send(&mut self, peer: PeerId, body: Body) {
        let way = self.peers.get(peer).and_then(|peer| Some((peer.codec, peer.contact.open_conversation()?)));
        if let Some((codec, conversation)) = way {
            self.say(peer, codec, conversation, &body);
        }
    }

    /// Encodes and sends a message. A message that is too long, or in no version that the peer
    /// reads, is lost.
    pub(super) fn say(&mut self, peer: PeerId, codec: Codec, conversation: ConversationId, body: &Body) {
        if let Ok(frame) = codec.encode(conversation, body) {
            self.tell_said(peer, body);
            self.fx.output(Output::Send { peer, frame });
        }
    }

    /// Sends a message that may be too long for a frame. False if it is too long.
    pub(in crate::proto) fn send_long(&mut self, peer: PeerId, body: &Body) -> bool {
        let way = self.peers.get(peer).and_then(|peer| Some((peer.codec, peer.contact.conversation()?)));
        match way.map(|(codec, conversation)| codec.encode(conversation, body)) {
            Some(Ok(frame)) => {
                self.tell_said(peer, body);
                self.fx.output(Output::Send { peer, frame });
            }
            Some(Err(Unspeakable::TooLong { .. })) => return false,
            Some(Err(_)) | None => {}
        }
        true
    }
}

impl Peer {
    /// The frame that tells the peer something once the bytes of a post are in place.
    pub(in crate::proto) fn notice(&self, body: &Body) -> Option<Bytes> {
        self.codec.encode(self.contact.conversation().unwrap_or(ConversationId::NONE), body).ok()
    }
}
