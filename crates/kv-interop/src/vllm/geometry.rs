//! This worker's cache in vLLM's words, and a vLLM rank's cache as the planner takes it.
//!
//! vLLM keeps one region for each layer. A block holds the layer's heads, of each head its tokens, and of each
//! token key and value side by side; or, under latent attention, the latents of its tokens. This worker's own
//! cache may be arranged otherwise where this worker reads or writes, because the planner cuts pages as needed.
//! Only a cache that vLLM's ranks are to read or write must have vLLM's arrangement.

mod foreign;
mod own;
mod shown;

pub(crate) use foreign::Place;
pub use own::CacheError;
pub(crate) use own::OwnCache;
pub(crate) use shown::own_metadata;

#[cfg(test)]
pub(crate) mod tests {
    use bytes::Bytes;
    use kv_core::layout::{HND_PACKED, Holds, Layout, RegionRole};
    use kv_core::{KvArgs, Parallel, Region};

    use super::{Place, own_metadata};
    use crate::vllm::metadata::NixlAgentMetadata;

    /// Bytes of a page of two heads in one layer.
    pub(crate) const LEN: u64 = 2 * 16 * 2 * 8 * 2;

    /// A rank of `tp_size` ranks of a model of 4 heads of 8 two-byte elements and two layers; 10 pages of 16
    /// tokens, either all pages of a layer side by side, or all layers of a page.
    pub(crate) fn args(tp: (u32, u32), page_major: bool) -> KvArgs {
        let heads = (4 / tp.0).max(1);
        let len = u64::from(heads) * 16 * 2 * 8 * 2;
        let parallel = Parallel::default().with(|group| (group.tp_size, group.tp_rank) = tp);
        let layout = Layout::default().with(|layout| (layout.axes, layout.total_kv_heads) = (HND_PACKED, 4));
        let builder = KvArgs::builder("d-0", tp.1).pages(10, 16).heads(heads, 8).dtype("bf16");
        let builder = builder.parallel(parallel).layout(layout);
        let kv =
            |addr, items: u64| Region::dram(RegionRole::Kv, addr, 10 * items, items).holds(Holds::KeyValue);
        let builder = if page_major {
            builder.region(kv(0x10_0000, 2 * len).layers(0..2))
        } else {
            // The regions need not come in the order of layers.
            builder.region(kv(0x20_0000, len).layer(1)).region(kv(0x10_0000, len).layer(0))
        };
        builder.region(Region::dram(RegionRole::Aux, 0x1000, 64, 64)).build().unwrap()
    }

    /// What a rank of another engine with the same model tells.
    pub(crate) fn metadata(tp: (u32, u32), page_major: bool) -> NixlAgentMetadata {
        own_metadata(&args(tp, page_major), Bytes::from_static(b"nixl"), "FLASH_ATTN").unwrap()
    }

    pub(crate) fn place(tp: (u32, u32)) -> Place {
        Place { tp_size: tp.0, tp_rank: tp.1, pp_size: 1, pp_rank: 0, first_layer: 0 }
    }
}
