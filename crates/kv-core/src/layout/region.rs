//! A region: a range of registered memory, what it is for, and what its items hold.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::layout::{Axes, Form, Holds};

/// Most regions that one worker may have.
pub const MAX_REGIONS: usize = 4096;

/// A range of registered memory that holds `len / item_len` items of `item_len` bytes, one after
/// another, from `addr` on.
///
/// A region is only a description. A transport accepts only memory that it was given (an arena that
/// it allocated, or memory that was adopted through an `unsafe` call), so that a wrong address is
/// an error.
///
/// # Memory that a server owns
///
/// A server whose tensors exist already describes each of them by address, length and device, builds its
/// [`KvArgs`](crate::KvArgs), and lets the transport adopt them all (`adopt_regions` of every transport).
/// Then:
///
/// - **Lifetime.** The server keeps the memory allocated, readable and writable, at the same address, until the
///   worker has stopped: until `Stopping` of kv-poll gives its `StopReport`. If the report counts pages or items
///   in quarantine, data operations in flight, or a panic, the memory stays until the process ends, because a
///   data operation may still touch it. An owner that uses a transport without a worker keeps the memory until
///   the transport has been dropped; and until the process ends if a post had not ended by then, or if a peer
///   that may write was neither [revoked](crate::TransportEvent::Revoked) nor proven
///   [dead](crate::WayEnd::Dead). A cache that grows by moving (`expand_capacity`, a `Vec` that is pushed to) is
///   a new cache: it needs a new worker.
/// - **Content.** Pages, aux rows and slots that a session owns belong to the transfer until
///   [`reclaim`](crate::KvSession::reclaim). Those of a receiver may hold any bytes meanwhile, and also after a
///   failure. Those of a sender must not be written to. No Rust reference to their bytes (`&[u8]`, a tensor
///   operation that reads them) may exist meanwhile; other items of the same region are the server's to use.
/// - **Alignment.** Any address and any `item_len` is moved; regions that begin at a multiple of 64 bytes are
///   faster. What must hold of lengths is checked: a region is not empty, does not begin at address zero or
///   wrap around, overlaps no other region, and is a whole number of items, each a multiple of the heads,
///   tokens, parts and layers that the item is said to hold ([`ArgsError`](crate::ArgsError) names the field
///   and both values).
/// - **Devices.** `device` is the number by which this process knows the GPU: behind `CUDA_VISIBLE_DEVICES`,
///   the number within that list. Peers may have other numbers. kv-nixl, and kv-ucx with UCX's CUDA module, move
///   GPU memory; kv-local, kv-tcp and kv-fabric move host memory only.
/// - **Children.** A child that is forked, and does not `exec`, has copies of the bytes and not the cache: it
///   must use neither the worker nor the pages. Where a network card has pinned the memory (NIXL over RDMA),
///   the memory should be kept from children (`MADV_DONTFORK`), or the parent's next write may go to another
///   page than the card's.
/// - **Freed too early.** Peers of kv-local then get an error if the address is unmapped, and bytes of
///   whatever took its place if not; over the other transports the process may crash. Nothing can detect this:
///   hence `unsafe`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Region {
    /// What the region is for.
    pub role: RegionRole,
    /// Address of the first byte; for [`MemoryKind::File`] the offset in the file.
    pub addr: u64,
    /// Length of the region in bytes.
    pub len: u64,
    /// Length of one item in bytes: of one page in this region, one aux row, or one slot.
    pub item_len: u64,
    /// Kind of the memory: host, device or file.
    pub memory: MemoryKind,
    /// Number of the device: a GPU index, or the number of a file. For host memory 0, or a NUMA node, which
    /// is only a remark.
    pub device: u64,
    /// The model layer whose KV the items hold, or the first of several (page-major); `None` if the
    /// server does not say.
    pub layer: Option<u32>,
    /// How many layers each item holds, from `layer` on.
    pub layers: u32,
    /// What the items hold; needed only where the peer's cache may have another shape.
    pub holds: Holds,
    /// The group of a state region, by its position in [`Layout::groups`](crate::Layout::groups).
    pub group: u16,
    /// Where the region differs from the rest of the cache.
    pub form: Form,
}

impl Region {
    /// A region in host memory.
    pub fn dram(role: RegionRole, addr: u64, len: u64, item_len: u64) -> Region {
        let memory = MemoryKind::Dram;
        let (layer, layers, holds, group, form) = (None, 1, Holds::Opaque, 0, Form::default());
        Region { role, addr, len, item_len, memory, device: 0, layer, layers, holds, group, form }
    }

