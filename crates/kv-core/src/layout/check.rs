//! Whether two caches can exchange bytes at all, and if not, in which field they differ.

use std::fmt::Display;

use super::cells::{Holder, Inside, Overlap, holders, overlaps};
use super::form::Form;
use super::loops::{Loops, Unaligned};
use super::ranks::gcd;
use super::shape::Holds;
use super::{Geometry, RegionShape};
use crate::error::Mismatch;
use crate::layout::RegionRole;
use crate::meter::each;

/// The name of the field for pages that are dealt to ranks, in a [`Mismatch`].
const DEALT_PAGES: &str = "page_size of dealt pages";

/// Most ranges of one token in all regions together, where the elements of a head are apart on one side
/// and together on the other: every range is a descriptor of some elements only. At 2 µs each, so many
/// take as long as it takes to compute the token.
pub const MAX_SPLIT_RANGES: u64 = 1 << 14;

impl Geometry {
    /// Checks that the two caches can exchange bytes. The error names the first field that prevents
    /// it, and both values.
    ///
    /// The numbers of pages, rows and slots, the kind of memory, and the data-parallel place may
    /// always differ. The sizes of parallel groups, pages and layouts may differ if all KV regions
    /// say what they [hold](Holds); where elements of a head that lie together on one side are apart on the
    /// other, up to [`MAX_SPLIT_RANGES`]. Both geometries must be valid; the values in the error are then
    /// short enough for a frame.
    pub fn check(&self, peer: &Geometry) -> Result<(), Mismatch> {
        same_text("dtype", &self.dtype, &peer.dtype)?;
        same_text("model", &self.model, &peer.model)?;
        self.check_constants(peer)?;
        same("aux_regions", self.count(RegionRole::Aux), peer.count(RegionRole::Aux))?;
        for (ours, theirs) in self.aux_regions().zip(peer.aux_regions()) {
            same_items(ours, &self.regions[ours], &peer.regions[theirs])?;
        }
        let Err(difference) = self.same_shape(peer) else { return Ok(()) };
        let opaque_kv = |geometry: &Geometry| geometry.kv_layers().is_none();
        if opaque_kv(self) || opaque_kv(peer) {
            return Err(difference);
        }
        self.check_ranks(peer)?;
        self.check_pages(peer)?;
        self.check_cells(peer, RegionRole::Kv, 0)?;
        self.check_groups(peer)
    }

    /// True if item *i* of every region is item *i* of the peer's region at the same position.
    pub(crate) fn is_same_shape(&self, peer: &Geometry) -> bool {
        self.same_shape(peer).is_ok()
    }

    fn same_shape(&self, peer: &Geometry) -> Result<(), Mismatch> {
        same("head_dim", self.head_dim, peer.head_dim)?;
        same("page_size", self.page_size, peer.page_size)?;
        same("kv_heads", self.kv_heads, peer.kv_heads)?;
        let (here, there) = (&self.parallel, &peer.parallel);
        same("tp_size", here.tp_size, there.tp_size)?;
        same("pp_size", here.pp_size, there.pp_size)?;
        same("tp_rank", here.tp_rank, there.tp_rank)?;
        same("pp_rank", here.pp_rank, there.pp_rank)?;
        for (field, role) in [("kv_regions", RegionRole::Kv), ("state_regions", RegionRole::State)] {
            same(field, self.count(role), peer.count(role))?;
        }
        for (index, (ours, theirs)) in each(&self.regions).zip(&peer.regions).enumerate() {
            check_region(index, ours, theirs)?;
        }
        let (ours, theirs) = (&self.layout, &peer.layout);
        same("dcp_size", ours.dcp_size, theirs.dcp_size)?;
        same("kernel_page_size", self.kernel_page_size(), peer.kernel_page_size())?;
        same("total_kv_heads", self.total_kv_heads(), peer.total_kv_heads())?;
        same("layout.axes", ours.axes, theirs.axes)?;
        if ours.groups == theirs.groups {
            return Ok(());
        }
        same("layout.groups", groups(ours), groups(theirs))?;
        // The groups that the text leaves out.
        for (number, (here, there)) in ours.groups.iter().zip(&theirs.groups).enumerate() {
            same(&format!("layout.groups[{number}]"), group_text(here), group_text(there))?;
        }
        Ok(())
    }

