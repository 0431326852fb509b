//! A model's KV cache in pages of registered memory, spread over the ranks of an engine, and the aux rows.

use kv_transfer::queue::{AuxMemory, AuxRow};
use kv_transfer::{AuxIndex, Pages, Parallel, Room};

use super::aux::AuxForm;
use super::cli::{CacheOptions, Parallelism};
use super::decode::Continuation;
use super::error::ExampleError;
use super::model::{KvCache, Model};
use super::rank_kv::{RankKv, Rows};

/// The cache of one engine. Clones share the same memory.
///
/// One process holds all ranks, so that the model is computed once. Each rank has memory, a transport and a
/// worker of its own, as if it were a device.
#[derive(Debug, Clone)]
pub struct PagedKv {
    ranks: Vec<RankKv>,
    aux: AuxForm,
    page_tokens: usize,
    /// The number of ranks that hold pages in turn.
    dealt: usize,
    key_dim: usize,
    value_dim: usize,
}

impl PagedKv {
    /// Allocates the pages for `model`, and aux rows (their form, and how many), on every rank of the data-parallel
    /// replica `dp` (number, and how many there are).
    pub fn new(
        model: &Model,
        options: &CacheOptions,
        parallelism: Parallelism,
        (dp_rank, dp_size): (u32, u32),
        aux: (AuxForm, u32),
    ) -> Result<PagedKv, ExampleError> {
        let Parallelism { tp: tp_size, pp: pp_size, cp: pcp_size, dcp } = parallelism;
        let config = model.config();
        let mut ranks = Vec::new();
        for pp_rank in 0..pp_size {
            for pcp_rank in 0..pcp_size {
                for tp_rank in 0..tp_size {
                    let parallel = Parallel::default().with(|parallel| {
                        (parallel.tp_size, parallel.tp_rank) = (tp_size, tp_rank);
                        (parallel.pp_size, parallel.pp_rank) = (pp_size, pp_rank);
                        (parallel.dp_size, parallel.dp_rank) = (dp_size, dp_rank);
                        (parallel.pcp_size, parallel.pcp_rank) = (pcp_size, pcp_rank);
                    });
                    ranks.push(RankKv::new(config, options, parallel, dcp, aux)?);
                }
            }
        }
        Ok(PagedKv {
            ranks,
            aux: aux.0,
            page_tokens: options.page_size as usize,
            dealt: dcp as usize,
            key_dim: config.key_dim(),
            value_dim: config.value_dim(),
        })
    }

    /// The ranks, ordered by pipeline stage.
    pub fn ranks(&self) -> &[RankKv] {
        &self.ranks
    }

    /// Bytes of a page, over all ranks.
    pub fn page_bytes(&self) -> usize {
        self.ranks.iter().map(RankKv::page_bytes).sum()
    }

    /// The number of pages that hold `tokens` tokens.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens())
    }

    /// The number of tokens that the pages with one number hold, on all DCP ranks together.
    pub fn page_tokens(&self) -> usize {
        self.page_tokens * self.dealt
    }

    /// The cache of one request, in these pages, in order.
    pub fn of<'a>(&'a self, pages: &'a [u32]) -> RequestKv<'a> {
        RequestKv { kv: self, pages }
    }

    /// The form of the aux rows.
    pub fn aux(&self) -> AuxForm {
        self.aux
    }

    /// Fills an aux row on every rank, because a peer may get the row of any rank.
    pub fn write_aux(&self, row: AuxIndex, room: &Room, told: &AuxRow) -> Result<(), ExampleError> {
        let bytes = self.aux.row(room, told)?;
        self.ranks.iter().try_for_each(|rank| rank.write_aux(row.0, &bytes))
    }

    /// Erases an aux row on every rank, so that the row of an earlier request is not taken for that of a later one.
    pub fn clear_aux(&self, row: AuxIndex) -> Result<(), ExampleError> {
        let empty = vec![0; self.aux.row_len()];
        self.ranks.iter().try_for_each(|rank| rank.write_aux(row.0, &empty))
    }

    /// An aux row, if it is the same on all ranks.
    pub fn read_aux(&self, row: AuxIndex) -> Option<Vec<u8>> {
        let mut all = self.ranks.iter().map(|rank| rank.read_aux(row.0).ok());
        let first = all.next()??;
        all.all(|other| other.as_ref() == Some(&first)).then_some(first)
    }
}

/// The cache of one request. With pages of 16 tokens, token `i` is in the page at position `i / 16`.
pub struct RequestKv<'a> {
    kv: &'a PagedKv,
    pages: &'a [u32],
}

