//! Transfer parameters of the encoder cache: the JSON by which a router tells a consumer which producer has
//! which item of a request, with the names of vLLM's `ec_transfer_params`.
//!
//! What this module is: the JSON as types, in both directions ([`EcTransferParams`]), and the checks that a
//! consumer makes of an item before the fetch ([`Held::check`]). What it is not: a protocol. The module does
//! no I/O, and the JSON proves nothing: only the producer's answer to a fetch shows whether the producer has
//! the entry.
//!
//! ```text
//!          request with media                   ec_transfer_params
//! router ────────────────────▶ E ──▶ response ──▶ router ─────────▶ P: fetches the entries from E
//! ```
//!
//! The parameters are an object with one key for each item, the item's content hash (vLLM: `mm_hash`). The
//! value of a key is an object:
//!
//! | key | says |
//! |---|---|
//! | `modality` | `image`, `video` or `audio` |
//! | `item_indices` | the positions, among the request's items of this modality, at which the content occurs |
//! | `metadata` | fields for the placeholder tokens, such as `image_grid_thw`; passed on unchanged |
//! | `peer_host`, `peer_port` | the bootstrap server of the producer; absent if no producer has the entry |
//! | `size_bytes` | bytes of all blocks of the entry, the last block counted in full |
//! | `shape` | rows and width of the embedding, in elements |
//!
//! A whole number may be written as `7`, `7.0` or `"7"`, as vLLM accepts, too. A null counts as an absent field.
//! Fields that this module does not know are kept and written again.
//!
//! ```
//! use kv_core::ContentHash;
//! use kv_ec::params::{EcTransferParams, Held, Item};
//!
//! // The producer's response: 80 rows of 3584 elements of 2 bytes, in blocks of 7168 bytes.
//! let mut params = EcTransferParams::default();
//! let held = Held::new("10.0.0.7", 5601, 80, 3584, 2, 7168);
//! params.items.insert(ContentHash::new("3f9a")?, Item::new("image", [0]).held(held));
//! let json = params.to_json();
//!
//! // The consumer expects 80 rows for the item's placeholder tokens.
//! let params = EcTransferParams::parse(&json)?;
//! let (hash, item) = params.items.first_key_value().ok_or("no item")?;
//! let held = item.held.as_ref().ok_or("the encoder does not have it: encode locally")?;
//! let shape = held.check(80, 3584, 2, 7168)?;
//! assert_eq!((hash.as_str(), shape.bytes(), shape.blocks(7168)), ("3f9a", 573_440, 80));
//! let error = held.check(81, 3584, 2, 7168).unwrap_err();
//! assert_eq!(error.to_string(), "shape[0] is 80, and 81 is expected");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod parse;
#[cfg(test)]
mod tests;

pub use error::{EcParamsError, Problem};

use std::collections::BTreeMap;

use kv_core::ContentHash;
use serde_json::{Map, Value, json};

use crate::cache::Shape;

/// Longest JSON text that [`EcTransferParams::parse`] reads, in bytes.
pub const MAX_PARAMS_BYTES: usize = 4 << 20;
/// Most items of one request.
pub const MAX_ITEMS: usize = 4096;
/// Most positions at which one content occurs in a request.
pub const MAX_INDICES: usize = 4096;
/// Most keys of an item's `metadata`, and most keys of an item that this module does not know.
pub const MAX_EXTRA_KEYS: usize = 64;

/// The `ec_transfer_params` of one request or response.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EcTransferParams {
    /// The items by content hash. An item that occurs several times in a request is here once.
    pub items: BTreeMap<ContentHash, Item>,
}

/// One item of a request: an image, a video or a piece of audio.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Item {
    /// The kind of medium: `image`, `video`, `audio`.
    pub modality: String,
    /// Positions of the item among the request's items of this modality, from 0.
    pub item_indices: Vec<u32>,
    /// Fields for the item's placeholder tokens.
    pub metadata: Map<String, Value>,
    /// The producer that has the embedding, and its size there; `None` if no producer has it.
    pub held: Option<Held>,
    /// Fields that this module does not know.
    pub unknown: Map<String, Value>,
}

