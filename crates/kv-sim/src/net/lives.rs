//! Lives of hosts, as seen from outside.

use bytes::Bytes;

use crate::clock::Clock;

/// The plane's name in records and hellos.
pub const PLANE: &str = "sim";

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

/// What peers are given to reach a life.
pub fn metadata(life: LifeId) -> Bytes {
    Bytes::copy_from_slice(&(life as u64).to_le_bytes())
}

/// The life that metadata leads to.
pub fn life_of(metadata: &[u8]) -> Option<LifeId> {
    Some(u64::from_le_bytes(metadata.try_into().ok()?) as LifeId)
}
