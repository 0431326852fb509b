//! The pages of a sending session, as the scheduler has given them: chunk by chunk, final at once or layer by
//! layer. A chunk is written when all of its layers are final.

use std::collections::BTreeSet;
use std::ops::Range;

use kv_core::layout::RegionShape;
use kv_core::{AuxIndex, Cause, ChunkId, Geometry, LayersError, PageList};

/// The layers of this rank.
#[derive(Debug, Clone)]
pub(super) struct Layers {
    held: BTreeSet<u32>,
    /// The position of a region that does not say its layers.
    untold: Option<usize>,
}

impl Layers {
    pub(super) fn new(geometry: &Geometry) -> Layers {
        let kv = &geometry.regions[geometry.kv_regions()];
        let of_region = |region: &RegionShape| {
            let first = region.layer.unwrap_or(0);
            first..first.saturating_add(region.layers)
        };
        let untold = kv.iter().position(|region| region.layer.is_none());
        Layers { held: kv.iter().flat_map(of_region).collect(), untold }
    }

    fn hull(&self) -> Range<u32> {
        let end = self.held.last().map_or(0, |last| last + 1);
        self.held.first().copied().unwrap_or(0)..end
    }
}

/// Everything that a scheduler has given to one session.
#[derive(Debug, Default)]
pub(super) struct Given {
    pub(super) announced: Option<(usize, AuxIndex)>,
    pub(super) chunks: Vec<Chunk>,
    pub(super) pages: usize,
}

/// One chunk.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) list: PageList,
    /// The number of the first page in the request.
    pub(super) first: usize,
    announced: BTreeSet<u32>,
    pub(super) is_final: bool,
}

impl Given {
    /// Takes the next pages.
    pub(super) fn begin(&mut self, list: PageList) -> Result<ChunkId, Cause> {
        let (first, sent) = (self.pages, self.pages + list.len());
        let chunk = ChunkId(number(self.chunks.len()));
        self.pages = sent;
        self.chunks.push(Chunk { list, first, announced: BTreeSet::new(), is_final: false });
        match self.announced {
            None => Err(Cause::InitOrder),
            Some((announced, _)) if sent > announced => Err(Cause::TooManyPages { sent, announced }),
            Some(_) => Ok(chunk),
        }
    }

    /// Layers of a chunk are final; `None` for all layers of this rank.
    pub(super) fn finish(
        &mut self,
        layers: &Layers,
        id: ChunkId,
        range: Option<Range<u32>>,
    ) -> Result<(), LayersError> {
        let given = number(self.chunks.len());
        let Some(chunk) = self.chunks.get_mut(id.0 as usize) else {
            return Err(LayersError::UnknownChunk { chunk: id.0, given });
        };
        let held = layers.hull();
        if let Some(range) = &range {
            if let Some(region) = layers.untold {
                return Err(LayersError::Untold { layers: range.clone(), region });
            }
            if range.is_empty() || range.start < held.start || held.end < range.end {
                return Err(LayersError::OutOfRange { layers: range.clone(), held });
            }
        }
        let range = range.unwrap_or(held.clone());
        let before = if chunk.is_final {
            Some(held)
        } else {
            chunk.announced.range(range.clone()).next().map(|layer| *layer..layer + 1)
        };
        if let Some(announced) = before {
            return Err(LayersError::Twice { chunk: id.0, layers: range, announced });
        }
        chunk.announced.extend(layers.held.range(range));
        chunk.is_final = chunk.announced.len() == layers.held.len();
        Ok(())
    }

    /// True once all announced pages are given and are final.
    pub(super) fn is_complete(&self) -> bool {
        self.announced.is_some_and(|(announced, _)| announced == self.pages)
            && !self.chunks.is_empty()
            && self.chunks.iter().all(|chunk| chunk.is_final)
    }
}

fn number(position: usize) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX)
}
