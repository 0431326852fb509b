//! A peer's memory, as this process reaches it: mapped arenas, and addresses of adopted memory.

use std::io::ErrorKind;
use std::sync::Arc;

use kv_host::{Mapping, Memory, MemoryFile, OsError};
use rustix::io::Errno;

use crate::metadata::{Extent, Metadata, Place};
use crate::presence::Presence;

/// Most bytes unmapped in one call of `poll`.
const UNMAP: usize = 64 << 20;

/// The regions of one peer.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    regions: Vec<PeerRegion>,
    mappings: Vec<Arc<Mapping>>,
    presence: Presence,
}

/// How a region of the peer is reached.
#[derive(Debug)]
pub(crate) enum PeerRegion {
    /// The region is in an arena, and mapped in this process.
    Mapped {
        /// The region's bytes.
        memory: Memory,
        /// Number of the mapping that has them.
        mapping: usize,
        /// Where they begin in the mapping.
        start: usize,
    },
    /// The region is adopted memory, at this address in the peer's process.
    Adopted(usize),
}

impl PeerMemory {
    /// Maps the registered parts of the arenas, which have been checked against the metadata, and no other
    /// parts.
    pub(crate) fn map(arenas: &[MemoryFile], metadata: &Metadata) -> Result<PeerMemory, OsError> {
        let extents = metadata.extents();
        let mut mappings = Vec::with_capacity(extents.len());
        for extent in &extents {
            let file = arenas.get(extent.arena).ok_or(NOT_OF_METADATA)?;
            let mapping = file.map(extent.start, to_usize(extent.end - extent.start)?)?;
            mapping.keep_from_children()?;
            mapping.prefer_huge_pages();
            mappings.push(Arc::new(mapping));
        }
        let region = |place: &Place| -> Result<PeerRegion, OsError> {
            let len = to_usize(place.len)?;
            let Some(arena) = place.arena.filter(|_| len != 0) else {
                // An empty region has no byte that could be reached.
                return Ok(PeerRegion::Adopted(to_usize(place.start)?));
            };
            let wanted = Extent { arena: arena as usize, start: place.start, end: u64::MAX };
            let index = extents.partition_point(|extent| *extent <= wanted).checked_sub(1);
            let found = index.and_then(|index| Some((index, extents.get(index)?, mappings.get(index)?)));
            let (index, extent, mapping) = found.ok_or(NOT_OF_METADATA)?;
            let start = to_usize(place.start.checked_sub(extent.start).ok_or(NOT_OF_METADATA)?)?;
            let memory = Memory::of(mapping, start, len).map_err(|_| NOT_OF_METADATA)?;
            Ok(PeerRegion::Mapped { memory, mapping: index, start })
        };
        let regions = metadata.regions.iter().map(region).collect::<Result<_, OsError>>()?;
        let presence = Presence::new(mappings.iter().map(|mapping| mapping.len()));
        Ok(PeerMemory { regions, mappings, presence })
    }

    /// The region with this number, if the peer has one.
    pub(crate) fn region(&self, region: u32) -> Option<&PeerRegion> {
        self.regions.get(region as usize)
    }

    /// Bytes of the peer's memory that are mapped.
    #[cfg(test)]
    pub(crate) fn mapped(&self) -> usize {
        self.mappings.iter().map(|mapping| mapping.len()).sum()
    }

    /// Makes the pages present, as far as the peer has allocated them, in which a range of a region lies, so that
    /// a copy does not wait for page faults. Returns how many pieces had to be made present for this.
    pub(crate) fn make_present(&mut self, region: u32, offset: usize, len: usize) -> usize {
        let Some(PeerRegion::Mapped { mapping, start, .. }) = self.regions.get(region as usize) else {
            return 0;
        };
        let Some(mapped) = self.mappings.get(*mapping) else {
            return 0;
        };
        self.presence.make(*mapping, mapped, start + offset, len)
    }

    /// Makes the next piece of the memory present. True if there is more to do.
    pub(crate) fn populate_some(&mut self) -> bool {
        self.presence.make_next(&self.mappings)
    }

    /// The mappings, which [`unmap_some`] unmaps bit by bit.
    pub(crate) fn retire(self) -> impl Iterator<Item = Mapping> {
        drop(self.regions);
        self.mappings.into_iter().filter_map(|mapping| Arc::try_unwrap(mapping).ok())
    }
}

/// Unmaps a bounded piece of the retired mappings: unmapping tens of GiB at once takes seconds.
pub(crate) fn unmap_some(retired: &mut Vec<Mapping>) {
    if let Some(last) = retired.last_mut() {
        let keep = last.len().saturating_sub(1) / UNMAP * UNMAP;
        last.shrink(keep);
        if keep == 0 {
            retired.pop();
        }
    }
}

/// An error that cannot happen with descriptors that were checked against the metadata.
const NOT_OF_METADATA: OsError =
    OsError { call: "mmap", kind: ErrorKind::InvalidInput, errno: Some(Errno::INVAL.raw_os_error()) };

fn to_usize(value: u64) -> Result<usize, OsError> {
    usize::try_from(value).map_err(|_| NOT_OF_METADATA)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_mapping_goes_in_bounded_pieces() {
        let file = MemoryFile::create("test", 3 * UNMAP as u64 + 4096, false).unwrap();
        let large = file.map(0, 3 * UNMAP + 4096).unwrap();
        let small = file.map(0, 4096).unwrap();
        let mut retired = vec![small, large];
        for left in [3 * UNMAP, 2 * UNMAP, UNMAP] {
            unmap_some(&mut retired);
            assert_eq!(retired.last().map(Mapping::len), Some(left));
        }
        unmap_some(&mut retired);
        unmap_some(&mut retired);
        assert!(retired.is_empty());
    }
}
