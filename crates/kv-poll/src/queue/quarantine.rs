//! [`QuarantineRule`]: how much of the cache may be in quarantine before no new request is admitted.

use std::fmt;

use kv_core::Quarantine;

/// How much of the cache may be in quarantine before admission stops.
///
/// Pages of a failed request come back when no data operation can touch them, and a silent peer may keep them
/// from coming back for as long as the peer's process lives. If such peers could take the whole cache,
/// running requests would find no page to grow into. So new requests wait while quarantined pages have
/// reached the share, and are admitted again as soon as there are fewer. Requests that have been admitted go
/// on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct QuarantineRule {
    /// Admission stops when so many percent of the cache's pages are in quarantine; above 100, never.
    pub stop_percent: u32,
}

impl QuarantineRule {
    /// Admission stops when half of the cache's pages are in quarantine.
    pub const HALF: QuarantineRule = QuarantineRule::at(50);

    /// Admission stops when so many percent of the cache's pages are in quarantine; above 100, never.
    pub const fn at(stop_percent: u32) -> QuarantineRule {
        QuarantineRule { stop_percent }
    }

    /// True if no new request may be admitted while `quarantined` of the cache's `pool` pages are in
    /// quarantine.
    pub fn stops(&self, quarantined: usize, pool: usize) -> bool {
        let (taken, limit) = (quarantined as u128 * 100, pool as u128 * u128::from(self.stop_percent));
        quarantined > 0 && taken >= limit
    }
}

impl Default for QuarantineRule {
    fn default() -> QuarantineRule {
        QuarantineRule::HALF
    }
}

/// Why no new request is admitted: too much of the cache is in quarantine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stopped {
    /// Pages of these queues' failed requests that cannot be used again yet.
    pub quarantined: usize,
    /// Pages of the whole cache.
    pub pool: usize,
    /// The peers that the worker's quarantined pages wait for, and what would release them, as the
    /// [manager](kv_core::KvManager::quarantine) tells. Sessions outside of these queues are included, and
    /// the newest may be missing for a moment.
    pub by: Vec<Quarantine>,
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stopped { quarantined, pool, by } = self;
        write!(f, "admission has stopped: {quarantined} of {pool} pages are in quarantine")?;
        by.iter().try_for_each(|entry| write!(f, "; {entry}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_reached_exactly_and_an_empty_quarantine_stops_nothing() {
        let stops =
            |stop_percent, quarantined, pool| QuarantineRule::at(stop_percent).stops(quarantined, pool);
        assert!(stops(50, 5, 10) && !stops(50, 4, 10) && stops(50, 6, 11) && !stops(50, 5, 11));
        assert!(stops(100, 10, 10) && !stops(100, 9, 10) && !stops(101, 10, 10));
        assert!(!stops(50, 0, 0) && !stops(0, 0, 10) && stops(0, 1, 10));
        assert!(stops(u32::MAX, usize::MAX, 0) && !stops(u32::MAX, usize::MAX, usize::MAX));
    }
}
