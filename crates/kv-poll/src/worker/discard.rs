//! The end of a ready event that nobody will ask any more.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kv_core::ReadyEvent;

/// Drops a ready event. Its destructor is the caller's and may panic; what is lent behind the event must not
/// be lost for that.
pub(crate) fn discard(ready_event: Option<Box<dyn ReadyEvent>>) {
    let _ = catch_unwind(AssertUnwindSafe(|| drop(ready_event)));
}
