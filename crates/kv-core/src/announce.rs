//! Announcements: which layers of which pages are final, and which device work must finish before
//! they may be read.
//!
//! A chunk that was given with [`begin_chunk`](crate::KvSender::begin_chunk) is moved layer by
//! layer, as the forward pass computes the layers. The server must not write a layer of the chunk
//! after it has announced that layer.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::id::ChunkId;

/// Layers of a chunk that are final: their bytes may be moved from now on.
///
/// The announcements of one chunk name disjoint layers of this rank, in any order. A region that
/// does not say what its items [hold](crate::Holds) cannot be cut: all of its layers are announced
/// together. The chunk is complete once every layer of the rank was named.
///
/// ```
/// use kv_core::{ChunkId, ReadyEvent, ReadyEventError, FinalLayers};
///
/// /// Asks the device whether the kernels before an event are over.
/// struct Event(fn() -> i32);
///
/// impl ReadyEvent for Event {
///     fn passed(&mut self) -> Result<bool, ReadyEventError> {
///         match (self.0)() {
///             0 => Ok(true),
///             600 => Ok(false),
///             code => Err(ReadyEventError::Device { code }),
///         }
///     }
/// }
///
/// let layers = FinalLayers::new(ChunkId(0), 0..8).after(Event(|| 0));
/// assert!(layers.ready_event.is_some());
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct FinalLayers {
    /// The chunk, by its position among the chunks of the session.
    pub chunk: ChunkId,
    /// The final layers, by their numbers in the model; `None` for all layers of this rank.
    pub layers: Option<Range<u32>>,
    /// The device work that must finish before the layers may be read; `None` if they are final
    /// now.
    pub ready_event: Option<Box<dyn ReadyEvent>>,
}

impl FinalLayers {
    /// Layers of a chunk that are final now. The layers are numbered as in the model.
    pub fn new(chunk: ChunkId, layers: Range<u32>) -> FinalLayers {
        FinalLayers { chunk, layers: Some(layers), ready_event: None }
    }

    /// All layers of a chunk. No layer of the chunk may have been announced before.
    pub fn all(chunk: ChunkId) -> FinalLayers {
        FinalLayers { chunk, layers: None, ready_event: None }
    }

    /// The same announcement, valid from the moment at which the ready event has passed.
    pub fn after(mut self, ready_event: impl ReadyEvent + 'static) -> FinalLayers {
        self.ready_event = Some(Box::new(ready_event));
        self
    }
}

/// Asks whether device work has finished, most often through a CUDA event that was recorded after
/// the kernels that compute the layers.
///
/// The worker calls [`passed`](ReadyEvent::passed) on its own thread, between other work, until the
/// answer is `true`: the call must not block. The worker's thread also drops the event; if the
/// worker has stopped, the event is dropped together with the command that carried it.
pub trait ReadyEvent: Send {
    /// True once all work before the event is done and its bytes are visible to the transport. An
    /// error or a panic fails the session, and no other session.
    fn passed(&mut self) -> Result<bool, ReadyEventError>;
}

impl<F: FnMut() -> Result<bool, ReadyEventError> + Send> ReadyEvent for F {
    fn passed(&mut self) -> Result<bool, ReadyEventError> {
        self()
    }
}

/// A ready event that is a word in memory, which the producer of the bytes raises: passed once the word has
/// reached a value.
///
/// A word needs no call of a device's driver to be asked, and the store that raises it can be part of a CUDA graph,
/// which an event that is recorded by the host cannot. The word may be shared (`Arc<AtomicU64>`), or lie in host
/// memory that a device writes: mapped pinned memory, as
/// [`AtomicU64::from_ptr`](std::sync::atomic::AtomicU64::from_ptr) makes it a `&'static AtomicU64`. The word only
/// grows while events wait for it, and is written after the bytes have become visible to the host
/// (`__threadfence_system` in a CUDA kernel). The source of the idea is the `UvmWatcher` of fabric-lib (arXiv
/// 2510.27656).
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use kv_core::{ChunkId, FinalLayers, ReadyEvent, ReadyWord};
///
/// // A forward pass counts the layers that it has written.
/// let written = Arc::new(AtomicU64::new(0));
/// let layers = FinalLayers::new(ChunkId(0), 0..8).after(ReadyWord::new(Arc::clone(&written), 8));
///
/// let mut event = ReadyWord::new(Arc::clone(&written), 8);
/// assert_eq!(event.passed(), Ok(false));
/// written.store(8, Ordering::Release);
/// assert_eq!(event.passed(), Ok(true));
/// ```
#[derive(Debug, Clone)]
pub struct ReadyWord<W> {
    word: W,
    reaches: u64,
}

impl<W: Deref<Target = AtomicU64> + Send> ReadyWord<W> {
    /// An event that passes once the word is `reaches` or more.
    pub fn new(word: W, reaches: u64) -> ReadyWord<W> {
        ReadyWord { word, reaches }
    }
}

impl<W: Deref<Target = AtomicU64> + Send> ReadyEvent for ReadyWord<W> {
    fn passed(&mut self) -> Result<bool, ReadyEventError> {
        // Ordered before the reads of the bytes that the word stands for.
        Ok(self.word.load(Ordering::Acquire) >= self.reaches)
    }
}

impl fmt::Debug for dyn ReadyEvent + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadyEvent")
    }
}

/// Why a ready event will never pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadyEventError {
    /// The device reports an error: the bytes that it computed cannot be trusted.
    #[error("the device reports error {code}")]
    Device {
        /// The device's own error number.
        code: i32,
    },
    /// The ready event panicked when the worker asked it. This is a bug in the ready event.
    #[error("the ready event panicked")]
    Panicked,
}

/// An announcement of final layers that the session cannot accept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayersError {
    /// The session was given no chunk with this number.
    #[error("chunk {chunk} is final, but the session was given only {given} chunks")]
    UnknownChunk {
        /// The number of the chunk in the announcement.
        chunk: u32,
        /// How many chunks the session was given.
        given: u32,
    },
    /// The range of layers is empty, or names layers that this rank does not have.
    #[error("layers {layers:?} are final, but this rank holds layers {held:?}")]
    OutOfRange {
        /// The layers in the announcement, by their numbers in the model.
        layers: Range<u32>,
        /// The layers of this rank, from the first to one past the last.
        held: Range<u32>,
    },
    /// Some of the layers were announced before.
    #[error("layers {layers:?} of chunk {chunk} are final, but layers {announced:?} were announced before")]
    Twice {
        /// The number of the chunk in the announcement.
        chunk: u32,
        /// The layers in the announcement, by their numbers in the model.
        layers: Range<u32>,
        /// A run of layers that were announced before; it shares some with the announcement.
        announced: Range<u32>,
    },
    /// The announcement names some, but not all layers of a region that does not say what its items
    /// hold.
    #[error(
        "layers {layers:?} are a part of regions[{region}], which has layers {held:?}: announce them together, or \
          say what the region holds (Region::holds)"
    )]
    Cut {
        /// The layers in the announcement, by their numbers in the model.
        layers: Range<u32>,
        /// The position of the region in [`KvArgs::regions`](crate::KvArgs::regions).
        region: usize,
        /// The layers of that region.
        held: Range<u32>,
    },
    /// Some region does not say which layers it holds, so that layers cannot be announced one by
    /// one.
    #[error("layers {layers:?} are final, but regions[{region}] does not say its layer (Region::layer)")]
    Untold {
        /// The layers in the announcement, by their numbers in the model.
        layers: Range<u32>,
        /// The position of that region in [`KvArgs::regions`](crate::KvArgs::regions).
        region: usize,
    },
}
