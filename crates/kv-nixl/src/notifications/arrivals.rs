//! How many bytes have arrived on each connection, so that the sender can be told.

use std::collections::{BTreeMap, HashMap};

use crate::notifications::envelope::HEADER;

/// The size by which a frame of this length is counted: UCX and NIXL keep some hundred bytes with each frame.
pub(crate) fn charge(len: usize) -> u64 {
    (len + HEADER + 238) as u64
}

/// The number of bytes after which their arrival is confirmed: less than half of what a sender may have
/// unconfirmed, so that a sender that goes on never waits for a timer.
const CONFIRM_EVERY: u64 = 512 << 10;
/// How many connections are counted. Beyond this number the one that has been silent for longest is
/// forgotten.
const MOST: usize = 4096;

/// Counts of arrived bytes, by the sender's number of its connection.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    counts: HashMap<u64, Arrival>,
    /// The connections, the one that was heard last behind all others.
    order: BTreeMap<u64, u64>,
    /// How many frames were counted.
    frames: u64,
}

#[derive(Debug)]
struct Arrival {
    /// The name that the sender's agent gives itself.
    name: String,
    count: u64,
    told: u64,
    /// The place in the order.
    place: u64,
}

impl Arrivals {
    /// Counts a frame. Returns the count if the count is to be confirmed now.
    pub(crate) fn count(&mut self, connection: u64, name: &str, len: usize) -> Option<u64> {
        self.frames += 1;
        let place = self.frames;
        if !self.counts.contains_key(&connection) {
            if self.order.len() >= MOST
                && let Some((_, silent)) = self.order.pop_first()
            {
                self.counts.remove(&silent);
            }
            self.counts.insert(connection, Arrival { name: name.to_owned(), count: 0, told: 0, place });
        }
        let arrival = self.counts.get_mut(&connection)?;
        self.order.remove(&arrival.place);
        self.order.insert(place, connection);
        arrival.place = place;
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
        // One that goes on speaking is not forgotten: its sender would wait for ever for what was confirmed before.
        let first_of_many = 2;
        for connection in first_of_many..3 * MOST as u64 {
            arrivals.count(connection, "b", 0);
            arrivals.count(1, "a", 0);
        }
        let spoken = count + (3 * MOST as u64 - first_of_many) * charge(0);
        assert_eq!(arrivals.untold("a"), [(1, spoken)]);
        assert_eq!(arrivals.counts.len(), MOST);
        assert_eq!(arrivals.order.len(), MOST);
    }
}
