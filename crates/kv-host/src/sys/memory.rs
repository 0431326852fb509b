//! [`Memory`]: a range of memory that may be copied from and to while peers do the same.

use std::ptr;
use std::slice;
use std::sync::Arc;

use super::inside;
use super::mapping::Mapping;
use super::stream::{LINE, prefetch, stream};
use crate::check;
use crate::error::MemoryError;

const PAGE: usize = 4096;
/// How far [`Memory::fetch`] goes.
const FETCHED: usize = 2 * PAGE;
/// Bytes that are fetched of each page; the processor goes on by itself once the copy has begun.
const FETCHED_OF_PAGE: usize = 8 * LINE;
/// Fewer bytes than these are not streamed: the copy would wait for them to arrive in memory.
const STREAMED: usize = PAGE;

/// A range of this host's memory that this process may read and write. The range is either a part of a
/// [`Mapping`], which stays mapped for as long as a clone or a part of the range lives, or memory that the
/// server owns and lends with a promise ([`adopt`](Memory::adopt)). Clones are the same memory.
///
/// [`read`](Memory::read) and [`write`](Memory::write) copy. Both are safe whatever peers do at the same
/// time, because no reference to the shared bytes is ever made; but bytes that are read while a peer writes
/// can be any mixture of old and new.
#[derive(Debug, Clone)]
pub struct Memory {
    addr: usize,
    len: usize,
    mapping: Option<Arc<Mapping>>,
}

impl Memory {
    /// `len` bytes of a mapping from `offset` on; [`MemoryError::OutOfBounds`] if they are not inside.
    pub fn of(mapping: &Arc<Mapping>, offset: usize, len: usize) -> Result<Memory, MemoryError> {
        let total = Memory { addr: mapping.addr(), len: mapping.len(), mapping: Some(Arc::clone(mapping)) };
        total.part(offset, len)
    }

    /// Memory that the server already owns: `len` bytes at address `addr`. Refused with
    /// [`MemoryError::Range`] as by [`check::range`].
    ///
    /// # Safety
    ///
    /// The range is mapped, readable and writable, for as long as this value, a clone or a part of it
    /// lives; and no Rust reference to a byte of it exists while that byte may be copied from or to, here
    /// or by a peer.
    pub unsafe fn adopt(addr: u64, len: u64) -> Result<Memory, MemoryError> {
        check::range(addr, len)?;
        let fits = |value| usize::try_from(value).map_err(|_| MemoryError::Range { addr, len });
        Ok(Memory { addr: fits(addr)?, len: fits(len)?, mapping: None })
    }

    /// `len` bytes of this memory from `offset` on; [`MemoryError::OutOfBounds`] if they are not inside.
    pub fn part(&self, offset: usize, len: usize) -> Result<Memory, MemoryError> {
        self.checked(offset, len).map(|addr| Memory { addr, len, mapping: self.mapping.clone() })
    }

    /// The `len` bytes of this memory at the address `addr`; `None` if one of them is outside.
    pub fn at(&self, addr: u64, len: u64) -> Option<Memory> {
        let offset = usize::try_from(addr).ok()?.checked_sub(self.addr)?;
        self.part(offset, usize::try_from(len).ok()?).ok()
    }

    /// Address of the first byte in this process.
    pub fn addr(&self) -> u64 {
        self.addr as u64
    }

