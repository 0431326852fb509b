//! The lives of hosts, as they are known from outside.

use bytes::Bytes;

use kv_core::TransportOffer;

use crate::clock::Clock;
use crate::net::params::WayParams;
use kv_core::random::mix;

/// The transport's name in records and hellos.
pub const TRANSPORT: &str = "sim";
/// The transports of workers that have two.
pub(crate) const ROADS: [&str; 2] = [TRANSPORT, "sim-2"];
/// The position of a transport in [`ROADS`].
pub(crate) type Road = usize;

/// Position of a host; prefill hosts come first.
pub type Slot = usize;
/// The number of one life of a host, counted over the whole world.
pub type LifeId = usize;
/// The number of one `Pages` (or one aux row) that a session holds; zero stands for no holder.
pub type HoldId = u32;

/// One life of a host, as it is known from outside.
#[derive(Debug, Clone)]
pub struct LifeRecord {
    /// The slot of the host.
    pub slot: Slot,
    /// True if the slot led to the life when it began; false for a stranger that pretends to be of the slot.
    pub seated: bool,
    /// The clock of the life.
    pub clock: Clock,
    /// False once the life has ended.
    pub alive: bool,
    /// True once the host's scheduler has shut it down.
    pub shut_down: bool,
    /// When the host's scheduler told the host to drain, in global time.
    pub draining: Option<u64>,
    /// When the host, which drains, awaited no peer any more, in global time.
    pub left: Option<u64>,
    /// Since when the bootstrap server does not name the host any more, because the whole replica has left.
    pub withdrawn: Option<u64>,
    /// When a bootstrap server has told the host last that an engine drains, in global time.
    pub told_of_a_drain: Option<u64>,
    /// When the host, which drains, was empty, in global time.
    pub emptied: Option<u64>,
    /// Until when the host is or was paused the last time, in global time.
    pub paused_until: u64,
    /// The number of posts that failed.
    pub posts_failed: u64,
    /// How many `Pages` and items of cache groups the life's sessions hold.
    pub holds_out: usize,
    /// The number of sessions that have not ended.
    pub open_sessions: usize,
}

impl LifeRecord {
    /// Of a host that begins to live.
    pub fn new(slot: Slot, clock: Clock) -> LifeRecord {
        LifeRecord {
            slot,
            seated: false,
            clock,
            alive: true,
            shut_down: false,
            draining: None,
            left: None,
            withdrawn: None,
            told_of_a_drain: None,
            emptied: None,
            paused_until: 0,
            posts_failed: 0,
            holds_out: 0,
            open_sessions: 0,
        }
    }
}

/// True if the last life of a slot drains, or has drained and was not replaced yet.
pub(crate) fn is_drained(lives: &[LifeRecord], slot: Slot) -> bool {
    lives
        .iter()
        .rev()
        .find(|life| life.seated && life.slot == slot)
        .is_some_and(|life| life.draining.is_some())
}

/// True if no living host has an open session or holds a page.
pub fn is_idle(lives: &[LifeRecord]) -> bool {
    lives.iter().all(|life| !life.alive || (life.open_sessions == 0 && life.holds_out == 0))
}

/// The metadata by which peers reach a life over the first of its transports.
pub fn metadata(life: LifeId) -> Bytes {
    metadata_by(0, life)
}

/// The metadata by which peers reach a life over this transport.
pub(crate) fn metadata_by(road: Road, life: LifeId) -> Bytes {
    Bytes::copy_from_slice(&((road as u64) << 32 | life as u64).to_le_bytes())
}

/// The life that the metadata is of.
pub fn life_of(metadata: &[u8]) -> Option<LifeId> {
    Some(road_and_life(metadata)?.1)
}

/// The transport and the life that the metadata is of.
pub(crate) fn road_and_life(metadata: &[u8]) -> Option<(Road, LifeId)> {
    let number = u64::from_le_bytes(metadata.try_into().ok()?);
    let (road, life) = ((number >> 32) as Road, number as u32 as LifeId);
    (road < ROADS.len()).then_some((road, life))
}

/// The transports of a life, in its order of preference. Every life has the first transport, so that every
/// host can be reached.
pub(crate) fn roads_of(seed: u64, ways: &WayParams, life: LifeId) -> &'static [Road] {
    match mix(seed ^ mix(life as u64 ^ 0x70ad)) % 10 {
        _ if !ways.several => &[0],
        0..=4 => &[0, 1],
        5..=6 => &[1, 0],
        _ => &[0],
    }
}

/// The transports by which peers reach a life, as they are in its rank record.
pub(crate) fn transports_of(seed: u64, ways: &WayParams, life: LifeId) -> Vec<TransportOffer> {
    let offer = |&road: &Road| TransportOffer::new(ROADS[road], metadata_by(road, life));
    roads_of(seed, ways, life).iter().map(offer).collect()
}

/// How a transport leads from one life to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passage {
    /// A connection can be opened, and frames arrive.
    Open,
    /// No connection can be opened in either direction, as shared memory does not connect two hosts.
    Nowhere,
    /// No connection can be opened from here; the other life can open one.
    Refused,
    /// A connection seems to be open, and nothing that is sent arrives.
    Swallowed,
}

/// How this transport leads from one life to another. Where it does not lead there, both lives have another transport, which
/// does. Of the pairs with two transports, a quarter has no passage by the first one; of the others, one in eight has none
/// from one life to the other (half of these refuse, half swallow), and one in eight none in the direction back.
pub(crate) fn passage(seed: u64, ways: &WayParams, road: Road, (from, to): (LifeId, LifeId)) -> Passage {
    let both = |life| roads_of(seed, ways, life).len() == ROADS.len();
    if road != 0 || !both(from) || !both(to) {
        return Passage::Open;
    }
    let pair = (from.min(to) as u64) << 32 | from.max(to) as u64;
    if mix(seed ^ mix(pair ^ 0xdead_e2d0)).is_multiple_of(4) {
        return Passage::Nowhere;
    }
    match (mix(seed ^ mix(pair ^ 0x04e_3a75)) % 16, from < to) {
        (0, true) | (1, false) => Passage::Refused,
        (2, true) | (3, false) => Passage::Swallowed,
        _ => Passage::Open,
    }
}
