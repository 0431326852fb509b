//! The shapes in which vLLM is met: the size of its cache, and which requests come at once.
//!
//! `KV_VLLM_SHAPES` replaces the table, for example by `6x2x120:1x1,10x4,3x7 2x1x64:1+5+2x9`: layers, heads
//! and blocks, and then runs, each of requests that come at once. A run is a sum of blocks of a request, or
//! of so many requests with so many blocks each. `KV_VLLM_SEED` chooses the blocks.

use std::env;
use std::str::FromStr;

const TABLE: &str = "4x1x200:1+2x4+16+1+2+3+30+2x1 6x2x120:1x1,10x4,3x7 2x3x57:5x1,1x40 1x8x300:32x3,2x70+1";

/// Tokens of a block.
pub const BLOCK_TOKENS: usize = 16;
/// Elements of a head, and bytes of an element.
const HEAD: usize = 128 * 2;

/// A KV cache of vLLM, which has a region for each layer, in which blocks lie one after the other; and the
/// requests that are to be read from it.
#[derive(Debug, Clone)]
pub struct Shape {
    pub layers: usize,
    pub heads: usize,
    pub blocks: usize,
    /// Of each run the blocks of each of its requests.
    pub runs: Vec<Vec<usize>>,
}

impl Shape {
    /// Those of the environment, or of the table.
    pub fn all() -> Vec<Shape> {
        let text = env::var("KV_VLLM_SHAPES").unwrap_or_else(|_| TABLE.to_owned());
        text.split_whitespace().map(Shape::parse).collect()
    }

    fn parse(text: &str) -> Shape {
        let (cache, runs) = text.split_once(':').unwrap_or_else(|| panic!("{text}: no runs"));
        let [layers, heads, blocks] = numbers(cache)[..] else { panic!("{cache}: layers x heads x blocks") };
        let requests = |part: &str| match numbers(part)[..] {
            [blocks] => vec![blocks],
            [count, blocks] => vec![blocks; count],
            _ => panic!("{part}: requests x blocks"),
        };
        let runs: Vec<Vec<usize>> =
            runs.split(',').map(|run| run.split('+').flat_map(requests).collect()).collect();
        // vLLM's block 0 is nobody's, and one is for what is spoiled.
        assert!(runs.iter().all(|run| run.iter().sum::<usize>() + 2 <= blocks), "{text}: too few blocks");
        Shape { layers, heads, blocks, runs }
    }

    /// Keys and values of one block in one region.
    pub fn block_bytes(&self) -> usize {
        BLOCK_TOKENS * 2 * self.heads * HEAD
    }

    /// Where a block of a region lies in our pool.
    pub fn offset(&self, region: usize, block: usize) -> usize {
        (region * self.blocks + block) * self.block_bytes()
    }

    /// The fill by which the driver and these tests know every block of every region.
    pub fn block(&self, region: usize, block: usize) -> Vec<u8> {
        let constant = ((block as u32) << 8).wrapping_add(region as u32 + 977);
        let word = |at: u32| at.wrapping_mul(2_654_435_761).wrapping_add(constant);
        (0..self.block_bytes() as u32 / 4).flat_map(|at| word(at).to_le_bytes()).collect()
    }

    /// The cache's blocks but the first one, in an order of chance.
    pub fn shuffled(&self, seed: &mut Seed) -> Vec<usize> {
        let mut blocks: Vec<usize> = (1..self.blocks).collect();
        for last in (1..blocks.len()).rev() {
            blocks.swap(last, seed.below(last + 1));
        }
        blocks
    }
}

fn numbers(text: &str) -> Vec<usize> {
    let number = |part: &str| usize::from_str(part).unwrap_or_else(|error| panic!("{text}: {error}"));
    text.split('x').map(number).collect()
}

/// Numbers of chance, the same for the same seed.
pub struct Seed(u64);

impl Seed {
    /// That of the environment, or any.
    pub fn any() -> Seed {
        let given = env::var("KV_VLLM_SEED").ok().map(|seed| seed.parse().unwrap());
        let seed = given.unwrap_or_else(|| u64::from_le_bytes(kv_host::random().unwrap()));
        println!("KV_VLLM_SEED={seed}");
        Seed(seed | 1)
    }

    pub fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % most as u64) as usize
    }
}
