//! A model's KV cache in pages of registered memory, and the aux row that travels with it.

use kv_transfer::queue::AuxMemory;
use kv_transfer::{AuxIndex, Holds, KvArgsBuilder, Pages, Region, RegionRole};

use super::cli::{CacheOptions, PageLayout};
use super::decode::Continuation;
use super::error::ExampleError;
use super::model::{KvCache, Model, Sample};
use super::plane::Memory;

/// Bytes of an aux row: a cache line, of which 20 are used.
const AUX_BYTES: usize = 64;

/// The cache of one rank: one piece of memory that holds all its regions. Clones are the same memory.
#[derive(Debug, Clone)]
pub struct PagedKv {
    memory: Memory,
    layout: PageLayout,
    page_tokens: usize,
    pages: u32,
    aux_rows: u32,
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl PagedKv {
    /// Allocates the pages for `model`, and `aux_rows` aux rows.
    pub fn new(model: &Model, options: &CacheOptions, aux_rows: u32) -> Result<PagedKv, ExampleError> {
        let (layout, pages, page_tokens) = (options.layout, options.pages, options.page_size as usize);
        let config = model.config();
        let (layers, kv_heads, head_dim) =
            (config.num_hidden_layers, config.num_key_value_heads, config.head_dim);
        let piece = page_tokens * kv_heads * head_dim * size_of::<f32>();
        let len = pages as usize * layers * 2 * piece + aux_rows as usize * AUX_BYTES;
        let memory = Memory::new(options.plane, len)?;
        Ok(PagedKv { memory, layout, page_tokens, pages, aux_rows, layers, kv_heads, head_dim })
    }

    /// The memory, for the plane.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Bytes of a page, over all regions.
    pub fn page_bytes(&self) -> usize {
        self.layers * 2 * self.piece()
    }

    /// Pages that hold `tokens` tokens.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }

    /// Tokens in a page.
    pub fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Tells the framework what lies where.
    pub fn describe(&self, args: KvArgsBuilder) -> KvArgsBuilder {
        let base = self.memory.addr();
        let region = |role, offset: usize, items: u32, item: usize| {
            Region::dram(role, base + offset as u64, u64::from(items) * item as u64, item as u64)
        };
        let mut args = args
            .pages(self.pages, self.page_tokens as u32)
            .dtype("f32")
            .heads(self.kv_heads as u32, self.head_dim as u32);
        match self.layout {
            PageLayout::LayerMajor => {
                for layer in 0..self.layers {
                    for half in [0, 1] {
                        let region =
                            region(RegionRole::Kv, self.offset(0, layer, half), self.pages, self.piece());
                        let holds = if half == 0 { Holds::Key } else { Holds::Value };
                        args = args.region(region.layer(layer as u32).holds(holds));
                    }
                }
            }
            PageLayout::PageMajor => {
                let region = region(RegionRole::Kv, 0, self.pages, self.page_bytes());
                args = args.region(region.layers(0..self.layers as u32).holds(Holds::KeyValue));
            }
        }
        args.region(region(RegionRole::Aux, self.aux_offset(0), self.aux_rows, AUX_BYTES))
    }

    /// One request's view: its pages, in order.
    pub fn of<'a>(&'a self, pages: &'a [u32]) -> RequestKv<'a> {
        RequestKv { kv: self, pages }
    }

    /// Fills an aux row.
    pub fn write_aux(&self, row: AuxIndex, tag: u64, first: Sample) -> Result<(), ExampleError> {
        let mut bytes = [0; AUX_BYTES];
        bytes[0..8].copy_from_slice(&tag.to_le_bytes());
        bytes[8..16].copy_from_slice(&first.digest.to_le_bytes());
        bytes[16..20].copy_from_slice(&first.token.to_le_bytes());
        self.memory.write(self.aux_offset(row.0 as usize), &bytes)
    }

    /// Bytes of keys, or of values, of one layer in one page.
    fn piece(&self) -> usize {
        self.page_tokens * self.kv_heads * self.head_dim * size_of::<f32>()
    }

    /// Where the keys (`half` 0) or values (`half` 1) of a layer begin in a page.
    fn offset(&self, page: usize, layer: usize, half: usize) -> usize {
        let number = layer * 2 + half;
        match self.layout {
            PageLayout::LayerMajor => (number * self.pages as usize + page) * self.piece(),
            PageLayout::PageMajor => (page * self.layers * 2 + number) * self.piece(),
        }
    }

    fn aux_offset(&self, row: usize) -> usize {
        self.pages as usize * self.page_bytes() + row * AUX_BYTES
    }
}

/// One request's KV: token `i` of pages of 16 lies in the `i / 16`-th of them.
pub struct RequestKv<'a> {
    kv: &'a PagedKv,
    pages: &'a [u32],
}

impl RequestKv<'_> {
    /// The page of a position and the row in it.
    fn place(&self, position: usize) -> Result<(usize, usize), ExampleError> {
        let page_tokens = self.kv.page_tokens;
        match self.pages.get(position / page_tokens) {
            Some(page) => Ok((*page as usize, position % page_tokens)),
            None => Err(ExampleError::Position { position, pages: self.pages.len() }),
        }
    }
}

