//! What this thread has asked of the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

thread_local! {
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
    static FREED: Cell<u64> = const { Cell::new(0) };
}

/// Bytes that this thread has asked for.
pub fn allocated() -> u64 {
    ALLOCATED.with(Cell::get)
}

/// Bytes that this thread has asked for and not given back.
pub fn held() -> i64 {
    allocated() as i64 - FREED.with(Cell::get) as i64
}

fn count(counter: &'static std::thread::LocalKey<Cell<u64>>, bytes: usize) {
    // The thread may be ending: then nobody asks any more.
    let _ = counter.try_with(|counter| counter.set(counter.get() + bytes as u64));
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
        count(&ALLOCATED, size);
        count(&FREED, layout.size());
        // SAFETY: the caller's promises about memory, layout and size.
        unsafe { System.realloc(memory, layout, size) }
    }
}
