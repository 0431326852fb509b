//! The notifications that vLLM's NIXL connectors send to each other's agents.
//!
//! | bytes | from | says |
//! |---|---|---|
//! | `HB:<id>,<id>…` | reader (pull), receiver (push) | the requests with these ids at the holder are still wanted |
//! | `<id>:<n>` | reader (pull) | the request was read; the holder frees its pages after `n` such notifications |
//! | `<id>:<n>` | writer (push) | the request was written; `n` is the number of tensor-parallel ranks of the writer |
//! | `PUSH_REG:` and msgpack | receiver (push) | the pages of a request, into which the writer writes |
//!
//! An id is any text. vLLM cuts `<id>:<n>` at the last colon and a heartbeat at every comma, and looks at the
//! beginning first: heartbeats do not reach a request whose id has a comma, and the end of a request whose id is
//! `HB` is taken for a heartbeat.

use std::fmt;

use bytes::Bytes;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// Longest id in a notification, in bytes. vLLM has no bound.
pub(crate) const MAX_ID: usize = 4096;
/// Most ranks of an engine in one dimension, and most notifications that end one request.
pub(crate) const MAX_RANKS: u32 = 65_536;
/// Most cache groups of a registration.
const MAX_GROUPS: usize = 64;

const HEARTBEAT: &str = "HB:";
const REGISTRATION: &[u8] = b"PUSH_REG:";

/// One notification of a foreign agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Notification<'a> {
    /// The requests with these ids are still wanted.
    Heartbeat(HeartbeatIds<'a>),
    /// A request was read, or was written.
    Done {
        /// The id of the request at the agent that is told.
        request: &'a str,
        /// How many notifications end the request (pull), or how many tensor-parallel ranks the writer has
        /// (push); 1 to [`MAX_RANKS`].
        count: u32,
    },
    /// The pages of a request that is to be written.
    Registration(Box<PushRegistration>),
}

/// The ids in a heartbeat. Two heartbeats are equal if they name the same ids, however many commas are between those.
#[derive(Debug, Clone, Eq)]
pub(crate) struct HeartbeatIds<'a>(&'a str);

impl PartialEq for HeartbeatIds<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl<'a> HeartbeatIds<'a> {
    /// The ids in the order of the heartbeat, without empty ones.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.0.split(',').filter(|id| !id.is_empty())
    }
}

/// Why bytes are not a notification of vLLM.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotificationError {
    #[error("the notification is not UTF-8 from byte {0} on")]
    Utf8(usize),
    #[error("the notification has no colon between an id and a number")]
    Colon,
    #[error("the number behind the id is {0:?}, which is not 1 to {MAX_RANKS}")]
    Count(String),
    #[error("{field} has {got} bytes, and must have 1 to {max}")]
    Length { field: &'static str, got: usize, max: usize },
    #[error("{field} is {got}, and must be 1 to {max}")]
    Number { field: &'static str, got: u32, max: u32 },
    #[error("the registration is not a map of vLLM's keys: {0}")]
    Map(String),
    #[error("{0} bytes follow the registration")]
    Trailing(usize),
}

impl Notification<'_> {
    pub(crate) fn decode(bytes: &[u8]) -> Result<Notification<'_>, NotificationError> {
        if let Some(map) = bytes.strip_prefix(REGISTRATION) {
            return PushRegistration::decode(map).map(|found| Notification::Registration(Box::new(found)));
        }
        let text = str::from_utf8(bytes).map_err(|error| NotificationError::Utf8(error.valid_up_to()))?;
        if let Some(ids) = text.strip_prefix(HEARTBEAT) {
            return Ok(Notification::Heartbeat(HeartbeatIds(ids)));
        }
        let (request, number) = text.rsplit_once(':').ok_or(NotificationError::Colon)?;
        check_id("the id", request)?;
        let decimal = number.len() <= 9 && number.bytes().all(|byte| byte.is_ascii_digit());
        let count = number.parse().ok().filter(|count| decimal && (1..=MAX_RANKS).contains(count));
        let shown = || NotificationError::Count(number.chars().take(16).collect());
        Ok(Notification::Done { request, count: count.ok_or_else(shown)? })
    }
}

