//! Values of `nixl-sys` that move between threads.

use std::ops::{Deref, DerefMut};

/// A value of `nixl-sys` that may move to another thread with the transport that owns it.
#[derive(Debug)]
pub(crate) struct Owned<T>(T);

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Owned<T> {
        Owned(value)
    }
}

/// The types of `nixl-sys` that may move between threads and are never shared.
pub(crate) trait HeapObject {}
impl HeapObject for nixl_sys::OptArgs {}
impl HeapObject for nixl_sys::NotificationMap {}
// It refers to its agent, which the same engine has, and drops after it.
impl HeapObject for nixl_sys::XferDlistHandle {}

// SAFETY: these types own one C++ object on the heap, without thread-local state; whoever has the
// `Owned` is the only one with access, and an `Owned` is not `Sync`.
unsafe impl<T: HeapObject> Send for Owned<T> {}

impl<T> Deref for Owned<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Owned<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}
