//! The builder of [`KvArgs`]: collects what a worker says about itself, and checks everything at
//! the end.

use super::KvArgs;
use super::check::{check_memory, range};
use crate::error::ArgsError;
use crate::id::{EngineId, WorkerId};
use crate::layout::{Geometry, Layout, Parallel, Region, RegionRole};
use crate::lease::TransferMode;

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
    suffixes_requests: bool,
    verbose: bool,
}

impl KvArgsBuilder {
    /// A worker of one data-parallel, tensor-parallel and pipeline rank, with the defaults that the
    /// setters document.
    pub(super) fn new(engine: &str, engine_rank: u32) -> KvArgsBuilder {
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
            suffixes_requests: false,
            verbose: false,
        }
    }

    /// The size of the cache: `num_pages` pages of `page_size` tokens each. Required.
    pub fn pages(mut self, num_pages: u32, page_size: u32) -> Self {
        self.num_pages = Some(num_pages);
        self.page_size = page_size;
        self
    }

    /// Adds a region. KV regions must hold `num_pages` items each.
    pub fn region(mut self, region: Region) -> Self {
        self.regions.push(region);
        self
    }

    /// Adds KV regions in host memory from three lists with one entry per region, as SGLang's
    /// `KVArgs` has them: `kv_data_ptrs` (addresses), `kv_data_lens` and `kv_item_lens` (both in
    /// bytes).
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

    /// Element type of the cache (`bf16`, `f32`, `fp8_e4m3` …; default `f32`). Both engines must
    /// use the same name.
    pub fn dtype(mut self, dtype: &str) -> Self {
        self.dtype = dtype.to_owned();
        self
    }

    /// KV heads held by this rank, and the elements of each head (default 1 and 1).
    pub fn heads(mut self, kv_heads: u32, head_dim: u32) -> Self {
        self.kv_heads = kv_heads;
        self.head_dim = head_dim;
        self
    }

    /// A name or hash of the model (default empty); both sides must give the same text.
    pub fn model(mut self, model: &str) -> Self {
        self.model = model.to_owned();
        self
    }

    /// The sizes of the engine's parallel groups and this rank's place in each (default: one rank).
    pub fn parallel(mut self, parallel: Parallel) -> Self {
        self.parallel = parallel;
        self
    }

    /// How the regions hold the cache (default: [`Layout::default`]).
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// How many receivers one request has, 0 to 4096 (default 0: as many as the first receiver
    /// tells).
    pub fn num_receivers(mut self, num_receivers: u32) -> Self {
        self.num_receivers = num_receivers;
        self
    }

    /// The name of a network device, such as `mlx5_0`, for servers that keep it where SGLang does. No transport reads it:
    /// give the name to the settings of the transport (`NixlConfig::devices`, `UcxConfig::devices`,
    /// `FabricConfig::devices`).
    pub fn ib_device(mut self, device: &str) -> Self {
        self.ib_device = Some(device.to_owned());
        self
    }

    /// Most data operations in flight to, or from, one peer, 1 to 65536 (default 64). All peers
    /// together have four times as many; a peer of which no data operation has ended for a while
    /// does not count.
    pub fn max_inflight(mut self, max_inflight: usize) -> Self {
        self.max_inflight = max_inflight;
        self
    }

    /// Most descriptors in one data operation, 1 to 1048576 (default 1024).
    pub fn max_sge(mut self, max_sge: usize) -> Self {
        self.max_sge = max_sge;
        self
    }

    /// Which side moves the bytes, for sessions that do not choose a mode themselves (default
    /// push).
    pub fn transfer_mode(mut self, transfer_mode: TransferMode) -> Self {
        self.transfer_mode = transfer_mode;
        self
    }

    /// Whether this worker's engine appends a suffix of its own to the id of every request, as vLLM
    /// does (default no): a `-` and eight hexadecimal digits. This worker then removes the suffix
    /// from its own requests' ids, so that both sides of a request find the same room; a match of
    /// whole ids comes first. Numbered rooms are never changed.
    pub fn suffixes_requests(mut self, suffixes: bool) -> Self {
        self.suffixes_requests = suffixes;
        self
    }

    /// Whether the worker prints each of its [events](crate::trace::Event) as a line on standard
    /// error (default no).
    pub fn verbose(mut self, verbose: bool) -> Self {
        self.verbose = verbose;
        self
    }

    /// Checks all fields against each other, and returns arguments that every peer accepts as
    /// valid.
    ///
    /// # Errors
    ///
    /// The first [`ArgsError`] that is found: a number out of range, a region that is not a whole
    /// number of items, two regions that overlap, a field that was not set.
    pub fn build(self) -> Result<KvArgs, ArgsError> {
        if let Some(error) = self.lists {
            return Err(error);
        }
        let num_pages = self.num_pages.ok_or(ArgsError::Missing { field: "pages" })?;
        range("num_receivers", self.num_receivers.into(), 0, 4096)?;
        range("max_inflight", self.max_inflight as u64, 1, 1 << 16)?;
        range("max_sge", self.max_sge as u64, 1, 1 << 20)?;
        let mut regions = self.regions;
        regions.sort_by_key(|region| region.role);
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
        check_memory(&regions)?;
        Ok(KvArgs {
            worker,
            num_receivers: self.num_receivers,
            regions,
            geometry,
            ib_device: self.ib_device,
            max_inflight: self.max_inflight,
            max_sge: self.max_sge,
            transfer_mode: self.transfer_mode,
            suffixes_requests: self.suffixes_requests,
            verbose: self.verbose,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{GeometryError, MemoryKind};

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
            Err(GeometryError::RegionLength { region: 0, role: "kv", len: 192, item_len: 64, items: 4 }
                .into())
        );
    }

    #[test]
    fn overlap_null_and_wrap_around_are_refused() {
        let overlap = builder().region(kv(0x1000)).region(kv(0x10ff)).build();
        assert_eq!(overlap, Err(ArgsError::RegionOverlap { first: 0, second: 1 }));
        // Host memory is the same from every NUMA node; the memory of two GPUs is not.
        let on = |memory, device| kv(0x1000).memory(memory, device);
        let nodes = [0, 1].map(|node| on(MemoryKind::Dram, node));
        let overlap = nodes.into_iter().fold(builder(), KvArgsBuilder::region).build();
        assert_eq!(overlap, Err(ArgsError::RegionOverlap { first: 0, second: 1 }));
        let gpus = [0, 1].map(|gpu| on(MemoryKind::Vram, gpu));
        assert!(gpus.into_iter().fold(builder(), KvArgsBuilder::region).build().is_ok());
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
        assert_eq!(error, Err(GeometryError::Range { field: "tp_rank", got: 2, min: 0, max: 1 }.into()));
        assert_eq!(
            KvArgs::builder("engine", 0).region(kv(0x1000)).build(),
            Err(ArgsError::Missing { field: "pages" })
        );
    }
}
