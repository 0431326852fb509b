//! Ids: engines, ranks, incarnations, rooms, sessions, attempts, and what each of them is unique
//! in.

use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::IdError;

/// Longest engine id, in bytes. vLLM takes any text that its operator configures, and adds the number of the
/// data-parallel replica. Percent-encoded three times as long, an id still fits into the head of a question
/// to a bootstrap server.
pub const MAX_ENGINE_ID: usize = 512;
/// Longest request id used as a room, in bytes. vLLM takes the id from the HTTP header `X-Request-Id`, without
/// a bound of its own, and adds a prefix and two suffixes; the ids of routers, UUIDs and trace ids, stay far
/// below. The bound keeps small what peers can make a worker remember: an id is kept twice, with and without
/// its suffix, for each room that [`Limits`](crate::proto::Limits) lets wait or fail (with the default limits
/// 384 MiB, if every id were that long).
pub const MAX_REQUEST_ID: usize = 1024;

/// True if there is a control character in the text.
pub(crate) fn has_control(text: &str) -> bool {
    // Most ids are ASCII, of which all bytes are looked at together.
    let ascii = text.bytes().fold(false, |found, byte| found | byte.is_ascii_control());
    ascii || !text.is_ascii() && text.chars().any(char::is_control)
}

/// Reads an id from a text with the given function.
pub(crate) struct Text<T>(pub(crate) fn(&str) -> Result<T, IdError>);

impl<T> Visitor<'_> for Text<T> {
    type Value = T;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an id")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        (self.0)(text).map_err(E::custom)
    }
}

/// An id that is a text of bounded length. The caller's module imports what the id is made of: `Arc`, `fmt`,
/// the four traits of serde, [`IdError`], [`Text`] and [`has_control`].
macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $field:literal, $max:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Parses an id: 1 to the maximum number of bytes, no control characters.
            pub fn new(text: &str) -> Result<Self, IdError> {
                if text.is_empty() || text.len() > $max {
                    return Err(IdError::Length { field: $field, got: text.len(), max: $max });
                }
                if has_control(text) {
                    return Err(IdError::ControlCharacter { field: $field });
                }
                Ok($name(text.into()))
            }

            /// The id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
                out.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                from.deserialize_str(Text($name::new))
            }
        }

        impl TryFrom<&str> for $name {
            type Error = IdError;
            fn try_from(text: &str) -> Result<Self, IdError> {
                $name::new(text)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &*self.0)
            }
        }
    };
}
pub(crate) use text_id;

text_id!(
    /// Names one engine: all ranks that are registered under this id, of one or more replicas; 1 to
    /// [`MAX_ENGINE_ID`] bytes.
    EngineId, "engine_id", MAX_ENGINE_ID
);
text_id!(
    /// The server's id of a request, used as a [`Room`]; 1 to [`MAX_REQUEST_ID`] bytes.
    RequestId, "request_id", MAX_REQUEST_ID
);

impl RequestId {
    /// The id without the suffix that vLLM's engines append: a `-` and eight hexadecimal digits, of
    /// either case, at the very end. For an id without such a suffix, the whole id.
    ///
    /// ```
    /// use kv_core::RequestId;
    /// let id = RequestId::new("cmpl-abc-0-0123abcd").unwrap();
    /// assert_eq!(id.base(), "cmpl-abc-0");
    /// ```
    pub fn base(&self) -> &str {
        RequestId::base_of(self.as_str())
    }

    /// As [`base`](RequestId::base), of any text.
    pub fn base_of(text: &str) -> &str {
        let Some(cut) = text.len().checked_sub(9) else { return text };
        match text.as_bytes().get(cut..) {
            Some([b'-', hex @ ..]) if hex.iter().all(u8::is_ascii_hexdigit) => &text[..cut],
            _ => text,
        }
    }
}

/// The rendezvous key of one request: both sides open their sessions under the same room.
///
/// SGLang's routers hand out numbers (`bootstrap_room`). vLLM's proxies hand out a request id, to
/// which each engine adds a suffix of its own; see [`RequestId::base`]. Ids are compared whole,
/// except for engines that say that they add a suffix
/// ([`suffixes_requests`](crate::KvArgsBuilder::suffixes_requests)): there the suffix is left out.
///
/// With serde a room is either a number or a text.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Room {
    /// A number that the router has drawn.
    Number(u64),
    /// The request id of the server.
    Request(RequestId),
}

impl Serialize for Room {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        match self {
            Room::Number(number) => out.serialize_u64(*number),
            Room::Request(id) => id.serialize(out),
        }
    }
}

impl<'de> Deserialize<'de> for Room {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Room, D::Error> {
        from.deserialize_any(RoomVisitor)
    }
}

struct RoomVisitor;

