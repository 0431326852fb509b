//! The end of what libfabric has made for one transport.

use std::time::{Duration, Instant};

use super::Objects;
use crate::ffi::{call, sockets, sys};

/// How long the ends of an endpoint's connections are awaited. What is in their sockets takes no time but this process's.
const ENDING: Duration = Duration::from_secs(5);

impl Drop for Objects {
    fn drop(&mut self) {
        if self.copies && !self.ep.is_null() && !self.end_connections() {
            // What is left stays open until the process ends. Nothing touches any memory without progress.
            return;
        }
        // SAFETY: each object is closed once, users before what they use; nothing has the pointers afterwards.
        unsafe {
            if self.regions_first {
                self.close_regions();
            }
            close(self.ep.cast());
            self.close_regions();
            close(self.av.cast());
            close(self.cq.cast());
            close(self.domain.cast());
            close(self.fabric.cast());
            if !self.info.is_null() {
                (self.library.freeinfo)(self.info);
            }
        }
    }
}

impl Objects {
    /// Ends the endpoint's connections, as if the peers had; false if some are still open after a while.
    ///
    /// libfabric 1.17 crashes when it closes a connection by which half of a peer's write with data has come, or half of
    /// the answer to a read: it reports the end of an operation without a context. It does not if it reads the end of the
    /// connection. So the sockets are shut down, and libfabric reads what is in them.
    fn end_connections(&mut self) -> bool {
        let Some(fd) = self.fd else { return false };
        let begun = Instant::now();
        loop {
            match sockets::connections(fd) {
                Ok(open) if open.is_empty() => return true,
                Ok(open) if begun.elapsed() < ENDING => open.into_iter().for_each(sockets::shut_down),
                _ => return false,
            }
            // SAFETY: the queue is open. There is room for one entry in its format; the error's entry is zeroed, so that
            // the provider copies no data into a buffer.
            unsafe {
                let mut done: sys::fi_cq_data_entry = std::mem::zeroed();
                let count = call!(self.cq => ops, read(self.cq, (&raw mut done).cast(), 1));
                if count == -(sys::FI_EAVAIL as isize) {
                    let mut error: sys::fi_cq_err_entry = std::mem::zeroed();
                    call!(self.cq => ops, readerr(self.cq, &raw mut error, 0));
                }
            }
        }
    }

    /// Closes the region that was made last. Nobody knows it yet.
    pub(in crate::ffi) fn close_last(&mut self) {
        if let Some(region) = self.regions.pop() {
            // SAFETY: open, and forgotten here; no operation has been begun with it.
            unsafe { close(region.as_ptr().cast()) };
        }
    }

    /// # Safety
    ///
    /// No operation of this side uses the regions any more, or the endpoint's end ends them.
    unsafe fn close_regions(&mut self) {
        for region in self.regions.drain(..) {
            // SAFETY: open, and forgotten here.
            unsafe { close(region.as_ptr().cast()) };
        }
    }
}

/// # Safety
///
/// Null, or an object that is open, and that is not used again.
unsafe fn close(object: *mut sys::fid) {
    if !object.is_null() {
        // SAFETY: every object begins with its `fid`.
        unsafe { call!(object => ops, close(object)) };
    }
}
