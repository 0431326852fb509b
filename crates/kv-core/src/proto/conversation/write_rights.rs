//! Until when a peer lets this worker write, and until when this worker lets the peer write.

use std::time::Duration;

use crate::time::Time;
use crate::transport::WriteFence;

/// What a peer lets this worker write into its memory.
#[derive(Debug, Clone, Default)]
pub(in crate::proto) struct WritesOut {
    /// Until when writes may begin.
    until: Time,
    /// How many questions were sent since the last answer.
    pub(super) unanswered: u32,
}

impl WritesOut {
    /// True if a write may begin now.
    pub(in crate::proto) fn is_permitted(&self, now: Time) -> bool {
        now < self.until
    }

    /// Until when writes may begin.
    pub(in crate::proto) fn until(&self) -> Time {
        self.until
    }

    /// Notes an answer. True if it permits more than was permitted before.
    pub(super) fn answered(&mut self, until: Time) -> bool {
        self.unanswered = 0;
        let more = until > self.until;
        self.until = self.until.max(until);
        more
    }
}

/// What this worker lets a peer write into its memory.
#[derive(Debug, Clone)]
pub(in crate::proto) struct WritesIn {
    /// The number of the peer's last question that was heard; 0 for none.
    pub(super) heard: u64,
    /// No write of the peer begins after this moment.
    pub(super) until: Time,
    /// What ends the danger of the peer's last writes.
    pub(super) fence: WriteFence,
    /// True once the transport was asked to revoke the peer's right to write.
    pub(super) revoking: bool,
}

impl Default for WritesIn {
    fn default() -> WritesIn {
        WritesIn { heard: 0, until: Time::ZERO, fence: WriteFence::AtDeath, revoking: false }
    }
}

impl WritesIn {
    /// Notes a question of the peer. A peer that has forgotten the conversation begins its numbers
    /// anew.
    pub(super) fn hear(&mut self, ask: u64, forgot: bool) {
        let before = if forgot { 0 } else { self.heard };
        self.heard = before.max(ask);
    }

    /// Notes what ends the danger of the peer's last writes, as the transport declares it.
    pub(super) fn declare(&mut self, fence: WriteFence) {
        self.fence = fence;
    }

    /// What ends the danger of the peer's last writes.
    pub(in crate::proto) fn fence(&self) -> WriteFence {
        self.fence
    }

    /// True while the transport is revoking the peer's right to write.
    pub(in crate::proto) fn is_revoking(&self) -> bool {
        self.revoking
    }

    /// When the last write under the permission has ended, if no write takes longer than `bound`.
    pub(in crate::proto) fn end_of_last(&self, bound: Duration) -> Time {
        // The bound is by another clock, whose rate may differ by a thirty-second part.
        self.until + bound + bound / 32 + Duration::from_millis(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer whose clock is slow could still write into pages that were given away.
    #[test]
    fn the_end_of_the_last_write_allows_for_a_clock_of_another_rate() {
        let until = Time::from_nanos(5_000_000_000);
        let writes = WritesIn { until, ..WritesIn::default() };
        let end = writes.end_of_last(Duration::from_secs(32));
        assert_eq!(end, until + Duration::from_millis(33_001));
    }
}
