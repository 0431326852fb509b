//! Whether two caches can exchange bytes at all, and if not, in which field they differ.

use std::fmt::Display;

use super::cells::{Overlap, holders, overlaps};
use super::ranks::gcd;
use super::shape::Holds;
use super::{Geometry, RegionShape};
use crate::error::Mismatch;
use crate::layout::RegionRole;
use crate::meter::each;

/// The name of the field for pages that are dealt to ranks, in a [`Mismatch`].
const DEALT_PAGES: &str = "page_size of dealt pages";

impl Geometry {
    /// Checks that the two caches can exchange bytes. The error names the first field that prevents
    /// it, and both values.
    ///
    /// The numbers of pages, rows and slots, the kind of memory, and the data-parallel place may
    /// always differ. The sizes of parallel groups, pages and layouts may differ if all KV regions
    /// say what they [hold](Holds). Both geometries must be valid; the values in the error are then
    /// short enough for a frame.
    pub fn check(&self, peer: &Geometry) -> Result<(), Mismatch> {
        same_text("dtype", &self.dtype, &peer.dtype)?;
        same("head_dim", self.head_dim, peer.head_dim)?;
        same_text("model", &self.model, &peer.model)?;
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
        same("layout.axes", names(ours), names(theirs))?;
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
        let (ours, theirs) = (holders(&self.regions, role, group), holders(&peer.regions, role, group));
        let shared = overlaps(ours, theirs);
        let mut sharded = false;
        for overlap in each(&shared) {
            let (index, there) = (overlap.local as usize, overlap.remote as usize);
            let (ours, theirs) = (&self.regions[index], &peer.regions[there]);
            sharded |= !ours.holds.is_replicated();
            let (here, there) = (self.inside(ours).atom, peer.inside(theirs).atom);
            same(&format!("regions[{index}].head_bytes"), here, there)?;
        }
        if sharded && role == RegionRole::Kv {
            same("total_kv_heads", self.total_kv_heads(), peer.total_kv_heads())?;
        }
        if self.parallel.pp_size == 1 && peer.parallel.pp_size == 1 {
            let common: u64 = shared.iter().map(Overlap::cells).sum();
            let cells = |geometry: &Geometry| -> u64 {
                holders(&geometry.regions, role, group).map(|holder| holder.cells()).sum()
            };
            let text = |geometry: &Geometry, cells: u64| match geometry.kv_layers() {
                Some((start, end)) if role == RegionRole::Kv => format!("{cells} of layers {start}..{end}"),
                _ => format!("{cells} of group {group}"),
            };
            let (here, there) = (cells(self), cells(peer));
            if here != common || there != common {
                let (mut ours, mut theirs) = (text(self, here), text(peer, there));
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

    /// The first region of which the peer has not all, as a text.
    fn unshared(&self, role: RegionRole, group: u16, shared: impl Fn(u32) -> u64) -> String {
        let first =
            holders(&self.regions, role, group).find(|holder| shared(holder.region) != holder.cells());
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
            let lacks =
                |geometry: &Geometry| holders(&geometry.regions, RegionRole::State, number).next().is_none();
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
        // Of some stage: see `sources`.
        _ if field.starts_with("ranks") => ": all of them must have registered, under one engine id",
        _ => "",
    }
}

fn says_text(says: bool) -> &'static str {
    if says { "told" } else { "opaque" }
}

fn names(layout: &super::Layout) -> String {
    layout.axes.map(|axis| format!("{axis:?}")).join(", ")
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
    same("holds", format!("{:?}", ours.holds), format!("{:?}", theirs.holds)).map_err(of_region(index))
}
