//! A copy past the processor's caches, for bytes that would be driven out of them before anybody reads them.

use std::ptr;

/// Length of a cache line, in bytes.
pub(super) const LINE: usize = 64;
/// How far ahead of the copy its bytes are fetched: the processor does so by itself within a page of 4 KiB only, once it
/// has seen a part of the page copied.
const AHEAD: usize = 4 << 10;

/// Copies `len` bytes whose target is not read soon. While the last of them are copied, the first of the `next_len`
/// bytes at `next` are fetched, which are copied next. All bytes are in place before anything that comes later.
///
/// Both halves are copied at once: the processor then waits for twice as many lines of memory at the same time.
///
/// # Safety
///
/// As for [`ptr::copy_nonoverlapping`].
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn stream(from: *const u8, to: *mut u8, len: usize, next: *const u8, next_len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    // Whole lines of the target go past the caches, what lies around them does not.
    let first = to.align_offset(LINE).min(len);
    let half = (len - first) / (2 * LINE) * LINE;
    let (ahead, next_half) = (AHEAD.min(half), next_len / 2);
    // SAFETY: all offsets are below `len`. The target of a line begins at a multiple of its length, thus of 16.
    unsafe {
        ptr::copy_nonoverlapping(from, to, first);
        for line in (0..half).step_by(LINE) {
            for number in [0, 1] {
                let at = first + number * half + line;
                match (line + ahead).checked_sub(half) {
                    None => prefetch(from.wrapping_add(at + ahead)),
                    Some(line) if line < next_half => {
                        prefetch(next.wrapping_add(number * next_half + line));
                    }
                    Some(_) => {}
                }
                let (from, to): (*const __m128i, *mut __m128i) = (from.add(at).cast(), to.add(at).cast());
                let parts = [0, 1, 2, 3].map(|part| _mm_loadu_si128(from.add(part)));
                for (at, part) in parts.into_iter().enumerate() {
                    _mm_stream_si128(to.add(at), part);
                }
            }
        }
        let rest = first + 2 * half;
        ptr::copy_nonoverlapping(from.add(rest), to.add(rest), len - rest);
        _mm_sfence();
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn stream(from: *const u8, to: *mut u8, len: usize, _: *const u8, _: usize) {
    // SAFETY: the caller's.
    unsafe { ptr::copy_nonoverlapping(from, to, len) };
}

/// Asks the processor, where it can be asked, to fetch the line at this address.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn prefetch(at: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: the instruction is a hint, which neither reads nor writes as far as the program can tell, and is ignored
    // for an address that is not mapped.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub(super) fn prefetch(_: *const u8) {}
