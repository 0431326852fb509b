//! What a worker tells the framework about itself, once: memory, geometry, limits.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::ArgsError;
use crate::id::{EngineId, WorkerId};
use crate::layout::{Geometry, Holds, Layout};
use crate::lease::TransferMode;
use crate::pages::MAX_PAGES;

/// Most regions of one worker.
pub const MAX_REGIONS: usize = 4096;

/// Where the bytes of a region live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MemoryKind {
    /// Host memory.
    Dram,
    /// Device memory.
    Vram,
    /// A file; the address is an offset, the device a descriptor.
    File,
}

/// What a region is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RegionRole {
    /// KV pages: item *i* is page *i*.
    Kv,
    /// Per-request rows (first token, logprobs, room …): item *i* is aux row *i*.
    Aux,
    /// Per-request state slots of recurrent layers: item *i* is slot *i*.
    State,
}

impl RegionRole {
    /// The role in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            RegionRole::Kv => "kv",
            RegionRole::Aux => "aux",
            RegionRole::State => "state",
        }
    }
}

/// A piece of registered memory: `len / item_len` items of `item_len` bytes from `addr` on.
///
/// A region is data, not a promise: a plane accepts only memory that it was given (an arena it
/// allocated, or memory adopted through an `unsafe` call), so a wrong address is an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// What it is for.
    pub role: RegionRole,
    /// Address of the first byte (file offset for [`MemoryKind::File`]).
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Bytes of one item: of one page in this region, of one aux row.
    pub item_len: u64,
    /// Kind of memory.
    pub memory: MemoryKind,
    /// Device (GPU index, NUMA node, file descriptor).
    pub device: u64,
    /// The model layer whose KV it holds, or the first of several (page-major); `None` if nobody
    /// said.
    pub layer: Option<u32>,
    /// How many layers each item holds, from `layer` on.
    pub layers: u32,
    /// What its items hold; needed only where the peer's cache may have another shape.
    pub holds: Holds,
    /// Which group of [`Layout::groups`] a state region belongs to.
    pub group: u16,
}

impl Region {
    /// A region in host memory.
    pub fn dram(role: RegionRole, addr: u64, len: u64, item_len: u64) -> Region {
        let memory = MemoryKind::Dram;
        let (layer, layers, holds, group) = (None, 1, Holds::Opaque, 0);
        Region { role, addr, len, item_len, memory, device: 0, layer, layers, holds, group }
    }

    /// The same region as the memory of `layer`.
    pub fn layer(mut self, layer: u32) -> Region {
        self.layer = Some(layer);
        self
    }

    /// The same region as the memory of several layers, all in each item.
    pub fn layers(mut self, layers: Range<u32>) -> Region {
        self.layer = Some(layers.start);
        self.layers = layers.end.saturating_sub(layers.start);
        self
    }

    /// The same region, with a word on what its items hold: then the peer's cache may be cut
    /// differently.
    pub fn holds(mut self, holds: Holds) -> Region {
        self.holds = holds;
        self
    }

    /// The same region as part of a state group.
    pub fn group(mut self, group: u16) -> Region {
        self.group = group;
        self
    }

    /// How many whole items it holds.
    pub fn items(&self) -> u64 {
        self.len.checked_div(self.item_len).unwrap_or(0)
    }
}

/// The sizes of the parallel groups of an engine, and this rank's place in each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Parallel {
    /// Tensor-parallel ranks.
    pub tp_size: u32,
    /// Rank among them.
    pub tp_rank: u32,
    /// Pipeline stages.
    pub pp_size: u32,
    /// Stage of this rank.
    pub pp_rank: u32,
    /// Data-parallel replicas.
    pub dp_size: u32,
    /// Replica of this rank.
    pub dp_rank: u32,
    /// Prefill-context-parallel ranks: they share the work on a prompt, and at its end each of them
    /// holds all its pages (of its heads and layers). They share the sending, too: each sends a
    /// [range](Parallel::page_range) of them. Where every rank keeps a part of the pages only, that is
    /// [`Layout::context_size`](crate::Layout::context_size).
    pub cp_size: u32,
    /// Rank among them.
    pub cp_rank: u32,
}

impl Default for Parallel {
    fn default() -> Parallel {
        Parallel {
            tp_size: 1,
            tp_rank: 0,
            pp_size: 1,
            pp_rank: 0,
            dp_size: 1,
            dp_rank: 0,
            cp_size: 1,
            cp_rank: 0,
        }
    }
}

impl Parallel {
    /// How many ranks the engine has.
    pub fn ranks(&self) -> u32 {
        self.replica_ranks().saturating_mul(self.dp_size)
    }

