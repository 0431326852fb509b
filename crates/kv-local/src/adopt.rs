//! [`LocalTransport::adopt`]: regions in memory that the server already owns.
#![allow(unsafe_code)]

use kv_core::{MemoryKind, Region};
use kv_host::Memory;

use crate::error::LocalError;
use crate::transport::LocalTransport;

impl LocalTransport {
    /// Allows regions in memory that the server already owns: `len` bytes at the address `addr`, of a `Vec`, a
    /// tensor or an own mapping. Peers reach this memory with `process_vm_readv` and `process_vm_writev`, which is
    /// slower than the plain copies of an [`Arena`](kv_host::Arena). No alignment is needed, and ranges may overlap: what the
    /// regions of a worker may not do is checked with its arguments. [`Region`] has the whole contract of such memory.
    ///
    /// Peers need the right to trace this process: the same user, the same PID namespace, and
    /// where the Yama security module restricts tracing,
    /// [`LocalConfig::permit_tracing`](crate::LocalConfig::permit_tracing).
    ///
    /// Once this process executes another program (`exec`), posts of peers to this memory end with
    /// [`PeerGone`](kv_core::TransportError::PeerGone). A write that is being copied at that very moment may still reach
    /// the new program; so stop the worker before. Memory of an arena cannot be reached in that way.
    ///
    /// # Errors
    ///
    /// [`LocalError::Memory`] if the range is impossible (it begins at address zero, has no bytes, or wraps around),
    /// or the transport's metadata has been asked for.
    ///
    /// # Safety
    ///
    /// As [`Region`] says of memory that a server owns, for the whole range.
    pub unsafe fn adopt(&mut self, addr: u64, len: u64) -> Result<(), LocalError> {
        // SAFETY: the caller keeps the range for as long as the transport and its peers use it.
        let memory = unsafe { Memory::adopt(addr, len) }?;
        self.adopt_memory(memory)
    }

    /// Allows every one of these regions, which lie in host memory that the server already owns: the regions of a
    /// worker's arguments, in one call.
    ///
    /// ```
    /// use kv_core::{KvArgs, Region, RegionRole};
    /// use kv_local::{LocalConfig, LocalTransport};
    ///
    /// // The keys and the values of one layer: 8 pages of 1 KiB each, in two tensors of the server.
    /// let (keys, values) = (vec![0_u8; 8 << 10], vec![0_u8; 8 << 10]);
    /// let region = |tensor: &Vec<u8>| Region::dram(RegionRole::Kv, tensor.as_ptr() as u64, 8 << 10, 1 << 10);
    /// let args = KvArgs::builder("engine", 0).pages(8, 16).region(region(&keys)).region(region(&values)).build()?;
    ///
    /// let mut transport = LocalTransport::new(LocalConfig::default())?;
    /// // SAFETY: both vectors live until the transport is dropped, and nobody refers to pages that are given away.
    /// unsafe { transport.adopt_regions(args.regions()) }?;
    /// // … `Worker::start(WorkerConfig::new(args, role), transport, client)`; at the end, stop the worker, and then:
    /// drop(transport);
    /// drop((keys, values));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`LocalError::Kind`] for a region that is not in host memory; otherwise as [`adopt`](LocalTransport::adopt).
    /// Regions before the one at fault are adopted.
    ///
    /// # Safety
    ///
    /// The promises of [`adopt`](LocalTransport::adopt), for each region.
    pub unsafe fn adopt_regions<'a>(
        &mut self,
        regions: impl IntoIterator<Item = &'a Region>,
    ) -> Result<(), LocalError> {
        for (index, region) in regions.into_iter().enumerate() {
            let Region { memory, device, addr, len, .. } = *region;
            if memory != MemoryKind::Dram {
                return Err(LocalError::Kind { region: index, memory, device });
            }
            // SAFETY: the caller promises this for each region.
            unsafe { self.adopt(addr, len) }?;
        }
        Ok(())
    }
}
