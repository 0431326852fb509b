//! One session from its opening to its end: when it passed each point, and what it moved.

use std::time::Duration;

use kv_core::trace::{Half, KvWhat, Message};
use kv_core::{KvPoll, Time};

/// What is remembered of an open session. It has a fixed size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Story {
    pub(crate) half: Half,
    opened: Time,
    sources_known: Option<Time>,
    ready: Option<Time>,
    given: Option<Time>,
    asked: Option<Time>,
    met: Option<Time>,
    moving: Option<Time>,
    posts: u32,
    busy_since: Time,
    /// How long posts were in flight.
    busy: Duration,
    /// Bytes of the posts that have succeeded.
    pub(crate) bytes: u64,
    /// Descriptors of all posts.
    pub(crate) descriptors: u64,
}

impl Story {
    pub(crate) fn new(half: Half, opened: Time) -> Story {
        Story {
            half,
            opened,
            sources_known: None,
            ready: None,
            given: None,
            asked: None,
            met: None,
            moving: None,
            posts: 0,
            busy_since: opened,
            busy: Duration::ZERO,
            bytes: 0,
            descriptors: 0,
        }
    }

    /// Takes an event of the session that does not end it.
    pub(crate) fn hear(&mut self, at: Time, what: &KvWhat) {
        let receives = self.half == Half::Receiver;
        match what {
            KvWhat::SourcesKnown { .. } => first(&mut self.sources_known, at),
            KvWhat::State(KvPoll::WaitingForInput) => first(&mut self.ready, at),
            KvWhat::State(KvPoll::Transferring) => first(&mut self.given, at),
            // Of several receivers the last one counts.
            KvWhat::ReceiverCame => self.met = Some(at),
            KvWhat::Said(
                Message::Register { .. } | Message::Acquire { .. } | Message::AskedForEntry { .. },
            ) if receives => {
                first(&mut self.asked, at);
            }
            KvWhat::Heard(Message::Granted { .. }) if receives => first(&mut self.met, at),
            KvWhat::Heard(Message::InPlace { .. }) if receives => {
                first(&mut self.met, at);
                first(&mut self.moving, at);
            }
            KvWhat::Said(Message::Granted { .. }) if !receives => first(&mut self.moving, at),
            KvWhat::PostStarted { descriptors, .. } => {
                first(&mut self.moving, at);
                if self.posts == 0 {
                    self.busy_since = at;
                }
                self.posts = self.posts.saturating_add(1);
                self.descriptors = self.descriptors.saturating_add(*descriptors as u64);
            }
            KvWhat::PostEnded { bytes, error, .. } => {
                self.posts = self.posts.saturating_sub(1);
                if self.posts == 0 {
                    self.busy += at - self.busy_since;
                }
                if error.is_none() {
                    self.bytes = self.bytes.saturating_add(*bytes);
                }
            }
            _ => {}
        }
    }

    /// How long the session has been open.
    pub(crate) fn age(&self, now: Time) -> Duration {
        now - self.opened
    }

    /// The phases of a session that ends now, by the names of the label `phase`; those that it passed.
    pub(crate) fn phases(&self, end: Time) -> impl Iterator<Item = (&'static str, Duration)> + use<> {
        let receives = self.half == Half::Receiver;
        let of_receiver = |mark: Option<Time>| mark.filter(|_| receives);
        let span = |from: Option<Time>, to: Option<Time>| from.zip(to).map(|(from, to)| to - from);
        let opened = Some(self.opened);
        [
            ("bootstrap", span(opened, of_receiver(self.sources_known))),
            ("handshake", span(self.sources_known.or(opened), of_receiver(self.ready))),
            ("rendezvous", span(if receives { self.asked } else { opened }, self.met)),
            ("input", span(self.ready, self.given)),
            ("transfer", span(self.moving.or(self.given), Some(end))),
            ("whole", Some(end - self.opened)),
        ]
        .into_iter()
        .filter_map(|(phase, time)| Some((phase, time?)))
    }

    /// Bytes per second while posts were in flight; `None` if nothing was moved, or in no time.
    pub(crate) fn speed(&self) -> Option<f64> {
        let seconds = self.busy.as_secs_f64();
        (self.bytes > 0 && seconds > 0.0).then(|| self.bytes as f64 / seconds)
    }
}

