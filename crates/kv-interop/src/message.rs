//! What a dialect's machine and its transport say to each other inside the frames and offers of
//! [`Machine`](kv_core::machine::Machine).
//!
//! A foreign engine is reached in two ways: by messages of a ZeroMQ socket (its *side channel*), and by its NIXL
//! agent. Each way is a peer of its own, with its own [`PeerId`]. A machine opens a way with
//! [`Output::Connect`](kv_core::machine::Output::Connect) and the [offer](Way::offer) of a [`Way`]. A frame that the
//! machine sends is a [`Message`] on a side channel, and the raw bytes of a notification on an agent. Every frame
//! that comes in is an [`Incoming`].

use bytes::Bytes;
use kv_core::{MemoryKind, PeerId, TransportOffer};
use serde::{Deserialize, Serialize};

/// Most parts of one message. SGLang's longest message has 25.
pub const MAX_PARTS: usize = 64;

/// The name of a [`Way`] in a [`TransportOffer`].
const WAY: &str = "interop";

/// A message of a ZeroMQ socket: its parts, without an envelope of addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message(pub Vec<Bytes>);

impl Message {
    /// The frame that carries the message.
    pub fn encode(&self) -> Bytes {
        written(self)
    }

    /// The message in a frame; `None` if the frame holds no message, or one of more than [`MAX_PARTS`] parts.
    pub fn decode(frame: &[u8]) -> Option<Message> {
        rmp_serde::from_slice(frame).ok().filter(|message: &Message| message.0.len() <= MAX_PARTS)
    }
}

/// What arrived from a foreign engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Incoming {
    /// A message of a side channel.
    Message {
        /// The peer on whose connection the message came; `None` for a message to the worker's own listening
        /// socket, to which anybody can connect.
        peer: Option<u64>,
        /// The parts of the message, without the envelope of a REQ socket.
        message: Message,
    },
    /// A notification of a NIXL agent.
    Notification {
        /// The name of the agent, as NIXL says.
        agent: String,
        /// The bytes of the notification.
        bytes: Bytes,
    },
}

impl Incoming {
    /// A message on the connection that this worker has opened to a peer.
    pub fn reply(peer: PeerId, parts: Vec<Bytes>) -> Incoming {
        Incoming::Message { peer: Some(peer.0), message: Message(parts) }
    }

    /// The frame that carries what arrived.
    pub fn encode(&self) -> Bytes {
        written(self)
    }

    /// What a frame holds; `None` for other frames.
    pub fn decode(frame: &[u8]) -> Option<Incoming> {
        rmp_serde::from_slice(frame).ok()
    }
}

/// A way to a foreign engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Way {
    /// A ZeroMQ REQ socket that is connected to `host:port`: one answer follows each message.
    Request {
        /// The address of the engine's ROUTER or REP socket.
        addr: String,
    },
    /// A ZeroMQ PUSH socket that is connected to `host:port`: messages go one way.
    Push {
        /// The address of the engine's PULL socket.
        addr: String,
    },
    /// A NIXL agent, with its metadata as NIXL writes them and the regions of its memory that posts name.
    Agent {
        /// The result of the agent's `get_agent_metadata`.
        metadata: Bytes,
        /// The regions, by the numbers of [`Descriptor::remote_region`](kv_core::Descriptor::remote_region).
        regions: Vec<AgentRegion>,
    },
}

impl Way {
    /// The offer with which a machine connects a peer by this way.
    pub fn offer(&self) -> TransportOffer {
        TransportOffer::new(WAY, written(self))
    }

    /// The way that an offer describes; `None` for offers of other transports.
    pub fn of(offer: &TransportOffer) -> Option<Way> {
        (offer.name == WAY).then(|| rmp_serde::from_slice(&offer.metadata).ok()).flatten()
    }
}

/// A region of a foreign agent's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentRegion {
    /// The address of the first byte, in the agent's process.
    pub addr: u64,
    /// Bytes from the first to the last byte of the region, gaps between items included.
    pub len: u64,
    /// Bytes from the beginning of an item to the beginning of the next one.
    pub stride: u64,
    /// Host memory or device memory.
    pub memory: MemoryKind,
    /// The number of the device, as the agent gave it to NIXL.
    pub device: u64,
}

/// The address of a [`Way`] to a port of a host: an IPv6 address stands in brackets.
pub(crate) fn host_port(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// Msgpack of a value whose parts all can be written.
fn written(value: &impl Serialize) -> Bytes {
    rmp_serde::to_vec(value).map(Bytes::from).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_notifications_and_ways_come_back_as_they_were_written() {
        let parts = vec![Bytes::from_static(b"KV_STATUS"), Bytes::new(), Bytes::from(vec![0xff; 300])];
        let message = Message(parts.clone());
        assert_eq!(Message::decode(&message.encode()), Some(message));
        assert_eq!(Message::decode(&Message(vec![Bytes::new(); MAX_PARTS + 1]).encode()), None);
        for incoming in [
            Incoming::reply(PeerId(7), parts),
            Incoming::Notification { agent: "a".to_owned(), bytes: Bytes::from_static(b"HB:x") },
        ] {
            assert_eq!(Incoming::decode(&incoming.encode()), Some(incoming));
        }
        let region = AgentRegion { addr: 1 << 40, len: 9, stride: 3, memory: MemoryKind::Vram, device: 2 };
        for way in [
            Way::Request { addr: "h:1".to_owned() },
            Way::Agent { metadata: Bytes::from_static(b"nixlSerDes|"), regions: vec![region] },
        ] {
            assert_eq!(Way::of(&way.offer()), Some(way.clone()));
            assert_eq!(Way::of(&TransportOffer::new("nixl", way.offer().metadata)), None);
        }
    }
}
