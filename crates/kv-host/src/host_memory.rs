//! [`HostMemory`]: private memory of this process, for transports that reach memory without a shared file.

use std::ops::Deref;
use std::sync::Arc;

use rustix::io::Errno;

use crate::arena::HUGE_PAGE;
use crate::error::{MemoryError, OsError};
use crate::sys::{Mapping, Memory};

/// Anonymous host memory, on huge pages where the kernel grants them, with all pages present from the start.
/// UCX copies between processes were measured at up to twice the speed on huge pages.
///
/// Clones are the same memory, which stays mapped while a clone lives, here or inside a transport.
/// Forked children do not have the memory, because a network card may write to it. The bytes are read
/// and written with the methods of [`Memory`], to which this type dereferences. The address is a multiple of
/// 2 MiB.
///
/// ```
/// let memory = kv_host::HostMemory::new(1 << 20)?;
/// memory.write(4096, b"page")?;
/// let mut page = [0; 4];
/// memory.read(4096, &mut page)?;
/// assert_eq!(&page, b"page");
/// # Ok::<(), kv_host::MemoryError>(())
/// ```
#[derive(Debug, Clone)]
pub struct HostMemory {
    memory: Memory,
}

impl HostMemory {
    /// Allocates `len` zero bytes, at least one.
    pub fn new(len: usize) -> Result<HostMemory, MemoryError> {
        let max = isize::MAX as usize - 2 * HUGE_PAGE;
        if len == 0 || len > max {
            return Err(MemoryError::Length { got: len, max });
        }
        let mapping = present(len.next_multiple_of(HUGE_PAGE));
        let mapping = mapping.map_err(|cause| MemoryError::Os { len, cause })?;
        Ok(HostMemory { memory: Memory::of(&Arc::new(mapping), 0, len)? })
    }

    /// The bytes: as many as [`new`](HostMemory::new) was asked for.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl Deref for HostMemory {
    type Target = Memory;

    fn deref(&self) -> &Memory {
        &self.memory
    }
}

fn present(len: usize) -> Result<Mapping, OsError> {
    let mapping = Mapping::anonymous(len, HUGE_PAGE)?;
    mapping.prefer_huge_pages();
    mapping.keep_from_children()?;
    match mapping.populate(0, len) {
        // Older than Linux 5.14: the first transfer will be slower.
        Err(error) if error.errno == Some(Errno::INVAL.raw_os_error()) => Ok(mapping),
        populated => populated.map(|()| mapping),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_begins_at_a_huge_page() {
        assert_eq!(HostMemory::new(5000).unwrap().addr() % HUGE_PAGE as u64, 0);
    }
}
