//! The part of a KV cache that one rank holds: some layers, some heads, in memory of its own.

use std::ops::Range;

use kv_transfer::layout::{HND, HND_PACKED, NHD};
use kv_transfer::{Holds, KvArgsBuilder, Layout, Parallel, Region, RegionRole};

use super::aux::AuxForm;
use super::cli::{CacheOptions, PageLayout};
use super::error::ExampleError;
use super::model::ModelConfig;
use super::transport::Memory;

/// The part of the cache that one rank holds. Clones share the same memory.
#[derive(Debug, Clone)]
pub struct RankKv {
    memory: Memory,
    layout: PageLayout,
    pages: usize,
    page_tokens: usize,
    aux: AuxForm,
    aux_rows: usize,
    parallel: Parallel,
    /// The number of ranks that hold pages in turn.
    dealt: u32,
    /// The layers of each pipeline stage.
    stages: Vec<(u32, u32)>,
    /// The layers that the rank holds.
    layers: Range<usize>,
    /// What the rank holds of each layer.
    parts: &'static [Holds],
    /// The number of heads of the model, and the heads that the rank holds.
    total_heads: usize,
    heads: Range<usize>,
    head_dim: usize,
}

/// Some of the rows of a page that lie side by side in memory.
struct Piece {
    /// The first head, and the number of heads.
    head: usize,
    heads: usize,
    /// The first token, counted from the first row, and the number of tokens.
    token: usize,
    tokens: usize,
    /// The place in memory.
    offset: usize,
}

/// Consecutive tokens of one layer in one page: keys, values, or latent vectors.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// The number of the page.
    pub page: u32,
    /// The place of the rank that holds the page, among the ranks that hold pages in turn.
    pub dealt_to: usize,
    /// The layer of the model.
    pub layer: usize,
    /// 0 for keys and latent vectors, 1 for values.
    pub part: usize,
    /// The first token, counted from the beginning of the page.
    pub token: usize,
    /// The number of tokens.
    pub tokens: usize,
}

impl RankKv {
    /// Allocates the part that the rank at this place holds.
    pub fn new(
        config: &ModelConfig,
        options: &CacheOptions,
        parallel: Parallel,
        dealt: u32,
        (aux, aux_rows): (AuxForm, u32),
    ) -> Result<RankKv, ExampleError> {
        let (parts, head_dim): (&'static [Holds], _) = match config.latent {
            Some(latent) => (&[Holds::Latent], latent.width()),
            None => (&[Holds::Key, Holds::Value], config.head_dim),
        };
        let total_heads = cached_heads(config);
        check(config, parallel.tp_size, parallel.pp_size, dealt)?;
        // Ranks to which pages are dealt have the same heads.
        let (tp, rank) = ((parallel.tp_size / dealt) as usize, (parallel.tp_rank / dealt) as usize);
        let (layers, pp) = (config.num_hidden_layers, parallel.pp_size as usize);
        let first = rank * total_heads / tp;
        let heads = first..first + (total_heads / tp).max(1);
        let cut = |stage: usize| stage * layers / pp;
        let stages = (0..pp).map(|stage| (cut(stage) as u32, cut(stage + 1) as u32)).collect();
        let stage = parallel.pp_rank as usize;
        let layers = cut(stage)..cut(stage + 1);
        let (pages, page_tokens, aux_rows) =
            (options.pages as usize, options.page_size as usize, aux_rows as usize);
        let token = layers.len() * parts.len() * heads.len() * head_dim * size_of::<f32>();
        let memory = Memory::new(options.transport, pages * page_tokens * token + aux_rows * aux.row_len())?;
        let layout = options.layout;
        Ok(RankKv {
            memory,
            layout,
            pages,
            page_tokens,
            aux,
            aux_rows,
            parallel,
            dealt,
            stages,
            layers,
            parts,
            total_heads,
            heads,
            head_dim,
        })
    }

    /// The memory, for the transport.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The heads of these rows that the rank holds, if it holds any.
    pub fn heads_of(&self, at: &Rows) -> Option<Range<usize>> {
        let here = at.dealt_to == self.dealt_to() as usize && self.layers.contains(&at.layer);
        here.then(|| self.heads.clone())
    }

    /// The place of the rank among the DCP ranks, which hold pages in turn.
    fn dealt_to(&self) -> u32 {
        self.parallel.tp_rank % self.dealt
    }

    /// Bytes of a page, over all regions.
    pub fn page_bytes(&self) -> usize {
        self.layers.len() * self.parts.len() * self.piece()
    }

