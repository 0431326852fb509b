//! How a worker sleeps, and how handles wake a worker that sleeps.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// Longest sleep without a deadline, far below what a `timespec` holds.
const LONGEST: Duration = Duration::from_secs(3600);
/// Sleep when the kernel refuses to wait on the descriptors, so that the worker polls slowly and not at full
/// speed.
const REFUSED: Duration = Duration::from_millis(1);

/// The eventfd on which a worker sleeps, and by which producers of work wake the worker.
///
/// A producer writes to the eventfd only if the worker sleeps or is about to sleep. No wake-up is lost:
///
/// - the producer *publishes the work*, fences, and reads `parked`;
/// - the worker sets `parked`, fences, and *looks for work*.
///
/// The fences are sequentially consistent, so one of them comes first. If the producer's fence comes first,
/// the worker sees the work and does not sleep. If the worker's fence comes first, the producer reads `true`
/// and writes the eventfd, or reads `false`. That `false` was stored by another producer, which is about to
/// write the eventfd, or by the worker after waking up, which then looks for work after its next fence. A
/// write that comes late ends one sleep early, no more.
#[derive(Debug)]
pub(crate) struct Waker {
    event: OwnedFd,
    parked: AtomicBool,
    /// The eventfd has woken the worker and has not been read since: it is read before the next sleep, since what the
    /// worker was woken for comes first. Only the worker's thread looks at this.
    unread: AtomicBool,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Waker> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waker { event, parked: AtomicBool::new(false), unread: AtomicBool::new(false) })
    }

    /// Wakes the worker if the worker sleeps. Comes after the work was published.
    pub(crate) fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.parked.load(Ordering::SeqCst) && self.parked.swap(false, Ordering::SeqCst) {
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Sleeps until `wake`, until one of `others` is readable, or until `timeout` has passed; not at all if
    /// `has_work` returns true. Only the worker's thread parks.
    pub(crate) fn park(&self, others: &[RawFd], timeout: Option<Duration>, has_work: impl FnOnce() -> bool) {
        if self.unread.swap(false, Ordering::Relaxed) {
            let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
        }
        self.parked.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if !has_work() {
            self.wait(others, timeout);
        }
        self.parked.store(false, Ordering::SeqCst);
    }

    fn wait(&self, others: &[RawFd], timeout: Option<Duration>) {
        let mut fds = Vec::with_capacity(others.len() + 1);
        fds.push(PollFd::from_borrowed_fd(self.event.as_fd(), PollFlags::IN));
        for fd in others {
            if let Some(fd) = borrow(*fd) {
                fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
            }
        }
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout.min(LONGEST)).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => std::thread::sleep(REFUSED),
        }
        let woken = fds.first().is_some_and(|own| own.revents().contains(PollFlags::IN));
        self.unread.store(woken, Ordering::Relaxed);
    }
}

/// The descriptor of a transport or client, for the length of one `poll`.
#[allow(unsafe_code)]
fn borrow<'a>(fd: RawFd) -> Option<BorrowedFd<'a>> {
    if fd < 0 {
        return None;
    }
    // SAFETY: `fd` is not -1. Its owner named it for being waited on just before, is owned by the
    // thread that waits, and so cannot close it meanwhile; the borrow ends with the wait. Were it
    // stale nevertheless, `poll` would only report it as such: nothing is read from or written to it.
    Some(unsafe { BorrowedFd::borrow_raw(fd) })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crossbeam_queue::ArrayQueue;

    #[test]
    fn a_wake_before_the_sleep_is_not_lost_and_not_kept() {
        let waker = Waker::new().unwrap();
        waker.wake();
        let start = Instant::now();
        waker.park(&[], Some(Duration::from_secs(60)), || true);
        assert!(start.elapsed() < Duration::from_secs(30), "work keeps it awake");
        waker.park(&[], Some(Duration::from_millis(20)), || false);
        assert!(start.elapsed() >= Duration::from_millis(20), "nobody woke it");
    }

    #[test]
    fn a_readable_descriptor_ends_the_sleep_and_bad_ones_are_harmless() {
        let waker = Waker::new().unwrap();
        let (ours, theirs) = std::io::pipe().unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&ours);
        let writer = thread::spawn(move || {
            thread::sleep(Duration::from_millis(10));
            std::io::Write::write_all(&mut { theirs }, b"x").unwrap();
        });
        let start = Instant::now();
        waker.park(&[-1, fd], Some(Duration::from_secs(60)), || false);
        assert!(start.elapsed() < Duration::from_secs(30));
        writer.join().unwrap();
    }

    #[test]
    fn work_published_just_after_the_look_ends_the_sleep() {
        let waker = Waker::new().unwrap();
        let start = Instant::now();
        waker.park(&[], Some(Duration::from_secs(60)), || {
            waker.wake();
            false
        });
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    /// Each producer waits until its item was taken, so no later wake-up makes good a lost one; the
    /// items come at all distances from the moment of falling asleep.
    #[test]
    fn no_wake_up_is_lost_between_many_producers_and_a_sleeper() {
        const EACH: u64 = 20_000;
        const PRODUCERS: usize = 3;
        let waker = Arc::new(Waker::new().unwrap());
        let work = Arc::new(ArrayQueue::<usize>::new(PRODUCERS));
        let taken: Arc<[AtomicU64; PRODUCERS]> = Arc::default();
        let producers: Vec<_> = (0..PRODUCERS)
            .map(|producer| {
                let (waker, work, taken) = (Arc::clone(&waker), Arc::clone(&work), Arc::clone(&taken));
                thread::spawn(move || {
                    for n in 0..EACH {
                        for _ in 0..n % 397 {
                            std::hint::spin_loop();
                        }
                        work.push(producer).unwrap();
                        waker.wake();
                        while taken[producer].load(Ordering::Acquire) <= n {
                            thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut count = 0;
        while count < EACH * PRODUCERS as u64 {
            let start = Instant::now();
            waker.park(&[], Some(Duration::from_secs(20)), || !work.is_empty());
            assert!(start.elapsed() < Duration::from_secs(20), "asleep after {count} items");
            while let Some(producer) = work.pop() {
                count += 1;
                taken[producer].fetch_add(1, Ordering::Release);
            }
        }
        for producer in producers {
            producer.join().unwrap();
        }
    }
}
