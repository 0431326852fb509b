//! Which slots the network connects, by each of the two transports that workers may have.

use crate::net::lives::{ROADS, Road, Slot};
use crate::net::params::NetParams;

/// The state of the network.
#[derive(Clone)]
pub(crate) struct Roads {
    params: NetParams,
    /// Until when nothing passes from one slot to another, in global time.
    blocked: [Vec<Vec<u64>>; ROADS.len()],
    /// Until when no connection is opened from one slot to another, likewise.
    pub(crate) refused: [Vec<Vec<u64>>; ROADS.len()],
}

impl Roads {
    pub(crate) fn new(hosts: usize, params: &NetParams) -> Roads {
        Roads {
            params: params.clone(),
            blocked: ROADS.map(|_| vec![vec![0; hosts]; hosts]),
            refused: ROADS.map(|_| vec![vec![0; hosts]; hosts]),
        }
    }

    /// Its rates now: those of the seed until the world is healed.
    pub(crate) fn params(&self) -> &NetParams {
        &self.params
    }

    /// The end of the partition on this way, if there is one now.
    pub(crate) fn blocked_until(&self, road: Road, (from, to): (Slot, Slot), now: u64) -> Option<u64> {
        Some(self.blocked[road][from][to]).filter(|&until| until > now)
    }

    /// True if no connection is opened from one slot to another.
    pub(crate) fn refused(&self, road: Road, (from, to): (Slot, Slot), now: u64) -> bool {
        self.refused[road][from][to] > now
    }

    pub(crate) fn block(&mut self, road: Road, (from, to): (Slot, Slot), until: u64) {
        let known = &mut self.blocked[road][from][to];
        *known = until.max(*known);
    }

    pub(crate) fn heal(&mut self) {
        let NetParams { delay, .. } = self.params;
        self.params = NetParams { delay, delay_max: delay, ..NetParams::default() };
        self.blocked.iter_mut().chain(&mut self.refused).flatten().for_each(|row| row.fill(0));
    }
}
