//! Where the KV of a request lies, on whichever side holds it.

use std::time::Duration;

use kv_core::{EngineId, Incarnation, KvArgs, Lease, LeaseRef, PageList, Room, SessionId, SessionOptions};

use super::error::ParamsError;

/// Where the KV of a request lies: what P says about the pages it keeps for D, and on the next turn
/// D about those it keeps for P.
#[derive(Debug, Clone, PartialEq)]
pub struct RemoteKv {
    /// The engine that holds it (`remote_engine_id`).
    pub engine: EngineId,
    /// The request, as the holder knows it (`remote_request_id`; a numbered room travels as its
    /// decimal digits, and once more as `bootstrap_room` in [`Leases`]).
    pub room: Room,
    /// Where the engine answers handshakes (`remote_host`): for this framework's engines the host of
    /// the bootstrap server that they are registered with.
    pub host: String,
    /// The port there (`remote_port`).
    pub port: u16,
    /// Its pages, for each group of layers (`remote_block_ids`). Empty in push mode, where nobody
    /// reads them.
    pub block_ids: Vec<PageList>,
    /// Tensor-parallel ranks of the engine (`tp_size`).
    pub tp_size: u32,
    /// Decode-context-parallel ranks (`dcp_size`).
    pub dcp_size: u32,
    /// Pipeline stages (`pp_size`).
    pub pp_size: u32,
    /// The data-parallel replica that holds the pages (`remote_dp_rank`, ours). vLLM's replicas are
    /// engines of their own.
    pub dp_rank: Option<u32>,
    /// Tokens whose KV is there (`remote_num_tokens`).
    pub num_tokens: Option<u32>,
    /// When the pages go, in seconds of the holder's own clock (`remote_blocks_expiry_time`); only
    /// who knows how that clock stands to its own can use it, see
    /// [`remaining`](RemoteKv::remaining).
    pub expiry_time: Option<f64>,
    /// Counts the holder's registrations of its memory (`remote_registration_generation`).
    pub registration_generation: Option<u64>,
    /// What this framework adds (`kv_leases`); vLLM's engines have none.
    pub leases: Option<Leases>,
}

/// What this framework adds to vLLM's fields, under the one key `kv_leases`.
#[derive(Debug, Clone, PartialEq)]
pub struct Leases {
    /// The bootstrap server, `host:port` (`bootstrap_addr`).
    pub bootstrap_addr: String,
    /// Pages that the holder's sessions announced (`num_pages`).
    pub num_pages: u32,
    /// For how long they are kept, from the moment when the holder said so (`lease_seconds`).
    pub lease: Duration,
    /// Heartbeats prolong it (`lease_renewable`): so on P. D keeps pages for a fixed time.
    pub renewable: bool,
    /// One for each rank of the replica (`ranks`).
    pub ranks: Vec<RankLease>,
}

/// Names one rank's session exactly: a restarted rank, or a second session for the same request, is
/// another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankLease {
    /// The rank within its engine.
    pub rank: u32,
    /// Its life.
    pub incarnation: Incarnation,
    /// The number of its session.
    pub lease_id: SessionId,
}

impl RemoteKv {
    /// KV of a request on `engine`, which is reached through the bootstrap server at `host:port`; one
    /// rank, nothing known about pages yet.
    pub fn new(engine: EngineId, room: Room, host: &str, port: u16) -> RemoteKv {
        RemoteKv {
            engine,
            room,
            host: host.to_owned(),
            port,
            block_ids: Vec::new(),
            tp_size: 1,
            dcp_size: 1,
            pp_size: 1,
            dp_rank: None,
            num_tokens: None,
            expiry_time: None,
            registration_generation: None,
            leases: None,
        }
    }

