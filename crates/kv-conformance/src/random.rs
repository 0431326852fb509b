//! [`Random`]: random choices that can be repeated with their seed.

use std::time::SystemTime;

use kv_core::random::SplitMix64;

/// A small random number generator. The same seed makes the same choices.
#[derive(Debug)]
pub struct Random(SplitMix64);

impl Random {
    /// A generator with a new seed, or with the seed in the environment variable `SEED`. The seed is printed
    /// after `what`.
    pub fn new(what: &str) -> Random {
        let fresh = || {
            let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            clock.map_or(1, |time| time.as_nanos() as u64)
        };
        let seed = std::env::var("SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(fresh);
        println!("{what}: SEED={seed}");
        Random(SplitMix64::new(seed))
    }

    /// A number from 0 to `below` - 1.
    pub fn below(&mut self, below: usize) -> usize {
        self.0.below(below as u64) as usize
    }

    /// `len` bytes, each chosen at random.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.below(256) as u8).collect()
    }

    /// The numbers 0 to `count` - 1 in random order.
    pub fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for index in (1..count).rev() {
            order.swap(index, self.below(index + 1));
        }
        order
    }
}
