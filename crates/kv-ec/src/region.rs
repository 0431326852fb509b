//! [`EcRegion`]: the memory of a host's encoder cache.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kv_core::{KvArgs, KvArgsBuilder, PageList, PagesError, Region, RegionRole};
use kv_host::{Arena, Memory, MemoryError, MemoryFile};

/// The memory that holds the entries of all ranks of a host: `blocks` blocks of `block_bytes` bytes.
///
/// One process of the host creates the region ([`create`](EcRegion::create)) and gives it to its transport.
/// The other processes map the same memory from a descriptor that was passed to them
/// ([`received`](EcRegion::received)), which [`HostClient`](crate::host::HostClient) does. Clones share the memory.
///
/// The region is a memory file without a name in any directory: the kernel frees the memory when the last
/// process that has mapped the file has ended, even if all of them were killed. The file is sealed, so that no
/// process can make it shorter while others use it.
///
/// An entry's bytes are the bytes of its blocks, one block after the other in the order of the entry's list.
/// Reads and writes are copies. A read of blocks that are written at the same time may return old and new bytes
/// mixed; pins and reservations of the [cache](crate::EncoderCache) keep readers and writers apart.
///
/// ```
/// use kv_core::PageList;
/// use kv_ec::EcRegion;
///
/// let region = EcRegion::create(64, 4096)?;
/// let blocks = PageList::from_pages([7, 8, 3])?;
/// region.write(&blocks, 8190, b"crosses from block 8 to block 3")?;
/// let mut bytes = [0; 7];
/// region.read(&blocks, 8190, &mut bytes)?;
/// assert_eq!(&bytes, b"crosses");
///
/// // What a worker tells its transport and its peers.
/// let args = region.args("encoder-0", 0).build()?;
/// assert_eq!(args.geometry().num_pages, 64);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct EcRegion {
    source: Source,
    memory: Memory,
    blocks: u32,
    block_bytes: u32,
}

#[derive(Debug, Clone)]
enum Source {
    Created(Arena),
    Received(Arc<MemoryFile>),
}

