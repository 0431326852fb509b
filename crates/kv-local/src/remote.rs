//! A peer's memory, as this process reaches it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crate::metadata::{Extent, Metadata, Place};
use crate::sys::{Mapping, Memory};

/// Most bytes unmapped in one call of `poll`.
const UNMAP: usize = 64 << 20;

/// The regions of one peer.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    regions: Vec<PeerRegion>,
    mappings: Vec<Arc<Mapping>>,
    /// How far pages have been made present: mapping, and offset in it.
    populated: (usize, usize),
}

/// How a region of the peer is reached.
#[derive(Debug)]
pub(crate) enum PeerRegion {
    /// Mapped here.
    Mapped(Memory),
    /// At this address of its process.
    Adopted(usize),
}

impl PeerMemory {
    /// Maps what is registered of the arenas, which have been checked against the metadata, and
    /// nothing else of them.
    pub(crate) fn map(arenas: &[OwnedFd], metadata: &Metadata) -> io::Result<PeerMemory> {
        let extents = metadata.extents();
        let mut mappings = Vec::with_capacity(extents.len());
        for extent in &extents {
            let fd = arenas.get(extent.arena).ok_or(io::ErrorKind::InvalidData)?;
            let mapping = Mapping::shared(fd.as_fd(), extent.start, to_usize(extent.end - extent.start)?)?;
            mapping.keep_from_children()?;
            mapping.prefer_huge_pages();
            mappings.push(Arc::new(mapping));
        }
        let region = |place: &Place| -> io::Result<PeerRegion> {
            let len = to_usize(place.len)?;
            let Some(arena) = place.arena.filter(|_| len != 0) else {
                // An empty region has no byte that could be reached.
                return Ok(PeerRegion::Adopted(to_usize(place.start)?));
            };
            let wanted = Extent { arena: arena as usize, start: place.start, end: u64::MAX };
            let index = extents.partition_point(|extent| *extent <= wanted).checked_sub(1);
            let found = index.and_then(|index| Some((extents.get(index)?, mappings.get(index)?)));
            let (extent, mapping) = found.ok_or(io::ErrorKind::InvalidData)?;
            let offset = place.start.checked_sub(extent.start).ok_or(io::ErrorKind::InvalidData)?;
            let memory = Memory::of(mapping, to_usize(offset)?, len).ok_or(io::ErrorKind::InvalidData)?;
            Ok(PeerRegion::Mapped(memory))
        };
        let regions = metadata.regions.iter().map(region).collect::<io::Result<_>>()?;
        Ok(PeerMemory { regions, mappings, populated: (0, 0) })
    }

    /// A region.
    pub(crate) fn region(&self, region: u32) -> Option<&PeerRegion> {
        self.regions.get(region as usize)
    }

    /// Bytes that are mapped.
    #[cfg(test)]
    pub(crate) fn mapped(&self) -> usize {
        self.mappings.iter().map(|mapping| mapping.len()).sum()
    }

    /// Makes the next `bytes` present as far as the peer has them, so that copies do not wait for page
    /// faults. True if there is more to do.
    pub(crate) fn populate_some(&mut self, bytes: usize) -> bool {
        let (index, offset) = self.populated;
        let Some(mapping) = self.mappings.get(index) else {
            return false;
        };
        let len = bytes.min(mapping.len() - offset);
        if mapping.populate_existing(offset, len).is_err() {
            // Copies work without it, only slower at first.
            self.populated = (self.mappings.len(), 0);
            return false;
        }
        self.populated = if offset + len == mapping.len() { (index + 1, 0) } else { (index, offset + len) };
        self.populated.0 < self.mappings.len()
    }

    /// Gives the mappings to be unmapped bit by bit.
    pub(crate) fn retire(self) -> impl Iterator<Item = Mapping> {
        drop(self.regions);
        self.mappings.into_iter().filter_map(|mapping| Arc::try_unwrap(mapping).ok())
    }
}

/// Unmaps a bounded piece of what is retired: tearing down tens of GiB at once takes seconds.
pub(crate) fn unmap_some(retired: &mut Vec<Mapping>) {
    if let Some(last) = retired.last_mut() {
        let keep = last.len().saturating_sub(1) / UNMAP * UNMAP;
        last.shrink(keep);
        if keep == 0 {
            retired.pop();
        }
    }
}

fn to_usize(value: u64) -> io::Result<usize> {
    usize::try_from(value).map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arena;

    #[test]
    fn a_large_mapping_goes_in_bounded_pieces() {
        let arena = Arena::new(4096).unwrap();
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 3 * UNMAP as u64 + 4096).unwrap();
        let large = Mapping::shared(file.as_fd(), 0, 3 * UNMAP + 4096).unwrap();
        let small = Mapping::shared(arena.fd(), 0, 4096).unwrap();
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
