//! The order in which the blocks of a cache are given to requests.

/// Blocks of a cache, from the second one on, each of them once: vLLM gives its first block to nobody.
pub struct Order {
    blocks: std::vec::IntoIter<u32>,
}

impl Order {
    /// The blocks in their own order, or in an order of chance by this seed.
    pub fn new(blocks: usize, seed: Option<u64>) -> Order {
        let mut order: Vec<u32> = (1..blocks as u32).collect();
        if let Some(seed) = seed {
            let mut state = seed | 1;
            for last in (1..order.len()).rev() {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                order.swap(last, (state % (last as u64 + 1)) as usize);
            }
        }
        Order { blocks: order.into_iter() }
    }

    /// The next blocks; fewer if no more are left.
    pub fn take(&mut self, count: usize) -> Vec<u32> {
        self.blocks.by_ref().take(count).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_but_the_first_is_given_once_in_an_order_that_the_seed_says() {
        let taken = |seed| Order::new(50, seed).take(100);
        let sorted = |seed| {
            let mut blocks = taken(seed);
            blocks.sort_unstable();
            blocks
        };
        assert_eq!(taken(None), (1..50).collect::<Vec<u32>>());
        assert_eq!(sorted(Some(7)), taken(None));
        assert_eq!(taken(Some(7)), taken(Some(7)));
        assert_ne!(taken(Some(7)), taken(Some(1000)));
    }
}
