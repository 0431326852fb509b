//! The KV cache of an engine, in blocks, as vllm.rs holds it: for each layer a tensor of keys and one of values, each
//! `[blocks, block, heads, head_dim]`. The "model" of this example computes KV that is a function of the tokens alone,
//! so that every byte can be checked on either side.
use kv_examples::cli::TransportKind;
use kv_examples::transport::Memory;
use kv_transfer::layout::Holds;
use kv_transfer::queue::{AuxLayout, AuxRow};
use kv_transfer::unstable::random::mix;
use kv_transfer::{AuxIndex, KvArgsBuilder, PageList, Pages, Parallel, Region, RegionRole, Room};
use serde::{Deserialize, Serialize};

use super::Outcome;

/// Bytes of an element: bf16.
const ELEMENT: usize = 2;
/// The aux rows have room for the first token and the number of cached tokens. There are as many rows as blocks.
const ROWS: AuxLayout = AuxLayout { logprobs: 0, top_logprobs: 0, hidden_bytes: 0 };
const ROW: usize = ROWS.row_len() as usize;
/// Odd, and with bits all over: 2⁶⁴ divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The sizes of a model's KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Tokens of a block.
    pub block: usize,
}

impl Shape {
    /// Qwen3-8B: 147 456 bytes of KV for each token.
    pub const QWEN3_8B: Shape = Shape { layers: 36, kv_heads: 8, head_dim: 128, block: 64 };
    /// 2 KiB of KV for each token.
    pub const SMALL: Shape = Shape { layers: 4, kv_heads: 4, head_dim: 32, block: 64 };

    /// Bytes of KV of a token.
    pub fn token_bytes(self) -> usize {
        2 * self.layers * self.kv_heads * self.head_dim * ELEMENT
    }
}

/// What tells the KV of a position: a hash of all tokens up to it.
pub fn keys(tokens: &[u32]) -> Vec<u64> {
    let chain = |key: &mut u64, token: &u32| {
        *key = mix(*key ^ u64::from(*token));
        Some(*key)
    };
    tokens.iter().scan(1, chain).collect()
}

/// The first eight bytes of the KV of a position in one layer (`part` 0: key, 1: value) and head.
fn word(key: u64, layer: usize, part: usize, head: usize) -> u64 {
    mix(key ^ ((layer as u64) << 40 | (part as u64) << 32 | head as u64))
}

/// The next token: a function of the KV of the first position of every block, in one tensor.
fn next_token(step: usize, words: impl Iterator<Item = u64>) -> u32 {
    (words.fold(step as u64, |sum, word| mix(sum ^ word)) % 50_000) as u32
}

/// The answer of `count` tokens that a prompt has, computed without any cache.
pub fn answer(shape: Shape, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    while tokens.len() < prompt.len() + count {
        let (step, keys) = (tokens.len(), keys(&tokens));
        let words = keys.iter().step_by(shape.block).map(|key| word(*key, step % shape.layers, step % 2, 0));
        tokens.push(next_token(step, words));
    }
    tokens.split_off(prompt.len())
}

/// The cache of one engine: the memory of each of its tensor-parallel ranks.
pub struct KvCache {
    pub shape: Shape,
    pub blocks: u32,
    ranks: Vec<Memory>,
    name: String,
}

impl KvCache {
    /// Allocates the cache of an engine of `tp` ranks. Two engines move KV if their models have the same `name`.
    pub fn new(shape: Shape, blocks: u32, tp: usize, name: &str, kind: TransportKind) -> Outcome<KvCache> {
        let mut cache = KvCache { shape, blocks, ranks: Vec::new(), name: name.to_owned() };
        let len = shape.token_bytes() / tp * shape.block * blocks as usize + ROW * blocks as usize;
        for _ in 0..tp {
            cache.ranks.push(Memory::new(kind, len)?);
        }
        Ok(cache)
    }

    /// The memory of each rank.
    pub fn ranks(&self) -> &[Memory] {
        &self.ranks
    }