impl RequestKv<'_> {
    /// The rows from `position` to before `end` that are in one page.
    fn rows(&self, layer: usize, part: usize, position: usize, end: usize) -> Result<Rows, ExampleError> {
        let (page_tokens, dealt) = (self.kv.page_tokens, self.kv.dealt);
        let number = position / page_tokens;
        let Some(&page) = self.pages.get(number / dealt) else {
            return Err(ExampleError::Position { position, pages: self.pages.len() });
        };
        let token = position % page_tokens;
        let tokens = (page_tokens - token).min(end - position);
        Ok(Rows { page, dealt_to: number % dealt, layer, part, token, tokens })
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
        let end = start + keys.len() / self.kv.key_dim;
        for (part, width, rows) in [(0, self.kv.key_dim, keys), (1, self.kv.value_dim, values)] {
            let (mut position, mut rows) = (start, rows);
            while !rows.is_empty() {
                let at = self.rows(layer, part, position, end)?;
                let (now, rest) = rows.split_at(at.tokens * width);
                for rank in self.kv.ranks.iter().filter(|rank| rank.heads_of(&at).is_some()) {
                    rank.store(at, now)?;
                }
                (position, rows) = (position + at.tokens, rest);
            }
        }
        Ok(())
    }

    /// If several ranks hold the same heads, they are read in turn, so that wrong bytes on any rank are
    /// noticed.
    fn load(
        &self,
        layer: usize,
        len: usize,
        keys: &mut Vec<f32>,
        values: &mut Vec<f32>,
    ) -> Result<(), ExampleError> {
        for (part, width, out) in [(0, self.kv.key_dim, keys), (1, self.kv.value_dim, values)] {
            out.clear();
            out.resize(len * width, 0.0);
            let mut position = 0;
            while position < len && width > 0 {
                let at = self.rows(layer, part, position, len)?;
                let rows = &mut out[position * width..][..at.tokens * width];
                let mut head = 0;
                loop {
                    let holds = |rank: &&RankKv| rank.heads_of(&at).is_some_and(|heads| heads.start == head);
                    let replicas: Vec<&RankKv> = self.kv.ranks.iter().filter(holds).collect();
                    let turn = position / self.kv.page_tokens + layer;
                    let Some(rank) = replicas.get(turn % replicas.len().max(1)) else { break };
                    rank.load(at, rows)?;
                    head = rank.heads_of(&at).map_or(head, |heads| heads.end);
                }
                position += at.tokens;
            }
        }
        Ok(())
    }
}

/// The aux rows of the decode side, as its queues see them.
impl AuxMemory<Continuation> for PagedKv {
    fn clear(&mut self, row: AuxIndex) {
        // A row out of range stays as it is; its tag then reads as zero, which no gate lets pass.
        let _ = self.clear_aux(row);
    }

    fn tag(&self, row: AuxIndex) -> u64 {
        self.read_aux(row).map_or(0, |bytes| self.aux.tag(&bytes))
    }

    fn read(&mut self, row: AuxIndex, request: &mut Continuation) {
        if let Some(first) =
            self.read_aux(row).and_then(|bytes| self.aux.first(&Room::Number(request.room()), &bytes))
        {
            request.begin_with(first);
        }
    }
}

