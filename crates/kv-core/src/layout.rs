//! How a worker's regions hold the cache: the geometry that peers compare.

use std::fmt::Display;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::args::{MAX_REGIONS, MemoryKind, Parallel, Region, RegionRole};
use crate::error::Mismatch;
use crate::pages::MAX_PAGES;

/// A region as peers are told it: without its address, which is the plane's business.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionShape {
    /// What it is for.
    pub role: RegionRole,
    /// Length in bytes.
    pub len: u64,
    /// Bytes of one item.
    pub item_len: u64,
    /// Kind of memory.
    pub memory: MemoryKind,
    /// The model layer, if it holds one.
    pub layer: Option<u32>,
}

impl RegionShape {
    /// How many whole items it holds; none if `item_len` is zero.
    pub fn items(&self) -> u64 {
        self.len.checked_div(self.item_len).unwrap_or(0)
    }
}

impl From<&Region> for RegionShape {
    fn from(region: &Region) -> RegionShape {
        RegionShape {
            role: region.role,
            len: region.len,
            item_len: region.item_len,
            memory: region.memory,
            layer: region.layer,
        }
    }
}

/// The geometry of a worker's cache: everything that two peers must agree on, or plan around.
///
/// Pages are `item_len` bytes in each KV region. Two layouts are common: *layer-major*, one region
/// for K and one for V of each layer; *page-major*, one region in which a page holds all layers.
/// Here both are just lists of regions; the second makes one descriptor of a page, the first one
/// for each region.
///
/// One that a [`KvArgs`](crate::KvArgs) gives is valid. One that came from a peer may be anything:
/// [`validate`](Geometry::validate) it before use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// Pages in the cache.
    pub num_pages: u32,
    /// Tokens in a page.
    pub page_size: u32,
    /// Element type.
    pub dtype: String,
    /// KV heads on this rank.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Name or hash of the model; empty if not given.
    pub model: String,
    /// Parallel groups.
    pub parallel: Parallel,
    /// The regions: KV, then aux, then state.
    pub regions: Vec<RegionShape>,
}

impl Geometry {
    /// Checks that pages can go from one cache to the other item by item: the first field in which
    /// they differ, if one does.
    ///
    /// Number of pages, rows and slots, kind of memory and data-parallel place may differ. Both
    /// must be valid; the values in the error are then short enough for a frame.
    pub fn check(&self, peer: &Geometry) -> Result<(), Mismatch> {
        same("page_size", self.page_size, peer.page_size)?;
        same_text("dtype", &self.dtype, &peer.dtype)?;
        same("kv_heads", self.kv_heads, peer.kv_heads)?;
        same("head_dim", self.head_dim, peer.head_dim)?;
        same_text("model", &self.model, &peer.model)?;
        let (here, there) = (&self.parallel, &peer.parallel);
        same("tp_size", here.tp_size, there.tp_size)?;
        same("pp_size", here.pp_size, there.pp_size)?;
        same("tp_rank", here.tp_rank, there.tp_rank)?;
        same("pp_rank", here.pp_rank, there.pp_rank)?;
        for (field, role) in [
            ("kv_regions", RegionRole::Kv),
            ("aux_regions", RegionRole::Aux),
            ("state_regions", RegionRole::State),
        ] {
            same(field, self.count(role), peer.count(role))?;
        }
        for (index, (ours, theirs)) in self.regions.iter().zip(&peer.regions).enumerate() {
            check_region(index, ours, theirs)?;
        }
        Ok(())
    }

