//! The most expensive cases. Each kind of input has places of its own, so that no kind hides another; other
//! places are for all kinds.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::machine::{Charge, Outcome};

/// How many of the dearest cases of all are kept.
const OF_ALL: usize = 100;
/// How many of each kind of input.
const OF_KIND: usize = 10;

/// A case, and its most expensive input, of all kinds or of one kind.
#[derive(Debug, Clone)]
pub struct Dear {
    /// The input and its cost.
    pub charge: Charge,
    /// The bytes of the case.
    pub case: Arc<[u8]>,
}

/// The most expensive cases, the most expensive first. Cases with equal costs share one place.
#[derive(Debug, Clone, Default)]
pub struct Worst {
    all: Vec<Dear>,
    kinds: BTreeMap<&'static str, Vec<Dear>>,
}

impl Worst {
    /// The most expensive cases over all kinds of inputs.
    pub fn all(&self) -> &[Dear] {
        &self.all
    }

    /// The dearest inputs of each kind.
    pub fn kinds(&self) -> impl Iterator<Item = &[Dear]> {
        self.kinds.values().map(Vec::as_slice)
    }

    /// Enters a case. True if it has got a place.
    pub fn enter(&mut self, case: &[u8], outcome: &Outcome) -> bool {
        let case: Arc<[u8]> = case.into();
        let dear = |charge| Dear { charge, case: case.clone() };
        let mut placed = place(&mut self.all, OF_ALL, dear(outcome.worst()));
        for (&kind, &charge) in &outcome.dearest {
            placed |= place(self.kinds.entry(kind).or_default(), OF_KIND, dear(charge));
        }
        placed
    }

    /// Enters the cases that another thread has found.
    pub fn join(&mut self, other: Worst) {
        for dear in other.all {
            place(&mut self.all, OF_ALL, dear);
        }
        for (kind, dears) in other.kinds {
            for dear in dears {
                place(self.kinds.entry(kind).or_default(), OF_KIND, dear);
            }
        }
    }
}

fn place(places: &mut Vec<Dear>, most: usize, dear: Dear) -> bool {
    let share = dear.charge.share();
    let at = places.partition_point(|other| other.charge.share() >= share);
    if at >= most || places.iter().take(at).rev().any(|other| other.charge == dear.charge) {
        return false;
    }
    places.insert(at, dear);
    places.truncate(most);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Cost;

    fn charge(what: &'static str, steps: u64) -> Charge {
        Charge { what, cost: Cost { steps, ..Cost::default() }, ..Charge::default() }
    }

    #[test]
    fn no_kind_of_input_hides_another_and_equal_costs_have_one_place() {
        let mut worst = Worst::default();
        for steps in (1..=300).chain(1..=300) {
            let charges = [charge("dear", 1000 + steps), charge("cheap", steps)];
            let dearest = charges.into_iter().map(|charge| (charge.what, charge)).collect();
            worst.enter(&[steps as u8], &Outcome { dearest, ..Outcome::default() });
        }
        let steps = |dears: &[Dear]| dears.iter().map(|dear| dear.charge.cost.steps).collect::<Vec<_>>();
        assert_eq!(steps(worst.all()), (1201..=1300).rev().collect::<Vec<_>>());
        let kinds: Vec<Vec<u64>> = worst.kinds().map(steps).collect();
        assert_eq!(kinds, [(291..=300).rev().collect::<Vec<_>>(), (1291..=1300).rev().collect()]);
        let mut joined = Worst::default();
        joined
            .enter(&[], &Outcome { dearest: [("dear", charge("dear", 5000))].into(), ..Outcome::default() });
        joined.join(worst);
        assert_eq!(steps(joined.all()).into_iter().take(2).collect::<Vec<_>>(), [5000, 1300]);
    }
}
