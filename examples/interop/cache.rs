//! The cache of our side: its sizes, where keys and values of a token lie, and the fill by which both sides
//! of a pair know every byte.
//!
//! The fill is a rule on 32-bit words: word `w` of block `b` in region `r` is
//! `w * 2654435761 + (b << 8) + r + 977`. Regions, blocks and words are those of a rank that holds all heads.
//! A rank with a part of the heads holds the words of its heads, and a cache with other block sizes holds the
//! words of the same tokens: both follow from the place of a token's head within a block of the rule.

use std::ops::Range;

use kv_transfer::layout::{HND_PACKED, NHD};
use kv_transfer::nixl::HostMemory;
use kv_transfer::{ArgsError, Holds, KvArgs, Layout, Parallel, Region, RegionRole};

use crate::error::PairError;
use crate::options::{CacheOptions, Dialect, Mode};

/// Bytes of one element: both engines keep 16-bit numbers here.
const ELEMENT: usize = 2;
const WORD: usize = size_of::<u32>();

/// Lengths of the rows of SGLang's metadata buffers, in the order of SGLang's messages. The last one holds
/// the room of the request.
pub const AUX_ROWS: [usize; 10] = [64, 64, 64, 64, 512, 512, 64, 128, 64, 64];

/// The cache of one of our ranks.
pub struct RankCache {
    options: CacheOptions,
    memory: HostMemory,
    tp_rank: usize,
    /// The heads of the model that this rank holds.
    heads: Range<usize>,
}

/// What lies in the items of a region, and where the fill knows it: the number of the region in the rule.
struct Field {
    region: usize,
    layer: usize,
    holds: Holds,
}

/// A block of the rule, or of a rank's memory: how many heads and tokens there are.
#[derive(Clone, Copy)]
struct Block {
    heads: usize,
    tokens: usize,
}

impl RankCache {
    /// Allocates the cache of rank `tp_rank` of `options.tp`.
    pub fn new(options: &CacheOptions, tp_rank: usize) -> Result<RankCache, PairError> {
        let heads = if options.mla {
            0..1
        } else {
            let share = options.heads / options.tp;
            tp_rank * share..(tp_rank + 1) * share
        };
        let mut cache =
            RankCache { options: options.clone(), memory: HostMemory::new(WORD)?, tp_rank, heads };
        cache.memory = HostMemory::new(cache.aux_at(AUX_ROWS.len(), 0))?;
        Ok(cache)
    }

    /// The memory, for the transport.
    pub fn memory(&self) -> &HostMemory {
        &self.memory
    }

    /// The description of the rank and its cache.
    pub fn args(&self, engine: &str, mode: Mode) -> Result<KvArgs, ArgsError> {
        let CacheOptions { dialect, layers, head_dim, block, blocks, page_major, mla, tp, .. } = self.options;
        let layout = Layout::default().with(|layout| {
            layout.axes = if dialect == Dialect::Vllm && !mla { HND_PACKED } else { NHD };
            layout.total_kv_heads = if mla { 0 } else { self.options.heads as u32 };
        });
        let parallel = Parallel::default().with(|parallel| {
            (parallel.tp_size, parallel.tp_rank) = (tp as u32, self.tp_rank as u32);
        });
        let mut args = KvArgs::builder(engine, self.tp_rank as u32)
            .pages(blocks as u32, block as u32)
            .dtype(&self.options.dtype)
            .heads(self.heads.len() as u32, head_dim as u32)
            .model(&self.options.model)
            .transfer_mode(mode.into())
            .layout(layout)
            .parallel(parallel);
        let item = self.item();
        if page_major {
            let item = item * self.fields().len();
            let holds = if mla { Holds::Latent } else { Holds::KeyValue };
            let region =
                Region::dram(RegionRole::Kv, self.memory.addr(), (item * blocks) as u64, item as u64);
            args = args.region(region.layers(0..layers as u32).holds(holds));
        } else {
            for (number, field) in self.fields().iter().enumerate() {
                let addr = self.memory.addr() + self.item_at(number, 0) as u64;
                let region = Region::dram(RegionRole::Kv, addr, (item * blocks) as u64, item as u64);
                args = args.region(region.layer(field.layer as u32).holds(field.holds));
            }
        }
        if dialect == Dialect::Sglang {
            for (buffer, row) in AUX_ROWS.iter().enumerate() {
                let addr = self.memory.addr() + self.aux_at(buffer, 0) as u64;
                let len = (row * self.options.aux_rows) as u64;
                args = args.region(Region::dram(RegionRole::Aux, addr, len, *row as u64));
            }
        }
        args.build()
    }

