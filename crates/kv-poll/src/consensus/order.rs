//! The order in which all ranks admit requests.

use std::collections::VecDeque;

use kv_core::Room;

/// One order for all ranks, in which each rank goes on at its own speed.
///
/// Ranks that admit in orders of their own can wait for each other for ever: if each has room for one request,
/// and they give it to different requests, neither request is ever complete. In one order, the first request
/// whose transfer is not over finds room on every rank, as soon as running requests give theirs back: what lies
/// before it is over, and nothing behind it is admitted before it.
#[derive(Debug)]
pub(super) struct Order {
    /// The places that not every rank has passed.
    places: VecDeque<Place>,
    /// How many places all ranks have passed.
    passed_by_all: u64,
    /// How many places each rank has passed.
    passed: Box<[u64]>,
}

/// Who has a place: the request with this room and this number. A later request in the same room has another number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) room: Room,
    pub(super) number: u64,
}

impl Order {
    pub(super) fn new(ranks: usize) -> Order {
        Order { places: VecDeque::new(), passed_by_all: 0, passed: vec![0; ranks].into() }
    }

    /// The place that is next for a rank; `None` if no rank has given it to a request.
    pub(super) fn next(&self, rank: usize) -> Option<&Place> {
        let passed = self.passed.get(rank)?;
        self.places.get(usize::try_from(passed - self.passed_by_all).ok()?)
    }

    /// True if another rank has passed the place that is next for this one.
    pub(super) fn is_behind(&self, rank: usize) -> bool {
        self.passed.get(rank).is_some_and(|passed| self.passed.iter().any(|other| other > passed))
    }

    /// Gives the next place to a request, for all ranks.
    pub(super) fn give(&mut self, place: Place) {
        self.places.push_back(place);
    }

    /// Notes that a rank has admitted the request that has its next place, or will never admit it. Forgets the places
    /// that every rank has passed.
    pub(super) fn pass(&mut self, rank: usize) {
        if self.next(rank).is_some()
            && let Some(passed) = self.passed.get_mut(rank)
        {
            *passed += 1;
        }
        while self.passed.iter().all(|passed| *passed > self.passed_by_all)
            && self.places.pop_front().is_some()
        {
            self.passed_by_all += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(number: u64) -> Place {
        Place { room: Room::Number(number), number }
    }

    #[test]
    fn each_rank_goes_through_the_same_places_which_are_kept_for_the_slowest() {
        let mut order = Order::new(3);
        order.pass(0);
        assert_eq!(order.next(0), None, "nobody has the place");
        for number in 1..=3 {
            order.give(place(number));
        }
        let all = |order: &mut Order, rank| {
            std::iter::from_fn(|| {
                let next = order.next(rank).map(|place| place.number);
                order.pass(rank);
                next
            })
            .collect::<Vec<_>>()
        };
        assert_eq!(all(&mut order, 0), [1, 2, 3]);
        assert_eq!([0, 1, 2].map(|rank| order.is_behind(rank)), [false, true, true]);
        order.pass(1);
        assert_eq!(order.places.len(), 3, "rank 2 has passed none");
        order.pass(2);
        assert_eq!((order.places.len(), order.next(2)), (2, Some(&place(2))));
        order.give(place(4));
        assert_eq!([0, 1, 2].map(|rank| all(&mut order, rank)), [vec![4], vec![2, 3, 4], vec![2, 3, 4]]);
        assert!(order.places.is_empty());
        assert_eq!([0, 1, 2].map(|rank| order.is_behind(rank)), [false; 3]);
    }
}