    fn check_ranks(&self, peer: &Geometry) -> Result<(), Mismatch> {
        let (here, there) = (self.replicas(), peer.replicas());
        if !divides(here, there) {
            same("tp_size", self.parallel.tp_size, peer.parallel.tp_size)?;
        }
        let (here, there) = (self.layout.dcp_size, peer.layout.dcp_size);
        if here != there {
            let kv = |geometry: &Geometry| {
                let mut kv = each(&geometry.regions).filter(|region| region.role == RegionRole::Kv);
                kv.all(|region| region.holds.is_replicated())
            };
            if !divides(here, there) || !kv(self) || !kv(peer) {
                same("dcp_size", here, there)?;
            }
        }
        Ok(())
    }

    fn check_pages(&self, peer: &Geometry) -> Result<(), Mismatch> {
        let dealt = self.layout.dcp_size > 1 || peer.layout.dcp_size > 1;
        if dealt {
            // Pages are dealt to ranks one by one: both sides must have the same pages.
            same(DEALT_PAGES, self.page_size, peer.page_size)?;
        }
        // Pages are counted in units that divide the pages of both sides.
        let unit = gcd(self.kernel_page_size(), peer.kernel_page_size());
        let units =
            |geometry: &Geometry| u64::from(geometry.num_pages) * u64::from(geometry.page_size / unit);
        if units(self).max(units(peer)) > u64::from(u32::MAX) {
            same("page_size", self.page_size, peer.page_size)?;
            same("kernel_page_size", self.kernel_page_size(), peer.kernel_page_size())?;
        }
        Ok(())
    }

    /// What both hold has the same size, and if both are whole, both hold the same.
    fn check_cells(&self, peer: &Geometry, role: RegionRole, group: u16) -> Result<(), Mismatch> {
        let shared = overlaps(holders(self, role, group), holders(peer, role, group));
        let mut split = 0;
        for overlap in each(&shared) {
            self.check_overlap(peer, overlap, &mut split)?;
        }
        if self.parallel.pp_size == 1 && peer.parallel.pp_size == 1 {
            let common: u64 = shared.iter().map(Overlap::cells).sum();
            let sum = |geometry: &Geometry, count: fn(&Holder) -> u64| -> u64 {
                holders(geometry, role, group).map(|holder| count(&holder)).sum()
            };
            let text = |geometry: &Geometry| match (geometry.kv_layers(), sum(geometry, Holder::pairs)) {
                (Some((start, end)), pairs) if role == RegionRole::Kv => {
                    format!("{pairs} of layers {start}..{end}")
                }
                (_, pairs) => format!("{pairs} of group {group}"),
            };
            let (here, there) = (sum(self, Holder::cells), sum(peer, Holder::cells));
            if here != common || there != common {
                let (mut ours, mut theirs) = (text(self), text(peer));
                if ours == theirs {
                    // As many, but others.
                    let shared_of = |side: fn(&Overlap) -> u32, region| {
                        let of_region = shared.iter().filter(|overlap| side(overlap) == region);
                        of_region.map(Overlap::cells).sum()
                    };
                    let local = |region| shared_of(|overlap| overlap.local, region);
                    let remote = |region| shared_of(|overlap| overlap.remote, region);
                    ours += &self.unshared(role, group, local);
                    theirs += &peer.unshared(role, group, remote);
                }
                return Err(Mismatch { field: "layers".to_owned(), ours, theirs });
            }
        }
        Ok(())
    }

