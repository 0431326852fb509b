//! Where the KV of a request is: the engine, the pages, and the leases under which they may be read.

use std::sync::Arc;
use std::time::Duration;

use kv_core::{
    EngineId, Incarnation, KvArgs, Lease, LeaseRef, PageList, RemoteRequest, RequestId, Room, SessionId,
    SessionOptions, TransferMode,
};

use super::error::ParamsError;

/// Where the KV of a request is: what a prefill worker says about the pages that it keeps for a decode
/// worker, and on the next turn a decode worker about the pages that it keeps for a prefill worker. The
/// worker that keeps the pages is called the holder here, the other one the reader.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RemoteKv {
    /// The engine that holds the KV (`remote_engine_id`).
    pub engine: EngineId,
    /// The request's room at the holder (`remote_request_id`). A numbered room travels as its decimal digits,
    /// and once more as the number `bootstrap_room` in `kv_leases`; a router that drops `kv_leases` leaves
    /// the digits as a request id.
    ///
    /// `None` only to a decode worker, from a router that writes the parameters of push mode before the
    /// prefill worker has answered. The decode worker then takes its own id of the request, with which a
    /// prefill worker compares its own, both without suffixes:
    /// `remote.with(|remote| _ = remote.room.get_or_insert(own))`.
    pub room: Option<Room>,
    /// The mode of the holder, as the parameters say (`transfer_mode`); the mode of the [`TransferParams`] that hold
    /// this. `None` if the parameters do not say.
    ///
    /// [`TransferParams`]: super::TransferParams
    pub mode: Option<TransferMode>,
    /// The host where the engine answers handshakes (`remote_host`). vLLM's engines dial ZMQ there, and a
    /// holder that serves them puts its side channel there, see [`side_channel`](Self::side_channel). For
    /// holders without a side channel this is the host of their bootstrap server.
    pub host: String,
    /// The port on `host` (`remote_port`), from 1.
    pub port: u16,
    /// The request's pages at the holder, one list for each cache group (`remote_block_ids`). Empty in push
    /// mode, where the holder writes and nobody reads.
    pub block_ids: Vec<PageList>,
    /// Tensor-parallel ranks of the engine (`tp_size`), from 1. `None` if the JSON does not say: one rank.
    /// vLLM's decode engines need the key in push mode, and for their heartbeats.
    pub tp_size: Option<u32>,
    /// Decode-context-parallel ranks of the engine (`dcp_size`), from 1. `None` if the JSON does not say: one.
    pub dcp_size: Option<u32>,
    /// Pipeline stages of the engine (`pp_size`), from 1. `None` if the JSON does not say: one stage.
    pub pp_size: Option<u32>,
    /// The data-parallel replica that holds the pages (`remote_dp_rank`, a key that vLLM does not have: its
    /// replicas are engines of their own).
    pub dp_rank: Option<u32>,
    /// Tokens whose KV the holder has (`remote_num_tokens`); `None` if the holder did not say.
    pub num_tokens: Option<u32>,
    /// When the holder frees the pages, in seconds of the holder's own clock (`remote_blocks_expiry_time`).
    /// vLLM's decode engines say so for the next turn; a prefill engine's pages live as long as heartbeats
    /// come. Of use only to a reader that knows the difference between the two clocks, see
    /// [`remaining`](RemoteKv::remaining).
    pub expiry_time: Option<f64>,
    /// How often the holder has registered its memory (`remote_registration_generation`).
    pub registration_generation: Option<u64>,
    /// The leases of the holder's ranks (`kv_leases`); `None` from vLLM's engines, which have no such key.
    pub leases: Option<Leases>,
}

