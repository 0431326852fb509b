//! Transfer parameters: the JSON by which a router hands a request from one side to the other,
//! with the names of vLLM's `kv_transfer_params`.
//!
//! What it is: typed forms of that JSON in both directions, and the decisions that hang on it. What
//! it is not: a router, or a protocol; it does no I/O, and the pages are only read under what the
//! workers agree on themselves.
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
//! | `do_remote_decode` | to P: keep the KV for a decode worker. With the keys below: D keeps the last turn's |
//! | `do_remote_prefill` | to D: the KV lies at a prefill worker, see the keys below |
//! | `remote_engine_id`, `remote_request_id`, `remote_host`, `remote_port` | who holds it, under which id |
//! | `remote_block_ids` | its pages, a list for each group of layers |
//! | `tp_size`, `dcp_size`, `pp_size` | the holder's parallel sizes |
//! | `remote_num_tokens` | tokens whose KV is there |
//! | `remote_blocks_expiry_time` | when the pages go, by the holder's clock |
//! | `remote_registration_generation` | counts the holder's registrations |
//! | `transfer_mode` | `pull`, `push` or (ours) `auto` |
//! | `remote_dp_rank` | ours: the holder's data-parallel replica |
//! | `kv_leases` | ours, see [`Leases`]: the holder's sessions by incarnation and number, and the lease as a duration |
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
//! # let lease_refs = [LeaseRef { incarnation: Incarnation::from_random(77), lease_id: SessionId(5), pages: None }];
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

/// Longest JSON text, in bytes: room for the page numbers of a few million tokens.
pub const MAX_PARAMS_BYTES: usize = 16 << 20;
/// Most pages that `remote_block_ids` may name, all groups together.
pub const MAX_BLOCKS: usize = 1 << 20;
/// Most groups of layers.
pub const MAX_GROUPS: usize = 64;
/// Most ranks of a parallel group, and most leases.
pub const MAX_RANKS: u32 = 4096;
/// Most keys that are not known here.
pub const MAX_UNKNOWN_KEYS: usize = 64;

/// What travels with one request, in one direction.
#[derive(Debug, Clone, PartialEq)]
pub struct TransferParams {
    /// Where it goes, and what it says about KV that exists already.
    pub leg: Leg,
    /// Who starts the data operations (`transfer_mode`); `None` leaves it to the workers.
    pub mode: Option<TransferMode>,
    /// Keys that are not known here. They are kept as they are: others on the way may know them.
    pub unknown: Map<String, Value>,
}

/// Where a request goes.
#[derive(Debug, Clone, PartialEq)]
pub enum Leg {
    /// To a worker that computes it from beginning to end: neither flag is set.
    Local,
    /// To a prefill worker, whose KV a decode worker continues (`do_remote_decode`).
    Prefill {
        /// What a decode worker still has of the turns before.
        cached: Option<Box<RemoteKv>>,
    },
    /// To a decode worker (`do_remote_prefill`).
    Decode {
        /// What the prefill worker has computed; in push mode what it is about to compute.
        remote: Box<RemoteKv>,
    },
}

impl TransferParams {
    /// From the router to a prefill worker, for a prompt of which nothing is computed.
    pub fn prefill(mode: TransferMode) -> TransferParams {
        TransferParams { leg: Leg::Prefill { cached: None }, mode: Some(mode), unknown: Map::new() }
    }

    /// From a prefill worker to a decode worker, through the router: where the KV lies. In push mode
    /// a router may write it itself, and send it beside the prompt.
    pub fn decode(mode: TransferMode, remote: RemoteKv) -> TransferParams {
        let leg = Leg::Decode { remote: Box::new(remote) };
        TransferParams { leg, mode: Some(mode), unknown: Map::new() }
    }

    /// From a decode worker to the prefill worker of the next turn, through the router: what it
    /// keeps of this one. Pulling is the only way back.
    pub fn next_turn(cached: RemoteKv) -> TransferParams {
        let leg = Leg::Prefill { cached: Some(Box::new(cached)) };
        TransferParams { leg, mode: Some(TransferMode::Pull), unknown: Map::new() }
    }

    /// True for a prefill worker.
    pub fn is_prefill(&self) -> bool {
        matches!(self.leg, Leg::Prefill { .. })
    }

    /// The KV that lies elsewhere, in either direction.
    pub fn remote(&self) -> Option<&RemoteKv> {
        match &self.leg {
            Leg::Local => None,
            Leg::Prefill { cached } => cached.as_deref(),
            Leg::Decode { remote } => Some(remote),
        }
    }
}
