//! The pages of a sending session, as the scheduler has given them.
//!
//! | state | from | when |
//! |---|---|---|
//! | unannounced | – | the session was opened |
//! | announced | unannounced | the scheduler said how many pages the request has |
//! | in hand | announced | a chunk was begun |
//! | final, in part | in hand | layers of the chunk were announced as final: these layers may be written |
//! | complete | final, in part | all announced pages are given, and every chunk is final in all layers: the aux row may be written, and the pages may be read |

use std::ops::Range;

use crate::announce::LayersError;
use crate::error::Cause;
use crate::few::Few;
use crate::id::{AuxIndex, ChunkId};
use crate::layout::HeldLayers;
use crate::page_list::PageList;
use crate::pages::Pages;
use crate::proto::run_set::RunSet;

/// Everything that a scheduler has given to one sending session. `P` is what the session keeps of the pages of a
/// chunk: the pages, or only their list if another part of the machine keeps the pages.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
pub struct Given<P = Pages> {
    announced: Option<(usize, Option<AuxIndex>)>,
    chunks: Few<Chunk<P>>,
    /// How many pages all chunks have together.
    pages: usize,
    /// How many chunks are final in all layers.
    chunks_final: usize,
    /// The announcements of final layers, in order.
    finals: Few<Final>,
    complete: bool,
}

/// The pages of one chunk, their place in the request, and the layers that are final.
#[derive(Debug)]
#[cfg_attr(feature = "model", derive(Clone))]
struct Chunk<P> {
    offset: usize,
    pages: P,
    layers: Announced,
}

/// The layers of a chunk that were announced as final.
#[derive(Debug, Clone, Default)]
struct Announced {
    /// True if all layers were announced at once.
    whole: bool,
    some: RunSet,
    /// How many of the announced layers this rank holds.
    held: u32,
}

/// One announcement: layers of a chunk that may be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Final {
    /// The position in the list of chunks.
    chunk: usize,
    /// The layers; `None` for all layers of this rank.
    layers: Option<(u32, u32)>,
}

/// Pages of which some layers, or all, may be written.
#[derive(Debug, Clone, Copy)]
pub struct Writable<'a> {
    /// The pages, in the order of the request.
    pub pages: &'a PageList,
    /// The number of the first page in the request.
    pub first: usize,
    /// The layers that may be written; `None` for all layers of this rank.
    pub layers: Option<(u32, u32)>,
}

impl<P> Default for Given<P> {
    fn default() -> Given<P> {
        Given {
            announced: None,
            chunks: Few::default(),
            pages: 0,
            chunks_final: 0,
            finals: Few::default(),
            complete: false,
        }
    }
}

impl<P: AsRef<PageList>> Given<P> {
    /// The scheduler announces how many pages the request has. False if it has announced that
    /// before.
    pub fn announce(&mut self, num_pages: usize, aux: Option<AuxIndex>) -> bool {
        let first = self.announced.is_none();
        if first {
            self.announced = Some((num_pages, aux));
        }
        first
    }

    /// The announced number of pages, and the aux row; `None` before the announcement.
    pub fn announced(&self) -> Option<(usize, Option<AuxIndex>)> {
        self.announced
    }

    /// True if exactly so many of the announced pages have not been given yet.
    pub fn lacks(&self, pages: usize) -> bool {
        self.announced.is_some_and(|(announced, _)| announced == self.pages.saturating_add(pages))
    }

    /// The aux row, if the request has one.
    pub fn aux(&self) -> Option<AuxIndex> {
        self.announced.and_then(|(_, aux)| aux)
    }

    /// Takes the next pages, of which nothing is final yet. Pages are kept even on an error: they
    /// come back with the others.
    pub fn begin(&mut self, pages: P) -> Result<ChunkId, Cause> {
        let (offset, sent) = (self.pages, self.pages + pages.as_ref().len());
        let id = ChunkId(number(self.chunks.len()));
        self.pages = sent;
        self.chunks.push(Chunk { offset, pages, layers: Announced::default() });
        match self.announced {
            None => Err(Cause::InitOrder),
            Some((announced, _)) if sent > announced => Err(Cause::TooManyPages { sent, announced }),
            Some(_) => Ok(id),
        }
    }

    /// Layers of a chunk are final; `None` for all layers of this rank.
    pub fn finish(
        &mut self,
        chunk: ChunkId,
        layers: Option<Range<u32>>,
        held: &HeldLayers,
    ) -> Result<(), LayersError> {
        let given = number(self.chunks.len());
        let index = chunk.0 as usize;
        let Some(known) = self.chunks.get_mut(index) else {
            return Err(LayersError::UnknownChunk { chunk: chunk.0, given });
        };
        let before = known.layers.is_all(held);
        let noted = known.layers.add(index, layers, held);
        // Layers that no region holds may be announced even after those that count.
        self.chunks_final += usize::from(!before && known.layers.is_all(held));
        self.finals.push(noted?);
        let all = self.announced.is_some_and(|(announced, _)| self.pages == announced);
        self.complete |= all && self.chunks.len() == self.chunks_final;
        Ok(())
    }

    /// True once all announced pages were given and are final.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// How many announcements of final layers were made.
    pub fn finals(&self) -> usize {
        self.finals.len()
    }

