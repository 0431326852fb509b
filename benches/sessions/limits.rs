//! What one thread can do at best: copies of the same pieces, within memory of its own.

use kv_transfer::tcp::HostMemory;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::Error;
use crate::side::{Shape, now, order};

/// Two caches of one shape in this process, both with all pages present.
pub(crate) struct Memcpy {
    shape: Shape,
    here: HostMemory,
    there: HostMemory,
    from: Vec<u32>,
    to: Vec<u32>,
}

impl Memcpy {
    pub(crate) fn new(shape: Shape) -> Result<Memcpy, Error> {
        let (here, there) = (HostMemory::new(shape.len())?, HostMemory::new(shape.len())?);
        Ok(Memcpy { shape, here, there, from: order(&shape, 11), to: order(&shape, 12) })
    }

    /// Copies the pages of requests `first..first + count`, each with `each` pages; returns the seconds.
    pub(crate) fn run(&self, first: usize, count: usize, each: usize) -> Result<f64, Error> {
        let begun = now();
        for at in first * each..(first + count) * each {
            let at = at % self.from.len();
            for region in 0..self.shape.regions {
                let place = |page: u32| region * self.shape.region() + page as usize * self.shape.item;
                self.here.copy_to(place(self.from[at]), &self.there, place(self.to[at]), self.shape.item)?;
            }
        }
        Ok(now() - begun)
    }

    /// Copies the whole cache to memory that is touched for the first time; returns the seconds.
    #[allow(unsafe_code)]
    pub(crate) fn fresh(&self) -> Result<f64, Error> {
        let len = self.here.len();
        // SAFETY: the kernel chooses the address. The mapping has `len` bytes, as `here` has; nothing else knows
        // it, and it is unmapped after its last use.
        unsafe {
            let to = mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?;
            let begun = now();
            std::ptr::copy_nonoverlapping(self.here.addr() as *const u8, to.cast::<u8>(), len);
            let took = now() - begun;
            munmap(to, len)?;
            Ok(took)
        }
    }
}
