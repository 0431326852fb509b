//! Which slots the network connects, by each of the two transports that workers may have.

use crate::net::lives::{ROADS, Road, Slot};
use crate::net::params::NetParams;

/// The present state of the network.
#[derive(Clone)]
pub(crate) struct Roads {
    params: NetParams,
    /// Until when no frame or byte passes from one slot to another, by transport, in global time.
    blocked: [Vec<Vec<u64>>; ROADS.len()],
    /// Until when no connection is opened from one slot to another, by transport, in global time.
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

    /// The rates of the network at present: those of the seed until the world is healed.
    pub(crate) fn params(&self) -> &NetParams {
        &self.params
    }

    /// The end of the partition between two slots, if there is one at present.
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
