//! Ways by which one life writes into the memory of another, as the transports at both ends know them: what
//! ends the writes, until when writes are permitted, and whether they were revoked.

use std::time::Duration;

use kv_core::random::mix;
use kv_core::{PeerId, Time, WriteFence};

use crate::net::flight::Flight;
use crate::net::lives::{LifeId, LifeRecord, Road};
use crate::net::params::WayParams;
use crate::planted::Planted;

/// The connection of one life to another, kept for as long as its writes can matter.
#[derive(Debug, Clone)]
pub struct Way {
    /// The life that writes.
    pub writer: LifeId,
    /// The life into whose memory it writes.
    pub target: LifeId,
    /// The transport of the connection.
    pub road: Road,
    /// What ends the writes.
    pub fence: WriteFence,
    /// Until when writes are allowed, on the writer's clock.
    pub permit: Option<Time>,
    /// The target has taken back the right to write.
    pub revoked: bool,
    /// The number of posts that have not ended.
    pub flying: usize,
}

/// A revocation that the target's transport was asked for, and reports once it is complete.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Revoking {
    pub(crate) life: LifeId,
    pub(crate) peer: PeerId,
    pub(crate) writer: LifeId,
    pub(crate) road: Road,
}

impl Way {
    /// True if a slice may begin at the global moment `now`.
    pub fn is_open(&self, lives: &[LifeRecord], now: u64) -> bool {
        let writer = &lives[self.writer];
        writer.alive && !self.revoked && self.permit.is_some_and(|until| writer.clock.local(now) < until)
    }

    /// True if the writer's own processor copies, so that its writes stop when its process is stopped.
    pub fn copies(&self) -> bool {
        !matches!(self.fence, WriteFence::Within(_))
    }
}

/// True if a post may still write into the memory of its target, as things are now.
pub(crate) fn may_write(flight: &Flight, way: &Way, lives: &[LifeRecord], now: u64) -> bool {
    let writes = lives[flight.life].alive || !way.copies();
    !flight.over && (flight.slice.is_some() && writes || !flight.stuck && way.is_open(lives, now))
}

/// What ends the writes of one life into the memory of another, over one transport.
pub(crate) fn fence_between(
    seed: u64,
    ways: &WayParams,
    (writer, target, road): (LifeId, LifeId, Road),
    planted: Option<Planted>,
) -> WriteFence {
    let drawn = mix(seed ^ mix((writer as u64) << 32 | target as u64) ^ road as u64) % 10;
    let short = if planted == Some(Planted::BoundTooShort) { 8 } else { 1 };
    if drawn < ways.kinds[0] {
        WriteFence::AtDeath
    } else if drawn < ways.kinds[0] + ways.kinds[1] {
        WriteFence::Revocable
    } else {
        WriteFence::Within(Duration::from_nanos(ways.bound / short))
    }
}
