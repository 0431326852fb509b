//! Sleeping on the descriptors of transports.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::time::Duration;

use kv_core::{Transport, TransportWait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long a check sleeps at most: it may wait for bytes or for a time, and no event tells of them.
pub(crate) const MOMENT: Duration = Duration::from_millis(1);

/// Sleeps until the transport has something to do, but no longer than `most`.
pub fn rest<P: Transport + ?Sized>(transport: &P, most: Duration) {
    rest_among(&[transport], most);
}

/// Sleeps until one of the transports has something to do, but no longer than `most`.
pub(crate) fn rest_among<P: Transport + ?Sized>(transports: &[&P], mut most: Duration) {
    let mut fds = Vec::new();
    for transport in transports {
        match transport.wait() {
            TransportWait::Now => return,
            TransportWait::Readable(more) => fds.extend(more),
            TransportWait::ReadableOrAfter(more, after) => {
                fds.extend(more);
                most = most.min(after);
            }
        }
    }
    // SAFETY: the transports keep their descriptors open while they are borrowed.
    let fds: Vec<_> = fds.iter().map(|fd| unsafe { BorrowedFd::borrow_raw(*fd) }).collect();
    let mut polls: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
    let _ = poll(&mut polls, Some(&timeout));
}
