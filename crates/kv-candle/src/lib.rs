//! From the KV cache tensors of [candle](candle_core) to the regions of kv-transfer ([`KvTensors`]).
//!
//! What it is: a check that tensors are contiguous, equal in shape and element type, and in memory whose address is
//! known; their description as regions; and a value that keeps them allocated. What it is not: necessary. A server
//! whose candle is another version or a fork, or whose tensors have other axes, describes them by address and length
//! ([`Region`]; the cookbook of kv-transfer has the recipe "The caches of vllm.rs") and needs nothing of this crate.
//!
//! The tensors here are those of vllm.rs and candle-vllm with flash attention: for each layer a pair of keys and values,
//! each `[blocks, block, heads, head_dim]`, on the CPU. For tensors of a GPU there is `kv-candle-cuda`, which is built
//! only where CUDA's compiler is; a server with another version of cudarc says itself where its tensors lie
//! ([`KvTensors::placed`]).
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use kv_candle::KvTensors;
//! use kv_transfer::local::{LocalConfig, LocalTransport};
//! use kv_transfer::KvArgs;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The cache of a server: 2 layers, 128 blocks of 64 tokens, 4 heads of 32 elements.
//! let tensor = || Tensor::zeros((128, 64, 4, 32), DType::BF16, &Device::Cpu);
//! let cache: Vec<(Tensor, Tensor)> = vec![(tensor()?, tensor()?), (tensor()?, tensor()?)];
//!
//! let tensors = KvTensors::new(&cache)?;
//! let args = tensors.describe(KvArgs::builder("engine", 0).model("my-model")).build()?;
//! assert_eq!(args.geometry().bytes_per_page(), 2 * 2 * 64 * 4 * 32 * 2);
//!
//! let mut transport = LocalTransport::new(LocalConfig::default())?;
//! // SAFETY: `tensors` lives until the worker has stopped, and the blocks of a session are not used while the session
//! // has them.
//! unsafe { transport.adopt_regions(args.regions()) }?;
//! // let worker = Worker::start(WorkerConfig::new(args, role), transport, client)?;
//! // …
//! // let report = worker.stop(grace);
//! # drop(transport);
//! // Only now. If the report counts anything in quarantine: std::mem::forget(tensors).
//! drop(tensors);
//! # Ok(())
//! # }
//! ```

mod error;
mod tensors;

pub use error::CandleError;
pub use kv_core::{MemoryKind, Region};
pub use tensors::{KvTensors, Place};