    /// Fills every block by the rule, as a rank whose blocks have `rule_block` tokens knows it.
    pub fn fill(&self) -> Result<(), PairError> {
        let mut item = vec![0; self.item()];
        let rule_block = self.options.rule_block();
        for (number, field) in self.fields().iter().enumerate() {
            for block in 0..self.options.blocks {
                let source = |token: usize| {
                    let slot = block * self.options.block + token;
                    (slot / rule_block, slot % rule_block)
                };
                self.expected(field, source, rule_block, &mut item);
                self.memory.write(self.item_at(number, block), &item)?;
            }
        }
        Ok(())
    }

    /// Writes zeros to the KV and to the aux rows.
    pub fn clear(&self) -> Result<(), PairError> {
        let zeros = vec![0; 1 << 20];
        let len = self.aux_at(AUX_ROWS.len(), 0);
        for at in (0..len).step_by(zeros.len()) {
            self.memory.write(at, zeros.get(..zeros.len().min(len - at)).unwrap_or(&zeros))?;
        }
        Ok(())
    }

    /// How many pairs of a region and a block differ from the rule. `blocks` hold the tokens from `prefix` on
    /// of a request whose tokens a peer has in `source`, blocks of `source_block` tokens.
    pub fn wrong(
        &self,
        blocks: &[u32],
        source: &[u32],
        source_block: usize,
        prefix: usize,
    ) -> Result<usize, PairError> {
        let (mut is, mut should) = (vec![0; self.item()], vec![0; self.item()]);
        let mut wrong = 0;
        for (number, field) in self.fields().iter().enumerate() {
            for (place, block) in blocks.iter().enumerate() {
                let at = |token: usize| {
                    let token = prefix + place * self.options.block + token;
                    let block = source.get(token / source_block).copied().unwrap_or(u32::MAX);
                    (block as usize, token % source_block)
                };
                let tokens =
                    (source.len() * source_block).saturating_sub(prefix + place * self.options.block);
                self.memory.read(self.item_at(number, *block as usize), &mut is)?;
                self.expected(field, at, source_block, &mut should);
                wrong += usize::from(!self.is_equal(&is, &should, tokens.min(self.options.block)));
            }
        }
        Ok(wrong)
    }

    /// The rank's memory of `buffer` of the metadata buffers.
    pub fn write_aux(&self, buffer: usize, row: usize, bytes: &[u8]) -> Result<(), PairError> {
        Ok(self.memory.write(self.aux_at(buffer, row), bytes)?)
    }

    /// Reads the beginning of a row of `buffer` of the metadata buffers.
    pub fn read_aux(&self, buffer: usize, row: usize, out: &mut [u8]) -> Result<(), PairError> {
        Ok(self.memory.read(self.aux_at(buffer, row), out)?)
    }

    /// The fields of a block, in the order in which the fields lie in memory.
    fn fields(&self) -> Vec<Field> {
        let CacheOptions { dialect, layers, mla, page_major, .. } = self.options;
        let all = |holds, first| (0..layers).map(move |layer| Field { region: first + layer, layer, holds });
        let mut fields: Vec<Field> = match (mla, dialect) {
            (true, _) => all(Holds::Latent, 0).collect(),
            (false, Dialect::Vllm) => all(Holds::KeyValue, 0).collect(),
            (false, Dialect::Sglang) => all(Holds::Key, 0).chain(all(Holds::Value, layers)).collect(),
        };
        if page_major {
            // A region of all layers holds the keys and the values of one layer side by side.
            fields.sort_by_key(|field| field.layer);
        }
        fields
    }

