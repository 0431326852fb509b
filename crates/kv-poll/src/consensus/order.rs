//! The order in which all ranks admit requests.

use std::collections::VecDeque;

use kv_core::Room;

/// One order for all ranks, in which each rank goes on at its own speed.
///
/// Ranks that admit in orders of their own can wait for each other for ever: if each has room for one request,
/// and they give it to different requests, neither request is ever complete. In one order, the first request
/// that is not over finds room on every rank: what lies before it is over, and nothing behind it is admitted
/// before it.
#[derive(Debug)]
pub(super) struct Order {
    /// The places that not every rank has passed.
    places: VecDeque<Place>,
    /// How many places all ranks have passed.
    passed_by_all: u64,
    /// For each rank, how many places it has passed; `None` for a rank that is gone.
    passed: Box<[Option<u64>]>,
}

/// Who has a place: the request with this room and this number. A later request in the same room has another number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) room: Room,
    pub(super) number: u64,
}

impl Order {
    pub(super) fn new(ranks: usize) -> Order {
        Order { places: VecDeque::new(), passed_by_all: 0, passed: vec![Some(0); ranks].into() }
    }

    /// The place that is next for a rank; `None` if no rank has given it to a request.
    pub(super) fn next(&self, rank: usize) -> Option<&Place> {
        let passed = (*self.passed.get(rank)?)?;
        self.places.get(usize::try_from(passed - self.passed_by_all).ok()?)
    }

    /// Gives the next place to a request, for all ranks.
    pub(super) fn give(&mut self, place: Place) {
        self.places.push_back(place);
    }

    /// Notes that a rank has admitted the request that had its next place, or that the request is over.
    pub(super) fn pass(&mut self, rank: usize) {
        if self.next(rank).is_some()
            && let Some(Some(passed)) = self.passed.get_mut(rank)
        {
            *passed += 1;
            self.forget();
        }
    }

    /// Notes that a rank is gone.
    pub(super) fn leave(&mut self, rank: usize) {
        if let Some(passed) = self.passed.get_mut(rank) {
            *passed = None;
            self.forget();
        }
    }

    /// Forgets the places that every rank has passed.
    fn forget(&mut self) {
        let end = self.passed_by_all + self.places.len() as u64;
        let slowest = self.passed.iter().flatten().min().copied().unwrap_or(end);
        self.places.drain(..usize::try_from(slowest - self.passed_by_all).unwrap_or_default());
        self.passed_by_all = slowest;
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
        order.pass(1);
        assert_eq!(order.places.len(), 3, "rank 2 has passed none");
        order.leave(2);
        assert_eq!((order.places.len(), order.next(2)), (2, None));
        order.give(place(4));
        assert_eq!([all(&mut order, 0), all(&mut order, 1)], [vec![4], vec![2, 3, 4]]);
        assert!(order.places.is_empty());
        order.leave(0);
        order.leave(1);
        order.give(place(5));
        order.leave(1);
        assert!(order.places.is_empty(), "nobody is left to keep places for");
    }
}
