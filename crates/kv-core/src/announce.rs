//! Announcements: which layers of which pages are final, and what they wait for on a device.
//!
//! A chunk given with [`begin_chunk`](crate::KvSender::begin_chunk) is moved layer by layer, as the
//! forward pass computes them. What has been announced must not be written any more.

use std::fmt;
use std::ops::Range;

use crate::id::ChunkId;

/// Layers of a chunk that are final: their bytes may be moved from now on.
///
/// The announcements of one chunk name disjoint layers of this rank, in any order; a region that
/// does not say what it [holds](crate::Holds) goes whole. The chunk is complete once every layer of
/// the rank was named.
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
pub struct FinalLayers {
    /// Which chunk.
    pub chunk: ChunkId,
    /// Which layers, by their numbers in the model; `None` for all that this rank has.
    pub layers: Option<Range<u32>>,
    /// What must have passed before it is true.
    pub ready_event: Option<Box<dyn ReadyEvent>>,
}

impl FinalLayers {
    /// Some layers of a chunk.
    pub fn new(chunk: ChunkId, layers: Range<u32>) -> FinalLayers {
        FinalLayers { chunk, layers: Some(layers), ready_event: None }
    }

    /// All layers of a chunk, of which none was announced before.
    pub fn all(chunk: ChunkId) -> FinalLayers {
        FinalLayers { chunk, layers: None, ready_event: None }
    }

    /// The same, once a ready event has passed.
    pub fn after(mut self, ready_event: impl ReadyEvent + 'static) -> FinalLayers {
        self.ready_event = Some(Box::new(ready_event));
        self
    }
}

/// A point in a device's stream, or whatever else says that memory has been written: an event that was
/// recorded after the kernels that compute the layers.
///
/// The worker asks on its own thread, between other work, until the answer is yes: it must not block.
/// It is dropped there, or where the session's command ends up if the worker has stopped.
pub trait ReadyEvent: Send {
    /// True once everything before it is done and visible to the transport. An error, or a panic, fails
    /// the session, and nothing else.
    fn passed(&mut self) -> Result<bool, ReadyEventError>;
}

impl<F: FnMut() -> Result<bool, ReadyEventError> + Send> ReadyEvent for F {
    fn passed(&mut self) -> Result<bool, ReadyEventError> {
        self()
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
    /// The device reports an error: what was computed there cannot be trusted.
    #[error("the device reports error {code}")]
    Device {
        /// Its number for it.
        code: i32,
    },
    /// Asking it panicked: a bug in the ready event.
    #[error("it panicked")]
    Panicked,
}

/// An announcement that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayersError {
    /// No such chunk was given.
    #[error("chunk {chunk} is final, but only {given} chunks were given")]
    UnknownChunk {
        /// The chunk announced.
        chunk: u32,
        /// How many were given.
        given: u32,
    },
    /// No layers, or such as this rank does not have.
    #[error("layers {layers:?} are final, but this rank holds layers {held:?}")]
    OutOfRange {
        /// The layers announced.
        layers: Range<u32>,
        /// First layer of this rank, and one past the last.
        held: Range<u32>,
    },
    /// Layers that had been announced.
    #[error("layers {layers:?} of chunk {chunk} are final, but layers {announced:?} were so before")]
    Twice {
        /// The chunk.
        chunk: u32,
        /// The layers announced.
        layers: Range<u32>,
        /// A run of those announced before, which shares some of them.
        announced: Range<u32>,
    },
    /// Some layers of a region of which only the owner knows how it lies.
    #[error(
        "layers {layers:?} are a part of regions[{region}], layers {held:?}: announce them together, or \
         say what it holds (Region::holds)"
    )]
    Cut {
        /// The layers announced.
        layers: Range<u32>,
        /// The region's number.
        region: usize,
        /// Its layers.
        held: Range<u32>,
    },
    /// The regions do not say which layers they are.
    #[error("layers {layers:?} are final, but regions[{region}] does not say its layer (Region::layer)")]
    Untold {
        /// The layers announced.
        layers: Range<u32>,
        /// The region's number.
        region: usize,
    },
}