    /// The item of a field as the rule has it. `source` says which block of the rule, and which token of that
    /// block, a token of the item is.
    fn expected(
        &self,
        field: &Field,
        source: impl Fn(usize) -> (usize, usize),
        source_tokens: usize,
        out: &mut [u8],
    ) {
        let total = if self.options.mla { 1 } else { self.options.heads };
        let (here, there) = (
            Block { heads: self.heads.len(), tokens: self.options.block },
            Block { heads: total, tokens: source_tokens },
        );
        for token in 0..here.tokens {
            let (block, source_token) = source(token);
            let add = ((block as u32) << 8).wrapping_add(field.region as u32 + 977);
            for (head, of_model) in self.heads.clone().enumerate() {
                let at = self.place(here, token, head);
                let first = self.place(there, source_token, of_model);
                let words = out.chunks_exact_mut(WORD).skip(at).take(self.row_words());
                for (word, bytes) in words.enumerate() {
                    let value = ((first + word) as u32).wrapping_mul(2_654_435_761).wrapping_add(add);
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
            }
        }
    }

    /// Whether the first `tokens` tokens of two items are equal.
    fn is_equal(&self, one: &[u8], other: &[u8], tokens: usize) -> bool {
        let here = Block { heads: self.heads.len(), tokens: self.options.block };
        if tokens == here.tokens {
            return one == other;
        }
        (0..tokens).all(|token| {
            (0..here.heads).all(|head| {
                let at = self.place(here, token, head) * WORD;
                let range = at..at + self.row_words() * WORD;
                one.get(range.clone()) == other.get(range)
            })
        })
    }

    /// The first word of a head of a token.
    fn place(&self, of: Block, token: usize, head: usize) -> usize {
        let heads_first = self.options.dialect == Dialect::Vllm && !self.options.mla;
        let row = if heads_first { head * of.tokens + token } else { token * of.heads + head };
        row * self.row_words()
    }

    /// Words of one head of one token in an item: the key, the value, or both.
    fn row_words(&self) -> usize {
        let parts = if self.options.dialect == Dialect::Vllm && !self.options.mla { 2 } else { 1 };
        parts * self.options.head_dim * ELEMENT / WORD
    }

    /// Bytes of one field of one block.
    fn item(&self) -> usize {
        self.heads.len() * self.options.block * self.row_words() * WORD
    }

    fn item_at(&self, field: usize, block: usize) -> usize {
        let fields = self.fields_len();
        let place = match self.options.page_major {
            true => block * fields + field,
            false => field * self.options.blocks + block,
        };
        place * self.item()
    }

    fn fields_len(&self) -> usize {
        let parts = if self.options.dialect == Dialect::Sglang && !self.options.mla { 2 } else { 1 };
        parts * self.options.layers
    }

    /// Where the rows of a metadata buffer lie in the memory.
    pub fn aux_row_at(&self, buffer: usize) -> impl Fn(usize) -> usize + Send + 'static {
        let (first, width) = (self.aux_at(buffer, 0), AUX_ROWS.get(buffer).copied().unwrap_or(0));
        move |row| first + row * width
    }

