//! A bounded list of the events that a machine has told and that the listener has not fetched yet.

use std::collections::VecDeque;

use super::event::{Event, Who};
use crate::time::Time;

/// Most events that wait to be fetched. One input leads to a few events. Only the end of very many
/// sessions at once, as at a shutdown, leads to more.
pub const MAX_EVENTS: usize = 1 << 14;

/// The events of one machine that were not fetched yet. The log is empty while nobody listens. If
/// nobody fetches, it keeps the last [`MAX_EVENTS`]; the first event after a gap tells how many
/// were lost.
#[derive(Debug, Clone)]
pub struct Log<W> {
    heard: bool,
    events: VecDeque<Event<W>>,
    missed: u64,
}

impl<W> Default for Log<W> {
    fn default() -> Log<W> {
        Log { heard: false, events: VecDeque::new(), missed: 0 }
    }
}

impl<W> Log<W> {
    /// With `true`, keeps events from now on. With `false`, forgets all events and keeps none.
    pub fn listen(&mut self, on: bool) {
        *self = Log { heard: on, ..Log::default() };
    }

    /// True if events are kept.
    #[inline(always)]
    pub fn is_heard(&self) -> bool {
        self.heard
    }

    /// Adds an event. `what` is called only if somebody listens.
    #[inline(always)]
    pub fn tell(&mut self, at: Time, who: impl Into<Who>, what: impl FnOnce() -> W) {
        if self.heard {
            self.keep(Event { at, who: who.into(), what: what(), missed: 0 });
        }
    }

    /// The oldest event that was not fetched yet; `None` if there is none now.
    #[allow(clippy::should_implement_trait, reason = "a log that is empty now has more later")]
    pub fn next(&mut self) -> Option<Event<W>> {
        let event = self.events.pop_front()?;
        Some(Event { missed: std::mem::take(&mut self.missed), ..event })
    }

    #[cold]
    fn keep(&mut self, event: Event<W>) {
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
            self.missed = self.missed.saturating_add(1);
        }
        self.events.push_back(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::SessionId;

    #[test]
    fn without_a_listener_no_event_is_constructed() {
        let mut log: Log<u64> = Log::default();
        log.tell(Time::ZERO, SessionId(1), || panic!("nobody listens"));
        assert!(log.next().is_none() && log.events.capacity() == 0);
        log.listen(true);
        log.tell(Time::ZERO, SessionId(1), || 5);
        assert_eq!(log.next().map(|event| (event.what, event.missed)), Some((5, 0)));
        log.tell(Time::ZERO, SessionId(1), || 6);
        log.listen(false);
        log.tell(Time::ZERO, SessionId(1), || panic!("nobody listens any more"));
        assert!(log.next().is_none());
    }

    #[test]
    fn unfetched_events_are_dropped_oldest_first_and_counted_once() {
        let mut log: Log<usize> = Log::default();
        log.listen(true);
        for number in 0..MAX_EVENTS + 3 {
            log.tell(Time::ZERO, SessionId(1), || number);
        }
        assert_eq!(log.events.len(), MAX_EVENTS);
        assert_eq!(log.next().map(|event| (event.what, event.missed)), Some((3, 3)));
        assert_eq!(log.next().map(|event| (event.what, event.missed)), Some((4, 0)));
        let last = std::iter::from_fn(|| log.next()).last();
        assert_eq!(last.map(|event| (event.what, event.missed)), Some((MAX_EVENTS + 2, 0)));
    }
}
