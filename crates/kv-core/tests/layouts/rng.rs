//! Random numbers that a seed repeats.

use kv_core::random::SplitMix64;

pub struct Rng(SplitMix64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(SplitMix64::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d)))
    }

    pub fn next(&mut self) -> u64 {
        self.0.bits()
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// True once in `times`.
    pub fn chance(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }

    pub fn shuffled<T>(&mut self, mut items: Vec<T>) -> Vec<T> {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end + 1));
        }
        items
    }

    /// `count` distinct pages of `all`: random, or as runs.
    pub fn pages(&mut self, all: u32, count: usize) -> Vec<u32> {
        let start = self.below(all as usize - count + 1) as u32;
        match self.below(3) {
            0 => (start..start + count as u32).collect(),
            1 => {
                let mut pages = self.shuffled((0..all).collect::<Vec<_>>());
                pages.truncate(count);
                pages
            }
            _ => {
                let blocks = self.shuffled((0..all.div_ceil(2)).collect::<Vec<_>>());
                let pages = blocks.into_iter().flat_map(|block| [2 * block, 2 * block + 1]);
                pages.filter(|page| *page < all).take(count).collect()
            }
        }
    }
}
