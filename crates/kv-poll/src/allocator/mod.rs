//! Page allocators: who owns which page of a cache.
//!
//! An allocator hands out [`Pages`](kv_core::Pages), which it makes through a
//! [`PagePool`](kv_core::PagePool) of its own, and takes them back. It is not a cache: it knows nothing of
//! prefixes, eviction or contents, and nothing of transfers. A server with an allocator of its own mints
//! tokens through a pool.
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
//!
//! // `Pages` that are dropped are lost: they stay allocated, and the allocator names them.
//! drop(cache.allocate(2));
//! assert_eq!((cache.available(), cache.lost().iter().collect::<Vec<_>>()), (62, vec![0, 1]));
//! ```

mod free_list;
mod page_allocator;
mod run;

pub use free_list::FreeList;
pub use page_allocator::{FreeError, FreeReason, PageAllocator};
pub use run::RunAllocator;