impl Visitor<'_> for RoomVisitor {
    type Value = Room;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a number from 0 on, or the id of a request")
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Room, E> {
        Ok(Room::Number(number))
    }

    fn visit_str<E: Error>(self, id: &str) -> Result<Room, E> {
        Room::request(id).map_err(E::custom)
    }
}

impl Room {
    /// A room named by a request id. Fails if the id is empty, too long, or contains a control
    /// character.
    pub fn request(id: &str) -> Result<Room, IdError> {
        RequestId::new(id).map(Room::Request)
    }

    /// The request id without its engine's suffix; `None` for numbered rooms.
    pub fn base(&self) -> Option<&str> {
        match self {
            Room::Number(_) => None,
            Room::Request(id) => Some(id.base()),
        }
    }

    /// The room without its engine's suffix, if `suffixed` says that the engine appends one.
    pub(crate) fn unsuffixed(&self, suffixed: bool) -> Room {
        match self {
            Room::Request(id) if suffixed => {
                // A suffix may be all there is of an id.
                Room::Request(RequestId::new(id.base()).unwrap_or_else(|_| id.clone()))
            }
            _ => self.clone(),
        }
    }
}

impl From<u64> for Room {
    fn from(number: u64) -> Room {
        Room::Number(number)
    }
}

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Room::Number(number) => write!(f, "{number}"),
            Room::Request(id) => write!(f, "{id}"),
        }
    }
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A worker, named by its engine and its rank. A restarted worker has the same `WorkerId` and
/// another [`Incarnation`].
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerId {
    /// The engine that the rank belongs to.
    pub engine: EngineId,
    /// The rank within the engine, from 0 (SGLang: `engine_rank`).
    pub rank: u32,
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.engine, self.rank)
    }
}

impl fmt::Debug for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One life of a worker, drawn at random when the worker starts: a restarted worker is a different
/// peer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Incarnation(NonZeroU64);

impl Incarnation {
    /// An incarnation from random bits (zero is mapped to one).
    pub const fn from_random(bits: u64) -> Incarnation {
        match NonZeroU64::new(bits) {
            Some(bits) => Incarnation(bits),
            None => Incarnation(NonZeroU64::MIN),
        }
    }

    /// The incarnation as a number, never zero.
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

number_id!(
    /// A session within one worker. A worker never uses a session id twice.
    SessionId(u64)
);
number_id!(
    /// One attempt of a receiver to be served by one peer. The receiver draws attempts in rising
    /// order for each peer and never reuses one, so that a late frame of an old attempt is never
    /// taken for a frame of the next attempt.
    Attempt(u64)
);

impl Attempt {
    /// Stands for all attempts that are not drawn yet. Receivers draw numbers from 1.
    pub const LATER: Attempt = Attempt(0);
}

number_id!(
    /// A row of the aux regions: the small per-request data (first token, log-probabilities, room)
    /// that travel with the last chunk.
    AuxIndex(u32)
);
number_id!(
    /// A chunk of a sending session. Chunks are numbered from 0 in the order in which they are
    /// given, whether with `send` or with `begin_chunk`.
    ChunkId(u32)
);
number_id!(
    /// A peer within one worker: one incarnation of a remote worker. A worker never uses a peer id
    /// twice.
    PeerId(u64)
);
number_id!(
    /// A data operation (post) within one worker. A worker never uses a post id twice.
    PostId(u64)
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_id_drops_exactly_one_engine_suffix() {
        let base = |id: &str| RequestId::new(id).unwrap().base().to_owned();
        assert_eq!(base("cmpl-abc-0-0123abcd"), "cmpl-abc-0");
        assert_eq!(base("cmpl-abc-0"), "cmpl-abc-0");
        assert_eq!(base("cmpl-abc-0-0123ABCD"), "cmpl-abc-0");
        assert_eq!(base("x-0123abcd-89abcdef"), "x-0123abcd");
        assert_eq!(base("x-0123abcg"), "x-0123abcg");
        assert_eq!(base("-0123abcd"), "");
        assert_eq!(base("é-0123abc"), "é-0123abc");
        assert_eq!(base("日本語"), "日本語");
    }

    #[test]
    fn text_ids_are_bounded_on_every_way_in() {
        assert!(EngineId::new("").is_err());
        assert!(EngineId::new(&"x".repeat(MAX_ENGINE_ID)).is_ok());
        assert!(EngineId::new(&"x".repeat(MAX_ENGINE_ID + 1)).is_err());
        assert!(EngineId::new("a\nb").is_err());
        let long = serde_json::to_string(&"x".repeat(MAX_REQUEST_ID + 1)).unwrap();
        assert!(serde_json::from_str::<RequestId>(&long).is_err());
    }
}
