//! Lives of hosts, as seen from outside.

use bytes::Bytes;

use kv_core::TransportOffer;

use crate::clock::Clock;
use crate::net::params::WayParams;
use kv_core::random::mix;

/// The transport's name in records and hellos.
pub const TRANSPORT: &str = "sim";
/// The transports of workers that have two.
pub(crate) const ROADS: [&str; 2] = [TRANSPORT, "sim-2"];
/// Position among them.
pub(crate) type Road = usize;

/// Position of a host; prefill hosts come first.
pub type Slot = usize;
/// One life of a host, numbered over the whole world.
pub type LifeId = usize;
/// One token of pages (or one aux row) that a session holds; zero is nobody.
pub type HoldId = u32;

/// One life of a host, as seen from outside.
#[derive(Debug, Clone)]
pub struct LifeRecord {
    /// Its clock.
    pub clock: Clock,
    /// False once it has crashed.
    pub alive: bool,
    /// True once its scheduler has shut it down.
    pub shut_down: bool,
    /// When it was last paused, until when, in global time.
    pub paused_until: u64,
    /// Posts that failed.
    pub posts_failed: u64,
    /// Tokens of pages that its sessions hold.
    pub tokens_out: usize,
    /// Sessions that have not ended.
    pub open_sessions: usize,
}

impl LifeRecord {
    /// Of a host that begins to live.
    pub fn new(clock: Clock) -> LifeRecord {
        LifeRecord {
            clock,
            alive: true,
            shut_down: false,
            paused_until: 0,
            posts_failed: 0,
            tokens_out: 0,
            open_sessions: 0,
        }
    }
}

/// True while nobody has anything to do: no session open, nothing lent, on any living host.
pub fn is_idle(lives: &[LifeRecord]) -> bool {
    lives.iter().all(|life| !life.alive || (life.open_sessions == 0 && life.tokens_out == 0))
}

/// What peers are given to reach a life by the first of its transports.
pub fn metadata(life: LifeId) -> Bytes {
    metadata_by(0, life)
}

/// The same by the transport of one of the two roads.
pub(crate) fn metadata_by(road: Road, life: LifeId) -> Bytes {
    Bytes::copy_from_slice(&((road as u64) << 32 | life as u64).to_le_bytes())
}

/// The life that metadata leads to.
pub fn life_of(metadata: &[u8]) -> Option<LifeId> {
    Some(road_and_life(metadata)?.1)
}

/// The road that metadata leads along, and to whom.
pub(crate) fn road_and_life(metadata: &[u8]) -> Option<(Road, LifeId)> {
    let number = u64::from_le_bytes(metadata.try_into().ok()?);
    let (road, life) = ((number >> 32) as Road, number as u32 as LifeId);
    (road < ROADS.len()).then_some((road, life))
}

/// The roads of a life, in its order of preference. All have the first, so that everybody can be met.
pub(crate) fn roads_of(seed: u64, ways: &WayParams, life: LifeId) -> &'static [Road] {
    match mix(seed ^ mix(life as u64 ^ 0x70ad)) % 10 {
        _ if !ways.several => &[0],
        0..=4 => &[0, 1],
        5..=6 => &[1, 0],
        _ => &[0],
    }
}

/// By what peers reach a life.
pub(crate) fn transports_of(seed: u64, ways: &WayParams, life: LifeId) -> Vec<TransportOffer> {
    let offer = |&road: &Road| TransportOffer::new(ROADS[road], metadata_by(road, life));
    roads_of(seed, ways, life).iter().map(offer).collect()
}

/// True if a road does not connect two lives, as shared memory does not connect two hosts. Another does.
pub(crate) fn leads_nowhere(seed: u64, ways: &WayParams, road: Road, (one, other): (LifeId, LifeId)) -> bool {
    let both = |life| roads_of(seed, ways, life).len() == ROADS.len();
    let pair = (one.min(other) as u64) << 32 | one.max(other) as u64;
    road == 0 && both(one) && both(other) && mix(seed ^ mix(pair ^ 0xdead_e2d0)).is_multiple_of(4)
}