    /// Length of the range, in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a part without bytes. An [`Arena`](crate::Arena) and a [`HostMemory`](crate::HostMemory) have
    /// at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `out.len()` bytes from `offset` on into `out`.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), MemoryError> {
        let from = self.checked(offset, out.len())?;
        // SAFETY: the source is readable, the target is borrowed exclusively and thus distinct.
        unsafe { ptr::copy(from as *const u8, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies `bytes` into this memory, from `offset` on.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), MemoryError> {
        let to = self.checked(offset, bytes.len())?;
        // SAFETY: the target is writable and the source borrowed; `copy` allows them to overlap.
        unsafe { ptr::copy(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        Ok(())
    }

    /// Copies `len` bytes from `offset` of this memory to `to_offset` of `to`. The two ranges must not
    /// overlap ([`MemoryError::Overlap`]). On an error nothing is copied.
    #[inline]
    pub fn copy_to(
        &self,
        offset: usize,
        to: &Memory,
        to_offset: usize,
        len: usize,
    ) -> Result<(), MemoryError> {
        let (from, to) = self.distinct(offset, to, to_offset, len)?;
        // SAFETY: both ranges are readable and writable (that is what a `Memory` is) and distinct;
        // no reference to them exists, and the bytes are only moved, never looked at.
        unsafe { ptr::copy_nonoverlapping(from, to, len) };
        Ok(())
    }

    /// Like [`copy_to`](Memory::copy_to), for bytes that are not read before so many others are copied that the
    /// processor's caches do not hold them any more: they go past the caches, which takes less time. While they are
    /// copied, the beginning of what is copied next is fetched: `next_len` bytes from `next_offset` of `next` on.
    #[inline]
    pub fn stream_to(
        &self,
        offset: usize,
        to: &Memory,
        to_offset: usize,
        len: usize,
        (next, next_offset, next_len): (&Memory, usize, usize),
    ) -> Result<(), MemoryError> {
        if len < STREAMED {
            next.fetch(next_offset, next_len);
            return self.copy_to(offset, to, to_offset, len);
        }
        let (from, to) = self.distinct(offset, to, to_offset, len)?;
        let next_len = next_len.min(next.len.saturating_sub(next_offset));
        // SAFETY: as for `copy_to`.
        unsafe { stream(from, to, len, (next.addr as *const u8).wrapping_add(next_offset), next_len) };
        Ok(())
    }

    /// Fetches the beginning of a range into the processor's caches, where the processor can be asked for this: the
    /// range is copied from next. A short range that is not fetched takes longer to come than to be copied. Bytes outside
    /// of this memory are left out.
    #[inline]
    pub fn fetch(&self, offset: usize, len: usize) {
        let len = len.min(FETCHED).min(self.len.saturating_sub(offset));
        for start in (0..len).step_by(PAGE) {
            for line in (start..len.min(start + FETCHED_OF_PAGE)).step_by(LINE) {
                prefetch((self.addr + offset + line) as *const u8);
            }
        }
    }

    /// The bytes of a range, as a slice.
    ///
    /// # Safety
    ///
    /// While the slice lives, nothing writes to the range: neither this process nor a peer that may reach the
    /// range.
    pub unsafe fn slice(&self, offset: usize, len: usize) -> Result<&[u8], MemoryError> {
        let addr = self.checked(offset, len)?;
        // SAFETY: the range is mapped while `self` lives; the caller excludes writers.
        Ok(unsafe { slice::from_raw_parts(addr as *const u8, len) })
    }

    /// The bytes of a range, as a mutable slice.
    ///
    /// # Safety
    ///
    /// While the slice lives, nothing else reads or writes the range: neither other code of this process nor
    /// a peer that may reach the range.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(&self, offset: usize, len: usize) -> Result<&mut [u8], MemoryError> {
        let addr = self.checked(offset, len)?;
        // SAFETY: the range is mapped while `self` lives; the caller excludes everyone else.
        Ok(unsafe { slice::from_raw_parts_mut(addr as *mut u8, len) })
    }

    /// The addresses of two ranges that share no byte, the second one in `to`.
    #[inline]
    fn distinct(
        &self,
        offset: usize,
        to: &Memory,
        to_offset: usize,
        len: usize,
    ) -> Result<(*const u8, *mut u8), MemoryError> {
        let (from, to) = (self.checked(offset, len)?, to.checked(to_offset, len)?);
        if from.abs_diff(to) < len {
            return Err(MemoryError::Overlap { from: from as u64, to: to as u64, len });
        }
        Ok((from as *const u8, to as *mut u8))
    }

    /// The address of the range, if the range is inside this memory.
    #[inline]
    fn checked(&self, offset: usize, size: usize) -> Result<usize, MemoryError> {
        if inside(self.len, offset, size) {
            Ok(self.addr + offset)
        } else {
            Err(MemoryError::OutOfBounds { len: self.len, offset, size })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(len: usize) -> Memory {
        Memory::of(&Arc::new(Mapping::anonymous(1 << 20, 4096).unwrap()), 0, len).unwrap()
    }

    #[test]
    fn a_part_of_memory_covers_exactly_its_bytes() {
        let total = memory(10_000);
        let part = total.part(100, 50).unwrap();
        part.write(0, &[7; 50]).unwrap();
        let mut out = [0; 52];
        total.read(99, &mut out).unwrap();
        assert_eq!((out[0], &out[1..51], out[51]), (0, &[7; 50][..], 0));
        let error = MemoryError::OutOfBounds { len: 50, offset: 1, size: 50 };
        assert_eq!(part.write(1, &[7; 50]), Err(error));
        assert_eq!(part.read(1, &mut [0; 50]), Err(error));
        assert_eq!(part.part(1, 50).map(|_| ()), Err(error));
        assert!(part.part(usize::MAX, 2).is_err());
        assert!(total.part(0, 10_001).is_err());
    }

    #[test]
    fn an_address_range_is_found_in_the_part_that_holds_all_of_it() {
        let total = memory(10_000);
        let part = total.at(total.addr() + 9_990, 10).unwrap();
        assert_eq!((part.addr(), part.len()), (total.addr() + 9_990, 10));
        assert!(total.at(total.addr() + 9_990, 11).is_none());
        assert!(total.at(total.addr() - 1, 2).is_none());
        assert!(total.at(u64::MAX, 2).is_none());
    }

    #[test]
    fn copies_between_ranges_that_share_bytes_are_refused() {
        let (here, there) = (memory(1000), memory(1000));
        here.write(10, b"bytes").unwrap();
        here.copy_to(10, &there, 995, 5).unwrap();
        let mut out = [0; 5];
        there.read(995, &mut out).unwrap();
        assert_eq!(&out, b"bytes");
        assert!(matches!(
            here.copy_to(10, &there, 996, 5),
            Err(MemoryError::OutOfBounds { offset: 996, .. })
        ));
        assert!(matches!(here.copy_to(996, &there, 0, 5), Err(MemoryError::OutOfBounds { .. })));
        let (from, to) = (here.addr(), here.addr() + 4);
        assert_eq!(here.copy_to(0, &here, 4, 5), Err(MemoryError::Overlap { from, to, len: 5 }));
        assert_eq!(here.copy_to(0, &here, 5, 5), Ok(()));
    }

    #[test]
    fn a_streamed_copy_has_the_bytes_of_its_range_and_touches_no_others() {
        const LEN: usize = 40_000;
        let (from, to) = (memory(LEN), memory(LEN));
        let bytes: Vec<u8> = (0..LEN).map(|at| (at * 7 % 251) as u8).collect();
        from.write(0, &bytes).unwrap();
        let lens = [0, 1, STREAMED - 1, STREAMED, STREAMED + 1, 4222, 8192, 8255, 12_345, 32 << 10];
        let places = [(0, 0), (1, 0), (0, 1), (64, 63), (33, 47), (4096, 100)];
        for (len, (at, to_at)) in lens.into_iter().flat_map(|len| places.map(|place| (len, place))) {
            for next in
                [(&from, 0, 0), (&from, at + len, len), (&to, LEN - 1, usize::MAX), (&to, usize::MAX, 9)]
            {
                to.write(0, &[255; LEN]).unwrap();
                from.stream_to(at, &to, to_at, len, next).unwrap();
                let mut out = vec![0; LEN];
                to.read(0, &mut out).unwrap();
                let mut wanted = vec![255; LEN];
                wanted[to_at..to_at + len].copy_from_slice(&bytes[at..at + len]);
                assert!(out == wanted, "{len} bytes from {at} to {to_at}");
            }
        }
        let (here, there) = (from.addr(), from.addr() + 8191);
        let error = MemoryError::Overlap { from: here, to: there, len: 8192 };
        assert_eq!(from.stream_to(0, &from, 8191, 8192, (&from, 0, 0)), Err(error));
        let error = MemoryError::OutOfBounds { len: LEN, offset: LEN - 8191, size: 8192 };
        assert_eq!(from.stream_to(0, &to, LEN - 8191, 8192, (&from, 0, 0)), Err(error));
        assert_eq!(from.stream_to(LEN - 8191, &to, 0, 8192, (&from, 0, 0)), Err(error));
    }

    #[test]
    fn only_ranges_of_the_address_space_are_adopted() {
        for (addr, len) in [(0, 1), (4096, 0), (u64::MAX, 2), (1 << 63, 1)] {
            // SAFETY: refused, so never used.
            let adopted = unsafe { Memory::adopt(addr, len) };
            assert_eq!(adopted.map(|_| ()), Err(MemoryError::Range { addr, len }));
        }
        let owner = memory(100);
        // SAFETY: `owner` keeps the range mapped, and no reference to it exists.
        let adopted = unsafe { Memory::adopt(owner.addr(), 100) }.unwrap();
        adopted.write(0, b"mine").unwrap();
        // SAFETY: no other thread writes to the range.
        assert_eq!(unsafe { owner.slice(0, 4) }, Ok(&b"mine"[..]));
    }
}