impl KvCache for RequestKv<'_> {
    fn store(
        &mut self,
        layer: usize,
        start: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), ExampleError> {
        let kv_dim = self.kv.kv_heads * self.kv.head_dim;
        for (half, rows) in [keys, values].into_iter().enumerate() {
            let (mut position, mut rows) = (start, rows);
            while !rows.is_empty() {
                let (page, row) = self.place(position)?;
                let tokens = (self.kv.page_tokens - row).min(rows.len() / kv_dim);
                let (now, rest) = rows.split_at(tokens * kv_dim);
                let bytes: Vec<[u8; 4]> = now.iter().map(|x| x.to_le_bytes()).collect();
                let offset = self.kv.offset(page, layer, half) + row * kv_dim * size_of::<f32>();
                self.kv.memory.write(offset, bytes.as_flattened())?;
                (position, rows) = (position + tokens, rest);
            }
        }
        Ok(())
    }

    fn load(
        &self,
        layer: usize,
        len: usize,
        keys: &mut Vec<f32>,
        values: &mut Vec<f32>,
    ) -> Result<(), ExampleError> {
        let kv_dim = self.kv.kv_heads * self.kv.head_dim;
        let mut piece = vec![[0; 4]; self.kv.page_tokens * kv_dim];
        for (half, rows) in [keys, values].into_iter().enumerate() {
            rows.clear();
            for position in (0..len).step_by(self.kv.page_tokens) {
                let (page, _) = self.place(position)?;
                let tokens = self.kv.page_tokens.min(len - position);
                let bytes = &mut piece[..tokens * kv_dim];
                self.kv.memory.read(self.kv.offset(page, layer, half), bytes.as_flattened_mut())?;
                rows.extend(bytes.iter().map(|bytes| f32::from_le_bytes(*bytes)));
            }
        }
        Ok(())
    }
}

/// The decode side's aux rows, as its queues see them.
impl AuxMemory<Continuation> for PagedKv {
    fn clear(&mut self, row: AuxIndex) {
        // A row out of range stays as it is; its tag then reads as zero, which no gate lets pass.
        let _ = self.memory.write(self.aux_offset(row.0 as usize), &[0; AUX_BYTES]);
    }

    fn tag(&self, row: AuxIndex) -> u64 {
        let mut tag = [0; 8];
        match self.memory.read(self.aux_offset(row.0 as usize), &mut tag) {
            Ok(()) => u64::from_le_bytes(tag),
            Err(_) => 0,
        }
    }

    fn read(&mut self, row: AuxIndex, request: &mut Continuation) {
        let (mut digest, mut token) = ([0; 8], [0; 4]);
        let offset = self.aux_offset(row.0 as usize);
        if self.memory.read(offset + 8, &mut digest).is_ok()
            && self.memory.read(offset + 16, &mut token).is_ok()
        {
            let (token, digest) = (u32::from_le_bytes(token), u64::from_le_bytes(digest));
            request.samples.push(Sample { token, digest });
        }
    }
}

/// Page numbers of a token of ownership, one by one.
pub fn numbers(pages: &Pages) -> Vec<u32> {
    pages.list().iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::cli::PlaneKind;
    use crate::shared::model::{ModelConfig, Segment, Weights};
    use crate::shared::monolithic::ContiguousCache;

    #[test]
    fn scattered_pages_hold_what_one_piece_of_memory_holds_in_both_layouts() {
        let config = ModelConfig { num_hidden_layers: 2, ..ModelConfig::small() };
        let model = Model::new(config.clone(), Weights::random(&config, 3));
        let tokens: Vec<u32> = (0..40).collect();
        let run = |cache: &mut dyn KvCache| {
            model.forward(&mut [Segment { tokens: &tokens[..21], start: 0, cache: &mut *cache }]).unwrap();
            model.forward(&mut [Segment { tokens: &tokens[21..], start: 21, cache }]).unwrap()
        };
        let expected = run(&mut ContiguousCache::new(config.num_hidden_layers, config.kv_dim()));
        for layout in [PageLayout::LayerMajor, PageLayout::PageMajor] {
            let kv = PagedKv::new(&model, &cache(layout, 8), 4).unwrap();
            assert_eq!(run(&mut kv.of(&[5, 0, 7])), expected, "{layout:?}");
            let error = run_past_the_end(&model, &kv);
            assert_eq!(error.to_string(), "token 32 is outside the request's 2 pages");
        }
    }

    fn cache(layout: PageLayout, pages: u32) -> CacheOptions {
        CacheOptions { plane: PlaneKind::Local, layout, page_size: 16, pages }
    }

    fn run_past_the_end(model: &Model, kv: &PagedKv) -> ExampleError {
        let mut cache = kv.of(&[1, 2]);
        model.forward(&mut [Segment { tokens: &[1; 33], start: 0, cache: &mut cache }]).unwrap_err()
    }

    #[test]
    fn aux_rows_follow_the_pages_and_do_not_touch_each_other() {
        let config = ModelConfig::small();
        let model = Model::new(config.clone(), Weights::random(&config, 3));
        let mut kv = PagedKv::new(&model, &cache(PageLayout::LayerMajor, 4), 3).unwrap();
        let args = kv.describe(kv_transfer::KvArgs::builder("decode", 0)).build().unwrap();
        assert_eq!(args.regions().len(), 4 * 2 + 1);
        for row in 0..3 {
            let sample = Sample { token: row, digest: 7 };
            kv.write_aux(AuxIndex(row), u64::from(row) + 10, sample).unwrap();
        }
        AuxMemory::clear(&mut kv, AuxIndex(1));
        let tags = [0, 1, 2].map(|row| AuxMemory::<Continuation>::tag(&kv, AuxIndex(row)));
        assert_eq!(tags, [10, 0, 12]);
        assert!(kv.write_aux(AuxIndex(3), 1, Sample { token: 0, digest: 0 }).is_err());
    }
}
