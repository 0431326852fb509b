//! Random numbers from a seed that is printed.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use kv_transfer::unstable::random::SplitMix64;

/// Random numbers from one seed.
pub struct Random(SplitMix64);

impl Random {
    /// Draws a seed and prints it; the variable `SEED` overrides it.
    pub fn new(what: &str) -> Random {
        let fresh = || RandomState::new().build_hasher().finish();
        let seed = std::env::var("SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(fresh);
        println!("{what}: SEED={seed}");
        Random(SplitMix64::new(seed))
    }

    /// Numbers from this seed, which is not printed.
    pub fn from_seed(seed: u64) -> Random {
        Random(SplitMix64::new(seed))
    }

    /// A random number.
    pub fn next(&mut self) -> u64 {
        self.0.bits()
    }

    /// A random number from 0 to `below` - 1.
    pub fn below(&mut self, below: usize) -> usize {
        self.0.below(below as u64) as usize
    }

    /// True in `percent` of 100 cases.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// A number of random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = std::iter::repeat_with(|| self.next().to_le_bytes());
        words.take(len.div_ceil(8)).flatten().take(len).collect()
    }

    /// Puts the items into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}