/// Why a region could not be made or mapped, or why bytes were not copied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The region would have no bytes, or more than an address space has.
    #[error("a region of {blocks} blocks of {block_bytes} bytes cannot be made")]
    Size {
        /// Blocks that were asked for.
        blocks: u32,
        /// Bytes of a block.
        block_bytes: u32,
    },
    /// The descriptor that was passed is not that of a memory file, or is that of a file that is not sealed
    /// against shrinking.
    #[error("the descriptor is not that of a sealed memory file")]
    NotSealed,
    /// A memory file that was passed is shorter than the region that it should hold.
    #[error("the memory file has {got} bytes; the region needs {needed}")]
    TooShort {
        /// Length of the file in bytes.
        got: u64,
        /// Bytes of the region.
        needed: u64,
    },
    /// A list names a block that the region does not have. No byte was copied.
    #[error(transparent)]
    Blocks(#[from] PagesError),
    /// The bytes asked for are not inside the entry. No byte was copied.
    #[error("the entry's blocks have {entry} bytes; {len} bytes at offset {offset} are not inside")]
    OutOfEntry {
        /// Bytes of all blocks of the list.
        entry: u64,
        /// Offset of the first byte to be copied.
        offset: u64,
        /// Bytes to be copied.
        len: u64,
    },
    /// The host does not have the memory, or refused to map it.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Bytes of the region that are neighbours, and where they are in the caller's buffer.
struct Piece {
    memory: usize,
    buffer: usize,
    len: usize,
}

impl EcRegion {
    /// Allocates `blocks` blocks of `block_bytes` bytes, all zero. The kernel allocates all of the memory now,
    /// and none during a transfer.
    pub fn create(blocks: u32, block_bytes: u32) -> Result<EcRegion, RegionError> {
        let arena = Arena::new(size(blocks, block_bytes)?)?;
        let memory = arena.memory().clone();
        Ok(EcRegion { source: Source::Created(arena), memory, blocks, block_bytes })
    }

    /// Maps the region that another process has created, from the descriptor of its memory file. `blocks` and
    /// `block_bytes` must be those of the other process.
    pub fn received(fd: OwnedFd, blocks: u32, block_bytes: u32) -> Result<EcRegion, RegionError> {
        let len = size(blocks, block_bytes)?;
        let file = MemoryFile::received(fd).ok_or(RegionError::NotSealed)?;
        if file.len() < len as u64 {
            return Err(RegionError::TooShort { got: file.len(), needed: len as u64 });
        }
        let memory = file.memory()?.part(0, len)?;
        Ok(EcRegion { source: Source::Received(Arc::new(file)), memory, blocks, block_bytes })
    }

    /// How many blocks the region has.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// The region's bytes. They stay mapped in this process while the returned value or a part of it lives.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The arena for a transport that must know memory before regions in it are registered
    /// (`LocalTransport::add_arena` of kv-local). `None` in a process that has mapped the region of another
    /// process.
    pub fn arena(&self) -> Option<&Arena> {
        match &self.source {
            Source::Created(arena) => Some(arena),
            Source::Received(_) => None,
        }
    }

    /// The description of the region for a transport and for peers: a cache of one layer, whose pages are the
    /// blocks. The caller may set more fields before [`build`](KvArgsBuilder::build).
    pub fn args(&self, engine: &str, rank: u32) -> KvArgsBuilder {
        let (addr, len) = (self.memory.addr(), self.memory.len() as u64);
        let region = Region::dram(RegionRole::Kv, addr, len, u64::from(self.block_bytes)).layer(0);
        KvArgs::builder(engine, rank).pages(self.blocks, 1).region(region)
    }

    /// Copies `bytes` into the entry whose blocks are `entry`, from byte `offset` of the entry on.
    pub fn write(&self, entry: &PageList, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
        for piece in self.pieces(entry, offset, bytes.len())? {
            let part = bytes.get(piece.buffer..piece.buffer + piece.len).unwrap_or_default();
            self.memory.write(piece.memory, part)?;
        }
        Ok(())
    }

    /// Copies `out.len()` bytes of the entry whose blocks are `entry` to `out`, from byte `offset` of the entry
    /// on.
    pub fn read(&self, entry: &PageList, offset: u64, out: &mut [u8]) -> Result<(), RegionError> {
        for piece in self.pieces(entry, offset, out.len())? {
            let part = out.get_mut(piece.buffer..piece.buffer + piece.len).unwrap_or_default();
            self.memory.read(piece.memory, part)?;
        }
        Ok(())
    }

    /// The pieces of the region, one for each run of neighbouring blocks, that hold a range of an entry.
    fn pieces(
        &self,
        entry: &PageList,
        offset: u64,
        len: usize,
    ) -> Result<impl Iterator<Item = Piece>, RegionError> {
        entry.check_below(self.blocks)?;
        let block = self.block_bytes as usize;
        let total = entry.len() as u64 * block as u64;
        if offset.checked_add(len as u64).is_none_or(|end| end > total) {
            return Err(RegionError::OutOfEntry { entry: total, offset, len: len as u64 });
        }
        let (mut skip, mut buffer) = (offset as usize, 0);
        let piece = move |run: &kv_core::PageRun| {
            let run_len = run.len as usize * block;
            let skipped = skip.min(run_len);
            skip -= skipped;
            let piece = Piece {
                memory: run.start as usize * block + skipped,
                buffer,
                len: (run_len - skipped).min(len - buffer),
            };
            buffer += piece.len;
            piece
        };
        Ok(entry.runs().iter().map(piece).filter(|piece| piece.len > 0))
    }
}

impl AsFd for EcRegion {
    /// The descriptor of the memory file, to be passed to other processes of the host.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.source {
            Source::Created(arena) => arena.file().as_fd(),
            Source::Received(file) => file.as_fd(),
        }
    }
}

/// Bytes of a region that an address space can hold.
fn size(blocks: u32, block_bytes: u32) -> Result<usize, RegionError> {
    let len = (blocks as usize).checked_mul(block_bytes as usize);
    len.filter(|len| *len > 0).ok_or(RegionError::Size { blocks, block_bytes })
}