    /// Describes the regions and the layout to this library.
    pub fn describe(&self, args: KvArgsBuilder) -> KvArgsBuilder {
        let base = self.memory.addr();
        let region = |role, offset: usize, items: usize, item: usize| {
            Region::dram(role, base + offset as u64, (items * item) as u64, item as u64)
        };
        let layout = Layout::default().with(|layout| {
            layout.axes = match self.layout {
                PageLayout::LayerMajor | PageLayout::PageMajor => NHD,
                PageLayout::HeadMajor => HND,
                PageLayout::Packed => HND_PACKED,
            };
            layout.total_kv_heads = if self.parts == [Holds::Latent] { 0 } else { self.total_heads as u32 };
            layout.dcp_size = self.dealt;
            layout.dcp_rank = self.dealt_to();
            layout.stages = if self.stages.len() > 1 { self.stages.clone() } else { Vec::new() };
        });
        let mut args = args
            .pages(self.pages as u32, self.page_tokens as u32)
            .dtype("f32")
            .heads(self.heads.len() as u32, self.head_dim as u32)
            .layout(layout)
            .parallel(self.parallel);
        match self.layout {
            PageLayout::LayerMajor | PageLayout::HeadMajor => {
                for layer in self.layers.clone() {
                    for (part, holds) in self.parts.iter().enumerate() {
                        let offset = self.piece_at(0, layer, part);
                        let region = region(RegionRole::Kv, offset, self.pages, self.piece());
                        args = args.region(region.layer(layer as u32).holds(*holds));
                    }
                }
            }
            PageLayout::Packed => {
                for layer in self.layers.clone() {
                    let (offset, len) = (self.piece_at(0, layer, 0), self.parts.len() * self.piece());
                    let region = region(RegionRole::Kv, offset, self.pages, len);
                    args = args.region(region.layer(layer as u32).holds(self.all_parts()));
                }
            }
            PageLayout::PageMajor => {
                let layers = self.layers.start as u32..self.layers.end as u32;
                let holds = self.all_parts();
                let region = region(RegionRole::Kv, 0, self.pages, self.page_bytes());
                args = args.region(region.layers(layers).holds(holds));
            }
        }
        for (buffer, len) in self.aux.item_lens().iter().enumerate() {
            let offset = self.aux_at(buffer, 0);
            args = args.region(region(RegionRole::Aux, offset, self.aux_rows, *len as usize));
        }
        args
    }

    /// What a region holds that has keys and values.
    fn all_parts(&self) -> Holds {
        if self.parts.len() == 2 { Holds::KeyValue } else { Holds::Latent }
    }

    /// The form of the aux rows.
    pub fn aux(&self) -> AuxForm {
        self.aux
    }

    /// Takes this rank's heads out of `rows`, which have all heads of the model for each token.
    pub fn store(&self, at: Rows, rows: &[f32]) -> Result<(), ExampleError> {
        let (width, dim) = (self.total_heads * self.head_dim, self.head_dim);
        let mut bytes = Vec::new();
        for Piece { head, heads, token, tokens, offset } in self.pieces(at) {
            let (of_heads, len) = (heads * dim, heads * dim * size_of::<f32>());
            let bytes = first_of(&mut bytes, tokens * len);
            let rows = rows.chunks_exact(width).skip(token).take(tokens);
            for (row, bytes) in rows.zip(bytes.chunks_exact_mut(len)) {
                kv_math::to_le_bytes(&row[head * dim..][..of_heads], bytes);
            }
            self.memory.write(offset, bytes)?;
        }
        Ok(())
    }

    /// Fills this rank's heads into `rows`.
    pub fn load(&self, at: Rows, rows: &mut [f32]) -> Result<(), ExampleError> {
        let (width, dim) = (self.total_heads * self.head_dim, self.head_dim);
        let mut bytes = Vec::new();
        for Piece { head, heads, token, tokens, offset } in self.pieces(at) {
            let (of_heads, len) = (heads * dim, heads * dim * size_of::<f32>());
            let bytes = first_of(&mut bytes, tokens * len);
            self.memory.read(offset, bytes)?;
            let rows = rows.chunks_exact_mut(width).skip(token).take(tokens);
            for (row, bytes) in rows.zip(bytes.chunks_exact(len)) {
                kv_math::from_le_bytes(bytes, &mut row[head * dim..][..of_heads]);
            }
        }
        Ok(())
    }

    /// Writes the content of an aux row: the rows of all buffers, one after the other.
    pub fn write_aux(&self, row: u32, bytes: &[u8]) -> Result<(), ExampleError> {
        let mut rest = bytes;
        for (buffer, len) in self.aux.item_lens().iter().enumerate() {
            let (now, later) = rest.split_at(rest.len().min(*len as usize));
            self.memory.write(self.aux_at(buffer, row as usize), now)?;
            rest = later;
        }
        Ok(())
    }

