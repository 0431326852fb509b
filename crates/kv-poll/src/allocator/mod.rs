//! Page allocators: who owns which page of a cache.
//!
//! An allocator mints [`Pages`](kv_core::Pages) tokens and takes them back. It is not a cache: it knows
//! nothing of prefixes, eviction or contents, and nothing of transfers.
//!
//! Two are here. [`RunAllocator`] hands out few, long runs, so that a transfer makes few
//! descriptors of them; [`FreeList`] is the stack that most engines use, kept for comparison and
//! for servers whose pages must be recycled hot.
//!
//! ```
//! use kv_poll::allocator::{PageAllocator, RunAllocator};
//!
//! let mut cache = RunAllocator::new(64);
//! let pages = cache.allocate(16).unwrap();
//! assert_eq!(pages.list().runs().len(), 1);
//! assert_eq!(cache.available(), 48);
//! cache.free(pages).unwrap();
//! assert_eq!(cache.available(), cache.capacity());
//! ```

mod free_list;
mod page_allocator;
mod run;

pub use free_list::FreeList;
pub use page_allocator::{FreeError, FreeReason, PageAllocator};
pub use run::RunAllocator;
