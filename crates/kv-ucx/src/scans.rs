//! [`Scans`]: when remotes that are ending are looked at, and when the connections of this process are, in a thread of
//! its own: where there are many connections, that takes longer than a call of `poll` may.

use std::collections::HashMap;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kv_core::Time;

use crate::quiet::{self, Verdict};
use crate::remote::RemoteId;

/// The pause before the second look, and the longest one.
const FIRST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(100);
/// How long after a death a connection without another end is in doubt.
const DOUBT: Duration = Duration::from_millis(100);
/// So many times as long as a scan takes, none begins: its thread takes a small part of a processor.
const REST: u32 = 9;

/// What is known about the last bytes of remotes that have died or said farewell.
#[derive(Debug, Default)]
pub(crate) struct Scans {
    /// Remotes that have died or said farewell, since when that is known, and whether their last bytes have arrived.
    asked: HashMap<RemoteId, (Time, bool)>,
    running: Option<(Time, JoinHandle<(Verdict, Duration)>)>,
    /// No scan begins before.
    rested: Time,
    /// When ending remotes are looked at next, and the pause before that.
    next: Time,
    pause: Duration,
    /// Scans so far.
    begun: u64,
}

impl Scans {
    /// The first of the ending remotes is there.
    pub(crate) fn wake(&mut self, now: Time) {
        (self.pause, self.next) = (FIRST, now + FIRST);
    }

    /// When ending remotes are looked at next, at the latest.
    pub(crate) fn next(&self) -> Time {
        self.next
    }

    /// True if nothing of the remote, whose process has ended or which has said farewell, can arrive any more.
    pub(crate) fn is_quiet(&mut self, id: RemoteId, now: Time) -> bool {
        let (_, quiet) = self.asked.entry(id).or_insert((now, false));
        *quiet
    }

    /// The remote is told to the owner.
    pub(crate) fn forget(&mut self, id: RemoteId) {
        self.asked.remove(&id);
    }

    /// Takes the result of the last scan, and begins the next one when it is its time.
    pub(crate) fn turn(&mut self, now: Time) {
        if let Some((begun, scan)) = self.running.take_if(|(_, scan)| scan.is_finished()) {
            // A scan that has failed proves nothing.
            let (verdict, took) = scan.join().unwrap_or((Verdict::Unquiet, Duration::ZERO));
            self.rested = now + took * REST;
            for (since, quiet) in self.asked.values_mut() {
                *quiet |= match verdict {
                    Verdict::Quiet => begun > *since,
                    Verdict::Doubtful => begun > *since + DOUBT,
                    Verdict::Unquiet => false,
                };
            }
        }
        if now < self.next {
            return;
        }
        self.pause = (self.pause * 2).clamp(FIRST, LONGEST);
        self.next = now + self.pause;
        let wanted = self.asked.values().any(|(since, quiet)| !quiet && *since < now);
        if wanted && self.running.is_none() && now >= self.rested {
            let scan = || {
                let begun = Instant::now();
                (quiet::look(), begun.elapsed())
            };
            // Without a thread, nothing is proven; the next turn tries again.
            let thread = thread::Builder::new().name("kv-ucx scan".to_owned()).spawn(scan);
            self.running = thread.ok().map(|scan| (now, scan));
            self.begun += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_host::clock;

    use super::*;
    use crate::quiet::tests::{kill, pair, read_all, wait, writer_into};

    #[test]
    fn scans_are_few_while_something_is_unread_and_none_follows_the_proof() {
        let (near, mut other) = pair();
        kill(writer_into(near, &other));
        let (mut scans, mut now) = (Scans::default(), clock::now());
        scans.wake(now);
        // A second in turns of 1 ms, whatever time they take here.
        for _ in 0..1000 {
            now = now + FIRST;
            scans.turn(now);
            assert!(!scans.is_quiet(1, now), "the bytes of a dead process are unread");
            assert!(scans.next() <= now + LONGEST);
            wait("the scan", || scans.running.as_ref().is_none_or(|(_, scan)| scan.is_finished()));
        }
        // Pauses that double from 1 ms to 100 ms, and then ten in a second.
        assert!((1..=17).contains(&scans.begun), "{} scans", scans.begun);
        assert_eq!(scans.pause, LONGEST);
        read_all(&mut other);
        wait("the proof", || {
            now = now + LONGEST;
            scans.turn(now);
            scans.is_quiet(1, now)
        });
        let (begun, later) = (scans.begun, now + 10 * LONGEST);
        scans.turn(later);
        scans.turn(later + LONGEST);
        assert_eq!(scans.begun, begun);
    }

    #[test]
    fn a_scan_proves_nothing_about_a_death_after_its_begin() {
        let before = |span: Duration| Time::ZERO + (20 * DOUBT - span);
        let begun = before(Duration::ZERO);
        for (verdict, since, proven) in [
            (Verdict::Quiet, begun, false),
            (Verdict::Quiet, before(FIRST), true),
            (Verdict::Doubtful, before(DOUBT), false),
            (Verdict::Doubtful, before(DOUBT + FIRST), true),
            (Verdict::Unquiet, before(10 * DOUBT), false),
        ] {
            let mut scans = Scans::default();
            assert!(!scans.is_quiet(1, since));
            scans.running = Some((begun, thread::spawn(move || (verdict, LONGEST))));
            let taken = clock::now();
            wait("the scan", || {
                // The time at which a scan would follow is never.
                scans.next = Time::MAX;
                scans.turn(clock::now());
                scans.running.is_none()
            });
            assert!(scans.rested >= taken + REST * LONGEST);
            assert_eq!(scans.is_quiet(1, since), proven, "{verdict:?} after {since:?}");
        }
    }
}
