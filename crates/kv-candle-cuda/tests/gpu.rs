//! Tensors on a GPU are described where CUDA says that they are. Without a GPU, the tests say so and end.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use candle_core::cuda_backend::cudarc::driver::result::{memcpy_dtoh_sync, memcpy_htod_sync};
use candle_core::{DType, Device, Tensor};
use kv_candle::{CandleError, MemoryKind};

fn gpu() -> Option<Device> {
    Device::new_cuda(0).inspect_err(|error| eprintln!("NOT TESTED: there is no CUDA device: {error}")).ok()
}

#[test]
fn bytes_at_the_addresses_of_regions_are_those_of_the_tensors() {
    let Some(gpu) = gpu() else { return };
    let numbers = |from: u32| Tensor::arange(from, from + 3 * 4 * 2 * 8, &gpu).unwrap();
    let tensor = |from| numbers(from).reshape((3, 4, 2, 8)).unwrap();
    // The values are the second half of a larger storage.
    let both = Tensor::cat(&[numbers(0), numbers(5000)], 0).unwrap();
    let values = both.narrow(0, 192, 192).unwrap().reshape((3, 4, 2, 8)).unwrap();
    let cache = [(tensor(1000), values)];
    let tensors = kv_candle_cuda::tensors(&cache).unwrap();
    gpu.synchronize().unwrap();
    for (region, first) in tensors.regions().iter().zip([1000_u32, 5000]) {
        assert_eq!((region.memory, region.device, region.len), (MemoryKind::Vram, 0, 192 * 4));
        let mut bytes = vec![0; 192 * 4];
        // SAFETY: the region is memory of this process's context, and nothing writes there.
        unsafe { memcpy_dtoh_sync(&mut bytes, region.addr) }.unwrap();
        let expected: Vec<u8> = (first..first + 192).flat_map(u32::to_le_bytes).collect();
        assert_eq!(bytes, expected);
    }
    // What is written there is what the server reads.
    let page = [7_u8; 64 * 4];
    // SAFETY: as above.
    unsafe { memcpy_htod_sync(tensors.regions()[1].addr + 64 * 4, &page) }.unwrap();
    let read = cache[0].1.to_device(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<u32>().unwrap();
    assert_eq!((&read[..64], &read[64..128]), (&Vec::from_iter(5000..5064)[..], &[0x0707_0707; 64][..]));
}

#[test]
fn tensors_of_the_cpu_are_refused_by_name() {
    let tensor = Tensor::zeros((2, 2, 2, 2), DType::F32, &Device::Cpu).unwrap();
    let error = kv_candle_cuda::tensors(&[(tensor.clone(), tensor)]).unwrap_err();
    let wanted =
        CandleError::Device { field: "caches[0].0".into(), device: "Cpu".into(), wanted: "a CUDA device" };
    assert_eq!(error, wanted);
}
