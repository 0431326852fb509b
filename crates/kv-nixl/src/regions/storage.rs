//! Files: a transport's own storage, as NIXL's POSIX backend reaches it.
//!
//! Peers cannot reach a file: the worker that has the file reads pages into memory first. So a file is
//! reached by a connection of the transport to itself, opened with the transport's own metadata.

use std::fs::File;
use std::sync::Arc;

use kv_core::{MemoryKind, Op, Post, TransportError};
use kv_host::OsError;
use rustix::fs::{OFlags, fcntl_getfl};

use crate::error::NixlError;
use crate::ffi::memory::Memory;
use crate::regions::place::Place;
use crate::transport::NixlTransport;

impl NixlTransport {
    /// Gives a whole file, in its present length, to the transport, before any region is registered. Returns
    /// the device number of regions in the file; the address of such a region is an offset in the file. The
    /// transport keeps the file open.
    ///
    /// Pages move between the file and host memory of this transport through a connection of the transport to
    /// itself, which [`connect`](kv_core::Transport::connect) opens with the transport's own metadata: a
    /// WRITE goes to the file, a READ comes from the file. `Posted` says that the bytes are in the file, as
    /// after `write`; not that the bytes are on the disk.
    ///
    /// ```no_run
    /// # use kv_nixl::{HostMemory, Nixl, NixlConfig, NixlTransport, Search};
    /// # use kv_core::{MemoryKind, PeerId, Transport, Region, RegionRole};
    /// # let nixl = Nixl::load(&Search::default())?;
    /// let file = std::fs::File::options().read(true).write(true).open("/var/cache/kv/pages")?;
    /// let memory = HostMemory::new(64 << 20)?;
    /// let mut transport = NixlTransport::new(&nixl, NixlConfig::default())?;
    /// transport.add_memory(&memory)?;
    /// let device = transport.add_file(file)?;
    /// transport.register(&Region::dram(RegionRole::Kv, memory.addr(), 64 << 20, 1 << 20))?;
    /// let pages = Region::dram(RegionRole::Kv, 0, 1 << 30, 1 << 20).memory(MemoryKind::File, device);
    /// transport.register(&pages)?;
    /// let ours = transport.metadata()?;
    /// transport.connect(PeerId(7), &ours)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn add_file(&mut self, file: File) -> Result<u64, NixlError> {
        let os = |call| move |error: std::io::Error| OsError::new(call, error);
        let about = file.metadata().map_err(os("fstat"))?;
        let flags = fcntl_getfl(&file).map_err(|error| os("fcntl")(error.into()))?;
        if !about.is_file() {
            return Err(NixlError::File { reason: "the file is no regular file" });
        }
        if about.len() == 0 {
            return Err(NixlError::File { reason: "the file is empty; set its length first" });
        }
        if flags & OFlags::ACCMODE != OFlags::RDWR {
            return Err(NixlError::File { reason: "the file is not open for both reading and writing" });
        }
        self.start_storage()?;
        let memory = Memory::of_file(&Arc::new(file), about.len());
        let device = memory.device();
        self.adopt_memory(memory)?;
        Ok(device)
    }

    /// Starts NIXL's backend for files.
    fn start_storage(&mut self) -> Result<(), NixlError> {
        self.frozen.check_memory()?;
        if !self.regions.is_empty() {
            return Err(NixlError::File { reason: "files must be added before regions are registered" });
        }
        self.engine.start_storage(&self.nixl)
    }
}

/// Checks that the regions of a post fit the connection: on the connection to this transport's files, memory
/// goes with a file; on the connection to a peer, memory goes with memory.
pub(crate) fn check(
    to_storage: bool,
    post: &Post,
    local: &[Memory],
    remote: &[Place],
) -> Result<(), TransportError> {
    for descriptor in &post.descriptors {
        let (Some(here), Some(there)) =
            (local.get(descriptor.local_region as usize), remote.get(descriptor.remote_region as usize))
        else {
            // Checked already.
            continue;
        };
        match (to_storage, here.kind(), there.kind) {
            (true, MemoryKind::Dram, MemoryKind::File) => {
                let end = descriptor.remote_offset.saturating_add(there.addr).saturating_add(descriptor.len);
                if post.op == Op::Read
                    && local_file(local, descriptor.remote_region).is_some_and(|len| len < end)
                {
                    return Err(TransportError::Unsupported(
                        "a read beyond the end of a file that was truncated",
                    ));
                }
            }
            (true, ..) => {
                return Err(TransportError::Unsupported(
                    "a post to the transport's files must name local host regions and remote file regions",
                ));
            }
            (false, MemoryKind::File, _) | (false, _, MemoryKind::File) => {
                return Err(TransportError::Unsupported(
                    "a post to a peer names a file region; only the file's own worker reaches the file",
                ));
            }
            (false, ..) => {}
        }
    }
    Ok(())
}

/// The length that the file of a region has now; `None` if the region is of no file.
fn local_file(local: &[Memory], region: u32) -> Option<u64> {
    local.get(region as usize)?.file_len()
}
