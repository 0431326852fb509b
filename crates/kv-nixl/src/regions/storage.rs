//! Files: a transport's own storage, as NIXL's POSIX backend reaches it.
//!
//! A file is no memory of a peer's: who wants pages of a file has its worker read them into memory
//! first. So the way to a file is a connection of a transport to itself, opened with its own metadata.

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
    /// Gives a file to the transport, before any region is registered: all of it, as long as it is now. Returns the number that regions in
    /// it have as their device; their address is an offset. The transport keeps the file open.
    ///
    /// Pages move between it and host memory of this transport through a connection to ourselves, which
    /// [`connect`](kv_core::Transport::connect) opens with our own metadata: a WRITE goes to the file, a
    /// READ comes from it. `Posted` says that the bytes are in the file, as `write` does; not that
    /// they are on the disk.
    ///
    /// ```no_run
    /// # use kv_nixl::{HostPool, Nixl, NixlConfig, NixlTransport, Search};
    /// # use kv_core::{MemoryKind, PeerId, Transport, Region, RegionRole};
    /// # let nixl = Nixl::load(&Search::default())?;
    /// let file = std::fs::File::options().read(true).write(true).open("/var/cache/kv/pages")?;
    /// let pool = HostPool::new(64 << 20)?;
    /// let mut transport = NixlTransport::new(&nixl, NixlConfig::default())?;
    /// transport.add_pool(&pool)?;
    /// let device = transport.add_file(file)?;
    /// transport.register(&Region::dram(RegionRole::Kv, pool.addr(), 64 << 20, 1 << 20))?;
    /// let pages = Region::dram(RegionRole::Kv, 0, 1 << 30, 1 << 20);
    /// transport.register(&Region { memory: MemoryKind::File, device, ..pages })?;
    /// let ours = transport.metadata()?;
    /// transport.connect(PeerId(7), &ours)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn add_file(&mut self, file: File) -> Result<u64, NixlError> {
        let os = |call| move |error: std::io::Error| OsError::new(call, error);
        let about = file.metadata().map_err(os("fstat"))?;
        let flags = fcntl_getfl(&file).map_err(|error| os("fcntl")(error.into()))?;
        if !about.is_file() {
            return Err(NixlError::File { reason: "it is no regular file" });
        }
        if about.len() == 0 {
            return Err(NixlError::File { reason: "it is empty; give it its length first" });
        }
        if flags & OFlags::ACCMODE != OFlags::RDWR {
            return Err(NixlError::File { reason: "it is not open for reading and writing" });
        }
        self.start_storage()?;
        let memory = Memory::of_file(&Arc::new(file), about.len());
        let device = memory.device();
        self.adopt_memory(memory)?;
        Ok(device)
    }

    /// Makes ready for files.
    fn start_storage(&mut self) -> Result<(), NixlError> {
        self.frozen.check_memory()?;
        if !self.regions.is_empty() {
            return Err(NixlError::File {
                reason: "files are given to a transport before regions are registered",
            });
        }
        self.engine.start_storage(&self.nixl)
    }
}

/// Checks that the regions of a post fit the way: to our storage memory goes with files, to a peer
/// memory goes with memory.
pub(crate) fn check(
    to_storage: bool,
    post: &Post,
    local: &[Memory],
    remote: &[Place],
) -> Result<(), TransportError> {
    for desc in &post.descs {
        let (Some(here), Some(there)) =
            (local.get(desc.local_region as usize), remote.get(desc.remote_region as usize))
        else {
            // Checked already.
            continue;
        };
        match (to_storage, here.kind(), there.kind) {
            (true, MemoryKind::Dram, MemoryKind::File) => {
                let end = desc.remote_offset.saturating_add(there.addr).saturating_add(desc.len);
                if post.op == Op::Read && local_file(local, desc.remote_region).is_some_and(|len| len < end) {
                    return Err(TransportError::Unsupported(
                        "a read behind the end of a file that was cut off",
                    ));
                }
            }
            (true, ..) => {
                return Err(TransportError::Unsupported(
                    "a post to our storage that is not between a local host region and a remote file region",
                ));
            }
            (false, MemoryKind::File, _) | (false, _, MemoryKind::File) => {
                return Err(TransportError::Unsupported(
                    "a file region in a post to a peer: files are reached by their own worker only",
                ));
            }
            (false, ..) => {}
        }
    }
    Ok(())
}

/// How long the file of a region of ours is now.
fn local_file(local: &[Memory], region: u32) -> Option<u64> {
    local.get(region as usize)?.file_len()
}
