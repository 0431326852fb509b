//! How many bytes have arrived on each connection, so that the sender can be told.

use std::collections::{HashMap, VecDeque};

use crate::notifications::envelope::HEADER;

/// The size by which a frame of this length is counted: UCX and NIXL keep some hundred bytes with each frame.
pub(crate) fn charge(len: usize) -> u64 {
    (len + HEADER + 238) as u64
}

/// The number of bytes after which their arrival is confirmed: less than half of what a sender may have
/// unconfirmed, so that a sender that goes on never waits for a timer.
const CONFIRM_EVERY: u64 = 512 << 10;
/// How many connections are counted. Beyond this number the connection that began first is forgotten.
const MOST: usize = 4096;

/// Counts of arrived bytes, by the sender's number of its connection.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    counts: HashMap<u64, Arrival>,
    order: VecDeque<u64>,
}

#[derive(Debug)]
struct Arrival {
    /// The name that the sender's agent gives itself.
    name: String,
    count: u64,
    told: u64,
}

impl Arrivals {
    /// Counts a frame. Returns the count if the count is to be confirmed now.
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

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Notes that a count was confirmed to the sender.
    pub(crate) fn told(&mut self, connection: u64, count: u64) {
        if let Some(arrival) = self.counts.get_mut(&connection) {
            arrival.told = arrival.told.max(count);
        }
    }

    /// The connections of an agent that could not be told so far, and their counts.
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