/// The producer that has an embedding, and the size of the embedding there.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Held {
    /// Name or address of the host of the producer's bootstrap server.
    pub peer_host: String,
    /// Port of the producer's bootstrap server, from 1.
    pub peer_port: u16,
    /// Bytes of all blocks of the entry, the last block counted in full.
    pub size_bytes: u64,
    /// Rows of the embedding.
    pub rows: u32,
    /// Elements of a row.
    pub width: u32,
}

impl EcTransferParams {
    /// The parameters as the text of one JSON object.
    pub fn to_json(&self) -> String {
        self.to_value().to_string()
    }

    /// The parameters as one JSON object, for a request's or a response's `ec_transfer_params`.
    pub fn to_value(&self) -> Value {
        self.items.iter().map(|(hash, item)| (hash.to_string(), item.to_value())).collect()
    }
}

impl Item {
    /// An item of this modality at these positions. The item has no metadata, and no producer has its embedding.
    pub fn new(modality: &str, item_indices: impl IntoIterator<Item = u32>) -> Item {
        Item {
            modality: modality.to_owned(),
            item_indices: item_indices.into_iter().collect(),
            metadata: Map::new(),
            held: None,
            unknown: Map::new(),
        }
    }

    /// The same item with the producer that has its embedding.
    pub fn held(mut self, held: Held) -> Item {
        self.held = Some(held);
        self
    }

    fn to_value(&self) -> Value {
        let mut map = self.unknown.clone();
        let mut set = |key: &str, value| map.insert(key.to_owned(), value);
        set("modality", json!(self.modality));
        set("item_indices", json!(self.item_indices));
        set("metadata", Value::Object(self.metadata.clone()));
        if let Some(held) = &self.held {
            set("peer_host", json!(held.peer_host));
            set("peer_port", json!(held.peer_port));
            set("size_bytes", json!(held.size_bytes));
            set("shape", json!([held.rows, held.width]));
        }
        Value::Object(map)
    }
}

impl Held {
    /// An embedding of `rows` rows of `width` elements of `element_bytes` bytes, in blocks of `block_bytes`
    /// bytes, at the producer that is registered with the bootstrap server at `peer_host` and `peer_port`.
    pub fn new(
        peer_host: &str,
        peer_port: u16,
        rows: u32,
        width: u32,
        element_bytes: u32,
        block_bytes: u32,
    ) -> Held {
        let size_bytes = whole_blocks(shape(rows, width, element_bytes), block_bytes);
        Held { peer_host: peer_host.to_owned(), peer_port, size_bytes, rows, width }
    }

    /// Compares the embedding with what the consumer expects: `rows` rows, one for each placeholder token of
    /// the item; the `width` and `element_bytes` of the consumer's model; and the consumer's `block_bytes`.
    /// Returns the shape of the entry.
    ///
    /// # Errors
    ///
    /// [`Problem::Conflict`] with the field, its value, and the value that the consumer expects. The consumer
    /// then encodes the item itself.
    pub fn check(
        &self,
        rows: u32,
        width: u32,
        element_bytes: u32,
        block_bytes: u32,
    ) -> Result<Shape, EcParamsError> {
        let shape = shape(rows, width, element_bytes);
        for (field, got, expected) in [
            ("shape[0]", u64::from(self.rows), u64::from(rows)),
            ("shape[1]", u64::from(self.width), u64::from(width)),
            ("size_bytes", self.size_bytes, whole_blocks(shape, block_bytes)),
        ] {
            if got != expected {
                return Err(EcParamsError::of(field, Problem::Conflict { got, expected }));
            }
        }
        Ok(shape)
    }
}

/// The shape in bytes. A row of 4 GiB or more, which no encoder has, counts as one byte less than 4 GiB.
fn shape(rows: u32, width: u32, element_bytes: u32) -> Shape {
    Shape { rows, row_bytes: width.saturating_mul(element_bytes) }
}

/// Bytes of the blocks that hold an embedding of this shape.
fn whole_blocks(shape: Shape, block_bytes: u32) -> u64 {
    let block = u64::from(block_bytes.max(1));
    shape.bytes().div_ceil(block).saturating_mul(block)
}
