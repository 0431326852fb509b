//! The rules that every geometry keeps, whether a server or a peer gives it.

use std::collections::BTreeSet;

use super::cells::held_twice;
use super::form::MAX_ELEMENT_RANGES;
use super::shape::{Holds, MAX_CACHE_GROUPS};
use super::{Geometry, RegionShape};
use crate::layout::MAX_REGIONS;
use crate::layout::RegionRole;
use crate::meter::each;
use crate::page_list::MAX_PAGES;

impl Geometry {
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
        for (size_field, rank_field, size, rank) in self.parallel.groups() {
            range(size_field, size, 1, 4096_u32)?;
            range(rank_field, rank, 0, size - 1)?;
        }
        self.validate_layout()?;
        let mut before = RegionRole::Kv;
        for (index, region) in each(&self.regions).enumerate() {
            if region.role < before {
                let (role, before) = (region.role.name(), before.name());
                return Err(GeometryError::RegionOrder { region: index, role, before });
            }
            before = region.role;
            self.validate_region(index, region)?;
        }
        self.validate_element_ranges()?;
        match held_twice(self) {
            Some((first, second, layer)) => Err(GeometryError::HeldTwice { first, second, layer }),
            None => Ok(()),
        }
    }

    fn validate_layout(&self) -> Result<(), GeometryError> {
        let (layout, tp_size) = (&self.layout, self.parallel.tp_size);
        if !layout.axes.is_complete() {
            return Err(GeometryError::Axes { region: None });
        }
        range("dcp_size", layout.dcp_size, 1, tp_size)?;
        range("kernel_page_size", layout.kernel_page_size, 0, self.page_size)?;
        range("total_kv_heads", layout.total_kv_heads, 0, 1 << 16)?;
        range("layout.groups.len", layout.groups.len() as u64, 0, MAX_CACHE_GROUPS as u64)?;
        range("layout.stages.len", layout.stages.len() as u64, 0, u64::from(self.parallel.pp_size))?;
        whole("tp_size", tp_size, "dcp_size", layout.dcp_size)?;
        whole("page_size", self.page_size, "kernel_page_size", self.kernel_page_size())?;
        // What is counted in physical pages has a number of 32 bits.
        let physical = self.page_size / self.kernel_page_size().max(1);
        range(
            "num_pages in physical pages",
            u64::from(self.num_pages) * u64::from(physical),
            0,
            u32::MAX.into(),
        )?;
        let dcp_rank = self.parallel.tp_rank % layout.dcp_size;
        range("dcp_rank", layout.dcp_rank, dcp_rank.into(), dcp_rank)?;
        for &(first, end) in each(&layout.stages) {
            range("layout.stages.end", end, 0, MAX_LAYERS)?;
            range("layout.stages.first", first, 0, end)?;
        }
        layout.validate_constants()?;
        if layout.total_kv_heads > 0 {
            self.validate_heads(self.kv_heads, layout.total_kv_heads)?;
        }
        for group in each(&layout.groups) {
            range("group.page_size", group.page_size, 1, 1 << 20)?;
            range("group.heads", group.heads, 1, 1 << 16)?;
            range("group.total_heads", group.total_heads, 1, 1 << 24)?;
            self.validate_heads(group.heads, group.total_heads)?;
        }
        Ok(())
    }

    /// Heads are cut evenly among the ranks, or ranks evenly among the heads.
    fn validate_heads(&self, heads: u32, total: u32) -> Result<(), GeometryError> {
        let ranks = self.replicas();
        let cut = total.is_multiple_of(ranks) && heads == total / ranks;
        let repeated = ranks.is_multiple_of(total) && heads == 1;
        if cut || repeated { Ok(()) } else { Err(GeometryError::Heads { heads, total, ranks }) }
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
        self.validate_content(index, region)
    }

    /// Checks that a region that says what it holds says everything that is needed, and that its
    /// items can be cut so.
    fn validate_content(&self, index: usize, region: &RegionShape) -> Result<(), GeometryError> {
        let groups = self.layout.groups.len();
        let group_end = if region.role == RegionRole::State { groups.max(1) as u64 - 1 } else { 0 };
        range("regions.group", u64::from(region.group), 0, group_end)?;
        if region.holds == Holds::Opaque {
            return if region.form.is_plain() { Ok(()) } else { Err(GeometryError::Form { region: index }) };
        }
        let wrong_role = match region.role {
            RegionRole::Kv => matches!(region.holds, Holds::State(_)),
            RegionRole::Aux => true,
            RegionRole::State => groups == 0,
        };
        let layers = region.layer_range();
        let no_layers = region.layer.is_none() || layers.is_empty() || layers.end > MAX_LAYERS;
        if wrong_role || no_layers || layers.len() != region.layers as usize {
            return Err(GeometryError::Content { region: index, max: MAX_LAYERS });
        }
        self.validate_form(index, region)?;
        let heads = self.heads_of(region);
        let sizes = [self.ratio_of(region), region.layers, region.holds.parts(), self.tokens_of(region)];
        let mut pieces = u64::from(heads.1 - heads.0);
        for size in sizes {
            // At most 2^16 heads × 2^20 tokens (with the ratio) × 2 parts × 2^16 layers.
            pieces = pieces.saturating_mul(u64::from(size));
        }
        if !region.item_len.is_multiple_of(pieces) {
            return Err(GeometryError::Pieces { region: index, item_len: region.item_len, pieces });
        }
        self.validate_elements(index, region, region.item_len / pieces)
    }

    /// Checks what a region says of itself where it differs from the rest of the cache.
    fn validate_form(&self, index: usize, region: &RegionShape) -> Result<(), GeometryError> {
        let of_region = |field, got: u32, min, max| match (min..=max).contains(&got) {
            true => Ok(()),
            false => Err(GeometryError::RegionRange { region: index, field, got, min, max }),
        };
        if !self.axes_of(region).is_complete() {
            return Err(GeometryError::Axes { region: Some(index) });
        }
        if let Some((heads, total)) = region.form.heads {
            of_region("heads", heads, 1, 1 << 16)?;
            of_region("total_heads", total, 1, 1 << 24)?;
            self.validate_heads(heads, total)?;
        }
        let head_dim = self.head_dim_of(region);
        of_region("head_dim", head_dim, 1, 1 << 20)?;
        let (start, end) = self.elements_of(region);
        of_region("elements.end", end, 1, head_dim)?;
        of_region("elements.start", start, 0, end - 1)
    }

    /// Checks that the `bytes` of a head of a token can be cut into elements and packs, where that matters.
    fn validate_elements(&self, index: usize, region: &RegionShape, bytes: u64) -> Result<(), GeometryError> {
        let (axes, (start, end)) = (self.axes_of(region), self.elements_of(region));
        let count = end - start;
        let whole = |field, got: u64, of_field, of: u64| match of > 0 && got.is_multiple_of(of) {
            true => Ok(()),
            false => Err(GeometryError::RegionMultiple { region: index, field, got, of_field, of }),
        };
        if !axes.dim_is_innermost() || region.form.elements.is_some() {
            whole("head_bytes", bytes, "the elements of a head", count.into())?;
            whole("elements", count.into(), "axes.pack", axes.pack().into())?;
        }
        Ok(())
    }

    /// A plan cuts every head where some region's elements begin or end.
    fn validate_element_ranges(&self) -> Result<(), GeometryError> {
        let mut ranges = BTreeSet::new();
        for region in each(&self.regions).filter(|region| region.holds != Holds::Opaque) {
            ranges.insert(self.elements_of(region));
            range("ranges of elements", ranges.len() as u64, 1, MAX_ELEMENT_RANGES as u64)?;
        }
        Ok(())
    }
}