    /// What two regions share has heads, elements and packs of the same size on both sides. Adds to the
    /// ranges of a token that are `split`.
    fn check_overlap(&self, peer: &Geometry, overlap: &Overlap, split: &mut u64) -> Result<(), Mismatch> {
        let index = overlap.local as usize;
        let regions = self.regions.get(index).zip(peer.regions.get(overlap.remote as usize));
        let Some((ours, theirs)) = regions else { return Ok(()) };
        let of_both = |field: &str, own: bool, here: u32, there: u32| {
            same(field, here, there)
                .map_err(|mismatch| if own { of_region(index)(mismatch) } else { mismatch })
        };
        let own = ours.form.head_dim.is_some() || theirs.form.head_dim.is_some();
        of_both("head_dim", own, self.head_dim_of(ours), peer.head_dim_of(theirs))?;
        let (here, there) = (self.inside(ours), peer.inside(theirs));
        if here.elements == there.elements {
            same("head_bytes", here.atom, there.atom).map_err(of_region(index))?;
        } else {
            // Bytes of a head that are not whole elements are of no size.
            let bytes = |inside: &Inside| inside.element().unwrap_or(0);
            same("element_bytes", bytes(&here), bytes(&there)).map_err(of_region(index))?;
        }
        let own = ours.form.heads.is_some() || theirs.form.heads.is_some();
        if !ours.holds.is_replicated() && (own || ours.role == RegionRole::Kv) {
            let field = if own { "total_heads" } else { "total_kv_heads" };
            of_both(field, own, self.head_counts(ours).1, peer.head_counts(theirs).1)?;
        }
        let unit = gcd(self.tokens_of(ours), peer.tokens_of(theirs));
        let why = match Loops::between((self, ours), (peer, theirs), overlap, unit) {
            Ok(Some(loops)) if loops.split => {
                let ranges = loops.row_count().saturating_mul(loops.tokens.count.into());
                *split = split.saturating_add(ranges.div_ceil(unit.into()));
                if *split <= MAX_SPLIT_RANGES {
                    return Ok(());
                }
                format!("; more than {MAX_SPLIT_RANGES} ranges a token")
            }
            Ok(_) => return Ok(()),
            Err(Unaligned) => String::new(),
        };
        let text = |geometry: &Geometry, region: &RegionShape| {
            let Inside { elements: (start, end), heads, .. } = geometry.inside(region);
            let (axes, tokens, heads) =
                (geometry.axes_of(region), geometry.tokens_of(region), heads.1 - heads.0);
            let RegionShape { layers, holds, .. } = region;
            format!(
                "{axes} ({layers} layers of {holds:?}, {tokens} tokens, {heads} heads, elements {start}..{end}{why})"
            )
        };
        let (ours, theirs) = (text(self, ours), text(peer, theirs));
        Err(Mismatch { field: format!("regions[{index}].axes"), ours, theirs })
    }

    /// The first region of which the peer has not all, as a text.
    fn unshared(&self, role: RegionRole, group: u16, shared: impl Fn(u32) -> u64) -> String {
        let first = holders(self, role, group).find(|holder| shared(holder.region) != holder.cells());
        let region = first.and_then(|holder| self.regions.get(holder.region as usize));
        region.map_or_else(String::new, |region| {
            let layers = region.layer_range();
            format!(", with {:?} of layers {}..{}", region.holds, layers.start, layers.end)
        })
    }

    fn check_groups(&self, peer: &Geometry) -> Result<(), Mismatch> {
        let (ours, theirs) = (&self.layout, &peer.layout);
        if self.count(RegionRole::State) == 0 && peer.count(RegionRole::State) == 0 {
            return Ok(());
        }
        let optional =
            |from: usize, groups: &[super::CacheGroup]| groups.iter().skip(from).all(|group| group.optional);
        let both = ours.groups.len().min(theirs.groups.len());
        if both == 0 || !optional(both, &ours.groups) || !optional(both, &theirs.groups) {
            same("layout.groups", groups(ours), groups(theirs))?;
            // Slots without a description go to the rank at the same place only.
            self.same_shape(peer)?;
        }
        for (number, (here, there)) in (0_u16..).zip(ours.groups.iter().zip(&theirs.groups)) {
            let field = |name: &str| format!("layout.groups[{number}].{name}");
            same(&field("total_heads"), here.total_heads, there.total_heads)?;
            let unit = gcd(here.page_size, there.page_size);
            let items = |geometry: &Geometry| {
                let group = each(&geometry.regions)
                    .filter(|region| region.role == RegionRole::State && region.group == number);
                group.map(RegionShape::items).max().unwrap_or(0)
            };
            let most = (items(self) * u64::from(here.page_size / unit))
                .max(items(peer) * u64::from(there.page_size / unit));
            if most > u64::from(u32::MAX) {
                same(&field("page_size"), here.page_size, there.page_size)?;
            }
            let says = |geometry: &Geometry| {
                let mut group = each(&geometry.regions)
                    .filter(|region| region.role == RegionRole::State && region.group == number);
                group.all(|region| region.holds != Holds::Opaque)
            };
            if !says(self) || !says(peer) {
                same(&field("holds"), says_text(says(self)), says_text(says(peer)))?;
                self.same_shape(peer)?;
            }
            let lacks = |geometry: &Geometry| holders(geometry, RegionRole::State, number).next().is_none();
            if here.optional && there.optional && (lacks(self) || lacks(peer)) {
                continue;
            }
            self.check_cells(peer, RegionRole::State, number)?;
        }
        Ok(())
    }
}