fn first(mark: &mut Option<Time>, at: Time) {
    mark.get_or_insert(at);
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::{Op, PostId, Room, TransportError};

    /// A story from events at these milliseconds.
    fn told(half: Half, events: &[(u64, KvWhat)]) -> Story {
        let mut story = Story::new(half, Time::ZERO);
        for (millis, what) in events {
            story.hear(at(*millis), what);
        }
        story
    }

    fn at(millis: u64) -> Time {
        Time::ZERO + Duration::from_millis(millis)
    }

    fn phases(story: &Story, end: u64) -> Vec<(&'static str, u128)> {
        story.phases(at(end)).map(|(phase, time)| (phase, time.as_millis())).collect()
    }

    fn started(post: u64) -> KvWhat {
        KvWhat::PostStarted { post: PostId(post), op: Op::Write, bytes: 100, descriptors: 3 }
    }

    fn ended(post: u64, error: Option<TransportError>) -> KvWhat {
        KvWhat::PostEnded { post: PostId(post), bytes: 100, took: Duration::ZERO, error }
    }

    fn register() -> KvWhat {
        KvWhat::Said(Message::Register { room: Room::from(1), pages: 2, permission: None })
    }

    #[test]
    fn a_receiver_of_a_push_passes_each_phase_at_the_event_that_ends_it() {
        let in_place = || KvWhat::Heard(Message::InPlace { parts: 1, total: Some(2) });
        let story = told(
            Half::Receiver,
            &[
                (1, KvWhat::SourcesKnown { sources: 1 }),
                (3, KvWhat::State(KvPoll::WaitingForInput)),
                (10, KvWhat::State(KvPoll::Transferring)),
                (10, register()),
                (12, register()),
                (40, in_place()),
                (50, in_place()),
            ],
        );
        let expected = [
            ("bootstrap", 1),
            ("handshake", 2),
            ("rendezvous", 30),
            ("input", 7),
            ("transfer", 60),
            ("whole", 100),
        ];
        assert_eq!(phases(&story, 100), expected);
        assert_eq!((story.bytes, story.speed()), (0, None));
    }

    #[test]
    fn a_reader_that_acquires_before_it_has_pages_waits_for_both_at_once() {
        let acquire = KvWhat::Said(Message::Acquire { room: Room::from(1) });
        let granted = KvWhat::Heard(Message::Granted { pages: 2, lease: Duration::from_secs(30) });
        let story = told(
            Half::Receiver,
            &[
                (2, KvWhat::State(KvPoll::WaitingForInput)),
                (2, acquire),
                (5, granted),
                (20, KvWhat::State(KvPoll::Transferring)),
                (20, started(1)),
                (30, ended(1, None)),
            ],
        );
        // A machine that tells of no lookup: the handshake begins with the session.
        let expected = [("handshake", 2), ("rendezvous", 3), ("input", 18), ("transfer", 10), ("whole", 30)];
        assert_eq!(phases(&story, 30), expected);
        assert_eq!((story.bytes, story.descriptors, story.speed()), (100, 3, Some(10_000.0)));
    }

    #[test]
    fn a_sender_meets_its_last_receiver_and_moves_bytes_only_while_posts_are_in_flight() {
        let story = told(
            Half::Sender,
            &[
                (4, KvWhat::ReceiverCame),
                (6, KvWhat::ReceiverCame),
                (6, KvWhat::State(KvPoll::WaitingForInput)),
                (9, KvWhat::State(KvPoll::Transferring)),
                (10, started(1)),
                (12, started(2)),
                (15, ended(1, None)),
                (20, ended(2, None)),
                (70, started(3)),
                (80, ended(3, Some(TransportError::PeerGone))),
                (90, started(4)),
                (100, ended(4, None)),
            ],
        );
        assert_eq!(phases(&story, 101), [("rendezvous", 6), ("input", 3), ("transfer", 91), ("whole", 101)]);
        // 10 ms, 10 ms and 10 ms; the bytes of the failed post do not count.
        assert_eq!((story.bytes, story.descriptors, story.speed()), (300, 12, Some(10_000.0)));
    }

    #[test]
    fn a_dialect_whose_posts_name_no_session_moves_bytes_from_the_state_on() {
        let story = told(Half::Sender, &[(8, KvWhat::State(KvPoll::Transferring))]);
        assert_eq!(phases(&story, 10), [("transfer", 2), ("whole", 10)]);
        assert!(size_of::<Story>() <= 192, "{} bytes for each open session", size_of::<Story>());
    }
}
