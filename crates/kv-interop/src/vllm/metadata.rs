//! The messages of vLLM's side channel: the question for a rank's metadata, and the answer of two frames.
//!
//! The first frame of the answer is a [`NixlHandshakePayload`], which holds the encoded [`NixlAgentMetadata`].
//! A reader compares the hash before the reader decodes the metadata, because engines of another version may
//! write other metadata. The second frame is the time on the clock of the engine's process.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use kv_core::layout::MAX_REGIONS;
use serde::{Deserialize, Serialize};

/// The first element of the question for metadata.
const GET_META_MSG: &[u8] = b"get_meta_msg";
/// Most bytes of a NIXL agent's own metadata.
const MAX_AGENT_METADATA: usize = 1 << 20;
/// Most bytes of a text in the metadata.
const MAX_TEXT: usize = 1 << 10;

/// The first frame of the answer: vLLM's `NixlHandshakePayload`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NixlHandshakePayload {
    /// The hash over everything on which both engines must agree: 64 hexadecimal digits in vLLM, and the empty text
    /// for a worker with [`Compatibility::Unchecked`](super::Compatibility::Unchecked).
    pub compatibility_hash: String,
    /// The msgpack of a [`NixlAgentMetadata`].
    pub agent_metadata_bytes: Bytes,
}

/// What a vLLM rank tells peers about its cache: vLLM's `NixlAgentMetadata`. Twelve fields are required; the
/// other fields have the defaults that vLLM gives them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NixlAgentMetadata {
    /// The engine of the rank.
    pub engine_id: String,
    /// The metadata of the rank's NIXL agent, as NIXL writes them.
    pub agent_metadata: Bytes,
    /// The address of block 0 of each region.
    pub kv_caches_base_addr: Vec<u64>,
    /// The device of the regions, as the rank gave it to NIXL.
    pub device_id: u64,
    /// Physical blocks of each region.
    pub num_blocks: u64,
    /// Bytes of a physical block, for each region.
    pub block_lens: Vec<u64>,
    /// Bytes from a physical block to the next one, for each region.
    pub block_strides: Vec<u64>,
    /// The order of a block's axes, such as `LBHNC`: layers, blocks, heads, tokens, content.
    pub kv_cache_layout: String,
    /// Tokens of a physical block.
    pub block_size: u32,
    /// Bytes of the two states of a recurrent layer; zero in a cache without such layers.
    pub ssm_sizes: (u64, u64),
    /// The name of the attention backend, such as `FLASH_ATTN`.
    pub attn_backend_name: String,
    /// How many physical blocks one block number of a request stands for.
    pub physical_blocks_per_logical_kv_block: u32,
    /// Physical blocks of each region, where regions differ.
    #[serde(default)]
    pub region_num_blocks: Option<Vec<u64>>,
    /// The cache group of each region; -1 for a region of all groups.
    #[serde(default)]
    pub region_group_ids: Option<Vec<i64>>,
    /// The names of the layers in the regions. vLLM compares the names if they are given.
    #[serde(default)]
    pub region_names: Option<Vec<String>>,
    /// The kind of memory of each region: `DRAM` or `VRAM`. Without the list, the reader's own kind.
    #[serde(default)]
    pub region_mem_types: Option<Vec<String>>,
    /// Decode-context-parallel ranks of the engine.
    #[serde(default = "one")]
    pub dcp_size: u32,
    /// Prefill-context-parallel ranks of the engine.
    #[serde(default = "one")]
    pub pcp_size: u32,
    /// Bytes of a page of short-convolution states, in models that have such states.
    #[serde(default)]
    pub ple_block_len: Option<u64>,
    /// The names of all layers of each region, where several layers share a region.
    #[serde(default)]
    pub region_members: Vec<Vec<String>>,
    /// The place of each packed layer in the blocks of its region: offset and bytes.
    #[serde(default)]
    pub packed_member_layouts: BTreeMap<String, (u64, u64)>,
}

fn one() -> u32 {
    1
}

/// Why a message of the side channel is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MetadataError {
    /// The bytes are not the msgpack of this message. The text names the field, if the decoder knows it.
    #[error("{message} cannot be decoded: {text}")]
    Malformed {
        /// The name of the message.
        message: &'static str,
        /// What the decoder says.
        text: String,
    },
    /// A text or a list is longer than any that vLLM writes.
    #[error("{field} has {got} items or bytes; at most {max} are read")]
    TooLong {
        /// The name of the field.
        field: &'static str,
        /// The length that was found.
        got: usize,
        /// The longest that is read.
        max: usize,
    },
    /// The lists of regions differ in length.
    #[error("{field} has {got} regions, but kv_caches_base_addr has {regions}")]
    Regions {
        /// The list that differs.
        field: &'static str,
        /// The length of the list.
        got: usize,
        /// How many regions there are.
        regions: usize,
    },
    /// The answer has another number of frames than two.
    #[error("the answer has {got} frames; vLLM sends 2")]
    Frames {
        /// The number that was found.
        got: usize,
    },
    /// The second frame is no time.
    #[error("the time of the engine is {got} seconds")]
    Clock {
        /// The value in the message.
        got: String,
    },
}

