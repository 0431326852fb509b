//! [`Contexts`]: memory that each operation lends to the provider until its completion.

use std::ffi::c_void;

use super::sys;

/// One `fi_context2` for each operation that may be under way, at addresses that do not change. A completion names its
/// operation by the address.
#[derive(Debug)]
pub(super) struct Contexts {
    first: *mut sys::fi_context2,
    count: usize,
}

// SAFETY: the memory belongs to this value alone, and to the provider, which knows no threads.
unsafe impl Send for Contexts {}

impl Contexts {
    pub(super) fn new(count: usize) -> Contexts {
        // SAFETY: a `fi_context2` is a few pointers, which may be null.
        let all: Box<[sys::fi_context2]> = (0..count).map(|_| unsafe { std::mem::zeroed() }).collect();
        Contexts { first: Box::into_raw(all).cast(), count }
    }

    /// The context of an operation; null for an operation that there is not.
    pub(super) fn at(&self, index: usize) -> *mut c_void {
        if index < self.count { self.first.wrapping_add(index).cast() } else { std::ptr::null_mut() }
    }

    /// The operation with this context.
    pub(super) fn index(&self, context: *mut c_void) -> Option<usize> {
        let offset = (context as usize).checked_sub(self.first as usize)?;
        let size = size_of::<sys::fi_context2>();
        let index = offset / size;
        (offset % size == 0 && index < self.count).then_some(index)
    }
}

impl Drop for Contexts {
    fn drop(&mut self) {
        // SAFETY: this is the slice that `new` has taken from its box. The endpoint that used it is closed before.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.first, self.count)) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_names_its_operation_and_other_addresses_name_none() {
        let contexts = Contexts::new(3);
        for index in 0..3 {
            assert_eq!(contexts.index(contexts.at(index)), Some(index));
        }
        assert!(contexts.at(3).is_null());
        let outside = [contexts.at(0).wrapping_byte_sub(8), contexts.at(2).wrapping_byte_add(64)];
        for wrong in [std::ptr::null_mut(), contexts.at(1).wrapping_byte_add(8)].into_iter().chain(outside) {
            assert_eq!(contexts.index(wrong), None);
        }
    }
}
