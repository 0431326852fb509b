//! Sleeping on the descriptors of transports.
#![allow(unsafe_code)]

use std::os::fd::{BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use kv_core::{Transport, TransportWait};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long a check sleeps at most: it may wait for bytes or for a time, and no event tells of them.
pub(crate) const MOMENT: Duration = Duration::from_millis(1);

/// Sleeps until the transport has something to do, but no longer than `most`.
pub fn rest<P: Transport + ?Sized>(transport: &P, most: Duration) {
    sleep_until_one_wakes([&Sleep::of(transport)], most);
}

/// The sleep of a worker: what its transport wanted to be woken by when it was asked.
pub(crate) struct Sleep {
    readable: Vec<RawFd>,
    until: Option<Instant>,
}

impl Sleep {
    /// The sleep that begins now. It is over once the transport is called again, which may close descriptors.
    pub(crate) fn of<P: Transport + ?Sized>(transport: &P) -> Sleep {
        match transport.wait() {
            TransportWait::Now => Sleep { readable: Vec::new(), until: Some(Instant::now()) },
            TransportWait::Readable(readable) => Sleep { readable, until: None },
            TransportWait::ReadableOrAfter(readable, after) => {
                Sleep { readable, until: Instant::now().checked_add(after) }
            }
        }
    }
}

/// Sleeps until one of the workers has something to do, but no longer than `most`. Returns which of them have.
pub(crate) fn sleep_until_one_wakes<const N: usize>(sleeps: [&Sleep; N], most: Duration) -> [bool; N] {
    let now = Instant::now();
    let left = sleeps.iter().filter_map(|sleep| sleep.until).map(|until| until - now);
    let most = left.min().map_or(most, |left| left.min(most));
    let fds = sleeps.iter().flat_map(|sleep| &sleep.readable);
    // SAFETY: no transport was called since its sleep has begun, so that its descriptors are open.
    let fds: Vec<_> = fds.map(|fd| unsafe { BorrowedFd::borrow_raw(*fd) }).collect();
    let mut polls: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
    let _ = poll(&mut polls, Some(&timeout));
    let now = Instant::now();
    let mut polls = polls.iter();
    sleeps.map(|sleep| {
        // All descriptors of this worker are taken, so that those of the next one follow.
        let readable =
            polls.by_ref().take(sleep.readable.len()).filter(|poll| !poll.revents().is_empty()).count();
        readable > 0 || sleep.until.is_some_and(|until| until <= now)
    })
}