    /// The pages and layers that this announcement has made writable.
    pub fn writable(&self, number: usize) -> Option<Writable<'_>> {
        let &Final { chunk, layers } = self.finals.get(number)?;
        let chunk = self.chunks.get(chunk)?;
        Some(Writable { pages: chunk.pages.as_ref(), first: chunk.offset, layers })
    }

    /// The chunks that are final in all layers, each with its position among all chunks.
    pub fn whole_chunks(&self, held: &HeldLayers) -> impl Iterator<Item = (usize, Writable<'_>)> {
        let whole = self.chunks.iter().enumerate().filter(|(_, chunk)| chunk.layers.is_all(held));
        whole.map(|(at, chunk)| {
            (at, Writable { pages: chunk.pages.as_ref(), first: chunk.offset, layers: None })
        })
    }

    /// How many pages were given.
    pub fn num_pages(&self) -> usize {
        self.pages
    }

    /// All pages given, in request order.
    pub fn all_pages(&self) -> PageList {
        let runs = self.chunks.iter().flat_map(|chunk| chunk.pages.as_ref().runs());
        PageList::from_runs(runs.copied()).unwrap_or_default()
    }

    /// The chunks as they were given, to be handed back.
    pub fn into_chunks(self) -> impl Iterator<Item = P> {
        self.chunks.into_iter().map(|chunk| chunk.pages)
    }
}

impl Announced {
    /// Notes layers as final. They must be layers of this rank, and not announced before.
    fn add(
        &mut self,
        chunk: usize,
        layers: Option<Range<u32>>,
        held: &HeldLayers,
    ) -> Result<Final, LayersError> {
        let hull = held.hull();
        if let Some(layers) = &layers {
            held.check(layers)?;
        }
        let wanted = layers.clone().unwrap_or(hull.clone());
        let (start, end) = (u64::from(wanted.start), u64::from(wanted.end));
        let before = if self.whole {
            Some(hull.clone())
        } else {
            let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
            self.some.shared(start..end).map(|run| narrow(run.start)..narrow(run.end))
        };
        if let Some(announced) = before {
            return Err(LayersError::Twice { chunk: number(chunk), layers: wanted, announced });
        }
        let layers = layers.filter(|layers| *layers != hull);
        self.whole = layers.is_none();
        self.some.insert(start, end - start);
        self.held += held.among(&wanted);
        Ok(Final { chunk, layers: layers.map(|layers| (layers.start, layers.end)) })
    }

    fn is_all(&self, held: &HeldLayers) -> bool {
        self.whole || self.held > 0 && self.held == held.among(&held.hull())
    }
}

fn number(position: usize) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::KvArgs;
    use crate::layout::{Region, RegionRole};

    fn held() -> HeldLayers {
        let region = |layer: u32| {
            let addr = 0x1000 * u64::from(layer + 1);
            Region { layer: Some(layer), ..Region::dram(RegionRole::Kv, addr, 4 * 64, 64) }
        };
        let args = KvArgs::builder("p", 0).pages(4, 16).region(region(0)).region(region(1)).build().unwrap();
        HeldLayers::new(args.geometry())
    }

    fn pages(first: u32) -> Pages {
        Pages::unpooled(PageList::from_pages([first, first + 1]).unwrap()).unwrap()
    }

    /// The table at the top, row by row.
    #[test]
    fn pages_are_announced_then_in_hand_then_final_then_complete() {
        let held = held();
        let mut given = Given::default();
        assert!(given.announced().is_none() && given.writable(0).is_none());
        assert!(given.announce(4, Some(AuxIndex(2))));
        assert!(!given.announce(5, None), "announced twice");
        assert_eq!((given.announced(), given.aux()), (Some((4, Some(AuxIndex(2)))), Some(AuxIndex(2))));
        let (one, two) = (given.begin(pages(0)).unwrap(), given.begin(pages(2)).unwrap());
        assert_eq!((given.num_pages(), given.finals(), given.is_complete()), (4, 0, false));
        given.finish(two, None, &held).unwrap();
        given.finish(one, Some(0..1), &held).unwrap();
        assert!(!given.is_complete(), "a layer of the first chunk is not final");
        let first = given.writable(0).unwrap();
        assert_eq!((first.pages.len(), first.first, first.layers), (2, 2, None));
        assert_eq!(given.writable(1).unwrap().layers, Some((0, 1)));
        let whole = |given: &Given| given.whole_chunks(&held).map(|(at, _)| at).collect::<Vec<_>>();
        assert_eq!(whole(&given), [1]);
        given.finish(one, Some(1..2), &held).unwrap();
        assert_eq!(whole(&given), [0, 1]);
        assert!(given.is_complete());
        assert_eq!(given.all_pages(), PageList::from_pages([0, 1, 2, 3]).unwrap());
        assert_eq!(given.into_chunks().count(), 2);
    }

    #[test]
    fn refused_pages_are_kept_until_they_can_be_handed_back() {
        let mut given = Given::default();
        assert_eq!(given.begin(pages(0)), Err(Cause::InitOrder));
        given.announce(3, None);
        assert_eq!(given.begin(pages(2)), Err(Cause::TooManyPages { sent: 4, announced: 3 }));
        assert_eq!(given.into_chunks().map(|pages| pages.len()).sum::<usize>(), 4);
    }
}
