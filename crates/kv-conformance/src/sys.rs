//! Sleeping on the descriptors of a plane.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::time::Duration;

use kv_core::{Plane, PlaneWait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Sleeps as the plane allows, but no longer than this.
pub fn rest<P: Plane + ?Sized>(plane: &P, most: Duration) {
    let (fds, most) = match plane.wait() {
        PlaneWait::Now => return,
        PlaneWait::Readable(fds) => (fds, most),
        PlaneWait::ReadableOrAfter(fds, after) => (fds, after.min(most)),
    };
    // SAFETY: the plane keeps its descriptors open while it is borrowed.
    let fds: Vec<_> = fds.iter().map(|fd| unsafe { BorrowedFd::borrow_raw(*fd) }).collect();
    let mut polls: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
    let _ = poll(&mut polls, Some(&timeout));
}
