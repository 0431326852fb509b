//! The registration: what a decode worker tells a prefill rank about its memory, once.

use bytes::Bytes;
use kv_core::MemoryKind;

use super::fields::{
    Frames, GUARD, MAX_AGENT, MAX_HOST, MAX_METADATA, MAX_REGIONS, Malformed, decimal, pack_u32s, pack_u64s,
    shown,
};

/// The frames of the shortest registration that is understood: everything up to the item lengths of the regions.
const MIN_FRAMES: usize = 20;

/// A decode worker's memory and its place in its engine (SGLang: `KVArgsRegisterInfo`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Registration {
    /// The address of the worker's PULL socket.
    pub(crate) ip: String,
    pub(crate) port: u16,
    /// The name of the worker's NIXL agent, and the agent's metadata.
    pub(crate) agent: String,
    pub(crate) metadata: Bytes,
    /// The regions: addresses, kinds, and bytes of a page. All lists are equally long.
    pub(crate) kv_ptrs: Vec<u64>,
    pub(crate) kinds: Vec<MemoryKind>,
    pub(crate) item_lens: Vec<u64>,
    /// The layer of each region; empty if regions are paired by position.
    pub(crate) layer_ids: Vec<u32>,
    pub(crate) aux_ptrs: Vec<u64>,
    /// True if the worker has state components (recurrent layers, sliding windows).
    pub(crate) has_state: bool,
    pub(crate) device: u64,
    pub(crate) tp_size: u32,
    pub(crate) tp_rank: u32,
    /// How many pages each region holds.
    pub(crate) slots: u32,
    pub(crate) dcp_size: u32,
    pub(crate) dcp_rank: u32,
}

impl Registration {
    /// The 25 frames of SGLang 0.5.23.
    pub(crate) fn encode(&self) -> Vec<Bytes> {
        let empty = Bytes::new;
        vec![
            Bytes::from_static(GUARD),
            Bytes::from_static(b"None"),
            Bytes::from(self.ip.clone()),
            decimal(self.port),
            Bytes::from(self.agent.clone()),
            self.metadata.clone(),
            pack_u64s(&self.kv_ptrs),
            pack_u64s(&self.aux_ptrs),
            empty(), // state addresses
            decimal(self.device),
            decimal(self.tp_size),
            decimal(self.tp_rank),
            decimal(self.item_lens.first().copied().unwrap_or(0)),
            empty(), // state item lengths
            empty(), // state dimensions
            empty(), // staging address
            empty(), // staging size
            decimal(self.slots),
            Bytes::from(self.kinds.iter().map(|kind| kind_name(*kind)).collect::<Vec<_>>().join(",")),
            pack_u64s(&self.item_lens),
            empty(), // state layers
            pack_u32s(&self.layer_ids),
            decimal(self.dcp_size),
            decimal(self.dcp_rank),
            empty(), // state lengths
        ]
    }

    pub(super) fn decode(frames: &[Bytes]) -> Result<Registration, Malformed> {
        let frames = Frames::new("the registration", frames, MIN_FRAMES)?;
        let kv_ptrs = frames.u64s(6, "kv_data_ptrs", MAX_REGIONS)?;
        let regions = kv_ptrs.len();
        let item_lens = match frames.bytes(19) {
            [] => vec![frames.number(12, "kv_item_len", u64::MAX)?; regions],
            _ => frames.u64s(19, "kv_item_lens", MAX_REGIONS)?,
        };
        let kinds = kinds(frames.bytes(18), regions)?;
        let layer_ids = frames.u32s(21, "kv_layer_ids", MAX_REGIONS)?;
        for (field, got) in [
            ("kv_item_lens", item_lens.len()),
            ("kv_data_mem_kinds", kinds.len()),
            ("kv_layer_ids", layer_ids.len()),
        ] {
            if got != regions && !(field == "kv_layer_ids" && got == 0) {
                return Err(Malformed::Entries { field, got, expected: regions });
            }
        }
        let small = |at, field| frames.number(at, field, u32::MAX.into()).map(|number| number as u32);
        let small_or = |at, field, default| {
            frames.number_or(at, field, default, u32::MAX.into()).map(|number| number as u32)
        };
        Ok(Registration {
            ip: frames.text(2, "decode ip", MAX_HOST)?,
            port: frames.number(3, "decode port", u16::MAX.into())? as u16,
            agent: frames.text(4, "agent_name", MAX_AGENT)?,
            metadata: frames.kept(5, "agent_metadata", MAX_METADATA)?,
            kv_ptrs,
            kinds,
            item_lens,
            layer_ids,
            aux_ptrs: frames.u64s(7, "aux_data_ptrs", MAX_REGIONS)?,
            has_state: !frames.bytes(8).is_empty(),
            device: frames.number(9, "gpu_id", u32::MAX.into())?,
            tp_size: small(10, "decode_tp_size")?,
            tp_rank: small(11, "decode_tp_rank")?,
            slots: small(17, "dst_num_slots")?,
            dcp_size: small_or(22, "dst_dcp_size", 1)?,
            dcp_rank: small_or(23, "dst_dcp_rank", 0)?,
        })
    }
}

pub(crate) fn kind_name(kind: MemoryKind) -> &'static str {
    if kind == MemoryKind::Dram { "DRAM" } else { "VRAM" }
}

/// The kinds of the regions; device memory if the frame is empty.
fn kinds(bytes: &[u8], regions: usize) -> Result<Vec<MemoryKind>, Malformed> {
    if bytes.is_empty() {
        return Ok(vec![MemoryKind::Vram; regions]);
    }
    // One more than there are regions shows that the lengths differ.
    let names = bytes.split(|byte| *byte == b',').take(regions + 1);
    let kind = |name: &[u8]| match name {
        b"DRAM" => Ok(MemoryKind::Dram),
        b"VRAM" => Ok(MemoryKind::Vram),
        other => Err(Malformed::MemoryKind { got: shown(other) }),
    };
    names.map(kind).collect()
}
