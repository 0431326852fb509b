//! What a worker tells this library about itself, once: memory, geometry and limits.

mod builder;
mod check;

pub use builder::KvArgsBuilder;

use crate::id::WorkerId;
use crate::layout::{Geometry, Region};
use crate::lease::TransferMode;

/// What a worker tells this library about itself (SGLang: `KVArgs`). A `KvArgs` was checked when
/// it was built: every `KvArgs` that exists is valid, and no later code checks again.
///
/// ```
/// use kv_core::{KvArgs, Region, RegionRole};
/// # let (keys, values) = (0x10_0000, 0x20_0000);
/// let args = KvArgs::builder("decode-0", 0)
///     .pages(64, 16)
///     .region(Region::dram(RegionRole::Kv, keys, 64 * 4096, 4096).layer(0))
///     .region(Region::dram(RegionRole::Kv, values, 64 * 4096, 4096).layer(0))
///     .heads(2, 64)
///     .max_inflight(64)
///     .build()?;
/// assert_eq!(args.geometry().num_pages, 64);
/// # Ok::<(), kv_core::ArgsError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvArgs {
    worker: WorkerId,
    num_receivers: u32,
    regions: Vec<Region>,
    geometry: Geometry,
    ib_device: Option<String>,
    max_inflight: usize,
    max_sge: usize,
    transfer_mode: TransferMode,
    suffixes_requests: bool,
    verbose: bool,
}

impl KvArgs {
    /// Starts a builder for rank `engine_rank` of `engine`.
    pub fn builder(engine: &str, engine_rank: u32) -> KvArgsBuilder {
        KvArgsBuilder::new(engine, engine_rank)
    }

    /// This worker: engine and `engine_rank`.
    pub fn worker(&self) -> &WorkerId {
        &self.worker
    }

    /// How many receivers (decode ranks) one request of this worker has by default; 0 if the first
    /// receiver is to tell the number.
    pub fn num_receivers(&self) -> u32 {
        self.num_receivers
    }

    /// All regions: KV in the order given, then aux, then state. The position is the region's
    /// number in descriptors.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The geometry of the cache: what peers are told about it.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The network device that the server has named. No transport reads it; see
    /// [`KvArgsBuilder::ib_device`].
    pub fn ib_device(&self) -> Option<&str> {
        self.ib_device.as_deref()
    }

    /// Most data operations in flight to, or from, one peer. All peers together have four times as many.
    pub fn max_inflight(&self) -> usize {
        self.max_inflight
    }

    /// Most descriptors in one data operation.
    pub fn max_sge(&self) -> usize {
        self.max_sge
    }

    /// Which side moves the bytes, where a session does not say otherwise.
    pub fn transfer_mode(&self) -> TransferMode {
        self.transfer_mode
    }

    /// Whether the worker's engine adds a suffix to the ids of requests.
    pub fn suffixes_requests(&self) -> bool {
        self.suffixes_requests
    }

    /// Whether the worker prints each of its [events](crate::trace::Event) as a line on standard error.
    pub fn verbose(&self) -> bool {
        self.verbose
    }
}