    /// What a worker says of one of its sessions: this rank has the KV of `num_tokens` tokens in
    /// `pages`, and keeps it under `lease`, which runs from now. `bootstrap_addr` (`host:port`) is
    /// where the worker is registered, `lease_refs` what its session's `KvSender::lease_refs` says: the
    /// lease of the worker's rank, and those of the ranks after it if it speaks for them too.
    pub fn granted(
        args: &KvArgs,
        bootstrap_addr: &str,
        room: Room,
        num_tokens: u32,
        pages: &PageList,
        lease_refs: &[LeaseRef],
        lease: Lease,
    ) -> Result<RemoteKv, ParamsError> {
        let (host, port) = host_and_port(bootstrap_addr)?;
        let parallel = args.geometry().parallel;
        let ranks = (args.worker().rank..).zip(lease_refs);
        let ranks = ranks.map(|(rank, lease)| {
            let LeaseRef { incarnation, lease_id, .. } = *lease;
            RankLease { rank, incarnation, lease_id }
        });
        let leases = Leases {
            bootstrap_addr: bootstrap_addr.to_owned(),
            num_pages: u32::try_from(pages.len()).unwrap_or(u32::MAX),
            lease: lease.duration(),
            renewable: matches!(lease, Lease::Renewable(_)),
            ranks: ranks.collect(),
        };
        Ok(RemoteKv {
            block_ids: vec![pages.clone()],
            tp_size: parallel.tp_size,
            pp_size: parallel.pp_size,
            dcp_size: args.geometry().layout.dcp_size,
            dp_rank: Some(parallel.dp_rank),
            num_tokens: Some(num_tokens),
            leases: Some(leases),
            ..RemoteKv::new(args.worker().engine.clone(), room, host, port)
        })
    }

    /// What a receiver of this KV is opened with, besides `options`: the replica, and the leases of
    /// its ranks. Its room is [`room`](Self::room).
    pub fn reader_options(&self, options: SessionOptions) -> SessionOptions {
        let ranks = self.leases.iter().flat_map(|leases| &leases.ranks);
        let lease_refs = ranks.filter_map(|lease| self.lease_ref(lease.rank)).collect();
        SessionOptions { prefill_dp_rank: self.dp_rank.or(options.prefill_dp_rank), lease_refs, ..options }
    }

    /// The bootstrap server to ask for the engine's ranks.
    pub fn bootstrap_addr(&self) -> String {
        match &self.leases {
            Some(leases) => leases.bootstrap_addr.clone(),
            None if self.host.contains(':') => format!("[{}]:{}", self.host, self.port),
            None => format!("{}:{}", self.host, self.port),
        }
    }

    /// Pages that the holder has for the request, all groups together; `None` if it did not say.
    pub fn num_pages(&self) -> Option<usize> {
        let listed = || self.block_ids.iter().map(PageList::len).sum();
        match &self.leases {
            Some(leases) => Some(leases.num_pages as usize),
            None => (!self.block_ids.is_empty()).then(listed),
        }
    }

    /// The pages of a cache with one group of layers; `None` if there are several, or none was
    /// named.
    pub fn pages(&self) -> Option<&PageList> {
        match self.block_ids.as_slice() {
            [pages] => Some(pages),
            _ => None,
        }
    }

    /// The session of one rank of the holder, with the pages if there is one group of them: a holder
    /// with others refuses. Not with pages that are dealt to ranks in turn: of the last number, not
    /// every rank has one.
    pub fn lease_ref(&self, rank: u32) -> Option<LeaseRef> {
        let lease = self.leases.as_ref()?.ranks.iter().find(|lease| lease.rank == rank)?;
        let RankLease { incarnation, lease_id, .. } = *lease;
        Some(LeaseRef { incarnation, lease_id, pages: self.pages().filter(|_| self.dcp_size <= 1).cloned() })
    }

    /// For how long the pages are still kept, as far as the parameters tell; `None` if they do not.
    ///
    /// `holder_clock`: what the holder's clock says now, in seconds, where the reader knows it (vLLM
    /// measures the offset in its handshake). Without it the lease counts in full, as if it had just
    /// been granted: take off the time that the parameters were kept for with [`aged`](Self::aged).
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

    /// The same after the parameters have been kept for `elapsed`: what a router does that keeps
    /// them from one turn to the next.
    pub fn aged(mut self, elapsed: Duration) -> RemoteKv {
        if let Some(leases) = &mut self.leases {
            leases.lease = leases.lease.saturating_sub(elapsed);
        }
        self
    }
}

/// The parts of `host:port`; brackets around an IPv6 address are no part of it.
pub(super) fn host_and_port(addr: &str) -> Result<(&str, u16), ParamsError> {
    let parts = addr.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    match parts {
        Some((host, port)) if !host.is_empty() && !addr.chars().any(char::is_control) => {
            Ok((host.trim_matches(['[', ']']), port))
        }
        _ => Err(ParamsError::Type { field: "bootstrap_addr", expected: "host:port", got: addr.into() }),
    }
}