    /// Checks a geometry that came from a peer, by the same rules as
    /// [`KvArgsBuilder::build`](crate::KvArgsBuilder::build): after this, every page, row and slot
    /// lies inside its region, and no arithmetic on them overflows or divides by zero.
    pub fn validate(&self) -> Result<(), GeometryError> {
        range("num_pages", self.num_pages, 1, MAX_PAGES)?;
        range("page_size", self.page_size, 1, 1 << 20)?;
        range("kv_heads", self.kv_heads, 1, 1 << 16)?;
        range("head_dim", self.head_dim, 1, 1 << 20)?;
        range("dtype.len", self.dtype.len() as u64, 1, 64)?;
        range("model.len", self.model.len() as u64, 0, 256)?;
        range("regions.len", self.regions.len() as u64, 1, MAX_REGIONS as u64)?;
        let Parallel { tp_size, tp_rank, pp_size, pp_rank, dp_size, dp_rank } = self.parallel;
        for (size_field, rank_field, size, rank) in [
            ("tp_size", "tp_rank", tp_size, tp_rank),
            ("pp_size", "pp_rank", pp_size, pp_rank),
            ("dp_size", "dp_rank", dp_size, dp_rank),
        ] {
            range(size_field, size, 1, 4096_u32)?;
            range(rank_field, rank, 0, size - 1)?;
        }
        let mut before = RegionRole::Kv;
        for (index, region) in self.regions.iter().enumerate() {
            if region.role < before {
                let (role, before) = (region.role.name(), before.name());
                return Err(GeometryError::RegionOrder { region: index, role, before });
            }
            before = region.role;
            self.validate_region(index, region)?;
        }
        Ok(())
    }

    fn validate_region(&self, index: usize, region: &RegionShape) -> Result<(), GeometryError> {
        let (len, item_len) = (region.len, region.item_len);
        if !(1..=MAX_ITEM_LEN).contains(&item_len) {
            return Err(GeometryError::ItemLen { region: index, got: item_len, max: MAX_ITEM_LEN });
        }
        let items = match region.role {
            RegionRole::Kv => u64::from(self.num_pages),
            RegionRole::Aux | RegionRole::State => region.items().clamp(1, u64::from(u32::MAX)),
        };
        if item_len.checked_mul(items) != Some(len) {
            let role = region.role.name();
            return Err(GeometryError::RegionLength { region: index, role, len, item_len, items });
        }
        Ok(())
    }

    /// The positions of the KV regions.
    pub fn kv_regions(&self) -> Range<usize> {
        self.regions_of(RegionRole::Kv)
    }

    /// The positions of the aux regions.
    pub fn aux_regions(&self) -> Range<usize> {
        self.regions_of(RegionRole::Aux)
    }

    /// How many rows every aux region has; `None` if there is no aux region.
    pub fn aux_rows(&self) -> Option<u32> {
        let rows = self.regions.get(self.aux_regions())?.iter().map(RegionShape::items).min()?;
        Some(u32::try_from(rows).unwrap_or(u32::MAX))
    }

    /// Bytes of one page in all KV regions together.
    pub fn bytes_per_page(&self) -> u64 {
        let kv = self.regions.iter().filter(|region| region.role == RegionRole::Kv);
        kv.fold(0, |sum, region| sum.saturating_add(region.item_len))
    }

    fn regions_of(&self, role: RegionRole) -> Range<usize> {
        let start = self.regions.partition_point(|region| region.role < role);
        start..self.regions.partition_point(|region| region.role <= role)
    }

    fn count(&self, role: RegionRole) -> usize {
        self.regions.iter().filter(|region| region.role == role).count()
    }
}

/// Most bytes of one item: the page of a page-major cache of a very large model is some MiB.
const MAX_ITEM_LEN: u64 = 1 << 40;

/// A geometry that no worker can have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// A number, or the length of a text, outside its range.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        got: u64,
        /// Smallest allowed.
        min: u64,
        /// Largest allowed.
        max: u64,
    },
    /// A region whose items are empty or huge.
    #[error("regions[{region}].item_len is {got}; it must be 1 to {max}")]
    ItemLen {
        /// Position in the list of regions.
        region: usize,
        /// Its `item_len`.
        got: u64,
        /// Largest allowed.
        max: u64,
    },
    /// A region whose bytes are not `items × item_len`.
    #[error("regions[{region}] ({role}): len {len} is not {items} items of item_len {item_len}")]
    RegionLength {
        /// Position in the list of regions.
        region: usize,
        /// `kv`, `aux` or `state`.
        role: &'static str,
        /// Its length in bytes.
        len: u64,
        /// Bytes of one item.
        item_len: u64,
        /// Items it must hold.
        items: u64,
    },
    /// Regions are listed KV first, then aux, then state.
    #[error("regions[{region}] is {role}, after a region that is {before}")]
    RegionOrder {
        /// Position in the list of regions.
        region: usize,
        /// Its role.
        role: &'static str,
        /// The role of the region before it.
        before: &'static str,
    },
}