/// One more than the highest layer.
const MAX_LAYERS: u32 = 1 << 16;

/// Most bytes of one item: the page of a page-major cache of a very large model is some MiB.
const MAX_ITEM_LEN: u64 = 1 << 40;

/// Why a geometry is not valid. No worker can have such a geometry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// A number, or the length of a text, is outside its range.
    #[error("{field} is {got}; it must be {min} to {max}")]
    Range {
        /// The name of the field.
        field: &'static str,
        /// The value, or the length of the text.
        got: u64,
        /// The smallest value allowed.
        min: u64,
        /// The largest value allowed.
        max: u64,
    },
    /// The items of a region are empty or too long.
    #[error("regions[{region}].item_len is {got}; it must be 1 to {max}")]
    ItemLen {
        /// Position in the list of regions.
        region: usize,
        /// The region's `item_len` in bytes.
        got: u64,
        /// The largest `item_len` allowed, in bytes.
        max: u64,
    },
    /// The length of a region is not `items × item_len`.
    #[error("regions[{region}] ({role}): len {len} is not {items} items of item_len {item_len}")]
    RegionLength {
        /// Position in the list of regions.
        region: usize,
        /// `kv`, `aux` or `state`.
        role: &'static str,
        /// The region's length in bytes.
        len: u64,
        /// The length of one item in bytes.
        item_len: u64,
        /// How many items the region must hold.
        items: u64,
    },
    /// The regions are not in the order KV, aux, state.
    #[error("regions[{region}] is {role}, after a region that is {before}")]
    RegionOrder {
        /// Position in the list of regions.
        region: usize,
        /// The region's role: `kv`, `aux` or `state`.
        role: &'static str,
        /// The role of the region before it.
        before: &'static str,
    },
    /// A size is not a whole multiple of another.
    #[error("{field} {got} is not a multiple of {of_field} {of}")]
    Multiple {
        /// The name of the field.
        field: &'static str,
        /// The value of that field.
        got: u32,
        /// The name of the field that must divide it.
        of_field: &'static str,
        /// The value of the dividing field.
        of: u32,
    },
    /// The axes of an item name a direction twice.
    #[error("{} must name layer, part, token, head and dim once each", axes_of(.region))]
    Axes {
        /// Position in the list of the region whose own axes these are; `None` for the axes of the layout.
        region: Option<usize>,
    },
    /// A number that a region gives is outside its range.
    #[error("regions[{region}].{field} is {got}; it must be {min} to {max}")]
    RegionRange {
        /// Position in the list of regions.
        region: usize,
        /// The name of the field.
        field: &'static str,
        /// The value of the field.
        got: u32,
        /// The smallest value allowed.
        min: u32,
        /// The largest value allowed.
        max: u32,
    },
    /// A size of a region is not a whole multiple of another.
    #[error("regions[{region}].{field} {got} is not a multiple of {of_field}, {of}")]
    RegionMultiple {
        /// Position in the list of regions.
        region: usize,
        /// The name of the field.
        field: &'static str,
        /// The value of that field.
        got: u64,
        /// The name of what must divide the field.
        of_field: &'static str,
        /// The value of the divisor.
        of: u64,
    },
    /// A region gives axes, heads, a head size or elements, but does not say what it holds.
    #[error(
        "regions[{region}] gives axes, heads, head_dim or elements: it must also say what it holds (Region::holds)"
    )]
    Form {
        /// Position in the list of regions.
        region: usize,
    },
    /// The heads cannot be shared out evenly among the ranks.
    #[error("{heads} heads on each rank and {total} heads in all cannot be shared out among {ranks} ranks")]
    Heads {
        /// How many heads this rank holds.
        heads: u32,
        /// How many heads all ranks hold together.
        total: u32,
        /// How many ranks share the heads.
        ranks: u32,
    },
    /// A region says what its items hold, but does not say its layers, or has a role whose items
    /// cannot hold that.
    #[error(
        "regions[{region}] says what it holds: it needs layers below {max}, a role that can hold it, \
         and a state region needs a group"
    )]
    Content {
        /// Position in the list of regions.
        region: usize,
        /// One more than the highest layer.
        max: u32,
    },
    /// The items of a region cannot be cut into equal pieces as the layout says.
    #[error(
        "regions[{region}].item_len {item_len} is not a multiple of {pieces} (layers × parts × tokens × heads)"
    )]
    Pieces {
        /// Position in the list of regions.
        region: usize,
        /// The length of one item in bytes.
        item_len: u64,
        /// How many pieces an item has: layers × parts × tokens × heads.
        pieces: u64,
    },
    /// Two regions say that they hold the same bytes.
    #[error("regions[{first}] and regions[{second}] both hold the same part of layer {layer}")]
    HeldTwice {
        /// Position of the first region in the list.
        first: u32,
        /// Position of the second region in the list.
        second: u32,
        /// The first layer that both hold.
        layer: u32,
    },
}

fn axes_of(region: &Option<usize>) -> String {
    region.map_or_else(|| "layout.axes".to_owned(), |region| format!("regions[{region}].axes"))
}

fn whole(field: &'static str, got: u32, of_field: &'static str, of: u32) -> Result<(), GeometryError> {
    if got.is_multiple_of(of) { Ok(()) } else { Err(GeometryError::Multiple { field, got, of_field, of }) }
}

fn range<N: Into<u64>>(field: &'static str, got: N, min: u64, max: N) -> Result<(), GeometryError> {
    let (got, max) = (got.into(), max.into());
    if (min..=max).contains(&got) { Ok(()) } else { Err(GeometryError::Range { field, got, min, max }) }
}
