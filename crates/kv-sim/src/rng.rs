//! The only source of chance in a simulated world.

use kv_core::random::SplitMix64;

/// A seeded generator, and how a world draws from it.
///
/// All draws are integer arithmetic, so that a seed replays on every machine.
#[derive(Debug, Clone)]
pub struct Rng {
    numbers: SplitMix64,
    /// True if nothing is drawn: each draw then gives the least of its possible results.
    still: bool,
}

impl Rng {
    /// A generator; equal seeds give equal streams.
    pub fn new(seed: u64) -> Rng {
        Rng { numbers: SplitMix64::new(seed), still: false }
    }

    /// A generator for a world in which nothing is drawn: no chance comes true, every number is the least
    /// one, every order stays as it is.
    pub fn still() -> Rng {
        Rng { numbers: SplitMix64::new(0), still: true }
    }

    /// A random number of 64 bits.
    pub fn bits(&mut self) -> u64 {
        if self.still {
            return 0;
        }
        self.numbers.bits()
    }

    /// A number below `bound`; zero if `bound` is zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        let wide = u128::from(self.bits()) * u128::from(bound);
        (wide >> 64) as u64
    }

    /// An index below `bound`; zero if `bound` is zero.
    pub fn index(&mut self, bound: usize) -> usize {
        self.below(bound as u64) as usize
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// True in `permille` of 1000 cases.
    pub fn chance(&mut self, permille: u32) -> bool {
        permille > 0 && !self.still && self.below(1000) < u64::from(permille)
    }

    /// A positive number around `base` with a heavy tail: a quarter of the draws is multiplied by
    /// four, a quarter of those again, up to `max`.
    pub fn tail(&mut self, base: u64, max: u64) -> u64 {
        let mut value = 1 + self.below(base.max(1));
        while value < max && !self.still && self.below(4) == 0 {
            value = value.saturating_mul(4);
        }
        value.min(max.max(1))
    }

    /// One of the choices, which must not be empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())]
    }

    /// Puts the items into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        let ends = if self.still { 0..0 } else { 1..items.len() };
        for last in ends.rev() {
            items.swap(last, self.index(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_stay_in_their_bounds() {
        let mut rng = Rng::new(7);
        for _ in 0..10_000 {
            assert!(rng.below(13) < 13);
            assert!((5..=9).contains(&rng.between(5, 9)));
            assert!((1..=1000).contains(&rng.tail(10, 1000)));
        }
        assert_eq!(rng.below(0), 0);
        assert!(!rng.chance(0) && rng.chance(1000));
    }

    #[test]
    fn a_still_generator_gives_the_first_of_everything() {
        let mut rng = Rng::still();
        let mut items = [1, 2, 3];
        rng.shuffle(&mut items);
        assert_eq!(items, [1, 2, 3]);
        assert_eq!((rng.below(9), rng.between(5, 9), rng.tail(10, 1000)), (0, 5, 1));
        assert!(!rng.chance(1000));
    }

    #[test]
    fn a_shuffle_keeps_every_item() {
        let mut items: Vec<u32> = (0..100).collect();
        Rng::new(1).shuffle(&mut items);
        assert_ne!(items, (0..100).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
    }
}