    /// How many blocks hold this many tokens.
    pub fn blocks_of(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.shape.block)
    }

    /// Describes the cache of a rank: this is all that a server has to say about its tensors.
    pub fn describe(&self, rank: usize, args: KvArgsBuilder) -> KvArgsBuilder {
        let Shape { layers, head_dim, block, .. } = self.shape;
        let (addr, tp) = (self.ranks[rank].addr(), self.ranks.len() as u32);
        let (tensor, item) = (self.tensor_bytes() as u64, self.item() as u64);
        let mut args = args.model(&self.name).dtype("bf16").pages(self.blocks, block as u32);
        args = args.heads(self.heads() as u32, head_dim as u32);
        args = args.parallel(Parallel::default().with(|p| (p.tp_size, p.tp_rank) = (tp, rank as u32)));
        for layer in 0..layers {
            for (part, holds) in [(0, Holds::Key), (1, Holds::Value)] {
                let addr = addr + self.tensor(layer, part) as u64;
                let region = Region::dram(RegionRole::Kv, addr, tensor, item);
                args = args.region(region.layer(layer as u32).holds(holds));
            }
        }
        let rows = addr + self.tensor(layers, 0) as u64;
        args.region(Region::dram(RegionRole::Aux, rows, (ROW * self.blocks as usize) as u64, ROW as u64))
    }

    /// Writes the aux row of a room's request, for each rank.
    pub fn write_row(&self, row: AuxIndex, room: &Room, content: &AuxRow) -> Outcome<()> {
        let mut bytes = [0; ROW];
        content.encode(&ROWS, room, &mut bytes)?;
        for memory in &self.ranks {
            memory.write(self.tensor(self.shape.layers, 0) + row.0 as usize * ROW, &bytes)?;
        }
        Ok(())
    }

    /// Reads the aux row of a room's request. A row of another request, or a damaged one, is an error.
    pub fn read_row(&self, row: AuxIndex, room: &Room) -> Outcome<AuxRow> {
        let mut bytes = [0; ROW];
        self.ranks[0].read(self.tensor(self.shape.layers, 0) + row.0 as usize * ROW, &mut bytes)?;
        Ok(AuxRow::decode(&ROWS, room, &bytes)?)
    }

    /// Computes the KV of the positions from `from` on, in the blocks of a sequence.
    pub fn compute(&self, pages: &Pages, keys: &[u64], from: usize) -> Outcome<()> {
        let mut bytes = Vec::new();
        self.each_piece(pages, keys, from, |memory, offset, len, fill| {
            bytes.resize(len, 0);
            fill(&mut bytes);
            Ok(memory.write(offset, &bytes)?)
        })
    }

    /// Compares every byte of KV of a sequence with what the model computes. The error says what is wrong.
    pub fn check(&self, pages: &Pages, keys: &[u64]) -> Outcome<()> {
        let (mut bytes, mut expected) = (Vec::new(), Vec::new());
        self.each_piece(pages, keys, 0, |memory, offset, len, fill| {
            bytes.resize(len, 0);
            expected.resize(len, 0);
            memory.read(offset, &mut bytes)?;
            fill(&mut expected);
            match bytes == expected {
                true => Ok(()),
                false => Err(format!("the KV at offset {offset} of a rank is not that of the prompt").into()),
            }
        })
    }

    /// The next token of a sequence, as its KV in the cache tells.
    pub fn next_token(&self, pages: &Pages, tokens: usize) -> Outcome<u32> {
        let tensor = self.tensor(tokens % self.shape.layers, tokens % 2);
        let mut words = Vec::new();
        for page in pages.list().iter().take(self.blocks_of(tokens)) {
            let mut bytes = [0; 8];
            self.ranks[0].read(tensor + page as usize * self.item(), &mut bytes)?;
            words.push(u64::from_le_bytes(bytes));
        }
        Ok(next_token(tokens, words.into_iter()))
    }

    /// Copies the first blocks of one sequence to those of another: a hit of the prefix cache.
    pub fn copy_blocks(&self, from: &PageList, to: &Pages, blocks: usize) -> Outcome<()> {
        let mut block = vec![0; self.item()];
        for (from, to) in from.iter().zip(to.list().iter()).take(blocks) {
            self.each_item(|memory, tensor| {
                memory.read(tensor + from as usize * self.item(), &mut block)?;
                Ok(memory.write(tensor + to as usize * self.item(), &block)?)
            })?;
        }
        Ok(())
    }

    /// The bytes of one tensor's blocks, one after the other, over all ranks.
    pub fn gather(&self, pages: &Pages, layer: usize, part: usize) -> Outcome<Vec<u8>> {
        let mut bytes = vec![0; pages.len() * self.item() * self.ranks.len()];
        let mut rest = bytes.chunks_exact_mut(self.item());
        for memory in &self.ranks {
            for (page, block) in pages.list().iter().zip(&mut rest) {
                memory.read(self.tensor(layer, part) + page as usize * self.item(), block)?;
            }
        }
        Ok(bytes)
    }

    /// Puts the bytes of [`gather`](KvCache::gather) into the blocks of a sequence.
    pub fn scatter(&self, pages: &Pages, layer: usize, part: usize, bytes: &[u8]) -> Outcome<()> {
        let mut rest = bytes.chunks_exact(self.item());
        for memory in &self.ranks {
            for (page, block) in pages.list().iter().zip(&mut rest) {
                memory.write(self.tensor(layer, part) + page as usize * self.item(), block)?;
            }
        }
        Ok(())
    }

    /// Calls `f` for every tensor of every rank, with its offset.
    fn each_item(&self, mut f: impl FnMut(&Memory, usize) -> Outcome<()>) -> Outcome<()> {
        for memory in &self.ranks {
            for number in 0..2 * self.shape.layers {
                f(memory, number * self.tensor_bytes())?;
            }
        }
        Ok(())
    }

    /// Calls `f` for every piece of memory that holds positions from `from` on: with its rank's memory, its offset,
    /// its length, and what fills a buffer with the bytes that belong there.
    fn each_piece(
        &self,
        pages: &Pages,
        keys: &[u64],
        from: usize,
        mut f: impl FnMut(&Memory, usize, usize, &dyn Fn(&mut [u8])) -> Outcome<()>,
    ) -> Outcome<()> {
        let (block, heads) = (self.shape.block, self.heads());
        let head_bytes = self.shape.head_dim * ELEMENT;
        for (rank, memory) in self.ranks.iter().enumerate() {
            for (number, page) in pages.list().iter().enumerate().skip(from / block) {
                let first = from.max(number * block);
                let keys = keys.get(first..keys.len().min((number + 1) * block)).unwrap_or_default();
                for (layer, part) in (0..self.shape.layers).flat_map(|layer| [(layer, 0), (layer, 1)]) {
                    let at = self.tensor(layer, part) + page as usize * self.item();
                    let offset = at + (first - number * block) * heads * head_bytes;
                    f(memory, offset, keys.len() * heads * head_bytes, &|bytes| {
                        for (token, row) in keys.iter().zip(bytes.chunks_exact_mut(heads * head_bytes)) {
                            for (head, bytes) in row.chunks_exact_mut(head_bytes).enumerate() {
                                let mut next = word(*token, layer, part, rank * heads + head);
                                for bytes in bytes.as_chunks_mut::<8>().0 {
                                    *bytes = next.to_le_bytes();
                                    next = next.wrapping_add(GOLDEN);
                                }
                            }
                        }
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Heads of a rank.
    fn heads(&self) -> usize {
        self.shape.kv_heads / self.ranks.len()
    }

    /// Bytes of a block in one tensor of a rank.
    fn item(&self) -> usize {
        self.shape.block * self.heads() * self.shape.head_dim * ELEMENT
    }

    fn tensor_bytes(&self) -> usize {
        self.item() * self.blocks as usize
    }

    /// The offset of a tensor in a rank's memory; that of the aux rows is the one after the last.
    fn tensor(&self, layer: usize, part: usize) -> usize {
        (2 * layer + part) * self.tensor_bytes()
    }
}