/// The question for the metadata of one rank of an engine.
pub fn question(pp_rank: u32, tp_rank: u32) -> Bytes {
    written(&(Bytes::from_static(GET_META_MSG), pp_rank, tp_rank))
}

/// The rank for whose metadata a message asks, as (pp_rank, tp_rank); `None` for other messages.
pub fn asked(message: &[u8]) -> Option<(u32, u32)> {
    let mut reader = rmp_serde::Deserializer::new(io::Cursor::new(message));
    let (name, pp_rank, tp_rank) = <(Bytes, u32, u32)>::deserialize(&mut reader).ok()?;
    let whole = reader.position() == message.len() as u64;
    (name == GET_META_MSG && whole).then_some((pp_rank, tp_rank))
}

/// The second frame of an answer that is sent at this time on the clock of this process.
pub fn clock(now: Duration) -> Bytes {
    written(&now.as_secs_f64())
}

/// The two frames of an answer: the payload, not decoded further, and the time on the engine's clock.
pub fn answer(frames: &[Bytes]) -> Result<(NixlHandshakePayload, Duration), MetadataError> {
    let [payload, clock] = frames else { return Err(MetadataError::Frames { got: frames.len() }) };
    let payload = NixlHandshakePayload::decode(payload)?;
    let seconds: f64 = decoded("the engine's time", clock)?;
    let clock = Duration::try_from_secs_f64(seconds)
        .map_err(|_| MetadataError::Clock { got: seconds.to_string() })?;
    Ok((payload, clock))
}

impl NixlHandshakePayload {
    /// The payload as vLLM reads it.
    pub fn encode(&self) -> Bytes {
        written(self)
    }

    /// Reads a payload. Fields that are not known are ignored.
    pub fn decode(bytes: &[u8]) -> Result<NixlHandshakePayload, MetadataError> {
        let payload: NixlHandshakePayload = decoded("NixlHandshakePayload", bytes)?;
        at_most("compatibility_hash", payload.compatibility_hash.len(), MAX_TEXT)?;
        Ok(payload)
    }
}

impl NixlAgentMetadata {
    /// The metadata as vLLM reads them.
    pub fn encode(&self) -> Bytes {
        written(self)
    }

    /// Reads metadata, and checks the lengths of all lists. Fields that are not known are ignored.
    pub fn decode(bytes: &[u8]) -> Result<NixlAgentMetadata, MetadataError> {
        let metadata: NixlAgentMetadata = decoded("NixlAgentMetadata", bytes)?;
        metadata.check_lengths()?;
        Ok(metadata)
    }

    fn check_lengths(&self) -> Result<(), MetadataError> {
        at_most("agent_metadata", self.agent_metadata.len(), MAX_AGENT_METADATA)?;
        for (field, text) in [
            ("engine_id", &self.engine_id),
            ("kv_cache_layout", &self.kv_cache_layout),
            ("attn_backend_name", &self.attn_backend_name),
        ] {
            at_most(field, text.len(), MAX_TEXT)?;
        }
        let regions = self.kv_caches_base_addr.len();
        at_most("kv_caches_base_addr", regions, MAX_REGIONS)?;
        let len = |list: &Option<Vec<_>>| list.as_ref().map(Vec::len);
        let lists = [
            ("block_lens", Some(self.block_lens.len())),
            ("block_strides", Some(self.block_strides.len())),
            ("region_num_blocks", self.region_num_blocks.as_ref().map(Vec::len)),
            ("region_group_ids", self.region_group_ids.as_ref().map(Vec::len)),
            ("region_names", len(&self.region_names)),
            ("region_mem_types", len(&self.region_mem_types)),
        ];
        for (field, got) in lists {
            if let Some(got) = got.filter(|got| *got != regions) {
                return Err(MetadataError::Regions { field, got, regions });
            }
        }
        Ok(())
    }
}

fn at_most(field: &'static str, got: usize, max: usize) -> Result<(), MetadataError> {
    if got <= max { Ok(()) } else { Err(MetadataError::TooLong { field, got, max }) }
}

fn decoded<'a, T: Deserialize<'a>>(message: &'static str, bytes: &'a [u8]) -> Result<T, MetadataError> {
    rmp_serde::from_slice(bytes).map_err(|error| {
        let text = error.to_string().chars().take(200).collect();
        MetadataError::Malformed { message, text }
    })
}

