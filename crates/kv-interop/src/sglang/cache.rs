//! This worker's cache in SGLang's words: the order of its regions, and the names of its settings.

use kv_core::layout::{NHD, RegionShape};
use kv_core::{Geometry, Holds, KvArgs, MemoryKind, Region, RegionRole, WorkerRole};

use super::config::{SglangConfig, SglangConfigError};

/// This worker's cache, which was checked against what SGLang's protocol can express.
#[derive(Debug, Clone)]
pub(crate) struct OurCache {
    pub(crate) geometry: Geometry,
    /// All regions, with their addresses; KV first, then aux.
    pub(crate) regions: Vec<Region>,
    /// The type of the elements, by SGLang's name.
    pub(crate) dtype: String,
    pub(crate) kv_layout: Option<String>,
    /// True if every tensor-parallel rank holds the same bytes (multi-head latent attention).
    pub(crate) latent: bool,
    /// The numbers of the KV regions in SGLang's order: the keys of all layers, then the values of all layers; or
    /// the latents of all layers. On a decode worker only.
    pub(crate) order: Vec<usize>,
}

impl OurCache {
    pub(super) fn new(args: &KvArgs, config: &SglangConfig) -> Result<OurCache, SglangConfigError> {
        let geometry = args.geometry();
        let kv = &geometry.regions[geometry.kv_regions()];
        let latent = !kv.is_empty() && kv.iter().all(|region| region.holds.is_replicated());
        let cache = OurCache {
            geometry: geometry.clone(),
            regions: args.regions().to_vec(),
            dtype: config.dtype(geometry),
            kv_layout: config.kv_layout.clone(),
            latent,
            order: if config.role == WorkerRole::Decode { order(geometry)? } else { Vec::new() },
        };
        cache.check_sizes()?;
        cache.check_regions(config)?;
        Ok(cache)
    }

    fn check_sizes(&self) -> Result<(), SglangConfigError> {
        let geometry = &self.geometry;
        for (field, ours, needed) in [
            ("num_pages", geometry.num_pages, i32::MAX as u32),
            ("dcp_size", geometry.layout.dcp_size, 1),
            ("pcp_size", geometry.parallel.pcp_size, 1),
        ] {
            if ours > needed {
                return Err(SglangConfigError::new(field, ours, format!("at most {needed}")));
            }
        }
        Ok(())
    }

    fn check_regions(&self, config: &SglangConfig) -> Result<(), SglangConfigError> {
        let of_role = |role| self.geometry.regions.iter().filter(move |region| region.role == role);
        let state = of_role(RegionRole::State).count();
        if state > 0 {
            return Err(SglangConfigError::new("regions of role state", state, "0"));
        }
        let (aux, needed) = (of_role(RegionRole::Aux), &config.aux.item_lens);
        if aux.clone().count() != needed.len() {
            return Err(SglangConfigError::new("regions of role aux", aux.count(), needed.len()));
        }
        for (buffer, (region, needed)) in aux.zip(needed).enumerate() {
            if region.item_len != *needed {
                let field = format!("item_len of aux region {buffer}");
                return Err(SglangConfigError::new(&field, region.item_len, needed));
            }
        }
        let file = self.geometry.regions.iter().position(|region| region.memory == MemoryKind::File);
        match file {
            Some(at) => {
                Err(SglangConfigError::new(&format!("memory of region {at}"), "a file", "DRAM or VRAM"))
            }
            None => Ok(()),
        }
    }

    /// The addresses of regions in this order.
    pub(crate) fn addresses(&self, order: impl IntoIterator<Item = usize>) -> Vec<u64> {
        order.into_iter().filter_map(|at| self.regions.get(at)).map(|region| region.addr).collect()
    }
}

/// The order in which SGLang has the KV regions. Regions that do not say what they hold are in that order already.
fn order(geometry: &Geometry) -> Result<Vec<usize>, SglangConfigError> {
    let kv = &geometry.regions[geometry.kv_regions()];
    if kv.iter().all(|region| region.holds == Holds::Opaque) {
        return Ok((0..kv.len()).collect());
    }
    if geometry.layout.axes != NHD {
        let ours = format!("{:?}", geometry.layout.axes);
        return Err(SglangConfigError::new("layout.axes", ours, "token-major pages (NHD)"));
    }
    if let Some(own) = kv.iter().position(|region| !region.form.is_plain()) {
        let (field, ours) = (format!("form of region {own}"), format!("{:?}", kv[own].form));
        return Err(SglangConfigError::new(&field, ours, "axes, heads and elements as in the whole cache"));
    }
    if geometry.kernel_page_size() != geometry.page_size {
        let needed = geometry.page_size;
        return Err(SglangConfigError::new("kernel_page_size", geometry.kernel_page_size(), needed));
    }
    let place = |(at, region): (usize, &RegionShape)| {
        let rank = match region.holds {
            Holds::Key | Holds::Latent => 0,
            Holds::Value => 1,
            other => {
                let field = format!("holds of region {at}");
                let needed = "keys, values or a latent, each in a region of its own (layer-major pages)";
                return Err(SglangConfigError::new(&field, format!("{other:?}"), needed));
            }
        };
        match region.layer {
            Some(layer) if region.layers == 1 => Ok((rank, layer, at)),
            _ => {
                let needed = "1, with its number (layer-major pages)";
                Err(SglangConfigError::new(&format!("layers of region {at}"), region.layers, needed))
            }
        }
    };
    let mut places = kv.iter().enumerate().map(place).collect::<Result<Vec<_>, _>>()?;
    places.sort_unstable();
    let count = |wanted| places.iter().filter(|(rank, ..)| *rank == wanted).count();
    let (keys, values) = (count(0), count(1));
    let latents = kv.iter().all(|region| region.holds == Holds::Latent);
    if !latents && keys != values {
        return Err(SglangConfigError::new("regions that hold values", values, format!("{keys}, as keys")));
    }
    Ok(places.into_iter().map(|(.., at)| at).collect())
}
