//! Spans that are told on a thread of the server's choice: the worker's thread only puts events into a queue.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;
use kv_core::WorkerId;
use kv_core::trace::{Event, KvWhat};
use kv_poll::worker::Listener;

use crate::spans::Telling;

/// A listener for one worker that puts each event into a queue of at most `capacity` events, and the other end of
/// the queue. The listener never waits, takes no lock and makes no system call.
///
/// A queue that is full drops the event. The next event that is queued then says how many were lost, and open
/// sessions lose their spans.
pub fn queued(capacity: usize) -> (Listener<KvWhat>, Queued) {
    let queue = Arc::new(Queue { events: ArrayQueue::new(capacity.max(1)), lost: AtomicU64::new(0) });
    let end = Queued { queue: Arc::clone(&queue), telling: Telling::default() };
    let listener = Listener::new(move |worker, event: &Event<KvWhat>| queue.push(worker, event));
    (listener, end)
}

struct Queue {
    events: ArrayQueue<(WorkerId, Event<KvWhat>)>,
    lost: AtomicU64,
}

impl Queue {
    fn push(&self, worker: &WorkerId, event: &Event<KvWhat>) {
        let mut event = event.clone();
        event.missed = event.missed.saturating_add(self.lost.swap(0, Ordering::Relaxed));
        if let Err((_, event)) = self.events.push((worker.clone(), event)) {
            self.lost.fetch_add(event.missed.saturating_add(1), Ordering::Relaxed);
        }
    }
}

/// The end of a queue at which events become spans.
pub struct Queued {
    queue: Arc<Queue>,
    telling: Telling,
}

impl Queued {
    /// Tells the subscriber what has been queued, and returns how many events that were. A server calls this
    /// every few milliseconds, on a thread or task of its own: spans and lines get their time from this call.
    pub fn drain(&mut self) -> usize {
        let waiting = self.queue.events.len();
        for told in 0..waiting {
            let Some((worker, event)) = self.queue.events.pop() else { return told };
            self.telling.hear(&worker, &event);
        }
        waiting
    }

    /// How many events wait to be drained.
    pub fn waiting(&self) -> usize {
        self.queue.events.len()
    }
}

impl fmt::Debug for Queued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queued").field("waiting", &self.waiting()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::trace::Log;
    use kv_core::{EngineId, SessionId, Time};

    #[test]
    fn a_full_queue_drops_events_and_the_next_one_says_how_many() {
        let queue = Queue { events: ArrayQueue::new(3), lost: AtomicU64::new(0) };
        let worker = WorkerId { engine: EngineId::new("engine").unwrap(), rank: 0 };
        let mut log = Log::default();
        log.listen(true);
        let mut push = |session| {
            log.tell(Time::ZERO, SessionId(session), || KvWhat::Closed);
            queue.push(&worker, &log.next().unwrap());
        };
        (0..8).for_each(&mut push);
        let taken = |queue: &Queue| queue.events.pop().map(|(_, event)| (event.who.session, event.missed));
        assert_eq!(taken(&queue), Some((Some(SessionId(0)), 0)));
        push(8);
        push(9);
        let rest: Vec<_> = std::iter::from_fn(|| taken(&queue)).collect();
        let of = |session| Some(SessionId(session));
        assert_eq!(rest, [(of(1), 0), (of(2), 0), (of(8), 5)]);
        push(10);
        assert_eq!(taken(&queue), Some((of(10), 1)));
    }
}