fn range<N: Into<u64>>(field: &'static str, got: N, min: u64, max: N) -> Result<(), GeometryError> {
    let (got, max) = (got.into(), max.into());
    if (min..=max).contains(&got) { Ok(()) } else { Err(GeometryError::Range { field, got, min, max }) }
}

fn same<T: PartialEq + Display>(field: &str, ours: T, theirs: T) -> Result<(), Mismatch> {
    if ours == theirs {
        return Ok(());
    }
    Err(Mismatch { field: field.to_owned(), ours: ours.to_string(), theirs: theirs.to_string() })
}

/// Quoted and escaped: the peer chose the characters, and they end up in logs.
fn same_text(field: &str, ours: &str, theirs: &str) -> Result<(), Mismatch> {
    if ours == theirs {
        return Ok(());
    }
    Err(Mismatch { field: field.to_owned(), ours: format!("{ours:?}"), theirs: format!("{theirs:?}") })
}

fn check_region(index: usize, ours: &RegionShape, theirs: &RegionShape) -> Result<(), Mismatch> {
    let of_region =
        |mismatch: Mismatch| Mismatch { field: format!("regions[{index}].{}", mismatch.field), ..mismatch };
    let layer =
        |shape: &RegionShape| shape.layer.map_or_else(|| "none".to_owned(), |layer| layer.to_string());
    same("role", ours.role.name(), theirs.role.name()).map_err(of_region)?;
    same("item_len", ours.item_len, theirs.item_len).map_err(of_region)?;
    if ours.layer != theirs.layer {
        same("layer", layer(ours), layer(theirs)).map_err(of_region)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::KvArgs;

    fn shape(role: RegionRole, items: u64, item_len: u64) -> RegionShape {
        RegionShape { role, len: items * item_len, item_len, memory: MemoryKind::Dram, layer: None }
    }

    /// K and V of layer 7, two aux regions of 5 and 3 rows, one state region.
    fn geometry() -> Geometry {
        let mut regions = vec![
            shape(RegionRole::Kv, 10, 64),
            shape(RegionRole::Kv, 10, 32),
            shape(RegionRole::Aux, 5, 16),
            shape(RegionRole::Aux, 3, 8),
            shape(RegionRole::State, 4, 100),
        ];
        regions[0].layer = Some(7);
        regions[1].layer = Some(7);
        Geometry {
            num_pages: 10,
            page_size: 16,
            dtype: "bf16".to_owned(),
            kv_heads: 2,
            head_dim: 64,
            model: "m".to_owned(),
            parallel: Parallel { tp_size: 4, tp_rank: 1, pp_size: 4, pp_rank: 1, dp_size: 2, dp_rank: 0 },
            regions,
        }
    }

    fn changed(change: impl FnOnce(&mut Geometry)) -> Geometry {
        let mut geometry = geometry();
        change(&mut geometry);
        geometry
    }

    fn remove(geometry: &mut Geometry, region: usize) {
        geometry.regions.remove(region);
    }

    /// Field, value here, value there, and what makes it so at the peer.
    type Difference = (&'static str, &'static str, &'static str, fn(&mut Geometry));

    #[test]
    fn a_mismatch_names_the_field_and_both_values() {
        let differences: &[Difference] = &[
            ("page_size", "16", "32", |peer| peer.page_size = 32),
            ("dtype", "\"bf16\"", "\"f\\n16\"", |peer| peer.dtype = "f\n16".to_owned()),
            ("kv_heads", "2", "1", |peer| peer.kv_heads = 1),
            ("head_dim", "64", "128", |peer| peer.head_dim = 128),
            ("model", "\"m\"", "\"\"", |peer| peer.model.clear()),
            ("tp_size", "4", "2", |peer| peer.parallel.tp_size = 2),
            ("pp_size", "4", "2", |peer| peer.parallel.pp_size = 2),
            ("tp_rank", "1", "0", |peer| peer.parallel.tp_rank = 0),
            ("pp_rank", "1", "3", |peer| peer.parallel.pp_rank = 3),
            ("kv_regions", "2", "1", |peer| remove(peer, 0)),
            ("aux_regions", "2", "1", |peer| remove(peer, 3)),
            ("state_regions", "1", "0", |peer| remove(peer, 4)),
            ("regions[1].item_len", "32", "48", |peer| peer.regions[1].item_len = 48),
            ("regions[1].layer", "7", "8", |peer| peer.regions[1].layer = Some(8)),
            ("regions[0].layer", "7", "none", |peer| peer.regions[0].layer = None),
            ("regions[3].item_len", "8", "4", |peer| peer.regions[3].item_len = 4),
            ("regions[4].item_len", "100", "50", |peer| peer.regions[4].item_len = 50),
            ("regions[1].role", "kv", "aux", |peer| peer.regions.swap(1, 2)),
        ];
        for (field, ours, theirs, change) in differences {
            let mismatch = geometry().check(&changed(*change)).unwrap_err();
            assert_eq!((&*mismatch.field, &*mismatch.ours, &*mismatch.theirs), (*field, *ours, *theirs));
        }
    }

    #[test]
    fn sizes_of_the_cache_replica_and_memory_may_differ() {
        let peer = changed(|peer| {
            peer.num_pages = 3;
            peer.parallel.dp_size = 1;
            for region in &mut peer.regions {
                region.len = 3 * region.item_len;
                region.memory = MemoryKind::Vram;
            }
        });
        assert_eq!(peer.validate(), Ok(()));
        assert_eq!(geometry().check(&peer), Ok(()));
        assert_eq!(peer.check(&geometry()), Ok(()));
    }

    /// What makes a geometry impossible, and how it is refused.
    type Impossible = (fn(&mut Geometry), GeometryError);

    #[test]
    fn an_impossible_geometry_is_refused_with_the_field_and_its_bounds() {
        let out_of_range = |field, got, min, max| GeometryError::Range { field, got, min, max };
        let cases: Vec<Impossible> = vec![
            (|g| g.num_pages = 0, out_of_range("num_pages", 0, 1, 1 << 24)),
            (|g| g.num_pages = MAX_PAGES + 1, out_of_range("num_pages", (1 << 24) + 1, 1, 1 << 24)),
            (|g| g.page_size = 0, out_of_range("page_size", 0, 1, 1 << 20)),
            (|g| g.kv_heads = u32::MAX, out_of_range("kv_heads", u64::from(u32::MAX), 1, 1 << 16)),
            (|g| g.head_dim = 0, out_of_range("head_dim", 0, 1, 1 << 20)),
            (|g| g.dtype = "x".repeat(65), out_of_range("dtype.len", 65, 1, 64)),
            (|g| g.model = "x".repeat(257), out_of_range("model.len", 257, 0, 256)),
            (|g| g.regions.clear(), out_of_range("regions.len", 0, 1, 4096)),
            (
                |g| g.regions = vec![shape(RegionRole::Kv, 10, 1); 4097],
                out_of_range("regions.len", 4097, 1, 4096),
            ),
            (|g| g.parallel.tp_size = 0, out_of_range("tp_size", 0, 1, 4096)),
            (|g| g.parallel.dp_size = 4097, out_of_range("dp_size", 4097, 1, 4096)),
            (|g| g.parallel.pp_rank = 4, out_of_range("pp_rank", 4, 0, 3)),
            (|g| g.regions[1].item_len = 0, GeometryError::ItemLen { region: 1, got: 0, max: 1 << 40 }),
            (
                |g| g.regions[3].item_len = u64::MAX,
                GeometryError::ItemLen { region: 3, got: u64::MAX, max: 1 << 40 },
            ),
            (|g| g.regions.swap(1, 2), GeometryError::RegionOrder { region: 2, role: "kv", before: "aux" }),
        ];
        for (change, error) in cases {
            assert_eq!(changed(change).validate(), Err(error));
        }
        assert_eq!(geometry().validate(), Ok(()));
    }

    #[test]
    fn a_region_holds_whole_items_and_exactly_the_pages() {
        let length = |region, role, len, item_len, items| {
            Err(GeometryError::RegionLength { region, role, len, item_len, items })
        };
        assert_eq!(changed(|g| g.regions[0].len += 64).validate(), length(0, "kv", 704, 64, 10));
        assert_eq!(changed(|g| g.regions[2].len += 1).validate(), length(2, "aux", 81, 16, 5));
        assert_eq!(changed(|g| g.regions[4].len = 0).validate(), length(4, "state", 0, 100, 1));
        // 2^24 pages of 2^40 bytes are 2^64 bytes: the product wraps to the length given.
        let wrapping = changed(|g| {
            g.num_pages = MAX_PAGES;
            g.regions = vec![RegionShape { len: 0, item_len: 1 << 40, ..g.regions[0].clone() }];
        });
        assert_eq!(wrapping.validate(), length(0, "kv", 0, 1 << 40, 1 << 24));
        // More rows than an index can name.
        let rows = u64::from(u32::MAX);
        let many = changed(|g| g.regions[2] = shape(RegionRole::Aux, rows + 1, 1));
        assert_eq!(many.validate(), length(2, "aux", rows + 1, 1, rows));
    }

    #[test]
    fn whatever_a_builder_accepts_a_peer_accepts() {
        let smallest = KvArgs::builder("e", 0).pages(1, 1).region(Region::dram(RegionRole::Kv, 8, 1, 1));
        let parallel = Parallel {
            tp_size: 4096,
            tp_rank: 4095,
            pp_size: 4096,
            pp_rank: 4095,
            dp_size: 4096,
            dp_rank: 4095,
        };
        let largest = KvArgs::builder("e", 0)
            .pages(MAX_PAGES, 1 << 20)
            .heads(1 << 16, 1 << 20)
            .dtype(&"x".repeat(64))
            .model(&"x".repeat(256))
            .parallel(parallel)
            .region(Region::dram(RegionRole::Aux, 8, u64::from(u32::MAX), 1))
            .region(Region::dram(RegionRole::State, 1 << 62, 1 << 40, 1 << 40))
            .region(Region::dram(RegionRole::Kv, 1 << 40, 1 << 61, 1 << 37));
        for args in [smallest, largest] {
            assert_eq!(args.build().unwrap().geometry().validate(), Ok(()));
        }
    }

    #[test]
    fn hostile_json_parses_and_is_then_refused() {
        let mut json = serde_json::to_value(geometry()).unwrap();
        json["regions"][0]["item_len"] = 0.into();
        let hostile: Geometry = serde_json::from_value(json).unwrap();
        assert_eq!(hostile.validate(), Err(GeometryError::ItemLen { region: 0, got: 0, max: 1 << 40 }));
        assert_eq!(hostile.regions[0].items(), 0);
    }

    #[test]
    fn rows_are_those_that_every_aux_region_has() {
        assert_eq!(geometry().aux_rows(), Some(3));
        assert_eq!(changed(|g| drop(g.regions.drain(2..4))).aux_rows(), None);
        assert_eq!(geometry().kv_regions(), 0..2);
        assert_eq!(geometry().aux_regions(), 2..4);
        assert_eq!(geometry().bytes_per_page(), 96);
    }
}
