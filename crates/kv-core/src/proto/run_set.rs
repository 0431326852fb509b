//! A set of numbers, stored as runs.

use crate::meter::{each, step};
use std::collections::BTreeMap;

/// Most runs of attempts in one frame.
pub(super) const MAX_RUNS: usize = 1 << 16;

/// Splits these runs into lists that fit a frame.
pub(super) fn frames(runs: Vec<(u64, u32)>) -> impl Iterator<Item = Vec<(u64, u32)>> {
    let mut left = Some(runs);
    each(std::iter::from_fn(move || {
        let mut list = left.take()?;
        if list.len() > MAX_RUNS {
            left = Some(list.split_off(MAX_RUNS));
        }
        Some(list)
    }))
}

/// A set of `u64`, stored as disjoint runs that do not touch: small if the set has few gaps.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct RunSet {
    /// The lowest run, as its first number and the first number after it: most sets have one run, and allocate nothing.
    /// (0, 0) if the set is empty.
    low: (u64, u64),
    /// First number of each other run → first number after it.
    others: BTreeMap<u64, u64>,
    len: u64,
}

impl RunSet {
    /// Adds `count` numbers from `start` on. Numbers above `u64::MAX` are left out.
    pub(super) fn insert(&mut self, start: u64, count: u64) {
        let (mut start, mut end) = (start, start.saturating_add(count));
        if start == end {
            return;
        }
        // Swallow every run that touches [start, end).
        while let Some((run_start, run_end)) = self.last_from(end) {
            step(1);
            if run_end < start {
                break;
            }
            start = start.min(run_start);
            end = end.max(run_end);
            self.remove(run_start);
            self.len -= run_end - run_start;
        }
        self.len += end - start;
        if self.has_low() && self.low.0 < start {
            self.others.insert(start, end);
        } else {
            let above = std::mem::replace(&mut self.low, (start, end));
            if above != (0, 0) {
                self.others.insert(above.0, above.1);
            }
        }
    }

    fn has_low(&self) -> bool {
        self.low != (0, 0)
    }

    /// The last run that begins at `number` or before.
    fn last_from(&self, number: u64) -> Option<(u64, u64)> {
        let other = self.others.range(..=number).next_back().map(|(&start, &end)| (start, end));
        other.or_else(|| Some(self.low).filter(|low| self.has_low() && low.0 <= number))
    }

    /// Takes the run that begins with `start` out of the set.
    fn remove(&mut self, start: u64) {
        if self.low.0 == start {
            self.low = self.others.pop_first().unwrap_or_default();
        } else {
            self.others.remove(&start);
        }
    }

    /// True if `number` is in the set.
    pub(super) fn contains(&self, number: u64) -> bool {
        self.last_from(number).is_some_and(|(_, end)| number < end)
    }

    /// True if the number is in the set or next to a number of the set: adding the number makes no
    /// new run.
    pub(super) fn touches(&self, number: u64) -> bool {
        self.last_from(number.saturating_add(1)).is_some_and(|(_, end)| number <= end)
    }

    /// A run of the set that shares a number with `range`; the last such run if there are several.
    pub(super) fn shared(&self, range: std::ops::Range<u64>) -> Option<std::ops::Range<u64>> {
        let (start, end) = self.last_from(range.end.checked_sub(1)?)?;
        (range.start < end && !range.is_empty()).then_some(start..end)
    }

    /// Removes all numbers below `low_watermark`.
    pub(super) fn forget_below(&mut self, low_watermark: u64) {
        while self.has_low() && self.low.0 < low_watermark {
            step(1);
            let (start, end) = self.low;
            self.len -= low_watermark.min(end) - start;
            if end > low_watermark {
                self.low.0 = low_watermark;
            } else {
                self.remove(start);
            }
        }
    }

    /// How many numbers the set has.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// The number after the largest one in the set; 0 for an empty set.
    pub(super) fn end(&self) -> u64 {
        self.others.last_key_value().map_or(self.low.1, |(_, &end)| end)
    }

    /// How many runs the set has.
    pub(super) fn runs_len(&self) -> usize {
        usize::from(self.has_low()) + self.others.len()
    }

    /// The runs, as (first, length).
    pub(super) fn runs(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let low = self.has_low().then_some(self.low);
        let others = self.others.iter().map(|(&start, &end)| (start, end));
        each(low.into_iter().chain(others)).map(|(start, end)| (start, end - start))
    }
}

/// Appends a number to runs (first, length). The number must be above all others.
pub(super) fn append(runs: &mut Vec<(u64, u32)>, number: u64) {
    match runs.last_mut() {
        Some((first, count)) if *first + u64::from(*count) == number => *count += 1,
        _ => runs.push((number, 1)),
    }
}

/// True if the runs rise and do not overlap. Then a frame names no attempt twice, and its cost is
/// bounded by the number of attempts.
pub(super) fn is_rising(runs: &[(u64, u32)]) -> bool {
    let mut next = 0;
    each(runs).all(|&(start, count)| {
        let fits = start >= next && count > 0;
        next = start.saturating_add(u64::from(count));
        fits
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_a_set_of_numbers(
            steps in prop::collection::vec((0u64..60, 0u64..8, 0u64..70, any::<bool>()), 0..40),
        ) {
            let mut runs = RunSet::default();
            let mut model = BTreeSet::new();
            for (start, count, low_watermark, forget) in steps {
                runs.insert(start, count);
                model.extend(start..start + count);
                if forget && low_watermark < 30 {
                    runs.forget_below(low_watermark);
                    model.retain(|&number| number >= low_watermark);
                }
                prop_assert_eq!(runs.len(), model.len() as u64);
                let listed: BTreeSet<u64> = runs.runs().flat_map(|(start, count)| start..start + count).collect();
                prop_assert_eq!(&listed, &model);
                for number in 0..80 {
                    prop_assert_eq!(runs.contains(number), model.contains(&number));
                }
                let mut pairs = runs.runs().zip(runs.runs().skip(1));
                prop_assert!(pairs.all(|((start, count), (next, _))| start + count < next), "runs touch or overlap: {:?}", runs);
                prop_assert_eq!(runs.runs().count(), runs.runs_len());
                prop_assert_eq!(runs.end(), model.last().map_or(0, |last| last + 1));
                for number in 0_u64..80 {
                    let near = [number.saturating_sub(1), number, number + 1].iter().any(|near| model.contains(near));
                    prop_assert_eq!(runs.touches(number), near, "{} {:?}", number, runs);
                    let shared = runs.shared(number..number + 4);
                    let shares = (number..number + 4).any(|number| model.contains(&number));
                    prop_assert_eq!(shared.is_some(), shares);
                    prop_assert!(shared.is_none_or(|run| run.clone().all(|number| model.contains(&number))));
                }
            }
        }
    }

    #[test]
    fn runs_with_huge_numbers_saturate_instead_of_overflowing() {
        let mut runs = RunSet::default();
        runs.insert(u64::MAX - 1, 10);
        assert!(runs.contains(u64::MAX - 1));
        assert_eq!(runs.len(), 1);
    }
}
