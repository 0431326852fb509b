//! KV cache tensors of [candle](candle_core) on NVIDIA GPUs, as regions of kv-transfer.
//!
//! What it is: where a CUDA tensor lies ([`on_cuda`]), with the bounds of its storage checked, and the regions of a cache
//! of such tensors ([`tensors`]). What it is not: part of the workspace. Candle compiles its kernels with nvcc, so this
//! crate is built where nvcc is, and `kv-candle` everywhere.
//!
//! The KV cache of a GPU is moved by a transport that can reach GPU memory, such as that of kv-nixl. Candle allocates by
//! `cuMemAllocAsync` where the device has memory pools, and CUDA cannot export such memory to another process
//! (`cuIpcGetMemHandle`): between processes of one host its pages would go over TCP, where a peer that is killed may take
//! down the other. No transport sees that, and none refuses it. So a server allocates its cache by `cuMemAlloc`, and gives
//! candle slices of that.
//!
//! Streams are not waited for: a kernel that writes a block has ended before the block is sent. `ReadyEvent` of
//! kv-transfer says this to a sender without waiting on the host.
//!
//! The example shows the calls only: candle allocates its tensors, which will do where the device has no memory pools. A
//! server puts slices of memory of `cuMemAlloc` in their place.
//!
//! ```no_run
//! use candle_core::{DType, Device, Tensor};
//! use kv_transfer::KvArgs;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let gpu = Device::new_cuda(0)?;
//! let tensor = || Tensor::zeros((128, 64, 4, 32), DType::BF16, &gpu);
//! let cache: Vec<(Tensor, Tensor)> = vec![(tensor()?, tensor()?), (tensor()?, tensor()?)];
//!
//! let tensors = kv_candle_cuda::tensors(&cache)?;
//! let args = tensors.describe(KvArgs::builder("engine", 0).model("my-model")).build()?;
//! # Ok(())
//! # }
//! ```

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{DeviceLocation, Layout, Storage, Tensor};
use kv_candle::{CandleError, KvTensors, MemoryKind, Place};

/// The regions of a cache on a GPU: for each layer its keys and its values, each `[blocks, block, heads, head_dim]`.
///
/// # Errors
///
/// [`CandleError`] names the first tensor that cannot be a region, or that differs from the first tensor.
pub fn tensors(caches: &[(Tensor, Tensor)]) -> Result<KvTensors, CandleError> {
    KvTensors::placed(caches, on_cuda)
}

/// Where a contiguous tensor on a GPU lies, for [`KvTensors::placed`]. `field` names the tensor in errors. The device of
/// the place is the number of the GPU in this process, as CUDA counts.
///
/// # Errors
///
/// [`CandleError::Device`] if the tensor is not on a GPU, [`CandleError::DType`] if its elements are no whole bytes, and
/// [`CandleError::Bounds`] if the tensor ends beyond its storage.
pub fn on_cuda(field: &str, tensor: &Tensor) -> Result<Place, CandleError> {
    let (storage, layout) = tensor.storage_and_layout();
    let location = tensor.device().location();
    let (Storage::Cuda(storage), DeviceLocation::Cuda { gpu_id }) = (&*storage, location) else {
        let device = format!("{location:?}");
        return Err(CandleError::Device { field: field.to_owned(), device, wanted: "a CUDA device" });
    };
    let addr = match &storage.slice {
        CudaStorageSlice::U8(elements) | CudaStorageSlice::F8E8M0(elements) => start(field, layout, elements),
        CudaStorageSlice::U32(elements) => start(field, layout, elements),
        CudaStorageSlice::I16(elements) => start(field, layout, elements),
        CudaStorageSlice::I32(elements) => start(field, layout, elements),
        CudaStorageSlice::I64(elements) => start(field, layout, elements),
        CudaStorageSlice::BF16(elements) => start(field, layout, elements),
        CudaStorageSlice::F16(elements) => start(field, layout, elements),
        CudaStorageSlice::F32(elements) => start(field, layout, elements),
        CudaStorageSlice::F64(elements) => start(field, layout, elements),
        CudaStorageSlice::F8E4M3(elements) => start(field, layout, elements),
        CudaStorageSlice::F6E2M3(_) | CudaStorageSlice::F6E3M2(_) | CudaStorageSlice::F4(_) => {
            return Err(CandleError::DType { field: field.to_owned(), dtype: tensor.dtype().as_str() });
        }
    }?;
    Ok(Place { addr, memory: MemoryKind::Vram, device: gpu_id as u64 })
}

/// The address of a contiguous tensor's first element, if the tensor is inside its storage.
fn start<T>(field: &str, layout: &Layout, elements: &CudaSlice<T>) -> Result<u64, CandleError> {
    let end = layout.start_offset().saturating_add(layout.shape().elem_count());
    if end > elements.len() {
        return Err(CandleError::Bounds { field: field.to_owned(), end, len: elements.len() });
    }
    // The second value notes on the stream that the slice was in use until here.
    let (first, _in_use) = elements.device_ptr(elements.stream());
    Ok(first + (layout.start_offset() * size_of::<T>()) as u64)
}
