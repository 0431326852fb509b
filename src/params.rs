//! Transfer parameters: the JSON by which a router hands a request from one side to the other,
//! with the names of vLLM's `kv_transfer_params`.
//!
//! What this module is: typed forms of that JSON in both directions ([`TransferParams`], [`RemoteKv`]), and
//! the decision whether to read the KV that the JSON describes ([`RemoteKv::fetch`]). What it is not: a
//! router, or a protocol. The module does no I/O, and the JSON alone gives no right to read: a reader
//! acquires the lease from the worker that holds the pages.
//!
//! ```text
//!            do_remote_decode                            do_remote_prefill, remote_…, kv_leases
//! router ───────────────────────▶ P ──▶ its response ───▶ router ──────────────────────────▶ D
//!    ▲  the next turn: do_remote_decode, remote_…, kv_leases of D's cache                    │
//!    └───────────────────────────────────────────────────────────────────────── its response ┘
//! ```
//!
//! | key | says |
//! |---|---|
//! | `do_remote_decode` | to P: keep the KV for a decode worker. Together with the `remote_…` keys: a decode worker still has the KV of the last turn |
//! | `do_remote_prefill` | to D: a prefill worker has the KV, and the `remote_…` keys say where |
//! | `remote_engine_id`, `remote_request_id`, `remote_host`, `remote_port` | the engine that holds the KV, the request's id there, and where the engine answers handshakes: of vLLM's engines the ZMQ side channel |
//! | `remote_block_ids` | the pages of the request at the holder, one list for each cache group; absent in push mode |
//! | `tp_size`, `dcp_size`, `pp_size` | the holder's tensor-parallel, decode-context-parallel and pipeline-parallel sizes |
//! | `remote_num_tokens` | tokens whose KV the holder has |
//! | `remote_blocks_expiry_time` | when the holder frees the pages, in seconds of the holder's clock |
//! | `remote_registration_generation` | how often the holder has registered its memory |
//! | `transfer_mode` | `pull`, `push` or (not in vLLM) `auto` |
//! | `remote_dp_rank` | not in vLLM: the holder's data-parallel replica |
//! | `kv_leases` | not in vLLM, see [`Leases`]: the lease id of each of the holder's ranks, for how long the leases last, the holder's bootstrap server and its page size |
//!
//! # Engines and routers of others
//!
//! **From vLLM.** The answers of vLLM's NIXL connector, in pull and in push mode, are read, and so is what
//! vLLM's proxies and llm-d make of them. A null counts as an absent key, and a number may be written as a
//! float without a fraction or as a text. `kv_leases` is then absent: the receiver of such KV is one of
//! kv-interop, and [`RemoteKv::reader_options`] hands it the words that it needs. vLLM does not say how large
//! its pages are; a reader that knows this from the handshake tells [`RemoteKv::fetch`]
//! ([`FetchPolicy::holder_page_size`]).
//!
//! **To vLLM.** What is not known is not written, because vLLM takes a null for a value, and what is written
//! has the JSON types of vLLM's own answers. vLLM ignores the keys that it does not have. A holder that
//! serves vLLM's engines puts its side channel into `remote_host` and `remote_port`
//! ([`RemoteKv::side_channel`]).
//!
//! **Through routers.** On a chat's next turn, llm-d passes on eleven of vLLM's keys and drops the others.
//! Without `kv_leases` a reader finds the holder's session by its room, at the bootstrap server that
//! `remote_host` and `remote_port` name (a side channel there makes the holder an engine of vLLM to its
//! readers). Servers behind such a router name their rooms by request ids, because a room's number comes back
//! as the text of its digits.
//!
//! # From P to D and back
//!
//! ```
//! use std::time::Duration;
//! use kv_core::{LeaseRef, Incarnation, KvArgs, Lease, PageList, Region, RegionRole, Room, SessionId};
//! use kv_core::TransferMode;
//! use kv_transfer::params::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The router asks a prefill worker.
//! let request = TransferParams::prefill(TransferMode::Pull).to_json();
//! assert!(TransferParams::parse(&request)?.is_prefill());
//!
//! // P has computed 40 tokens, keeps their pages, and says so in its response.
//! # let args = KvArgs::builder("prefill-0", 0).pages(64, 16);
//! # let args = args.region(Region::dram(RegionRole::Kv, 0x10_0000, 64 * 4096, 4096)).build()?;
//! # let lease_refs = [LeaseRef::new(Incarnation::from_random(77), SessionId(5))];
//! let pages = PageList::from_pages([7, 8, 3])?;
//! let lease = Lease::Renewable(Duration::from_secs(30));
//! // `lease_refs` is what the session's `KvSender::lease_refs` says.
//! let kept = RemoteKv::granted(&args, "10.0.0.1:8998", Room::Number(42), 40, &pages, &lease_refs, lease)?;
//! let response = TransferParams::decode(TransferMode::Pull, kept).to_json();
//!
//! // The router passes it on; D has the first page of the prompt in its cache already.
//! let params = TransferParams::parse(&response)?;
//! let remote = params.remote().ok_or("nothing to fetch")?;
//! let fetch = remote.fetch(40, 16, remote.remaining(None), &FetchPolicy::decode(16))?;
//! assert_eq!(fetch, Fetch::Read { first: 1, pages: 2 });
//! let options = remote.reader_options(Default::default());
//! assert_eq!(options.lease_refs.first().map(|lease| lease.lease_id), Some(SessionId(5)));
//! # Ok(())
//! # }
//! ```