    /// How many ranks a data-parallel replica of it has.
    pub fn replica_ranks(&self) -> u32 {
        self.tp_size.saturating_mul(self.pp_size).saturating_mul(self.cp_size)
    }

    /// Which of `pages` pages that a receiver wants this rank sends: a range of them, as long as
    /// those of its siblings or one longer. Together the ranges of a context-parallel group are all
    /// pages, each once.
    ///
    /// ```
    /// use kv_core::Parallel;
    ///
    /// let rank = |cp_rank| Parallel { cp_size: 3, cp_rank, ..Parallel::default() };
    /// assert_eq!([0, 1, 2].map(|cp| rank(cp).page_range(7)), [0..2, 2..4, 4..7]);
    /// ```
    pub fn page_range(&self, pages: usize) -> Range<usize> {
        let bound = |rank: u32| {
            let bound = pages as u128 * u128::from(rank) / u128::from(self.cp_size.max(1));
            usize::try_from(bound).map_or(pages, |bound| bound.min(pages))
        };
        bound(self.cp_rank)..bound(self.cp_rank.saturating_add(1))
    }
}

/// What a worker tells the framework about itself (seed: `KVArgs`). Built once, validated once:
/// a `KvArgs` that exists is valid, and no later code checks again.
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
    verbose: bool,
}

impl KvArgs {
    /// Starts a builder for rank `engine_rank` of `engine`.
    pub fn builder(engine: &str, engine_rank: u32) -> KvArgsBuilder {
        KvArgsBuilder {
            engine: engine.to_owned(),
            engine_rank,
            num_receivers: 0,
            regions: Vec::new(),
            lists: None,
            num_pages: None,
            page_size: 0,
            dtype: "f32".to_owned(),
            kv_heads: 1,
            head_dim: 1,
            model: String::new(),
            parallel: Parallel::default(),
            layout: Layout::default(),
            ib_device: None,
            max_inflight: 64,
            max_sge: 1024,
            transfer_mode: TransferMode::default(),
            verbose: false,
        }
    }

    /// This worker: engine and `engine_rank`.
    pub fn worker(&self) -> &WorkerId {
        &self.worker
    }

    /// How many receivers (decode ranks) one request of this worker has by default; 0 if the first
    /// receiver is to say it.
    pub fn num_receivers(&self) -> u32 {
        self.num_receivers
    }

    /// All regions: KV in the order given, then aux, then state. The position is the region's
    /// number in descriptors.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The geometry, as peers are told it.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The network device to use, where the plane has a choice.
    pub fn ib_device(&self) -> Option<&str> {
        self.ib_device.as_deref()
    }

    /// Most data operations in flight.
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

    /// Whether the worker explains itself on standard error.
    pub fn verbose(&self) -> bool {
        self.verbose
    }
}

/// Collects and checks the fields of a [`KvArgs`].
#[derive(Debug, Clone)]
pub struct KvArgsBuilder {
    engine: String,
    engine_rank: u32,
    num_receivers: u32,
    regions: Vec<Region>,
    lists: Option<ArgsError>,
    num_pages: Option<u32>,
    page_size: u32,
    dtype: String,
    kv_heads: u32,
    head_dim: u32,
    model: String,
    parallel: Parallel,
    layout: Layout,
    ib_device: Option<String>,
    max_inflight: usize,
    max_sge: usize,
    transfer_mode: TransferMode,
    verbose: bool,
}

impl KvArgsBuilder {
    /// The cache: `num_pages` pages of `page_size` tokens. Required.
    pub fn pages(mut self, num_pages: u32, page_size: u32) -> Self {
        self.num_pages = Some(num_pages);
        self.page_size = page_size;
        self
    }

    /// Adds a region.
    pub fn region(mut self, region: Region) -> Self {
        self.regions.push(region);
        self
    }

    /// Adds KV regions in host memory the way the seed lists them: `kv_data_ptrs`,
    /// `kv_data_lens`, `kv_item_lens`, one entry per region.
    pub fn kv_data(mut self, ptrs: &[u64], lens: &[u64], item_lens: &[u64]) -> Self {
        for (field, list) in [("kv_data_lens", lens), ("kv_item_lens", item_lens)] {
            if list.len() != ptrs.len() && self.lists.is_none() {
                self.lists = Some(ArgsError::ListLengths {
                    left_field: "kv_data_ptrs",
                    left: ptrs.len(),
                    right_field: field,
                    right: list.len(),
                });
            }
        }
        for ((ptr, len), item_len) in ptrs.iter().zip(lens).zip(item_lens) {
            self.regions.push(Region::dram(RegionRole::Kv, *ptr, *len, *item_len));
        }
        self
    }

