//! The events of workers as spans and events of `tracing`.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use kv_core::trace::{Event, KvWhat, Who};
use kv_core::{PeerId, SessionId, Time, TransferError, WorkerId};
use kv_poll::worker::Listener;
use tracing::field::{Empty, display};
use tracing::{Level, Span, event, info_span};

use crate::budget::Budget;
use crate::levels::level;
use crate::recording::is_abort;
use crate::story::Story;

/// The target of spans and events that belong to a session.
pub const REQUEST: &str = "kv_transfer::request";
/// The target of events that belong to no session: peers, lookups, frames that were ignored.
pub const WORKER: &str = "kv_transfer::worker";

/// Peers whose name is remembered; see the same bound of the metrics.
const MAX_PEERS: usize = 1 << 14;

/// A listener for one worker that tells each event to the subscriber, on the worker's thread.
///
/// The subscriber's work is done while bytes and frames wait. That suits a subscriber that passes on what it is told,
/// or a log at the level `info`; for others there is [`queued`](crate::queued()).
pub fn spans() -> Listener<KvWhat> {
    let telling = Mutex::new(Telling::default());
    Listener::new(move |worker, event| {
        telling.lock().unwrap_or_else(PoisonError::into_inner).hear(worker, event);
    })
}

/// What is remembered of all workers of a listener.
#[derive(Debug, Default)]
pub(crate) struct Telling(Vec<(WorkerId, Worker)>);

impl Telling {
    pub(crate) fn hear(&mut self, id: &WorkerId, event: &Event<KvWhat>) {
        if let Some((_, worker)) = self.0.iter_mut().find(|(known, _)| known == id) {
            return worker.hear(event);
        }
        let mut worker = Worker { name: id.to_string(), ..Worker::default() };
        worker.hear(event);
        self.0.push((id.clone(), worker));
    }

    /// How many spans are open.
    #[cfg(test)]
    pub(crate) fn open(&self) -> usize {
        self.0.iter().map(|(_, worker)| worker.open.len()).sum()
    }
}

#[derive(Debug, Default)]
struct Worker {
    name: String,
    peers: BTreeMap<PeerId, WorkerId>,
    open: HashMap<SessionId, Open>,
    budget: Budget,
}

/// An open session that somebody watches.
#[derive(Debug)]
struct Open {
    span: Span,
    story: Story,
    has_peer: bool,
}

/// Tells an event at a level that is known only when the event happens: a level is part of what the macros of
/// `tracing` declare, and so each level has a declaration of its own.
macro_rules! tell {
    ($level:expr, $target:expr, $parent:expr, $($fields:tt)*) => {
        match $level {
            Level::ERROR | Level::WARN => event!(target: $target, parent: $parent, Level::WARN, $($fields)*),
            Level::INFO => event!(target: $target, parent: $parent, Level::INFO, $($fields)*),
            Level::DEBUG => event!(target: $target, parent: $parent, Level::DEBUG, $($fields)*),
            Level::TRACE => event!(target: $target, parent: $parent, Level::TRACE, $($fields)*),
        }
    };
}

impl Worker {
    fn hear(&mut self, event: &Event<KvWhat>) {
        if event.missed > 0 {
            self.open.clear();
            let (worker, missed) = (&self.name, event.missed);
            event!(target: WORKER, parent: None, Level::WARN, %worker, missed,
                "{missed} events are lost, and open sessions have lost their spans");
        }
        let Who { session, peer, .. } = event.who;
        match (&event.what, peer) {
            (KvWhat::PeerMet { worker, .. }, Some(id)) => {
                self.peers.insert(id, worker.clone());
                if self.peers.len() > MAX_PEERS {
                    self.peers.pop_first();
                }
            }
            (KvWhat::PeerForgotten, Some(id)) => {
                self.of_worker(event);
                self.peers.remove(&id);
                return;
            }
            _ => {}
        }
        match session {
            Some(session) => self.of_session(session, event),
            None => self.of_worker(event),
        }
    }

    fn of_worker(&mut self, event: &Event<KvWhat>) {
        let level = level(&event.what);
        if level <= Level::INFO {
            match self.budget.take(event.at) {
                None => return,
                Some(0) => {}
                Some(held) => {
                    let worker = &self.name;
                    event!(target: WORKER, parent: None, Level::WARN, %worker, held,
                        "{held} lines about peers were left out");
                }
            }
        }
        let (worker, what) = (&self.name, &event.what);
        let peer = self.peer(event.who.peer);
        let phase = event.phase().map(display);
        tell!(level, WORKER, None, %worker, peer, phase, what = what.name(), "{what}");
    }

    /// The text of a peer: its worker, or its id if nobody has introduced it.
    fn peer(&self, id: Option<PeerId>) -> Option<tracing::field::DisplayValue<Named<'_>>> {
        let id = id?;
        Some(display(self.peers.get(&id).map_or(Named::Id(id), Named::Worker)))
    }

    fn of_session(&mut self, session: SessionId, event: &Event<KvWhat>) {
        let Event { at, what, .. } = event;
        if let KvWhat::Opened { room, half } = what {
            let worker = &self.name;
            let span = info_span!(target: REQUEST, parent: None, "kv_request", %worker, %session, %room,
                half = half.name(), peer = Empty, phase = Empty, bytes = Empty, descriptors = Empty,
                seconds = Empty, outcome = Empty, cause = Empty);
            if !span.is_disabled() {
                let open = Open { span, story: Story::new(*half, *at), has_peer: false };
                self.open.insert(session, open);
            }
        }
        let peer = event.who.peer.and_then(|id| self.peers.get(&id));
        if let Some(open) = self.open.get_mut(&session) {
            open.story.hear(*at, what);
            match what {
                KvWhat::Ended => open.end(*at, None),
                KvWhat::Failed(failure) => open.end(*at, Some(failure)),
                _ => open.meet(peer),
            }
        }
        let parent = self.open.get(&session).and_then(|open| open.span.id());
        let worker = &self.name;
        let phase = event.phase().map(display);
        let (peer, attempt) = (peer.map(display), event.who.attempt.map(display));
        let name = what.name();
        tell!(level(what), REQUEST, parent, %worker, %session, peer, attempt, phase, what = name, "{what}");
        if matches!(what, KvWhat::Closed) {
            self.open.remove(&session);
        }
    }
}

impl Open {
    fn meet(&mut self, peer: Option<&WorkerId>) {
        if let Some(peer) = peer.filter(|_| !self.has_peer) {
            self.has_peer = true;
            self.span.record("peer", display(peer));
        }
    }

    /// Records how the session ended. Nothing is recorded twice: subscribers that print would print both.
    fn end(&mut self, at: Time, failure: Option<&TransferError>) {
        let Open { span, story, .. } = self;
        span.record("bytes", story.bytes).record("descriptors", story.descriptors);
        span.record("seconds", story.age(at).as_secs_f64());
        let Some(failure) = failure else {
            span.record("outcome", "success");
            return;
        };
        let outcome = if is_abort(&failure.cause) { "aborted" } else { "failed" };
        span.record("outcome", outcome).record("phase", display(failure.phase));
        span.record("cause", failure.cause.name());
        self.meet(failure.peer.as_ref());
    }
}

/// A peer in a line of text.
enum Named<'a> {
    Worker(&'a WorkerId),
    Id(PeerId),
}

impl std::fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Named::Worker(worker) => worker.fmt(f),
            Named::Id(id) => write!(f, "peer {id}"),
        }
    }
}
