//! Mappings of memory files and of private memory.

use std::ffi::c_void;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use rustix::param::page_size;

use super::inside;
use crate::arena::HUGE_PAGE;
use crate::error::OsError;

/// The step in which pages are touched where the kernel cannot populate them: the smallest page.
const TOUCH: usize = 4096;

/// A readable and writable mapping: of a [`MemoryFile`](crate::MemoryFile), shared with other processes, or
/// of private memory. Dropping the mapping unmaps the memory.
#[derive(Debug)]
pub struct Mapping {
    addr: usize,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes of `fd` from `offset` on, which is a multiple of the page size. The caller has made
    /// sure that the file has all of these bytes and cannot shrink.
    pub(crate) fn shared(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Mapping, OsError> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let place = place_for_huge_pages(offset, len);
        // SAFETY: the kernel takes the place as a hint only, so no memory of ours is replaced.
        let addr = unsafe { mmap(place, len, prot, MapFlags::SHARED, fd, offset) };
        Ok(Mapping { addr: addr.map_err(|error| OsError::new("mmap", error))? as usize, len })
    }

    /// `len` bytes of private memory at a multiple of `align`. Both are multiples of the page size, and
    /// `align` is not zero.
    pub(crate) fn anonymous(len: usize, align: usize) -> Result<Mapping, OsError> {
        let error = |error: Errno| OsError::new("mmap", error);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let total = len.checked_add(align).ok_or(error(Errno::NOMEM))?;
        // SAFETY: the kernel chooses the address, so no memory of ours is replaced.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), total, prot, MapFlags::PRIVATE) };
        let start = start.map_err(error)? as usize;
        let addr = start.next_multiple_of(align);
        for (at, size) in [(start, addr - start), (addr + len, start + total - addr - len)] {
            if size > 0 {
                // SAFETY: the margins are part of the mapping just made, and nothing knows them.
                let _ = unsafe { munmap(at as *mut c_void, size) };
            }
        }
        Ok(Mapping { addr, len })
    }

    /// Address of the first byte.
    pub(super) fn addr(&self) -> usize {
        self.addr
    }

    /// Length of the mapping, in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True once [`shrink`](Mapping::shrink) has unmapped everything.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Asks the kernel for transparent huge pages. This is a hint: a failure costs speed only.
    pub fn prefer_huge_pages(&self) {
        let _ = self.advise(0, self.len, Advice::LinuxHugepage);
    }

    /// Keeps the mapping out of forked children, so that no child can write to a peer's memory after this
    /// process has told the peer that its writes are over.
    pub fn keep_from_children(&self) -> Result<(), OsError> {
        self.advise(0, self.len, Advice::LinuxDontFork)
    }

    /// Puts the mapping on huge pages now, where it is aligned to them and its file has none of the bytes yet.
    /// The kernel does this for a mapping that asks for it whatever it does of its own accord, from Linux 6.1 on.
    /// Stops at the first huge page that the kernel refuses: that costs speed only.
    pub fn collect_huge_pages(&self) {
        let first = self.addr.next_multiple_of(HUGE_PAGE) - self.addr;
        let mut starts = (first..).step_by(HUGE_PAGE).take_while(|start| inside(self.len, *start, HUGE_PAGE));
        // The kernel collects pages of which there is at least one.
        starts.all(|start| self.populate(start, 1).is_ok() && self.collect_huge_page(start));
    }

    /// Puts the aligned huge page at this offset, which is inside the mapping, together. False if the kernel
    /// refuses.
    fn collect_huge_page(&self, start: usize) -> bool {
        let addr = (self.addr + start) as *mut c_void;
        // SAFETY: the range is inside our mapping, and the advice does not change what its bytes are.
        unsafe { libc::madvise(addr, HUGE_PAGE, libc::MADV_COLLAPSE) == 0 }
    }

    /// Makes the pages of `len` bytes from `offset` on present and writable, without changing their bytes.
    /// Fails with `EINVAL` before Linux 5.14, which does not have this advice, and for a range outside of the
    /// mapping.
    pub fn populate(&self, offset: usize, len: usize) -> Result<(), OsError> {
        self.advise(offset, len, Advice::LinuxPopulateWrite)
    }

    /// Makes the pages of a range present and writable that the file has already. A hole of the file stays a
    /// hole. `offset` must be a multiple of the page size (`EINVAL`).
    ///
    /// The pages are made present by reading: the kernel then maps those around a page together with it, which is
    /// three times as fast, and lets a shared mapping write to them at once.
    pub fn populate_existing(&self, offset: usize, len: usize) -> Result<(), OsError> {
        let page = page_size();
        if !inside(self.len, offset, len) || !offset.is_multiple_of(page) {
            return Err(OsError::new("mincore", Errno::INVAL));
        }
        let mut exists = vec![0_u8; len.div_ceil(page)];
        // SAFETY: the range is mapped, and the kernel writes one byte a page into `exists`.
        let result = unsafe { libc::mincore((self.addr + offset) as *mut c_void, len, exists.as_mut_ptr()) };
        if result != 0 {
            return Err(OsError::new("mincore", io::Error::last_os_error()));
        }
        let mut at = 0;
        for run in exists.chunk_by(|a, b| a & 1 == b & 1) {
            let size = (run.len() * page).min(len - at);
            if run.first().is_some_and(|first| first & 1 == 1) {
                self.advise(offset + at, size, Advice::LinuxPopulateRead)?;
            }
            at += size;
        }
        Ok(())
    }