    /// Element type of the cache, as both engines name it (`bf16`, `f32`, `fp8_e4m3` …).
    pub fn dtype(mut self, dtype: &str) -> Self {
        self.dtype = dtype.to_owned();
        self
    }

    /// KV heads held by this rank, and the size of each.
    pub fn heads(mut self, kv_heads: u32, head_dim: u32) -> Self {
        self.kv_heads = kv_heads;
        self.head_dim = head_dim;
        self
    }

    /// A name or hash of the model; both sides must give the same.
    pub fn model(mut self, model: &str) -> Self {
        self.model = model.to_owned();
        self
    }

    /// The parallel groups.
    pub fn parallel(mut self, parallel: Parallel) -> Self {
        self.parallel = parallel;
        self
    }

    /// How the regions hold the cache (default: [`Layout::default`]).
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// How many receivers one request has (default 0: as many as the first one says).
    pub fn num_receivers(mut self, num_receivers: u32) -> Self {
        self.num_receivers = num_receivers;
        self
    }

    /// The network device to use.
    pub fn ib_device(mut self, device: &str) -> Self {
        self.ib_device = Some(device.to_owned());
        self
    }

    /// Most data operations in flight (default 64).
    pub fn max_inflight(mut self, max_inflight: usize) -> Self {
        self.max_inflight = max_inflight;
        self
    }

    /// Most descriptors in one data operation (default 1024).
    pub fn max_sge(mut self, max_sge: usize) -> Self {
        self.max_sge = max_sge;
        self
    }

    /// Which side moves the bytes, where a session does not say otherwise (default push).
    pub fn transfer_mode(mut self, transfer_mode: TransferMode) -> Self {
        self.transfer_mode = transfer_mode;
        self
    }

    /// Whether the worker explains itself on standard error (default off).
    pub fn verbose(mut self, verbose: bool) -> Self {
        self.verbose = verbose;
        self
    }

    /// Checks everything.
    pub fn build(self) -> Result<KvArgs, ArgsError> {
        if let Some(error) = self.lists {
            return Err(error);
        }
        let num_pages = self.num_pages.ok_or(ArgsError::Missing { field: "pages" })?;
        range("num_pages", u64::from(num_pages), 1, u64::from(MAX_PAGES))?;
        range("page_size", u64::from(self.page_size), 1, 1 << 20)?;
        range("kv_heads", u64::from(self.kv_heads), 1, 1 << 16)?;
        range("head_dim", u64::from(self.head_dim), 1, 1 << 20)?;
        range("num_receivers", u64::from(self.num_receivers), 0, 4096)?;
        range("max_inflight", self.max_inflight as u64, 1, 1 << 16)?;
        range("max_sge", self.max_sge as u64, 1, 1 << 20)?;
        range("dtype.len", self.dtype.len() as u64, 1, 64)?;
        range("model.len", self.model.len() as u64, 0, 256)?;
        range("regions.len", self.regions.len() as u64, 1, MAX_REGIONS as u64)?;
        check_parallel(&self.parallel)?;

        let mut regions = self.regions;
        regions.sort_by_key(|region| region.role);
        check_regions(&regions, num_pages)?;

        let worker = WorkerId { engine: EngineId::new(&self.engine)?, rank: self.engine_rank };
        let geometry = Geometry {
            num_pages,
            page_size: self.page_size,
            dtype: self.dtype,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            model: self.model,
            parallel: self.parallel,
            regions: regions.iter().map(Into::into).collect(),
            layout: self.layout,
        };
        geometry.validate()?;
        Ok(KvArgs {
            worker,
            num_receivers: self.num_receivers,
            regions,
            geometry,
            ib_device: self.ib_device,
            max_inflight: self.max_inflight,
            max_sge: self.max_sge,
            transfer_mode: self.transfer_mode,
            verbose: self.verbose,
        })
    }
}

fn range(field: &'static str, got: u64, min: u64, max: u64) -> Result<(), ArgsError> {
    if (min..=max).contains(&got) { Ok(()) } else { Err(ArgsError::Range { field, got, min, max }) }
}

fn check_parallel(parallel: &Parallel) -> Result<(), ArgsError> {
    for (size_field, rank_field, size, rank) in [
        ("tp_size", "tp_rank", parallel.tp_size, parallel.tp_rank),
        ("pp_size", "pp_rank", parallel.pp_size, parallel.pp_rank),
        ("dp_size", "dp_rank", parallel.dp_size, parallel.dp_rank),
        ("cp_size", "cp_rank", parallel.cp_size, parallel.cp_rank),
    ] {
        range(size_field, u64::from(size), 1, 4096)?;
        if rank >= size {
            return Err(ArgsError::RankOutOfGroup { field: rank_field, rank, size });
        }
    }
    Ok(())
}