    /// The same region in memory of this kind: on the GPU `device`, or in the file that the transport numbers
    /// `device`.
    pub fn memory(mut self, memory: MemoryKind, device: u64) -> Region {
        (self.memory, self.device) = (memory, device);
        self
    }

    /// The same region, which holds this layer of the model.
    pub fn layer(mut self, layer: u32) -> Region {
        self.layer = Some(layer);
        self
    }

    /// The same region, whose items hold all of these layers of the model.
    pub fn layers(mut self, layers: Range<u32>) -> Region {
        self.layer = Some(layers.start);
        self.layers = layers.end.saturating_sub(layers.start);
        self
    }

    /// The same region, whose items hold this. The peer's cache may then have other page sizes and
    /// other parallel groups.
    pub fn holds(mut self, holds: Holds) -> Region {
        self.holds = holds;
        self
    }

    /// The same region, which belongs to the cache group at this position in
    /// [`Layout::groups`](crate::Layout::groups).
    pub fn group(mut self, group: u16) -> Region {
        self.group = group;
        self
    }

    /// The same region, whose items have their axes in this order, and not in that of
    /// [`Layout::axes`](crate::Layout::axes).
    pub fn axes(mut self, axes: Axes) -> Region {
        self.form.axes = Some(axes);
        self
    }

    /// The same region, of whose layers this rank holds `heads` of the model's `total` KV heads: another
    /// number than that of the cache, for models whose layers differ. The second argument is not that of
    /// [`KvArgsBuilder::heads`](crate::KvArgsBuilder::heads): the elements of a head are
    /// [`head_dim`](Region::head_dim) here.
    pub fn heads(mut self, heads: u32, total: u32) -> Region {
        self.form.heads = Some((heads, total));
        self
    }

    /// The same region, whose layers have heads of `head_dim` elements: another number than that of the cache
    /// ([`KvArgsBuilder::heads`](crate::KvArgsBuilder::heads)), for models whose layers differ.
    pub fn head_dim(mut self, head_dim: u32) -> Region {
        self.form.head_dim = Some(head_dim);
        self
    }

    /// The same region, which holds only these elements of each head: one of two tensors of a latent.
    ///
    /// ```
    /// use kv_core::{Holds, KvArgs, Region, RegionRole};
    ///
    /// // Multi-head latent attention in candle: ckv has 512 elements a token, and kpe has 64. A peer
    /// // may have both in one tensor of 576 elements.
    /// let tensor = |addr, elements: std::ops::Range<u32>| {
    ///     let item_len = 64 * 2 * u64::from(elements.end - elements.start);
    ///     Region::dram(RegionRole::Kv, addr, 100 * item_len, item_len).layer(0).holds(Holds::Latent).elements(elements)
    /// };
    /// let args = KvArgs::builder("prefill", 0)
    ///     .pages(100, 64)
    ///     .heads(1, 576)
    ///     .region(tensor(0x1000_0000, 0..512))
    ///     .region(tensor(0x2000_0000, 512..576));
    /// assert!(args.build().is_ok());
    /// ```
    pub fn elements(mut self, elements: Range<u32>) -> Region {
        self.form.elements = Some((elements.start, elements.end));
        self
    }

    /// How many whole items the region holds.
    pub fn items(&self) -> u64 {
        self.len.checked_div(self.item_len).unwrap_or(0)
    }
}

/// What a region is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RegionRole {
    /// KV pages: item *i* is page *i*.
    Kv,
    /// Per-request rows (first token, logprobs, room …): item *i* is aux row *i*.
    Aux,
    /// Items of a cache group: slots of recurrent layers, pages of sliding windows or of a draft model. Item
    /// *i* of the region is item *i* of the group.
    State,
}

impl RegionRole {
    /// The name of the role in lower case: `kv`, `aux` or `state`.
    pub const fn name(self) -> &'static str {
        match self {
            RegionRole::Kv => "kv",
            RegionRole::Aux => "aux",
            RegionRole::State => "state",
        }
    }
}

/// The kind of memory in which the bytes of a region lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MemoryKind {
    /// Memory of the host.
    Dram,
    /// Memory of a device, such as a GPU.
    Vram,
    /// A file: `addr` is an offset in the file, and `device` the number that the transport gave the file
    /// (`add_file` of kv-nixl).
    File,
}
