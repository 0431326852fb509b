//! [`Random`]: random choices that can be repeated with their seed.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use kv_core::random::SplitMix64;

/// Random numbers from one seed. The same seed makes the same choices.
#[derive(Debug)]
pub struct Random(SplitMix64);

impl Random {
    /// A generator with a new seed, or with the seed in the environment variable `SEED`. The seed is printed
    /// after `what`.
    pub fn new(what: &str) -> Random {
        let fresh = || RandomState::new().build_hasher().finish();
        let seed = std::env::var("SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(fresh);
        println!("{what}: SEED={seed}");
        Random::from_seed(seed)
    }

    /// A generator with this seed, which is not printed.
    pub fn from_seed(seed: u64) -> Random {
        Random(SplitMix64::new(seed))
    }

    /// A random number of 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0.bits()
    }

    /// A number from 0 to `below` - 1.
    pub fn below(&mut self, below: usize) -> usize {
        self.0.below(below as u64) as usize
    }

    /// True in `percent` of 100 cases.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// `len` bytes, each chosen at random.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = std::iter::repeat_with(|| self.bits().to_le_bytes());
        words.take(len.div_ceil(8)).flatten().take(len).collect()
    }

    /// Puts the items into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    /// The numbers 0 to `count` - 1 in random order.
    pub fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        self.shuffle(&mut order);
        order
    }
}