    /// Makes all pages present by touching them, for kernels older than 5.14.
    pub fn touch(&self) {
        for offset in (0..self.len).step_by(TOUCH) {
            // SAFETY: the byte is inside the mapping, which lives as long as `self`; an atomic has
            // no alignment needs at one byte.
            let byte = unsafe { AtomicU8::from_ptr((self.addr + offset) as *mut u8) };
            byte.fetch_or(0, Ordering::Relaxed);
        }
    }

    /// The eight bytes at `offset` as an atomic word, which other processes that map the same file share.
    ///
    /// # Panics
    ///
    /// If `offset` is not a multiple of eight, or the word is not inside the mapping.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(
            inside(self.len, offset, 8) && offset.is_multiple_of(8),
            "{offset} is no word of {}",
            self.len
        );
        // SAFETY: the word is inside the mapping and aligned, mapped while `self` is borrowed, and only
        // ever used as an atomic.
        unsafe { AtomicU64::from_ptr((self.addr + offset) as *mut u64) }
    }

    /// Unmaps everything but the first `keep` bytes, a multiple of the page size.
    pub fn shrink(&mut self, keep: usize) {
        if keep >= self.len {
            return;
        }
        // SAFETY: the range is ours, and `&mut self` shows that nothing can use it any more.
        let _ = unsafe { munmap((self.addr + keep) as *mut c_void, self.len - keep) };
        // The range is not used again, even if the kernel refused to unmap it.
        self.len = keep;
    }

    fn advise(&self, offset: usize, len: usize, advice: Advice) -> Result<(), OsError> {
        if !inside(self.len, offset, len) {
            return Err(OsError::new("madvise", Errno::INVAL));
        }
        // SAFETY: the range is inside our mapping, and none of the advices used here changes what
        // its bytes are.
        let result = unsafe { madvise((self.addr + offset) as *mut c_void, len, advice) };
        result.map_err(|error| OsError::new("madvise", error))
    }
}

/// A free address at which `len` bytes of a file from `offset` on can be mapped by huge pages, if the file is on
/// such: the address is as far from a multiple of their size as the offset is. Null for shorter mappings, and if
/// there is no such address.
fn place_for_huge_pages(offset: u64, len: usize) -> *mut c_void {
    let Some(total) = len.checked_add(HUGE_PAGE).filter(|_| len >= HUGE_PAGE) else {
        return ptr::null_mut();
    };
    // SAFETY: the kernel chooses the address, so no memory of ours is replaced.
    let free = unsafe {
        mmap_anonymous(ptr::null_mut(), total, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)
    };
    let Ok(free) = free else {
        return ptr::null_mut();
    };
    // SAFETY: the mapping was just made, and nothing knows it.
    let _ = unsafe { munmap(free, total) };
    let beyond = offset as usize % HUGE_PAGE;
    let place = free as usize + (HUGE_PAGE + beyond - free as usize % HUGE_PAGE) % HUGE_PAGE;
    place as *mut c_void
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryFile;

    #[test]
    fn a_mapping_shrinks_from_its_end_and_refuses_other_ranges() {
        let mut mapping = Mapping::anonymous(3 << 20, 2 << 20).unwrap();
        assert_eq!(mapping.addr() % (2 << 20), 0);
        mapping.touch();
        assert!(mapping.keep_from_children().is_ok());
        mapping.shrink(1 << 20);
        mapping.shrink(2 << 20);
        assert_eq!(mapping.len(), 1 << 20);
        assert_eq!(mapping.populate(1 << 20, 1), Err(OsError::new("madvise", Errno::INVAL)));
        assert_eq!(mapping.populate(usize::MAX, 2), Err(OsError::new("madvise", Errno::INVAL)));
        assert_eq!(mapping.populate_existing(1, 1), Err(OsError::new("mincore", Errno::INVAL)));
        mapping.shrink(0);
        assert!(mapping.is_empty());
    }

    #[test]
    fn populating_a_mapping_keeps_the_holes_of_its_file() {
        let file = MemoryFile::create("test", 1 << 20, false).unwrap();
        let writer = file.map(0, 1 << 20).unwrap();
        writer.word(64 << 10).store(7, Ordering::Relaxed);
        let allocated = file.allocated();
        assert!(allocated > 0 && allocated < 1 << 20, "{allocated}");
        let reader = file.map(0, 1 << 20).unwrap();
        reader.populate_existing(0, 1 << 20).unwrap();
        assert_eq!(file.allocated(), allocated);
        assert_eq!(reader.word(64 << 10).load(Ordering::Relaxed), 7);
        reader.populate(0, 1 << 20).unwrap();
        assert_eq!(file.allocated(), 1 << 20);
    }

    #[test]
    fn a_long_mapping_lies_as_its_bytes_lie_in_huge_pages_of_the_file() {
        let file = MemoryFile::create("test", 3 * HUGE_PAGE as u64, false).unwrap();
        for offset in [0, 4096, HUGE_PAGE - 4096] {
            let mapping = file.map(offset as u64, 2 * HUGE_PAGE).unwrap();
            assert_eq!(mapping.addr() % HUGE_PAGE, offset);
            mapping.collect_huge_pages();
            mapping.populate(0, 2 * HUGE_PAGE).unwrap();
            mapping.word(2 * HUGE_PAGE - 8).store(offset as u64, Ordering::Relaxed);
        }
        let whole = file.map(0, 3 * HUGE_PAGE).unwrap();
        assert_eq!(whole.word(2 * HUGE_PAGE + 4096 - 8).load(Ordering::Relaxed), 4096);
        assert_eq!(file.allocated(), 3 * HUGE_PAGE as u64 - 4096, "the last page is mapped by none");
    }

    #[test]
    #[should_panic(expected = "4092 is no word of 4096")]
    fn a_word_that_leaves_the_mapping_is_refused() {
        Mapping::anonymous(4096, 4096).unwrap().word(4092);
    }
}