    /// Reads an aux row: the rows of all buffers, one after the other.
    pub fn read_aux(&self, row: u32) -> Result<Vec<u8>, ExampleError> {
        let mut bytes = vec![0; self.aux.row_len()];
        let mut rest = bytes.as_mut_slice();
        for (buffer, len) in self.aux.item_lens().iter().enumerate() {
            let (now, later) = rest.split_at_mut(*len as usize);
            self.memory.read(self.aux_at(buffer, row as usize), now)?;
            rest = later;
        }
        Ok(bytes)
    }

    /// The places of rows in memory, piece by piece.
    fn pieces(&self, at: Rows) -> impl Iterator<Item = Piece> {
        let base = self.piece_at(at.page as usize, at.layer, at.part);
        let (first, heads, page_tokens, parts) =
            (self.heads.start, self.heads.len(), self.page_tokens, self.parts.len());
        let head_bytes = self.head_dim * size_of::<f32>();
        // Side by side lie all heads of a token, all tokens of a head, or the key and the value of a token.
        let (by_head, by_token) = match self.layout {
            PageLayout::LayerMajor | PageLayout::PageMajor => (1, 1),
            PageLayout::HeadMajor => (heads, 1),
            PageLayout::Packed => (heads, at.tokens),
        };
        let layout = self.layout;
        (0..by_head).flat_map(move |head| {
            (0..by_token).map(move |token| {
                let place = match layout {
                    PageLayout::LayerMajor | PageLayout::PageMajor => at.token * heads,
                    PageLayout::HeadMajor => head * page_tokens + at.token,
                    PageLayout::Packed => (head * page_tokens + at.token + token) * parts,
                };
                Piece {
                    head: first + head,
                    heads: heads / by_head,
                    token,
                    tokens: at.tokens / by_token,
                    offset: base + place * head_bytes,
                }
            })
        })
    }

    /// The size of the keys, or of the values, of one layer in one page, in bytes.
    fn piece(&self) -> usize {
        self.page_tokens * self.heads.len() * self.head_dim * size_of::<f32>()
    }

    /// The offset of such a piece; with packed pages, of its first key or value.
    fn piece_at(&self, page: usize, layer: usize, part: usize) -> usize {
        let number = (layer - self.layers.start) * self.parts.len() + part;
        match self.layout {
            PageLayout::LayerMajor | PageLayout::HeadMajor => (number * self.pages + page) * self.piece(),
            PageLayout::PageMajor => (page * self.layers.len() * self.parts.len() + number) * self.piece(),
            PageLayout::Packed => {
                let block = (layer - self.layers.start) * self.pages + page;
                block * self.parts.len() * self.piece() + part * self.head_dim * size_of::<f32>()
            }
        }
    }

    /// The offset of a row in a buffer of aux rows.
    fn aux_at(&self, buffer: usize, row: usize) -> usize {
        let lens = self.aux.item_lens();
        let before: u64 = lens.iter().take(buffer).sum();
        let len = lens.get(buffer).copied().unwrap_or(0);
        self.pages * self.page_bytes() + before as usize * self.aux_rows + row * len as usize
    }
}

/// The first bytes of a buffer, which is made anew if it is shorter: growing it byte by byte takes long without optimisation.
fn first_of(buffer: &mut Vec<u8>, len: usize) -> &mut [u8] {
    if buffer.len() < len {
        *buffer = vec![0; len];
    }
    &mut buffer[..len]
}

/// The number of heads that are cached separately. Latent vectors belong to no head, and every rank holds
/// them whole.
fn cached_heads(config: &ModelConfig) -> usize {
    if config.latent.is_some() { 1 } else { config.num_key_value_heads }
}

/// Fails if the heads, layers and pages cannot be divided among ranks and stages.
pub fn check(config: &ModelConfig, tp: u32, pp: u32, dealt: u32) -> Result<(), ExampleError> {
    let (heads, layers) = (cached_heads(config), config.num_hidden_layers);
    if !tp.is_multiple_of(dealt) || (dealt > 1 && config.latent.is_none()) {
        return Err(ExampleError::Dealt { tp, dealt });
    }
    let (tp, pp) = (tp as usize, pp as usize);
    let even = heads.is_multiple_of(tp) || tp.is_multiple_of(heads);
    if even && pp <= layers { Ok(()) } else { Err(ExampleError::Parallel { tp, pp, heads, layers }) }
}