fn check_regions(regions: &[Region], num_pages: u32) -> Result<(), ArgsError> {
    for (index, region) in regions.iter().enumerate() {
        range("item_len", region.item_len, 1, 1 << 40)?;
        let items = match region.role {
            RegionRole::Kv => u64::from(num_pages),
            RegionRole::Aux | RegionRole::State => region.items().clamp(1, u64::from(u32::MAX)),
        };
        if region.item_len.checked_mul(items) != Some(region.len) {
            return Err(ArgsError::RegionLength {
                region: index,
                role: region.role.name(),
                len: region.len,
                item_len: region.item_len,
                items,
            });
        }
        let null = region.addr == 0 && region.memory != MemoryKind::File;
        if null || region.addr.checked_add(region.len).is_none() {
            return Err(ArgsError::RegionAddress { region: index, addr: region.addr, len: region.len });
        }
    }
    let mut order: Vec<usize> = (0..regions.len()).collect();
    order.sort_by_key(|&index| (regions[index].memory, regions[index].device, regions[index].addr));
    for pair in order.windows(2) {
        let (first, second) = (&regions[pair[0]], &regions[pair[1]]);
        let same_space = first.memory == second.memory && first.device == second.device;
        if same_space && first.addr + first.len > second.addr {
            return Err(ArgsError::RegionOverlap { first: pair[0], second: pair[1] });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv(addr: u64) -> Region {
        Region::dram(RegionRole::Kv, addr, 4 * 64, 64)
    }

    fn builder() -> KvArgsBuilder {
        KvArgs::builder("engine", 0).pages(4, 16)
    }

    #[test]
    fn regions_are_numbered_kv_then_aux_then_state() {
        let args = builder()
            .region(Region::dram(RegionRole::Aux, 0x9000, 128, 16))
            .region(kv(0x1000))
            .region(Region::dram(RegionRole::State, 0xa000, 128, 16))
            .region(kv(0x2000))
            .build()
            .unwrap();
        let roles: Vec<_> = args.regions().iter().map(|region| region.role).collect();
        assert_eq!(roles, [RegionRole::Kv, RegionRole::Kv, RegionRole::Aux, RegionRole::State]);
        assert_eq!(args.regions()[0].addr, 0x1000);
    }

    #[test]
    fn a_region_must_hold_exactly_the_cache_and_the_error_names_both_values() {
        let error = builder().region(Region::dram(RegionRole::Kv, 0x1000, 3 * 64, 64)).build();
        assert_eq!(
            error,
            Err(ArgsError::RegionLength { region: 0, role: "kv", len: 192, item_len: 64, items: 4 })
        );
    }

    #[test]
    fn overlap_null_and_wrap_around_are_refused() {
        let overlap = builder().region(kv(0x1000)).region(kv(0x10ff)).build();
        assert_eq!(overlap, Err(ArgsError::RegionOverlap { first: 0, second: 1 }));
        assert!(matches!(builder().region(kv(0)).build(), Err(ArgsError::RegionAddress { .. })));
        assert!(matches!(builder().region(kv(u64::MAX - 10)).build(), Err(ArgsError::RegionAddress { .. })));
        assert!(builder().region(kv(0x1000)).region(kv(0x1100)).build().is_ok());
    }

    #[test]
    fn seed_lists_must_have_equal_length() {
        let error = builder().kv_data(&[0x1000, 0x2000], &[256, 256], &[64]).build();
        assert_eq!(
            error,
            Err(ArgsError::ListLengths {
                left_field: "kv_data_ptrs",
                left: 2,
                right_field: "kv_item_lens",
                right: 1
            })
        );
    }

    #[test]
    fn numbers_out_of_range_are_named() {
        let error = builder().region(kv(0x1000)).max_sge(0).build();
        assert_eq!(error, Err(ArgsError::Range { field: "max_sge", got: 0, min: 1, max: 1 << 20 }));
        let parallel = Parallel { tp_size: 2, tp_rank: 2, ..Parallel::default() };
        let error = builder().region(kv(0x1000)).parallel(parallel).build();
        assert_eq!(error, Err(ArgsError::RankOutOfGroup { field: "tp_rank", rank: 2, size: 2 }));
        assert_eq!(
            KvArgs::builder("engine", 0).region(kv(0x1000)).build(),
            Err(ArgsError::Missing { field: "pages" })
        );
    }
}