/// The bytes that vLLM's connector would send for a notification.
#[cfg(feature = "fuzz")]
pub(crate) fn written_again(notification: &Notification<'_>) -> Bytes {
    match notification {
        Notification::Heartbeat(ids) => heartbeat(ids.iter()),
        Notification::Done { request, count } => done(request, *count),
        Notification::Registration(registration) => registration.encode(),
    }
}

#[cfg(feature = "fuzz")]
impl Notification<'_> {
    /// The requests that the notification names.
    pub(crate) fn requests(&self) -> Vec<String> {
        match self {
            Notification::Heartbeat(ids) => ids.iter().map(str::to_owned).collect(),
            Notification::Done { request, .. } => vec![(*request).to_owned()],
            Notification::Registration(registration) => vec![registration.request_id.clone()],
        }
    }
}

/// The heartbeat for the requests with these ids at their holder.
pub(crate) fn heartbeat<'a>(ids: impl IntoIterator<Item = &'a str>) -> Bytes {
    let mut text = HEARTBEAT.to_owned();
    for (position, id) in ids.into_iter().enumerate() {
        if position > 0 {
            text.push(',');
        }
        text.push_str(id);
    }
    text.into()
}

/// The notification that a request was read or written.
pub(crate) fn done(request: &str, count: u32) -> Bytes {
    format!("{request}:{count}").into()
}

/// What a receiver of vLLM tells a writer: where the request's KV goes. The fields are named and ordered as the
/// keys of vLLM's map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PushRegistration {
    /// The id of the request at the receiver.
    pub(crate) request_id: String,
    pub(crate) decode_engine_id: String,
    /// The host of the receiver's side channel.
    pub(crate) decode_host: String,
    pub(crate) decode_port: u16,
    /// Tensor-parallel ranks of the receiver's engine.
    pub(crate) decode_tp_size: u32,
    /// The numbers of the receiver's blocks, in the order of the request, for each cache group. Where the receiver
    /// has a prefix already, these are the last blocks of the request.
    #[serde(deserialize_with = "groups")]
    pub(crate) local_block_ids: Vec<Vec<u32>>,
    pub(crate) remote_engine_id: String,
    /// The host of the writer's side channel, as the receiver knows it.
    pub(crate) remote_host: String,
    pub(crate) remote_port: u16,
    /// Tensor-parallel ranks of the writer's engine, as the receiver knows them.
    pub(crate) remote_tp_size: u32,
    /// Pipeline stages of the writer's engine, as the receiver knows them. vLLM takes 1 where the key is missing.
    #[serde(default = "one")]
    pub(crate) remote_pp_size: u32,
}

impl PushRegistration {
    /// The notification that carries the registration.
    pub(crate) fn encode(&self) -> Bytes {
        let map = rmp_serde::to_vec_named(self).unwrap_or_default();
        [REGISTRATION, &map].concat().into()
    }

    fn decode(map: &[u8]) -> Result<PushRegistration, NotificationError> {
        if !matches!(map.first(), Some(0x80..=0x8f | 0xde | 0xdf)) {
            return Err(NotificationError::Map("the bytes do not begin a map".to_owned()));
        }
        let mut rest = map;
        let mut reader = rmp_serde::Deserializer::new(&mut rest);
        let found = PushRegistration::deserialize(&mut reader)
            .map_err(|error| NotificationError::Map(error.to_string().chars().take(128).collect()))?;
        match rest.len() {
            0 => found.checked(),
            more => Err(NotificationError::Trailing(more)),
        }
    }