/// The page numbers of a token of ownership, one by one.
pub fn numbers(pages: &Pages) -> Vec<u32> {
    pages.list().iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{PageLayout, TransportKind};
    use crate::model::{ModelConfig, Segment, Weights};
    use crate::monolithic::ContiguousCache;

    const LAYOUTS: [PageLayout; 4] =
        [PageLayout::LayerMajor, PageLayout::PageMajor, PageLayout::HeadMajor, PageLayout::Packed];

    #[test]
    fn paged_caches_hold_the_same_values_as_contiguous_memory_in_every_layout() {
        for config in [ModelConfig::small(), ModelConfig::small_latent()] {
            let config = ModelConfig { num_hidden_layers: 2, ..config };
            let model = Model::new(config.clone(), Weights::random(&config, 3));
            let tokens: Vec<u32> = (0..40).collect();
            let run = |cache: &mut dyn KvCache| {
                let first = Segment { tokens: &tokens[..21], start: 0, cache: &mut *cache, inputs: &[] };
                model.forward(&mut [first]).unwrap();
                model
                    .forward(&mut [Segment { tokens: &tokens[21..], start: 21, cache, inputs: &[] }])
                    .unwrap()
            };
            let expected = run(&mut ContiguousCache::new(&config));
            for layout in LAYOUTS {
                for (tp, pp, cp) in [(1, 1, 1), (2, 1, 1), (4, 2, 1), (8, 1, 1), (1, 2, 3)] {
                    let kv = kv(&model, layout, 8, Parallelism { tp, pp, cp, dcp: 1 });
                    assert_eq!(run(&mut kv.of(&[5, 0, 7])), expected, "{layout:?} {tp} {pp} {cp}");
                    let error = run_past_the_end(&model, &kv);
                    assert_eq!(error.to_string(), "token 32 is outside the request's 2 pages");
                }
                if config.latent.is_some() {
                    let dealt = kv(&model, layout, 8, Parallelism { tp: 4, pp: 1, cp: 1, dcp: 2 });
                    assert_eq!(run(&mut dealt.of(&[5, 0])), expected, "{layout:?}, dealt");
                    assert_eq!((dealt.page_tokens(), dealt.pages_for(33)), (32, 2));
                }
            }
        }
    }

    fn kv(model: &Model, layout: PageLayout, pages: u32, parallelism: Parallelism) -> PagedKv {
        let options = CacheOptions { transport: TransportKind::Local, layout, page_size: 16, pages };
        PagedKv::new(model, &options, parallelism, (0, 1), (AuxForm::Native, 3)).unwrap()
    }

    fn run_past_the_end(model: &Model, kv: &PagedKv) -> ExampleError {
        let mut cache = kv.of(&[1, 2]);
        model
            .forward(&mut [Segment { tokens: &[1; 33], start: 0, cache: &mut cache, inputs: &[] }])
            .unwrap_err()
    }

    #[test]
    fn wrong_bytes_on_one_of_several_replicated_ranks_change_the_logits() {
        let config = ModelConfig::small();
        let model = Model::new(config.clone(), Weights::random(&config, 3));
        let kv = kv(&model, PageLayout::LayerMajor, 8, Parallelism { tp: 8, ..Parallelism::ONE });
        let prompt: Vec<u32> = (0..40).collect();
        let pages = [5, 0, 7];
        model
            .forward(&mut [Segment { tokens: &prompt, start: 0, cache: &mut kv.of(&pages), inputs: &[] }])
            .unwrap();
        let next = || {
            let mut cache = kv.of(&pages);
            model.forward(&mut [Segment { tokens: &[9], start: 40, cache: &mut cache, inputs: &[] }]).unwrap()
                [0]
            .digest
        };
        let right = next();
        for rank in kv.ranks() {
            // One of two ranks is read for keys of page 5 in layer 0, the other for those of page 0.
            let noticed = [5 * 16 * 32 * 4, 0].map(|offset| {
                let mut before = [0; 4];
                rank.memory().read(offset, &mut before).unwrap();
                rank.memory().write(offset, &1e3_f32.to_le_bytes()).unwrap();
                let wrong = next() != right;
                rank.memory().write(offset, &before).unwrap();
                wrong
            });
            assert!(noticed[0] != noticed[1], "{noticed:?}");
            assert_eq!(next(), right);
        }
    }

    #[test]
    fn aux_rows_follow_the_pages_and_do_not_touch_each_other() {
        let config = ModelConfig::small();
        let model = Model::new(config.clone(), Weights::random(&config, 3));
        let mut kv = kv(&model, PageLayout::LayerMajor, 4, Parallelism { tp: 2, ..Parallelism::ONE });
        let args = kv_transfer::KvArgs::builder("decode", 0);
        let args = kv.ranks()[0].describe(args).build().unwrap();
        assert_eq!(args.regions().len(), 4 * 2 + 1);
        for row in 0..3 {
            let told = AuxRow { first_token: row, ..AuxRow::default() };
            kv.write_aux(AuxIndex(row), &Room::Number(u64::from(row) + 10), &told).unwrap();
        }
        AuxMemory::clear(&mut kv, AuxIndex(1));
        let tags = |kv: &PagedKv| [0, 1, 2].map(|row| AuxMemory::<Continuation>::tag(kv, AuxIndex(row)));
        let tag = |room| kv_transfer::queue::aux_tag(&kv_transfer::Room::Number(room));
        assert_eq!(tags(&kv), [tag(10), 0, tag(12)]);
        assert!(kv.write_aux(AuxIndex(3), &Room::Number(1), &AuxRow::default()).is_err());
        // A row that only one rank has got counts as none.
        kv.ranks()[1].write_aux(2, &[0; 64]).unwrap();
        assert_eq!(tags(&kv), [tag(10), 0, 0]);
    }

    #[test]
    fn heads_and_layers_that_cannot_be_divided_are_refused_with_both_numbers() {
        let config = ModelConfig::small();
        let model = Model::new(config.clone(), Weights::random(&config, 3));
        let options = CacheOptions {
            transport: TransportKind::Local,
            layout: PageLayout::LayerMajor,
            page_size: 16,
            pages: 4,
        };
        for (tp, pp) in [(3, 1), (1, 5)] {
            let parallelism = Parallelism { tp, pp, ..Parallelism::ONE };
            let error =
                PagedKv::new(&model, &options, parallelism, (0, 1), (AuxForm::Native, 3)).unwrap_err();
            let text =
                format!("{tp} tensor-parallel ranks and {pp} pipeline stages cannot share 4 heads of 4");
            assert!(error.to_string().starts_with(&text), "{error}");
        }
    }
}
