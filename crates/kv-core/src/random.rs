//! The one small random generator of this workspace. Its numbers follow from a seed, and can be
//! guessed: it must not be used for secrets.

/// SplitMix64 (Steele, Lea and Flood 2014): one word of state, and every seed is a good seed. Equal seeds
/// give equal numbers on every machine.
#[derive(Debug, Clone)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// A generator that starts from this seed.
    pub const fn new(seed: u64) -> SplitMix64 {
        SplitMix64(seed)
    }

    /// The next 64 random bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// The next number below `bound`; zero if `bound` is zero. Every number is equally likely, up
    /// to one part in 2^64 / `bound`.
    pub const fn below(&mut self, bound: u64) -> u64 {
        let bits = self.bits();
        if bound == 0 { 0 } else { bits % bound }
    }
}

/// The output function of [`SplitMix64`]: a good hash of one word.
pub const fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_published_numbers() {
        let mut random = SplitMix64::new(1_234_567);
        let first = [(); 3].map(|()| random.bits());
        assert_eq!(first, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
        assert_eq!(random.below(0), 0);
    }
}
