//! From the events of one worker to numbers.

use std::collections::{BTreeMap, HashMap};

use kv_core::trace::{Event, Half, KvWhat, Message};
use kv_core::{Cause, Op, PeerCause, PostId, SessionId, Time, TransferError, WorkerId};
use metrics::{Counter, Histogram};

use crate::peers::{Peers, Slot, Way};
use crate::sink::{Family, Home, Sink};
use crate::story::Story;
use crate::table;

type Text = &'static str;

/// The numbers of all workers of a listener.
#[derive(Debug)]
pub(crate) struct Recordings {
    sink: Sink,
    max_peers: usize,
    workers: Vec<(WorkerId, Recording)>,
}

impl Recordings {
    pub(crate) fn new(sink: Sink, max_peers: usize) -> Recordings {
        Recordings { sink, max_peers, workers: Vec::new() }
    }

    pub(crate) fn hear(&mut self, worker: &WorkerId, event: &Event<KvWhat>) {
        if let Some((_, recording)) = self.workers.iter_mut().find(|(known, _)| known == worker) {
            return recording.hear(event);
        }
        let mut recording = Recording::new(self.sink.clone(), worker, self.max_peers);
        recording.hear(event);
        self.workers.push((worker.clone(), recording));
    }
}

/// The numbers of one worker, and what must be remembered to count.
#[derive(Debug)]
pub(crate) struct Recording {
    home: Home,
    peers: Peers,
    stories: HashMap<SessionId, Story>,
    /// The posts in flight, with their direction.
    posts: BTreeMap<PostId, Text>,
    families: Families,
}

impl Recording {
    pub(crate) fn new(sink: Sink, worker: &WorkerId, max_peers: usize) -> Recording {
        Recording {
            home: Home::new(sink, worker),
            peers: Peers::new(max_peers),
            stories: HashMap::new(),
            posts: BTreeMap::new(),
            families: Families::default(),
        }
    }

    pub(crate) fn hear(&mut self, event: &Event<KvWhat>) {
        if event.missed > 0 {
            self.forget_all(event.missed);
        }
        let (at, session) = (event.at, event.who.session);
        match &event.what {
            KvWhat::Opened { half, .. } => {
                if let Some(session) = session {
                    self.stories.insert(session, Story::new(*half, at));
                }
                return;
            }
            KvWhat::Ended => return self.ended(session, at),
            KvWhat::Failed(failure) => return self.failed(session, at, failure),
            KvWhat::Closed => {
                session.and_then(|session| self.stories.remove(&session));
                return;
            }
            what => self.count(event, what),
        }
        if let Some(story) = session.and_then(|session| self.stories.get_mut(&session)) {
            story.hear(at, &event.what);
        }
    }

    /// How many sessions and posts are remembered.
    #[cfg(test)]
    pub(crate) fn remembered(&self) -> (usize, usize) {
        (self.stories.len(), self.posts.len())
    }

    /// Events were lost, perhaps those of ends: what is remembered may never be forgotten otherwise.
    fn forget_all(&mut self, lost: u64) {
        self.stories.clear();
        self.posts.clear();
        self.families.events_lost.at(&self.home, &self.peers, ()).increment(lost);
    }

    fn ended(&mut self, session: Option<SessionId>, at: Time) {
        let Recording { home, peers, families, stories, .. } = self;
        let story = session.and_then(|session| stories.remove(&session));
        let half = half_of(story.as_ref());
        families.requests.at(home, peers, (half, "success")).increment(1);
        let Some(story) = story else { return };
        for (phase, time) in story.phases(at) {
            families.phase.at(home, peers, (half, phase)).record(time);
        }
        if story.bytes > 0 {
            families.request_bytes.at(home, peers, (half,)).record(story.bytes as f64);
        }
        if let Some(speed) = story.speed() {
            families.request_speed.at(home, peers, (half,)).record(speed);
        }
    }

    fn failed(&mut self, session: Option<SessionId>, at: Time, failure: &TransferError) {
        let Recording { home, peers, families, stories, .. } = self;
        let story = session.and_then(|session| stories.remove(&session));
        let half = half_of(story.as_ref());
        let outcome = if is_abort(&failure.cause) { "aborted" } else { "failed" };
        families.requests.at(home, peers, (half, outcome)).increment(1);
        let peer = failure.peer.as_ref().map_or(Slot::UNKNOWN, |peer| peers.named(peer));
        let by = told_by(&failure.cause);
        families.failures.at(home, peers, (half, failure.cause.name(), by, peer)).increment(1);
        if let Some(story) = story {
            families.failed_after.at(home, peers, (half,)).record(story.age(at));
        }
    }