/// What this library adds to vLLM's fields, as one JSON object under the key `kv_leases`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Leases {
    /// The bootstrap server of the holder's engine, as `host:port` (`bootstrap_addr`).
    pub bootstrap_addr: String,
    /// Pages of the request that the holder's sessions announced (`num_pages`).
    pub num_pages: u32,
    /// Tokens that one page number of the holder stands for (`page_size`): its page size times its
    /// decode-context-parallel ranks. `None` if the holder did not say.
    pub page_size: Option<u32>,
    /// For how long the pages are kept, counted from the moment when the holder wrote the parameters
    /// (`lease_seconds`), at most a week.
    pub lease: Duration,
    /// True if the reader's heartbeats prolong the lease (`lease_renewable`). Prefill workers set this;
    /// decode workers keep pages for a fixed time.
    pub renewable: bool,
    /// The lease of each rank of the replica (`ranks`), no rank twice.
    pub ranks: Vec<RankLease>,
}

/// Names the lease of one rank exactly: neither a restarted rank nor a second session for the same request
/// answers to the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankLease {
    /// The rank's number within its engine.
    pub rank: u32,
    /// The incarnation of the rank's worker: a restarted worker has another one.
    pub incarnation: Incarnation,
    /// The number of the rank's session, which names the lease within the incarnation.
    pub lease_id: SessionId,
}

impl Leases {
    /// Leases of `num_pages` pages that are kept for `lease`. No rank is named yet, and heartbeats do not
    /// prolong the leases: set the fields that say otherwise.
    pub fn new(bootstrap_addr: &str, num_pages: u32, lease: Duration) -> Leases {
        let bootstrap_addr = bootstrap_addr.to_owned();
        Leases { bootstrap_addr, num_pages, page_size: None, lease, renewable: false, ranks: Vec::new() }
    }

    /// The same with some fields changed: `leases.with(|leases| leases.renewable = true)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

impl RankLease {
    /// The lease of session `lease_id` on rank number `rank`, in this incarnation of the rank's worker.
    pub fn new(rank: u32, incarnation: Incarnation, lease_id: SessionId) -> RankLease {
        RankLease { rank, incarnation, lease_id }
    }

    fn refers_to(&self, pages: Option<&Arc<PageList>>) -> LeaseRef {
        let lease_ref = LeaseRef::new(self.incarnation, self.lease_id);
        match pages {
            Some(pages) => lease_ref.of_pages(Arc::clone(pages)),
            None => lease_ref,
        }
    }
}

impl RemoteKv {
    /// KV of a request on `engine`, which answers handshakes at `host:port` (for this library's engines:
    /// the bootstrap server that their ranks are registered with). All parallel sizes are 1, and everything
    /// about pages, tokens and leases is left open: set the fields that are known.
    pub fn new(engine: EngineId, room: impl Into<Option<Room>>, host: &str, port: u16) -> RemoteKv {
        RemoteKv {
            engine,
            room: room.into(),
            mode: None,
            host: host.to_owned(),
            port,
            block_ids: Vec::new(),
            tp_size: Some(1),
            dcp_size: Some(1),
            pp_size: Some(1),
            dp_rank: None,
            num_tokens: None,
            expiry_time: None,
            registration_generation: None,
            leases: None,
        }
    }