/// Advice about a difference in a field, where anything but making both sides equal helps.
pub(crate) fn remedy(field: &str) -> &'static str {
    match field {
        "page_size" | "kernel_page_size" => {
            ": make them equal, or say what each region holds (Region::holds) so that pages can be cut"
        }
        DEALT_PAGES => {
            ": pages that are dealt to ranks must have one size: make them equal, or let no ranks share them \
             (Layout::dcp_size)"
        }
        "tp_size" => {
            ": one must be a multiple of the other, and regions must say what they hold (Region::holds)"
        }
        "kv_heads" | "tp_rank" | "pp_size" | "pp_rank" | "kv_regions" | "layout.axes" => {
            ": make them equal, or say what each region holds (Region::holds)"
        }
        "dcp_size" => ": one must be a multiple of the other, and the cache a latent one (Holds::Latent)",
        "total_kv_heads" => ": give both engines the number of KV heads of the model",
        "layers" => ": together the stages must hold every layer of the peer once",
        "layout.groups" | "state_regions" => {
            ": describe the state of both sides by the same groups (Layout::groups), or make a group optional"
        }
        // Of a vLLM engine, in the names of that engine's settings.
        "compatibility_hash" => {
            ": give this worker the engine's version, model and backend, or the engine's hash; or set \
             enforce_handshake_compat=false on both sides"
        }
        "kv_cache_layout" => ": set VLLM_KV_CACHE_LAYOUT=LBHNC at the engine",
        "block_size" => ": set --block-size at the engine",
        _ if field.starts_with("layout.constants") => {
            ": give both workers the same value (Layout::constants), or send a value that each worker measures as a \
             slot of a cache group"
        }
        _ if field.ends_with("].axes") => {
            ": give both caches the same order of elements and tokens (Region::axes), or packs of which one is a \
             multiple of the other"
        }
        // Of some stage: see `sources`.
        _ if field.starts_with("ranks") => ": all of them must have registered, under one engine id",
        _ => "",
    }
}

fn says_text(says: bool) -> &'static str {
    if says { "told" } else { "opaque" }
}

fn group_text(group: &super::CacheGroup) -> String {
    format!("{} tokens, {} of {} heads", group.page_size, group.heads, group.total_heads)
}

fn groups(layout: &super::Layout) -> String {
    // Short enough for a frame.
    let first = layout.groups.iter().take(4).map(group_text).collect::<Vec<_>>().join("; ");
    format!("{} ({first})", layout.groups.len())
}

/// True if one is a multiple of the other.
fn divides(a: u32, b: u32) -> bool {
    a.max(b).is_multiple_of(a.min(b).max(1))
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

fn of_region(index: usize) -> impl Fn(Mismatch) -> Mismatch {
    move |mismatch| Mismatch { field: format!("regions[{index}].{}", mismatch.field), ..mismatch }
}

fn same_items(index: usize, ours: &RegionShape, theirs: &RegionShape) -> Result<(), Mismatch> {
    same("item_len", ours.item_len, theirs.item_len).map_err(of_region(index))
}

fn check_region(index: usize, ours: &RegionShape, theirs: &RegionShape) -> Result<(), Mismatch> {
    let layer =
        |shape: &RegionShape| shape.layer.map_or_else(|| "none".to_owned(), |layer| layer.to_string());
    same("role", ours.role.name(), theirs.role.name()).map_err(of_region(index))?;
    same_items(index, ours, theirs)?;
    if ours.layer != theirs.layer {
        same("layer", layer(ours), layer(theirs)).map_err(of_region(index))?;
    }
    same("layers", ours.layers, theirs.layers).map_err(of_region(index))?;
    same("group", ours.group, theirs.group).map_err(of_region(index))?;
    if ours.holds != theirs.holds {
        same("holds", format!("{:?}", ours.holds), format!("{:?}", theirs.holds))
            .map_err(of_region(index))?;
    }
    if ours.form != theirs.form {
        check_form(ours.form, theirs.form).map_err(of_region(index))?;
    }
    Ok(())
}

fn check_form(ours: Form, theirs: Form) -> Result<(), Mismatch> {
    let axes =
        |form: Form| form.axes.map_or_else(|| "those of the layout".to_owned(), |axes| axes.to_string());
    same("axes", axes(ours), axes(theirs))?;
    same("heads", told(ours.heads), told(theirs.heads))?;
    same("head_dim", told(ours.head_dim), told(theirs.head_dim))?;
    same("elements", told(ours.elements), told(theirs.elements))
}

fn told<T: std::fmt::Debug>(value: Option<T>) -> String {
    value.map_or_else(|| "those of the cache".to_owned(), |value| format!("{value:?}"))
}
