//! The tools of all parts of a machine: the time now, timers, random numbers, and the list of
//! outputs that are to be carried out.

use std::collections::VecDeque;
use std::time::Duration;

use super::io::Output;
use super::posts::InFlight;
use super::timer::{Timer, Timers};
use super::tracer::Tracer;

use crate::command::Resource;
use crate::error::TransferError;
use crate::groups::RequestCacheGroups;
use crate::id::{PeerId, PostId, SessionId};
use crate::poll::KvPoll;
use crate::quarantine::Quarantine;
use crate::random::SplitMix64;
use crate::time::Time;
use crate::trace::{Dropped, DroppedFrames, Event, KvWhat, Who};
use crate::transport::{Descriptor, TransportError};

/// The effects of one input, with the state from which they are made.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
pub(super) struct Effects {
    now: Time,
    random: SplitMix64,
    timers: Timers,
    outputs: VecDeque<Output>,
    /// The longest pause between repetitions.
    retry_max: Duration,
    dropped: DroppedFrames,
    trace: Tracer,
}

impl Effects {
    pub(super) fn new(seed: u64, retry_max: Duration) -> Effects {
        Effects {
            now: Time::ZERO,
            random: SplitMix64::new(seed),
            timers: Timers::default(),
            outputs: VecDeque::new(),
            retry_max,
            dropped: DroppedFrames::default(),
            trace: Tracer::default(),
        }
    }

    /// The time of the input that is being handled.
    pub(super) fn now(&self) -> Time {
        self.now
    }

    /// An input has come, at this time. Time never goes back.
    pub(super) fn advance(&mut self, now: Time) {
        self.now = self.now.max(now);
    }

    /// The part of this state that decides what the machine does.
    #[cfg(feature = "model")]
    pub(super) fn counted(&self) -> impl std::fmt::Debug {
        let Effects { now, random, timers, outputs, retry_max: _, dropped: _, trace: _ } = self;
        (now, random, timers, outputs)
    }

    /// Appends an output to those of this input.
    pub(super) fn output(&mut self, output: Output) {
        self.outputs.push_back(output);
    }

    /// Reports a session's new state.
    pub(super) fn status(&mut self, session: SessionId, poll: KvPoll, failure: Option<TransferError>) {
        match (&failure, poll) {
            (Some(failure), _) => self.tell(session, || KvWhat::Failed(Box::new(failure.clone()))),
            (None, KvPoll::Success) => self.tell(session, || KvWhat::Ended),
            // The event of the opening says that already.
            (None, KvPoll::Bootstrapping) => {}
            (None, poll) => self.tell(session, || KvWhat::State(poll)),
        }
        self.output(Output::Status { session, poll, failure: failure.map(Box::new) });
    }

    /// Gives back a resource that a session was lent: no data operation can touch it any more.
    pub(super) fn release(&mut self, session: SessionId, resource: impl Into<Resource>) {
        let resource = resource.into();
        self.tell(session, || match &resource {
            Resource::Pages(pages) => KvWhat::PagesBack { pages: pages.len() },
            Resource::RequestCacheGroups { groups, .. } => KvWhat::ItemsBack { items: groups.len() },
        });
        self.output(Output::Release { session, resource });
    }

    /// Gives back items of cache groups: no data operation can touch them any more.
    pub(super) fn release_groups(
        &mut self,
        session: SessionId,
        groups: RequestCacheGroups,
        skipped: Vec<u16>,
    ) {
        self.release(session, Resource::RequestCacheGroups { groups, skipped });
    }

    /// The oldest output that was not taken yet; `None` if there is none.
    pub(super) fn next_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Ignores a frame, and counts it under the reason. `author` is the sender, if known.
    pub(super) fn drop_frame(&mut self, author: Option<PeerId>, why: Dropped) {
        self.dropped.count(why);
        self.tell(author.map_or_else(Who::default, Who::from), || KvWhat::Dropped(why));
    }

    /// How many frames were ignored, by reason.
    pub(super) fn dropped(&self) -> &DroppedFrames {
        &self.dropped
    }

    // ---- events for the listener ----------------------------------------------------------------

    /// Tells an event to the listener. `what` is called only if somebody listens.
    #[inline(always)]
    pub(super) fn tell(&mut self, who: impl Into<Who>, what: impl FnOnce() -> KvWhat) {
        self.trace.tell(self.now, who, what);
    }

    /// True if somebody listens.
    #[inline(always)]
    pub(super) fn is_heard(&self) -> bool {
        self.trace.is_heard()
    }

    pub(super) fn listen(&mut self, on: bool) {
        self.trace.listen(on);
    }

    /// The oldest event that was not fetched yet; `None` if there is none.
    pub(super) fn next_event(&mut self) -> Option<Event<KvWhat>> {
        self.trace.next()
    }

    /// Tells that a data operation has started.
    #[inline(always)]
    pub(super) fn post_started(&mut self, id: PostId, post: &InFlight, descriptors: &[Descriptor]) {
        self.trace.post_started(self.now, id, post, descriptors);
    }

    /// Tells that a data operation has ended.
    #[inline(always)]
    pub(super) fn post_ended(&mut self, id: PostId, post: &InFlight, result: &Result<(), TransportError>) {
        self.trace.post_ended(self.now, id, post, result);
    }

    /// Tells that a session has failed, and that its pages and items are in quarantine.
    pub(super) fn quarantine_began(&mut self, session: SessionId, waits: &Quarantine) {
        self.trace.quarantine_began(self.now, session, waits);
    }

    /// Tells that nothing is left of a session.
    #[inline(always)]
    pub(super) fn closed(&mut self, session: SessionId) {
        self.trace.closed(self.now, session);
    }

    // ---- timers ---------------------------------------------------------------------------------

    /// Sets a timer. A timer with the same key is replaced.
    pub(super) fn arm(&mut self, timer: Timer, at: Time) {
        self.timers.arm(timer, at);
    }

    /// Sets a timer, unless a timer with the same key is set.
    pub(super) fn arm_once(&mut self, timer: Timer, at: Time) {
        self.timers.arm_once(timer, at);
    }

    pub(super) fn is_armed(&self, timer: Timer) -> bool {
        self.timers.is_armed(timer)
    }

    pub(super) fn cancel(&mut self, timer: Timer) {
        self.timers.cancel(timer);
    }

    /// When this timer is due; `None` if it is not set.
    pub(super) fn due(&self, timer: Timer) -> Option<Time> {
        self.timers.at(timer)
    }

    /// When the next timer is due; `None` if no timer is set.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.timers.next()
    }

    /// Takes the next timer that is due now.
    pub(super) fn next_timer(&mut self) -> Option<Timer> {
        self.timers.pop_due(self.now)
    }

    /// How many timers are set.
    pub(super) fn timers(&self) -> usize {
        self.timers.len()
    }

    /// A random number of 64 bits.
    pub(super) fn draw(&mut self) -> u64 {
        self.random.bits()
    }

    /// The pause before the n-th repetition (from 1): doubles up to `retry_max`, with a jitter of
    /// an eighth, so that the repetitions of many sessions spread.
    pub(super) fn backoff(&mut self, first: Duration, times: u32) -> Duration {
        let pause = first.saturating_mul(1 << times.saturating_sub(1).min(16)).min(self.retry_max);
        let spread = u64::try_from(pause.as_nanos() / 8).unwrap_or(u64::MAX).max(1);
        pause + Duration::from_nanos(self.random.bits() % spread)
    }
}