#[cfg(test)]
mod tests {
    use kv_core::Transport;
    use kv_local::{LocalConfig, LocalTransport};
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn list(blocks: &[u32]) -> PageList {
        PageList::from_pages(blocks.iter().copied()).unwrap()
    }

    #[test]
    fn every_range_of_an_entry_is_found_in_its_blocks_in_their_order() {
        let region = EcRegion::create(16, 10).unwrap();
        for block in 0..16u8 {
            let bytes: Vec<u8> = (0..10).map(|byte| block * 10 + byte).collect();
            region.memory().write(usize::from(block) * 10, &bytes).unwrap();
        }
        let entry = list(&[4, 5, 6, 2, 15, 0]);
        let whole: Vec<u8> =
            entry.iter().flat_map(|block| (0..10).map(move |byte| block as u8 * 10 + byte)).collect();
        for from in 0..=60 {
            for to in from..=60 {
                let mut out = vec![0xff; to - from];
                region.read(&entry, from as u64, &mut out).unwrap();
                assert_eq!(out, whole[from..to]);
                let fresh = EcRegion::create(16, 10).unwrap();
                fresh.write(&entry, from as u64, &out).unwrap();
                let mut back = vec![0xff; 60];
                fresh.read(&entry, 0, &mut back).unwrap();
                let zeroes = |len| std::iter::repeat_n(0, len);
                assert!(back.into_iter().eq(zeroes(from).chain(out).chain(zeroes(60 - to))), "{from}..{to}");
            }
        }
    }

    #[test]
    fn nothing_is_copied_beyond_an_entry_or_the_region() {
        let region = EcRegion::create(4, 10).unwrap();
        let entry = list(&[3, 1]);
        let outside = |offset, len| RegionError::OutOfEntry { entry: 20, offset, len };
        assert_eq!(region.write(&entry, 11, &[7; 10]), Err(outside(11, 10)));
        assert_eq!(region.read(&entry, u64::MAX, &mut [7]), Err(outside(u64::MAX, 1)));
        let error = region.write(&list(&[0, 4]), 0, &[7; 5]).unwrap_err();
        assert_eq!(error, RegionError::Blocks(PagesError::OutOfRange { page: 4, num_pages: 4 }));
        let mut all = [1; 40];
        region.memory().read(0, &mut all).unwrap();
        assert_eq!(all, [0; 40]);
    }

    #[test]
    fn only_a_sealed_file_that_holds_the_whole_region_is_mapped() {
        let region = EcRegion::create(4, 100_000).unwrap();
        let fd = || region.as_fd().try_clone_to_owned().unwrap();
        let theirs = EcRegion::received(fd(), 4, 100_000).unwrap();
        theirs.write(&list(&[2]), 0, b"seen").unwrap();
        let mut out = [0; 4];
        region.read(&list(&[2]), 0, &mut out).unwrap();
        assert_eq!((&out, theirs.arena().is_none(), region.arena().is_some()), (b"seen", true, true));
        let got = region.arena().unwrap().file().len();
        let error = EcRegion::received(fd(), 5, 100_000).unwrap_err();
        assert_eq!(error, RegionError::TooShort { got, needed: 500_000 });
        let open = memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&open, 1 << 20).unwrap();
        assert_eq!(EcRegion::received(open, 1, 4096).unwrap_err(), RegionError::NotSealed);
        for (blocks, block_bytes) in [(0, 1), (1, 0)] {
            let error = EcRegion::create(blocks, block_bytes).unwrap_err();
            assert_eq!(error, RegionError::Size { blocks, block_bytes });
        }
    }

    #[test]
    fn the_embedded_transport_registers_the_region_as_one_cache_of_blocks() {
        let region = EcRegion::create(64, 5120).unwrap();
        let args = region.args("encoder-0", 0).build().unwrap();
        assert_eq!((args.regions().len(), args.regions()[0].items()), (1, 64));
        let mut transport = LocalTransport::new(LocalConfig::default()).unwrap();
        assert!(transport.register(&args.regions()[0]).is_err());
        transport.add_arena(region.arena().unwrap()).unwrap();
        transport.register(&args.regions()[0]).unwrap();
        assert!(!transport.metadata().unwrap().is_empty());
    }
}