    fn aux_at(&self, buffer: usize, row: usize) -> usize {
        let before: usize = AUX_ROWS.iter().take(buffer).sum();
        let width = AUX_ROWS.get(buffer).copied().unwrap_or(0);
        self.fields_len() * self.options.blocks * self.item() + before * self.options.aux_rows + row * width
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::cache_options;

    /// The words of a block as the drivers of the peers have them.
    fn words(region: u32, block: u32, words: u32) -> Vec<u8> {
        let word = |w: u32| w.wrapping_mul(2_654_435_761).wrapping_add((block << 8) + region + 977);
        (0..words).flat_map(|w| word(w).to_le_bytes()).collect()
    }

    fn read(cache: &RankCache, field: usize, block: usize) -> Vec<u8> {
        let mut bytes = vec![0; cache.item()];
        cache.memory.read(cache.item_at(field, block), &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_rank_with_all_heads_holds_the_words_of_the_rule_in_either_arrangement() {
        let arrangements =
            [Dialect::Vllm, Dialect::Sglang].into_iter().flat_map(|of| [(of, false), (of, true)]);
        for (dialect, page_major) in arrangements {
            let mut options = cache_options(dialect);
            options.page_major = page_major;
            let cache = RankCache::new(&options, 0).unwrap();
            cache.fill().unwrap();
            for (field, block) in [(0, 0), (1, 5)] {
                // Page-major, the values of layer 0 follow its keys.
                let region = if field == 1 && page_major && dialect == Dialect::Sglang {
                    options.layers
                } else {
                    field
                };
                let expected = words(region as u32, block as u32, (cache.item() / WORD) as u32);
                assert_eq!(read(&cache, field, block), expected, "{dialect:?}");
            }
            assert_eq!(cache.args("e", Mode::Pull).unwrap().geometry().bytes_per_page() as usize, {
                cache.item() * cache.fields_len()
            });
        }
    }

    #[test]
    fn ranks_with_half_of_the_heads_hold_the_halves_of_each_block() {
        let mut options = cache_options(Dialect::Vllm);
        options.tp = 2;
        for rank in [0, 1] {
            let cache = RankCache::new(&options, rank).unwrap();
            cache.fill().unwrap();
            let whole = words(1, 3, (2 * cache.item() / WORD) as u32);
            assert_eq!(read(&cache, 1, 3), whole[rank * cache.item()..(rank + 1) * cache.item()]);
        }
        // Heads of one token lie together: each half of a token is one half of the heads.
        let mut options = cache_options(Dialect::Sglang);
        options.tp = 2;
        let cache = RankCache::new(&options, 1).unwrap();
        cache.fill().unwrap();
        let whole = words(1, 3, (2 * cache.item() / WORD) as u32);
        let token = whole.len() / options.block;
        let halves = whole.chunks_exact(token).flat_map(|token| token[token.len() / 2..].to_vec());
        assert_eq!(read(&cache, 1, 3), halves.collect::<Vec<u8>>());
    }

    #[test]
    fn tokens_of_a_peer_with_other_block_sizes_are_compared_one_by_one() {
        let mut options = cache_options(Dialect::Vllm);
        let theirs = RankCache::new(&options, 0).unwrap();
        theirs.fill().unwrap();
        options.block *= 2;
        let ours = RankCache::new(&options, 0).unwrap();
        // Blocks 4, 2 and 7 of the peer are the tokens of blocks 1 and 0 here, the last one half full.
        let (source, blocks) = ([4, 2, 7], [1, 0]);
        for field in 0..options.layers {
            for (place, from) in source.iter().enumerate() {
                let there = read(&theirs, field, *from as usize);
                let (half, block) = (place % 2, blocks[place / 2] as usize);
                let row = ours.row_words() * WORD;
                for head in 0..options.heads {
                    let tokens = options.block / 2 * row;
                    let part = &there[head * tokens..(head + 1) * tokens];
                    let at = ours.item_at(field, block) + (2 * head + half) * tokens;
                    ours.memory.write(at, part).unwrap();
                }
            }
        }
        assert_eq!(ours.wrong(&blocks, &source, options.block / 2, 0).unwrap(), 0);
        assert_eq!(ours.wrong(&[0, 1], &source, options.block / 2, 0).unwrap(), 2 * options.layers);
        ours.memory.write(ours.item_at(1, 1) + 5, &[1]).unwrap();
        assert_eq!(ours.wrong(&blocks, &source, options.block / 2, 0).unwrap(), 1);
    }
}