    /// The same with some fields changed: `remote.with(|remote| remote.num_tokens = Some(40))`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// What a worker says of one of its sessions: `pages` hold the KV of `num_tokens` tokens, and are kept
    /// under `lease`, which runs from now.
    ///
    /// `bootstrap_addr` (`host:port`) is the bootstrap server where the worker is registered. `lease_refs` is
    /// what the session's `KvSender::lease_refs` returns: the lease of the worker's own rank first, and for
    /// an engine group those of the ranks that follow.
    ///
    /// The bootstrap server is also what `remote_host` and `remote_port` say, until
    /// [`side_channel`](Self::side_channel) says otherwise.
    ///
    /// # Errors
    ///
    /// [`ParamsError::Type`] if `bootstrap_addr` is not `host:port`.
    pub fn granted(
        args: &KvArgs,
        bootstrap_addr: &str,
        room: Room,
        num_tokens: u32,
        pages: &PageList,
        lease_refs: &[LeaseRef],
        lease: Lease,
    ) -> Result<RemoteKv, ParamsError> {
        let (host, port) = host_and_port("bootstrap_addr", bootstrap_addr)?;
        let parallel = args.geometry().parallel;
        let ranks = (args.worker().rank..).zip(lease_refs);
        let ranks = ranks.map(|(rank, lease)| {
            let LeaseRef { incarnation, lease_id, .. } = *lease;
            RankLease { rank, incarnation, lease_id }
        });
        let leases = Leases {
            bootstrap_addr: bootstrap_addr.to_owned(),
            num_pages: u32::try_from(pages.len()).unwrap_or(u32::MAX),
            page_size: Some(args.geometry().page_tokens()),
            lease: lease.duration(),
            renewable: matches!(lease, Lease::Renewable(_)),
            ranks: ranks.collect(),
        };
        Ok(RemoteKv {
            block_ids: vec![pages.clone()],
            tp_size: Some(parallel.tp_size),
            pp_size: Some(parallel.pp_size),
            dcp_size: Some(args.geometry().layout.dcp_size),
            dp_rank: Some(parallel.dp_rank),
            num_tokens: Some(num_tokens),
            leases: Some(leases),
            ..RemoteKv::new(args.worker().engine.clone(), room, host, port)
        })
    }

    /// The same with the side channel at `addr` (`host:port`) in `remote_host` and `remote_port`, where vLLM's
    /// engines shake hands. Readers of this library still find the bootstrap server in `kv_leases`.
    ///
    /// # Errors
    ///
    /// [`ParamsError::Type`] if `addr` is not `host:port`.
    pub fn side_channel(mut self, addr: &str) -> Result<RemoteKv, ParamsError> {
        let (host, port) = host_and_port("side_channel", addr)?;
        (self.host, self.port) = (host.to_owned(), port);
        Ok(self)
    }

    /// `options` with the data-parallel replica, the leases of the holder's ranks, and the
    /// [`remote_request`](Self::remote_request) filled in: open the receiver of this KV with the result,
    /// under the room [`room`](Self::room).
    pub fn reader_options(&self, options: SessionOptions) -> SessionOptions {
        // One list for all ranks: a client may name many of both.
        let pages = self.leased_pages().cloned().map(Arc::new);
        let ranks = self.leases.iter().flat_map(|leases| &leases.ranks);
        let lease_refs = ranks.map(|lease| lease.refers_to(pages.as_ref())).collect();
        options.with(|options| {
            options.prefill_dp_rank = self.dp_rank.or(options.prefill_dp_rank);
            options.lease_refs = lease_refs;
            options.remote = self.remote_request().map(Box::new);
        })
    }

    /// These parameters as a receiver of another dialect needs them. A numbered room is the request id of its
    /// decimal digits. `None` if the parameters name no room.
    pub fn remote_request(&self) -> Option<RemoteRequest> {
        let request = match self.room.as_ref()? {
            Room::Request(request) => request.clone(),
            Room::Number(number) => RequestId::new(&number.to_string()).ok()?,
        };
        Some(RemoteRequest::new(self.engine.clone(), request).with(|remote| {
            remote.mode = self.mode;
            remote.block_ids.clone_from(&self.block_ids);
            remote.tp_size = self.tp_size.unwrap_or(1);
            remote.pp_size = self.pp_size.unwrap_or(1);
            remote.dcp_size = self.dcp_size.unwrap_or(1);
            remote.num_tokens = self.num_tokens;
            remote.registration_generation = self.registration_generation;
            remote.expires_at = self.expiry_time.and_then(|time| Duration::try_from_secs_f64(time).ok());
        }))
    }

    /// The address to open the receiver with, as `host:port`: the bootstrap server that the leases name, else
    /// `remote_host` and `remote_port`, which for an engine of vLLM is its side channel.
    pub fn bootstrap_addr(&self) -> String {
        match &self.leases {
            Some(leases) => leases.bootstrap_addr.clone(),
            None if self.host.contains(':') => format!("[{}]:{}", self.host, self.port),
            None => format!("{}:{}", self.host, self.port),
        }
    }

