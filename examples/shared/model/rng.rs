//! Random numbers that a seed repeats.

use kv_transfer::unstable::hash::Fnv1a;
use kv_transfer::unstable::random::SplitMix64;

/// A small generator of random numbers. The same seed gives the same numbers in every process.
#[derive(Debug, Clone)]
pub struct Rng(SplitMix64);

impl Rng {
    /// A generator for a seed.
    pub fn new(seed: u64) -> Rng {
        Rng(SplitMix64::new(seed))
    }

    /// A generator for the thing called `name` under `seed`: independent of the order in which
    /// things are made.
    pub fn named(seed: u64, name: &str) -> Rng {
        let mut rng = Rng::new(seed ^ Fnv1a::of(name.as_bytes()));
        Rng::new(rng.next_u64())
    }

    /// A random number of 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0.bits()
    }

    /// A number below `bound`, which must not be zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The high half of a 128-bit product: unbiased enough for prompts.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A random number from -1 up to, but not including, 1.
    pub fn symmetric(&mut self) -> f32 {
        // 24 bits, the mantissa of an f32.
        (self.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