    fn checked(self) -> Result<PushRegistration, NotificationError> {
        check_id("request_id", &self.request_id)?;
        check_id("decode_engine_id", &self.decode_engine_id)?;
        check_id("decode_host", &self.decode_host)?;
        for (field, got, max) in [
            ("decode_port", u32::from(self.decode_port), u32::from(u16::MAX)),
            ("decode_tp_size", self.decode_tp_size, MAX_RANKS),
            ("remote_tp_size", self.remote_tp_size, MAX_RANKS),
            ("remote_pp_size", self.remote_pp_size, MAX_RANKS),
        ] {
            if got == 0 || got > max {
                return Err(NotificationError::Number { field, got, max });
            }
        }
        Ok(self)
    }
}

fn check_id(field: &'static str, id: &str) -> Result<(), NotificationError> {
    match id.len() {
        1..=MAX_ID => Ok(()),
        got => Err(NotificationError::Length { field, got, max: MAX_ID }),
    }
}

fn one() -> u32 {
    1
}

/// Reads blocks of groups. A plain list of blocks is the list of one group: vLLM writes that, too.
fn groups<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Vec<u32>>, D::Error> {
    from.deserialize_seq(Groups)
}

struct Groups;

/// An element of the outer list.
struct Element(Result<u32, Vec<u32>>);

impl<'de> Visitor<'de> for Groups {
    type Value = Vec<Vec<u32>>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("lists of blocks")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Vec<u32>>, A::Error> {
        let (mut groups, mut plain) = (Vec::new(), Vec::new());
        while let Some(Element(element)) = list.next_element()? {
            match element {
                Ok(block) => plain.push(block),
                Err(blocks) => groups.push(blocks),
            }
            if groups.len() > MAX_GROUPS || !groups.is_empty() && !plain.is_empty() {
                return Err(A::Error::custom("blocks and lists of blocks are mixed, or lists are too many"));
            }
        }
        if !plain.is_empty() {
            groups.push(plain);
        }
        Ok(groups)
    }
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Element, D::Error> {
        from.deserialize_any(ElementVisitor)
    }
}

struct ElementVisitor;