    /// Pages that the holder has for the request, all cache groups together; `None` if the holder did not
    /// say.
    pub fn num_pages(&self) -> Option<usize> {
        let listed = || self.block_ids.iter().map(PageList::len).sum();
        match &self.leases {
            Some(leases) => Some(leases.num_pages as usize),
            None => (!self.block_ids.is_empty()).then(listed),
        }
    }

    /// The request's pages at a holder with one cache group; `None` if there are several groups, or the
    /// holder named no pages.
    pub fn pages(&self) -> Option<&PageList> {
        match self.block_ids.as_slice() {
            [pages] => Some(pages),
            _ => None,
        }
    }

    /// Pages that the holder has for the prompt, in the holder's numbers: of several cache groups the longest
    /// list counts, because groups with a window list only the pages of the window.
    pub(super) fn held(&self) -> Option<usize> {
        match &self.leases {
            Some(leases) => Some(leases.num_pages as usize),
            None => self.block_ids.iter().map(PageList::len).max(),
        }
    }

    /// The lease of one rank of the holder; `None` if the parameters name no lease of that rank.
    ///
    /// The lease names the pages too if there is one cache group, and the holder then refuses a reader if its
    /// session has other pages. With decode context parallelism (`dcp_size` above 1) the pages are left out:
    /// the ranks hold pages in turn, so not every rank has a page for the last number of the list.
    pub fn lease_ref(&self, rank: u32) -> Option<LeaseRef> {
        let lease = self.leases.as_ref()?.ranks.iter().find(|lease| lease.rank == rank)?;
        Some(lease.refers_to(self.leased_pages().cloned().map(Arc::new).as_ref()))
    }

    /// The pages under the lease of each rank, if they are the same.
    fn leased_pages(&self) -> Option<&PageList> {
        self.pages().filter(|_| self.dcp_size.unwrap_or(1) <= 1)
    }

    /// For how long the holder still keeps the pages, as far as the parameters tell; `None` if they do not.
    ///
    /// `holder_clock` is what the holder's clock says now, in seconds, where the reader knows that (vLLM
    /// measures the offset in its handshake). Without `holder_clock`, the lease counts in full, as if the
    /// holder had just granted it: subtract the time that the parameters have been kept with
    /// [`aged`](Self::aged).
    pub fn remaining(&self, holder_clock: Option<f64>) -> Option<Duration> {
        let by_clock = match (self.expiry_time, holder_clock) {
            (Some(expiry), Some(now)) => {
                Some(Duration::try_from_secs_f64((expiry - now).max(0.0)).unwrap_or(Duration::MAX))
            }
            _ => None,
        };
        let by_lease = self.leases.as_ref().map(|leases| leases.lease);
        match (by_clock, by_lease) {
            (Some(clock), Some(lease)) => Some(clock.min(lease)),
            (known, None) | (None, known) => known,
        }
    }

    /// These parameters after they have been kept for `elapsed`: the lease is shorter by that time. For
    /// routers, which keep parameters from one turn of a chat to the next.
    pub fn aged(mut self, elapsed: Duration) -> RemoteKv {
        if let Some(leases) = &mut self.leases {
            leases.lease = leases.lease.saturating_sub(elapsed);
        }
        self
    }
}

/// The host and the port of `host:port`; the brackets around an IPv6 address are removed.
pub(super) fn host_and_port<'a>(field: &'static str, addr: &'a str) -> Result<(&'a str, u16), ParamsError> {
    let parts = addr.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    match parts {
        Some((host, port)) if !host.is_empty() && !addr.chars().any(char::is_control) => {
            Ok((host.trim_matches(['[', ']']), port))
        }
        _ => Err(ParamsError::Type { field, expected: "host:port", got: addr.into() }),
    }
}
