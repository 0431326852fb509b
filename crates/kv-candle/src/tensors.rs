//! [`KvTensors`]: the tensors of a KV cache as regions, kept alive.

use candle_core::{CpuStorage, DType, Layout, Storage, Tensor};
use kv_core::{Holds, KvArgsBuilder, MAX_REGIONS, MemoryKind, Region, RegionRole};

use crate::error::CandleError;

/// The KV cache of a worker in candle tensors: for each layer its keys and its values, each
/// `[blocks, block, heads, head_dim]`.
///
/// The value shares the storage of the tensors, so their memory is not freed while the value lives. The server keeps it
/// until the worker has stopped (`StopReport` of kv-poll), and for ever if the report counts anything in quarantine.
/// [`Region`] says what else holds of memory that a server owns; above all, no tensor operation may touch blocks that a
/// session has. Candle's in-place operations (`slice_set` and kernels of a server's own) write into the same storage, so
/// other blocks stay usable.
#[derive(Debug, Clone)]
#[must_use = "the tensors may be freed under a running worker if this is dropped"]
pub struct KvTensors {
    regions: Vec<Region>,
    dims: [u32; 4],
    dtype: DType,
    /// The tensors whose memory the regions are.
    _tensors: Vec<Tensor>,
}

/// Where a tensor lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The address of the first element of the tensor (not of its storage).
    pub addr: u64,
    /// The kind of the memory.
    pub memory: MemoryKind,
    /// The number of the device, as [`Region::device`]; 0 for host memory.
    pub device: u64,
}

impl KvTensors {
    /// The regions of a cache on the CPU.
    ///
    /// # Errors
    ///
    /// [`CandleError`] names the first tensor that cannot be a region, or that differs from the first tensor.
    pub fn new(caches: &[(Tensor, Tensor)]) -> Result<KvTensors, CandleError> {
        KvTensors::placed(caches, on_cpu)
    }

    /// The regions of a cache wherever it lies: `place` says where each tensor begins, and is called once for each, with
    /// the name of the tensor. Shapes, element types and contiguity are checked as by [`new`](KvTensors::new); that a
    /// tensor does not end beyond its storage is the caller's to check.
    ///
    /// # Errors
    ///
    /// As for [`new`](KvTensors::new), and what `place` returns.
    pub fn placed(
        caches: &[(Tensor, Tensor)],
        place: impl Fn(&str, &Tensor) -> Result<Place, CandleError>,
    ) -> Result<KvTensors, CandleError> {
        let max = MAX_REGIONS / 2;
        let (first, _) = caches.first().filter(|_| caches.len() <= max).ok_or(CandleError::Layers { max })?;
        let dims = dims("caches[0].0", first)?;
        let (dtype, device) = (first.dtype(), first.device().location());
        let mut tensors = KvTensors { regions: Vec::new(), dims, dtype, _tensors: Vec::new() };
        for (layer, (keys, values)) in caches.iter().enumerate() {
            for (part, tensor, holds) in [(0, keys, Holds::Key), (1, values, Holds::Value)] {
                let field = format!("caches[{layer}].{part}");
                let same = |what, got: String, first: String| match got == first {
                    true => Ok(()),
                    false => Err(CandleError::Differs { what, field: field.clone(), got, first }),
                };
                same("shape", format!("{:?}", tensor.dims()), format!("{:?}", first.dims()))?;
                same("dtype", tensor.dtype().as_str().to_owned(), dtype.as_str().to_owned())?;
                same("device", format!("{:?}", tensor.device().location()), format!("{device:?}"))?;
                if !tensor.is_contiguous() {
                    let (shape, strides) = (tensor.dims().to_vec(), tensor.stride().to_vec());
                    return Err(CandleError::NotContiguous { field, shape, strides });
                }
                let size = match dtype.size_in_bytes() {
                    0 => return Err(CandleError::DType { field, dtype: dtype.as_str() }),
                    size => size as u64,
                };
                let Place { addr, memory, device } = place(&field, tensor)?;
                let len = (tensor.elem_count() as u64).saturating_mul(size);
                let region = Region::dram(RegionRole::Kv, addr, len, len / u64::from(dims[0]));
                let layer = u32::try_from(layer).unwrap_or(u32::MAX);
                tensors.regions.push(region.memory(memory, device).layer(layer).holds(holds));
                tensors._tensors.push(tensor.clone());
            }
        }
        Ok(tensors)
    }

    /// Says all of the cache to the arguments of a worker: number and size of pages (blocks), element type, heads of this
    /// rank, and regions. Model and parallel groups are the server's to say. The layers are numbered from 0: a server
    /// with pipeline stages adds the [regions](KvTensors::regions) itself.
    pub fn describe(&self, args: KvArgsBuilder) -> KvArgsBuilder {
        let [blocks, block, heads, head_dim] = self.dims;
        let args = args.pages(blocks, block).dtype(dtype_name(self.dtype)).heads(heads, head_dim);
        self.regions.iter().cloned().fold(args, KvArgsBuilder::region)
    }

    /// The regions: for each layer its keys and its values.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }
}

/// The name that engines use for an element type.
fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F8E4M3 => "fp8_e4m3",
        other => other.as_str(),
    }
}

fn dims(field: &str, tensor: &Tensor) -> Result<[u32; 4], CandleError> {
    let wrong = || CandleError::Shape { field: field.to_owned(), got: tensor.dims().to_vec() };
    let dims: [usize; 4] = tensor.dims().try_into().map_err(|_| wrong())?;
    let mut whole = [0; 4];
    for (dim, whole) in dims.into_iter().zip(&mut whole) {
        *whole = u32::try_from(dim).ok().filter(|dim| *dim > 0).ok_or_else(wrong)?;
    }
    Ok(whole)
}

/// Where a tensor on the CPU lies.
fn on_cpu(field: &str, tensor: &Tensor) -> Result<Place, CandleError> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        let device = format!("{:?}", tensor.device().location());
        return Err(CandleError::Device { field: field.to_owned(), device, wanted: "the CPU" });
    };
    let addr = match storage {
        CpuStorage::U8(elements) => start(field, layout, elements),
        CpuStorage::U32(elements) => start(field, layout, elements),
        CpuStorage::I16(elements) => start(field, layout, elements),
        CpuStorage::I32(elements) => start(field, layout, elements),
        CpuStorage::I64(elements) => start(field, layout, elements),
        CpuStorage::BF16(elements) => start(field, layout, elements),
        CpuStorage::F16(elements) => start(field, layout, elements),
        CpuStorage::F32(elements) => start(field, layout, elements),
        CpuStorage::F64(elements) => start(field, layout, elements),
        CpuStorage::F8E4M3(elements) => start(field, layout, elements),
        CpuStorage::F8E8M0(elements) => start(field, layout, elements),
        CpuStorage::F6E2M3(_) | CpuStorage::F6E3M2(_) | CpuStorage::F4(_) => {
            return Err(CandleError::DType { field: field.to_owned(), dtype: tensor.dtype().as_str() });
        }
    }?;
    Ok(Place { addr, memory: MemoryKind::Dram, device: 0 })
}

/// The address of a contiguous tensor's first element, if the tensor is inside its storage.
fn start<T>(field: &str, layout: &Layout, elements: &[T]) -> Result<u64, CandleError> {
    let first = layout.start_offset();
    let end = first.saturating_add(layout.shape().elem_count());
    let inside = elements.get(first..end);
    let len = elements.len();
    inside.map(|inside| inside.as_ptr() as u64).ok_or_else(|| CandleError::Bounds {
        field: field.to_owned(),
        end,
        len,
    })
}
