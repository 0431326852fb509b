//! The messages between the router and the processes: one JSON object in each line.
//!
//! Decode ranks speak only the messages that all examples share.

use kv_examples::control::{Event, NamedError};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::images::ImageRef;

/// From the router to an encoder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum EncodeCommand {
    /// Compute the embedding of an image, unless the encoder's cache has the embedding.
    Encode {
        /// The number by which the router knows the item.
        item: usize,
        /// The position of the image among the images of its request.
        index: u32,
        /// The image to encode.
        image: ImageRef,
    },
    /// No more images come: report the cache, and end with the connection.
    Finish,
}

/// From the router to the prefill process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum PrefillCommand {
    /// Get the embeddings of this prompt's images, compute the prompt, and hand its KV over.
    Prefill {
        /// The room of the request, the same on both sides.
        room: u64,
        /// The tokens of the prompt; those of images stand for rows of embeddings.
        prompt: Vec<u32>,
        /// The images, in the order of the prompt.
        items: Vec<Item>,
        /// The `ec_transfer_params` of the request: which encoder has the embedding of which image.
        ec_transfer_params: Value,
        /// How long the transfer of the KV may take.
        deadline_ms: u64,
        /// The `kv_transfer_params` of the prefill side.
        params: Value,
    },
    /// No more requests come: end all requests, and report the pages and the cache.
    Finish,
}

/// An image in a prompt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Item {
    /// The file, content hash and size of the image.
    pub image: ImageRef,
    /// The position of the image's first token in the prompt.
    pub start: usize,
}

/// From any process to the router.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Said {
    /// What the ranks of all examples say.
    Rank(Event),
    /// What only the processes of this example say.
    Epd(EpdEvent),
}

/// What only the processes of this example say.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum EpdEvent {
    /// An encoder is ready for images.
    EncoderReady,
    /// An encoder has the embedding of an item in its cache.
    Encoded(Encoded),
    /// An encoder cannot serve an item.
    NotEncoded {
        /// The number of the item.
        item: usize,
        /// Why the encoder cannot serve the item.
        error: NamedError,
    },
    /// The prefill process has the embeddings of all images of a prompt, and computes the prompt next.
    Inputs {
        /// The room of the request.
        room: u64,
        /// Where the embedding of each image came from, in the order of the prompt.
        items: Vec<Arrived>,
    },
    /// After the command to finish: the state of the encoder cache of the process.
    Closed(Blocks),
}

/// How an encoder came to have the embedding of an item.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Encoded {
    /// The number of the item.
    pub item: usize,
    /// True if the encoder computed the embedding for this item; false if the cache had it.
    pub computed: bool,
    /// How long decoding and computing took, in milliseconds.
    pub compute_ms: f64,
    /// The `ec_transfer_params` of the image.
    pub ec_transfer_params: Value,
}

/// How the prefill process came to have the embedding of an image.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Arrived {
    /// Where the embedding came from.
    pub way: Way,
    /// The number of bytes of the embedding.
    pub bytes: u64,
    /// From the arrival of the request until the embedding was there, in milliseconds.
    pub ready_ms: f64,
    /// Why the embedding did not come from an encoder, if it did not.
    pub error: Option<NamedError>,
}

/// Where the prefill process got an embedding from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// The cache of the prefill process had the embedding.
    LocalHit,
    /// This request made the prefill process fetch the embedding from an encoder.
    Fetched,
    /// An earlier request had begun to fetch the embedding, which this request also waited for.
    Joined,
    /// The prefill process computed the embedding itself.
    EncodedHere,
}

/// The blocks of an encoder cache at the end of a run, and what it has moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocks {
    /// The number of blocks of the region.
    pub blocks: u64,
    /// The number of blocks in no entry.
    pub free: u64,
    /// The number of blocks of entries that nobody uses.
    pub cached: u64,
    /// The number of entries.
    pub entries: u64,
    /// The number of entries that were evicted.
    pub evictions: u64,
    /// The number of entries that peers have got from here.
    pub served: u64,
    /// The number of entries that came from peers: one for each transfer, however many requests waited for
    /// it.
    pub fetched: u64,
}

impl Blocks {
    /// The number of blocks that are neither free nor of an entry that could be evicted.
    pub fn leaked(&self) -> u64 {
        self.blocks.saturating_sub(self.free + self.cached)
    }
}