    /// Counts an event that is no beginning and no end of a session.
    fn count(&mut self, event: &Event<KvWhat>, what: &KvWhat) {
        let Recording { home, peers, families, posts, .. } = self;
        match what {
            KvWhat::PostStarted { post, op, bytes, descriptors } => {
                let op = name_of(*op);
                posts.insert(*post, op);
                families.post_bytes.at(home, peers, (op,)).record(*bytes as f64);
                families.post_descriptors.at(home, peers, (op,)).record(*descriptors as f64);
            }
            KvWhat::PostEnded { post, bytes, took, error } => {
                let op = posts.remove(post).unwrap_or("unknown");
                if error.is_some() {
                    families.posts_failed.at(home, peers, (op,)).increment(1);
                    return;
                }
                families.post_seconds.at(home, peers, (op,)).record(*took);
                let (slot, way) = (peers.of(event.who.peer), peers.way_to(event.who.peer));
                families.moved.at(home, peers, (op, slot, way)).increment(*bytes);
            }
            KvWhat::Said(message) => families.message(home, peers, "sent", message),
            KvWhat::Heard(message) => families.message(home, peers, "received", message),
            KvWhat::LeaseExpired => families.leases_expired.at(home, peers, ()).increment(1),
            KvWhat::QuarantineEnded { reason, lasted } => {
                families.quarantine_seconds.at(home, peers, (reason.name(),)).record(*lasted);
            }
            KvWhat::Dropped(why) => families.frames_ignored.at(home, peers, (why.name(),)).increment(1),
            KvWhat::Asked { again } => {
                let result = if *again { "asked_again" } else { "asked" };
                families.lookups.at(home, peers, (result,)).increment(1);
            }
            KvWhat::Answered { .. } | KvWhat::NotAnswered(_) => {
                families.lookups.at(home, peers, (what.name(),)).increment(1);
            }
            KvWhat::PeerMet { worker, .. } => {
                if let Some(id) = event.who.peer {
                    peers.met(id, worker);
                }
                families.peer_events.at(home, peers, (what.name(),)).increment(1);
            }
            KvWhat::PeerForgotten => {
                if let Some(id) = event.who.peer {
                    peers.forgotten(id);
                }
                families.peer_events.at(home, peers, (what.name(),)).increment(1);
            }
            KvWhat::WayChosen { transport } => {
                if let Some(id) = event.who.peer {
                    peers.reached(id, transport);
                }
                families.peer_events.at(home, peers, (what.name(),)).increment(1);
            }
            KvWhat::WayFailed { transport, fault, .. } => {
                let way = peers.way(transport);
                families.ways_failed.at(home, peers, (way, fault.name())).increment(1);
                families.peer_events.at(home, peers, (what.name(),)).increment(1);
            }
            KvWhat::PeerAnswers
            | KvWhat::PeerRefuses(_)
            | KvWhat::WayOpened
            | KvWhat::ConnectFailed(_)
            | KvWhat::WayLost
            | KvWhat::PeerSilent { .. }
            | KvWhat::PeerGivenUp { .. }
            | KvWhat::PeerBack
            | KvWhat::PeerDead { .. }
            | KvWhat::PeerRestarted
            | KvWhat::Revoking
            | KvWhat::WritesOver => families.peer_events.at(home, peers, (what.name(),)).increment(1),
            _ => {}
        }
    }
}

/// True if a scheduler ended the request, here or at the peer: nothing is wrong.
pub(crate) fn is_abort(cause: &Cause) -> bool {
    matches!(cause, Cause::Aborted | Cause::ByPeer(PeerCause::Aborted))
}

/// The side that told the cause of a failure.
pub(crate) fn told_by(cause: &Cause) -> Text {
    if matches!(cause, Cause::ByPeer(_)) { "peer" } else { "here" }
}

fn half_of(story: Option<&Story>) -> Text {
    story.map_or("unknown", |story| Half::name(story.half))
}

fn name_of(op: Op) -> Text {
    match op {
        Op::Write => "write",
        Op::Read => "read",
    }
}

/// Declares the handles of the metrics that are counted from events.
macro_rules! families {
    ($($name:ident: $labels:ty, $handle:ty = $metric:ident;)+) => {
        #[derive(Debug)]
        struct Families {
            $($name: Family<$labels, $handle>,)+
        }

        impl Default for Families {
            fn default() -> Families {
                Families { $($name: Family::new(&table::$metric),)+ }
            }
        }
    };
}

families! {
    requests: (Text, Text), Counter = REQUESTS;
    failures: (Text, Text, Text, Slot), Counter = FAILURES;
    phase: (Text, Text), Histogram = PHASE;
    failed_after: (Text,), Histogram = FAILED_AFTER;
    request_bytes: (Text,), Histogram = REQUEST_BYTES;
    request_speed: (Text,), Histogram = REQUEST_SPEED;
    moved: (Text, Slot, Way), Counter = MOVED;
    post_seconds: (Text,), Histogram = POST_SECONDS;
    post_bytes: (Text,), Histogram = POST_BYTES;
    post_descriptors: (Text,), Histogram = POST_DESCRIPTORS;
    posts_failed: (Text,), Counter = POSTS_FAILED;
    messages: (Text, Text), Counter = MESSAGES;
    lease_renewals: (Text,), Counter = LEASE_RENEWALS;
    leases_expired: (), Counter = LEASES_EXPIRED;
    lookups: (Text,), Counter = LOOKUPS;
    peer_events: (Text,), Counter = PEER_EVENTS;
    ways_failed: (Way, Text), Counter = WAYS_FAILED;
    frames_ignored: (Text,), Counter = FRAMES_IGNORED;
    quarantine_seconds: (Text,), Histogram = QUARANTINE_SECONDS;
    events_lost: (), Counter = EVENTS_LOST;
}

impl Families {
    fn message(&mut self, home: &Home, peers: &Peers, direction: Text, message: &Message) {
        self.messages.at(home, peers, (direction, message.name())).increment(1);
        if let Message::HeartbeatAnswered { leases, .. } = message
            && *leases > 0
        {
            self.lease_renewals.at(home, peers, (direction,)).increment(*leases);
        }
    }
}