impl<'de> Visitor<'de> for ElementVisitor {
    type Value = Element;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a block or a list of blocks")
    }

    fn visit_u64<E: Error>(self, block: u64) -> Result<Element, E> {
        u32::try_from(block).map(|block| Element(Ok(block))).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Element, A::Error> {
        let mut blocks = Vec::new();
        while let Some(block) = list.next_element()? {
            blocks.push(block);
        }
        Ok(Element(Err(blocks)))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn registration() -> PushRegistration {
        PushRegistration {
            request_id: "cmpl-7-0-0123abcd".to_owned(),
            decode_engine_id: "D-engine".to_owned(),
            decode_host: "127.0.0.1".to_owned(),
            decode_port: 15_601,
            decode_tp_size: 1,
            local_block_ids: vec![vec![4, 5, 300]],
            remote_engine_id: "P-engine".to_owned(),
            remote_host: "127.0.0.1".to_owned(),
            remote_port: 15_600,
            remote_tp_size: 1,
            remote_pp_size: 1,
        }
    }

    /// A registration with one key changed, as bytes.
    fn with(key: &str, value: serde_json::Value) -> Vec<u8> {
        let mut map = serde_json::to_value(registration()).unwrap();
        map[key] = value;
        [REGISTRATION, &rmp_serde::to_vec_named(&map).unwrap()].concat()
    }

    #[test]
    fn an_id_may_hold_colons_and_any_letters_and_is_cut_at_the_last_colon() {
        for id in ["cmpl-7-0-0123abcd", "a:b:3", "日本", " x ", "HBx", "a,b"] {
            let bytes = done(id, 2);
            assert_eq!(
                Notification::decode(&bytes),
                Ok(Notification::Done { request: id, count: 2 }),
                "{id}"
            );
        }
    }

    #[test]
    fn a_heartbeat_names_its_requests_in_order() {
        let ids = |bytes: &[u8]| match Notification::decode(bytes) {
            Ok(Notification::Heartbeat(ids)) => ids.iter().map(str::to_owned).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        assert_eq!(heartbeat(["a:1", "b", "ü"]), "HB:a:1,b,ü");
        assert_eq!(ids(&heartbeat(["a:1", "b", "ü"])), ["a:1", "b", "ü"]);
        assert!(ids(b"HB:").is_empty());
        assert_eq!(ids(b"HB:,a,,"), ["a"]);
        assert_eq!(Notification::decode(b"HB:,a,,"), Notification::decode(b"HB:a"));
        assert_ne!(Notification::decode(b"HB:a,b"), Notification::decode(b"HB:b,a"));
    }

    #[test]
    fn what_is_no_notification_of_vllm_is_refused_with_the_field() {
        use NotificationError::{Colon, Count, Length, Utf8};
        let refused = |bytes: &[u8]| Notification::decode(bytes).unwrap_err();
        assert_eq!(refused(b"no number"), Colon);
        assert_eq!(refused(b""), Colon);
        assert_eq!(refused(b"ab\xff:1"), Utf8(2));
        assert_eq!(refused(b":1"), Length { field: "the id", got: 0, max: MAX_ID });
        let long = done(&"x".repeat(MAX_ID + 1), 1);
        assert_eq!(refused(&long), Length { field: "the id", got: MAX_ID + 1, max: MAX_ID });
        for number in ["", "0", "-1", "+1", "1_0", " 1", "1.0", "65537", "99999999999"] {
            assert_eq!(refused(format!("id:{number}").as_bytes()), Count(number.to_owned()));
        }
    }

    #[test]
    fn a_registration_is_vllms_map_of_eleven_keys() {
        let bytes = registration().encode();
        assert_eq!(&bytes[..10], b"PUSH_REG:\x8b");
        assert_eq!(&bytes[10..21], b"\xaarequest_id");
        let decoded = Notification::decode(&bytes);
        assert_eq!(decoded, Ok(Notification::Registration(Box::new(registration()))));
    }

    #[test]
    fn a_plain_list_is_one_group_and_unknown_keys_do_not_matter() {
        let blocks = |bytes: Vec<u8>| match Notification::decode(&bytes) {
            Ok(Notification::Registration(found)) => found.local_block_ids,
            other => panic!("{other:?}"),
        };
        assert_eq!(blocks(with("local_block_ids", serde_json::json!([7, 8]))), [[7, 8]]);
        assert_eq!(blocks(with("local_block_ids", serde_json::json!([]))), Vec::<Vec<u32>>::new());
        assert_eq!(blocks(with("local_block_ids", serde_json::json!([[7], []]))), [vec![7], vec![]]);
        assert_eq!(blocks(with("new_in_0_34", serde_json::json!({"a": [1]}))), [[4, 5, 300]]);
    }

    #[test]
    fn a_registration_with_a_wrong_value_is_refused() {
        use serde_json::json;
        for (key, value) in [
            ("request_id", json!("")),
            ("request_id", json!(7)),
            ("decode_host", json!(null)),
            ("decode_port", json!(0)),
            ("decode_port", json!(65_536)),
            ("decode_tp_size", json!(0)),
            ("remote_tp_size", json!(MAX_RANKS + 1)),
            ("local_block_ids", json!([[1], 2])),
            ("local_block_ids", json!([[-1]])),
            ("local_block_ids", json!([[4_294_967_296_u64]])),
            ("local_block_ids", json!([[[1]]])),
            ("local_block_ids", json!(vec![[1]; MAX_GROUPS + 1])),
            ("local_block_ids", json!("x")),
        ] {
            let decoded = Notification::decode(&with(key, value.clone())).map(drop);
            assert!(decoded.is_err(), "{key} {value}");
        }
        let whole = registration().encode();
        assert!(Notification::decode(&whole[..whole.len() - 1]).is_err());
        let more = [&whole[..], b"x"].concat();
        assert_eq!(Notification::decode(&more), Err(NotificationError::Trailing(1)));
        let list = [REGISTRATION, &rmp_serde::to_vec(&registration()).unwrap()].concat();
        assert!(matches!(Notification::decode(&list), Err(NotificationError::Map(_))));
    }
}
