//! What has arrived from each connection, so that its sender can be told.

use std::collections::{HashMap, VecDeque};

use crate::notifications::envelope::HEADER;

/// What a frame counts: UCX and NIXL keep some hundred bytes with each.
pub(crate) fn charge(len: usize) -> u64 {
    (len + HEADER + 238) as u64
}

/// After so many bytes their arrival is confirmed: less than half of what a sender may have
/// unconfirmed, so that one that sends on never waits for a timer.
const CONFIRM_EVERY: u64 = 512 << 10;
/// Connections whose bytes are counted; above, the one that began first is forgotten.
const MOST: usize = 4096;

/// Counts what arrives, by the senders' connections.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    counts: HashMap<u64, Arrival>,
    order: VecDeque<u64>,
}

#[derive(Debug)]
struct Arrival {
    /// The sender's agent, as it says itself.
    name: String,
    count: u64,
    told: u64,
}

impl Arrivals {
    /// Counts a frame. Returns the count if it is time to confirm it.
    pub(crate) fn count(&mut self, connection: u64, name: &str, len: usize) -> Option<u64> {
        if !self.counts.contains_key(&connection) {
            if self.order.len() >= MOST
                && let Some(oldest) = self.order.pop_front()
            {
                self.counts.remove(&oldest);
            }
            self.order.push_back(connection);
            self.counts.insert(connection, Arrival { name: name.to_owned(), count: 0, told: 0 });
        }
        let arrival = self.counts.get_mut(&connection)?;
        arrival.count += charge(len);
        (arrival.count - arrival.told >= CONFIRM_EVERY).then_some(arrival.count)
    }

    /// This count was confirmed.
    pub(crate) fn told(&mut self, connection: u64, count: u64) {
        if let Some(arrival) = self.counts.get_mut(&connection) {
            arrival.told = arrival.told.max(count);
        }
    }

    /// What has arrived from an agent that could not be told so far.
    pub(crate) fn untold(&self, name: &str) -> Vec<(u64, u64)> {
        let due = |arrival: &Arrival| arrival.name == name && arrival.count - arrival.told >= CONFIRM_EVERY;
        let due = self.counts.iter().filter(|(_, arrival)| due(arrival));
        due.map(|(connection, arrival)| (*connection, arrival.count)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_are_confirmed_now_and_then_and_bounded() {
        let mut arrivals = Arrivals::default();
        let frame = 100_000;
        assert_eq!(arrivals.count(1, "a", frame), None);
        let count = (0..10).find_map(|_| arrivals.count(1, "a", frame)).unwrap();
        assert!(count >= CONFIRM_EVERY && count < CONFIRM_EVERY + charge(frame));
        assert_eq!(arrivals.untold("a"), [(1, count)]);
        arrivals.told(1, count);
        assert_eq!(arrivals.untold("a"), []);
        for connection in 0..3 * MOST as u64 {
            arrivals.count(connection, "b", 0);
        }
        assert_eq!(arrivals.counts.len(), MOST);
        assert_eq!(arrivals.order.len(), MOST);
    }
}
