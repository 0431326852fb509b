//! The layers of which a rank holds pages, and which of them can be moved without the others.

use std::ops::Range;

use super::Geometry;
use crate::announce::LayersError;
use crate::layout::RegionRole;

/// The layers of a rank's KV regions. Made once for each worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldLayers {
    /// The layers, as disjoint runs in rising order.
    runs: Vec<Range<u32>>,
    /// Regions that cannot be cut, with the layers of each: all layers of such a region move
    /// together.
    whole: Vec<(usize, Range<u32>)>,
    /// The position of a region that does not say its layers, if there is one.
    untold: Option<usize>,
}

impl HeldLayers {
    /// The layers of a cache with this geometry.
    pub fn new(geometry: &Geometry) -> HeldLayers {
        let kv = geometry.regions.iter().enumerate().filter(|(_, region)| region.role == RegionRole::Kv);
        let mut all: Vec<_> = kv.map(|(index, region)| (index, region.layer_range())).collect();
        let untold = all.iter().find(|(_, layers)| layers.is_empty()).map(|(index, _)| *index);
        // If one region is opaque, every region goes only to the region at the same position.
        let whole = if geometry.kv_layers().is_none() { all.clone() } else { Vec::new() };
        all.sort_by_key(|(_, layers)| layers.start);
        let mut runs: Vec<Range<u32>> = Vec::new();
        for (_, layers) in all.into_iter().filter(|(_, layers)| !layers.is_empty()) {
            match runs.last_mut() {
                Some(last) if layers.start <= last.end => last.end = last.end.max(layers.end),
                _ => runs.push(layers),
            }
        }
        HeldLayers { runs, whole, untold }
    }

    /// The first layer of the rank, and one past the last; the rank may lack layers between them.
    pub fn hull(&self) -> Range<u32> {
        let start = self.runs.first().map_or(0, |run| run.start);
        start..self.runs.last().map_or(0, |run| run.end)
    }

    /// How many of these layers the rank holds.
    pub fn among(&self, layers: &Range<u32>) -> u32 {
        let shared = |run: &Range<u32>| run.end.min(layers.end).saturating_sub(run.start.max(layers.start));
        self.runs.iter().map(shared).sum()
    }

    /// Checks that the rank holds these layers, and that they can be moved without the others.
    pub fn check(&self, layers: &Range<u32>) -> Result<(), LayersError> {
        let held = self.hull();
        let told = layers.clone();
        if let Some(region) = self.untold {
            return Err(LayersError::Untold { layers: told, region });
        }
        if layers.is_empty() || layers.start < held.start || held.end < layers.end {
            return Err(LayersError::OutOfRange { layers: told, held });
        }
        let cut = |(_, held): &&(usize, Range<u32>)| {
            let (start, end) = (held.start.max(layers.start), held.end.min(layers.end));
            start < end && (start, end) != (held.start, held.end)
        };
        match self.whole.iter().find(cut) {
            Some((region, held)) => {
                Err(LayersError::Cut { layers: told, region: *region, held: held.clone() })
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::KvArgs;
    use crate::layout::Holds;
    use crate::layout::Region;

    fn held(regions: &[(Option<Range<u32>>, Holds)]) -> HeldLayers {
        let mut builder = KvArgs::builder("e", 0).pages(4, 16).heads(1, 1);
        for (number, (layers, holds)) in (1..).zip(regions) {
            let region = Region::dram(RegionRole::Kv, number << 20, 4 * 480, 480).holds(*holds);
            builder = builder.region(match layers {
                Some(layers) => region.layers(layers.clone()),
                None => region,
            });
        }
        HeldLayers::new(builder.build().unwrap().geometry())
    }

    #[test]
    fn layers_without_a_region_do_not_count_as_missing() {
        let held = held(&[(Some(8..10), Holds::Opaque), (Some(2..3), Holds::Opaque)]);
        assert_eq!((held.hull(), held.among(&(0..100)), held.among(&(3..9))), (2..10, 3, 1));
        assert_eq!(held.check(&(3..8)), Ok(()));
    }

    #[test]
    fn an_opaque_region_goes_whole() {
        let held = held(&[(Some(0..4), Holds::Opaque), (Some(4..5), Holds::Opaque)]);
        assert_eq!(held.check(&(0..4)), Ok(()));
        assert_eq!(held.check(&(4..5)), Ok(()));
        let cut = held.check(&(3..5)).unwrap_err();
        assert_eq!(cut, LayersError::Cut { layers: 3..5, region: 0, held: 0..4 });
        assert!(held.check(&(0..3)).is_err() && held.check(&(1..4)).is_err() && held.check(&(1..3)).is_err());
        assert_eq!(held.check(&(0..5)), Ok(()));
        assert!(
            cut.to_string().contains("layers 3..5 are a part of regions[0], which has layers 0..4"),
            "{cut}"
        );
    }

    #[test]
    fn layers_of_which_several_regions_hold_something_count_however_the_regions_overlap() {
        for regions in [[0..4, 1..2, 2..3], [1..2, 2..3, 0..4], [0..2, 1..4, 0..1], [0..1, 1..2, 2..4]] {
            let held = held(&regions.map(|layers| (Some(layers), Holds::Opaque)));
            assert_eq!((held.hull(), held.among(&(0..9)), held.among(&(3..9))), (0..4, 4, 1));
        }
    }

    #[test]
    fn a_region_with_a_declared_content_can_be_cut_by_layers() {
        let held = held(&[(Some(0..5), Holds::Latent)]);
        assert_eq!(held.check(&(3..4)), Ok(()));
        let beyond = held.check(&(3..6)).unwrap_err();
        assert_eq!(beyond, LayersError::OutOfRange { layers: 3..6, held: 0..5 });
        assert_eq!(beyond.to_string(), "layers 3..6 are final, but this rank holds layers 0..5");
        assert!(held.check(&(3..3)).is_err());
    }

    #[test]
    fn without_numbers_there_are_no_layers_to_name() {
        let held = held(&[(Some(0..1), Holds::Opaque), (None, Holds::Opaque)]);
        assert_eq!(held.check(&(0..1)), Err(LayersError::Untold { layers: 0..1, region: 1 }));
    }
}
