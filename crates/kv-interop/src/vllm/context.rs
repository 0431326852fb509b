//! What both halves of vLLM's machine share while they handle one input.

use kv_core::Time;
use kv_core::trace::{KvWhat, Log, Who};

use crate::effects::Effects;
use crate::gauges::{Ignored, IgnoredGauges};

/// The time of the input, and the ways out of the machine.
#[derive(Debug, Default)]
pub(crate) struct Context {
    pub(crate) now: Time,
    pub(crate) effects: Effects,
    pub(crate) log: Log<KvWhat>,
    pub(crate) gauges: IgnoredGauges,
}

impl Context {
    /// Tells an event to the listener, if there is one.
    pub(crate) fn tell(&mut self, who: impl Into<Who>, what: impl FnOnce() -> KvWhat) {
        self.log.tell(self.now, who, what);
    }

    /// Counts a message or a notification that is ignored, and tells the listener.
    pub(crate) fn ignore(&mut self, why: Ignored) {
        self.gauges.count(why);
        self.tell(Who::default(), || KvWhat::Dropped(why.traced()));
    }
}