/// Msgpack with field names, of a value whose parts all can be written.
fn written(value: &impl Serialize) -> Bytes {
    rmp_serde::to_vec_named(value).map(Bytes::from).unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;

    /// A rank with two layers of eight blocks, with nothing but the fields that vLLM requires.
    pub(crate) fn required() -> serde_json::Value {
        json!({
            "engine_id": "p-0", "agent_metadata": [], "kv_caches_base_addr": [0x1000_u64, 0x9000_u64],
            "device_id": 0, "num_blocks": 8, "block_lens": [4096, 4096], "block_strides": [4096, 4096],
            "kv_cache_layout": "LBHNC", "block_size": 16, "ssm_sizes": [0, 0],
            "attn_backend_name": "FLASH_ATTN", "physical_blocks_per_logical_kv_block": 1,
        })
    }

    fn decode(value: &serde_json::Value) -> Result<NixlAgentMetadata, MetadataError> {
        NixlAgentMetadata::decode(&rmp_serde::to_vec_named(value).unwrap())
    }

    #[test]
    fn the_question_for_metadata_has_the_bytes_that_vllm_sends() {
        let bytes = question(0, 0);
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "93c40c6765745f6d6574615f6d73670000");
        assert_eq!(asked(&question(3, 300)), Some((3, 300)));
        assert_eq!(asked(&written(&(Bytes::from_static(b"other"), 0, 0))), None);
        assert_eq!(asked(b"\xff"), None);
    }

    #[test]
    fn twelve_fields_are_required_and_the_others_have_vllms_defaults() {
        let mut value = required();
        let whole = decode(&value).unwrap();
        assert_eq!((whole.dcp_size, whole.pcp_size, whole.region_names), (1, 1, None));
        assert_eq!(whole.block_strides, [4096, 4096]);
        value["a field of a later version"] = json!({"x": [1, 2]});
        value["region_names"] = json!(null);
        assert!(decode(&value).is_ok());
        let fields: Vec<String> = required().as_object().unwrap().keys().cloned().collect();
        assert_eq!(fields.len(), 12);
        for field in fields {
            let mut value = required();
            value.as_object_mut().unwrap().remove(&field);
            let error = decode(&value).unwrap_err().to_string();
            assert!(error.contains(&field), "{field}: {error}");
        }
    }

    #[test]
    fn lists_of_another_length_are_refused_with_the_field_and_both_lengths() {
        for field in ["block_lens", "block_strides", "region_num_blocks", "region_group_ids"] {
            let mut value = required();
            value[field] = json!([1, 2, 3]);
            let error = MetadataError::Regions { field: leak(field), got: 3, regions: 2 };
            assert_eq!(decode(&value), Err(error));
        }
        let mut value = required();
        value["kv_caches_base_addr"] = json!(vec![1; MAX_REGIONS + 1]);
        let (got, max) = (MAX_REGIONS + 1, MAX_REGIONS);
        assert_eq!(decode(&value), Err(MetadataError::TooLong { field: "kv_caches_base_addr", got, max }));
    }

    fn leak(text: &str) -> &'static str {
        Box::leak(text.to_owned().into_boxed_str())
    }

    #[test]
    fn an_answer_has_two_frames_and_bytes_are_written_as_vllm_wants_them() {
        let metadata = decode(&required()).unwrap();
        let agent_metadata_bytes = metadata.encode();
        let payload = NixlHandshakePayload { compatibility_hash: "ab".repeat(32), agent_metadata_bytes };
        let frames = [payload.encode(), clock(Duration::from_millis(1500))];
        assert_eq!((frames[1].len(), frames[1][0]), (9, 0xcb));
        // A map of two; the hash as text, the metadata as bytes.
        assert_eq!(frames[0][0], 0x82);
        let after_key = 1 + 1 + "compatibility_hash".len();
        assert_eq!(frames[0][after_key], 0xd9);
        assert_eq!(frames[0][after_key + 2 + 64 + 1 + "agent_metadata_bytes".len()], 0xc5);
        assert_eq!(answer(&frames), Ok((payload, Duration::from_millis(1500))));
        assert_eq!(answer(&frames[..1]), Err(MetadataError::Frames { got: 1 }));
        let odd = [frames[0].clone(), written(&f64::NAN)];
        assert_eq!(answer(&odd), Err(MetadataError::Clock { got: "NaN".to_owned() }));
        assert_eq!(NixlAgentMetadata::decode(&metadata.encode()), Ok(metadata));
    }

    #[test]
    fn no_prefix_and_no_damage_of_an_answer_is_more_than_an_error() {
        let whole = decode(&required()).unwrap().encode();
        for end in 0..whole.len() {
            assert!(NixlAgentMetadata::decode(&whole[..end]).is_err(), "cut at {end}");
        }
        for place in 0..whole.len() {
            for bit in 0..8 {
                let mut bytes = whole.to_vec();
                bytes[place] ^= 1 << bit;
                let _ = NixlAgentMetadata::decode(&bytes);
            }
        }
        // An array that claims four thousand million addresses.
        assert!(NixlAgentMetadata::decode(b"\x81\xb3kv_caches_base_addr\xdd\xff\xff\xff\xff").is_err());
    }
}
