//! When each request passed from one phase to the next, as its decode rank sees it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use kv_transfer::{
    Change, KvArgs, KvManager, KvPoll, KvSession, OpenError, Reclaimed, Room, SessionId, SessionOptions,
};

/// A manager that remembers the request of each receiver that it has opened. The queues take any
/// [`KvManager`], so that a server can put a manager of its own in between.
pub struct WatchedManager<M> {
    inner: M,
    timelines: Timelines,
}

/// The timelines of receivers.
#[derive(Clone, Default)]
pub struct Timelines {
    open: Rc<RefCell<BTreeMap<SessionId, (Room, Timeline)>>>,
}

/// When one receiver changed its state.
#[derive(Debug, Clone, Copy)]
pub struct Timeline {
    opened: Instant,
    bootstrapped: Option<Instant>,
    preallocated: Option<Instant>,
    transferred: Option<Instant>,
}

impl<M: KvManager> WatchedManager<M> {
    /// Watches the receivers that `inner` opens.
    pub fn new(inner: M, timelines: Timelines) -> WatchedManager<M> {
        WatchedManager { inner, timelines }
    }
}

impl<M: KvManager> KvManager for WatchedManager<M> {
    type Sender = M::Sender;
    type Receiver = M::Receiver;

    fn args(&self) -> &KvArgs {
        self.inner.args()
    }

    fn sender(
        &self,
        bootstrap_addr: &str,
        room: Room,
        dest_ranks: &[u32],
        options: SessionOptions,
    ) -> Result<M::Sender, OpenError> {
        self.inner.sender(bootstrap_addr, room, dest_ranks, options)
    }

    fn receiver(
        &self,
        bootstrap_addr: &str,
        room: Room,
        options: SessionOptions,
    ) -> Result<M::Receiver, OpenError> {
        let session = self.inner.receiver(bootstrap_addr, room.clone(), options)?;
        self.timelines.open.borrow_mut().insert(session.id(), (room, Timeline::starting_now()));
        Ok(session)
    }

    fn leave_behind(&self, left: Reclaimed) {
        self.inner.leave_behind(left);
    }
}

impl Timelines {
    /// Notes changes of sessions. Returns the rooms whose transfer has begun.
    pub fn note(&self, changes: &[Change]) -> Vec<Room> {
        let mut begun = Vec::new();
        let mut open = self.open.borrow_mut();
        for change in changes {
            if let Some((room, timeline)) = open.get_mut(&change.session) {
                let before = timeline.preallocated;
                timeline.note(change.poll);
                if before.is_none() && timeline.preallocated.is_some() {
                    begun.push(room.clone());
                }
            }
        }
        begun
    }

    /// When the request's receiver was opened.
    pub fn opened(&self, room: &Room) -> Option<Instant> {
        let open = self.open.borrow();
        open.values().find(|(other, _)| other == room).map(|(_, timeline)| timeline.opened)
    }

    /// The timeline of a request that was received or has failed. The entry is removed.
    pub fn take(&self, room: &Room) -> Option<Timeline> {
        let mut open = self.open.borrow_mut();
        let session = open.iter().find(|(_, (other, _))| other == room).map(|(session, _)| *session)?;
        open.remove(&session).map(|(_, timeline)| timeline)
    }
}

impl Timeline {
    fn starting_now() -> Timeline {
        Timeline { opened: Instant::now(), bootstrapped: None, preallocated: None, transferred: None }
    }

    /// Notes a state. If several changes came at once, states may have been skipped, which the later state
    /// implies.
    fn note(&mut self, poll: KvPoll) {
        let now = Instant::now();
        let reached = |state: KvPoll| poll >= state && poll != KvPoll::Failed;
        for (state, moment) in [
            (KvPoll::WaitingForInput, &mut self.bootstrapped),
            (KvPoll::Transferring, &mut self.preallocated),
            (KvPoll::Success, &mut self.transferred),
        ] {
            if reached(state) && moment.is_none() {
                *moment = Some(now);
            }
        }
    }

    /// From the request's arrival until the handshake was done.
    pub fn bootstrap(&self) -> Duration {
        between(Some(self.opened), self.bootstrapped)
    }

    /// From the end of the handshake until the pages were allocated and registered.
    pub fn prealloc(&self) -> Duration {
        between(self.bootstrapped, self.preallocated)
    }

    /// From there until every byte was in place.
    pub fn transfer(&self) -> Duration {
        between(self.preallocated, self.transferred)
    }
}

fn between(from: Option<Instant>, to: Option<Instant>) -> Duration {
    match (from, to) {
        (Some(from), Some(to)) => to.saturating_duration_since(from),
        _ => Duration::ZERO,
    }
}
