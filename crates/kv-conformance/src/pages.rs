//! [`Pages`]: the regions of a worker in one piece of memory, with gaps between them that nothing may touch.

use std::convert::Infallible;
use std::fmt::Debug;

use kv_core::{MemoryKind, Region, RegionRole, Transport};

use crate::{Regions, Side};

/// Bytes before each region, and after the last one.
const GAP: usize = 4096 + 64;

/// Regions in memory of the type `M`, whose copies fail with an `E`. Each time that a region is read, the gaps are, too: a write
/// beside the regions fails the check.
pub struct Pages<M, E = Infallible> {
    lens: Vec<usize>,
    offsets: Vec<usize>,
    addr: u64,
    place: (MemoryKind, u64),
    memory: M,
    read: fn(&M, usize, &mut [u8]) -> Result<(), E>,
    write: fn(&M, usize, &[u8]) -> Result<(), E>,
}

impl<M: 'static, E: Debug + 'static> Pages<M, E> {
    /// Regions of these lengths in host memory of zero bytes. `make` makes that many bytes of memory, and says where it
    /// begins. `read` and `write` copy bytes out of the memory and into it, from an offset on.
    pub fn new(
        lens: &[usize],
        make: impl FnOnce(usize) -> (u64, M),
        read: fn(&M, usize, &mut [u8]) -> Result<(), E>,
        write: fn(&M, usize, &[u8]) -> Result<(), E>,
    ) -> Pages<M, E> {
        let mut end = GAP;
        let offset = |len: &usize| {
            let here = end;
            end += len + GAP;
            here
        };
        let offsets = lens.iter().map(offset).collect();
        let (addr, memory) = make(end);
        Pages { lens: lens.to_vec(), offsets, addr, place: (MemoryKind::Dram, 0), memory, read, write }
    }

    /// The same in memory of another kind, on the device of this number.
    pub fn on(mut self, kind: MemoryKind, device: u64) -> Pages<M, E> {
        self.place = (kind, device);
        self
    }

    /// A worker with this transport, which has been given the memory, and with these regions.
    pub fn side<P: Transport>(self, mut transport: P) -> Side<P> {
        for (offset, len) in self.offsets.iter().zip(&self.lens) {
            let region = Region::dram(RegionRole::Kv, self.addr + *offset as u64, *len as u64, 1);
            transport.register(&region.memory(self.place.0, self.place.1)).unwrap();
        }
        Side { transport, lens: self.lens.clone(), memory: Box::new(self) }
    }
}

impl<M, E: Debug> Regions for Pages<M, E> {
    fn read(&self, region: usize, offset: usize, out: &mut [u8]) {
        let ends = self.offsets.iter().zip(&self.lens).map(|(at, len)| at + len);
        for gap in [0].into_iter().chain(ends) {
            let mut bytes = [0; GAP];
            (self.read)(&self.memory, gap, &mut bytes).unwrap();
            assert!(bytes == [0; GAP], "a write outside of all regions");
        }
        (self.read)(&self.memory, self.offsets[region] + offset, out).unwrap();
    }

    fn write(&self, region: usize, offset: usize, bytes: &[u8]) {
        (self.write)(&self.memory, self.offsets[region] + offset, bytes).unwrap();
    }
}
