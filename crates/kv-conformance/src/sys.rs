//! [`rest`]: sleeping on the descriptors of a transport.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::time::Duration;

use kv_core::{Transport, TransportWait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Sleeps until the transport has something to do, but no longer than `most`.
pub fn rest<P: Transport + ?Sized>(transport: &P, most: Duration) {
    let (fds, most) = match transport.wait() {
        TransportWait::Now => return,
        TransportWait::Readable(fds) => (fds, most),
        TransportWait::ReadableOrAfter(fds, after) => (fds, after.min(most)),
    };
    // SAFETY: the transport keeps its descriptors open while it is borrowed.
    let fds: Vec<_> = fds.iter().map(|fd| unsafe { BorrowedFd::borrow_raw(*fd) }).collect();
    let mut polls: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
    let _ = poll(&mut polls, Some(&timeout));
}
