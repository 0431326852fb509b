//! Reproducible random numbers: SplitMix64.

/// A small generator. The same seed gives the same numbers in every process.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator for `seed`.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// A generator for the thing called `name` under `seed`: independent of the order in which
    /// things are made.
    pub fn named(seed: u64, name: &str) -> Rng {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut rng = Rng(seed ^ hash);
        Rng(rng.next_u64())
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number below `bound`, which must not be zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The high half of a 128-bit product: unbiased enough for prompts.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in [-1, 1).
    pub fn symmetric(&mut self) -> f32 {
        // 24 bits, the mantissa of an f32.
        (self.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