mod error;
mod fetch;
mod fields;
mod parse;
mod remote;
mod write;

pub use error::{ParamsError, Shown};
pub use fetch::{EXPIRY_MARGIN, Fetch, FetchPolicy, KV_RECOMPUTE_THRESHOLD, ReleaseReason};
pub use remote::{Leases, RankLease, RemoteKv};

use kv_core::TransferMode;
use serde_json::{Map, Value};

/// Longest JSON text that [`TransferParams::parse`] accepts, in bytes: room for the page numbers of a few
/// million tokens.
pub const MAX_PARAMS_BYTES: usize = 16 << 20;
/// Most pages that `remote_block_ids` may name, all cache groups together. The groups are at most
/// [`MAX_CACHE_GROUPS`](kv_core::layout::MAX_CACHE_GROUPS).
pub const MAX_BLOCKS: usize = 1 << 20;
/// Largest parallel size, and most entries of `kv_leases.ranks`.
pub const MAX_RANKS: u32 = 4096;
/// Most keys of one JSON object that this module does not know.
pub const MAX_UNKNOWN_KEYS: usize = 64;

/// The `kv_transfer_params` of one request on one leg of its way: to a prefill worker, or to a decode worker.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TransferParams {
    /// The kind of worker that the request goes to, and where KV of the request exists already.
    pub leg: Leg,
    /// Which side starts the data operations (`transfer_mode`); `None` leaves the choice to the workers.
    pub mode: Option<TransferMode>,
    /// Keys that this module does not know, unchanged: [`to_value`](Self::to_value) writes them again,
    /// because routers and workers further on may know them.
    pub unknown: Map<String, Value>,
}

/// The kind of worker that a request goes to.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Leg {
    /// To a worker that computes the request from beginning to end: neither `do_remote_…` flag is set.
    Local,
    /// To a prefill worker, which computes KV that a decode worker continues with (`do_remote_decode`).
    Prefill {
        /// The KV that a decode worker still has of the chat's earlier turns; `None` on the first turn, and if
        /// the parameters lack the holder's engine, request, host or port, or name neither pages nor leases.
        /// As in vLLM the prompt is then computed.
        cached: Option<Box<RemoteKv>>,
    },
    /// To a decode worker (`do_remote_prefill`).
    Decode {
        /// The KV that the prefill worker has computed; in push mode the KV that it is about to compute.
        remote: Box<RemoteKv>,
    },
}

impl TransferParams {
    /// Parameters from the router to a prefill worker, for a prompt of which nothing is computed yet.
    pub fn prefill(mode: TransferMode) -> TransferParams {
        TransferParams { leg: Leg::Prefill { cached: None }, mode: Some(mode), unknown: Map::new() }
    }

    /// Parameters from a prefill worker to a decode worker, through the router: `remote` says where the KV
    /// is. In push mode a router may write these parameters itself, and send the request to both workers at
    /// once.
    pub fn decode(mode: TransferMode, remote: RemoteKv) -> TransferParams {
        let leg = Leg::Decode { remote: Box::new(remote.with(|remote| remote.mode = Some(mode))) };
        TransferParams { leg, mode: Some(mode), unknown: Map::new() }
    }

    /// Parameters from a decode worker to the prefill worker of the next turn, through the router: `cached`
    /// is the KV that the decode worker keeps of this turn. The mode is always pull: the prefill worker
    /// reads.
    pub fn next_turn(cached: RemoteKv) -> TransferParams {
        let cached = cached.with(|remote| remote.mode = Some(TransferMode::Pull));
        let leg = Leg::Prefill { cached: Some(Box::new(cached)) };
        TransferParams { leg, mode: Some(TransferMode::Pull), unknown: Map::new() }
    }

    /// The same with some fields changed: `params.with(|params| params.mode = None)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// True if the request goes to a prefill worker.
    pub fn is_prefill(&self) -> bool {
        matches!(self.leg, Leg::Prefill { .. })
    }

    /// The KV of the request that another worker holds, in either direction; `None` if there is none.
    pub fn remote(&self) -> Option<&RemoteKv> {
        match &self.leg {
            Leg::Local => None,
            Leg::Prefill { cached } => cached.as_deref(),
            Leg::Decode { remote } => Some(remote),
        }
    }
}
