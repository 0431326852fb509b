//! An allocator that counts, for the binaries and tests that install it.
//!
//! ```
//! #[global_allocator]
//! static COUNTING: kv_fuzz::alloc::Counting = kv_fuzz::alloc::Counting;
//!
//! let (before, held) = (kv_fuzz::alloc::allocated(), kv_fuzz::alloc::held());
//! let bytes = vec![0_u8; 1000];
//! assert_eq!(kv_fuzz::alloc::allocated() - before, 1000);
//! drop(bytes);
//! assert_eq!(kv_fuzz::alloc::held(), held);
//! ```
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, with counters for each thread.
pub struct Counting;

thread_local! {
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
    static FREED: Cell<u64> = const { Cell::new(0) };
}

/// The number of bytes that this thread has allocated since it began; zero if [`Counting`] is not installed.
pub fn allocated() -> u64 {
    ALLOCATED.with(Cell::get)
}

/// The number of bytes that this thread has allocated and not freed. The number means nothing where memory
/// moves between threads.
pub fn held() -> i64 {
    allocated().wrapping_sub(FREED.with(Cell::get)) as i64
}

fn count(counter: &'static std::thread::LocalKey<Cell<u64>>, bytes: usize) {
    // The thread may be ending: then nobody asks any more.
    let _ = counter.try_with(|counter| counter.set(counter.get().wrapping_add(bytes as u64)));
}

// SAFETY: every call goes to the system's allocator as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(&ALLOCATED, layout.size());
        // SAFETY: the caller's promise about the layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(&FREED, layout.size());
        // SAFETY: the caller's promise that the memory is from here.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // What grows is copied at worst: it counts as new.
        count(&ALLOCATED, size);
        count(&FREED, layout.size());
        // SAFETY: the caller's promises about memory, layout and size.
        unsafe { System.realloc(memory, layout, size) }
    }
}
